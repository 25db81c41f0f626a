"""Where each level lies in the value's rows: sizes and first rows, as numbers or as tensors on a device."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Sizes = Tensor | Sequence[Sequence[int]]
Starts = Tensor | Sequence[int] | None

_INTS = (torch.int64, torch.int32)


def count_levels(shapes: Sizes) -> int:
    """L, or a ValueError if `shapes` is not (L, 2)."""
    if isinstance(shapes, Tensor):
        if shapes.dim() == 2 and shapes.shape[1] == 2:
            return shapes.shape[0]
        raise ValueError(f"spatial_shapes has shape {tuple(shapes.shape)}: (L, 2) as (H, W) is expected")
    if not isinstance(shapes, Sequence):
        remedy = ", which .tolist() gives" if hasattr(shapes, "tolist") else ""
        name = type(shapes).__name__
        raise TypeError(f"spatial_shapes is a {name}: a tensor or a list of pairs (H, W) is expected{remedy}")
    for pair in shapes:
        if not hasattr(pair, "__len__") or len(pair) != 2:
            raise ValueError(f"spatial_shapes={shapes}: one pair (H, W) per level is expected")
    return len(shapes)


def numbers(values: Iterable) -> list:
    """`values` with numbers in place of tensors of one number, as those are different ones in every call."""
    return [value.item() if isinstance(value, Tensor) else value for value in values]


def level_starts(sizes: Sequence[tuple[int, int]]) -> list[int]:
    """First row of each level when the levels follow one another."""
    starts = [0]
    for height, width in sizes[:-1]:
        starts.append(starts[-1] + height * width)
    return starts


def host_layout(shapes: Sizes, starts: Starts, rows: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Sizes and first rows as numbers, checked against S = `rows`; waits for the GPU if they lie there."""
    for name, tensor in (("spatial_shapes", shapes), ("level_start_index", starts)):
        if isinstance(tensor, Tensor):
            _check_ints(name, tensor)
            if torch.compiler.is_compiling():
                raise ValueError(
                    f"{name} is a tensor on {tensor.device}, whose numbers a compiler cannot see: pass a list"
                )
    sizes = [(height, width) for height, width in (shapes.tolist() if isinstance(shapes, Tensor) else shapes)]
    _check_starts_type(starts)
    _check_numbers("spatial_shapes", (side for pair in sizes for side in pair))
    if starts is None:
        first_rows = level_starts(sizes)
    else:
        _check_starts(starts, len(sizes))
        first_rows = starts.tolist() if isinstance(starts, Tensor) else list(starts)
    _check_rows(sizes, first_rows, rows)
    total = sum(height * width for height, width in sizes)
    if starts is None and total != rows:
        raise ValueError(
            f"spatial_shapes={sizes} hold {total} pixels but value has {rows} rows; "
            "pass level_start_index if the levels do not simply follow one another"
        )
    return sizes, first_rows


def device_layout(shapes: Sizes, starts: Starts, rows: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Sizes and first rows as tensors on `device`, without waiting for it; checked where they are known here."""
    _check_starts_type(starts)
    if isinstance(shapes, Tensor) and shapes.device == device and device.type != "cpu":
        _check_ints("spatial_shapes", shapes)
        if starts is None:
            return shapes, None
        _check_starts(starts, shapes.shape[0])
        if isinstance(starts, Tensor):
            _check_ints("level_start_index", starts)
            if starts.device == device:
                return shapes, starts
            starts = starts.tolist()
        if min(starts) < 0 or max(starts) > rows:
            raise ValueError(f"level_start_index={list(starts)}: value has rows 0 to {rows}")
        return shapes, _device_tensor(tuple(starts), device)
    if _is_traced() or isinstance(shapes, Tensor) or isinstance(starts, Tensor):
        return _to_device(shapes, starts, rows, device)
    # The usual list: looked up by its numbers, so that they are checked and copied once.
    key = (tuple(map(tuple, shapes)), None if starts is None else tuple(starts), rows, device)
    found = _layouts.get(key)
    if found is None:
        found = _layouts.setdefault(key, _to_device(shapes, starts, rows, device))
    return found


_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def _is_traced() -> bool:
    """Whether a tracer looks on, which does not know tensors made before."""
    return torch.compiler.is_compiling() or any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


# CUDA graphs keep reading these small tensors, so none is ever evicted.
_layouts: dict[tuple, tuple[Tensor, Tensor | None]] = {}
_tensors: dict[tuple, Tensor] = {}
#: What lies at the address of each of `_tensors`.
_numbers: dict[int, tuple] = {}


def known_sizes(shapes: Tensor, starts: Tensor | None, rows: int) -> tuple[tuple[int, int], ...] | None:
    """Sizes of device tensors whose numbers are known here, if the levels follow one another through all rows."""
    sizes = _known(shapes)
    first_rows = () if starts is None else _known(starts)
    known = sizes is not None and first_rows is not None
    return sizes if known and _follow_one_another(sizes, first_rows, rows) else None


def pairs(sizes: list[int], rows: int) -> tuple[tuple[int, int], ...] | None:
    """The same of numbers H, W, H, W, …"""
    sizes = tuple(zip(sizes[::2], sizes[1::2], strict=True))
    return sizes if _follow_one_another(sizes, (), rows) else None


@lru_cache(maxsize=4096)
def _follow_one_another(sizes: tuple[tuple[int, int], ...], first_rows: tuple[int, ...], rows: int) -> bool:
    """`first_rows` is empty where they are not given."""
    fits = min(map(min, sizes)) >= 0 and sum(height * width for height, width in sizes) == rows
    return fits and list(first_rows or level_starts(sizes)) == level_starts(sizes)


def _known(tensor: Tensor) -> tuple | None:
    found = _numbers.get(tensor.data_ptr())
    if found is not None or tensor not in _learned:
        return found
    version, numbers, copied = _learned[tensor]
    # A captured graph reads the tensor anew at each replay.
    if version != tensor._version or torch.cuda.is_current_stream_capturing():
        return None
    if copied is not None:
        copied.synchronize()
        numbers = tuple(tuple(row) if isinstance(row, list) else row for row in numbers.tolist())
        _learned[tensor] = version, numbers, None
    return numbers


# By tensor: its version when it was copied, the copy, and the event after which that is there.
_learned = WeakTensorKeyDictionary()


def learn(*tensors: Tensor | None) -> None:
    """Begins to copy small device tensors here, without waiting; `known_sizes` looks at them later."""
    for tensor in tensors:
        # A tracer's stand-in has no numbers.
        if type(tensor) is not Tensor or not tensor.is_cuda or tensor.is_inference() or tensor.data_ptr() in _numbers:
            continue
        if tensor in _learned and _learned[tensor][0] == tensor._version:
            continue
        if torch.cuda.is_current_stream_capturing():
            return
        with torch.cuda.device(tensor.device):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        _learned[tensor] = tensor._version, copy, copied


def _to_device(shapes: Sizes, starts: Starts, rows: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    sizes, first_rows = host_layout(shapes, starts, rows)
    if not torch.compiler.is_compiling():
        # The kernels take a side above S for a mistake, in a level without pixels too.
        sizes = [(height, width) if max(height, width) <= rows else (0, 0) for height, width in sizes]
    return _device_tensor(tuple(sizes), device), None if starts is None else _device_tensor(tuple(first_rows), device)


def _device_tensor(numbers: tuple, device: torch.device) -> Tensor:
    """A small int64 tensor on `device`, made once."""
    if torch.compiler.is_compiling():
        return _traced_tensor(numbers, device)
    traced = _is_traced()
    if not traced and (numbers, device) in _tensors:
        return _tensors[numbers, device]
    # A tensor made in inference mode could not be saved for a later backward.
    with torch.inference_mode(False):
        tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
    if not traced:
        # Of two threads the first one's tensor is kept: another's address would be known and then be somebody else's.
        tensor = _tensors.setdefault((numbers, device), tensor)
        _numbers[tensor.data_ptr()] = numbers
    return tensor


def _traced_tensor(numbers: tuple, device: torch.device) -> Tensor:
    """The same in a graph, where numbers may be symbols: made on the device, as a constant is copied at each run."""
    rows = [row if isinstance(row, tuple | list) else (row,) for row in numbers]
    flat = [torch.full((), number, dtype=torch.int64, device=device) for row in rows for number in row]
    return torch.stack(flat).view(-1, 2) if len(rows[0]) == 2 else torch.stack(flat)


def _check_ints(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _INTS:
        raise TypeError(f"{name} has dtype {tensor.dtype}: use int64 or int32")


def _check_numbers(name: str, numbers: Iterable) -> None:
    for number in numbers:
        if number is None or isinstance(number, float | str | list | tuple):
            raise TypeError(f"{name} holds {number!r}: use integers")


def _check_starts_type(starts: Starts) -> None:
    if starts is not None and not isinstance(starts, Tensor | Sequence):
        raise TypeError(f"level_start_index is a {type(starts).__name__}: a tensor, a list or None is expected")


def _check_starts(starts: Tensor | Sequence[int], levels: int) -> None:
    if isinstance(starts, Tensor):
        if starts.shape != (levels,):
            raise ValueError(f"level_start_index has shape {tuple(starts.shape)}: ({levels},) is expected")
        return
    _check_numbers("level_start_index", starts)
    if len(starts) != levels:
        raise ValueError(f"level_start_index has {len(starts)} entries but there are {levels} levels")


def _check_rows(sizes: list[tuple[int, int]], starts: list[int], rows: int) -> None:
    for level, ((height, width), start) in enumerate(zip(sizes, starts, strict=True)):
        if height < 0 or width < 0 or start < 0 or start + height * width > rows:
            raise ValueError(
                f"spatial_shapes and level_start_index put level {level} ({height}×{width}) at rows {start} to "
                f"{start + height * width}, but value has {rows} rows"
            )
