"""The same operators in CUDA C++, compiled by NVRTC: forward, and a backward without atomics."""

import itertools
import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deformops_models.kernels._nvrtc import Kernel, Module

_FOLDER = Path(__file__).parent
_TYPES = {torch.float32: "float", torch.float16: "float16", torch.bfloat16: "bfloat16"}
THREADS, BATCH = 256, 4
SORT_QUERIES = 64
ROW_THREADS = 128
#: Queries of a block of the sort: fewer make more blocks, and more counts to sum.
CHUNK = 1024
#: Pixels of a tile of the value's gradient, and kinds of samples in it (value.cu).
TILE_X, TILE_Y, KINDS = 8, 4, 4
#: Sorted samples at a time: they stay in the L2 cache from their writing to their reading.
RECORD_BYTES = 24 << 20
#: Samples that a warp of the gather takes, and how many blocks a tile may fill.
WARP_SAMPLES, MOST_BLOCKS = 192, 8


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


def _list(numbers: Iterable[int]) -> str:
    return "{" + ", ".join(map(str, numbers)) + "}"


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
        "LEVEL_OF_POINT": _list(level for level, count in enumerate(problem.num_points) for _ in range(count)),
        "C": problem.coordinates,
        "REF_LEVELS": problem.reference_levels,
        "SOFTMAX": int(problem.softmax),
        "THREADS": THREADS,
        "BATCH": BATCH,
        "ROW_THREADS": ROW_THREADS,
        "MOST_BLOCKS": MOST_BLOCKS,
        "SORT_QUERIES": SORT_QUERIES,
        "INFINITY": "__int_as_float(0x7f800000)",
        "NAN": "__int_as_float(0x7fffffff)",
    }
    text = "".join(f"#define {name} {constant}\n" for name, constant in constants.items())
    return text + "".join((_FOLDER / name).read_text() for name in ("sampling.cuh", "forward.cu", "points.cu", "sort.cu", "gather.cu"))


@lru_cache(maxsize=256)
def _module(problem: Problem, device: int) -> Module:
    return Module(source(problem), device)


@lru_cache(maxsize=1024)
def _kernel(problem: Problem, device: int, name: str, layout: str, shared_bytes: int = 0) -> Kernel:
    return _module(problem, device).kernel(name, layout, shared_bytes)


def _problem(value, reference, points, weights, num_points, softmax) -> Problem:
    coordinates, levels = (0, 1) if reference is None else (reference.shape[3], reference.shape[2])
    dtype = points.dtype if reference is None else reference.dtype
    return Problem(
        value.dtype, points.dtype, weights.dtype, dtype, value.shape[3], value.shape[2], tuple(num_points),
        coordinates, levels, softmax,
    )  # fmt: skip


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _row_blocks(problem: Problem, batch: int, queries: int) -> int:
    """Blocks of the kernels whose threads share a query and head by pieces of 16 bytes."""
    rows = ROW_THREADS * 16 // (problem.channels * problem.value.itemsize)
    return batch * -(-queries // rows) * problem.heads


def msda_forward(output, value, shapes, starts, reference, points, weights, num_points, softmax, offset_scale) -> None:
    problem = _problem(value, reference, points, weights, num_points, softmax)
    batch, queries = points.shape[:2]
    kernel = _kernel(problem, value.device.index, "msda_forward", "7P2if")
    tensors = map(_pointer, (output, value, shapes, starts, reference, points, weights))
    kernel((_row_blocks(problem, batch, queries), 1, 1), ROW_THREADS, *tensors, value.shape[1], queries, offset_scale)


def msda_backward_points(
    grad, value, shapes, starts, reference, points, weights, grad_reference, grad_points, grad_weights,
    num_points, softmax, offset_scale,
) -> None:  # fmt: skip
    problem = _problem(value, reference, points, weights, num_points, softmax)
    batch, queries = points.shape[:2]
    kernel = _kernel(problem, value.device.index, "msda_backward_points", "10P2if")
    operands = (grad, value, shapes, starts, reference, points, weights, grad_reference, grad_points, grad_weights)
    blocks = (_row_blocks(problem, batch, queries), 1, 1)
    kernel(blocks, ROW_THREADS, *map(_pointer, operands), value.shape[1], queries, offset_scale)


class Grids(NamedTuple):
    """The tiles of all levels: numbers of keys, of blocks, of tiles that several blocks share; most keys of a level."""

    keys: int
    blocks: int
    shared_tiles: int
    level_keys: int
    #: `Grids` of value.cu.
    numbers: tuple[int, ...]


@lru_cache(maxsize=1024)
def _grids(sizes: tuple[tuple[int, int], ...], num_points: tuple[int, ...], queries: int, warps: int) -> Grids:
    keys = blocks = shared_tiles = start = 0
    levels = []
    for (height, width), count in zip(sizes, num_points, strict=True):
        tiles_x = -(-width // TILE_X)
        tiles = tiles_x * -(-height // TILE_Y)
        # A tile's samples are 1.4 times as many as begin in it.
        wanted = min(1.4 * queries * count / max(1, tiles) / WARP_SAMPLES, warps * MOST_BLOCKS)
        splits = 1 << max(0, math.ceil(math.log2(max(1, wanted))))
        levels.append([height, width, start, tiles_x, tiles, keys, 0, splits, shared_tiles])
        shared_tiles += tiles if splits > warps else 0
        keys += tiles * KINDS + 1
        start += height * width
    # Small levels have the longest lists: they come first.
    for level in reversed(levels):
        level[6] = blocks
        blocks += -(-level[4] * level[7] // warps)
    level_keys = max(level[4] * KINDS + 1 for level in levels)
    return Grids(keys, blocks, shared_tiles, level_keys, tuple(itertools.chain(*levels)))


def msda_backward_value(
    grad, value, sizes, reference, points, weights, grad_value, num_points, softmax, offset_scale
) -> None:
    """Writes the value's gradient, every row of it."""
    problem = _problem(value, reference, points, weights, num_points, softmax)
    device = value.device
    batch, queries = points.shape[:2]
    pairs, per_pair = batch * problem.heads, queries * sum(num_points)
    warps = 8 if problem.channels <= 32 else 256 // problem.channels
    grids = _grids(sizes, problem.num_points, queries, warps)
    levels, chunks = len(sizes), -(-queries // CHUNK)
    chunk = -(-queries // chunks)
    tiles = f"{9 * levels}i"
    operands = tuple(map(_pointer, (reference, points, weights)))

    places = torch.empty(pairs * grids.keys * chunks + 1, dtype=torch.int32, device=device)
    ranks = torch.empty(pairs * per_pair, dtype=torch.int16, device=device)
    padded = -(-grids.level_keys // 8) * 8
    shared = padded * (4 + THREADS // 16) + 4 * chunk * max(num_points)
    count = _kernel(problem, device.index, "msda_count", f"2P{tiles}i2P2if", shared)
    count(
        (chunks, levels, pairs), THREADS, *operands[:2], *grids.numbers, grids.keys, places.data_ptr(),
        ranks.data_ptr(), chunk, queries, offset_scale,
    )  # fmt: skip
    if chunks > 1:
        torch.cumsum(places, 0, dtype=torch.int32, out=places)
    slice_ = max(1, min(pairs, RECORD_BYTES // (16 * per_pair)))
    slice_ = -(-pairs // -(-pairs // slice_))
    records = torch.empty(slice_ * per_pair * 4, dtype=torch.int32, device=device)
    partials = torch.empty(slice_ * grids.shared_tiles * MOST_BLOCKS * 32 * problem.channels, device=device)
    arrived = torch.empty(slice_ * grids.shared_tiles, dtype=torch.int32, device=device)
    sort = _kernel(problem, device.index, "msda_sort", f"3P{tiles}3i4P3if")
    gather = _kernel(problem, device.index, "msda_gather", f"P{tiles}2i4PiP3i")
    for first in range(0, pairs, slice_):
        count = min(slice_, pairs - first)
        sort(
            (-(-queries // SORT_QUERIES), count, 1), THREADS, *operands, *grids.numbers, grids.keys, chunks, chunk,
            places.data_ptr(), ranks.data_ptr(), records.data_ptr(), arrived.data_ptr(), grids.shared_tiles, first,
            queries, offset_scale,
        )  # fmt: skip
        gather(
            (grids.blocks, count, 1), 32 * warps, grad.data_ptr(), *grids.numbers, grids.keys, chunks,
            places.data_ptr(), records.data_ptr(), partials.data_ptr(), arrived.data_ptr(), grids.shared_tiles,
            grad_value.data_ptr(), first, value.shape[1], queries,
        )  # fmt: skip
