"""COCO-format folders: the generator, reading, checking, augmentation, order, and average precision."""

import contextlib
import copy
import io
import json
import shutil
import struct
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch

for module in ("transformers", "torchvision", "pycocotools"):
    pytest.importorskip(module)

from deformops_models.cli import main  # noqa: E402
from deformops_models.console import UsageError  # noqa: E402
from deformops_models.train import coco, evaluate, shapes, tasks  # noqa: E402

SIZE = 64


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    assert main(["shapes", "--out", str(folder), "--images", "12", "--size", str(SIZE), "--seed", "4"]) == 0
    return folder


@pytest.fixture
def broken(data, tmp_path):
    """A copy of the data set, and a function that rewrites its train annotations."""
    folder = shutil.copytree(data, tmp_path / "broken")
    PIL.Image.new("F", (SIZE, SIZE)).save(folder / "images" / "train" / "deep.tif")
    file = folder / "annotations" / "train.json"

    def rewrite(change):
        document = json.loads(file.read_text())
        change(document)
        file.write_text(json.dumps(document))
        return str(folder)

    rewrite.folder = folder
    return rewrite


def images(split, **options):
    levels = {"mean": [127.5] * 3, "std": [63.75] * 3}
    return coco.TrainingImages(split, **{"masks": True, "size": SIZE, "augment": True, "seed": 1, **levels, **options})


# The generator


def test_shapes_depend_on_the_seed_only(data, tmp_path):
    for folder, count, seed in (("same", 12, 4), ("fewer", 5, 4), ("other", 12, 5)):
        argv = ["shapes", "--out", str(tmp_path / folder), "--images", str(count), "--size", str(SIZE)]
        assert main([*argv, "--seed", str(seed)]) == 0

    def read(folder, name):
        return (folder / name).read_bytes()

    picture, annotations = "images/train/000003.jpg", "annotations/train.json"
    assert read(data, annotations) == read(tmp_path / "same", annotations)
    for folder in ("same", "fewer"):
        assert read(data, picture) == read(tmp_path / folder, picture)
    assert read(data, picture) != read(tmp_path / "other", picture)
    assert read(data, picture) != read(data, "images/val/000001.jpg")


def test_shapes_of_several_processes_are_the_same(data, tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "_CHUNK", 4)
    argv = ["shapes", "--out", str(tmp_path / "new"), "--size", str(SIZE), "--seed", "4"]
    assert main([*argv, "--images", "12", "--val", "1", "--workers", "2"]) == 0
    for name in ("annotations/train.json", "images/train/000011.jpg"):
        assert (tmp_path / "new" / name).read_bytes() == (data / name).read_bytes()
    validation = json.loads((tmp_path / "new" / "annotations" / "val.json").read_text())
    assert len(validation["images"]) == 1
    assert validation["info"] == {"description": "deformops-models shapes, 1 images for val, --size 64 --seed 4"}


def test_sizes_are_not_stretched_by_the_image_processor():
    sizes = {shapes.scene(np.random.default_rng(k), 128)[0].shape[:2] for k in range(20)}
    assert sizes == {(96, 96), (96, 128), (128, 96), (128, 128)}


def test_shapes_overlap_and_their_masks_do_not():
    overlaps, kinds, empty = 0, set(), 0
    for k in range(100):
        pixels, objects = shapes.scene(np.random.default_rng(k), SIZE)
        height, width = pixels.shape[:2]
        masks = [coco.decode(o["segmentation"], height, width).astype(bool) for o in objects]
        kinds |= {type(o["segmentation"]) for o in objects}
        empty += not objects
        assert sum(masks, np.zeros((height, width), int)).max() <= 1
        for mask, o in zip(masks, objects, strict=True):
            assert mask.sum() == o["area"] >= 6
            (y0, x0), (y1, x1) = np.argwhere(mask).min(0), np.argwhere(mask).max(0) + 1
            assert o["bbox"] == [x0, y0, x1 - x0, y1 - y0]
            assert pixels[mask].std(0).max() < 12  # one colour with its grain
        overlaps += any(isinstance(o["segmentation"], dict) and o["category_id"] != 6 for o in objects)
    assert kinds == {list, dict} and overlaps > 10 and 0 < empty < 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "0"], "--images 0: the least is 1"),
        (["--size", "8"], "--size 8: the least is 32"),
        (["--seed", "-1"], "--seed -1: the least is 0"),
        (["--val", "0"], "--val 0: the least is 1"),
        (["--workers", "0"], "--workers 0: the least is 1"),
    ],
)
def test_shapes_refuses(arguments, message, tmp_path, capsys):
    assert main(["shapes", "--out", str(tmp_path / "new"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_shapes_does_not_overwrite(data, capsys):
    assert main(["shapes", "--out", str(data)]) == 2
    assert "holds a data set already" in capsys.readouterr().err


def test_shapes_begins_again_where_it_was_killed_before_the_annotations(tmp_path, monkeypatch):
    (tmp_path / "out" / "annotations").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["shapes", "--out", "~/out", "--images", "2", "--size", str(SIZE)]) == 0
    assert len(coco.read_split("~/out", "train", masks=True).images) == 2


# Reading and checking


def test_cocos_own_layout_is_the_same_data_set(data, tmp_path):
    for split in ("train", "val"):
        (tmp_path / "annotations").mkdir(exist_ok=True)
        shutil.copy(data / f"annotations/{split}.json", tmp_path / f"annotations/instances_{split}2017.json")
        shutil.copytree(data / f"images/{split}", tmp_path / f"{split}2017")
        ours, theirs = (coco.read_split(str(root), split, masks=True) for root in (data, tmp_path))
        assert theirs.images == ours.images and theirs.annotations == ours.annotations
        assert theirs.path(1) == tmp_path / f"{split}2017" / "000001.jpg"


def test_labels_follow_the_order_of_category_ids(broken):
    def change(document):
        document["categories"] = [{"id": 10 * c["id"], "name": c["name"]} for c in reversed(document["categories"])]
        for annotation in document["annotations"]:
            annotation["category_id"] *= 10

    split = coco.read_split(broken(change), "train", masks=True)
    assert list(split.id2label.values()) == list(shapes.SHAPES)
    assert split.labels == {10 * (label + 1): label for label in range(6)}


def test_crowds_are_no_targets_and_images_without_objects_stay(broken):
    def change(document):
        for annotation in document["annotations"]:
            annotation["iscrowd"] = int(annotation["image_id"] <= 2)

    split = coco.read_split(broken(change), "train", masks=True)
    assert len(split.images) == 12 and split.objects(0) == split.objects(1) == []
    for masks, shape in ((True, (0, SIZE, SIZE)), (False, (0, 4))):
        sample = images(split, masks=masks)[0, 1]
        assert sample["masks" if masks else "boxes"].shape == shape
        assert sample["labels"].shape == (0,) and sample["image"].shape == (3, SIZE, SIZE)


def _first(**values):
    return lambda document: document["annotations"][0].update(values)


def _image(**values):
    return lambda document: document["images"][1].update(values)


def _rle(counts):
    """Run lengths of the first annotation in place of its own; None in them is the number of pixels."""

    def change(document):
        annotation = document["annotations"][0]
        size = next([i["height"], i["width"]] for i in document["images"] if i["id"] == annotation["image_id"])
        own = counts if isinstance(counts, str) else [size[0] * size[1] if c is None else c for c in counts]
        annotation["segmentation"] = {"size": size, "counts": own}

    return change


RLE = {"size": [9, 9], "counts": [81]}
BROKEN = {
    "box is outside the image: [50, 0, 40, 10] in": _first(bbox=[50, 0, 40, 10]),
    "box is not four finite numbers: [1, 2, 3]": _first(bbox=[1, 2, 3]),
    "box is not four finite numbers: [nan,": _first(bbox=[float("nan"), 1, 2, 3]),
    "unknown category: 77": _first(category_id=77),
    "unknown image_id": _first(image_id=999),
    "area is zero: box [1, 1, 0, 5]": _first(bbox=[1, 1, 0, 5]),
    "area is zero: box": _first(area=0),
    "segmentation is missing": _first(segmentation=[]),
    "polygon is not a list of three or more": _first(segmentation=[[1, 2, 3, 4]]),
    "polygon is far outside the image: x from 0 to 1000000000": _first(segmentation=[[0, 0, 10**9, 0, 5, 5]]),
    "run lengths are not of the image's size": _first(segmentation=RLE),
    "run lengths are not of the image's": _first(segmentation={"size": None, "counts": "1"}),
    "run lengths are missing or damaged": _rle(["a", 1]),
    "run lengths are missing": _rle("zzzzz~~"),
    "run lengths do not add up": _rle("ooo0"),
    "area is zero: empty run lengths": _rle([None]),
    "area is zero: polygons without a pixel": _first(segmentation=[[1, 1, 1, 1, 1, 1], [-9, 0, -1, 0, -1, 9]]),
    "area is not a finite number: 12": _first(area="12"),
    "area is not a finite number: nan": _first(area=float("nan")),
    "area is not a finite number: 1000": _first(area=10**400),
    "run lengths are missing or": _rle([0.5, 10, None]),
    "iscrowd is neither 0 nor 1: no": _first(iscrowd="no"),
    "iscrowd is neither 0 nor 1: None": _first(iscrowd=None),
    "area is not a finite number: None": _first(area=None),
    "no such file": _image(file_name="gone.jpg"),
    "not a readable image: embedded null byte": _image(file_name="a\0b.jpg"),
    r"\ud800.jpg): not a readable image": _image(file_name="\ud800.jpg"),
    "file_name is missing": _image(file_name=None),
    "/5): file_name is missing": _image(file_name=5),
    "size differs: the file has": _image(width=63, height=62),
    "height or width is no positive integer": _image(height=None),
    "levels of 32 bits have no known range": _image(file_name="deep.tif"),
    "height or width is no positive": _image(height=58.0),
    "id is missing or used twice": _image(id=1),
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_is_broken_is_named_or_skipped(message, broken):
    root = broken(BROKEN[message])
    with pytest.raises(UsageError) as caught:
        coco.read_split(root, "train", masks=True)
    assert message in str(caught.value) and "train.json" in str(caught.value) and "--skip-broken" in str(caught.value)
    about_image = BROKEN[message].__qualname__.startswith("_image")
    assert ("image " if about_image else "annotation 1 ") in str(caught.value)
    split = coco.read_split(root, "train", masks=True, skip_broken=True)
    assert f"1 x {split.problems[0].kind.partition(':')[0]}" in coco.count_problems(split.problems)
    whole = coco.read_split(str(broken.folder), "val", masks=True)
    assert not whole.problems


@pytest.mark.parametrize("size", [(3000, 40), (40, 3000)])
def test_an_image_of_which_nothing_would_be_left_is_named_or_skipped(size, broken):
    from PIL import Image

    Image.new("RGB", size).save(broken.folder / "images" / "train" / "000001.jpg")
    root = broken(lambda document: document["images"][1].update(width=size[0], height=size[1]))
    document = json.loads((broken.folder / "annotations" / "train.json").read_text())
    others = [a for a in document["annotations"] if a["image_id"] != document["images"][1]["id"]]
    broken(lambda document: document.update(annotations=others))
    problem = f"too narrow: nothing is left of {size[0]}x{size[1]} where its longer edge has {SIZE} pixels"
    with pytest.raises(UsageError, match=problem):
        coco.read_split(root, "train", masks=True, least_edge=SIZE)
    split = coco.read_split(root, "train", masks=True, least_edge=SIZE, skip_broken=True)
    assert len(split.images) == 11 and len(split.problems) == 1
    # At the limit every augmentation leaves something.
    edge = 2 * 3000 // 40
    with pytest.raises(UsageError, match="too narrow"):
        coco.read_split(root, "train", masks=True, least_edge=edge // 2 - 1)
    split = coco.read_split(root, "train", masks=True, least_edge=edge // 2)
    assert all(images(split, size=edge)[epoch, 1]["image"].shape == (3, edge, edge) for epoch in range(8))


def test_picture_on_its_side_has_its_upright_size(broken):
    from PIL import Image

    file = broken.folder / "images" / "train" / "000001.jpg"
    with Image.open(file) as image:
        upright = image.size
        exif = Image.Exif()
        exif[0x0112] = 6
        image.transpose(Image.Transpose.ROTATE_90).save(file, exif=exif)
    split = coco.read_split(str(broken.folder), "train", masks=True)
    assert (split.images[1]["width"], split.images[1]["height"]) == upright
    assert images(split)[0, 1]["image"].shape == (3, SIZE, SIZE) and split.turned == 1
    PIL.Image.new("RGB", (30, 20)).save(file, exif=exif)
    root = broken(lambda document: document["images"][1].update(width=30, height=20))
    message = "the file has 20x30, the annotations 30x20, which is its size before EXIF orientation 6 turns it"
    with pytest.raises(UsageError, match=message):
        coco.read_split(root, "train", masks=True)


@pytest.mark.parametrize("kind", [2, 3, 7])
@pytest.mark.parametrize("value", [b"6\0\0\0", b"\0\x09\0\0"])
def test_an_orientation_that_is_none_turns_nothing(kind, value, broken):
    """A text, other bytes, or the number 9."""
    file = broken.folder / "images" / "train" / "000001.jpg"
    entry = struct.pack(">HHI", 0x0112, kind, 1 if kind == 3 else 2) + value
    with PIL.Image.open(file) as image:
        image.save(file, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01" + entry + bytes(4))
    with PIL.Image.open(file) as image:
        assert 0x0112 in image.getexif()
    split = coco.read_split(str(broken.folder), "train", masks=True)
    assert split.turned == 0 and images(split)[0, 1]["image"].shape == (3, SIZE, SIZE)


def test_unreadable_json_and_missing_folders(broken, tmp_path):
    file = broken.folder / "annotations" / "train.json"
    rows = '{"images": %s, "annotations": %s, "categories": []}'
    for content, message in (
        ("{", "not COCO's format"),
        ("[" * 10**5, "not COCO's format: RecursionError"),
        ('{"images": []}', "not COCO's format: KeyError"),
        (rows % ("null", "[]"), "images is None, not a list"),
        (rows % ('["a"]', "[]"), "images holds a, not an object"),
        (rows % ('[{"id": [1]}]', "[]"), r"images holds an id of \[1\], not a number or a text"),
        (rows % ("[]", "{}"), "annotations is {}, not a list"),
        (rows % ("[]", '[{"image_id": [1]}]'), "annotations holds an image_id of"),
    ):
        file.write_text(content)
        with pytest.raises(UsageError, match=message):
            coco.read_split(str(broken.folder), "train", masks=True)
    rows = '{"images": [], "annotations": [], "categories": [%s]}'
    for categories, message in (
        ("", "it names no category"),
        (r'{"id": 1, "name": "\ud800"}', "not COCO's format: UnicodeEncodeError"),
        ('{"id": 1, "name": "a"}, {"id": 1, "name": "b"}', "2 categories have the id 1; give each its own"),
        ('{"id": 1, "name": "a"}, {"id": 2, "name": "a"}', "2 categories have the name a; give each its own"),
    ):
        file.write_text(rows % categories)
        with pytest.raises(UsageError, match=message):
            coco.read_split(str(broken.folder), "train", masks=True)
    with pytest.raises(UsageError, match="no such folder"):
        coco.read_split(str(tmp_path / "nowhere"), "train", masks=True)
    file.unlink()
    with pytest.raises(UsageError, match=r"no train split in it; needed is annotations/train.json with images/train/"):
        coco.read_split(str(broken.folder), "train", masks=True)


def test_the_three_ways_to_write_a_mask():
    from pycocotools import mask as coco_mask

    pixels = np.zeros((6, 9), np.uint8, order="F")
    pixels[1:4, 2:7] = 1
    compressed = coco_mask.encode(pixels)
    compressed["counts"] = compressed["counts"].decode()
    counts = [13, *[3, 3] * 4, 3, 54 - 13 - 27]
    polygon = [[2, 1, 7, 1, 7, 4, 2, 4]]
    for segmentation in (compressed, {"size": [6, 9], "counts": counts}, polygon):
        assert (coco.decode(segmentation, 6, 9) == pixels).all()


def test_compressed_run_lengths_are_read_as_pycocotools_writes_them():
    from pycocotools import mask as coco_mask

    rng = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 1.0):
        pixels = np.asfortranarray(rng.random((40, 70)) < share, dtype=np.uint8)
        ends = np.flatnonzero(np.diff(pixels.flatten("F"), prepend=0, append=2))
        text = coco_mask.encode(pixels)["counts"].decode()
        assert coco._run_lengths(text) == np.diff(ends, prepend=0).tolist()
        assert coco._run_lengths(text + "P") is None


# Augmentation and order


def test_augmentation_moves_image_and_targets_alike(data):
    split = coco.read_split(str(data), "train", masks=True)
    with_masks, with_boxes = images(split), images(split, masks=False)
    seen = 0
    for key in ((epoch, index) for epoch in range(3) for index in range(12)):
        masks, boxes = with_masks[key], with_boxes[key]
        assert torch.equal(masks["image"], boxes["image"])
        if len(masks["labels"]) != len(boxes["labels"]):
            continue  # what is left of a cropped object may have a box and no pixel
        for mask, box in zip(masks["masks"].bool(), boxes["boxes"], strict=True):
            # Resizing mixes colours at the edge.
            inner = -torch.nn.functional.max_pool2d(-mask[None].float(), 3, 1, 1)[0] > 0
            assert inner.sum() < 30 or masks["image"][:, inner].std(1).median() < 0.5
            ys, xs = mask.nonzero().unbind(1)
            tight = torch.stack([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]).float()
            uncut = bool((tight > 0).all() and (tight < SIZE).all())
            if uncut:
                assert (tight - box).abs().max() <= 2.5
                seen += 1
    assert seen > 20


def test_augmentation_depends_on_seed_epoch_and_image(data):
    split = coco.read_split(str(data), "train", masks=True)
    torch.manual_seed(1)
    first = images(split)[2, 3]["image"]
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(images(split)[2, 3]["image"], first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(images(split)[3, 3]["image"], first)
    assert not torch.equal(images(split, seed=9)[2, 3]["image"], first)


def test_without_augmentation_the_whole_image_is_fitted_in(data):
    split = coco.read_split(str(data), "train", masks=True)
    sample = images(split, augment=False)[0, 1]
    assert torch.equal(sample["image"], images(split, augment=False)[5, 1]["image"])
    assert len(sample["labels"]) == len(split.objects(1))


@pytest.mark.parametrize(
    "settings",
    [{}, {"do_normalize": False}, {"do_normalize": False, "image_mean": None}, {"do_rescale": False},
     {"rescale_factor": 1 / 127.5}, {"do_rescale": False, "do_normalize": False}],
    ids=str,
)  # fmt: skip
def test_inputs_are_those_of_the_image_processor(settings, broken):
    import transformers

    file = broken.folder / "images" / "train" / "000001.png"
    levels = np.random.default_rng(0).integers(256, size=(SIZE, SIZE, 3), dtype=np.uint8)
    PIL.Image.fromarray(levels).save(file)

    def change(document):
        document["images"][1].update(file_name=file.name, width=SIZE, height=SIZE)
        document["annotations"] = []

    split = coco.read_split(broken(change), "train", masks=True)
    processor = transformers.Mask2FormerImageProcessor(size={"height": SIZE, "width": SIZE}, **settings)
    mean, std = tasks.normalization(processor)
    sample = images(split, augment=False, mean=mean, std=std)[0, 1]["image"]
    [expected] = processor(PIL.Image.open(file), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(sample, expected.float())


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"image_mean": None}, "image_mean is None; give three numbers, or do_normalize false"),
     ({"image_std": 0.5}, "image_std is 0.5; give three"), ({"rescale_factor": None}, "rescale_factor is None")],
)  # fmt: skip
def test_a_processor_that_lacks_a_setting_is_named(settings, message):
    names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
    known = dict(zip(names, (True, 1 / 255, True, [0.5] * 3, [0.5] * 3), strict=True))
    with pytest.raises(UsageError, match=message):
        tasks.normalization(SimpleNamespace(**known | settings))


def _keys(world, start=0, stop=8, size=2, seed=3):
    per_rank = [list(coco.Batches(13, size, 4, start, stop, rank, world, seed)) for rank in range(world)]
    return [sum(together, []) for together in zip(*per_rank, strict=True)]


def test_order_is_the_same_for_any_number_of_processes_and_after_an_interruption():
    whole = _keys(1, size=4)
    assert _keys(2, size=2) == _keys(4, size=1) == whole
    assert _keys(2, start=3) == whole[3:]
    for epoch in range(2):
        keys = sum(whole[4 * epoch : 4 * epoch + 4], [])
        assert {e for e, _ in keys} == {epoch}
        assert sorted(i for _, i in keys[:13]) == list(range(13)) and keys[13:] == keys[:3]
    assert [i for _, i in whole[0]] != [i for _, i in whole[4]]
    assert _keys(1, seed=4) != _keys(1)


def test_a_global_batch_may_be_larger_than_the_data_set():
    [keys] = [list(coco.Batches(3, 8, 1, 0, 1, 0, 1, 0))[0]]
    assert len(keys) == 8 and {i for _, i in keys} == {0, 1, 2}


# Average precision


def _perfect(split, metric):
    rows = []
    for index, image in enumerate(split.images):
        for a in split.objects(index):
            row = {"image_id": image["id"], "category_id": a["category_id"], "score": 0.5 + len(rows) / 1000}
            if metric == "bbox":
                rows.append({**row, "bbox": a["bbox"]})
            else:
                pixels = coco.decode(a["segmentation"], image["height"], image["width"])
                from pycocotools import mask as coco_mask

                rows.append({**row, "segmentation": coco_mask.encode(np.asfortranarray(pixels))})
    return rows


def test_equal_scores_are_taken_in_the_order_of_ids(data):
    split = coco.read_split(str(data), "train", masks=True)
    found = _perfect(split, "bbox")
    for k, row in enumerate(found):
        row["score"] = 0.5
        row["bbox"] = [0, 0, 1, 1] if k % 3 == 0 else row["bbox"]
    expected = evaluate.average_precision(split, found, "bbox", range(len(split.images)))
    split.images.reverse()
    assert evaluate.average_precision(split, found, "bbox", range(len(split.images))) == expected
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth = COCO()
    truth.dataset = json.loads(split.file.read_text())
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
        evaluator = COCOeval(truth, truth.loadRes(found), "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    assert expected["AP"] == pytest.approx(100 * evaluator.stats[0], rel=1e-12)
    assert 5 < expected["AP"] < 95


@pytest.mark.parametrize("metric", ["bbox", "segm"])
def test_perfect_detections_have_an_average_precision_of_100(metric, data):
    split = coco.read_split(str(data), "train", masks=True)
    everything = range(len(split.images))
    found = _perfect(split, metric)
    assert evaluate.average_precision(split, found, metric, everything)["AP"] == pytest.approx(100)
    half = evaluate.average_precision(split, found[: len(found) // 2], metric, everything)
    assert 10 < half["AP"] < 90
    first = [row for row in found if row["image_id"] == split.images[0]["id"]]
    assert evaluate.average_precision(split, first, metric, [0])["AP"] == pytest.approx(100)
    nothing = evaluate.average_precision(split, [], metric, everything)
    assert nothing["AP"] == 0
    # Kinds of objects that the split lacks are unknown, whether something was found or not.
    full = evaluate.average_precision(split, found, metric, everything)
    assert {name for name in full if full[name] is None} == {name for name in nothing if nothing[name] is None} > set()
    renamed = copy.deepcopy(split)
    for image, name in zip(renamed.images, ("a", *range(100, 200)), strict=False):
        renamed.annotations[name] = renamed.annotations.pop(image["id"], [])
        image["id"] = name
    assert evaluate.average_precision(renamed, _perfect(renamed, metric), metric, everything) == full
    bare = copy.deepcopy(split)
    for annotations in bare.annotations.values():
        for annotation in annotations:
            del annotation["area"], annotation["iscrowd"]
    assert evaluate.average_precision(bare, found, metric, everything)["AP"] == pytest.approx(100)
    bare.annotations.clear()
    assert evaluate.average_precision(bare, found, metric, everything)["AP"] is None


def test_category_ids_of_labels(capsys):
    def split(*categories):
        return SimpleNamespace(categories=[{"id": i, "name": n} for i, n in categories], file="val.json")

    def ids(names, *categories):
        return evaluate._category_ids("m", dict(enumerate(names)), split(*categories))

    assert ids(["cat", "Dog", "N/A"], (3, "dog"), (5, "cat")) == [5, 3, None]
    assert ids(["Cat", "cat"], (1, "cat"), (2, "Cat")) == [2, 1]
    assert ids(["dog", "cat", "CAR"], (1, "car"), (2, "cat"), (3, "dog")) == [3, 2, 1]
    numbers = range(11)  # in the order of a file, 10 comes before 2
    by_text = {i: f"class {i}" for i in sorted(numbers, key=str)}
    assert evaluate._category_ids("m", by_text, split(*((i, f"class {i}") for i in numbers))) == list(numbers)
    assert capsys.readouterr() == ("", "")
    assert ids(["LABEL_0", "LABEL_1"], (3, "dog"), (5, "cat")) == [3, 5]
    assert capsys.readouterr() == (
        "", "--model m: it shares no class name with val.json; its classes are taken by position, LABEL_0 as dog and "
        "so on\n"
    )  # fmt: skip
    assert ids([f"LABEL_{i}" for i in range(91)], (1, "person"), (90, "toothbrush"))[88:] == [None, None, 90]
    assert "its classes are taken as COCO's ids, LABEL_1 as person and so on" in capsys.readouterr().err
    with pytest.raises(UsageError, match="knows 3 classes, but not birds of val.json, which has not its bird; give "):
        ids(["cat", "bird", "dog"], (1, "dog"), (2, "birds"), (3, "cat"))
    with pytest.raises(UsageError, match="not c, d, e and 1 more of val.json, which has not its x0, x1, x10 and 86"):
        ids(["a", "b", *(f"x{i}" for i in range(89))], *enumerate("abcdef"))
    with pytest.raises(UsageError, match="knows 3 classes, but not cat, dog of val.json"):
        ids(["a", "b", "c"], (3, "dog"), (5, "cat"))
    with pytest.raises(UsageError, match="knows 3 classes, but not Cat of val.json"):
        ids(["cat", "dog", "x"], (1, "cat"), (2, "Cat"))


def test_masks_out_of_mask2formers_outputs():
    size = (20, 40)
    logits = torch.full((1, 3, 5, 10), -8.0)
    logits[0, 1, 1:3, 2:6] = 8.0
    classes = torch.full((1, 3, 3), -20.0)
    classes[0, :, 2] = 5.0
    classes[0, 1] = torch.tensor([-20.0, 9.0, 0.0])
    outputs = SimpleNamespace(class_queries_logits=classes, masks_queries_logits=logits)
    found = tasks._mask2former_detect(outputs, size)
    assert len(found.masks) == 6 and found.labels[0] == 1
    assert 0.9 < found.scores[0] <= 1 and (found.scores[1:] < 1e-3).all()
    truth = torch.zeros(size, dtype=torch.bool)
    truth[4:12, 8:24] = True
    mask = torch.from_numpy(coco.decode(found.masks[0], *size)).bool()
    assert (mask & truth).sum() > 0.9 * (mask | truth).sum()  # bilinear corners are round


@pytest.mark.parametrize("at_once", [1, 7, 100])
def test_every_querys_mask_is_made_once_and_few_at_a_time(at_once, monkeypatch):
    """Bit by bit what comes of all (query, class) pairs together."""
    # For very small images torch chooses the way to enlarge by how many there are.
    size, interpolate, made = (64, 96), torch.nn.functional.interpolate, []
    torch.manual_seed(0)
    outputs = SimpleNamespace(
        class_queries_logits=3 * torch.randn(1, 30, 9), masks_queries_logits=torch.randn(1, 30, 12, 18)
    )
    scores = outputs.class_queries_logits[0].softmax(-1)[:, :-1]
    best = scores.flatten().topk(100)
    logits = interpolate(outputs.masks_queries_logits[:, best.indices // 8], size, mode="bilinear")[0]
    masks = logits > 0
    expected = best.values * ((logits.sigmoid() * masks).sum((1, 2)) / masks.sum((1, 2)).clamp(min=1))

    def counted(logits, *args, **options):
        made.append(logits.shape[1])
        return interpolate(logits, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "interpolate", counted)
    monkeypatch.setattr(tasks, "MASK_PIXELS", at_once * size[0] * size[1])
    found = tasks._mask2former_detect(outputs, size)
    assert max(made) <= at_once and sum(made) == len((best.indices // 8).unique()) <= 30
    assert torch.equal(found.scores, expected) and torch.equal(found.labels, best.indices % 8)
    assert found.masks == [coco.encode(mask) for mask in masks]


def test_boxes_out_of_deformable_detrs_outputs():
    logits = torch.full((1, 2, 4), -9.0)
    logits[0, 1, 3] = 2.0
    boxes = torch.tensor([[[0.5, 0.5, 1, 1], [0.25, 0.5, 0.5, 0.2]]])
    found = tasks._detr_detect(SimpleNamespace(logits=logits, pred_boxes=boxes), (100, 200))
    assert found.labels[0] == 3 and float(found.scores[0]) == pytest.approx(1 / (1 + np.exp(-2)))
    torch.testing.assert_close(found.boxes[0], torch.tensor([0.0, 40.0, 100.0, 60.0]))
