"""Tiny real detectors, built from their libraries' configs without network, with inputs and training targets.

Every weight, input and random draw is the same each time and on every device: matching and top-k are discontinuous, so
that another draw could compare two different trainings.
"""

import contextlib
import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_flatten_with_path

Tensors = dict[str, Tensor]

# The coarsest of four levels has 2×2 pixels: normalising fewer is ill-conditioned.
HEIGHT, WIDTH = 72, 104
#: Height and width of each image's content; the rest of the second one is padding.
CONTENT = ((72, 104), (60, 77))
#: Per image: class and box as cx, cy, w, h, relative to the padded image.
OBJECTS = (
    ((1, (0.3, 0.4, 0.3, 0.5)), (0, (0.7, 0.6, 0.4, 0.3)), (2, (0.5, 0.2, 0.2, 0.25))),
    ((2, (0.35, 0.35, 0.5, 0.4)),),
)
LABELS = 3


@dataclass(frozen=True)
class Detector:
    """A kind of detector. `attentions` is its number of deformable attention modules, all of class `attention`."""

    name: str
    framework: str
    attention: str
    attentions: int
    build_untouched: Callable[[], nn.Module]
    call: Callable[[nn.Module, bool], object]

    def build(self) -> nn.Module:
        """The model in float32 on the CPU, in eval mode; sampling offsets and attention weights depend on the input."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model = self.build_untouched().eval()
            for name, module in model.named_modules():
                if isinstance(module, nn.BatchNorm2d):
                    # A step leaves the running statistics alone.
                    module.momentum = 0.0
                # Both projections start out as zero in every library.
                if name.endswith(("sampling_offsets", "attention_weights")):
                    nn.init.normal_(module.weight, std=2 / math.sqrt(module.in_features))
                # Without biases a padded region stays zero, and normalising zeros is ill-conditioned.
                elif isinstance(bias := getattr(module, "bias", None), Tensor):
                    with torch.no_grad():
                        bias.add_(torch.randn_like(bias), alpha=0.3)
        return model


def outputs(detector: Detector, model: nn.Module) -> Tensors:
    """Every floating-point tensor of the model's output, by name."""
    with torch.no_grad(), reproducible(model):
        return _named(detector.call(model, False))


def training_step(
    detector: Detector, model: nn.Module, autocast: torch.dtype | None = None, choices: list[Tensor] | None = None
) -> tuple[Tensors, Tensors]:
    """One forward and backward pass in training mode; leaves neither gradients nor the mode behind.

    Args:
        detector, model: the model may be on any device; in float64 it runs in float64 throughout.
        autocast: dtype of an autocast around the forward pass.
        choices: indices of every top-k and signs of every ReLU's input, in order. An empty list is filled with this
            run's, a full one is followed, so that rounding does not make it another training.

    Returns:
        The total as "loss" and every part of it, and the gradient of every parameter that got one.
    """
    was_training = model.training
    model.train()
    model.zero_grad()
    device = next(model.parameters()).device.type
    with reproducible(model, choices):
        with torch.autocast(device, autocast, enabled=autocast is not None):
            losses = detector.call(model, True)
        losses["loss"].backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.train(was_training)
    return _named(losses), gradients


def attentions(model: nn.Module, detector: Detector) -> dict[str, nn.Module]:
    """Its deformable attention modules by name, patched or not."""
    return {n: m for n, m in model.named_modules() if detector.attention in (c.__name__ for c in type(m).__mro__)}


def anatomy(model: nn.Module) -> dict[str, object]:
    """Everything of a model that a patch could leave a trace in, by module."""
    hooks = {n for n, v in vars(nn.Module()).items() if "hook" in n}
    return {
        name: (id(m), type(m), m.training, sorted(vars(m)), {n: list(vars(m)[n].values()) for n in hooks if vars(m)[n]})
        for name, m in model.named_modules()
    } | {"state_dict": {name: t.data_ptr() for name, t in model.state_dict().items()}}


def assert_as_accurate(actual: Tensors, plain: Tensors, exact: Tensors, eps: float) -> None:
    """Each tensor's error may be twice the plain path's plus one rounding `eps` of a tensor of average norm.

    A tensor of few elements is a small sample of the plain path's error, so the relative error of all tensors counts
    too, as root mean square. Elements that are not finite have to be the same.
    """
    assert actual.keys() == plain.keys() == exact.keys()
    for name, t in exact.items():
        odd = ~t.isfinite().cpu()
        assert torch.equal(~actual[name].isfinite().cpu(), odd), f"{name} is finite where upstream is not, or reversed"
        assert torch.equal(actual[name].cpu()[odd], t.cpu()[odd].to(actual[name].dtype)), name
    actual, plain, exact = ({n: _finite(t) for n, t in ts.items()} for ts in (actual, plain, exact))
    norms = {name: t.norm() for name, t in exact.items()}
    errors = {name: (plain[name] - t).norm() for name, t in exact.items()}
    average = torch.stack(list(norms.values())).square().mean().sqrt()
    relative = torch.stack([errors[name] / norms[name] for name in norms if norms[name] > math.sqrt(eps) * average])
    overall = relative.square().mean().sqrt()
    for name, t in exact.items():
        bound = 2 * (torch.maximum(errors[name], overall * norms[name]) + eps * average)
        error = (actual[name] - t).norm()
        assert error <= bound, f"{name}, norm {norms[name]:.3e}: error {error:.3e} exceeds its budget {bound:.3e}"


def _finite(t: Tensor) -> Tensor:
    return t.double().cpu().nan_to_num(0, 0, 0)


def _named(tree: object) -> Tensors:
    leaves = tree_flatten_with_path(tree)[0]
    return {keystr(path): t.detach() for path, t in leaves if isinstance(t, Tensor) and t.is_floating_point()}


class _SameNumbers(TorchFunctionMode):
    """Random tensors come from one generator, in float32 on the CPU; in float64 nothing is less precise."""

    def __init__(self, double: bool, choices: list[Tensor] | None):
        super().__init__()
        self.double = double
        self.choices = choices
        self.followed = iter(list(choices)) if choices else None
        self.generator = torch.Generator().manual_seed(11)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.rand, torch.randn) and "generator" not in kwargs:
            shape = args[0] if isinstance(args[0], (tuple, list, torch.Size)) else args
            target = {"device": kwargs.get("device"), "dtype": kwargs.get("dtype") or torch.get_default_dtype()}
            return func(shape, generator=self.generator, dtype=torch.float32).to(**target)
        if func is torch.rand_like:
            return torch.rand(args[0].shape, generator=self.generator, dtype=torch.float32).to(args[0])
        if func is torch.randint_like:
            low, high = args[1:] or (kwargs["low"], kwargs["high"])
            target = {"device": args[0].device, "dtype": kwargs.get("dtype") or args[0].dtype}
            return torch.randint(low, high, args[0].shape, generator=self.generator).to(**target)
        if func is Tensor.float and self.double:
            return args[0].double()
        if self.double and kwargs.get("dtype") is torch.float32 and "generator" not in kwargs:
            kwargs = kwargs | {"dtype": torch.float64}
        if self.choices is None:
            return func(*args, **kwargs)
        if func in (torch.topk, Tensor.topk):
            top = func(*args, **kwargs)
            indices = self._choose(top.indices)
            return type(top)((args[0].gather(kwargs.get("dim", -1), indices), indices))
        if func in (torch.relu, torch.relu_, nn.functional.relu, Tensor.relu, Tensor.relu_):
            in_place = func in (torch.relu_, Tensor.relu_) or True in args[1:] or kwargs.get("inplace", False)
            return (Tensor.mul_ if in_place else torch.mul)(args[0], self._choose(args[0] > 0))
        return func(*args, **kwargs)

    def _choose(self, own: Tensor) -> Tensor:
        """The first run's choice in place of this run's own, which may choose for several layers at once."""
        if self.followed is None:
            self.choices.append(own.clone())
            return own
        chosen = [next(self.followed)]
        while sum(map(len, chosen)) < len(own):
            chosen.append(next(self.followed))
        return torch.cat(chosen).to(own.device)


@contextlib.contextmanager
def reproducible(model: nn.Module, choices: list[Tensor] | None = None) -> Iterator[None]:
    """The same random numbers in every precision and on every device; new tensors in the model's precision."""
    default = torch.get_default_dtype()
    double = next(model.parameters()).dtype == torch.float64
    try:
        torch.set_default_dtype(torch.float64 if double else torch.float32)
        with (
            _SameNumbers(double, choices),
            torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=True),
        ):
            yield
    finally:
        torch.set_default_dtype(default)


def pixels_and_mask(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Images (2, 3, H, W), zero where padded, and their mask (2, H, W), 1 inside an image."""
    like = next(model.parameters())
    pixels = torch.randn(2, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float32)
    mask = torch.zeros(2, HEIGHT, WIDTH, dtype=torch.int64)
    for image, (height, width) in enumerate(CONTENT):
        mask[image, :height, :width] = 1
    return (pixels * mask[:, None]).to(like.device, like.dtype), mask.to(like.device)


def _targets(model: nn.Module) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per image: classes (N,), boxes (N, 4) as relative cx, cy, w, h, and masks (N, H, W) of ellipses in the boxes."""
    like = next(model.parameters())
    y, x = torch.meshgrid(torch.arange(HEIGHT) / HEIGHT, torch.arange(WIDTH) / WIDTH, indexing="ij")
    targets = []
    for objects in OBJECTS:
        classes = torch.tensor([label for label, _ in objects])
        boxes = torch.tensor([box for _, box in objects], dtype=torch.float32)
        cx, cy, w, h = boxes[:, :, None, None].unbind(1)
        masks = ((x - cx) / w).square() + ((y - cy) / h).square() < 0.25
        targets.append((classes.to(like.device), boxes.to(like), masks.to(like)))
    return targets


# transformers


def _hf_mask2former() -> nn.Module:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    backbone = SwinConfig(
        image_size=32, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4], window_size=4, drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, num_attention_heads=2,
        encoder_layers=2, decoder_layers=2, encoder_feedforward_dim=64, dim_feedforward=64, num_queries=6,
        num_labels=LABELS, train_num_points=60,
    )  # fmt: skip
    return Mask2FormerForUniversalSegmentation(config)


def _hf_oneformer() -> nn.Module:
    from transformers import OneFormerConfig, OneFormerForUniversalSegmentation, SwinConfig

    backbone = SwinConfig(
        image_size=32, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4], window_size=4, drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = OneFormerConfig(
        backbone_config=backbone, conv_dim=64, mask_dim=64, hidden_dim=64, num_attention_heads=2, encoder_layers=1,
        decoder_layers=2, query_dec_layers=1, encoder_feedforward_dim=64, dim_feedforward=64, num_queries=6,
        num_labels=LABELS, train_num_points=60, dropout=0.0, task_seq_len=8, text_encoder_width=64,
        text_encoder_context_length=8, text_encoder_num_layers=1, text_encoder_vocab_size=20, text_encoder_n_ctx=2,
        is_training=True,
    )  # fmt: skip
    return OneFormerForUniversalSegmentation(config)


def _call_hf_oneformer(model: nn.Module, train: bool) -> object:
    pixels, mask = pixels_and_mask(model)
    texts = torch.arange(2 * 4 * 8, device=pixels.device).view(2, 4, 8) % 20
    targets = {}
    if train:
        classes, _, masks = zip(*_targets(model), strict=True)
        targets = {"class_labels": list(classes), "mask_labels": [m.to(pixels) for m in masks]}
    return dict(
        model(pixel_values=pixels, task_inputs=texts[:, 0].to(pixels), text_inputs=texts, pixel_mask=mask, **targets)
    )


def _call_hf_mask2former(model: nn.Module, train: bool) -> object:
    pixels, mask = pixels_and_mask(model)
    targets = {}
    if train:
        classes, _, masks = zip(*_targets(model), strict=True)
        targets = {"class_labels": list(classes), "mask_labels": list(masks)}
    result = model(pixel_values=pixels, pixel_mask=mask, output_hidden_states=True, **targets)
    return dict(result)


def hf_deformable_detr(**options) -> nn.Module:
    """A DeformableDetrForObjectDetection of one or four levels; `options` go to its config."""
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, ResNetConfig

    levels = options.setdefault("num_feature_levels", 4)
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"] if levels == 1 else ["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = DeformableDetrConfig(
        backbone_config=backbone, d_model=32, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, encoder_attention_heads=2, decoder_attention_heads=2, num_queries=9, dropout=0.0,
        activation_dropout=0.0, attention_dropout=0.0, auxiliary_loss=True, num_labels=LABELS,
        two_stage_num_proposals=9, **options,
    )  # fmt: skip
    return DeformableDetrForObjectDetection(config)


def _call_hf_deformable_detr(model: nn.Module, train: bool) -> object:
    pixels, mask = pixels_and_mask(model)
    labels = None
    if train:
        labels = [{"class_labels": classes, "boxes": boxes} for classes, boxes, _ in _targets(model)]
    return dict(model(pixel_values=pixels, pixel_mask=mask, labels=labels))


def _hf_rt_detr(family: str, stages=("stage2", "stage3", "stage4"), **options) -> nn.Module:
    """An RT-DETR, or of a family that has its encoder, for object detection; `options` go to its config."""
    import transformers

    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=list(stages),
    )  # fmt: skip
    options = {"num_denoising": 4, "encoder_in_channels": [16, 16, 32]} | options
    config = getattr(transformers, f"{family}Config")(
        backbone_config=backbone, encoder_hidden_dim=32, d_model=32, decoder_in_channels=[32] * 3,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        decoder_layers=2, num_queries=9, num_labels=LABELS, freeze_backbone_batch_norms=False, **options,
    )  # fmt: skip
    return getattr(transformers, f"{family}ForObjectDetection")(config)


def _call_hf_rt_detr(model: nn.Module, train: bool) -> object:
    labels = None
    if train:
        labels = [{"class_labels": classes, "boxes": boxes} for classes, boxes, _ in _targets(model)]
    # Its encoder doubles the coarser levels: whole multiples of 32.
    return dict(model(pixel_values=pixels_and_mask(model)[0][..., :64, :96], labels=labels))


def _hf_grounding_dino(family: str) -> nn.Module:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    text = transformers.BertConfig(
        vocab_size=1100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config = getattr(transformers, f"{family}Config")(
        backbone_config=backbone, text_config=text, d_model=64, encoder_layers=1, decoder_layers=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2, num_queries=9,
        num_feature_levels=3, dropout=0.0, fusion_droppath=0.0, max_text_len=16,
        auxiliary_loss=True,
    )  # fmt: skip
    return getattr(transformers, f"{family}ForObjectDetection")(config)


def _call_hf_grounding_dino(model: nn.Module, train: bool) -> object:
    pixels, mask = pixels_and_mask(model)
    labels = None
    if train:
        labels = [{"class_labels": classes, "boxes": boxes} for classes, boxes, _ in _targets(model)]
    # BERT's [CLS], three classes of one or two words with a full stop each, [SEP].
    text = torch.tensor([[101, 1050, 1012, 1051, 1052, 1012, 1053, 1012, 102]], device=pixels.device).repeat(2, 1)
    return dict(model(pixel_values=pixels, pixel_mask=mask, input_ids=text, labels=labels))


def _hf_omdet_turbo() -> nn.Module:
    from transformers import CLIPTextConfig, OmDetTurboConfig, OmDetTurboForObjectDetection, SwinConfig

    backbone = SwinConfig(
        image_size=32, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4], window_size=4, drop_path_rate=0.0,
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    text = CLIPTextConfig(
        vocab_size=50, hidden_size=48, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=1, eos_token_id=49,
    )  # fmt: skip
    config = OmDetTurboConfig(
        backbone_config=backbone, text_config=text, apply_layernorm_after_vision_backbone=False,
        text_projection_in_dim=48, text_projection_out_dim=48, class_embed_dim=48, task_encoder_hidden_dim=32,
        num_queries=9, encoder_hidden_dim=32, decoder_hidden_dim=32, vision_features_channels=[32] * 3,
        encoder_in_channels=[32, 64, 128], encoder_attention_heads=2, encoder_dim_feedforward=32, decoder_num_heads=2,
        decoder_num_layers=2, decoder_dim_feedforward=32,
    )  # fmt: skip
    return OmDetTurboForObjectDetection(config)


def _call_hf_omdet_turbo(model: nn.Module, train: bool) -> object:
    for cache in (model.language_cache_class, model.language_cache_prompt):
        cache.cache.clear()
    pixels, _ = pixels_and_mask(model)
    words = torch.tensor([[1, 7, 49, 0], [1, 9, 49, 0], [1, 9, 8, 49]], device=pixels.device)
    result = model(
        pixel_values=pixels[..., :64, :96], classes_input_ids=words, classes_attention_mask=words.sign(),
        tasks_input_ids=words[:2], tasks_attention_mask=words[:2].sign(),
        classes_structure=torch.tensor([2, 1], device=pixels.device),
    )  # fmt: skip
    if not train:
        return dict(result)
    # It has no loss of its own.
    parts = {name: result[name] for name in ("decoder_coord_logits", "decoder_class_logits")}
    return {"loss": sum(part.square().mean() for part in parts.values())}


def _hf_pp_doclayout(version: int) -> nn.Module:
    import transformers

    if not hasattr(transformers, f"PPDocLayoutV{version}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no PP-DocLayout v{version}")
    options = {}
    if version == 2:
        from transformers.models.pp_doclayout_v2.configuration_pp_doclayout_v2 import PPDocLayoutV2ReadingOrderConfig

        reading = PPDocLayoutV2ReadingOrderConfig(
            hidden_size=12, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1, num_classes=LABELS,
            coordinate_size=2, shape_size=2, global_pointer_head_size=8, relation_bias_embed_dim=4,
        )  # fmt: skip
        options = {"reading_order_config": reading, "class_thresholds": [0.5] * LABELS, "class_order": [2, 0, 1]}
    if version == 3:
        stages = ["stage1", "stage2", "stage3", "stage4"]
        options = {"mask_feature_channels": [8, 8], "x4_feat_dim": 8, "num_prototypes": 4, "stages": stages}
    if version == 4:
        options = {"hidden_size": 32}
    return _hf_rt_detr(f"PPDocLayoutV{version}", gp_dropout_value=0.0, **options)


def _call_hf_pp_doclayout(model: nn.Module, train: bool) -> object:
    result = dict(_call_hf_rt_detr(model, False))
    # It has no loss of its own.
    return {"loss": sum(result[name].square().mean() for name in ("logits", "pred_boxes"))} if train else result


def _hf_lw_detr() -> nn.Module:
    from transformers import LwDetrConfig, LwDetrForObjectDetection, LwDetrViTConfig

    backbone = LwDetrViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=64, pretrain_image_size=32, patch_size=8,
        num_windows=4, window_block_indices=[0], out_indices=[0, 1],
    )  # fmt: skip
    config = LwDetrConfig(
        backbone_config=backbone, projector_scale_factors=[2.0, 0.5], d_model=32, c2f_num_blocks=1, num_queries=9,
        decoder_layers=2, decoder_ffn_dim=32, decoder_n_points=2, decoder_self_attention_heads=2,
        decoder_cross_attention_heads=4, group_detr=2, num_labels=LABELS,
    )  # fmt: skip
    return LwDetrForObjectDetection(config)


def _hf_rf_detr() -> nn.Module:
    from transformers import RfDetrConfig, RfDetrDinov2Config, RfDetrForObjectDetection

    backbone = RfDetrDinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=8, num_windows=4,
        mlp_ratio=2, out_features=["stage1", "stage2"],
    )  # fmt: skip
    config = RfDetrConfig(
        backbone_config=backbone, d_model=32, c2f_num_blocks=1, num_queries=9, decoder_layers=2, decoder_ffn_dim=32,
        decoder_n_points=2, decoder_self_attention_heads=2, decoder_cross_attention_heads=4, group_detr=2, dropout=0.0,
        num_labels=LABELS,
    )  # fmt: skip
    return RfDetrForObjectDetection(config)


def _call_hf_square(model: nn.Module, train: bool) -> object:
    """For backbones that cut a square image into windows."""
    pixels, mask = pixels_and_mask(model)
    labels = None
    if train:
        labels = [{"class_labels": classes, "boxes": boxes} for classes, boxes, _ in _targets(model)]
    return dict(model(pixel_values=pixels[..., :64, :64], pixel_mask=mask[..., :64, :64], labels=labels))


# mmdet


def _mmdet(config_file: str, changes: dict[str, object]) -> nn.Module:
    import_mmcv_ops()
    import mmdet.models
    from mmdet.registry import MODELS
    from mmengine.config import Config
    from mmengine.registry import DefaultScope

    config = Config.fromfile(Path(mmdet.__file__).parent / ".mim/configs" / config_file)
    config.merge_from_dict({f"model.{key}": value for key, value in changes.items()})
    with DefaultScope.overwrite_default_scope("mmdet"):
        # Building writes into its argument.
        model = MODELS.build(copy.deepcopy(config.model))
    model.cfg = config
    # Left empty until init_weights, which would log a line for every parameter.
    for name, parameter in model.named_parameters():
        if name.endswith("level_embed"):
            nn.init.normal_(parameter)
    return model


_RESNET = {
    "backbone.depth": 18,
    "backbone.base_channels": 8,
    "backbone.stem_channels": 8,
    "backbone.init_cfg": None,
    "backbone.frozen_stages": -1,
}


def _detr_changes(width: int) -> dict[str, object]:
    changes = {**_RESNET, "neck.in_channels": [16, 32, 64], "neck.out_channels": width, "num_queries": 9}
    changes |= {"positional_encoding.num_feats": width // 2, "bbox_head.num_classes": LABELS}
    changes |= {"bbox_head.embed_dims": width} if width != 256 else {}
    for part, attention in (("encoder", ("self_attn_cfg",)), ("decoder", ("self_attn_cfg", "cross_attn_cfg"))):
        changes[f"{part}.num_layers"] = 1 if part == "encoder" else 2
        changes |= {f"{part}.layer_cfg.ffn_cfg.{k}": v for k, v in _ffn(width).items()}
        for name in attention:
            changes |= {f"{part}.layer_cfg.{name}.{k}": v for k, v in _attention(width).items()}
    return changes


def _ffn(width: int) -> dict[str, object]:
    return {"embed_dims": width, "feedforward_channels": 64, "ffn_drop": 0.0}


def _attention(width: int) -> dict[str, object]:
    return {"embed_dims": width, "num_heads": 2, "dropout": 0.0}


def _mm_deformable_detr(file: str, width: int = 32) -> Callable[[], nn.Module]:
    return lambda: _mmdet(f"deformable_detr/{file}", _detr_changes(width))


def _mm_dino_4scale() -> nn.Module:
    return _mmdet("dino/dino-4scale_r50_8xb2-12e_coco.py", _detr_changes(256) | {"dn_cfg.group_cfg.num_dn_queries": 8})


def _mm_dino_5scale() -> nn.Module:
    swin = {
        "backbone.embed_dims": 16, "backbone.depths": [1, 1, 1, 1], "backbone.num_heads": [1, 2, 2, 4],
        "backbone.window_size": 4, "backbone.drop_path_rate": 0.0, "backbone.init_cfg": None,
        "backbone.patch_size": 8, "backbone.strides": [8, 2, 2, 2], "neck.in_channels": [16, 32, 64, 128],
    }  # fmt: skip
    changes = {k: v for k, v in _detr_changes(256).items() if not k.startswith("backbone.")}
    changes |= {"dn_cfg.group_cfg.num_dn_queries": 8} | swin
    return _mmdet("dino/dino-5scale_swin-l_8xb2-12e_coco.py", changes)


def _mm_mask2former() -> nn.Module:
    head = "panoptic_head"
    pixel, decoder = f"{head}.pixel_decoder.encoder", f"{head}.transformer_decoder"
    changes = {
        **_RESNET, f"{head}.in_channels": [8, 16, 32, 64], f"{head}.feat_channels": 32, f"{head}.out_channels": 32,
        f"{head}.num_queries": 6, f"{head}.num_things_classes": LABELS, f"{head}.positional_encoding.num_feats": 16,
        f"{head}.loss_cls.class_weight": [1.0] * LABELS + [0.1], "panoptic_fusion_head.num_things_classes": LABELS,
        f"{head}.pixel_decoder.positional_encoding.num_feats": 16, f"{pixel}.num_layers": 2,
        f"{decoder}.num_layers": 2, f"{head}.num_transformer_feat_levels": 3, "train_cfg.num_points": 60,
    }  # fmt: skip
    for part, names in ((pixel, ("self_attn_cfg",)), (decoder, ("self_attn_cfg", "cross_attn_cfg"))):
        changes |= {f"{part}.layer_cfg.ffn_cfg.{k}": v for k, v in _ffn(32).items()}
        for name in names:
            changes |= {f"{part}.layer_cfg.{name}.{k}": v for k, v in _attention(32).items()}
    return _mmdet("mask2former/mask2former_r50_8xb2-lsj-50e_coco.py", changes)


def _mm_ddq(levels: int) -> Callable[[], nn.Module]:
    changes = _detr_changes(256) | {"dn_cfg.group_cfg.num_dn_queries": 8}
    if levels == 5:
        changes["neck.in_channels"] = [8, 16, 32, 64]
    return lambda: _mmdet(f"ddq/ddq-detr-{levels}scale_r50_8xb2-12e_coco.py", changes)


def _mm_grounding_dino(file: str) -> nn.Module:
    swin = {
        "backbone.embed_dims": 16, "backbone.depths": [1, 1, 1, 1], "backbone.num_heads": [1, 2, 2, 4],
        "backbone.window_size": 4, "backbone.drop_path_rate": 0.0, "backbone.init_cfg": None,
        "backbone.convert_weights": False, "backbone.with_cp": False, "neck.in_channels": [32, 64, 128],
    }  # fmt: skip
    changes = {k: v for k, v in _detr_changes(256).items() if not k.startswith(("backbone.", "neck."))}
    changes |= {"bbox_head.contrastive_cfg.max_text_len": 16, "dn_cfg.group_cfg.num_dn_queries": 8, "encoder.num_cp": 0}
    changes |= {f"encoder.text_layer_cfg.ffn_cfg.{k}": v for k, v in _ffn(256).items()}
    changes |= {f"encoder.text_layer_cfg.self_attn_cfg.{k}": v for k, v in _attention(256).items()}
    changes |= {f"decoder.layer_cfg.cross_attn_text_cfg.{k}": v for k, v in _attention(256).items()}
    changes |= {"encoder.fusion_layer_cfg.embed_dim": 64, "encoder.fusion_layer_cfg.init_values": 0.5}
    changes |= {"encoder.fusion_layer_cfg.dropout": 0.0, "encoder.fusion_layer_cfg.drop_path": 0.0}
    return _mmdet(file, changes | swin | {"language_model": {"_delete_": True, "type": _Texts}})


class _Texts(nn.Module):
    """A language model as mmdet's Grounding DINO calls one: mmdet's own calls what transformers 5 has no longer."""

    pad_to_max = False

    def __init__(self):
        from transformers import BertTokenizer

        super().__init__()
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "?", "cup", "red", "bus", "tree"]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "vocab.txt")
            file.write_text("\n".join(words), encoding="utf-8")
            self.tokenizer = BertTokenizer(str(file))
        self.special_tokens = self.tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", ".", "?"])
        self.language_backbone = nn.Sequential()
        self.language_backbone.add_module("body", nn.Embedding(len(words), 32))
        self.language_backbone.body.language_dim = 32

    def forward(self, captions):
        from mmdet.models.language_models.bert import generate_masks_with_special_tokens_and_transfer_map as masks_of

        words = self.tokenizer(captions, padding="longest", return_tensors="pt")
        words = words.to(self.language_backbone.body.weight.device)
        masks, position_ids = masks_of(words, self.special_tokens)
        states = self.language_backbone(words["input_ids"])
        result = {"embedded": states, "hidden": states, "masks": masks, "position_ids": position_ids}
        return result | {"text_token_mask": words["attention_mask"].bool()}


def _mm_mask2former_video() -> nn.Module:
    head = "track_head"
    pixel, decoder = f"{head}.pixel_decoder.encoder", f"{head}.transformer_decoder"
    changes = {
        **_RESNET, f"{head}.in_channels": [8, 16, 32, 64], f"{head}.feat_channels": 32, f"{head}.out_channels": 32,
        f"{head}.num_queries": 6, f"{head}.num_classes": LABELS, f"{head}.positional_encoding.num_feats": 16,
        f"{head}.loss_cls.class_weight": [1.0] * LABELS + [0.1], f"{head}.train_cfg.num_points": 60,
        f"{head}.pixel_decoder.positional_encoding.num_feats": 16, f"{pixel}.num_layers": 2,
        f"{decoder}.num_layers": 2, "init_cfg": None,
    }  # fmt: skip
    for part, names in ((pixel, ("self_attn_cfg",)), (decoder, ("self_attn_cfg", "cross_attn_cfg"))):
        changes |= {f"{part}.layer_cfg.ffn_cfg.{k}": v for k, v in _ffn(32).items()}
        for name in names:
            changes |= {f"{part}.layer_cfg.{name}.{k}": v for k, v in _attention(32).items()}
    return _mmdet("mask2former_vis/mask2former_r50_8xb2-8e_youtubevis2019.py", changes)


def _mmdet_samples(model: nn.Module) -> list:
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks
    from mmengine.structures import InstanceData

    samples = []
    for content, (classes, boxes, masks) in zip(CONTENT, _targets(model), strict=True):
        centre, size = boxes.split(2, -1)
        corners = torch.cat([centre - size / 2, centre + size / 2], -1) * boxes.new_tensor([WIDTH, HEIGHT] * 2)
        sample = DetDataSample(metainfo={"batch_input_shape": (HEIGHT, WIDTH), "img_shape": content})
        bitmap = BitmapMasks(masks.cpu().numpy().astype("uint8"), HEIGHT, WIDTH)
        sample.gt_instances = InstanceData(labels=classes, bboxes=corners, masks=bitmap)
        samples.append(sample)
    return samples


def _mmdet_losses(model: nn.Module, losses: dict) -> object:
    return {**losses, "loss": model.parse_losses(losses)[0]}


def _call_mmdet(model: nn.Module, train: bool) -> object:
    pixels, samples = pixels_and_mask(model)[0], _mmdet_samples(model)
    if not train:
        return model(pixels, samples, mode="tensor")
    return _mmdet_losses(model, model(pixels, samples, mode="loss"))


def _call_mm_grounding_dino(model: nn.Module, train: bool) -> object:
    pixels, samples = pixels_and_mask(model)[0], _mmdet_samples(model)
    for sample in samples:
        sample.text = "cup . red bus . tree . "
    if train:
        return _mmdet_losses(model, model(pixels, samples, mode="loss"))
    # Its mode="tensor" knows no texts.
    texts = model.language_model([sample.text for sample in samples])
    texts["embedded"] = model.text_feat_map(texts["embedded"])
    found = model.forward_transformer(model.extract_feat(pixels), texts, samples)
    return {**found, "heads": model.bbox_head(**{k: v for k, v in found.items() if "enc_outputs" not in k})}


def _call_mm_video(model: nn.Module, train: bool) -> object:
    from mmdet.structures import TrackDataSample

    pixels, samples = pixels_and_mask(model)[0], _mmdet_samples(model)
    for sample in samples:
        sample.gt_instances.instances_ids = torch.arange(len(sample.gt_instances.labels), device=pixels.device)
    video = TrackDataSample(video_data_samples=samples, metainfo={"key_frames_inds": [0, 1]})
    if train:
        return _mmdet_losses(model, model(pixels[None], [video], mode="loss"))
    return model.track_head(model.backbone(pixels), [video])


# Elsewhere


class MSDeformAttn(nn.Module):
    """The original module by its contract, as projects copy it: True is padding, one output, no compiled operator."""

    def __init__(self, d_model=256, n_levels=4, n_heads=8, n_points=4):
        super().__init__()
        self.d_model, self.n_levels, self.n_heads, self.n_points = d_model, n_levels, n_heads, n_points
        samples = n_heads * n_levels * n_points
        self.sampling_offsets = nn.Linear(d_model, samples * 2)
        self.attention_weights = nn.Linear(d_model, samples)
        self.value_proj = nn.Linear(d_model, d_model)
        self.output_proj = nn.Linear(d_model, d_model)

    def forward(
        self,
        query,
        reference_points,
        input_flatten,
        input_spatial_shapes,
        input_level_start_index,
        input_padding_mask=None,
    ):
        batch, queries, _ = query.shape
        value = self.value_proj(input_flatten)
        if input_padding_mask is not None:
            value = value.masked_fill(input_padding_mask[..., None], 0.0)
        points = (batch, queries, self.n_heads, self.n_levels, self.n_points)
        offsets = self.sampling_offsets(query).view(*points, 2)
        weights = self.attention_weights(query).view(*points[:3], -1).softmax(-1).view(points)
        reference = reference_points[:, :, None, :, None]
        if reference_points.shape[-1] == 2:
            locations = reference + offsets / input_spatial_shapes.flip(-1)[:, None]
        else:
            locations = reference[..., :2] + offsets / self.n_points * reference[..., 2:] * 0.5
        output, sizes = 0, input_spatial_shapes.tolist()
        for level, part in enumerate(value.split([h * w for h, w in sizes], 1)):
            image = part.view(batch, *sizes[level], self.n_heads, -1).permute(0, 3, 4, 1, 2).flatten(0, 1)
            grid = 2 * locations[:, :, :, level].transpose(1, 2).flatten(0, 1) - 1
            sampled = nn.functional.grid_sample(image, grid, align_corners=False)
            output = output + (sampled * weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]).sum(-1)
        return self.output_proj(output.view(batch, self.d_model, queries).transpose(1, 2))


class _CopyDetector(nn.Module):
    """A detector around two such modules: padded pixels in an encoder, boxes as references in a decoder."""

    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.GELU(), nn.Conv2d(16, width, 3, padding=1))
        self.coarse = nn.Conv2d(width, width, 3, 2, 1)
        self.position = nn.Linear(2, width)
        self.encoder = MSDeformAttn(width, 2, 2, 4)
        self.queries = nn.Embedding(9, width)
        self.reference = nn.Linear(width, 4)
        self.decoder = MSDeformAttn(width, 2, 2, 4)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.classes, self.boxes = nn.Linear(width, LABELS), nn.Linear(width, 4)

    def forward(self, pixels, mask):
        levels = [stem := self.stem(pixels), self.coarse(stem)]
        shapes = torch.tensor([level.shape[-2:] for level in levels], device=pixels.device)
        starts = torch.cat([shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]])
        padding = torch.cat(
            [nn.functional.interpolate(mask[:, None].to(pixels), x.shape[-2:])[:, 0].flatten(1) == 0 for x in levels], 1
        )
        centres = torch.cat([self._centres(level) for level in levels])
        states = torch.cat([level.flatten(2).transpose(1, 2) for level in levels], 1)
        where = centres[None, :, None].expand(len(states), -1, 2, -1)
        attended = self.encoder(states + self.position(centres), where, states, shapes, starts, padding)
        states = self.norms[0](states + attended)
        queries = self.queries.weight.expand(len(states), -1, -1)
        boxes = self.reference(queries).sigmoid()
        found = self.decoder(queries, boxes[:, :, None].expand(-1, -1, 2, -1), states, shapes, starts, padding)
        found = self.norms[1](queries + found)
        return {"logits": self.classes(found), "boxes": (self.boxes(found) + boxes.logit()).sigmoid()}

    @staticmethod
    def _centres(level):
        y, x = ((torch.arange(n).to(level) + 0.5) / n for n in level.shape[-2:])
        return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).flatten(0, 1)


def _call_copy(model: nn.Module, train: bool) -> object:
    result = model(*pixels_and_mask(model))
    return {"loss": sum(part.square().mean() for part in result.values())} if train else result


def _rfdetr() -> nn.Module:
    from rfdetr.config import RFDETRNanoConfig
    from rfdetr.models import build_model_from_config

    config = RFDETRNanoConfig(
        pretrain_weights=None, resolution=64, positional_encoding_size=4, out_feature_indexes=[1, 2], hidden_dim=32,
        sa_nheads=2, ca_nheads=4, num_queries=9, num_select=9, group_detr=2, num_classes=LABELS,
    )  # fmt: skip
    return build_model_from_config(config)


def _call_rfdetr(model: nn.Module, train: bool) -> object:
    from rfdetr.config import RFDETRNanoConfig, TrainConfig
    from rfdetr.models import build_criterion_from_config
    from rfdetr.utilities.tensors import NestedTensor

    pixels, mask = pixels_and_mask(model)
    found = model(NestedTensor(pixels[..., :64, :64], mask[..., :64, :64] == 0))
    if not train:
        return found
    config = RFDETRNanoConfig(pretrain_weights=None, num_classes=LABELS, group_detr=2)
    criterion, _ = build_criterion_from_config(config, TrainConfig(dataset_dir=".", output_dir="."))
    targets = [{"labels": classes, "boxes": boxes} for classes, boxes, _ in _targets(model)]
    losses = criterion.to(pixels.device).train()(found, targets)
    parts = {name: losses[name] for name in criterion.weight_dict if name in losses}
    return {**parts, "loss": sum(criterion.weight_dict[name] * part for name, part in parts.items())}


def _ultralytics() -> nn.Module:
    from ultralytics.nn.tasks import RTDETRDetectionModel

    backbone = [["Conv", [8, 3, 2]], ["Conv", [16, 3, 4]], ["Conv", [16, 3, 2]], ["Conv", [32, 3, 2]]]
    # Classes, width, queries, points, heads, layers, width of the feed-forward layers.
    head = [[1, 2, 3], 1, "RTDETRDecoder", ["nc", 32, 9, 4, 2, 2, 32]]
    config = {"nc": LABELS, "scale": "l", "scales": {"l": [1, 1, 1024]}, "head": [head]}
    model = RTDETRDetectionModel(config | {"backbone": [[-1, 1, *layer] for layer in backbone]}, verbose=False)
    model.nc = LABELS
    return model


def _call_ultralytics(model: nn.Module, train: bool) -> object:
    pixels = pixels_and_mask(model)[0][..., :64, :96]
    if not train:
        return model(pixels)
    classes, boxes, _ = zip(*_targets(model), strict=True)
    images = torch.cat([torch.full_like(labels, image) for image, labels in enumerate(classes)])
    batch = {"img": pixels, "cls": torch.cat(classes), "bboxes": torch.cat(boxes), "batch_idx": images}
    loss, parts = model.loss(batch)
    return {**parts, "loss": loss}


_HF_M2F, _HF_DETR, _MMCV = (
    "Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention",
    "DeformableDetrMultiscaleDeformableAttention",
    "MultiScaleDeformableAttention",
)

DETECTORS = {
    d.name: d
    for d in (
        Detector("hf-mask2former", "transformers", _HF_M2F, 2, _hf_mask2former, _call_hf_mask2former),
        Detector("hf-oneformer", "transformers", _HF_M2F.replace("Mask2", "One"), 1, _hf_oneformer, _call_hf_oneformer),
        *(
            Detector(
                f"hf-deformable-detr-{name}", "transformers", _HF_DETR, 3,
                lambda options=options: hf_deformable_detr(**options), _call_hf_deformable_detr,
            )
            for name, options in {
                "single-scale": {"num_feature_levels": 1},
                "multi-scale": {},
                "refine": {"with_box_refine": True},
                "two-stage": {"with_box_refine": True, "two_stage": True},
            }.items()
        ),
        *(
            Detector(
                f"hf-{name}", "transformers", f"{family}MultiscaleDeformableAttention", 2,
                lambda family=family, options=options: _hf_rt_detr(family, **options), _call_hf_rt_detr,
            )
            for name, family, options in (
                ("rt-detr", "RTDetr", {}),
                ("rt-detr-v2", "RTDetrV2", {"decoder_offset_scale": 0.3}),
                ("d-fine", "DFine", {"decoder_n_points": [3, 6, 3]}),
                ("deimv2", "Deimv2", {"decoder_n_points": [2, 4, 2]}),
            )
        ),
        *(
            Detector(
                f"hf-{name}", "transformers", f"{family}MultiscaleDeformableAttention", 3,
                lambda family=family: _hf_grounding_dino(family), _call_hf_grounding_dino,
            )
            for name, family in (("grounding-dino", "GroundingDino"), ("mm-grounding-dino", "MMGroundingDino"))
        ),
        *(
            Detector(f"hf-{name}", "transformers", f"{family}MultiscaleDeformableAttention", 2, build, call)
            for name, family, build, call in (
                ("omdet-turbo", "OmDetTurbo", _hf_omdet_turbo, _call_hf_omdet_turbo),
                ("lw-detr", "LwDetr", _hf_lw_detr, _call_hf_square),
                ("rf-detr", "RfDetr", _hf_rf_detr, _call_hf_square),
                *(
                    (
                        f"pp-doclayout-v{version}", f"PPDocLayoutV{version}",
                        lambda version=version: _hf_pp_doclayout(version), _call_hf_pp_doclayout,
                    )
                    for version in (2, 3, 4)
                ),
            )
        ),
        *(
            Detector(f"mmdet-{name}", "mmdet", _MMCV, count, build, *(call or [_call_mmdet]))
            for name, count, build, *call in (
                ("deformable-detr", 3, _mm_deformable_detr("deformable-detr_r50_16xb2-50e_coco.py")),
                ("deformable-detr-refine", 3, _mm_deformable_detr("deformable-detr-refine_r50_16xb2-50e_coco.py")),
                (
                    "deformable-detr-two-stage", 3,
                    # Two stages, here and in DINO, know no other width than 256.
                    _mm_deformable_detr("deformable-detr-refine-twostage_r50_16xb2-50e_coco.py", 256),
                ),
                ("dino-4scale", 3, _mm_dino_4scale),
                ("dino-5scale", 3, _mm_dino_5scale),
                ("ddq-4scale", 3, _mm_ddq(4)),
                ("ddq-5scale", 3, _mm_ddq(5)),
                *(
                    (name, 3, lambda file=file: _mm_grounding_dino(file), _call_mm_grounding_dino)
                    for name, file in (
                        ("grounding-dino", "grounding_dino/grounding_dino_swin-t_finetune_16xb2_1x_coco.py"),
                        ("mm-grounding-dino", "mm_grounding_dino/grounding_dino_swin-t_pretrain_obj365.py"),
                    )
                ),
                ("mask2former", 2, _mm_mask2former),
                ("mask2former-video", 2, _mm_mask2former_video, _call_mm_video),
            )
        ),
        Detector("copied-ms-deform-attn", "torch", "MSDeformAttn", 2, _CopyDetector, _call_copy),
        Detector("rfdetr", "rfdetr", "MSDeformAttn", 2, _rfdetr, _call_rfdetr),
        Detector("ultralytics-rt-detr", "ultralytics", "MSDeformAttn", 2, _ultralytics, _call_ultralytics),
    )
}  # fmt: skip


# Attention modules alone: 16 channels, 2 heads, 2 levels, 2 points


def randomize(module: nn.Module) -> nn.Module:
    """Fills every parameter with noise."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def import_mmcv_ops() -> None:
    """Makes `mmcv.ops` importable, or skips the test."""
    pytest.importorskip("mmcv")
    from deformops_models.patches import mmcv_lite

    mmcv_lite.install()


def mmcv_attention(**options) -> nn.Module:
    import_mmcv_ops()
    from mmcv.ops import MultiScaleDeformableAttention

    options = {"embed_dims": 16, "num_heads": 2, "num_levels": 2, "num_points": 2, "dropout": 0.0} | options
    return randomize(MultiScaleDeformableAttention(**options))


def transformers_attention(family: str) -> nn.Module:
    """The wrapper module of "mask2former" or "deformable_detr"."""
    pytest.importorskip("transformers")
    if family == "mask2former":
        from transformers.models.mask2former import modeling_mask2former as mask2former

        return randomize(mask2former.Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention(16, 2, 2, 2))
    assert family == "deformable_detr"
    from transformers import DeformableDetrConfig
    from transformers.models.deformable_detr import modeling_deformable_detr as detr

    config = DeformableDetrConfig(d_model=16, num_feature_levels=2)
    return randomize(detr.DeformableDetrMultiscaleDeformableAttention(config, 2, 2))
