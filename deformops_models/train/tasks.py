"""What differs between Mask2Former and Deformable DETR: loading, targets, loss, and detections out of outputs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deformops_models import hub
from deformops_models.console import UsageError
from deformops_models.patching import patch, unpatch
from deformops_models.predict import folder_loader
from deformops_models.train.coco import encode

#: As the evaluator counts them.
MAX_DETECTIONS = 100
#: Pixels of the masks that are made at once, on which an evaluation's memory depends.
MASK_PIXELS = 2**24
#: For `torch._dynamo.config.recompile_limit` where `compile_regions` is used: the deepest Swin has 24 layers.
REGION_VARIANTS = 64


@dataclass(frozen=True)
class Detections:
    """What a model found in one image: labels (N,), scores (N,), and boxes (N, 4) as x0, y0, x1, y1 or N masks.

    Everything is on the CPU; boxes are in pixels, masks in COCO's compressed run lengths.
    """

    labels: Tensor
    scores: Tensor
    boxes: Tensor | None = None
    masks: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Task:
    """One family of models."""

    loader: Any
    #: Beginning of the names of the backbone's parameters.
    backbone: str
    #: Part of the names of the linear layers that have a row for each class.
    classifier: str
    #: Parts of the names of what upstream has and never reads.
    unread: tuple[str, ...]
    masks: bool
    #: Makes a model's loss the same for any number of processes.
    share_count: Callable[[nn.Module], None]
    #: The model's targets out of all images' objects, how many each image has, and the edge of the images in pixels.
    targets: Callable[[Mapping[str, Tensor], list[int], int], dict[str, Any]]
    detect: Callable[[Any, tuple[int, int]], Detections]

    @property
    def metric(self) -> str:
        """pycocotools' name of what is compared."""
        return "segm" if self.masks else "bbox"


def find_task(model: str) -> Task:
    """Which task the alias, repo id or folder is for, without loading anything.

    Raises:
        UsageError: there is no such model, or it is not one of transformers' that can be trained here.
    """
    if model in CONFIGS:
        return TASKS["Mask2Former"]
    if not model:
        raise UsageError("--model is empty: give an alias of a checkpoint or a local model folder")
    path = Path(model).expanduser()
    if path.is_dir():
        name = folder_loader(path)
    elif model.startswith((".", "/", "~")):
        raise UsageError(f"--model {model}: no such folder")
    else:
        try:
            name = hub.find_checkpoint(model).loader
        except hub.CheckpointError as error:
            raise UsageError(f"--model: {error}; the package itself has {', '.join(CONFIGS)}") from None
    if name not in TASKS:
        raise UsageError(f"--model {model}: only {' and '.join(TASKS)} of transformers can be trained here")
    return TASKS[name]


def has_weights(model: str) -> bool:
    """Whether training starts from weights, not from a config alone."""
    if model in CONFIGS:
        return False
    path = Path(model).expanduser()
    return not path.is_dir() or any(file for ending in ("*.safetensors", "*.bin") for file in path.glob(ending))


def load_model(
    task: Task,
    model: str,
    id2label: Mapping[int, str] | None,
    patched: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> nn.Module:
    """Returns the model in float32 on the CPU.

    Args:
        task: the model's.
        model: alias, folder, folder with a config and no weights, or a name in `CONFIGS`.
        id2label: its classes, whose weights are found by name. None keeps the model's own.
        patched: False leaves upstream's model as it is.
        say: is told what becomes of the classifier where that is not kept as it is.

    Raises:
        UsageError: it cannot be loaded.
    """
    classes = {} if id2label is None else _as_config(id2label)
    try:
        if has_weights(model):
            loaded = task.loader.from_pretrained(model, dtype=torch.float32)
            if id2label is not None:
                set_classes(loaded, task, id2label, say)
            return loaded if patched else unpatch(loaded)
        import transformers

        upstream = getattr(transformers, hub.transformers.MODEL_CLASSES[task.loader.model_type][0])
        if model in CONFIGS:
            config = CONFIGS[model](**classes)
        else:
            config = upstream.config_class.from_pretrained(Path(model).expanduser(), **classes)
        # Upstream freezes a new ResNet, random as it is; one that is loaded it does not.
        built = upstream(config).requires_grad_(True)
        return patch(built) if patched else built
    except hub.CheckpointError as error:
        raise UsageError(f"--model {model}: {error}") from error


def _as_config(id2label: Mapping[int, str]) -> dict[str, Any]:
    return {"id2label": dict(id2label), "label2id": {name: label for label, name in id2label.items()}}


def class_names(id2label: Mapping[int, str]) -> list[str]:
    """The names in the order of their labels, which a file need not have."""
    return [id2label[label] for label in sorted(id2label)]


def match_names(names: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """The position in `known` of each name, or None; another case will do where it is no other name's."""
    folded = [name.casefold() for name in names], [name.casefold() for name in known]
    exact = {name: position for position, name in enumerate(known)}
    alike = {name: position for position, name in enumerate(folded[1]) if all(f.count(name) < 2 for f in folded)}
    return [exact.get(name, alike.get(fold)) for name, fold in zip(names, folded[0], strict=True)]


def set_classes(model: nn.Module, task: Task, id2label: Mapping[int, str], say: Callable[[str], None]) -> None:
    """Gives a model other classes: those that it knows by name keep their weights, others start anew.

    Names that transformers made up, as LABEL_0, stand for classes by their position.
    """
    names, known = class_names(id2label), class_names(model.config.id2label)
    rows, same = match_names(names, known), list(range(len(known)))
    shared = len(names) - rows.count(None)
    if not shared and len(names) == len(known) and all(re.fullmatch(r"LABEL_\d+", name) for name in known):
        rows = same
        say("the model's classes have no names: its classifier keeps their weights by position")
    elif not shared:
        say("the model knows none of the data's classes by name: its classifier starts anew")
    elif rows != same:
        rest = "; the others start anew" if shared < len(names) else ""
        say(f"{shared} of {len(names)} classes keep the weights that the model's classifier has for their names{rest}")
    model.config.update(_as_config(id2label))
    if rows == same:
        return
    heads: dict[nn.Parameter, nn.Linear] = {}
    if getattr(model.config, "two_stage", False):
        # The last one chooses queries by its first row, whatever the classes, and upstream's loss does not train it.
        last = model.class_embed[-1]
        by_position = [row if row < len(known) else None for row in range(len(names))]
        heads[last.weight] = _with_rows(model, last, by_position, len(known))
    for name, head in model.named_modules():
        if task.classifier in name and isinstance(head, nn.Linear):
            # Layers may share their parameters.
            if head.weight not in heads:
                heads[head.weight] = _with_rows(model, head, rows, len(known))
            new = heads[head.weight]
            head.weight, head.bias, head.out_features = new.weight, new.bias, new.out_features
    if task.masks:  # Mask2Former's loss has a weight for each class
        loss = model.criterion
        loss.num_labels = len(names)
        loss.empty_weight = torch.ones(len(names) + 1)
        loss.empty_weight[-1] = loss.eos_coef


def _with_rows(model: nn.Module, head: nn.Linear, rows: Sequence[int | None], known: int) -> nn.Linear:
    """A new head with these rows of the `known` ones, new ones for None, and those that follow, as "no object"."""
    behind = head.out_features - known
    new = nn.Linear(head.in_features, len(rows) + behind)
    model._init_weights(new)  # as upstream begins
    if any(row is not None for row in rows):
        rows = [*rows, *range(known, head.out_features)]
    with torch.no_grad():
        for to, row in enumerate(rows):
            if row is not None:
                new.weight[to], new.bias[to] = head.weight[row], head.bias[row]
    return new


def load_processor(task: Task, model: str, size: int | None) -> Any:
    """Returns upstream's image processor.

    Args:
        task, model: as in `load_model`.
        size: edge in pixels of the square that images are fitted into; None is the size that an alias's published
            metric was measured at, or a folder's own.
    """
    import transformers

    try:
        if model in CONFIGS:
            processor = getattr(transformers, task.loader.processor_class)()
        else:
            processor = task.loader.processor(model, "hub" if Path(model).expanduser().is_dir() else "eval")
    except hub.CheckpointError as error:
        raise UsageError(f"--model {model}: {error}") from error
    if size is not None:
        processor.size = {"shortest_edge": size, "longest_edge": size}
    return processor


def normalization(processor: Any) -> tuple[list[float], list[float]]:
    """Mean and deviation, in levels of 0 to 255, that an image processor makes inputs with.

    Raises:
        UsageError: one of its settings is missing.
    """
    factor = processor.rescale_factor if processor.do_rescale else 1.0
    if not factor:
        raise UsageError(f"preprocessor_config.json: rescale_factor is {factor}; give a number, or do_rescale false")
    if not processor.do_normalize:
        return [0.0] * 3, [1 / factor] * 3
    for name in ("image_mean", "image_std"):
        value = getattr(processor, name)
        if not (isinstance(value, Sequence) and len(value) == 3):
            raise UsageError(f"preprocessor_config.json: {name} is {value}; give three numbers, or do_normalize false")
    return [x / factor for x in processor.image_mean], [x / factor for x in processor.image_std]


def _objects_per_process(labels: Sequence[Tensor], device: torch.device) -> Tensor:
    from accelerate.utils import reduce

    return reduce(torch.full((), sum(map(len, labels)), dtype=torch.float32, device=device), "mean")


def _mask2former_share_count(model: nn.Module) -> None:
    """Divides by the objects per process; upstream divides by the number of processes once more.

    Its masks' losses would grow with the number of processes, and its classes' would not. They are counted once a step:
    upstream asks in every layer, and processes that drop different layers would wait for each other.
    """
    compute = model.get_loss_dict

    @functools.wraps(compute)
    def counted(*, class_labels: list[Tensor], **kwargs: Any) -> Any:
        count = _objects_per_process(class_labels, class_labels[0].device).clamp(min=1)
        model.criterion.get_num_masks = lambda *_, **__: count
        return compute(class_labels=class_labels, **kwargs)

    model.get_loss_dict = counted


def _detr_share_count(model: nn.Module) -> None:
    """As for Mask2Former, but upstream's loss lets nobody in: its result is scaled."""
    from accelerate import PartialState

    compute = model.loss_function

    @functools.wraps(compute)
    def scaled(logits: Tensor, labels: Sequence[Mapping[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
        loss, parts, auxiliary = compute(logits, labels, *args, **kwargs)
        count = _objects_per_process([target["class_labels"] for target in labels], loss.device)
        upstreams = (count / PartialState().num_processes).clamp(min=1)
        return loss * upstreams / count.clamp(min=1), parts, auxiliary

    model.loss_function = scaled


def innermost_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that upstream can checkpoint, without those that hold others."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    return [m for m in layers if not any(isinstance(c, GradientCheckpointingLayer) for c in list(m.modules())[1:])]


def checkpoint_activations(model: nn.Module) -> int:
    """Makes every innermost layer that upstream can checkpoint run again in the backward pass.

    Mask2Former itself refuses upstream's switch for a whole model, though its layers and its backbone's have it.

    Returns:
        The number of layers.
    """
    from torch.utils.checkpoint import checkpoint

    layers = innermost_layers(model)
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    return len(layers)


def compile_regions(network: nn.Module, **options: Any) -> list[nn.Module]:
    """Compiles each layer that upstream can checkpoint by itself, and each largest module that holds none.

    Layers that are alike share their code, so that a deep network compiles as fast as a shallow one.

    Args:
        network: the model without its loss.
        options: of `torch.nn.Module.compile`.

    Returns:
        What is compiled. Each may have another input or another rate of dropped paths: allow `REGION_VARIANTS`.
    """
    layers = {id(layer) for layer in innermost_layers(network)}
    regions = []

    def visit(module: nn.Module) -> None:
        inside = list(module.modules())
        if isinstance(module, nn.ModuleList | nn.ModuleDict) or not layers.isdisjoint(map(id, inside[1:])):
            for child in module.children():
                visit(child)
        # A single operation is as fast as it is.
        elif len(inside) > 1 or not type(module).__module__.startswith("torch.nn."):
            regions.append(module)
            module.compile(**options)

    visit(network)
    return regions


def parameter_groups(
    model: nn.Module, task: Task, lr: float, weight_decay: float, backbone_scale: float
) -> list[dict[str, Any]]:
    """Sorts the trainable parameters by learning rate and decay, found by their names.

    The backbone has `backbone_scale` of `lr`; sampling offsets and reference points have a tenth, as their authors
    trained them; vectors (norms, biases) and embeddings do not decay.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = 1.0
        if name.startswith(task.backbone):
            scale = backbone_scale
        elif "sampling_offsets" in name or "reference_points" in name:
            scale = 0.1
        embedding = id(parameter) in embeddings or "level_embed" in name or "position_bias_table" in name
        decay = 0.0 if embedding or parameter.ndim <= 1 else weight_decay
        groups.setdefault((lr * scale, decay), []).append(parameter)
    return [{"params": ps, "lr": rate, "weight_decay": decay} for (rate, decay), ps in groups.items()]


def check_keeps_layers(model: nn.Module, option: str) -> None:
    """Raises UsageError, naming the option, if the model drops whole layers in training, each process others."""
    if rate := max(getattr(module, "layerdrop", 0.0) for module in model.modules()):
        raise UsageError(
            f"{option}: the model drops whole layers at the rate {rate}; set dropout to 0 in its config, or leave "
            f"{option} out"
        )


def freeze_unread(model: nn.Module, task: Task) -> None:
    """Asks for no gradient of what upstream never reads: with one missing `GradientAverage` waits for the device."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in task.unread):
            parameter.requires_grad_(False)


def _mask2former_targets(objects: Mapping[str, Tensor], counts: list[int], size: int) -> dict[str, Any]:
    # Masks come in a byte per pixel.
    return {
        "mask_labels": list(objects["masks"].float().split(counts)),
        "class_labels": list(objects["labels"].split(counts)),
    }


def _detr_targets(objects: Mapping[str, Tensor], counts: list[int], size: int) -> dict[str, Any]:
    from torchvision.ops import box_convert

    boxes = box_convert(objects["boxes"], "xyxy", "cxcywh") / size
    images = zip(objects["labels"].split(counts), boxes.split(counts), strict=True)
    return {"labels": [{"class_labels": labels, "boxes": boxes} for labels, boxes in images]}


def _mask2former_detect(outputs: Any, size: tuple[int, int]) -> Detections:
    """The best (query, class) pairs; a score is the class's probability times the mask's mean one inside it.

    Upstream's own post-processing makes every mask 384x384 first and gives a query one class.
    """
    scores = outputs.class_queries_logits[0].float().softmax(-1)[:, :-1]
    best = scores.flatten().topk(min(MAX_DETECTIONS, scores.numel()))
    queries, labels = best.indices // scores.shape[1], best.indices % scores.shape[1]
    # A query may be there for several classes.
    queries, of = queries.unique(return_inverse=True)
    inside, masks = [], []
    for some in queries.split(max(1, MASK_PIXELS // (size[0] * size[1]))):
        logits = nn.functional.interpolate(
            outputs.masks_queries_logits[:, some].float(), size, mode="bilinear", align_corners=False
        )[0]
        above = logits > 0
        inside.append((logits.sigmoid() * above).sum((1, 2)) / above.sum((1, 2)).clamp(min=1))
        masks += map(encode, above.cpu().numpy())
    scores = best.values * torch.cat(inside)[of]
    return Detections(labels.cpu(), scores.cpu(), masks=[masks[k] for k in of.tolist()])


def _detr_detect(outputs: Any, size: tuple[int, int]) -> Detections:
    """The best (query, class) pairs."""
    from torchvision.ops import box_convert

    scores = outputs.logits[0].float().sigmoid()
    best = scores.flatten().topk(min(MAX_DETECTIONS, scores.numel()))
    queries, labels = best.indices // scores.shape[1], best.indices % scores.shape[1]
    height, width = size
    boxes = box_convert(outputs.pred_boxes[0, queries].float(), "cxcywh", "xyxy")
    boxes = boxes * boxes.new_tensor([width, height, width, height])
    return Detections(labels.cpu(), best.values.cpu(), boxes=boxes.cpu())


TASKS = {
    "Mask2Former": Task(
        loader=hub.Mask2Former,
        backbone="model.pixel_level_module.encoder.",
        classifier="class_predictor",
        unread=(".swin.layernorm.",),  # the last norm of a Swin that is a backbone
        masks=True,
        share_count=_mask2former_share_count,
        targets=_mask2former_targets,
        detect=_mask2former_detect,
    ),
    "DeformableDETR": Task(
        loader=hub.DeformableDETR,
        backbone="model.backbone.",
        classifier="class_embed",
        unread=(),
        masks=False,
        share_count=_detr_share_count,
        targets=_detr_targets,
        detect=_detr_detect,
    ),
}


def _shapes_tiny(**classes: Any) -> Any:
    """A Mask2Former of 1.0 M parameters on a small ResNet, with one decoder layer for each level."""
    from transformers import Mask2FormerConfig, ResNetConfig

    width = 64
    backbone = ResNetConfig(
        embedding_size=24, hidden_sizes=[24, 48, 96, 128], depths=[1, 2, 2, 1], layer_type="basic",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    return Mask2FormerConfig(
        backbone_config=backbone, feature_size=width, mask_feature_size=width, hidden_dim=width,
        encoder_feedforward_dim=4 * width, dim_feedforward=4 * width, encoder_layers=2, decoder_layers=4,
        num_attention_heads=4, num_queries=20, train_num_points=1024,
        # With upstream's 2 the masks come early, and the classes stay unlearnt for long.
        class_weight=4.0, **classes,
    )  # fmt: skip


#: Small models that are trained from scratch, by the name that --model takes.
CONFIGS: dict[str, Callable[..., Any]] = {"shapes-tiny": _shapes_tiny}
