"""Attention weights that are computed when somebody reads them."""

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class LazyWeights(Tensor):
    """Stands for softmax(logits).view(shape) without holding it.

    Any torch function that receives it computes the weights first, with their autograd history, and keeps them.
    """

    _logits: Tensor
    _weights: Tensor | None

    @staticmethod
    def __new__(cls, logits: Tensor, shape: tuple[int, ...]):
        weights = Tensor._make_wrapper_subclass(cls, shape, dtype=logits.dtype, device=logits.device)
        weights._logits, weights._weights = logits, None
        return weights

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__):
            return super().__torch_function__(func, types, args, kwargs)
        args, kwargs = tree_map_only(LazyWeights, _computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(LazyWeights, lambda w: _computed(w).detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _computed(weights: LazyWeights) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        shape = weights.shape
    fields = weights.__dict__
    if fields["_weights"] is None:
        fields["_weights"] = fields["_logits"].softmax(-1).view(shape)
        fields["_logits"] = None
    return fields["_weights"]


def attention_weights(logits: Tensor, shape: tuple[int, ...], *, wanted: bool) -> Tensor:
    """softmax(logits) over the last axis as `shape`, computed now if `wanted`, else on first use."""
    # A tracer drops what is not used; it could not follow the lazy kind.
    if wanted or torch.compiler.is_compiling() or type(logits) is not Tensor:
        return logits.softmax(-1).view(shape)
    return LazyWeights(logits, shape)
