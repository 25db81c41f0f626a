"""Attention weights that are computed when somebody reads them."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class LazyWeights(Tensor):
    """Stands for softmax(logits).view(shape) without holding it, with its autograd history.

    Any torch function that receives it computes the weights first and keeps them.
    """

    _logits: Tensor
    _read: Tensor | None
    _history: torch.autograd.graph.Node | None

    @staticmethod
    def __new__(cls, logits: Tensor, shape: tuple[int, ...]):
        # As CUDA's autocast would, which may have ended when somebody reads.
        dtype = torch.float32 if logits.is_cuda and torch.is_autocast_enabled("cuda") else logits.dtype
        weights = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=logits.device)
        weights._logits, weights._read, weights._history = logits.detach(), None, None
        return weights

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in _ANSWERS:
            return super().__torch_function__(func, types, args, kwargs)
        args, kwargs = tree_map_only(LazyWeights, _read, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(LazyWeights, _values, (args, kwargs or {}))
        return func(*args, **kwargs)


# What can be answered without the weights.
_ANSWERS = [
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn")
]


class _Softmax(torch.autograd.Function):
    """Gives lazy weights their history; costs nothing when no gradient reaches them."""

    @staticmethod
    def forward(ctx, logits, shape):
        ctx.save_for_backward(logits)
        return LazyWeights(logits, shape)

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        grad = grad.reshape(logits.shape)
        weights = logits.softmax(-1, dtype=grad.dtype)
        return (weights * (grad - (weights * grad).sum(-1, keepdim=True))).to(logits.dtype), None


class _Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights):
        values = _values(weights)
        # What autograd calls a view could not be changed in place.
        return torch.ops.aten._unsafe_view(values, values.shape) if values._is_view() else values

    @staticmethod
    def backward(ctx, grad):
        return grad


def _values(weights: LazyWeights) -> Tensor:
    """The weights without history."""
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype = weights.shape, weights.dtype
        read, logits = weights._read, weights._logits
    return read.detach() if read is not None else logits.softmax(-1, dtype=dtype).view(shape)


def _read(weights: LazyWeights) -> Tensor:
    """The weights with their history, the same tensor every time unless autograd gave them another history."""
    with torch._C.DisableTorchFunctionSubclass():
        history = weights.grad_fn
        if weights._read is None or weights._history is not history:
            # The first reader may want no gradients, and the next one may.
            with torch.inference_mode(weights._logits.is_inference()), torch.enable_grad():
                weights._read, weights._history = _Reading.apply(weights), history
        return weights._read


def attention_weights(logits: Tensor, shape: tuple[int, ...], *, wanted: bool) -> Tensor:
    """softmax(logits) over the last axis as `shape`, computed now if `wanted`, else on first use."""
    # A tracer drops what is not used; it could not follow the lazy kind.
    if wanted or torch.compiler.is_compiling() or type(logits) is not Tensor:
        return logits.softmax(-1).view(shape)
    if torch.is_grad_enabled() and logits.requires_grad:
        return _Softmax.apply(logits, shape)
    return LazyWeights(logits, shape)
