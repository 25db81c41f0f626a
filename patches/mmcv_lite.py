"""A stand-in for `mmcv._ext`, the compiled half of mmcv: `mmcv.ops` imports and DETR-like detectors run without it.

mmcv-lite ships every Python file of `mmcv.ops` but not `mmcv._ext`. The few operators that DETR-like detectors need are
here in plain PyTorch; any other one raises when it is called, naming itself and what to install.
"""

import importlib.util
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_NAME = "mmcv._ext"
_NMS_BLOCK = 1024


def install() -> bool:
    """Makes `mmcv.ops` importable where mmcv has no compiled operators; a second call changes nothing.

    A compiled mmcv is never replaced. If `mmcv.cnn.bricks.transformer` was imported before, the attention class that it
    then had to leave out is added to it.

    Returns:
        True if `mmcv.ops` runs on the stand-in, False if it runs on mmcv's own compiled operators.

    Raises:
        ModuleNotFoundError: neither mmcv nor mmcv-lite is installed.
    """
    present = sys.modules.get(_NAME)
    if present is None:
        if importlib.util.find_spec(_NAME) is not None:
            return False
        sys.modules[_NAME] = _StandIn(_NAME)
    elif not isinstance(present, _StandIn):
        return False
    bricks = sys.modules.get("mmcv.cnn.bricks.transformer")
    if bricks is not None and not hasattr(bricks, "MultiScaleDeformableAttention"):
        from mmcv.ops import MultiScaleDeformableAttention

        bricks.MultiScaleDeformableAttention = MultiScaleDeformableAttention
    return True


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Greedy non-maximum suppression.

    Args:
        boxes: (N, 4) as x1, y1, x2, y2.
        scores: (N,).
        iou_threshold: a box goes when its overlap with a kept, better one is larger.
        offset: 0 or 1, added to every width and height.

    Returns:
        Indices of the kept boxes, best first, int64.
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = _wide(boxes[order])
    area = (boxes[:, 2:] - boxes[:, :2] + offset).prod(1)
    rank = torch.arange(len(boxes), device=boxes.device)
    kept = rank[:0]
    # Blocks bound the memory: a whole overlap matrix of 20,000 boxes would be 1.6 GB.
    for block in rank.split(_NMS_BLOCK):
        block = block[~_overlaps(boxes, area, kept, block, iou_threshold, offset).any(0)]
        beats = _overlaps(boxes, area, block, block, iou_threshold, offset).triu(1)
        alive = torch.ones_like(block, dtype=torch.bool)
        # Each round settles at least the next box in rank, so this ends where the greedy loop does.
        while not torch.equal(alive, settled := ~(beats & alive[:, None]).any(0)):
            alive = settled
        kept = torch.cat([kept, block[alive]])
    return order[kept]


def sigmoid_focal_loss_forward(
    logits: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    """Focal loss of every class of every row, written into `output`.

    Args:
        logits: (N, C).
        target: (N,) int64 class of each row; C is background.
        weight: (C,) factor per target class, or empty.
        output: (N, C), written.
        gamma: exponent of the modulating factor.
        alpha: weight of the positive term, 1 - alpha of the negative one.
    """
    output.copy_(_focal_loss(_wide(logits), target, weight, gamma, alpha))


def sigmoid_focal_loss_backward(
    logits: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    """Derivative of `sigmoid_focal_loss_forward` by its logits, written into `grad_input` (N, C)."""
    with torch.enable_grad():
        x = _wide(logits.detach()).requires_grad_()
        (grad,) = torch.autograd.grad(_focal_loss(x, target, weight, gamma, alpha).sum(), x)
    grad_input.copy_(grad)


def ms_deform_attn_forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    locations: Tensor,
    weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """What an unpatched mmcv module calls on a GPU; slow and said to be so. Shapes as in `deformops_models.msda`."""
    warnings.warn(
        "this mmcv has no compiled operators: MultiScaleDeformableAttention runs in plain PyTorch; "
        "deformops_models.patch(model) puts it on the Triton kernel",
        stacklevel=2,
    )
    return _attention(spatial_shapes, value, locations, weights).to(value.dtype)


def ms_deform_attn_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    locations: Tensor,
    weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_locations: Tensor,
    grad_weights: Tensor,
    im2col_step: int,
) -> None:
    """Gradients of `ms_deform_attn_forward`, written into the last three tensors."""
    inputs = [x.detach().requires_grad_() for x in (value, locations, weights)]
    with torch.enable_grad():
        output = _attention(spatial_shapes, *inputs)
    gradients = torch.autograd.grad(output, inputs, grad_output.to(output.dtype))
    for target, gradient in zip((grad_value, grad_locations, grad_weights), gradients, strict=True):
        target.copy_(gradient)


class _StandIn(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name, "Stand-in of deformops_models for mmcv's compiled operators.")
        self.__spec__ = ModuleSpec(name, loader=None)
        for op in _OPS:
            setattr(self, op.__name__, op)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(
                f"the mmcv operator {name!r} is compiled code, and the installed mmcv has none: install a full mmcv "
                "2.1 in place of mmcv-lite (https://mmcv.readthedocs.io/en/latest/get_started/installation.html)"
            )

        return missing


_OPS = (
    nms,
    sigmoid_focal_loss_forward,
    sigmoid_focal_loss_backward,
    ms_deform_attn_forward,
    ms_deform_attn_backward,
)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _overlaps(boxes: Tensor, area: Tensor, rows: Tensor, columns: Tensor, threshold: float, offset: int) -> Tensor:
    a, b = boxes[rows, None], boxes[None, columns]
    sides = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2]) + offset
    inter = sides.clamp_(min=0).prod(-1)
    return inter > threshold * (area[rows, None] + area[None, columns] - inter)


def _focal_loss(x: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float) -> Tensor:
    positive = target[:, None] == torch.arange(x.shape[1], device=x.device)
    z = torch.where(positive, x, -x)
    one_hot = positive.to(x.dtype)
    factor = alpha * one_hot + (1 - alpha) * (1 - one_hot)
    if weight.numel():
        factor = factor * F.pad(_wide(weight), (0, 1), value=1.0)[target][:, None]
    return -factor * torch.sigmoid(-z).pow(gamma) * F.logsigmoid(z)


def _attention(spatial_shapes: Tensor, *operands: Tensor) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch

    value, locations, weights = map(_wide, operands)
    return multi_scale_deformable_attn_pytorch(value, spatial_shapes, locations, weights)
