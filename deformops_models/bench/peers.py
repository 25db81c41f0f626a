"""Providers: this package and what it is compared with, each as a function of value, points and weights."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deformops_models.api import deformable_attention, msda
from deformops_models.bench.presets import LINEAR, OFFSET_SCALE, Case, Problem

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(problem: Problem) -> Function:
    """The operator that the problem is of, with its sizes in a list, as models have them; float64 runs the plain path.

    Sizes in tensors are learned during the first eager calls, but not trusted in a captured graph, which times here.
    """
    shapes, starts, reference = problem.preset.sizes, None, problem.reference
    options = {} if problem.preset.equal_points else {"num_points": problem.preset.points}
    if reference is None:
        return lambda v, p, w: msda(v, shapes, starts, p, w, **options)
    return lambda v, p, w: deformable_attention(v, shapes, starts, reference, p, w, **options)


def bare_launch(problem: Problem) -> Function:
    """The forward kernel with the problem's own operands and a fresh output, without operator or checks around it."""
    from deformops_models.kernels._launch import launch
    from deformops_models.kernels.msda_forward import msda_forward_kernel

    size = problem.grad.shape
    value = problem.value
    tensors = (value.new_empty(size), value, problem.shapes, problem.starts, problem.reference, *problem.operands[1:])
    plan = _Plan()
    launch(plan, tensors, problem.preset.points, problem.reference is not None, OFFSET_SCALE)
    kernel, rest, options = msda_forward_kernel[plan.grid], plan.arguments[1:], plan.options

    def call(*_: Tensor) -> Tensor:
        output = value.new_empty(size)
        kernel(output, *rest, **options)
        return output

    return call


class _Plan:
    """Takes a kernel's place in `launch` and keeps what that would be launched with."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        self.grid = grid
        return self._keep

    def _keep(self, *arguments, **options) -> None:
        self.arguments, self.options = arguments, options


def transformers(problem: Problem) -> Function:
    """Its operands are in one dtype, the wider one, as CUDA's autocast makes them for `grid_sample`."""
    from transformers.models.mask2former.modeling_mask2former import multi_scale_deformable_attention
    from transformers.models.rt_detr_v2.modeling_rt_detr_v2 import multi_scale_deformable_attention_v2

    sizes, counts = list(problem.preset.sizes), list(problem.preset.points)

    def core(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        if problem.preset.equal_points:
            return multi_scale_deformable_attention(value, sizes, locations, weights)
        return multi_scale_deformable_attention_v2(value, sizes, locations, weights, counts)

    return _in_a_detector(problem, core, torch.promote_types(problem.value.dtype, problem.weights.dtype))


def transformers_compiled(problem: Problem) -> Function:
    """The same under `torch.compile`, softmax and locations included."""
    # The code of earlier problems counts towards the limit of recompilations.
    torch.compiler.reset()
    return torch.compile(transformers(problem), dynamic=False)


def deformops(problem: Problem, *, native: bool = False, softmax: bool = False) -> Function:
    """All operands in value's dtype, which its operator asks for."""
    import deformops.backends  # noqa: F401  registers the backends
    from deformops.registry import Backend
    from deformops.registry import msda as sample

    shapes, starts, dtype = problem.shapes, problem.starts, problem.value.dtype
    options = {"backend": Backend.TRITON, "fp32acc": not native, "softmax": softmax}
    if softmax:
        return lambda v, p, w: sample(v, shapes, starts, problem.locations(p).to(dtype), w.to(dtype), **options)
    return _in_a_detector(problem, lambda v, p, w: sample(v, shapes, starts, p, w, **options), dtype)


def mmcv(problem: Problem) -> Function:
    """All operands in value's dtype, to which mmcv casts them."""
    core = _MmcvFunction.apply
    shapes, starts = problem.shapes, problem.starts
    return _in_a_detector(problem, lambda v, p, w: core(v, shapes, starts, p, w), problem.value.dtype)


class _MmcvFunction(torch.autograd.Function):
    """mmcv's compiled operator without the rest of `mmcv.ops`, which asks for all that mmcv can compile."""

    @staticmethod
    def forward(ctx, *operands: Tensor) -> Tensor:
        from mmcv import _ext

        ctx.save_for_backward(*operands)
        return _ext.ms_deform_attn_forward(*operands, im2col_step=64)

    @staticmethod
    def backward(ctx, grad: Tensor):
        from mmcv import _ext

        value, shapes, starts, locations, weights = ctx.saved_tensors
        gradients = [torch.zeros_like(t) for t in (value, locations, weights)]
        _ext.ms_deform_attn_backward(*ctx.saved_tensors, grad.contiguous(), *gradients, im2col_step=64)
        return gradients[0], None, None, *gradients[1:]


def _in_a_detector(problem: Problem, core: Function, dtype: torch.dtype) -> Function:
    """`core(value, locations, weights)` on operands of one dtype, behind a detector's own softmax and locations."""

    def call(value: Tensor, points: Tensor, weights: Tensor) -> Tensor:
        if problem.reference is not None:
            points = problem.locations(points)
            weights = weights.flatten(3).softmax(-1).view_as(weights)
        return core(value.to(dtype), points.to(dtype), weights.to(dtype))

    return call


def repeatable_backward() -> contextlib.AbstractContextManager:
    """Keeps the buffers of a compiled backward, so that it can be timed by calling it again and again."""
    import torch._functorch.config

    return torch._functorch.config.patch(donated_buffer=False)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Torch's deterministic mode; its filling of fresh memory is timed too, as its users pay for it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass(frozen=True)
class Provider:
    """How one implementation is built and called.

    Args:
        build: gives the function of value, points and weights that is timed.
        package: must be importable.
        mode: what its calls run in.
        compiles: whether the first call waits for a compiler.
        gated: whether its error is bounded.
        differentiable: False for a forward pass alone.
    """

    build: Callable[[Problem], Function]
    package: str | None = None
    mode: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    compiles: bool = True
    gated: bool = False
    differentiable: bool = True


PROVIDERS = {
    "ours": Provider(ours, gated=True),
    "ours_deterministic": Provider(ours, mode=deterministic, gated=True),
    "bare_launch": Provider(bare_launch, gated=True, compiles=False, differentiable=False),
    "transformers": Provider(transformers, "transformers", compiles=False),
    "transformers_compiled": Provider(transformers_compiled, "transformers", mode=repeatable_backward),
    "deformops": Provider(deformops, "deformops"),
    "deformops_native": Provider(lambda problem: deformops(problem, native=True), "deformops"),
    "deformops_softmax": Provider(lambda problem: deformops(problem, softmax=True), "deformops"),
    "mmcv": Provider(mmcv, "mmcv._ext", compiles=False),
}


def by_default(name: str, case: Case) -> bool:
    """Whether a provider is timed when none is asked for; compiling transformers' code takes half a minute."""
    if case.preset in LINEAR:
        return name == "ours"
    if name == "transformers_compiled":
        fused = case.op == "deformable_attention" and case.distribution == "local"
        return fused and case.preset in ("encoder", "decoder") and case.dtype in ("float32", "bfloat16")
    return True


def refusal(name: str, case: Case) -> str | None:
    """Why a provider cannot run a case, or None."""
    package = PROVIDERS[name].package
    if package and not _importable(package):
        return f"{package} cannot be imported"
    if name == "bare_launch" and case.preset != "host":
        return "only the preset host is compared with it"
    if not case.work.equal_points and package in ("deformops", "mmcv._ext"):
        return "it needs as many points on every level"
    if name == "deformops_native" and case.dtype == "float32":
        return "in float32 it is deformops"
    if name == "deformops_softmax" and case.op == "msda":
        return "msda's weights are normalised"
    if name == "mmcv" and case.dtype not in ("float32", "float16"):
        return "it has no bfloat16"
    return None


def _importable(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False
