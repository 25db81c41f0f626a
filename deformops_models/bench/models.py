"""Detectors to time in training and inference: real configs of transformers and mmdet, random weights and images."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deformops_models.patching import PatchedModule, family_of

LABELS = 80
_OBJECTS = (7, 12, 5, 9)  # of the images of a batch, in turn

#: Part of a step; owner and name under which a function is called that does it; the function.
Call = tuple[str, Any, str, Callable]


@dataclass(frozen=True)
class Detector:
    """A model with a batch for it.

    Args:
        model: unpatched, without dropout, on the CPU.
        pixels: (B, 3, H, W), on the CPU.
        targets: what the loss compares with, on the CPU.
        loss: of the model, for pixels and targets on its device.
        infer: the model's outputs for pixels and targets, of which it may only look at sizes.
        calls: the functions whose time is counted apart, for the model as it is now, patched or not.
    """

    model: nn.Module
    pixels: Tensor
    targets: Any
    loss: Callable[[nn.Module, Tensor, Any], Tensor]
    infer: Callable[[nn.Module, Tensor, Any], object]
    calls: Callable[[nn.Module], Iterator[Call]]


@dataclass(frozen=True)
class Workload:
    """How a detector is made.

    Args:
        build: gives it; its random numbers come from torch's generator.
        packages: must be importable.
    """

    build: Callable[[], Detector]
    packages: tuple[str, ...] = ("transformers",)


def _call(part: str, owner: Any, attribute: str = "forward") -> Call:
    return part, owner, attribute, getattr(owner, attribute)


def _attentions(model: nn.Module) -> Iterator[Call]:
    """Every deformable attention, patched or not."""
    for module in model.modules():
        family = family_of(type(module))
        if family is not None and family.part == "attention":
            yield _call("msda", module)


def mask2former(
    batch: int, size: int, embed_dim: int = 96, depths: tuple[int, ...] = (2, 2, 6, 2), window: int = 7, **options: Any
) -> Detector:
    """Mask2Former on a Swin; published ones have 100 queries, Swin-B 128 channels, 18 layers and windows of 12."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    heads = [embed_dim // 32 * 2**stage for stage in range(4)]
    swin = SwinConfig(
        embed_dim=embed_dim, depths=list(depths), num_heads=heads, window_size=window, drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    model = Mask2FormerForUniversalSegmentation(Mask2FormerConfig(backbone_config=swin, num_labels=LABELS, **options))
    counts = _counts(batch)
    coarse = [(torch.rand(1, count, size // 64 + 1, size // 64 + 1) > 0.6).float() for count in counts]
    masks = [nn.functional.interpolate(mask, size=(size, size))[0] for mask in coarse]
    classes = [torch.randint(LABELS, (count,)) for count in counts]

    def loss(model: nn.Module, pixels: Tensor, targets: Any) -> Tensor:
        return model(pixel_values=pixels, **targets).loss

    def calls(model: nn.Module) -> Iterator[Call]:
        yield _call("backbone", model.model.pixel_level_module.encoder)
        yield from _attentions(model)
        matcher = model.criterion.matcher
        # The patched loss hands all layers to one method of its matcher.
        yield _call("matching", matcher, "match" if isinstance(matcher, PatchedModule) else "forward")
        yield _call("loss", model, "get_loss_dict")

    targets = {"mask_labels": masks, "class_labels": classes}
    return Detector(model, torch.randn(batch, 3, size, size), targets, loss, _infer, calls)


def deformable_detr(batch: int, height: int = 800, width: int = 1333, **options: Any) -> Detector:
    """Deformable DETR on a ResNet-50, as published, with 300 queries."""
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, ResNetConfig

    defaults = {"backbone_config": ResNetConfig(out_features=["stage2", "stage3", "stage4"])}
    config = DeformableDetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, num_labels=LABELS,
        auxiliary_loss=True, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, **defaults | options,
    )  # fmt: skip
    labels = [
        {"class_labels": torch.randint(LABELS, (count,)), "boxes": torch.rand(count, 4) * 0.4 + 0.3}
        for count in _counts(batch)
    ]

    def loss(model: nn.Module, pixels: Tensor, targets: Any) -> Tensor:
        return model(pixel_values=pixels, labels=targets).loss

    def calls(model: nn.Module) -> Iterator[Call]:
        from transformers.loss import loss_deformable_detr

        from deformops_models.patches import transformers_losses

        yield _call("backbone", model.model.backbone)
        yield from _attentions(model)
        yield _call("matching", loss_deformable_detr.DeformableDetrHungarianMatcher)
        yield _call("matching", transformers_losses, "_match_boxes")
        yield "loss", model, "_loss_function", model.loss_function

    model = DeformableDetrForObjectDetection(config)
    return Detector(model, torch.randn(batch, 3, height, width), labels, loss, _infer, calls)


def _infer(model: nn.Module, pixels: Tensor, targets: Any) -> object:
    return model(pixel_values=pixels)


def dino(batch: int, height: int = 800, width: int = 1333) -> Detector:
    """mmdet's DINO with 4 scales on a ResNet-50, on mmcv-lite."""
    from deformops_models.patches import mmcv_lite

    mmcv_lite.install()
    import mmdet.models
    from mmdet.registry import MODELS as REGISTRY
    from mmdet.structures import DetDataSample
    from mmengine.config import Config
    from mmengine.registry import DefaultScope
    from mmengine.structures import InstanceData

    configs = Path(mmdet.__file__).parent / ".mim" / "configs"
    config = Config.fromfile(configs / "dino" / "dino-4scale_r50_8xb2-12e_coco.py").model
    config.backbone.init_cfg = None
    with DefaultScope.overwrite_default_scope("mmdet"):
        model = REGISTRY.build(config)
    # The one parameter that only init_weights would fill, which logs a line for each of the others.
    nn.init.normal_(model.level_embed)
    samples = []
    for count in _counts(batch):
        corner = torch.rand(count, 2) * torch.tensor([width, height]) * 0.6
        boxes = torch.cat([corner, corner + 30 + torch.rand(count, 2) * 250], 1)
        size = (height, width)
        sample = DetDataSample(metainfo={"img_shape": size, "batch_input_shape": size, "ori_shape": size})
        sample.gt_instances = InstanceData(bboxes=boxes, labels=torch.randint(LABELS, (count,)))
        samples.append(sample)

    def loss(model: nn.Module, pixels: Tensor, targets: Any) -> Tensor:
        losses = model.loss(pixels, targets)
        return sum(sum(part) if isinstance(part, list) else part for part in losses.values())

    def infer(model: nn.Module, pixels: Tensor, targets: Any) -> object:
        return model(pixels, targets, mode="tensor")

    def calls(model: nn.Module) -> Iterator[Call]:
        yield _call("backbone", model.backbone)
        yield from _attentions(model)
        yield _call("matching", model.bbox_head.assigner, "assign")
        yield _call("loss", model.bbox_head, "loss_by_feat")

    return Detector(model, torch.randn(batch, 3, height, width), samples, loss, infer, calls)


def wake_attention(model: nn.Module) -> None:
    """Gives offsets and attention weights something to say: both start out as zero, and the paths through them."""
    for name, module in model.named_modules():
        if name.endswith(("sampling_offsets", "attention_weights")):
            nn.init.normal_(module.weight, std=0.02)


def _counts(batch: int) -> list[int]:
    return [_OBJECTS[i % len(_OBJECTS)] for i in range(batch)]


def on(device: torch.device, data: Any) -> Any:
    """Lists and dicts of what can be moved, moved to the device."""
    if isinstance(data, dict):
        return {name: on(device, entry) for name, entry in data.items()}
    return [on(device, entry) for entry in data] if isinstance(data, list) else data.to(device)


_SWIN_B = {"embed_dim": 128, "depths": (2, 2, 18, 2), "window": 12}
_MMDET = ("mmdet", "mmcv", "mmengine")

#: What `all` stands for.
PUBLISHED = {
    "mask2former_swin_b": Workload(functools.partial(mask2former, 4, 1024, **_SWIN_B)),
    "mask2former_swin_t": Workload(functools.partial(mask2former, 4, 1024)),
    "deformable_detr_r50": Workload(functools.partial(deformable_detr, 4)),
}
MODELS = PUBLISHED | {
    "mask2former_swin_t_512": Workload(functools.partial(mask2former, 2, 512)),
    "deformable_detr_r50_b2": Workload(functools.partial(deformable_detr, 2)),
    "dino_r50": Workload(functools.partial(dino, 2), _MMDET),
}
