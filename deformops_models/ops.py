"""The operators as torch.library sees them: schemas, fakes, autograd. A kernel is imported when one is called.

Two operators serve every public function: `msda_forward` and `msda_backward`. Without `reference` the points are
locations, with it they are offsets; with `softmax` the weights are logits. `sizes` are the numbers in `shapes` where
the caller knows them and nobody could look them up later.
"""

import warnings

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad

from deformops_models import layout
from deformops_models import reference as plain
from deformops_models.backend import Backend, call_counts, cuda_problem, interpreting

_OPERANDS = "Tensor value, Tensor shapes, Tensor? starts, Tensor? reference, Tensor points, Tensor weights"
_OPTIONS = "int[] num_points, bool softmax, float offset_scale, bool fp32_grad_accum, str? backend, SymInt[]? sizes"
_LIBRARY = torch.library.Library("deformops_models", "DEF")
_LIBRARY.define(f"msda_forward({_OPERANDS}, {_OPTIONS}) -> Tensor")
_LIBRARY.define(
    f"msda_backward(Tensor grad, {_OPERANDS}, {_OPTIONS}, bool need_value, bool need_reference) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)

msda_forward = torch.ops.deformops_models.msda_forward.default
msda_backward = torch.ops.deformops_models.msda_backward.default


def _forward(value, shapes, starts, reference, points, weights, num_points, softmax, offset_scale, _, backend, __):
    if _use_cuda(value, points, num_points, backend):
        from deformops_models.kernels.msda_cuda import msda_forward as kernel

        prepare = _aligned
    else:
        from deformops_models.kernels.msda_forward import msda_forward as kernel

        prepare = _contiguous
    batch, _, heads, channels = value.shape
    output = value.new_empty((batch, points.shape[1], heads * channels))
    operands = [prepare(t) for t in (value, shapes, starts, reference, points, weights)]
    kernel(output, *operands, num_points, softmax, offset_scale)
    call_counts["msda_forward"] += 1
    return output


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _aligned(t: Tensor | None) -> Tensor | None:
    """Contiguous from a multiple of 16 bytes on and int64, as the CUDA kernels read."""
    if t is None:
        return None
    t = (t.long() if t.dtype == torch.int32 else t).contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _use_cuda(value: Tensor, points: Tensor, num_points: list[int], backend: str | None) -> bool:
    """Whether the CUDA kernels run: where they can, unless Triton's are asked for."""
    if backend == Backend.TRITON or not value.is_cuda or cuda_problem(value.device.index) is not None:
        return False
    from deformops_models.kernels import msda_cuda

    return msda_cuda.problem(value.shape, points.shape[1], tuple(num_points)) is None


def _backward(
    grad, value, shapes, starts, reference, points, weights,
    num_points, softmax, offset_scale, fp32_grad_accum, backend, sizes, need_value, need_reference,
):  # fmt: skip
    options = (num_points, softmax, offset_scale)
    tensors = (grad, value, shapes, starts, reference, points, weights)
    cuda = _use_cuda(value, points, num_points, backend)
    tiling = _tiling(value, shapes, starts, sizes, points, num_points) if cuda and need_value else None
    cuda = cuda and (tiling is not None or not need_value)
    operands = [(_aligned if cuda else _contiguous)(t) for t in tensors]
    grad_value = grad_reference = None
    if need_value and cuda:
        from deformops_models.kernels.msda_cuda import msda_backward_value

        # Its scratch memory is free again when the other gradients are made.
        grad_value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        msda_backward_value(operands, grad_value, tiling, *options)
    elif need_value:
        _alert_not_deterministic()
        half = not fp32_grad_accum and _native_atomics(value)
        grad_value = torch.zeros(value.shape, dtype=value.dtype if half else torch.float32, device=value.device)
    if need_reference:
        rows = (*points.shape[:3], len(num_points), reference.shape[-1])
        grad_reference = torch.empty(rows, dtype=torch.float32, device=value.device)
    grad_points = torch.empty(points.shape, dtype=points.dtype, device=points.device)
    grad_weights = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
    gradients = (grad_reference, grad_points, grad_weights)
    if cuda:
        from deformops_models.kernels.msda_cuda import msda_backward_points

        msda_backward_points(operands, gradients, *options)
    else:
        from deformops_models.kernels.msda_backward import msda_backward as kernel

        kernel(operands, (grad_value, *gradients), *options)
    call_counts["msda_backward"] += 1
    none = value.new_empty(0)
    if need_reference:
        axes = (2, 3) if reference.shape[2] == 1 else 2
        grad_reference = grad_reference.sum(axes).to(reference.dtype).view(reference.shape)
    return (
        grad_value.to(value.dtype) if need_value else none,
        grad_reference if need_reference else none.clone(),
        grad_points,
        grad_weights,
    )


def _tiling(
    value: Tensor, shapes: Tensor, starts: Tensor | None, sizes: list[int] | None, points: Tensor, num_points: list[int]
):
    """How the CUDA kernels cut the value's gradient into tiles, where the level sizes are known; else None."""
    from deformops_models.kernels._driver import shared_memory
    from deformops_models.kernels.msda_cuda import tiling

    batch, rows, heads, channels = value.shape
    sizes = layout.known_sizes(shapes, starts, rows) if sizes is None else layout.pairs(sizes, rows)
    room = shared_memory(value.device.index)
    return sizes and tiling(sizes, tuple(num_points), points.shape[1], batch * heads, channels, room)


def _native_atomics(value: Tensor) -> bool:
    """Whether this GPU adds value's dtype in memory; before SM 9.0 bfloat16 is emulated by a slow, lossy loop."""
    if value.dtype == torch.bfloat16:
        return value.is_cuda and torch.cuda.get_device_capability(value.device) >= (9, 0)
    return True


def _alert_not_deterministic() -> None:
    if not torch.are_deterministic_algorithms_enabled():
        return
    text = (
        "msda_backward does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. The CUDA kernels have one where spatial_shapes are pairs of "
        "numbers; else pass backend='eager', or warn_only=True to accept it"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(text)
    warnings.warn(text, stacklevel=3)


def _plain(value, shapes, starts, reference, points, weights, num_points, softmax, offset_scale) -> Tensor:
    sizes = [tuple(row) for row in shapes.tolist()]
    first_rows = layout.level_starts(sizes) if starts is None else starts.tolist()
    points, weights = points.flatten(3, -2), weights.flatten(3)
    return plain.msda(
        value, sizes, first_rows, reference, points, weights, num_points, softmax=softmax, offset_scale=offset_scale
    )


def _forward_cpu(*arguments):
    return _forward(*arguments) if interpreting() else _plain(*arguments[:-3])


def _backward_cpu(*arguments):
    if interpreting():
        return _backward(*arguments)
    grad, value, shapes, starts, reference, points, weights, *options, _, _, _, need_value, need_reference = arguments

    needed = (need_value, need_reference, True, True)
    # The dispatcher has switched autograd off in here, and inference mode may have; this brings it back.
    with torch.inference_mode(False):
        operands = (value, reference, points, weights)
        leaves = [t if t is None else t.clone() if t.is_inference() else t.detach() for t in operands]
        wanted = [leaf.requires_grad_() for leaf, wants in zip(leaves, needed, strict=True) if wants]
        with torch.enable_grad():
            output = _plain(leaves[0], shapes, starts, *leaves[1:], *options)
        gradients = [g.contiguous() for g in torch.autograd.grad(output, wanted, grad)]
    none = value.new_empty(0)
    grad_value = gradients.pop(0) if need_value else none
    return (grad_value, gradients.pop(0) if need_reference else none.clone(), *gradients)


_LIBRARY.impl("msda_forward", _forward, "CUDA")
_LIBRARY.impl("msda_forward", _forward_cpu, "CPU")
_LIBRARY.impl("msda_backward", _backward, "CUDA")
_LIBRARY.impl("msda_backward", _backward_cpu, "CPU")


@torch.library.register_fake("deformops_models::msda_forward", lib=_LIBRARY)
def _(value, shapes, starts, reference, points, weights, *options):
    batch, _, heads, channels = value.shape
    return value.new_empty((batch, points.shape[1], heads * channels))


@torch.library.register_fake("deformops_models::msda_backward", lib=_LIBRARY)
def _(grad, value, shapes, starts, reference, points, weights, *options):
    *_, need_value, need_reference = options
    return (
        value.new_empty(value.shape if need_value else (0,)),
        reference.new_empty(reference.shape) if need_reference else value.new_empty(0),
        points.new_empty(points.shape),
        weights.new_empty(weights.shape),
    )


def _save(ctx, inputs, output):
    value, shapes, starts, reference, points, weights, *ctx.options = inputs
    ctx.save_for_backward(value, shapes, starts, reference, points, weights)


def _differentiate(ctx, grad):
    _refuse_tangents(grad)
    need_value, _, _, need_reference = ctx.needs_input_grad[:4]
    arguments = (grad, *ctx.saved_tensors, *ctx.options, need_value, need_reference)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        gradients = msda_backward(*arguments)
    else:
        gradients = _call(msda_backward, *arguments)
    grad_value, grad_reference, grad_points, grad_weights = gradients
    grad_value = grad_value if need_value else None
    grad_reference = grad_reference if need_reference else None
    return grad_value, None, None, grad_reference, grad_points, grad_weights, *(None,) * 6


def _inline(mode, operator, types, arguments, keywords):
    """Hands AOTInductor the Triton kernel in place of the operator: what it packages runs without Python."""
    from torch._inductor.virtualized import V

    value, shapes, starts, reference, points, weights, *options, _, backend, _ = arguments
    if not (V.aot_compilation and value.is_cuda):
        return mode.__torch_dispatch__(operator, types, arguments, keywords)
    if backend == Backend.CUDA:
        raise RuntimeError("backend='cuda' cannot be packaged by AOTInductor: leave it out, or pass backend='triton'")
    from deformops_models.kernels.msda_forward import traced_msda_forward

    with mode:
        output = value.new_empty((value.shape[0], points.shape[1], value.shape[2] * value.shape[3]))
        operands = [_contiguous(t) for t in (value, shapes, starts, reference, points, weights)]
        traced_msda_forward(output, *operands, *options)
    return output


torch.library.register_torch_dispatch("deformops_models::msda_forward", FunctionalTensorMode, _inline, lib=_LIBRARY)


def _refuse(ctx, *grads):
    raise NotImplementedError("the kernels have no second derivative: pass backend='eager' for double backward")


torch.library.register_autograd("deformops_models::msda_backward", _refuse, lib=_LIBRARY)


#: What the dispatcher calls below autograd.
_IMPLEMENTATIONS = {
    (msda_forward, "cuda"): _forward,
    (msda_forward, "cpu"): _forward_cpu,
    (msda_backward, "cuda"): _backward,
    (msda_backward, "cpu"): _backward_cpu,
}


def _call(operator, *arguments):
    """Runs an operator below autograd; without the dispatcher, whose way costs 10 µs, where nobody else listens."""
    device = arguments[0].device.type
    alone = (
        (operator, device) in _IMPLEMENTATIONS
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._functorch.is_legacy_batchedtensor(arguments[0])
        and torch._C._get_tracing_state() is None
        and not torch.autograd._profiler_enabled()
        and all(type(t) in _TENSORS for t in arguments if isinstance(t, Tensor))
    )
    if alone:
        return _IMPLEMENTATIONS[operator, device](*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


_TENSORS = (Tensor, torch.nn.Parameter)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        layout.learn(*arguments[1:3])
        output = _call(msda_forward, *arguments)
        _save(ctx, arguments, output)
        return output

    backward = staticmethod(_differentiate)


def refuse_transforms() -> None:
    """Raises NotImplementedError within a transform of `torch.func` or a level of forward-mode derivatives."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise NotImplementedError(
            "the kernels have no vmap, torch.func transforms or forward-mode derivatives: pass backend='eager'"
        )


def _refuse_tangents(*tensors: Tensor) -> None:
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        refuse_transforms()


def _autograd(value, shapes, starts, reference, points, weights, *options) -> Tensor:
    arguments = (value, shapes, starts, reference, points, weights, *options)
    operands = (value, points, weights) if reference is None else (value, reference, points, weights)
    _refuse_tangents(*operands)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in operands)):
        return _call(msda_forward, *arguments)
    # `torch.func.grad` and what is made of it.
    if torch._C._are_functorch_transforms_active():
        refuse_transforms()
    return _Differentiable.apply(*arguments)


# `register_autograd` would leave out the tangents of forward-mode derivatives without a word.
_LIBRARY.impl("msda_forward", _autograd, "Autograd")


def msda(value, shapes, starts, reference, points, weights, *options) -> Tensor:
    """Calls `msda_forward` by the shortest way, at a quarter of the dispatcher's host time."""
    arguments = (value, shapes, starts, reference, points, weights, *options)
    return (msda_forward if torch.compiler.is_compiling() else _autograd)(*arguments)
