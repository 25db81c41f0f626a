"""What a launch needs: the problem's shape, the rule that picks a configuration, and the call itself."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

MAX_PROGRAMS = 2**31 - 1


@dataclass(frozen=True)
class Problem:
    """Everything about one call but the tensors.

    Args:
        batch, rows, heads, channels, queries: B, S, M, D, Q.
        num_points: points per level.
        coordinates: 0 when points are locations, else the coordinates of a reference, 2 or 4.
        reference_levels: levels of the reference points, 1 or L.
        softmax: weights are logits.
        offset_scale: factor of the offsets of 4-coordinate references.
    """

    batch: int
    rows: int
    heads: int
    channels: int
    queries: int
    num_points: tuple[int, ...]
    coordinates: int
    reference_levels: int
    softmax: bool
    offset_scale: float

    @classmethod
    def of(cls, value, reference, points, num_points, softmax, offset_scale) -> "Problem":
        batch, rows, heads, channels = value.shape
        coordinates, levels = (0, 1) if reference is None else (reference.shape[-1], reference.shape[2])
        return cls(
            batch, rows, heads, channels, points.shape[1], tuple(num_points), coordinates, levels, softmax, offset_scale
        )


@lru_cache(maxsize=1024)
def configure(channels: int, points: int, itemsize: int, backward: bool) -> tuple[int, int, int | None]:
    """(BQ, num_warps, maxnreg) by rule.

    A warp takes 512 elements of a corner's tile, 16 per thread: with more rows Triton exchanges the samples' weights
    through shared memory, which costs more than computing them several times (docs/kernels.md).

    Args:
        channels: D.
        points: the widest level's count.
        itemsize: bytes of a value element.
    """
    # Narrow heads would give a thread too many samples.
    row = max(16, triton.next_power_of_2(channels)) * triton.next_power_of_2(points)
    # The forward hides latency with many warps; the backward waits for atomics and is better without spills.
    registers = None if backward else 96 if itemsize == 2 else 128
    return max(1, 512 // row), min(4, max(1, row // 512)), registers


def launch(kernel, problem: Problem, tensors: tuple, *, backward: bool, **constants) -> None:
    """Launches `kernel` on the device of the value tensor; the other device's current stream is left alone."""
    value, starts = tensors[1], tensors[3]
    BQ, warps, registers = configure(problem.channels, max(problem.num_points), value.element_size(), backward)
    programs = problem.batch * triton.cdiv(problem.queries, BQ) * problem.heads
    if programs == 0:
        return
    if programs > MAX_PROGRAMS:
        raise ValueError(
            f"batch·queries·heads needs {programs} programs, CUDA launches {MAX_PROGRAMS}: split the batch"
        )
    arguments = (
        *tensors,
        problem.rows,
        problem.queries,
        problem.offset_scale,
        problem.heads,
        problem.channels,
        problem.num_points,
        sum(problem.num_points),
        problem.coordinates,
        problem.reference_levels,
        problem.softmax,
        starts is not None,
        problem.rows * problem.heads * problem.channels >= 2**31,
        BQ,
    )
    device = value.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, **constants, num_warps=warps, maxnreg=registers)
    else:
        kernel[(programs,)](*arguments, **constants, num_warps=warps, maxnreg=registers)
