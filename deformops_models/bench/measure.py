"""Clocks, errors against float64, and the gate that keeps wrong results from being timed."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deformops_models.bench.peers import Function, ours
from deformops_models.bench.presets import Problem

#: Error that a result of a dtype may have against float64 on the same operands: its rounding, and that of the sums.
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 8e-3}

RESULTS = ("output", "grad_value", "grad_points", "grad_weights")

Quantiles = tuple[float, float, float]


def differentiate(function: Function, leaves: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    """The output and the operands' gradients, by name; only the output of a function without a backward."""
    output = function(*leaves)
    gradients = torch.autograd.grad(output, leaves, grad.to(output.dtype)) if output.requires_grad else ()
    return dict(zip(RESULTS, (output.detach(), *gradients), strict=False))


def exact(problem: Problem) -> dict[str, Tensor]:
    """All results in float64, head by head: the plain path needs a few hundred bytes per corner."""
    function, heads = ours(problem), []
    grad = problem.grad.double().unflatten(2, (problem.preset.heads, -1))
    for head in range(problem.preset.heads):
        leaves = [t[:, :, head : head + 1].double().requires_grad_() for t in problem.operands]
        heads.append(differentiate(function, leaves, grad[:, :, head]))
    return {name: torch.cat([results[name] for results in heads], 2) for name in heads[0]}


def errors(function: Function, problem: Problem, truth: dict[str, Tensor]) -> dict[str, float]:
    """‖result − truth‖ / ‖truth‖ of each result, the gradient of points only where sampling has a derivative."""
    found = {}
    for name, result in differentiate(function, problem.leaves(), problem.grad).items():
        expected, difference = truth[name], result.double() - truth[name]
        if name == "grad_points":
            smooth = problem.smooth()
            expected, difference = expected * smooth, difference * smooth
        found[name] = (difference.norm() / expected.norm()).item()
    return found


def beyond(found: dict[str, float], problem: Problem) -> dict[str, float]:
    """The errors that exceed the bound of their result's dtype; NaN does."""
    value, points, weights = (BOUNDS[t.dtype] for t in problem.operands)
    bounds = dict(zip(RESULTS, (value, value, points, weights), strict=True))
    return {name: error for name, error in found.items() if not error <= bounds[name]}


def clocks(
    function: Function, problem: Problem, *, host: bool, differentiable: bool
) -> Iterator[tuple[str, str, Quantiles]]:
    """Metric, unit and quantiles of everything that is timed: on the host, or on the device and its memory."""
    leaves = problem.leaves()

    def backward(output: Tensor, retain_graph: bool = True) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, leaves, problem.grad.to(output.dtype), retain_graph=retain_graph)

    def forward() -> Tensor:
        return function(*problem.operands)

    def both() -> tuple[Tensor, ...]:
        return backward(function(*leaves), retain_graph=False)

    if host:
        yield "host_forward_us", "us", host_time(forward)
        if differentiable:
            yield "host_grad_us", "us", host_time(lambda: function(*leaves))
            yield "host_both_us", "us", host_time(both)
        return
    yield "forward_us", "us", device_time(forward)
    output = function(*leaves)
    yield "backward_us", "us", device_time(lambda: backward(output))
    yield "both_us", "us", device_time(both)
    yield "peak_mib", "MiB", (peak_memory(both),) * 3


def quantiles(samples: list[float]) -> Quantiles:
    """Median, 20th and 80th percentile."""
    samples = sorted(samples)
    return tuple(samples[min(len(samples) - 1, int(len(samples) * q))] for q in (0.5, 0.2, 0.8))


def repeats(seconds: float, budget: float = 0.15, fewest: int = 5, most: int = 30) -> int:
    """How often a call of `seconds` is timed within `budget` seconds."""
    return max(fewest, min(most, int(budget / max(seconds, 1e-9))))


def device_time(function: Callable[[], object]) -> Quantiles:
    """Device time of one call in µs, by replaying a CUDA graph of it, so that no launch latency is counted.

    The graph holds several calls where they are short: what a replay itself takes would show. The default stream cannot
    be captured: call it, and make all of autograd's history, on another one.
    """
    for _ in range(3):
        function()
    alone = _replays(function, 1)
    calls = max(1, min(_MOST_CALLS, int(_SHORT / alone[0])))
    return alone if calls == 1 else _replays(function, calls)


#: Device time in µs that a graph should have at least, and calls that it holds at most.
_SHORT, _MOST_CALLS = 500.0, 20


def _replays(function: Callable[[], object], calls: int) -> Quantiles:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> float:
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / calls

    replay()
    return quantiles([replay() for _ in range(repeats(replay() * calls / 1e6))])


def host_time(function: Callable[[], object], calls: int = 200) -> Quantiles:
    """Time in µs that a call keeps the Python thread; the device is idle at its start."""
    # Clocks rise and allocators settle.
    warm = time.perf_counter() + 0.3
    while time.perf_counter() < warm:
        function()
        torch.cuda.synchronize()
    samples = []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        samples.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return quantiles(samples)


def peak_memory(function: Callable[[], object]) -> float:
    """MiB that a call needs on top of what is allocated before it."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
