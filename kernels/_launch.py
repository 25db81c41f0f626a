"""How a kernel is launched: the rule that picks a configuration, the constants of a problem, and the call itself."""

import contextlib
import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from deformops_models.kernels._driver import current, loading

MAX_PROGRAMS = 2**31 - 1


def configure(channels: int, points: int, itemsize: int, backward: bool) -> tuple[int, int, int | None]:
    """(BQ, num_warps, maxnreg) by rule.

    A warp takes 512 elements of a corner's tile, 16 per thread: with more rows Triton exchanges the samples' weights
    through shared memory, which costs more than computing them several times (docs/kernels.md).

    Args:
        channels: D.
        points: the widest level's count.
        itemsize: bytes of a value element.
        backward: of the backward kernel.
    """
    # Narrow heads would give a thread too many samples.
    row = max(16, triton.next_power_of_2(channels)) * triton.next_power_of_2(points)
    # The forward hides latency with many warps; the backward waits for atomics and is better without spills.
    registers = None if backward else 96 if itemsize == 2 else 128
    return max(1, 512 // row), min(4, max(1, row // 512)), registers


class Plan(NamedTuple):
    """A launch without its tensors: number of programs, constant arguments, options of the compiler."""

    programs: int
    constants: tuple
    options: dict[str, int | None]


@lru_cache(maxsize=4096)
def _plan(
    value: torch.Size,
    reference: torch.Size | None,
    queries: int,
    num_points: tuple[int, ...],
    softmax: bool,
    has_starts: bool,
    itemsize: int,
    backward: bool,
) -> Plan:
    BQ, warps, registers = configure(value[3], max(num_points), itemsize, backward)
    programs = _programs(value, queries, BQ)
    if programs > MAX_PROGRAMS:
        raise ValueError(
            f"batch·queries·heads needs {programs} programs, CUDA launches {MAX_PROGRAMS}: split the batch"
        )
    wide = math.prod(value[1:]) >= 2**31
    constants = _constants(value, reference, num_points, softmax, has_starts, wide, BQ)
    return Plan(programs, constants, {"num_warps": warps, "maxnreg": registers})


def _programs(value, queries: int, BQ: int) -> int:
    return value[0] * ((queries + BQ - 1) // BQ) * value[2]


def _constants(value, reference, num_points: tuple[int, ...], softmax: bool, has_starts: bool, wide: bool, BQ: int):
    """The kernels' constant arguments, in their order."""
    coordinates, levels = (0, 1) if reference is None else (reference[3], reference[2])
    return (*value[2:], num_points, sum(num_points), coordinates, levels, softmax, has_starts, wide, BQ)


def launch(kernel, tensors: tuple, num_points, softmax: bool, offset_scale: float, **flags: bool) -> None:
    """Launches `kernel` on the device of the value.

    Args:
        kernel: takes `tensors`, then what is computed here.
        tensors: output or its gradient, value (B, S, M, D), shapes, starts, reference (B, Q, L, C), points
            (B, Q, ...), weights, and what else the kernel takes.
        num_points: points per level.
        softmax, offset_scale: as in `deformops_models.reference.msda`.
        flags: the backward kernel's, none for the forward.
    """
    value, starts, reference, points = tensors[1], tensors[3], tensors[4], tensors[5]
    queries = points.shape[1]
    plan = _plan(
        value.shape,
        None if reference is None else reference.shape,
        queries,
        tuple(num_points),
        softmax,
        starts is not None,
        value.element_size(),
        bool(flags),
    )
    if plan.programs == 0:
        return
    run = kernel[(plan.programs,)]
    arguments = (*tensors, value.shape[1], queries, offset_scale, *plan.constants)
    with current(value.device), loading() if value.is_cuda else contextlib.nullcontext():
        run(*arguments, **flags, **plan.options)


def traced_launch(kernel, tensors: tuple, num_points, softmax: bool, offset_scale: float) -> None:
    """As `launch` of the forward kernel, for a compiler that takes the kernel over; shapes may hold symbols.

    Inductor knows no limit of registers, so that ptxas chooses their number here.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    _, value, shapes, starts, reference, points, _ = tensors
    num_points, queries = tuple(num_points), points.shape[1]
    BQ, warps, _ = configure(value.shape[3], max(num_points), value.element_size(), backward=False)
    # Nobody would see at run time that a sample has outgrown 32 bits: only a bound that was declared counts.
    wide = not statically_known_true(math.prod(value.shape[1:]) < 2**31)
    coordinates = None if reference is None else reference.shape
    constants = _constants(value.shape, coordinates, num_points, softmax, starts is not None, wide, BQ)
    # A pointer that is not read.
    tensors = [shapes if t is None else t for t in tensors]
    run = torch.library.wrap_triton(kernel)[(_programs(value.shape, queries, BQ),)]
    run(*tensors, value.shape[1], queries, offset_scale, *constants, num_warps=warps)
