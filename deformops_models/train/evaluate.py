"""COCO average precision of a model on one split, and `deformops-models eval`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from deformops_models.backend import call_counts
from deformops_models.console import UsageError, pick_device, require, table
from deformops_models.hub import local_name
from deformops_models.patching import unpatch
from deformops_models.predict import UnfitError, check_finite, prepare, quiet_transformers, read_image, results_of
from deformops_models.train.coco import Split, count_problems, decode, read_split
from deformops_models.train.tasks import (
    Task,
    class_names,
    find_task,
    has_weights,
    load_model,
    load_processor,
    match_names,
)

#: The first entries of pycocotools' statistics.
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100")


def run(args: argparse.Namespace) -> int:
    """Prints the average precision of `args.model` on `args.data`; see `cli` for the arguments."""
    require("finetune", "transformers", "torchvision", "pycocotools", "tqdm")
    for name, least in (("limit", 1), ("image_size", 1), ("workers", 0)):
        if (value := getattr(args, name)) is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} {value}: the least is {least}")
    device = pick_device(args.device)
    name_or_folder = local_name(args.model)
    task = find_task(name_or_folder)
    if not has_weights(name_or_folder):
        raise UsageError(f"--model {args.model}: it has no weights to evaluate")
    split = read_split(args.data, args.split, masks=task.masks, skip_broken=args.skip_broken)
    if split.problems:
        _notice(f"left out: {count_problems(split.problems)}")
    if split.turned:
        _notice(f"images turned as their EXIF orientation says: {split.turned}")
    indices: Sequence[int] = range(len(split.images))[: args.limit]
    rows: dict[str, dict[str, float | None]] = {}
    with quiet_transformers():
        model = load_model(task, name_or_folder, None).to(device).eval()
        processor = load_processor(task, name_or_folder, args.image_size)
        labels = _category_ids(args.model, model.config.id2label, split)
        for name in ("patched", "unpatched") if args.compare else ("patched",):
            if name == "unpatched":
                unpatch(model)
            before, start = call_counts["msda_forward"], time.perf_counter()
            skipped: dict[int, str] | None = {} if args.skip_broken else None
            dtype = getattr(torch, args.dtype)
            found = detect(model, processor, task, split, indices, dtype, labels, args.workers, skipped=skipped)
            speed = len(indices) / (time.perf_counter() - start)
            if skipped:
                _notice("left out: " + "; ".join(skipped.values()))
                indices = [i for i in indices if i not in skipped]
            rows[name] = average_precision(split, found, task.metric, indices) | {"images/s": speed}
            if name == "patched" and call_counts["msda_forward"] == before:
                _notice("the patched model ran upstream's own forward, as it does without a GPU")
    if args.json:
        print(
            json.dumps({"model": args.model, "data": args.data, "images": len(indices), "metric": task.metric, **rows})
        )
    else:
        print(f"{task.metric} AP of {args.model} on {len(indices)} images of {split.file}")
        columns = [*METRICS, "images/s"]
        print(table([("", *columns), *((name, *(_cell(row[c]) for c in columns)) for name, row in rows.items())]))
    return 0


def _notice(text: str) -> None:
    """Prints what is not a result: standard output may be JSON."""
    print(text, file=sys.stderr)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _category_ids(model: str, id2label: Mapping[int, str], split: Split) -> list[Any]:
    """The data set's category id of each of the model's labels, or None: by name; where no name is shared, by position.

    Raises:
        UsageError: the model does not know all of the data's classes.
    """
    ids, names = zip(*((category["id"], category["name"]) for category in split.categories), strict=True)
    known = class_names(id2label)
    labels = match_names(names, known)
    if None not in labels:
        by_label = dict(zip(labels, ids, strict=True))
        return [by_label.get(label) for label in range(len(known))]
    if labels.count(None) == len(labels):
        none = f"--model {model}: it shares no class name with {split.file}; its classes are taken"
        if len(ids) == len(known):
            _notice(f"{none} by position, {known[0]} as {names[0]} and so on")
            return list(ids)
        if all(isinstance(i, int) and 0 <= i < len(known) for i in ids) and len(known) == 91:  # COCO's ids go to 90
            _notice(f"{none} as COCO's ids, {known[ids[0]]} as {names[0]} and so on")
            return [i if i in ids else None for i in range(len(known))]
    lacking = [name for name, label in zip(names, labels, strict=True) if label is None]
    others = [name for label, name in enumerate(known) if label not in labels]
    raise UsageError(
        f"--model {model}: it knows {len(known)} classes, but not {_some(lacking)} of {split.file}, which has not its "
        f"{_some(others)}; give the same classes the same names, or fine-tune the model on this data"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


class _Images(Dataset):
    """Index, size (H, W), inputs of an image processor, and None or why a black image stands in for one."""

    def __init__(self, split: Split, indices: Iterable[int], processor: Any) -> None:
        self.split, self.indices, self.processor = split, list(indices), processor

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, k: int) -> tuple[int, tuple[int, int], Any, UsageError | None]:
        from PIL import Image

        index, problem = self.indices[k], None
        path = self.split.path(index)
        try:
            image = read_image(path)
            inputs = prepare(self.processor, image)
        except UsageError as error:
            problem = error
        except UnfitError as error:
            problem = UsageError(f"{path}: {error}")
        if problem is not None:
            image = Image.new("RGB", (64, 64))
            inputs = prepare(self.processor, image)
        return index, (image.height, image.width), inputs["pixel_values"], problem


@torch.no_grad()  # inference mode would leave tensors in upstream's caches that training cannot use
def detect(
    model: nn.Module,
    processor: Any,
    task: Task,
    split: Split,
    indices: Iterable[int],
    dtype: torch.dtype,
    category_ids: list[Any],
    workers: int = 0,
    quiet: bool = False,
    skipped: dict[int, str] | None = None,
    odd: set[int] | None = None,
) -> list[dict[str, Any]]:
    """Runs a model on images, one at a time, since padding to a common size would change what it sees.

    Args:
        model: in eval mode, in float32.
        processor: upstream's image processor.
        task, split: of the model and of the data.
        indices: which images of the split.
        dtype: of autocast; float32 is none.
        category_ids: of each label; detections of labels without one are dropped.
        workers: processes that read images.
        quiet: shows no progress bar.
        skipped: gets the indices of images that cannot be read, and what is wrong with them; None raises UsageError.
        odd: gets the indices of images for which the model gives numbers that are not finite, where then nothing is
            found; None raises UsageError.

    Returns:
        Detections in COCO's result format.

    Raises:
        UsageError: an image cannot be read, or the model gives numbers that are not finite.
    """
    from tqdm import tqdm

    device = next(model.parameters()).device
    images = _Images(split, indices, processor)
    loader = DataLoader(images, batch_size=None, num_workers=workers)
    results: list[dict[str, Any]] = []
    for item in tqdm(loader, desc="evaluate", unit="image", leave=False, disable=quiet or None):
        index, size, pixels, problem = item
        if problem is not None:
            if skipped is None:
                raise UsageError(f"{problem}; mend it, or leave it out with --skip-broken")
            skipped[index] = str(problem)
        mask = pixels.new_ones(pixels.shape[0], *pixels.shape[-2:], dtype=torch.int64)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            outputs = model(pixel_values=pixels.to(device, torch.float32), pixel_mask=mask.to(device))
        # Of sharded models every process has to run as many images as the others, whatever is in them.
        if problem is not None:
            continue
        try:
            check_finite(results_of(outputs), dtype, device)
        except UnfitError as error:
            if odd is None:
                raise UsageError(f"{split.path(index)}: {error}") from error
            odd.add(index)
        else:
            results += _as_results(task.detect(outputs, size), split.images[index]["id"], category_ids)
    return results


def _as_results(found: Any, image_id: Any, category_ids: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for k, (label, score) in enumerate(zip(found.labels.tolist(), found.scores.tolist(), strict=True)):
        row = {"image_id": image_id, "category_id": category_ids[label], "score": score}
        if row["category_id"] is None:
            continue
        if found.masks is not None:
            row["segmentation"] = found.masks[k]
        else:
            x0, y0, x1, y1 = found.boxes[k].tolist()
            row["bbox"] = [x0, y0, x1 - x0, y1 - y0]
        rows.append(row)
    return rows


def average_precision(
    split: Split, results: list[dict[str, Any]], metric: str, indices: Iterable[int]
) -> dict[str, float | None]:
    """Returns pycocotools' statistics in percent; None where the split has no object of the kind.

    Args:
        split: with the true objects.
        results: as `detect` gives them.
        metric: "segm" or "bbox".
        indices: images that were looked at.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    # The evaluator sorts ids, which may be numbers and texts, and their order decides among equal scores.
    ids = (split.images[i]["id"] for i in indices)
    numbers = {name: k for k, name in enumerate(sorted(ids, key=lambda name: (isinstance(name, str), name)))}
    images = [{**image, "id": numbers[image["id"]]} for image in split.images if image["id"] in numbers]
    truth, found = COCO(), COCO()
    truth.dataset = {
        "images": images,
        "categories": split.categories,
        "annotations": _truth(split, numbers, metric),
    }
    found.dataset = {"images": images, "categories": split.categories, "annotations": []}
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        found.createIndex()
        if results:
            found = truth.loadRes([{**row, "image_id": numbers[row["image_id"]]} for row in results])
        evaluator = COCOeval(truth, found, metric)
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    stats = evaluator.stats[: len(METRICS)]
    return {name: 100 * float(x) if x >= 0 else None for name, x in zip(METRICS, stats, strict=True)}


def _truth(split: Split, numbers: Mapping[Any, int], metric: str) -> list[dict[str, Any]]:
    """Annotations of the images with `numbers`, with fields that pycocotools reads and not every data set has."""
    rows = []
    for image in split.images:
        for annotation in split.annotations.get(image["id"], []) if image["id"] in numbers else ():
            row = {"iscrowd": 0, "area": annotation["bbox"][2] * annotation["bbox"][3], **annotation}
            if metric == "segm" and "area" not in annotation:
                row["area"] = int(decode(annotation["segmentation"], image["height"], image["width"]).sum())
            rows.append({**row, "image_id": numbers[image["id"]], "id": len(rows) + 1})
    return rows
