"""The specification of multi-scale deformable attention in plain PyTorch, on any device and in any dtype.

Deformable DETR (https://arxiv.org/abs/2010.04159), equation 3. Shape symbols: B batch, Q queries, S = sum of H_l·W_l,
M heads, D channels per head, L levels, P points over all levels (level by level), C coordinates of a reference (2, 4).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Sizes = Sequence[tuple[int, int]]


def msda(
    value: Tensor,
    sizes: Sizes,
    starts: Sequence[int],
    reference: Tensor | None,
    points: Tensor,
    weights: Tensor,
    num_points: Sequence[int],
    *,
    softmax: bool,
    offset_scale: float,
) -> Tensor:
    """Samples every level of `value` bilinearly at P points per query and head and sums them by weight.

    Coordinates and sums are in float32, or in float64 where an operand is. A point whose location is not finite, or
    more than a pixel outside, contributes zero, also to the gradients.

    Args:
        value: (B, S, M, D).
        sizes: (H, W) per level, in pixels.
        starts: index of each level's first row in the S axis.
        reference: (B, Q, L or 1, C) in 0..1 over the image, or None: then `points` are locations.
        points: (B, Q, M, P, 2) as (x, y). Locations in 0..1; or offsets, in pixels of the level for C = 2, in units
            of `offset_scale`·(w, h)/K_l for C = 4.
        weights: (B, Q, M, P), normalised, or logits when `softmax`.
        num_points: K_l, points per level; they sum to P.
        softmax: normalise the weights over P.
        offset_scale: factor of the offsets for C = 4.

    Returns:
        (B, Q, M·D) in value's dtype.
    """
    batch, _, heads, channels = value.shape
    queries = points.shape[1]
    operands = [t.dtype for t in (value, reference, points, weights) if t is not None]
    dtype = torch.float64 if torch.float64 in operands else torch.float32
    weights = weights.to(dtype)
    if softmax:
        weights = weights.softmax(-1)
    rows = value.to(dtype).transpose(1, 2)  # B M S D
    if not value.shape[1]:
        # Levels without pixels: nothing is sampled, but there has to be a row to look up.
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 1))
    output = value.new_zeros((batch, heads, queries, channels), dtype=dtype)
    first = 0
    for level, ((height, width), start, count) in enumerate(zip(sizes, starts, num_points, strict=True)):
        o_p = slice(first, first + count)
        first += count
        x, y = pixels(points[:, :, :, o_p].to(dtype), reference, level, height, width, count, offset_scale)
        inside = (x > -1) & (x < width) & (y > -1) & (y < height)
        x, y = x.where(inside, 0), y.where(inside, 0)
        x0, y0 = x.detach().floor(), y.detach().floor()
        fx, fy = x - x0, y - y0
        x0, y0 = x0.long(), y0.long()
        for yc, wy in ((y0, 1 - fy), (y0 + 1, fy)):
            for xc, wx in ((x0, 1 - fx), (x0 + 1, fx)):
                valid = inside & (xc >= 0) & (xc < width) & (yc >= 0) & (yc < height)
                weight = (weights[..., o_p] * (wx * wy).where(valid, 0)).transpose(1, 2)  # B M Q K
                index = (start + yc * width + xc).where(valid, 0).transpose(1, 2).flatten(2).unsqueeze(-1)
                sample = rows.gather(2, index.expand(-1, -1, -1, channels)).view(*weight.shape, channels)
                sample = sample.where(valid.transpose(1, 2).unsqueeze(-1), 0)
                output = output + (weight.unsqueeze(-1) * sample).sum(3)
    return output.transpose(1, 2).reshape(batch, queries, heads * channels).to(value.dtype)


def pixels(
    points: Tensor, reference: Tensor | None, level: int, height: int, width: int, count: int, offset_scale: float
) -> tuple[Tensor, Tensor]:
    """Turns one level's points (B, Q, M, K, 2) into pixel coordinates x, y, each (B, Q, M, K); 0 is a pixel centre."""
    x, y = points.unbind(-1)
    if reference is None:
        return x * width - 0.5, y * height - 0.5
    box = reference.to(points.dtype)[:, :, level if reference.shape[2] > 1 else 0, None, None]  # B Q 1 1 C
    if reference.shape[-1] == 2:
        return box[..., 0] * width - 0.5 + x, box[..., 1] * height - 0.5 + y
    scale = offset_scale / count
    return (
        (box[..., 0] + _product(x * scale, box[..., 2])) * width - 0.5,
        (box[..., 1] + _product(y * scale, box[..., 3])) * height - 0.5,
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a·b, or NaN where that is not finite; there the factors' gradients are zero instead of zero times infinity."""
    finite = (a * b).isfinite()
    return (a.where(finite, 0) * b.where(finite, 0)).where(finite, float("nan"))
