"""`deformops-models demo`: detects shapes, and compares small detectors with their unpatched selves on a photograph.

Needs no network and no GPU.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deformops_models.backend import call_counts
from deformops_models.console import UsageError, missing, output_folder, pick_device, whole_file
from deformops_models.hub import local_name
from deformops_models.patching import patch, report, unpatch

if TYPE_CHECKING:
    from PIL.Image import Image

PHOTO = Path(__file__).parent / "assets" / "coffee.jpg"
SHAPES = PHOTO.with_name("shapes.jpg")
_SHIPPED = "shapes-tiny"
_SIZE = (288, 192)  # width, height
_RUNS = 1
_WIDTH = 128  # channels of the small transformers

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Detector:
    """How to build one small detector and run it on pixels (1, 3, H, W)."""

    title: str
    file: str
    extra: str
    modules: tuple[str, ...]
    build: Callable[[], nn.Module]
    forward: Callable[[nn.Module, Tensor], Outputs]


@dataclass(frozen=True)
class Run:
    """What one model gave: outputs, parameter gradients, seconds for a forward and backward pass."""

    outputs: Outputs
    gradients: Outputs
    seconds: float


def run(out: str, device_name: str | None = None) -> int:
    """Detects shapes, compares all detectors whose framework is installed, and saves a picture of each.

    Returns:
        0 if every detector that ran agreed with its unpatched self, and at least one ran; else 1.

    Raises:
        UsageError: no framework is installed, or the folder or the device cannot be used.
    """
    device = pick_device(device_name)
    problems = {d.title: missing(d.extra, d.modules) for d in DETECTORS}
    if all(problems.values()):
        raise UsageError("no detector framework is installed: pip install 'deformops-models[all]'")
    folder = output_folder(out)
    if not problems[DETECTORS[0].title] and local_name(_SHIPPED) != _SHIPPED:
        _detect_shapes(device, folder / "shapes.png")
    photo = _photo()
    agreed = []
    print(f"Small detectors with random weights on {PHOTO.name} ({_SIZE[0]}x{_SIZE[1]}), {_device_name(device)}")
    for detector in DETECTORS:
        print(f"\n{detector.title}", flush=True)
        if problem := problems[detector.title]:
            print(f"  skipped               {problem}")
            continue
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.meshgrid")  # mmdet's calls
            try:
                agreed.append(_compare(detector, photo, device, folder / f"{detector.file}.png"))
            except ImportError as error:
                print(f"  skipped               its framework cannot be imported: {error}")
    print(f"\n{sum(agreed)} of {len(agreed)} detectors that ran agree with their unpatched selves")
    return 0 if agreed and all(agreed) else 1


def _detect_shapes(device: torch.device, picture: Path) -> None:
    """Runs the model that the package holds, patched, and saves what it finds."""
    from deformops_models.predict import Options, draw, load_mask2former, quiet_transformers, read_image, summary

    image = read_image(SHAPES)
    before = call_counts.copy()
    with quiet_transformers():
        detect = load_mask2former(local_name(_SHIPPED), Options("instance", 0.5, "hub", device, torch.float32))
        found = detect(image)
    with whole_file(picture) as temporary:
        draw(image, found).save(temporary)
    print(f"Mask2Former {_SHIPPED} on {SHAPES.name}, patched")
    print(f"  detected              {summary(found)}")
    print(f"  backend that ran      {_ran(call_counts - before, 1)}")
    print(f"  picture               {picture}\n")


def _compare(detector: Detector, photo: "Image", device: torch.device, picture: Path) -> bool:
    """Runs one detector unpatched and patched, prints the comparison, saves the picture."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        torch.manual_seed(0)
        model = detector.build().eval().to(device)
        _stir(model)
        pixels = _pixels(photo).to(device)
        reference = _measure(detector, model, pixels)
        patch(model)
        before = call_counts.copy()
        patched = _measure(detector, model, pixels)
        ran = call_counts - before
        swapped = [entry.name for entry in report(model).swapped if entry.part == "attention"]
        unpatch(model)
        errors = {
            "outputs": _differences(patched.outputs, reference.outputs),
            "gradients": _differences(patched.gradients, reference.gradients),
        }
        agrees = not any(errors.values()) or _within_budget(detector, model, pixels, reference, patched)
        agrees &= device.type != "cuda" or ran["msda_forward"] > 0  # else it compared upstream with itself
        samples = _samples(model, swapped[0], lambda: detector.forward(model, pixels))
    with whole_file(picture) as temporary:
        _draw(photo, *samples).save(temporary)
    largest = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"  attentions swapped    {len(swapped)}")
    print(f"  backend that ran      {_ran(ran)}")
    print(f"  largest difference    {largest} of the largest value: {'agrees' if agrees else 'DISAGREES'}")
    same = "" if ran["msda_forward"] else " (the same code twice)"
    print(f"  forward + backward    patched {_duration(patched)}, unpatched {_duration(reference)}{same}")
    print(f"  picture               {picture}")
    return agrees


def _measure(detector: Detector, model: nn.Module, pixels: Tensor) -> Run:
    """Outputs and gradients of a fixed random projection of them; the time is the best after a warm-up."""
    seconds = math.inf
    for i in range(1 + _RUNS):
        model.zero_grad()
        _wait(pixels.device)
        start = time.perf_counter()
        outputs = detector.forward(model, pixels)
        random = torch.Generator().manual_seed(1)
        probes = [torch.randn(t.shape, generator=random, dtype=torch.float64) for t in outputs.values()]
        sum((t * p.to(t)).mean() for t, p in zip(outputs.values(), probes, strict=True)).backward()
        _wait(pixels.device)
        if i:
            seconds = min(seconds, time.perf_counter() - start)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Run({name: t.detach() for name, t in outputs.items()}, gradients, seconds)


def _differences(ours: Outputs, theirs: Outputs) -> float:
    """The largest difference as part of the largest value; infinite if a tensor is missing or has no number."""
    if ours.keys() != theirs.keys():
        return math.inf
    differences = torch.stack([(ours[name] - theirs[name]).abs().max() for name in theirs])
    largest = float(differences.max() / torch.stack([t.abs().max() for t in theirs.values()]).max())
    return math.inf if math.isnan(largest) else largest


def _within_budget(detector: Detector, model: nn.Module, pixels: Tensor, reference: Run, patched: Run) -> bool:
    """Patched error ≤ 2 × (unpatched error + float32's rounding), against unpatched in float64; relative L2."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)  # for tensors that the model makes
        exact = _measure(detector, copy.deepcopy(model).double(), pixels.double())
    finally:
        torch.set_default_dtype(default)

    def error(ours: Outputs, truth: Outputs) -> float:
        if ours.keys() != truth.keys():
            return math.inf
        squares = sum((ours[name].double() - truth[name]).square().sum() for name in truth)
        return float((squares / sum(t.square().sum() for t in truth.values())).sqrt())

    eps = torch.finfo(torch.float32).eps
    return all(
        error(getattr(patched, part), getattr(exact, part))
        <= 2 * (error(getattr(reference, part), getattr(exact, part)) + eps)
        for part in ("outputs", "gradients")
    )


def _stir(model: nn.Module) -> None:
    """Gives offsets and attention weights something to say: both projections start out as zero in every framework."""
    for name, module in model.named_modules():
        if name.endswith((".sampling_offsets", ".attention_weights")):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))


def _ran(counts: dict[str, int], passes: int = 1 + _RUNS) -> str:
    parts = []
    if counts["msda_forward"]:
        forward, backward = counts["msda_forward"] // passes, counts["msda_backward"] // passes
        parts.append(f"kernels, {forward} forward and {backward} backward launches per pass")
    if counts["upstream_forward"]:
        parts.append(f"upstream's own forward, {counts['upstream_forward'] // passes} calls per pass (no GPU in use)")
    return "; ".join(parts) or "none was counted"


def _duration(measured: Run) -> str:
    return f"{measured.seconds * 1000:.0f} ms"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"on the {device.type.upper()}"


def _photo() -> "Image":
    from PIL import Image

    with Image.open(PHOTO) as image:
        return image.convert("RGB")


def _pixels(photo: "Image") -> Tensor:
    """(1, 3, H, W) in float32, made smaller and normalised as ImageNet is."""
    photo = photo.resize(_SIZE)
    raw = torch.frombuffer(bytearray(photo.tobytes()), dtype=torch.uint8).view(photo.height, photo.width, 3)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return ((raw / 255 - mean) / std).permute(2, 0, 1)[None].contiguous()


def _build_mask2former() -> nn.Module:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    backbone = SwinConfig(
        depths=[1, 1, 2, 1], embed_dim=48, num_heads=[2, 4, 8, 16], drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=_WIDTH, mask_feature_size=_WIDTH, hidden_dim=_WIDTH, num_labels=80,
        encoder_layers=2, decoder_layers=2, encoder_feedforward_dim=256, dim_feedforward=256, num_queries=30,
    )  # fmt: skip
    return Mask2FormerForUniversalSegmentation(config)


def _build_deformable_detr() -> nn.Module:
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection

    config = DeformableDetrConfig(
        backbone="resnet18", d_model=_WIDTH, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=256,
        decoder_ffn_dim=256, num_queries=100, num_labels=91, with_box_refine=True,
    )  # fmt: skip
    return DeformableDetrForObjectDetection(config)


def _run_transformers(model: nn.Module, pixels: Tensor) -> Outputs:
    result = model(pixel_values=pixels)
    names = ("class_queries_logits", "masks_queries_logits", "logits", "pred_boxes")
    return {name: result[name] for name in names if name in result}


def _build_dino() -> nn.Module:
    from deformops_models.patches import mmcv_lite

    mmcv_lite.install()
    import mmdet.models
    from mmdet.registry import MODELS
    from mmengine.config import Config
    from mmengine.registry import DefaultScope

    config = Config.fromfile(Path(mmdet.__file__).parent / ".mim/configs/dino/dino-4scale_r50_8xb2-12e_coco.py")
    # Its channels stay at 256: mmdet's DINO decoder knows no other width.
    small: dict[str, Any] = {
        "backbone.depth": 18,
        "backbone.init_cfg": None,
        "neck.in_channels": [128, 256, 512],
        "num_queries": 100,
    }
    for part in ("encoder", "decoder"):
        small |= {f"{part}.num_layers": 2, f"{part}.layer_cfg.ffn_cfg.feedforward_channels": 512}
    config.merge_from_dict({f"model.{key}": value for key, value in small.items()})
    with DefaultScope.overwrite_default_scope("mmdet"):
        model = MODELS.build(config.model)
    # The one parameter that only init_weights would fill, which logs a line for each of the others.
    nn.init.normal_(model.level_embed)
    return model


def _run_dino(model: nn.Module, pixels: Tensor) -> Outputs:
    from mmdet.structures import DetDataSample

    size = tuple(pixels.shape[-2:])
    sample = DetDataSample(metainfo={"batch_input_shape": size, "img_shape": size})
    classes, boxes = model(pixels, [sample], mode="tensor")
    return {"classes": classes, "boxes": boxes}


_TRANSFORMERS = ("transformers", "timm", "PIL")
DETECTORS = (
    Detector(
        "Mask2Former (transformers)", "mask2former", "transformers", _TRANSFORMERS,
        _build_mask2former, _run_transformers,
    ),
    Detector(
        "Deformable DETR (transformers)", "deformable_detr", "transformers", _TRANSFORMERS,
        _build_deformable_detr, _run_transformers,
    ),
    Detector("DINO (mmdet)", "dino", "mmdet", ("mmengine", "mmcv", "mmdet", "PIL"), _build_dino, _run_dino),
)  # fmt: skip

_SPOTS = ((0.42, 0.50), (0.80, 0.30), (0.25, 0.85))  # x, y of the queries in the picture
_COLORS = ((255, 209, 32), (64, 224, 255), (255, 92, 168))


def _samples(model: nn.Module, name: str, forward: Callable[[], Any]) -> tuple[Tensor, Tensor, Tensor]:
    """What the named encoder layer samples for a few queries N.

    Returns:
        centres (N, 2), locations (N, M, L, K, 2), both as (x, y) in 0..1, and weights (N, M, L, K).
    """
    seen: dict[str, Any] = {}
    module = model.get_submodule(name)
    hooks = [
        module.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True),
        module.sampling_offsets.register_forward_hook(lambda _, args, output: seen.update(offsets=output)),
        module.attention_weights.register_forward_hook(lambda _, args, output: seen.update(logits=output)),
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    # Mask2Former's modules get the sizes as a list, the others as a tensor.
    sizes = torch.as_tensor(seen.get("spatial_shapes", seen.get("spatial_shapes_list"))).cpu()
    areas = sizes.prod(1)
    finest = int(areas.argmax())
    height, width = sizes[finest].tolist()
    rows = [int(y * height) * width + int(x * width) for x, y in _SPOTS]
    queries = torch.tensor(rows) + areas[:finest].sum()
    levels, points = len(sizes), seen["logits"].shape[-1] // len(sizes)
    heads = getattr(module, "n_heads", None) or module.num_heads
    shape = (len(queries), heads, levels, points // heads)
    offsets, logits, centres = (
        seen[key].float().cpu()[0, queries] for key in ("offsets", "logits", "reference_points")
    )
    locations = centres[:, None, :, None] + offsets.view(*shape, 2) / sizes.flip(1)[:, None]
    weights = logits.view(len(queries), heads, -1).softmax(-1).view(shape)
    return centres[:, 0], locations, weights


def _draw(photo: "Image", centres: Tensor, locations: Tensor, weights: Tensor) -> "Image":
    """Draws each sampling point as a dot joined to its query; one colour per query, area by attention weight."""
    from PIL import Image, ImageDraw, ImageFont

    width, height = 2 * photo.width, 2 * photo.height
    canvas = Image.blend(photo.resize((width, height)), Image.new("RGB", (width, height)), 0.35)
    draw = ImageDraw.Draw(canvas)
    size = torch.tensor([width, height])
    for centre, points, shares, color in zip(centres * size, locations * size, weights, _COLORS, strict=True):
        x0, y0 = centre.tolist()
        dots = list(zip(points.reshape(-1, 2).tolist(), shares.flatten().tolist(), strict=True))
        for (x, y), _ in dots:
            draw.line((x0, y0, x, y), fill=color)
        for (x, y), share in dots:
            radius = 2 + 14 * math.sqrt(share)
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color, outline=(20, 20, 20))
        draw.rectangle((x0 - 8, y0 - 8, x0 + 8, y0 + 8), fill=(255, 255, 255), outline=color, width=4)
    heads, levels, points = locations.shape[1:4]
    text = (
        f"Where {len(centres)} encoder queries look (untrained): {heads} heads x {levels} levels x {points} points each"
    )
    draw.rectangle((0, 0, width, 32), fill=(20, 20, 20))
    draw.text((8, 4), text, fill=(255, 255, 255), font=ImageFont.load_default(20))
    return canvas
