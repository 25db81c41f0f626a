"""The functional operators: argument checks and the choice of backend.

Shape symbols: B batch, Q queries, S = sum of H_l·W_l, M heads, D channels per head, L levels, K points per level,
P points over all levels.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from deformops_models import ops, reference
from deformops_models.backend import Backend, as_backend, resolve
from deformops_models.layout import Sizes, Starts, count_levels, device_layout, host_layout, numbers

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_LEVELS = 64

#: Shape, dtype and device of an operand: all that the checks look at.
Facts = tuple[torch.Size, torch.dtype, torch.device]


def msda(
    value: Tensor,
    spatial_shapes: Sizes,
    level_start_index: Starts,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    method: str = "linear",
    num_points: Sequence[int] | None = None,
    backend: Backend | str | None = None,
    fp32_grad_accum: bool | None = None,
) -> Tensor:
    """Multi-scale deformable attention (Deformable DETR, https://arxiv.org/abs/2010.04159) at given locations.

    A location samples pixel location·size − 0.5 bilinearly (`align_corners=False`); neighbours outside the level
    contribute zero, to the gradients too. A location that is not finite samples nothing. Coordinates and sums are in
    float32 whatever the operands' dtypes, which may differ; each gradient has its own operand's dtype.

    Args:
        value: (B, S, M, D), float32, float16, bfloat16 or float64.
        spatial_shapes: (L, 2) as (H, W) in pixels: an int32 or int64 tensor, or pairs of numbers. Sizes known on the
            host are checked there; sizes on a GPU are checked in the kernel, which returns NaN if they do not fit S,
            and whose gradients then are zero where a level does not fit.
        level_start_index: (L,) first row of each level in S, or None: one level after the other, filling S.
        sampling_locations: (B, Q, M, L, K, 2) as (x, y), 0..1 over the image; or (B, Q, M, P, 2) with `num_points`.
        attention_weights: (B, Q, M, L, K) or (B, Q, M, L·K), finite.
        method: "linear" takes the weights as they are, "softmax" takes logits and normalises them over L·K.
        num_points: points per level where they differ.
        backend: None picks the kernels on CUDA and plain PyTorch otherwise; see `resolve`.
        fp32_grad_accum: None and True sum value's gradient in float32. False permits Triton's kernels
            half precision where the GPU adds it natively: faster, but contributions below the sum's resolution are
            lost.

    Returns:
        (B, Q, M·D) in value's dtype.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names argument, value and remedy.
        RuntimeError: the backend cannot run here.
    """
    if method not in ("linear", "softmax"):
        raise ValueError(f"method={method!r} is not known: use 'linear' or 'softmax'")
    operands = {"value": value, "sampling_locations": sampling_locations, "attention_weights": attention_weights}
    options = (num_points, method == "softmax", 1.0, backend, fp32_grad_accum)
    return _run(operands, spatial_shapes, level_start_index, None, *options)


def deformable_attention(
    value: Tensor,
    spatial_shapes: Sizes,
    level_start_index: Starts,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    *,
    num_points: Sequence[int] | None = None,
    offset_scale: float = 0.5,
    backend: Backend | str | None = None,
    fp32_grad_accum: bool | None = None,
) -> Tensor:
    """Multi-scale deformable attention from what a layer's linears give: softmax and locations happen inside.

    Locations are reference + offset / (W, H) for two coordinates and xy + offset / K · (w, h) · offset_scale for
    four, computed in float32, so that half-precision offsets keep their accuracy on wide levels.

    Args:
        value, spatial_shapes, level_start_index, backend, fp32_grad_accum: as for `msda`.
        reference_points: (B, Q, L, 2) or (B, Q, L, 4) as (x, y[, w, h]), 0..1 over the image; L may be 1. Best kept
            in float32.
        sampling_offsets: (B, Q, M, L, K, 2), or (B, Q, M, P, 2) with `num_points`.
        attention_logits: (B, Q, M, L, K) or (B, Q, M, L·K), normalised here over L·K.
        num_points: points per level where they differ (RT-DETRv2, D-FINE, DEIMv2).
        offset_scale: factor of the offsets for four coordinates.

    Returns:
        (B, Q, M·D) in value's dtype.

    Raises:
        As `msda`.
    """
    operands = {"value": value, "sampling_offsets": sampling_offsets, "attention_logits": attention_logits}
    try:
        scale = float(offset_scale)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"offset_scale={offset_scale!r}: a number is expected") from error
    options = (num_points, True, scale, backend, fp32_grad_accum)
    if reference_points is None:
        raise TypeError("reference_points is None: a torch.Tensor is expected")
    return _run(operands, spatial_shapes, level_start_index, reference_points, *options)


def _run(
    operands: dict[str, Tensor],
    shapes: Sizes,
    starts: Starts,
    boxes: Tensor | None,
    num_points: Sequence[int] | None,
    softmax: bool,
    offset_scale: float,
    backend: Backend | str | None,
    fp32_grad_accum: bool | None,
) -> Tensor:
    for name, operand in operands.items():
        if not isinstance(operand, Tensor):
            raise TypeError(f"{name} is a {type(operand).__name__}: a torch.Tensor is expected")
    if boxes is not None and not isinstance(boxes, Tensor):
        raise TypeError(f"reference_points is a {type(boxes).__name__}: a torch.Tensor is expected")
    listed = num_points is None or isinstance(num_points, Sequence)
    if not listed or any(not isinstance(k, int) for k in num_points or ()):
        raise TypeError(f"num_points={num_points!r}: one whole number per level is expected")
    value, points, weights = operands.values()
    # The same shapes come again and again; a tracer's symbols and stand-ins cannot be looked up.
    lookup = type(value) is Tensor and not torch.compiler.is_compiling()
    counts, chosen = (_checked if lookup else _checked.__wrapped__)(
        tuple(operands),
        (value.shape, value.dtype, value.device),
        (points.shape, points.dtype, points.device),
        (weights.shape, weights.dtype, weights.device),
        None if boxes is None else (boxes.shape, boxes.dtype, boxes.device),
        count_levels(shapes),
        None if num_points is None else tuple(num_points),
        as_backend(backend),
    )
    if chosen is Backend.EAGER:
        sizes, first_rows = host_layout(shapes, starts, value.shape[1])
        points, weights = points.flatten(3, -2), weights.flatten(3)
        return reference.msda(
            value, sizes, first_rows, boxes, points, weights, counts, softmax=softmax, offset_scale=offset_scale
        )
    if not torch.compiler.is_compiling():
        ops.refuse_transforms()
    if not lookup and type(value).__name__ == "DTensor":
        raise TypeError("value is a DTensor: the kernels take local tensors, pass .to_local(), or backend='eager'")
    # The backward pass cannot ask what a copy of the tensors holds, nor a tensor in a graph.
    sizes = None
    if not isinstance(shapes, Tensor):
        numbered = numbers(side for pair in shapes for side in pair)
        shapes = list(zip(numbered[::2], numbered[1::2], strict=True))
        sizes = numbered if starts is None else None
    if isinstance(starts, Sequence):
        starts = numbers(starts)
    shapes, starts = device_layout(shapes, starts, value.shape[1], value.device)
    return ops.msda(
        value, shapes, starts, boxes, points, weights, counts, softmax, offset_scale, fp32_grad_accum is not False,
        None if backend is None else chosen.value, sizes,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _checked(
    names: tuple[str, ...],
    value: Facts,
    points: Facts,
    weights: Facts,
    boxes: Facts | None,
    levels: int,
    num_points: tuple[int, ...] | None,
    backend: Backend | None,
) -> tuple[list[int], Backend]:
    """Points per level and the backend, once all operands fit each other."""
    operands = dict(zip(names, (value, points, weights), strict=True))
    if boxes is not None:
        operands["reference_points"] = boxes
    counts = _count_points(names[1], points[0], levels, num_points)
    _check_weights(names[2], weights[0], points[0], counts)
    if boxes is not None:
        _check_reference(boxes[0], points[0], levels)
    _check_value(value[0], points[0])
    for name, (_, dtype, device) in operands.items():
        if dtype not in _FLOATS:
            raise TypeError(f"{name} has dtype {dtype}: use float32, float16, bfloat16 or float64")
        if device != value[2]:
            raise ValueError(f"{name} is on {device} but value is on {value[2]}: move it there")
    # float64 anywhere asks for the plain path.
    double = any(dtype == torch.float64 for _, dtype, _ in operands.values())
    chosen = resolve(value[2], torch.float64 if double else value[1], backend).backend
    if backend is not None and chosen is Backend.CUDA:
        from deformops_models.kernels.msda_cuda import problem

        # Its cache would only make a tracer warn; this function has one itself.
        empty = 0 in (*value[0], points[0][1])
        if not empty and (reason := problem.__wrapped__(value[0], points[0][1], tuple(counts))):
            raise RuntimeError(f"backend='cuda' cannot run: {reason}. Leave it out, or pass backend='triton'")
    return counts, chosen


def _count_points(name: str, shape: torch.Size, levels: int, num_points: tuple[int, ...] | None) -> list[int]:
    """Points of each level."""
    if not 1 <= levels <= MAX_LEVELS:
        raise ValueError(f"spatial_shapes has {levels} levels: 1 to {MAX_LEVELS} are supported")
    if len(shape) not in (5, 6) or shape[-1] != 2:
        raise ValueError(f"{name} has shape {tuple(shape)}: (B, Q, M, L, K, 2) is expected, or (B, Q, M, P, 2)")
    if len(shape) == 6:
        if shape[3] != levels:
            raise ValueError(f"{name} has {shape[3]} levels in its axis 3 but spatial_shapes has {levels}")
        if shape[4] < 1:
            raise ValueError(f"{name} has shape {tuple(shape)}: a level needs at least one point")
        if num_points is not None and list(num_points) != [shape[4]] * levels:
            raise ValueError(f"num_points={list(num_points)} does not fit {name} {tuple(shape)}: leave it out")
        return [shape[4]] * levels
    if num_points is None:
        raise ValueError(f"{name} has a flat point axis {tuple(shape)}: pass num_points, the count per level")
    counts = list(num_points)
    if len(counts) != levels or min(counts) < 1 or sum(counts) != shape[3]:
        raise ValueError(
            f"num_points={counts} must hold {levels} positive counts that sum to {shape[3]}, {name}'s axis 3"
        )
    return counts


def _check_weights(name: str, shape: torch.Size, points: torch.Size, counts: list[int]) -> None:
    flat = (*points[:3], sum(counts))
    split = (*points[:3], len(counts), counts[0])
    if tuple(shape) != flat and (tuple(shape) != split or any(count != counts[0] for count in counts)):
        raise ValueError(f"{name} has shape {tuple(shape)}, the points ask for {flat}")


def _check_reference(shape: torch.Size, points: torch.Size, levels: int) -> None:
    batch, queries = points[:2]
    if len(shape) != 4 or shape[:2] != (batch, queries) or shape[2] not in (1, levels) or shape[3] not in (2, 4):
        raise ValueError(
            f"reference_points has shape {tuple(shape)}: ({batch}, {queries}, {levels} or 1, 2 or 4) is expected; "
            "expand a batch axis of 1 with reference_points.expand"
        )


def _check_value(shape: torch.Size, points: torch.Size) -> None:
    if len(shape) != 4:
        raise ValueError(f"value has shape {tuple(shape)}: (B, S, M, D) is expected, split the heads with .view")
    if shape[0] != points[0] or shape[2] != points[2]:
        raise ValueError(
            f"value {tuple(shape)} has batch {shape[0]} and {shape[2]} heads, "
            f"the points have {points[0]} and {points[2]}"
        )


msda.resolve = resolve
deformable_attention.resolve = resolve
multi_scale_deformable_attention = msda
