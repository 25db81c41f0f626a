"""The functional operators: argument checks and the choice of backend.

Shape symbols: B batch, Q queries, S = sum of H_l·W_l, M heads, D channels per head, L levels, K points per level,
P points over all levels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deformops_models import ops, reference
from deformops_models.backend import Backend, resolve

Sizes = Tensor | Sequence[Sequence[int]]
Starts = Tensor | Sequence[int] | None

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTS = (torch.int64, torch.int32)
MAX_LEVELS = 64


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
            host are checked there; sizes on a GPU are checked in the kernel, which returns NaN if they do not fit S.
        level_start_index: (L,) first row of each level in S, or None: one level after the other, filling S.
        sampling_locations: (B, Q, M, L, K, 2) as (x, y), 0..1 over the image; or (B, Q, M, P, 2) with `num_points`.
        attention_weights: (B, Q, M, L, K) or (B, Q, M, L·K).
        method: "linear" takes the weights as they are, "softmax" takes logits and normalises them over L·K.
        num_points: points per level where they differ.
        backend: None picks the Triton kernels on CUDA and plain PyTorch otherwise; see `resolve`.
        fp32_grad_accum: None and True sum value's gradient in float32. False permits half precision where the GPU
            adds it natively: faster, but contributions below the sum's resolution are lost.

    Returns:
        (B, Q, M·D) in value's dtype.

    Raises:
        ValueError, TypeError: an argument does not fit; the text names argument, value and remedy.
        RuntimeError: the backend cannot run here.
    """
    if method not in ("linear", "softmax"):
        raise ValueError(f"method={method!r} is not known: use 'linear' or 'softmax'")
    points, counts = _flatten_points("sampling_locations", sampling_locations, spatial_shapes, num_points)
    weights = _flatten_weights("attention_weights", attention_weights, points, counts)
    options = (counts, method == "softmax", 1.0)
    return _run(value, spatial_shapes, level_start_index, None, points, weights, options, backend, fp32_grad_accum)


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
    points, counts = _flatten_points("sampling_offsets", sampling_offsets, spatial_shapes, num_points)
    weights = _flatten_weights("attention_logits", attention_logits, points, counts)
    _check_reference(reference_points, points, len(counts))
    options = (counts, True, float(offset_scale))
    return _run(
        value, spatial_shapes, level_start_index, reference_points, points, weights, options, backend, fp32_grad_accum
    )


def _run(value, shapes, starts, reference_points, points, weights, options, backend, fp32_grad_accum) -> Tensor:
    counts, softmax, offset_scale = options
    _check_value(value, points)
    names = ("sampling_locations", "attention_weights")
    if reference_points is not None:
        names = ("sampling_offsets", "attention_logits")
    operands = {"value": value, "reference_points": reference_points, names[0]: points, names[1]: weights}
    for name, tensor in operands.items():
        if tensor is None:
            continue
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"{name} has dtype {tensor.dtype}: use float32, float16, bfloat16 or float64")
        if tensor.device != value.device:
            raise ValueError(f"{name} is on {tensor.device} but value is on {value.device}: move it there")
    # float64 anywhere asks for the plain path.
    dtype = next((t.dtype for t in operands.values() if t is not None and t.dtype == torch.float64), value.dtype)
    if resolve(value.device, dtype, backend).backend is Backend.EAGER:
        sizes, first_rows = _host_layout(shapes, starts, len(counts), value.shape[1])
        return reference.msda(
            value, sizes, first_rows, reference_points, points, weights, counts,
            softmax=softmax, offset_scale=offset_scale,
        )  # fmt: skip
    shapes, starts = _device_layout(shapes, starts, len(counts), value)
    full_precision = fp32_grad_accum is not False
    return ops.msda_forward(
        value, shapes, starts, reference_points, points, weights, counts, softmax, offset_scale, full_precision
    )


def _flatten_points(name: str, points: Tensor, shapes: Sizes, num_points) -> tuple[Tensor, list[int]]:
    """Points as (B, Q, M, P, 2) and the count of each level."""
    levels = _count_levels(shapes)
    if not 1 <= levels <= MAX_LEVELS:
        raise ValueError(f"spatial_shapes has {levels} levels: 1 to {MAX_LEVELS} are supported")
    if points.shape[-1] != 2 or points.dim() not in (5, 6):
        raise ValueError(f"{name} has shape {tuple(points.shape)}: (B, Q, M, L, K, 2) is expected, or (B, Q, M, P, 2)")
    if points.dim() == 6:
        if points.shape[3] != levels:
            raise ValueError(f"{name} has {points.shape[3]} levels in its axis 3 but spatial_shapes has {levels}")
        if points.shape[4] < 1:
            raise ValueError(f"{name} has shape {tuple(points.shape)}: a level needs at least one point")
        if num_points is not None and list(num_points) != [points.shape[4]] * levels:
            raise ValueError(f"num_points={list(num_points)} does not fit {name} {tuple(points.shape)}: leave it out")
        return points.flatten(3, 4), [points.shape[4]] * levels
    if num_points is None:
        raise ValueError(f"{name} has a flat point axis {tuple(points.shape)}: pass num_points, the count per level")
    counts = [int(k) for k in num_points]
    if len(counts) != levels or min(counts) < 1 or sum(counts) != points.shape[3]:
        raise ValueError(
            f"num_points={counts} must hold {levels} positive counts that sum to {points.shape[3]}, {name}'s axis 3"
        )
    return points, counts


def _count_levels(shapes: Sizes) -> int:
    if isinstance(shapes, Tensor):
        if shapes.dim() == 2 and shapes.shape[1] == 2:
            return shapes.shape[0]
        raise ValueError(f"spatial_shapes has shape {tuple(shapes.shape)}: (L, 2) as (H, W) is expected")
    if not all(hasattr(pair, "__len__") and len(pair) == 2 for pair in shapes):
        raise ValueError(f"spatial_shapes={shapes}: one pair (H, W) per level is expected")
    return len(shapes)


def _flatten_weights(name: str, weights: Tensor, points: Tensor, counts: list[int]) -> Tensor:
    """Weights as (B, Q, M, P)."""
    flat = weights
    if weights.dim() == 5 and weights.shape[3] == len(counts):
        flat = weights.flatten(3)
    if flat.shape != points.shape[:-1]:
        raise ValueError(f"{name} has shape {tuple(weights.shape)}, the points ask for {tuple(points.shape[:-1])}")
    return flat


def _check_reference(reference_points: Tensor, points: Tensor, levels: int) -> None:
    shape = tuple(reference_points.shape)
    batch, queries = points.shape[:2]
    if len(shape) != 4 or shape[:2] != (batch, queries) or shape[2] not in (1, levels) or shape[3] not in (2, 4):
        raise ValueError(
            f"reference_points has shape {shape}: ({batch}, {queries}, {levels} or 1, 2 or 4) is expected; "
            "expand a batch axis of 1 with reference_points.expand"
        )


def _check_value(value: Tensor, points: Tensor) -> None:
    if value.dim() != 4:
        raise ValueError(f"value has shape {tuple(value.shape)}: (B, S, M, D) is expected, split the heads with .view")
    if value.shape[0] != points.shape[0] or value.shape[2] != points.shape[2]:
        raise ValueError(
            f"value {tuple(value.shape)} has batch {value.shape[0]} and {value.shape[2]} heads, "
            f"the points have {points.shape[0]} and {points.shape[2]}"
        )


def _check_layout(sizes: list[tuple[int, int]], starts: list[int], rows: int) -> None:
    for level, ((height, width), start) in enumerate(zip(sizes, starts, strict=True)):
        if isinstance(height, float) or isinstance(width, float) or isinstance(start, float):
            raise TypeError(
                f"spatial_shapes and level_start_index hold {height}, {width}, {start} for level {level}: use integers"
            )
        if height < 0 or width < 0 or start < 0 or start + height * width > rows:
            raise ValueError(
                f"spatial_shapes and level_start_index put level {level} ({height}×{width}) at rows {start} to "
                f"{start + height * width}, but value has {rows} rows"
            )


def _check_total(sizes: list[tuple[int, int]], rows: int) -> None:
    total = sum(height * width for height, width in sizes)
    if total != rows:
        raise ValueError(
            f"spatial_shapes={sizes} hold {total} pixels but value has {rows} rows; "
            "pass level_start_index if the levels do not simply follow one another"
        )


def _as_lists(shapes: Sizes, starts: Starts, levels: int) -> tuple[list[tuple[int, int]], list[int]]:
    pairs = shapes.tolist() if isinstance(shapes, Tensor) else shapes
    sizes = [(height, width) for height, width in pairs]
    if starts is None:
        return sizes, ops.level_starts(sizes)
    if isinstance(starts, Tensor):
        _check_starts(starts, levels)
        starts = starts.tolist()
    if len(starts) != levels:
        raise ValueError(f"level_start_index has {len(starts)} entries but there are {levels} levels")
    return sizes, list(starts)


def _host_layout(shapes: Sizes, starts: Starts, levels: int, rows: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Sizes and first rows as numbers, checked; waits for the GPU if they lie there."""
    for name, tensor in (("spatial_shapes", shapes), ("level_start_index", starts)):
        if isinstance(tensor, Tensor):
            _check_ints(name, tensor)
    sizes, first_rows = _as_lists(shapes, starts, levels)
    _check_layout(sizes, first_rows, rows)
    if starts is None:
        _check_total(sizes, rows)
    return sizes, first_rows


def _device_layout(shapes: Sizes, starts: Starts, levels: int, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Sizes and first rows as tensors on value's device, without waiting for it."""
    if isinstance(shapes, Tensor) and shapes.device == value.device and shapes.device.type != "cpu":
        _check_ints("spatial_shapes", shapes)
        if starts is None:
            return shapes, None
        if isinstance(starts, Tensor) and starts.device == value.device:
            _check_ints("level_start_index", starts)
            _check_starts(starts, levels)
            return shapes, starts
        starts = starts.tolist() if isinstance(starts, Tensor) else list(starts)
        return shapes, _device_tensor(tuple(starts), value.device)
    sizes, first_rows = _host_layout(shapes, starts, levels, value.shape[1])
    shapes = _device_tensor(tuple(sizes), value.device)
    return shapes, None if starts is None else _device_tensor(tuple(first_rows), value.device)


def _check_starts(starts: Tensor, levels: int) -> None:
    if starts.shape != (levels,):
        raise ValueError(f"level_start_index has shape {tuple(starts.shape)}: ({levels},) is expected")


def _check_ints(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _INTS:
        raise TypeError(f"{name} has dtype {tensor.dtype}: use int64 or int32")


_device_tensors: dict[tuple, Tensor] = {}


def _device_tensor(numbers: tuple, device: torch.device) -> Tensor:
    """A small int64 tensor on `device`, made once: CUDA graphs keep reading it, so none is ever evicted."""
    if torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    tensor = _device_tensors.get((numbers, device))
    if tensor is None:
        # A tensor made in inference mode could not be saved for a later backward.
        with torch.inference_mode(False):
            tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
        if type(tensor) is Tensor:
            _device_tensors[numbers, device] = tensor
    return tensor


msda.resolve = resolve
deformable_attention.resolve = resolve
multi_scale_deformable_attention = msda
