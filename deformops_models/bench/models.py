"""Whole detectors to time: real configs of transformers and mmdet, random weights and images."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deformops_models.console import missing
from deformops_models.patching import PatchedModule, family_of

LABELS = 80
_OBJECTS = (7, 12, 5, 9)  # of the images of a batch, in turn

#: Part of a step; owner and name under which a function is called that does it; the function.
Call = tuple[str, Any, str, Callable]


def _call(part: str, owner: Any, attribute: str = "forward") -> Call:
    return part, owner, attribute, getattr(owner, attribute)


def attentions(model: nn.Module) -> Iterator[Call]:
    """Every deformable attention, patched or not."""
    for module in model.modules():
        family = family_of(type(module))
        if family is not None and family.part == "attention":
            yield _call("msda", module)


def _infer(model: nn.Module, inputs: dict[str, Any]) -> Any:
    return model(**inputs)


def _loss(model: nn.Module, inputs: dict[str, Any], targets: dict[str, Any]) -> Tensor:
    return model(**inputs, **targets).loss


@dataclass(frozen=True)
class Detector:
    """A model with a batch for it.

    Args:
        model: unpatched, on the CPU.
        inputs: arguments of its forward, on the CPU; the first is the images, (B, 3, H, W).
        targets: further arguments in training, on the CPU.
        loss: of the model, for inputs and targets on its device.
        infer: the model's outputs for inputs on its device.
        calls: the functions whose time is counted apart, for the model as it is now, patched or not.
        dtype: "bfloat16" for autocast, or "float32".
    """

    model: nn.Module
    inputs: dict[str, Any]
    targets: dict[str, Any]
    loss: Callable[[nn.Module, dict[str, Any], dict[str, Any]], Tensor] = _loss
    infer: Callable[[nn.Module, dict[str, Any]], Any] = _infer
    calls: Callable[[nn.Module], Iterable[Call]] = attentions
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Workload:
    """How a detector is made.

    Args:
        build: gives it; its random numbers come from torch's generator.
        packages: must be importable.
        upstream: its class in transformers, which older versions may not have.
    """

    build: Callable[[], Detector]
    packages: tuple[str, ...] = ("transformers",)
    upstream: str | None = None

    def absent(self) -> str | None:
        """What of it is not installed and the remedy, or None."""
        if problem := missing("all", self.packages):
            return problem
        if self.upstream is not None:
            import transformers

            if not hasattr(transformers, self.upstream):
                return f"transformers {transformers.__version__} has no {self.upstream}: install a newer one"
        return None


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

    def calls(model: nn.Module) -> Iterator[Call]:
        yield _call("backbone", model.model.pixel_level_module.encoder)
        yield from attentions(model)
        matcher = model.criterion.matcher
        # The patched loss hands all layers to one method of its matcher.
        yield _call("matching", matcher, "match" if isinstance(matcher, PatchedModule) else "forward")
        yield _call("loss", model, "get_loss_dict")

    targets = _masks(batch, size)
    return Detector(model, _images(batch, size, size), targets, calls=calls)


def oneformer(batch: int, size: int) -> Detector:
    """OneFormer on a Swin-T, with its texts in training and inference."""
    from transformers import OneFormerConfig, OneFormerForUniversalSegmentation

    config = OneFormerConfig(backbone_config=_swin([1, 2, 3, 4]), num_labels=LABELS, is_training=True)
    texts = {"task_inputs": _tokens(batch, 77).float(), "text_inputs": _tokens(batch, 134, 77)}
    inputs = _images(batch, size, size) | texts
    return Detector(OneFormerForUniversalSegmentation(config), inputs, _masks(batch, size))


def deformable_detr(batch: int, height: int = 800, width: int = 1333, **options: Any) -> Detector:
    """Deformable DETR on a ResNet-50, as published, with 300 queries."""
    from transformers import ResNetConfig

    defaults = {
        "backbone_config": ResNetConfig(out_features=["stage2", "stage3", "stage4"]), "use_timm_backbone": False,
        "use_pretrained_backbone": False, "backbone": None, "num_labels": LABELS, "auxiliary_loss": True,
        "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    }  # fmt: skip

    def calls(model: nn.Module) -> Iterator[Call]:
        from transformers.loss import loss_deformable_detr

        from deformops_models.patches import transformers_losses

        yield _call("backbone", model.model.backbone)
        yield from attentions(model)
        yield _call("matching", loss_deformable_detr.DeformableDetrHungarianMatcher)
        yield _call("matching", transformers_losses, "_match_boxes")
        yield "loss", model, "_loss_function", model.loss_function

    return boxes("DeformableDetr", batch, height, width, calls=calls, **defaults | options)


def boxes(
    family: str,
    batch: int,
    height: int,
    width: int,
    inputs: Mapping[str, Tensor] | None = None,
    labels: int = LABELS,
    loss: Callable = _loss,
    infer: Callable = _infer,
    calls: Callable = attentions,
    **options: Any,
) -> Detector:
    """A detector of transformers from its default config.

    Args:
        family: the name that its classes begin with.
        batch: of images of `height` by `width` pixels.
        inputs: further arguments of its forward.
        labels: kinds of objects in the targets.
        loss: as a `Detector` has it.
        infer: the same.
        calls: the same.
        options: changes of the config.
    """
    import transformers

    targets = [
        {"class_labels": torch.randint(labels, (count,)), "boxes": torch.rand(count, 4) * 0.4 + 0.3}
        for count in _counts(batch)
    ]
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}ForObjectDetection")(config)
    images = _images(batch, height, width) | dict(inputs or {})
    return Detector(model, images, {"labels": targets}, loss, infer, calls)


def _squares(model: nn.Module, inputs: dict[str, Any], targets: dict[str, Any]) -> Tensor:
    """Mean squares of the outputs, for models that have no loss of their own."""
    result = model(**inputs)
    names = ("logits", "pred_boxes", "decoder_class_logits", "decoder_coord_logits")
    return sum(result[name].float().square().mean() for name in names if name in result)


def grounding_dino(family: str, batch: int, height: int = 800, width: int = 1200) -> Detector:
    """Grounding DINO or MM Grounding DINO on a Swin-T, with a text of three classes."""
    # BERT's [CLS], three words with a full stop each, [SEP].
    words = torch.tensor([[101, 4937, 1012, 3899, 1012, 2482, 1012, 102]]).expand(batch, -1)
    return boxes(family, batch, height, width, {"input_ids": words}, 3, backbone_config=_swin([2, 3, 4]))


def omdet_turbo(batch: int, size: int = 640, classes: int = 4, **options: Any) -> Detector:
    """OmDet-Turbo on a Swin-T of transformers, with classes for each image."""
    phrases, tasks = _tokens(batch * classes, 16), _tokens(batch, 16)
    texts = {
        "classes_input_ids": phrases, "classes_attention_mask": torch.ones_like(phrases),
        "tasks_input_ids": tasks, "tasks_attention_mask": torch.ones_like(tasks),
        "classes_structure": torch.full((batch,), classes),
    }  # fmt: skip

    def forgetful(function: Callable) -> Callable:
        def call(model: nn.Module, *batch: dict[str, Any]) -> Any:
            # What it remembers of texts has another call's history. An emptied cache would still count its entries.
            for name in ("language_cache_class", "language_cache_prompt"):
                cache = getattr(model, name)
                setattr(model, name, type(cache)(cache.capacity))
            return function(model, *batch)

        return call

    # This Swin normalises by itself, unlike timm's.
    defaults = {"backbone_config": _swin([2, 3, 4]), "apply_layernorm_after_vision_backbone": False}
    return boxes(
        "OmDetTurbo", batch, size, size, texts, loss=forgetful(_squares), infer=forgetful(_infer), **defaults | options
    )


def mmdet(file: str, batch: int, height: int = 800, width: int = 1333, dtype: str = "bfloat16") -> Detector:
    """A detector of one of mmdet's configs, on mmcv-lite where mmcv's operators are not there."""
    from deformops_models.hub.mmdet import mmdet_config

    path = mmdet_config(f"configs/{file}")
    from mmdet.registry import MODELS as REGISTRY
    from mmdet.structures import DetDataSample
    from mmengine.config import Config
    from mmengine.registry import DefaultScope
    from mmengine.structures import InstanceData

    config = Config.fromfile(path).model
    config.backbone.init_cfg = None
    with DefaultScope.overwrite_default_scope("mmdet"):
        model = REGISTRY.build(config)
    # Left empty until init_weights, which would log a line for every parameter.
    for name, parameter in model.named_parameters():
        if name.endswith("level_embed"):
            nn.init.normal_(parameter)
    samples = []
    for count in _counts(batch):
        corner = torch.rand(count, 2) * torch.tensor([width, height]) * 0.6
        corners = torch.cat([corner, corner + 30 + torch.rand(count, 2) * 250], 1)
        sizes = dict.fromkeys(("img_shape", "batch_input_shape", "ori_shape"), (height, width))
        samples.append(DetDataSample(metainfo=sizes))
        samples[-1].gt_instances = InstanceData(bboxes=corners, labels=torch.randint(LABELS, (count,)))

    def loss(model: nn.Module, inputs: dict[str, Any], targets: dict[str, Any]) -> Tensor:
        return model.parse_losses(model(**inputs, mode="loss"))[0]

    def infer(model: nn.Module, inputs: dict[str, Any]) -> Any:
        return model(**inputs, mode="tensor")

    def calls(model: nn.Module) -> Iterator[Call]:
        yield _call("backbone", model.backbone)
        yield from attentions(model)
        yield _call("matching", model.bbox_head.assigner, "assign")
        yield _call("loss", model.bbox_head, "loss_by_feat")

    inputs = {"inputs": torch.randn(batch, 3, height, width), "data_samples": samples}
    return Detector(model, inputs, {}, loss, infer, calls, dtype)


def wake_attention(model: nn.Module) -> None:
    """Gives offsets and attention weights something to say: both start out as zero, and the paths through them."""
    for name, module in model.named_modules():
        if name.endswith(("sampling_offsets", "attention_weights")):
            nn.init.normal_(module.weight, std=0.02)


def _counts(batch: int) -> list[int]:
    return [_OBJECTS[i % len(_OBJECTS)] for i in range(batch)]


def _images(batch: int, height: int, width: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, height, width)}


def _masks(batch: int, size: int) -> dict[str, list[Tensor]]:
    """Coarse random masks, and their classes, for each image."""
    counts = _counts(batch)
    coarse = [(torch.rand(1, count, size // 64 + 1, size // 64 + 1) > 0.6).float() for count in counts]
    return {
        "mask_labels": [nn.functional.interpolate(mask, size=(size, size))[0] for mask in coarse],
        "class_labels": [torch.randint(LABELS, (count,)) for count in counts],
    }


def _tokens(*shape: int) -> Tensor:
    # CLIP's text encoder reads where the end of a text is: its last token.
    tokens = torch.randint(1, 40000, shape)
    tokens[..., 0], tokens[..., -1] = 49406, 49407
    return tokens


def _swin(stages: Sequence[int]) -> Any:
    """The config of a Swin-T."""
    from transformers import SwinConfig

    return SwinConfig(depths=[2, 2, 6, 2], out_features=[f"stage{i}" for i in stages])


def on(device: torch.device, data: Any) -> Any:
    """Lists and dicts of what can be moved, moved to the device."""
    if isinstance(data, dict):
        return {name: on(device, entry) for name, entry in data.items()}
    return [on(device, entry) for entry in data] if isinstance(data, list) else data.to(device)


def _boxes(family: str, *args: Any, **options: Any) -> Workload:
    return Workload(functools.partial(boxes, family, *args, **options), upstream=f"{family}ForObjectDetection")


_SWIN_B = {"embed_dim": 128, "depths": (2, 2, 18, 2), "window": 12}
_MMDET = ("mmdet", "mmcv", "mmengine")
_DINO = Workload(functools.partial(mmdet, "dino/dino-4scale_r50_8xb2-12e_coco.py", 2), _MMDET)

#: What `--model all` stands for.
PUBLISHED = {
    "mask2former_swin_b": Workload(functools.partial(mask2former, 4, 1024, **_SWIN_B)),
    "mask2former_swin_t": Workload(functools.partial(mask2former, 4, 1024)),
    "deformable_detr_r50": Workload(functools.partial(deformable_detr, 4)),
}
MODELS = PUBLISHED | {
    "mask2former_swin_t_512": Workload(functools.partial(mask2former, 2, 512)),
    "deformable_detr_r50_b2": Workload(functools.partial(deformable_detr, 2)),
    "dino_r50": _DINO,
}
#: Real-size detectors by family.
FAMILIES = {
    "mask2former": Workload(functools.partial(mask2former, 2, 640)),
    "oneformer": Workload(functools.partial(oneformer, 2, 640)),
    "deformable_detr": Workload(functools.partial(deformable_detr, 2)),
    "grounding_dino": Workload(functools.partial(grounding_dino, "GroundingDino", 2)),
    "mm_grounding_dino": Workload(
        functools.partial(grounding_dino, "MMGroundingDino", 2), upstream="MMGroundingDinoForObjectDetection"
    ),
    "omdet_turbo": Workload(functools.partial(omdet_turbo, 2)),
    "rt_detr": _boxes("RTDetr", 4, 640, 640, num_labels=LABELS),
    "rt_detr_v2": _boxes("RTDetrV2", 4, 640, 640, num_labels=LABELS),
    "d_fine": _boxes("DFine", 4, 640, 640, num_labels=LABELS),
    "deimv2": _boxes("Deimv2", 4, 640, 640, num_labels=LABELS),
    # Its default config has no level.
    "lw_detr": _boxes("LwDetr", 4, 640, 640, num_labels=LABELS, projector_scale_factors=[1.0]),
    "rf_detr": _boxes("RfDetr", 4, 560, 560, num_labels=LABELS),
    # The kinds of its reading order have no default.
    "pp_doclayout_v2": _boxes(
        "PPDocLayoutV2", 2, 800, 800, loss=_squares,
        num_labels=20, class_thresholds=[0.5] * 20, class_order=list(range(20)),
    ),
    "pp_doclayout_v3": _boxes("PPDocLayoutV3", 2, 800, 800, loss=_squares),
    "pp_doclayout_v4": _boxes("PPDocLayoutV4", 2, 800, 800, loss=_squares),
    "mmdet_deformable_detr": Workload(
        functools.partial(mmdet, "deformable_detr/deformable-detr_r50_16xb2-50e_coco.py", 2), _MMDET
    ),
    "mmdet_dino": _DINO,
    # Under autocast upstream writes float32 overlaps of boxes into bfloat16 scores, which raises.
    "mmdet_ddq": Workload(
        functools.partial(mmdet, "ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py", 2, dtype="float32"), _MMDET
    ),
}  # fmt: skip
