"""COCO-format folders: finding, reading and checking them, and the images and targets that training draws from them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from deformops_models.console import UsageError
from deformops_models.predict import range_problem, read_image

#: Where a split's annotations and images lie below the data folder: `shapes`' own layout, and COCO's.
LAYOUTS = (
    ("annotations/{0}.json", "images/{0}"),
    ("annotations/instances_{0}2017.json", "{0}2017"),
    ("annotations/instances_{0}2017.json", "images/{0}2017"),
)
SMALLEST = 0.5  # of the square, that augmentation scales an image to
_SLACK = 1.0  # pixels by which a box may leave its image: published data sets round
_ORIENTATION = 0x0112  # EXIF tag
_ON_ITS_SIDE = (5, 6, 7, 8)  # its values that swap height and width
_NAMED = 3  # problems that an error spells out


@dataclass(frozen=True)
class Problem:
    """Something wrong with an image or an annotation."""

    kind: str
    where: str
    image_id: Any = None
    annotation_id: Any = None

    def __str__(self) -> str:
        return f"{self.where}: {self.kind}"


@dataclass(frozen=True)
class Split:
    """One split of a data set, checked. Labels number the categories from 0 in the order of their ids.

    `annotations` holds the objects of each image id, crowds included; `description` is the data set's own; `turned`
    counts the images that are stored turned or mirrored, as their EXIF orientation says; `source` tells files apart.
    """

    file: Path
    folder: Path
    images: list[dict[str, Any]]
    annotations: Mapping[Any, list[dict[str, Any]]]
    categories: list[dict[str, Any]]
    problems: list[Problem] = field(default_factory=list)
    description: str = ""
    turned: int = 0
    source: str = ""

    @property
    def id2label(self) -> dict[int, str]:
        return {label: category["name"] for label, category in enumerate(self.categories)}

    @property
    def labels(self) -> dict[Any, int]:
        """From category id to label."""
        return {category["id"]: label for label, category in enumerate(self.categories)}

    @property
    def digest(self) -> str:
        """Tells data sets apart: changes with the images' ids and names, their objects and the categories."""
        names = [[image["id"], image["file_name"]] for image in self.images]
        # Masks are long; another mask has another area.
        objects = [
            [[a["category_id"], a["bbox"], a.get("area")] for a in self.objects(i)] for i in range(len(self.images))
        ]
        return _digest(json.dumps([names, objects, self.categories]).encode())

    def path(self, index: int) -> Path:
        return self.folder / self.images[index]["file_name"]

    def objects(self, index: int) -> list[dict[str, Any]]:
        """What a model is trained to find in an image: everything but crowds."""
        return [a for a in self.annotations.get(self.images[index]["id"], []) if not a.get("iscrowd")]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def read_split(
    root: str, split: str, *, masks: bool, skip_broken: bool = False, least_edge: int | None = None
) -> Split:
    """Finds, reads and checks one split of a data folder.

    Args:
        root: the folder; `LAYOUTS` says what is looked for in it.
        split: "train" or "val".
        masks: every object needs a segmentation.
        skip_broken: leave out broken images and annotations, which are in the result's `problems`.
        least_edge: pixels to which the longer edge of an image is scaled at least; some have to be left of the other.

    Raises:
        UsageError: there is no such split, its JSON is not COCO's, or something is broken and is not to be skipped.
    """
    file, folder = _find(Path(root).expanduser(), split)
    try:
        content = file.read_bytes()
        document = json.loads(content.decode())
        images, annotations, categories = (document[key] for key in ("images", "annotations", "categories"))
        _check_rows("images", images, "id")
        _check_rows("annotations", annotations, "image_id", "category_id")
        _check_rows("categories", categories, "id")
        categories = sorted(({"id": c["id"], "name": str(c["name"])} for c in categories), key=lambda c: c["id"])
        "".join(c["name"] for c in categories).encode()  # half a character can be written nowhere
    except OSError as error:
        raise UsageError(f"{file}: cannot read it: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{file}: not COCO's format: {type(error).__name__} {error}") from None
    if not categories:
        raise UsageError(f"{file}: it names no category")
    for key in ("id", "name"):
        value, times = Counter(category[key] for category in categories).most_common(1)[0]
        if times > 1:
            raise UsageError(f"{file}: {times} categories have the {key} {value}; give each its own")
    problems, turned = _check_images(file, folder, images, least_edge)
    broken = {problem.image_id for problem in problems}
    images = [image for image in images if image.get("id") not in broken]
    sizes = {image["id"]: (image["height"], image["width"]) for image in images}
    known = {category["id"] for category in categories}
    kept = defaultdict(list)
    for annotation in annotations:
        if annotation.get("image_id") in broken:
            continue
        if kind := _annotation_problem(annotation, sizes, known, masks):
            where = f"{file}: annotation {annotation.get('id')} of image {annotation.get('image_id')}"
            problems.append(Problem(kind, where, annotation.get("image_id"), annotation.get("id")))
        else:
            kept[annotation["image_id"]].append(annotation)
    if problems and not skip_broken:
        more = f" (and {len(problems) - _NAMED} more)" if len(problems) > _NAMED else ""
        raise UsageError(
            f"--data {root}: {'; '.join(map(str, problems[:_NAMED]))}{more}; mend them, or leave them out with "
            "--skip-broken"
        )
    if not images:
        raise UsageError(f"{file}: it names no image that can be used")
    info = document.get("info")
    description = " ".join(str(info.get("description", "")).split()) if isinstance(info, dict) else ""
    return Split(file, folder, images, dict(kept), categories, problems, description, turned, _digest(content))


def _check_rows(name: str, rows: Any, *ids: str) -> None:
    """Raises TypeError unless `rows` are JSON objects whose `ids`, where they have them, can be looked up."""
    if not isinstance(rows, list):
        raise TypeError(f"{name} is {str(rows)[:40]}, not a list")
    for row in rows:
        if not isinstance(row, dict):
            raise TypeError(f"{name} holds {str(row)[:40]}, not an object")
        for key in ids:
            if not isinstance(row.get(key), int | float | str | None):
                raise TypeError(f"{name} holds an {key} of {str(row[key])[:40]}, not a number or a text")


def count_problems(problems: list[Problem]) -> str:
    """Says how many of each kind there are, such as "2 x box is outside the image"."""
    kinds = Counter(problem.kind.partition(":")[0] for problem in problems)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())


def _find(root: Path, split: str) -> tuple[Path, Path]:
    if not root.is_dir():
        raise UsageError(f"--data {root}: no such folder")
    for file, folder in LAYOUTS:
        pair = root / file.format(split), root / folder.format(split)
        if pair[0].is_file() and pair[1].is_dir():
            return pair
    wanted = "; or ".join(f"{file} with {folder}/" for file, folder in LAYOUTS).format(split)
    raise UsageError(f"--data {root}: no {split} split in it; needed is {wanted}")


def _check_images(
    file: Path, folder: Path, images: list[dict[str, Any]], least_edge: int | None
) -> tuple[list[Problem], int]:
    """Returns what is wrong, and how many of the sound images are stored turned or mirrored."""
    from tqdm import tqdm

    problems, turned, seen = [], 0, set()
    for image in tqdm(images, desc=f"check {file.name}", unit="image", leave=False, disable=None, delay=1):
        identity = image.get("id")
        kind, orientation = "id is missing or used twice", None
        if identity is not None and identity not in seen:
            kind, orientation = _look_at(folder, image, least_edge)
        if kind:
            path = str(folder / str(image.get("file_name"))).encode(errors="backslashreplace").decode()
            problems.append(Problem(kind, f"{file}: image {identity} ({path})", identity))
        # Any other value turns nothing.
        elif orientation in (2, 3, 4, *_ON_ITS_SIDE):
            turned += 1
        seen.add(identity)
    return problems, turned


def _look_at(folder: Path, image: Mapping[str, Any], least_edge: int | None) -> tuple[str | None, Any]:
    """Returns what is wrong with an image, or None, and its EXIF orientation."""
    from PIL import Image

    if not all(isinstance(image.get(key), int) and image[key] > 0 for key in ("height", "width")):
        return "height or width is no positive integer", None
    if not (isinstance(image.get("file_name"), str) and image["file_name"]):
        return "file_name is missing", None
    try:
        with Image.open(folder / image["file_name"]) as opened:
            stored, orientation = opened.size, opened.getexif().get(_ORIENTATION)
            problem = range_problem(opened)
    except FileNotFoundError:
        return "no such file", None
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        return f"not a readable image: {error}", None
    return problem or _size_problem(image, stored, orientation, least_edge), orientation


def _size_problem(
    image: Mapping[str, Any], stored: tuple[int, int], orientation: Any, least_edge: int | None
) -> str | None:
    size = stored[::-1] if orientation in _ON_ITS_SIDE else stored
    expected = (image["width"], image["height"])
    if size != expected:
        problem = f"size differs: the file has {size[0]}x{size[1]}, the annotations {expected[0]}x{expected[1]}"
        if stored == expected:
            problem += (
                f", which is its size before EXIF orientation {orientation} turns it; annotate the turned picture, "
                "or store it without that tag"
            )
        return problem
    if least_edge is not None and max(size) > min(size) * least_edge:
        return f"too narrow: nothing is left of {size[0]}x{size[1]} where its longer edge has {least_edge} pixels"
    return None


def _annotation_problem(
    annotation: Mapping[str, Any], sizes: Mapping[Any, tuple[int, int]], known: set[Any], masks: bool
) -> str | None:
    if annotation.get("image_id") not in sizes:
        return "unknown image_id"
    if annotation.get("category_id") not in known:
        return f"unknown category: {annotation.get('category_id')}"
    height, width = sizes[annotation["image_id"]]
    box = annotation.get("bbox")
    if not (isinstance(box, list) and len(box) == 4 and all(_is_number(x) for x in box)):
        return f"box is not four finite numbers: {box}"
    x, y, w, h = box
    if x < -_SLACK or y < -_SLACK or x + w > width + _SLACK or y + h > height + _SLACK:
        return f"box is outside the image: {box} in {width}x{height}"
    area = annotation.get("area", 1)
    if not _is_number(area):
        return f"area is not a finite number: {area}"
    if w <= 0 or h <= 0 or area <= 0:
        return f"area is zero: box {box}, area {annotation.get('area')}"
    if annotation.get("iscrowd", 0) not in (0, 1):
        return f"iscrowd is neither 0 nor 1: {annotation['iscrowd']}"
    if masks:
        return _segmentation_problem(annotation.get("segmentation"), height, width)
    return None


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and abs(x) < 1e18  # nor NaN; a huge integer is no float


def _segmentation_problem(segmentation: Any, height: int, width: int) -> str | None:
    if not segmentation:
        return "segmentation is missing"
    if isinstance(segmentation, list):
        problem = next((problem for p in segmentation if (problem := _polygon_problem(p, height, width))), None)
        if problem or not all(_is_thin_or_outside(p, height, width) for p in segmentation):
            return problem
        return None if decode(segmentation, height, width).any() else "area is zero: polygons without a pixel"
    if not isinstance(segmentation, dict) or segmentation.get("size") != [height, width]:
        return f"run lengths are not of the image's size: {width}x{height}"
    counts = segmentation.get("counts")
    if isinstance(counts, str):
        counts = _run_lengths(counts)
    if not (isinstance(counts, list) and counts and all(isinstance(count, int) for count in counts)):
        return "run lengths are missing or damaged"
    if sum(counts) != height * width or min(counts) < 0:
        return f"run lengths do not add up to the image's pixels: {sum(counts)}"
    return None if sum(counts[1::2]) else "area is zero: empty run lengths"


def _polygon_problem(polygon: Any, height: int, width: int) -> str | None:
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2 or not all(map(_is_number, polygon)):
        return "polygon is not a list of three or more x, y pairs"
    # pycocotools walks along the edges pixel by pixel, also outside of the image.
    for name, along, size in (("x", polygon[::2], width), ("y", polygon[1::2], height)):
        if min(along) < -size or max(along) > 2 * size:
            return f"polygon is far outside the image: {name} from {min(along)} to {max(along)} in {width}x{height}"
    return None


def _is_thin_or_outside(polygon: list[float], height: int, width: int) -> bool:
    """Whether it can be without a pixel; crossed edges can make it look thin."""
    x, y = polygon[::2], polygon[1::2]
    area = abs(sum(x[i - 1] * y[i] - x[i] * y[i - 1] for i in range(len(x)))) / 2
    longest = max(max(x) - min(x), max(y) - min(y))
    outside = max(x) < 1 or max(y) < 1 or min(x) > width - 1 or min(y) > height - 1
    return outside or area <= longest


def _run_lengths(text: str) -> list[int] | None:
    """Run lengths out of COCO's compressed text, or None: pycocotools would read a damaged one without an end.

    A number has five bits per character, the lowest first; from the fourth one on it is the difference to the one
    before the last.
    """
    counts: list[int] = []
    number = bits = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64:
            return None
        number |= (code & 31) << bits
        bits += 5
        if code & 32:
            continue
        if code & 16:
            number -= 1 << bits
        counts.append(number + counts[-2] if len(counts) > 2 else number)
        number = bits = 0
    return None if bits else counts


def decode(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Returns the pixels (H, W) of uint8 of polygons, or of run lengths, compressed or not."""
    from pycocotools import mask as coco_mask

    if isinstance(segmentation, list):
        return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(segmentation, height, width)))
    if isinstance(segmentation["counts"], list):
        segmentation = coco_mask.frPyObjects(segmentation, height, width)
    return coco_mask.decode(segmentation)


def encode(pixels: np.ndarray) -> dict[str, Any]:
    """Returns the compressed run lengths of pixels (H, W) of bool."""
    from pycocotools import mask as coco_mask

    return coco_mask.encode(np.asfortranarray(pixels, dtype=np.uint8))


class TrainingImages(Dataset):
    """Square training inputs with their targets.

    An item is asked for by (epoch, index), and its augmentation depends on these and the seed only: whatever process
    or worker makes it, before or after an interruption, it is the same.

    Args:
        split: what to read.
        masks: masks as targets in place of boxes.
        size: edge of the square in pixels.
        augment: mirror, scale and crop, change colours; otherwise fit the whole image into the square.
        mean, std: for normalisation, 3 each, of the levels 0 to 255.
        seed: of the augmentation.
        skip_broken: the next image takes the place of one that cannot be read. Its header may have looked sound.
    """

    def __init__(
        self,
        split: Split,
        *,
        masks: bool,
        size: int,
        augment: bool,
        mean: list[float],
        std: list[float],
        seed: int,
        skip_broken: bool = False,
    ) -> None:
        from torchvision.transforms import v2
        from torchvision.tv_tensors import Image, Mask

        self.split, self.masks, self.augment, self.seed, self.skip_broken = split, masks, augment, seed, skip_broken
        # The padding becomes zero when it is normalised.
        fill = {Image: [min(max(round(x), 0), 255) for x in mean], Mask: 0}
        scales = (SMALLEST, 2.0) if augment else (1.0, 1.0)
        steps = [v2.ScaleJitter((size, size), scale_range=scales, antialias=True)]
        steps += [v2.RandomCrop((size, size), pad_if_needed=True, fill=fill)]
        if augment:
            steps += [v2.RandomHorizontalFlip(), v2.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2)]
        steps += [v2.ToDtype({Image: torch.float32, "others": None}), v2.Normalize(mean, std)]
        self.transform = v2.Compose(steps)

    def __len__(self) -> int:
        return len(self.split.images)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any] | UsageError:
        """Returns image (3, S, S), labels (N,), boxes (N, 4) as x0, y0, x1, y1 or masks (N, S, S), path and skipped.

        An error is returned, not raised: raised in a worker it would be a traceback. "skipped" says what is wrong with
        the images that this one stands in for.
        """
        epoch, index = key
        skipped: list[str] = []
        while True:
            try:
                inputs = self._read(index)
                break
            except UsageError as error:
                skipped.append(str(error))
                if not self.skip_broken or len(skipped) == len(self):
                    return error
                index = (index + 1) % len(self)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix(self.seed, epoch if self.augment else 0, index))
            sample = self.transform(inputs)
        if self.masks:
            visible = sample["masks"].bool().flatten(1).any(1)
        else:
            x0, y0, x1, y1 = sample["boxes"].unbind(1)
            visible = (x1 - x0 >= 1) & (y1 - y0 >= 1)
        kept = {key: sample[key].as_subclass(Tensor)[visible] for key in ("labels", "masks" if self.masks else "boxes")}
        image, path = sample["image"].as_subclass(Tensor), str(self.split.path(index))
        return {"image": image, "path": path, "skipped": skipped, **kept}

    def _read(self, index: int) -> dict[str, Any]:
        from torchvision import tv_tensors

        image = read_image(self.split.path(index))
        objects, labels = self.split.objects(index), self.split.labels
        sample: dict[str, Any] = {
            "image": tv_tensors.Image(image),
            "labels": torch.tensor([labels[a["category_id"]] for a in objects], dtype=torch.int64),
        }
        if self.masks:
            height, width = image.height, image.width
            masks = [torch.from_numpy(decode(a["segmentation"], height, width)) for a in objects]
            sample["masks"] = tv_tensors.Mask(torch.stack(masks) if masks else torch.zeros(0, height, width).byte())
        else:
            boxes = torch.tensor([a["bbox"] for a in objects], dtype=torch.float32).view(-1, 4)
            boxes[:, 2:] += boxes[:, :2]
            sample["boxes"] = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(image.height, image.width))
        return sample


class Batches(Sampler):
    """The (epoch, index) keys of one process's batches, from batch `start` of the whole training to its end.

    In every epoch all images come once in a new order; the last global batch is filled up from the epoch's beginning.
    One process with a batch of `world * size` sees the images that `world` processes see together.

    Args:
        images: number of images.
        size: images per batch of one process.
        per_epoch: batches per epoch of one process.
        start, stop: first batch, and the one after the last.
        rank, world: which process of how many.
        seed: of the order.
    """

    def __init__(
        self, images: int, size: int, per_epoch: int, start: int, stop: int, rank: int, world: int, seed: int
    ) -> None:
        self.images, self.size, self.per_epoch, self.seed = images, size, per_epoch, seed
        self.start, self.stop, self.rank, self.world = start, stop, rank, world

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        shuffled, order = -1, np.empty(0, dtype=int)
        for batch in range(self.start, self.stop):
            epoch, k = divmod(batch, self.per_epoch)
            if epoch != shuffled:
                order = np.random.default_rng([self.seed, epoch]).permutation(self.images)
                shuffled = epoch
            first = (k * self.world + self.rank) * self.size
            yield [(epoch, int(order[i % self.images])) for i in range(first, first + self.size)]


def mix(*numbers: int) -> int:
    """A seed for torch out of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
