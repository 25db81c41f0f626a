"""`deformops-models predict`: a checkpoint on images; an overlay picture and a JSON file for each."""

import argparse
import colorsys
import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deformops_models import hub
from deformops_models.console import UsageError, output_folder, pick_device, require, whole_file
from deformops_models.patching import PatchError

if TYPE_CHECKING:
    from PIL.Image import Image

#: Ends the names of written files, which a folder given as input is not searched for.
_MARK = ".predictions"
_SUFFIXES = {".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


@dataclass(frozen=True)
class Prediction:
    """One object or region.

    `box` is (x0, y0, x1, y1) in pixels of the upright image, `mask` (H, W) bool on the CPU or None; a region of
    semantic segmentation has no score.
    """

    label: str
    label_id: int
    score: float | None
    box: tuple[float, float, float, float]
    mask: Tensor | None = None

    def as_json(self) -> dict[str, Any]:
        """The mask becomes an uncompressed run-length encoding as in COCO: down the columns, background first."""
        row = {"label": self.label, "label_id": self.label_id, "score": self.score, "box": self.box}
        if self.mask is not None:
            row["mask"] = {"size": list(self.mask.shape), "counts": _run_lengths(self.mask)}
        return row


@dataclass(frozen=True)
class Options:
    """What every loader needs besides the model; `size` is as in the processors of `hub`."""

    task: str
    threshold: float
    size: str
    device: torch.device
    dtype: torch.dtype


#: Raises `UnfitError` for an image that the model's processor does not take or whose results are not finite.
Detect = Callable[["Image"], list[Prediction]]


class ImageError(UsageError):
    """What is wrong with one image; others can be used."""


class UnfitError(ValueError):
    """What is wrong with one image for a model, without the image's name."""


def run(args: argparse.Namespace) -> int:
    """Runs the command; see `cli` for its arguments.

    Returns:
        0 if every image was predicted and written; 2 if one could not be, which is said on stderr.

    Raises:
        UsageError: something was wrong before the first prediction.
    """
    require("transformers", "PIL", "tqdm")
    from tqdm import tqdm

    if not args.model:
        raise UsageError("--model is empty: give an alias of a checkpoint or a local model folder")
    images = _find_images(args.images)
    device = pick_device(args.device)
    model = hub.local_name(args.model)
    loader, task = _choose_loader(model, args.task)
    folder = output_folder(args.out)
    with quiet_transformers():
        try:
            size = args.size or ("hub" if Path(model).expanduser().is_dir() else "eval")
            options = Options(task, args.threshold, size, device, getattr(torch, args.dtype))
            detect = loader(model, options)
        except (hub.CheckpointError, PatchError) as error:
            raise UsageError(str(error)) from error
        documents, failures = [], 0
        for source, stem in tqdm(list(zip(images, _stems(images), strict=True)), unit="image", disable=_no_bar(images)):
            try:
                image = read_image(source)
                predictions = _detect(detect, image, source)
                picture, record = folder / f"{stem}{_MARK}.png", folder / f"{stem}{_MARK}.json"
                document = {
                    "image": str(source),
                    "width": image.width,
                    "height": image.height,
                    "model": args.model,
                    "task": task,
                    "threshold": args.threshold,
                    "overlay": str(picture),
                    "predictions": [prediction.as_json() for prediction in predictions],
                }
                with _writing(picture, source) as temporary:
                    draw(image, predictions).save(temporary)
                with _writing(record, source) as temporary:
                    temporary.write_text(json.dumps(document), encoding="utf-8")
            except ImageError as error:
                failures += 1
                tqdm.write(f"deformops-models: {error}", file=sys.stderr)
                continue
            if args.json:
                documents.append(document)
            else:
                tqdm.write(f"{source}: {summary(predictions)} -> {picture}")
    if args.json:
        print(json.dumps(documents, indent=2))
    return 2 if failures else 0


def _detect(detect: Detect, image: "Image", source: Path) -> list[Prediction]:
    try:
        return detect(image)
    except UnfitError as error:
        raise ImageError(f"{source}: {error}") from error


@contextlib.contextmanager
def _writing(path: Path, source: Path) -> Iterator[Path]:
    """As `whole_file`; raises ImageError if the file cannot be written."""
    try:
        with whole_file(path) as temporary:
            yield temporary
    except OSError as error:
        raise ImageError(f"{source}: cannot write {path}: {error.strerror or error}") from error


def _no_bar(images: Sequence[Path]) -> bool | None:
    """No progress bar for a single image; None lets tqdm show one only on a terminal."""
    return True if len(images) == 1 else None


def summary(predictions: Sequence[Prediction]) -> str:
    names = [prediction.label for prediction in predictions]
    counts = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    return counts or "nothing above the threshold"


def _find_images(arguments: Iterable[str]) -> list[Path]:
    """Files as they are given, folders as the sorted images in them; a named file has an image's header."""
    found: dict[Path, Path] = {}
    for argument in arguments:
        if not argument:
            raise UsageError("an IMAGE is empty: name a file or a folder, or . for the current one")
        path = Path(argument).expanduser()
        try:
            if path.is_dir():
                files = [file for file in sorted(path.iterdir()) if _is_input(file)]
                if not files:
                    raise UsageError(f"{argument}: no images in this folder")
            elif path.exists():
                read_image(path, header_only=True)
                files = [path]
            else:
                raise UsageError(f"{argument}: no such file or folder")
        except OSError as error:
            raise UsageError(f"{argument}: cannot read it: {error.strerror}") from None
        found |= {file.resolve(): file for file in files}
    return list(found.values())


def _is_input(file: Path) -> bool:
    hidden_or_ours = file.name.startswith(".") or file.stem.endswith(_MARK)
    return file.suffix.lower() in _SUFFIXES and not hidden_or_ours and file.is_file()


def range_problem(image: "Image") -> str | None:
    """Why nobody knows which grey level of an opened image is white, or None."""
    # Pillow opens 16-bit PGM files as if they had 32.
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
        return "levels of 32 bits have no known range; convert it to 8 or 16"
    return None


def read_image(path: Path, header_only: bool = False) -> "Image | None":
    """The image upright and in RGB.

    Raises:
        ImageError: the file cannot be read or is not an image.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            if problem := range_problem(image):
                raise ValueError(problem)
            if header_only:
                return None
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):
                # To 8 bits convert() would clip; point() does not take every order of the bytes.
                upright = upright.convert("I").point(lambda level: level / 256).convert("L")
            elif upright.mode == "P":
                upright = upright.convert("RGBA")
            return upright.convert("RGB")
    except Image.UnidentifiedImageError:
        raise ImageError(f"{path}: not an image") from None
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"{path}: cannot read it: {reason}") from None


def _stems(paths: Sequence[Path]) -> list[str]:
    """A name for each output, unique also where file systems ignore case: `a`, then `a-2` and so on."""
    taken: set[str] = set()
    names = []
    for path in paths:
        name, count = path.stem, 1
        while name.casefold() in taken:
            count += 1
            name = f"{path.stem}-{count}"
        taken.add(name.casefold())
        names.append(name)
    return names


def _choose_loader(model: str, task: str | None) -> tuple[Callable[..., Detect], str]:
    """Which function loads the alias or folder, and its task, without loading anything."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        name = folder_loader(folder)
        published = None
    elif model.startswith((".", "/", "~")):
        raise UsageError(f"--model {model}: no such folder")
    else:
        try:
            row = hub.find_checkpoint(model)
        except hub.CheckpointError as error:
            raise UsageError(str(error)) from None
        name, published = row.loader, row.task.split()[0]
    if name == "Mask2Former":
        return load_mask2former, task or published or _folder_task(folder)
    if task:
        raise UsageError(f"--task is for Mask2Former, {model} detects objects")
    if name == "DINO" and (folder.is_dir() or published == "object"):
        return _load_mmdet, "object"
    if name == "DeformableDETR":
        return _load_deformable_detr, "object"
    raise UsageError(_UNDRAWN.format(model))


_UNDRAWN = "--model {}: predict draws transformers' Mask2Former and Deformable DETR and mmdet's box detectors"


def _folder_task(folder: Path) -> str:
    """The task that the folder's path names last, or else the name in its config; if there is none, that is said."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # In the Hub's cache the repo's name is two levels up.
    names = f"{config.get('_name_or_path')}/{folder.resolve()}".lower()
    task = max(_POST_PROCESS, key=names.rfind)
    if task not in names:
        task = "instance"
        if folder not in hub.SHIPPED.values():
            problem = f"--model {folder}: neither its path nor its config names a task"
            print(f"deformops-models: {problem}, {task} is assumed; --task takes another", file=sys.stderr)
    return task


def folder_loader(folder: Path) -> str:
    try:
        config = folder / "config.json"
        if not config.is_file():
            if any(folder.glob("*.py")):
                return "DINO"
            trained = [folder / name for name in ("best", "last") if (folder / name).is_dir()]
            hint = f"; did you mean {trained[0]}?" if trained else ""
            raise UsageError(
                f"--model {folder}: neither a config.json (transformers) nor a config .py (mmdet) in it{hint}"
            )
        kind = json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"--model {folder}: cannot read its config.json: {error}") from None
    loaders = {"mask2former": "Mask2Former", "deformable_detr": "DeformableDETR"}
    if not isinstance(kind, str) or kind not in loaders:
        raise UsageError(f"--model {folder}: model_type {kind!r} is not supported: {' and '.join(loaders)} are")
    return loaders[kind]


def load_mask2former(name: str, options: Options) -> Detect:
    """The function that detects objects in an image with the named Mask2Former."""
    model, forward = _load_transformers(hub.Mask2Former, name, options)
    names = model.config.id2label
    post_process = _POST_PROCESS[options.task]

    def detect(image: "Image") -> list[Prediction]:
        processor, outputs = forward(image)
        masks = post_process(processor, outputs, options.threshold, (image.height, image.width))
        visible = (row for row in masks if row[2].any())
        return [Prediction(names[label], label, score, _bounding_box(mask), mask) for label, score, mask in visible]

    return detect


Masks = Iterator[tuple[int, float | None, Tensor]]


def _instances(processor: Any, outputs: Any, threshold: float, size: tuple[int, int]) -> Masks:
    [result] = processor.post_process_instance_segmentation(
        outputs, threshold=threshold, target_sizes=[size], return_binary_maps=True
    )
    for segment in result["segments_info"]:
        yield segment["label_id"], segment["score"], result["segmentation"][segment["id"]].bool()


def _panoptic(processor: Any, outputs: Any, threshold: float, size: tuple[int, int]) -> Masks:
    [result] = processor.post_process_panoptic_segmentation(
        outputs, threshold=threshold, target_sizes=[size], label_ids_to_fuse=set()
    )
    for segment in result["segments_info"]:
        yield segment["label_id"], segment["score"], result["segmentation"] == segment["id"]


def _semantic(processor: Any, outputs: Any, threshold: float, size: tuple[int, int]) -> Masks:
    [classes] = processor.post_process_semantic_segmentation(outputs, target_sizes=[size])
    for label in classes.unique().tolist():
        yield label, None, classes == label


_POST_PROCESS = {"instance": _instances, "panoptic": _panoptic, "semantic": _semantic}


def _load_deformable_detr(name: str, options: Options) -> Detect:
    model, forward = _load_transformers(hub.DeformableDETR, name, options)
    names = model.config.id2label

    def detect(image: "Image") -> list[Prediction]:
        processor, outputs = forward(image)
        [result] = processor.post_process_object_detection(
            outputs, threshold=options.threshold, target_sizes=[(image.height, image.width)]
        )
        return _from_boxes(result["boxes"], result["labels"], result["scores"], names)

    return detect


def prepare(processor: Any, image: "Image") -> Any:
    """Inputs out of an upstream image processor; raises `UnfitError` if it does not take the image."""
    try:
        return processor(images=image, return_tensors="pt")
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnfitError(f"the model's image processor fails: {error}") from error


def _load_transformers(loader: Any, name: str, options: Options) -> tuple[Any, Callable]:
    """The model, and a function from an image to its processor and its outputs in float32 on the CPU."""
    require("transformers", "transformers", "timm", "safetensors", "torchvision")
    device, dtype = options.device, options.dtype
    processor = loader.processor(name, options.size)
    model = loader.from_pretrained(name, device=device, dtype=dtype)

    def forward(image: "Image") -> tuple[Any, Any]:
        inputs = prepare(processor, image)
        with torch.inference_mode():
            outputs = model(inputs["pixel_values"].to(device, dtype), pixel_mask=inputs["pixel_mask"].to(device))
        for key, value in outputs.items():
            if isinstance(value, Tensor):
                outputs[key] = value.float().cpu()
        check_finite(results_of(outputs), dtype, device)
        return processor, outputs

    return model, forward


def results_of(outputs: Mapping[str, Any]) -> list[Tensor]:
    """Those outputs of a transformers' model that become predictions."""
    names = ("logits", "pred_boxes", "class_queries_logits", "masks_queries_logits")
    return [outputs[name] for name in names if name in outputs]


def check_finite(results: list[Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Raises `UnfitError` for a NaN or an infinity."""
    if not all(result.isfinite().all() for result in results):
        name = str(dtype).removeprefix("torch.")
        remedy = "" if dtype == torch.float32 else ": use --dtype float32"
        raise UnfitError(f"the model gives numbers that are not finite in {name} on {device}{remedy}")


def _load_mmdet(name: str, options: Options) -> Detect:
    require("mmdet", "mmengine", "mmcv", "mmdet")
    prepare = hub.DINO.processor(name, options.size)
    model = hub.DINO.from_pretrained(name, device=options.device)
    # Only its config says what a folder builds.
    if hasattr(model, "panoptic_head"):
        raise UsageError(_UNDRAWN.format(name))
    names = model.dataset_meta["classes"]

    def detect(image: "Image") -> list[Prediction]:
        # mmdet makes float32 images and positions, so half precision has to come from autocast.
        half = torch.autocast(options.device.type, options.dtype, enabled=options.dtype != torch.float32)
        with torch.inference_mode(), half, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.meshgrid")  # mmdet's calls
            [sample] = model.test_step(prepare(image))
        found = sample.pred_instances
        check_finite([found.bboxes, found.scores], options.dtype, options.device)
        found = found[found.scores > options.threshold]
        return _from_boxes(found.bboxes, found.labels, found.scores, names)

    return detect


def _from_boxes(boxes: Tensor, labels: Tensor, scores: Tensor, names: Any) -> list[Prediction]:
    rows = zip(boxes.float().tolist(), labels.tolist(), scores.float().tolist(), strict=True)
    return [Prediction(names[label], label, score, tuple(box)) for box, label, score in rows]


def _bounding_box(mask: Tensor) -> tuple[float, float, float, float]:
    ys, xs = mask.any(1).nonzero(), mask.any(0).nonzero()
    return float(xs[0]), float(ys[0]), float(xs[-1] + 1), float(ys[-1] + 1)


def _run_lengths(mask: Tensor) -> list[int]:
    """Lengths of the runs down the columns of (H, W), beginning with the background's, which may be 0."""
    pixels = mask.T.flatten()
    borders = (pixels[1:] != pixels[:-1]).nonzero().flatten() + 1
    edges = torch.cat([borders.new_zeros(1), borders, borders.new_tensor([len(pixels)])])
    return [0] * bool(pixels[0]) + edges.diff().tolist()


def draw(image: "Image", predictions: Sequence[Prediction]) -> "Image":
    """Draws masks, boxes, names and scores; objects with the best scores come on top. Small images are enlarged."""
    from PIL import Image, ImageDraw, ImageFont

    zoom = max(1, _READABLE // max(image.size))
    canvas = image.resize((zoom * image.width, zoom * image.height))
    ordered = sorted(predictions, key=lambda p: -1 if p.score is None else p.score)
    colors = [_color(p.label_id if p.score is None else i) for i, p in enumerate(ordered)]
    for prediction, color in zip(ordered, colors, strict=True):
        if prediction.mask is not None:
            opacity = Image.fromarray(prediction.mask.to(torch.uint8).mul(120).numpy())
            canvas.paste(color, (0, 0, *canvas.size), opacity.resize(canvas.size, Image.Resampling.NEAREST))
    pen = ImageDraw.Draw(canvas)
    unit = max(canvas.size)
    font = ImageFont.load_default(max(11, unit / 50))
    corners = [tuple(zoom * side for side in prediction.box) for prediction in ordered]
    for prediction, (x0, y0, x1, y1), color in zip(ordered, corners, colors, strict=True):
        if prediction.score is not None and x0 <= x1 and y0 <= y1:
            pen.rectangle((x0, y0, x1, y1), outline=color, width=max(2, unit // 400))
    for prediction, box, color in zip(ordered, corners, colors, strict=True):
        text = prediction.label if prediction.score is None else f"{prediction.label} {prediction.score:.2f}"
        _, _, right, bottom = pen.textbbox((0, 0), text, font=font)
        width, height = right + 4, bottom + 4
        if prediction.score is None:
            x, y = (zoom * place for place in _inner_point(prediction.mask))
        else:  # above the object, if there is room
            x, y = box[0], box[1] - height if box[1] >= height else box[1]
        x, y = min(max(x, 0), max(canvas.width - width, 0)), min(max(y, 0), max(canvas.height - height, 0))
        pen.rectangle((x, y, x + width, y + height), fill=color)
        pen.text((x + 2, y + 2), text, fill=(0, 0, 0), font=font)
    return canvas


#: The longer edge in pixels that a picture needs for its labels.
_READABLE = 1024


def _color(index: int) -> tuple[int, int, int]:
    """Neighbouring indices get hues that are far apart."""
    red, green, blue = colorsys.hsv_to_rgb(index * 0.618034 % 1, 0.65, 1)
    return round(red * 255), round(green * 255), round(blue * 255)


def _inner_point(mask: Tensor) -> tuple[float, float]:
    """x and y of a pixel of the mask near its middle."""
    rows = mask.sum(1).cumsum(0)
    y = int((rows >= rows[-1] / 2).nonzero()[0])
    while not mask[y].any():
        y -= 1
    xs = mask[y].nonzero().flatten()
    return float(xs[len(xs) // 2]), float(y)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' loading bars and warnings out of the command's output."""
    import importlib.util

    if importlib.util.find_spec("transformers") is None:
        yield
        return
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
