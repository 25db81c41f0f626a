"""`bench --family`: a training step and inference of whole detectors, patched against unpatched, random weights."""

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deformops_models import console, patching
from deformops_models.backend import call_counts
from deformops_models.bench.measure import quantiles
from deformops_models.bench.models import wake_attention
from deformops_models.bench.record import Recorder, Row, machine, read
from deformops_models.console import UsageError, require, whole_file

OP = "family"
LABELS = 80
_WARMUP = 2
_METRICS = {"step_ms": "training step", "inference_ms": "inference"}

#: Calls a model; returns its losses with their total as "loss" in training, and any outputs without.
Call = Callable[[nn.Module, bool], Any]


@dataclass(frozen=True)
class Work:
    """A real-size detector: `build` gives it with random weights on the CPU, and `call` runs it where it is."""

    framework: str
    build: Callable[[], nn.Module]
    call: Call


def run(
    names: Sequence[str],
    out: str | Path,
    *,
    commit: str | None = None,
    device: str = "cuda",
    repeats: int = 7,
    known: Mapping[str, Work] | None = None,
) -> int:
    """Times families one after the other, writes each one's rows to `results.csv` at once, and draws a picture.

    Args:
        names: of `FAMILIES`, or "all" for those whose library is installed.
        out: folder.
        commit: recorded with each row.
        device: where the models run; patched modules run upstream's forward on "cpu".
        repeats: timed calls of each kind.
        known: in place of `FAMILIES`.

    Returns:
        0, or 1 if a family raised, its kernel did not run or its loss was not finite.

    Raises:
        UsageError: a name is unknown or its library is not installed.
    """
    known = FAMILIES if known is None else known
    chosen = _choose(names, known)
    recorder = Recorder(console.output_folder(out) / "results.csv", machine(commit))
    failures = []
    for number, name in enumerate(chosen, 1):
        try:
            text, passed = _time(name, known[name], recorder, torch.device(device), repeats)
        # Upstream's code can raise anything; the other families are timed all the same.
        except Exception as error:
            text, passed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", False
        print(f"[{number}/{len(chosen)}] {name}: {text}", flush=True)
        if not passed:
            failures.append(f"{name}: {text}")
    print(f"\n{summary(recorder.rows)}\n\n{recorder.path}")
    try:
        print(draw(read(recorder.path), recorder.path.parent))
    except UsageError as error:
        print(f"no picture: {error}")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def _choose(names: Sequence[str], known: Mapping[str, Work]) -> list[str]:
    missing = {name: w.framework for name, w in known.items() if importlib.util.find_spec(w.framework) is None}
    if "all" in names:
        for name, framework in missing.items():
            print(f"left out: {name}, {framework} is not installed")
        chosen = [name for name in known if name not in missing]
        if not chosen:
            raise UsageError("--family all: no library with a known family is installed: pip install transformers")
        return chosen
    for name in names:
        if name not in known:
            raise UsageError(f"--family: unknown {name!r}: use all, {', '.join(known)}")
        if name in missing:
            raise UsageError(f"--family {name}: {missing[name]} is not installed: pip install {missing[name]}")
    return list(dict.fromkeys(names))


def _time(name: str, work: Work, recorder: Recorder, device: torch.device, repeats: int) -> tuple[str, bool]:
    """Records the rows of one family; returns what to print, and whether the kernels ran and the loss is finite."""
    torch.manual_seed(3)
    model = work.build().to(device)
    wake_attention(model)
    row = {"op": OP, "preset": name, "distribution": "random", "dtype": "bfloat16"}
    medians: dict[tuple[str, str], float] = {}
    passed = True
    for provider in ("upstream", "ours"):
        if provider == "ours":
            patching.patch(model)
        call_counts.clear()
        for metric, train in (("step_ms", True), ("inference_ms", False)):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            times, loss = _clock(model.train(train), work.call, device, repeats)
            recorder.add(*times, **row, provider=provider, metric=metric, unit="ms")
            medians[provider, metric] = times[0]
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device) / 2**20
                recorder.add(peak, **row, provider=provider, metric=metric.replace("_ms", "_peak_mib"), unit="MiB")
            if train:
                recorder.add(loss, **row, provider=provider, metric="loss", unit="1")
                passed = passed and loss == loss and abs(loss) < float("inf")
    forward, backward = call_counts["msda_forward"], call_counts["msda_backward"]
    recorder.add(forward, **row, provider="ours", metric="kernel_calls", unit="1")
    if device.type == "cuda":
        passed = passed and forward > 0 and backward > 0 and not call_counts["upstream_forward"]
        # The next family needs the room.
        del model
        torch.cuda.empty_cache()
    texts = []
    for metric, title in _METRICS.items():
        before, after = medians["upstream", metric], medians["ours", metric]
        texts.append(f"{title} {before:.1f} to {after:.1f} ms, ratio {after / before:.2f}")
    return "; ".join(texts) + f"; {forward} kernel calls", passed


def _clock(
    model: nn.Module, call: Call, device: torch.device, repeats: int
) -> tuple[tuple[float, float, float], float]:
    """Wall time of a call in ms and the loss of the first one (NaN without one); every call draws the same numbers."""
    train = model.training
    samples, first = [], float("nan")
    for i in range(_WARMUP + repeats):
        torch.manual_seed(7)
        model.zero_grad(set_to_none=True)
        _wait(device)
        start = time.perf_counter()
        # Not inference_mode: some of upstream's models keep anchors of an inference for the next step.
        with torch.set_grad_enabled(train), torch.autocast(device.type, torch.bfloat16):
            result = call(model, train)
        if train:
            result["loss"].sum().backward()
        _wait(device)
        if i >= _WARMUP:
            samples.append((time.perf_counter() - start) * 1e3)
        if train and i == 0:
            first = result["loss"].detach().float().sum().item()
    return quantiles(samples), first


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Pictures and tables, from rows alone


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By family and metric: time patched over time unpatched; a later row replaces an earlier one."""
    times = {(row["preset"], row["provider"], row["metric"]): row["median"] for row in rows if row["op"] == OP}
    found: dict[str, dict[str, float]] = {}
    for (name, provider, metric), before in times.items():
        after = times.get((name, "ours", metric))
        if provider == "upstream" and metric in _METRICS and after is not None:
            found.setdefault(name, {})[metric] = after / before
    return found


def summary(rows: Sequence[Row]) -> str:
    """A table of the ratios, and their median."""
    found = ratios(rows)
    cells = [("PATCHED / UNPATCHED", *(title.upper() for title in _METRICS.values()))]
    for name, values in found.items():
        cells.append((name, *(f"{values[m]:.2f}" if m in values else "-" for m in _METRICS)))
    columns = ([values[m] for values in found.values() if m in values] for m in _METRICS)
    cells.append(("median", *(f"{quantiles(column)[0]:.2f}" if column else "-" for column in columns)))
    return console.table(cells)


def draw(rows: Sequence[Row], folder: Path) -> Path:
    """Writes families.png into `folder`: bars of time patched over unpatched, one line where they are equal.

    Raises:
        UsageError: matplotlib is missing, or no family has both times.
    """
    require("bench", "matplotlib")
    from matplotlib.figure import Figure

    found = ratios(rows)
    if not found:
        raise UsageError("no row times a family both patched and unpatched")
    names = sorted(found, key=lambda name: found[name].get("step_ms", 0.0), reverse=True)
    figure = Figure(figsize=(8, 1.2 + 0.36 * len(names)), layout="constrained")
    axis = figure.add_subplot()
    for i, (metric, color) in enumerate(zip(_METRICS, ("#1b7f5c", "#4f6db3"), strict=True)):
        heights = [found[name].get(metric, 0.0) for name in names]
        places = [place + (0.2 if i == 0 else -0.2) for place in range(len(names))]
        axis.barh(places, heights, 0.38, color=color, label=_METRICS[metric])
        for place, height in zip(places, heights, strict=True):
            axis.text(height + 0.01, place, f"{height:.2f}", va="center", fontsize=7)
    axis.axvline(1.0, color="#4b4f57", linewidth=1, linestyle="--")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xlabel("time patched / unpatched (less is better)")
    axis.legend(frameon=False, fontsize=9)
    last = [row for row in rows if row["op"] == OP][-1]
    axis.set_title(f"bfloat16 autocast, {last['gpu'] or 'CPU'}, torch {last['torch']}", fontsize=11)
    path = Path(folder) / "families.png"
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=120)
    return path


# The detectors


def _like(model: nn.Module) -> Tensor:
    return next(model.parameters())


def _boxes(count: int, device: torch.device) -> Tensor:
    """(N, 4) as cx, cy, w, h, inside the image."""
    return torch.rand(count, 4, device=device) * 0.3 + 0.35


def _detection(height: int, width: int, batch: int, loss: bool = True, **inputs: Any) -> Call:
    """A call with images, and seven boxes for each in training; `inputs` are functions of batch and device."""

    def call(model: nn.Module, train: bool) -> Any:
        device = _like(model).device
        arguments = {name: make(batch, device) for name, make in inputs.items()}
        arguments["pixel_values"] = torch.randn(batch, 3, height, width, device=device)
        if train and loss:
            # Classes are few where they are phrases of a text.
            classes = min(LABELS, 3 if inputs else LABELS)
            arguments["labels"] = [
                {"class_labels": torch.randint(classes, (7,), device=device), "boxes": _boxes(7, device)}
                for _ in range(batch)
            ]
        result = model(**arguments)
        if train and not loss:
            # These have no loss of their own.
            parts = (
                result[name]
                for name in ("logits", "pred_boxes", "decoder_class_logits", "decoder_coord_logits")
                if name in result
            )
            return {"loss": sum(part.float().square().mean() for part in parts)}
        return result

    return call


def _segmentation(size: int, batch: int, **inputs: Any) -> Call:
    def call(model: nn.Module, train: bool) -> Any:
        device = _like(model).device
        arguments = {name: make(batch, device) for name, make in inputs.items()}
        arguments["pixel_values"] = torch.randn(batch, 3, size, size, device=device)
        if train:
            coarse = [(torch.rand(1, 5, size // 64, size // 64, device=device) > 0.6).float() for _ in range(batch)]
            arguments["mask_labels"] = [nn.functional.interpolate(m, size=(size, size))[0] for m in coarse]
            arguments["class_labels"] = [torch.randint(LABELS, (5,), device=device) for _ in range(batch)]
        return model(**arguments)

    return call


def _transformers(model: str, backbone: Callable[[Any], Any] | None = None, **options: Any) -> Callable[[], nn.Module]:
    """Builds a model from its default config; `backbone` makes another backbone's config from transformers."""

    def build() -> nn.Module:
        import transformers

        changes = dict(options)
        if backbone is not None:
            changes["backbone_config"] = backbone(transformers)
        prefix = model.rpartition("For")[0]
        if not hasattr(transformers, model):
            raise UsageError(f"--family: transformers {transformers.__version__} has no {model}: install a newer one")
        return getattr(transformers, model)(getattr(transformers, f"{prefix}Config")(**changes))

    return build


def _swin(stages: Sequence[int]) -> Callable[[Any], Any]:
    """Swin-T."""
    return lambda t: t.SwinConfig(depths=[2, 2, 6, 2], out_features=[f"stage{i}" for i in stages])


def _resnet(t: Any) -> Any:
    """ResNet-50."""
    return t.ResNetConfig(out_features=["stage2", "stage3", "stage4"])


def _caption(batch: int, device: torch.device) -> Tensor:
    """BERT's [CLS], three words with a full stop each, [SEP]."""
    words = torch.tensor([[101, 4937, 1012, 3899, 1012, 2482, 1012, 102]], device=device)
    return words.expand(batch, -1)


def _tokens(*shape: int) -> Callable[[int, torch.device], Tensor]:
    def make(batch: int, device: torch.device) -> Tensor:
        # CLIP's text encoder reads where the end of a text is: its last token.
        tokens = torch.randint(1, 40000, (batch, *shape), device=device)
        tokens[..., 0], tokens[..., -1] = 49406, 49407
        return tokens

    return make


def _phrases(per_image: int) -> Callable[[int, torch.device], Tensor]:
    return lambda batch, device: _tokens(16)(batch * per_image, device)


def _ones_like(make: Callable[[int, torch.device], Tensor]) -> Callable[[int, torch.device], Tensor]:
    return lambda batch, device: torch.ones_like(make(batch, device))


def _omdet_call() -> Call:
    inner = _detection(
        640, 640, 2, loss=False,
        classes_input_ids=_phrases(4), classes_attention_mask=_ones_like(_phrases(4)),
        tasks_input_ids=_phrases(1), tasks_attention_mask=_ones_like(_phrases(1)),
        classes_structure=lambda batch, device: torch.full((batch,), 4, device=device),
    )  # fmt: skip

    def call(model: nn.Module, train: bool) -> Any:
        # What it remembers of texts has another call's history.
        for cache in (model.language_cache_class, model.language_cache_prompt):
            cache.cache.clear()
        return inner(model, train)

    return call


def _mmdet(file: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from deformops_models.hub.mmdet import mmdet_config

        path = mmdet_config(f"configs/{file}")
        from mmdet.registry import MODELS
        from mmengine.config import Config
        from mmengine.registry import DefaultScope

        config = Config.fromfile(path).model
        config.backbone.init_cfg = None
        with DefaultScope.overwrite_default_scope("mmdet"):
            model = MODELS.build(config)
        # Left empty until init_weights, which would log a line for every parameter.
        for name, parameter in model.named_parameters():
            if name.endswith("level_embed"):
                nn.init.normal_(parameter)
        return model

    return build


def _mmdet_call(height: int, width: int, batch: int = 2) -> Call:
    def call(model: nn.Module, train: bool) -> Any:
        from mmdet.structures import DetDataSample
        from mmengine.structures import InstanceData

        device = _like(model).device
        pixels = torch.randn(batch, 3, height, width, device=device)
        samples = []
        for _ in range(batch):
            sizes = dict.fromkeys(("img_shape", "batch_input_shape", "ori_shape"), (height, width))
            sample = DetDataSample(metainfo=sizes)
            centre, size = _boxes(7, device).split(2, 1)
            corners = torch.cat([centre - size / 2, centre + size / 2], 1)
            corners = corners * corners.new_tensor([width, height, width, height])
            sample.gt_instances = InstanceData(bboxes=corners, labels=torch.randint(LABELS, (7,), device=device))
            samples.append(sample)
        if not train:
            return model(pixels, samples, mode="tensor")
        return {"loss": model.parse_losses(model(pixels, samples, mode="loss"))[0]}

    return call


_TEXTS = {"task_inputs": lambda b, d: _tokens(77)(b, d).float(), "text_inputs": _tokens(134, 77)}

#: Real-size detectors by family.
FAMILIES: dict[str, Work] = {
    name: Work("transformers", build, call)
    for name, build, call in (
        (
            "mask2former",
            _transformers("Mask2FormerForUniversalSegmentation", _swin([1, 2, 3, 4]), num_labels=LABELS),
            _segmentation(640, 2),
        ),
        (
            "oneformer",
            _transformers(
                "OneFormerForUniversalSegmentation", _swin([1, 2, 3, 4]), num_labels=LABELS, is_training=True
            ),
            _segmentation(640, 2, **_TEXTS),
        ),
        (
            "deformable_detr",
            _transformers("DeformableDetrForObjectDetection", _resnet, num_labels=LABELS),
            _detection(800, 1333, 2),
        ),
        *(
            (
                name,
                _transformers(f"{model}ForObjectDetection", _swin([2, 3, 4])),
                _detection(800, 1200, 2, input_ids=_caption),
            )
            for name, model in (("grounding_dino", "GroundingDino"), ("mm_grounding_dino", "MMGroundingDino"))
        ),
        (
            "omdet_turbo",
            # transformers' own Swin normalises by itself, unlike timm's.
            _transformers(
                "OmDetTurboForObjectDetection", _swin([2, 3, 4]), apply_layernorm_after_vision_backbone=False
            ),
            _omdet_call(),
        ),
        *(
            (name, _transformers(f"{model}ForObjectDetection", num_labels=LABELS), _detection(640, 640, 4))
            for name, model in (
                ("rt_detr", "RTDetr"),
                ("rt_detr_v2", "RTDetrV2"),
                ("d_fine", "DFine"),
                ("deimv2", "Deimv2"),
            )
        ),
        (
            "lw_detr",
            # Its default config has no level.
            _transformers("LwDetrForObjectDetection", num_labels=LABELS, projector_scale_factors=[1.0]),
            _detection(640, 640, 4),
        ),
        ("rf_detr", _transformers("RfDetrForObjectDetection", num_labels=LABELS), _detection(560, 560, 4)),
        *(
            (
                f"pp_doclayout_v{version}",
                _transformers(f"PPDocLayoutV{version}ForObjectDetection", **options),
                _detection(800, 800, 2, loss=False),
            )
            for version, options in (
                # The kinds of its reading order, which has no default.
                (2, {"num_labels": 20, "class_thresholds": [0.5] * 20, "class_order": list(range(20))}),
                (3, {}),
                (4, {}),
            )
        ),
    )
} | {
    f"mmdet_{name}": Work("mmdet", _mmdet(file), _mmdet_call(800, 1333))
    for name, file in (
        ("deformable_detr", "deformable_detr/deformable-detr_r50_16xb2-50e_coco.py"),
        ("dino", "dino/dino-4scale_r50_8xb2-12e_coco.py"),
        ("ddq", "ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py"),
    )
}
