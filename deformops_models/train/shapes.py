"""`deformops-models shapes`: a synthetic COCO-format data set of overlapping coloured shapes with exact masks."""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from deformops_models.console import UsageError, output_folder, require, whole_file

#: Corners of each class on a circle of radius 1, as (angles per turn, radii); a ring is a circle with a hole.
SHAPES = {
    "circle": (24, (1.0,)),
    "square": (4, (1.0,)),
    "triangle": (3, (1.0,)),
    "star": (10, (1.0, 0.45)),
    "cross": (12, (1.0, 1.0, 0.4)),
    "ring": (24, (1.0,)),
}
_HOLE = 0.55  # of the ring's radius
_EMPTY = 0.05  # share of the images that hold no object
_VISIBLE = 0.4  # smallest part of an object that the later ones may leave
_SPLITS = ("train", "val")
_CHUNK = 200  # images that are worth another process

Objects = list[dict[str, Any]]


def run(args: argparse.Namespace) -> int:
    """Writes `args.images` training images and `args.val` for validation; see `write` for the layout."""
    require("finetune", "pycocotools", "PIL", "tqdm")
    least = {"images": 1, "val": 1, "size": 32, "seed": 0, "workers": 1}
    for name, bound in least.items():
        if (value := getattr(args, name)) is not None and value < bound:
            raise UsageError(f"--{name} {value}: the least is {bound}")
    folder = output_folder(args.out)
    if any((folder / "annotations" / f"{split}.json").exists() for split in _SPLITS):
        raise UsageError(f"--out {args.out}: it holds a data set already; choose another folder")
    counts = dict(zip(_SPLITS, (args.images, args.val or max(1, args.images // 5)), strict=True))
    for split, count in counts.items():
        objects = write(folder, split, count, args.size, args.seed, args.workers)
        print(f"{folder / 'annotations' / split}.json: {count} images, {objects} objects of {len(SHAPES)} classes")
    return 0


def write(folder: Path, split: str, count: int, size: int, seed: int, workers: int | None = 1) -> int:
    """Writes `images/<split>/*.jpg` and then `annotations/<split>.json` below `folder`.

    The k-th image depends on the seed, the size, the split and k only.

    Args:
        folder, split: where.
        count: number of images.
        size: as in `scene`.
        seed: of everything random.
        workers: the most processes that draw; None is one for each core.

    Returns:
        The number of objects.
    """
    from tqdm import tqdm

    pictures = folder / "images" / split
    for path in (pictures, folder / "annotations"):
        path.mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: Objects = []
    draw = functools.partial(_write_scene, pictures, size, (seed, _SPLITS.index(split)))
    with _mapper(min(workers or os.cpu_count() or 1, count // _CHUNK)) as mapper:
        for k, (name, height, width, objects) in enumerate(
            tqdm(mapper(draw, range(count)), total=count, desc=split, unit="image", disable=None)
        ):
            images.append({"id": k + 1, "file_name": name, "height": height, "width": width})
            for found in objects:
                annotations.append({"id": len(annotations) + 1, "image_id": k + 1, "iscrowd": 0, **found})
    document = {
        "info": {"description": f"deformops-models shapes, {count} images for {split}, --size {size} --seed {seed}"},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": i + 1, "name": name} for i, name in enumerate(SHAPES)],
    }
    with whole_file(folder / "annotations" / f"{split}.json") as temporary:
        temporary.write_text(json.dumps(document), encoding="utf-8")
    return len(annotations)


@contextmanager
def _mapper(processes: int) -> Iterator[Any]:
    """Yields `map`, or one that works in several processes."""
    if processes < 2:
        yield map
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        yield functools.partial(pool.map, chunksize=50)


def _write_scene(pictures: Path, size: int, seeds: tuple[int, int], k: int) -> tuple[str, int, int, Objects]:
    """Draws the k-th image; returns its file's name, height, width and objects."""
    from PIL import Image

    pixels, objects = scene(np.random.default_rng([*seeds, k]), size)
    name = f"{k:06d}.jpg"
    Image.fromarray(pixels).save(pictures / name, quality=92)
    return name, *pixels.shape[:2], objects


def scene(rng: np.random.Generator, size: int) -> tuple[np.ndarray, Objects]:
    """Draws one image.

    Args:
        rng: source of everything random.
        size: the longest edge in pixels; the other has about three quarters of it or more. Both are multiples of 32
            if it is a multiple of 128.

    Returns:
        Pixels (H, W, 3) of uint8, and the objects in COCO's format. A whole object without a hole has a polygon, the
        others have run lengths; both give exactly the pixels that were coloured.
    """
    from pycocotools import mask as coco_mask

    # Mask2Former's image processor stretches an edge to the next multiple of 32, which would bend the shapes.
    step = 32 if size % 128 == 0 else 1
    height, width = (int(edge) * step for edge in rng.integers(size * 3 // 4 // step, size // step + 1, 2))
    pixels = _ground(rng, height, width)
    drawn: list[tuple[int, list[float], np.ndarray, int]] = []  # category, polygon, visible pixels, whole area
    count = 0 if rng.random() < _EMPTY else int(rng.integers(2, 7))
    for _ in range(count):
        category = int(rng.integers(len(SHAPES)))
        polygon, whole = _object(rng, category, height, width)
        covered = [visible & ~whole for _, _, visible, _ in drawn]
        enough = all(left.sum() >= _VISIBLE * area for left, (*_, area) in zip(covered, drawn, strict=True))
        if not enough or whole.sum() < 16:
            continue
        drawn = [(c, p, left, area) for left, (c, p, _, area) in zip(covered, drawn, strict=True)]
        drawn.append((category, polygon, whole, int(whole.sum())))
        _paint(rng, pixels, whole)
    objects = []
    for category, polygon, visible, area in drawn:
        rle = coco_mask.encode(np.asfortranarray(visible, dtype=np.uint8))
        as_polygon = visible.sum() == area and list(SHAPES)[category] != "ring"
        objects.append(
            {
                "category_id": category + 1,
                "bbox": coco_mask.toBbox(rle).tolist(),
                "area": int(visible.sum()),
                "segmentation": [polygon] if as_polygon else {**rle, "counts": rle["counts"].decode()},
            }
        )
    return pixels, objects


def _object(rng: np.random.Generator, category: int, height: int, width: int) -> tuple[list[float], np.ndarray]:
    """A polygon [x, y, x, y, ...] with its centre inside the image, and its pixels (H, W) of bool."""
    radius = min(height, width) * rng.uniform(0.11, 0.26)
    centre = rng.uniform((0.5 * radius, 0.5 * radius), (width - 0.5 * radius, height - 0.5 * radius))
    turn = rng.uniform(0, 2 * math.pi)
    name = list(SHAPES)[category]
    polygon = _corners(name, centre, radius, turn, (height, width))
    pixels = _fill(polygon, height, width)
    if name == "ring":
        pixels &= ~_fill(_corners(name, centre, radius * _HOLE, turn, (height, width)), height, width)
    return polygon, pixels


def _corners(name: str, centre: np.ndarray, radius: float, turn: float, size: tuple[int, int]) -> list[float]:
    count, radii = SHAPES[name]
    angles = turn + 2 * math.pi / count * np.arange(count)
    lengths = radius * np.resize(radii, count)
    points = centre + lengths[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return points.clip(0, (size[1], size[0])).round(2).flatten().tolist()


def _fill(polygon: list[float], height: int, width: int) -> np.ndarray:
    """The evaluator's own rasteriser, so that a polygon means the same pixels here and there."""
    from pycocotools import mask as coco_mask

    return coco_mask.decode(coco_mask.frPyObjects([polygon], height, width))[..., 0].astype(bool)


def _ground(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Soft blotches with grain."""
    from PIL import Image

    coarse = Image.fromarray(rng.integers(40, 200, (5, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    return (smooth + rng.normal(0, 10, (height, width, 1))).clip(0, 255).astype(np.uint8)


def _paint(rng: np.random.Generator, pixels: np.ndarray, where: np.ndarray) -> None:
    """Fills with the colour, of a few, that differs most from what it covers, and with grain."""
    colors = rng.integers(0, 256, (4, 3))
    color = colors[np.linalg.norm(colors - pixels[where].mean(0), axis=1).argmax()]
    grain = rng.normal(0, 6, (int(where.sum()), 1))
    pixels[where] = (color + grain).clip(0, 255).astype(np.uint8)
