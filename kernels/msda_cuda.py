"""The operators in CUDA C++, compiled by NVRTC: a forward, and a backward whose sums have a fixed order.

The kernels lie in cuda/: `forward.cu`; `points.cu` for the gradients of points, weights and reference; `sort.cu` and
`gather.cu` for the value's.
"""

import itertools
import math
import struct
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deformops_models.kernels._driver import current
from deformops_models.kernels._nvrtc import Kernel, Module

_FOLDER = Path(__file__).parent / "cuda"
_FILES = ("instructions.cuh", "sampling.cuh", "forward.cu", "points.cu", "sort.cu", "gather.cu")
_TYPES = {torch.float32: "float", torch.float16: "float16", torch.bfloat16: "bfloat16"}

#: Threads of a block, in the kernels of rows and in all others.
ROW_THREADS, THREADS = 128, 256
#: Logarithm of a count block's queries; fewer where shared memory is short.
CHUNK_BITS = (11, 10, 9)
#: Pixels of a tile of the value's gradient and the kinds of samples in it.
TILE_X, TILE_Y, KINDS = 8, 4, 4
#: Samples that a warp of the gather takes, and how many blocks a tile may fill.
WARP_SAMPLES, MOST_BLOCKS = 384, 8
#: Sorted samples at a time: they stay in the L2 cache from their writing to their reading.
RECORD_BYTES, RECORD = 24 << 20, 16

MAX_POINTS = 64  # all are unrolled
STATIC_BYTES = 2 << 10  # of shared memory, at most, that a block of the count and CUDA itself take beside
MAX_INDEX = 2**31 - 1
ALIGNMENT = 256  # bytes, of arrays in scratch memory


class Problem(NamedTuple):
    """What the kernels are compiled for."""

    value: torch.dtype
    points: torch.dtype
    weights: torch.dtype
    reference: torch.dtype
    channels: int
    heads: int
    num_points: tuple[int, ...]
    coordinates: int
    reference_levels: int
    softmax: bool


@lru_cache(maxsize=4096)
def problem(shape: torch.Size, queries: int, num_points: tuple[int, ...]) -> str | None:
    """Why these kernels cannot take a value (B, S, M, D), or None."""
    batch, rows, heads, channels = shape
    if channels not in (16, 32, 64, 128):
        return f"a head has {channels} channels, the CUDA kernels take 16, 32, 64 and 128"
    if sum(num_points) > MAX_POINTS:
        return f"a query has {sum(num_points)} points in a head, the CUDA kernels take up to {MAX_POINTS}"
    if 0 in (batch, rows, heads, queries):
        return "there is nothing to compute"
    if rows >= 2**27 or batch * heads >= 2**16 or batch * queries * heads * sum(num_points) > MAX_INDEX:
        return "the problem is too large for the CUDA kernels"
    return None


def _list(numbers: Iterable[int]) -> str:
    return "{" + ", ".join(map(str, numbers)) + "}"


def _sort_queries(num_points: tuple[int, ...]) -> int:
    """Queries of a block of the sort: as many as its shared memory has room for, in whole warps."""
    return 64 if sum(num_points) <= 32 else 32


def _warp_bits(channels: int) -> int:
    """Logarithm of the warps of a block of the gather: as many as its shared memory has room for."""
    return {16: 3, 32: 3, 64: 2, 128: 1}[channels]


def source(problem: Problem) -> str:
    """All kernels' text for one problem."""
    constants = {
        "VALUE": _TYPES[problem.value],
        "POINT": _TYPES[problem.points],
        "WEIGHT": _TYPES[problem.weights],
        "REFERENCE": _TYPES[problem.reference],
        "D": problem.channels,
        "M": problem.heads,
        "L": len(problem.num_points),
        "P": sum(problem.num_points),
        "NUM_POINTS": _list(problem.num_points),
        "C": problem.coordinates,
        "REF_LEVELS": problem.reference_levels,
        "SOFTMAX": int(problem.softmax),
        "THREADS": THREADS,
        "ROW_THREADS": ROW_THREADS,
        "SORT_QUERIES": _sort_queries(problem.num_points),
        "TILE_X": TILE_X,
        "TILE_Y": TILE_Y,
        "KINDS": KINDS,
        "WARP_BITS": _warp_bits(problem.channels),
        "INFINITY": "__int_as_float(0x7f800000)",
        "NAN": "__int_as_float(0x7fffffff)",
    }
    text = "".join(f"#define {name} {constant}\n" for name, constant in constants.items())
    return text + "".join((_FOLDER / name).read_text() for name in _FILES)


@lru_cache(maxsize=256)
def _module(problem: Problem, device: int) -> Module:
    return Module(source(problem), device)


@lru_cache(maxsize=1024)
def _kernel(problem: Problem, device: int, name: str, layout: str, dynamic: bool = False) -> Kernel:
    return _module(problem, device).kernel(name, layout, dynamic=dynamic)


def _problem(value: Tensor, reference: Tensor | None, points: Tensor, weights: Tensor, num_points, softmax) -> Problem:
    boxes = (points.dtype, 0, 1) if reference is None else (reference.dtype, reference.shape[3], reference.shape[2])
    dtype, coordinates, levels = boxes
    return Problem(
        value.dtype, points.dtype, weights.dtype, dtype, value.shape[3], value.shape[2], tuple(num_points),
        coordinates, levels, softmax,
    )  # fmt: skip


def _pointers(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _row_blocks(value: Tensor, queries: int) -> tuple[int, int, int]:
    """Grid of the kernels in which a query and head has a thread for every 16 bytes of its channels."""
    batch, _, heads, channels = value.shape
    rows = ROW_THREADS * 16 // (channels * value.element_size())
    return batch * -(-queries // rows) * heads, 1, 1


def msda_forward(output, value, shapes, starts, reference, points, weights, num_points, softmax, offset_scale) -> None:
    """Writes the output (B, Q, M·D). Operands are contiguous and begin at a multiple of 16 bytes."""
    problem = _problem(value, reference, points, weights, num_points, softmax)
    queries = points.shape[1]
    tensors = _pointers(output, value, shapes, starts, reference, points, weights)
    with current(value.device):
        kernel = _kernel(problem, value.device.index, "msda_forward", "7P2if")
        kernel(_row_blocks(value, queries), ROW_THREADS, *tensors, value.shape[1], queries, offset_scale)


def msda_backward_points(operands, gradients, num_points, softmax, offset_scale) -> None:
    """Writes the gradients of the points, the weights and, unless it is None, the reference.

    Args:
        operands, gradients: as for the Triton kernel, without the value's gradient.
        num_points, softmax, offset_scale: as in `deformops_models.reference.msda`.
    """
    _, value, _, _, reference, points, weights = operands
    problem = _problem(value, reference, points, weights, num_points, softmax)
    queries = points.shape[1]
    tensors = _pointers(*operands, *gradients)
    with current(value.device):
        kernel = _kernel(problem, value.device.index, "msda_backward_points", "10P2if")
        kernel(_row_blocks(value, queries), ROW_THREADS, *tensors, value.shape[1], queries, offset_scale)


class Tiling(NamedTuple):
    """How the value's gradient is cut into tiles.

    Args:
        keys: of all levels: kinds of samples in all tiles, and one more per level.
        level_keys: of the level that has most.
        blocks: of the gather, per pair of batch and head.
        partials: sums of blocks that share a tile, per pair.
        chunks, chunk, chunk_bits: blocks of the count, the queries of each, and the logarithm of their limit.
        count_warps, shared_bytes: of a block of the count.
        warps: of a block of the gather.
        grids: `Grids` of sort.cu, as it lies in memory.
    """

    keys: int
    level_keys: int
    blocks: int
    partials: int
    chunks: int
    chunk: int
    chunk_bits: int
    count_warps: int
    shared_bytes: int
    warps: int
    grids: bytes


def _count_blocks(keys: int, points: int, queries: int, room: int) -> tuple[int, int, int]:
    """Logarithm of a count block's queries, its warps and bytes of shared memory.

    The most queries that fit, as each block has counts of its own; then what keeps most warps on a multiprocessor.
    """
    padded = -(-keys // 8) * 8
    options = {
        (bits, warps): padded * (4 + 2 * warps) + 4 * points * min(queries, 1 << bits)
        for bits in CHUNK_BITS
        for warps in (8, 4, 2, 1)
    }
    fits = max(CHUNK_BITS, key=lambda bits: (options[bits, 1] <= room, bits))
    warps = max((8, 4, 2, 1), key=lambda warps: (room // options[fits, warps] * warps, -warps))
    return fits, warps, options[fits, warps]


@lru_cache(maxsize=1024)
def tiling(
    sizes: tuple[tuple[int, int], ...], num_points: tuple[int, ...], queries: int, pairs: int, channels: int, room: int
) -> Tiling | None:
    """The tiles of levels (H, W) that follow one another, or None where the sort has no room for them.

    Args:
        sizes, num_points, queries, channels: H, W and K of each level, Q, D.
        pairs: batch · heads.
        room: bytes of shared memory of a block.
    """
    warps = 1 << _warp_bits(channels)
    keys = blocks = partials = start = 0
    levels = []
    for (height, width), count in zip(sizes, num_points, strict=True):
        tiles_x = -(-width // TILE_X)
        tiles = tiles_x * -(-height // TILE_Y)
        # A tile's samples are 1.4 times as many as begin in it.
        samples = queries * count * min(1, 1.4 * TILE_X * TILE_Y / max(1, height * width))
        wanted = min(samples / WARP_SAMPLES, warps * MOST_BLOCKS)
        split_bits = math.ceil(math.log2(max(1, wanted)))
        levels.append([height, width, start, tiles_x, tiles, keys, 0, split_bits, partials])
        partials += (tiles << split_bits) // warps if 1 << split_bits > warps else 0
        keys += tiles * KINDS + 1
        start += height * width
    # Small levels have the longest lists: they come first.
    for level in reversed(levels):
        level[6] = blocks
        blocks += -(-(level[4] << level[7]) // warps)
    level_keys = max(level[4] for level in levels) * KINDS + 1
    chunk_bits, count_warps, shared = _count_blocks(level_keys, max(num_points), queries, room - STATIC_BYTES)
    chunks, chunk = -(-queries >> chunk_bits), min(queries, 1 << chunk_bits)
    if shared > room - STATIC_BYTES or level_keys >= 2**16 or pairs * keys * chunks >= MAX_INDEX or blocks == 0:
        return None
    grids = struct.pack(f"{9 * len(levels)}i", *itertools.chain(*levels))
    counting = (chunks, chunk, chunk_bits, count_warps, shared)
    return Tiling(keys, level_keys, blocks, partials, *counting, warps, grids)


def _scratch(device: torch.device, *sizes: int) -> tuple[Tensor, list[int]]:
    """Memory for arrays of so many bytes, and where each begins: one allocation takes less time than several."""
    ends = list(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
    memory = torch.empty(ends[-1], dtype=torch.uint8, device=device)
    first = memory.data_ptr()
    return memory, [first, *(first + end for end in ends[:-1])]


def msda_backward_value(operands, grad_value, tiling: Tiling, num_points, softmax, offset_scale) -> None:
    """Writes every row of the value's gradient.

    Args:
        operands, num_points, softmax, offset_scale: as for `msda_backward_points`.
        grad_value: (B, S, M, D) in value's dtype.
        tiling: of levels that follow one another through all S rows.
    """
    with current(grad_value.device):
        _sort_and_gather(operands, grad_value, tiling, num_points, softmax, offset_scale)


def _sort_and_gather(operands, grad_value, tiling, num_points, softmax, offset_scale) -> None:
    grad, value, _, _, reference, points, weights = operands
    problem = _problem(value, reference, points, weights, num_points, softmax)
    device, queries = value.device, points.shape[1]
    pairs, per_pair = value.shape[0] * problem.heads, queries * sum(num_points)
    keys, chunks, chunk, all_partials = tiling.keys, tiling.chunks, tiling.chunk, tiling.partials
    grids = f"{len(tiling.grids)}s"
    count = _kernel(problem, device.index, "msda_count", f"2P{grids}i2P2if", dynamic=True)
    sort = _kernel(problem, device.index, "msda_sort", f"3P{grids}3i4P3if")
    gather = _kernel(problem, device.index, "msda_gather", f"P{grids}2i4PiP3i")

    at_once = -(-pairs // -(-pairs // max(1, RECORD_BYTES // (RECORD * per_pair))))
    counts, sums = pairs * keys * chunks + 1, at_once * all_partials
    scratch, (place, rank, record, partial, arrival) = _scratch(
        device, 4 * counts, 2 * pairs * per_pair, RECORD * at_once * per_pair,
        4 * sums * TILE_X * TILE_Y * problem.channels, 4 * sums,
    )  # fmt: skip
    inputs = _pointers(reference, points, weights)
    from_grad, result = _pointers(grad, grad_value)

    levels = len(num_points)
    blocks = (chunks, levels, pairs)
    count(
        blocks, 32 * tiling.count_warps, *inputs[:2], tiling.grids, keys, place, rank, chunk, queries, offset_scale,
        shared_bytes=tiling.shared_bytes,
    )  # fmt: skip
    if chunks > 1:
        places = scratch[: 4 * counts].view(torch.int32)
        torch.cumsum(places, 0, dtype=torch.int32, out=places)
    sort_blocks = -(-queries // _sort_queries(problem.num_points))
    for first in range(0, pairs, at_once):
        some = min(at_once, pairs - first)
        sort(
            (sort_blocks, some, 1), THREADS, *inputs, tiling.grids, keys, chunks, tiling.chunk_bits, place, rank,
            record, arrival, all_partials, first, queries, offset_scale,
        )  # fmt: skip
        gather(
            (tiling.blocks, some, 1), 32 * tiling.warps, from_grad, tiling.grids, keys, chunks, place, record,
            partial, arrival, all_partials, result, first, value.shape[1], queries,
        )  # fmt: skip
