"""`predict` through the entry point, on tiny models of each framework that the tests save."""

import json
import os
import shutil

import pytest
import torch

pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers")

from PIL import Image  # noqa: E402
from training import deformable_detr_config  # noqa: E402

from deformops_models import predict  # noqa: E402
from deformops_models.cli import main  # noqa: E402
from deformops_models.demo import PHOTO  # noqa: E402

SIZE = {"shortest_edge": 64, "longest_edge": 96}
NAMES = {0: "cup", 1: "spoon", 2: "table"}


@pytest.fixture
def run(capsys):
    """Runs `predict` and returns exit code, stdout, stderr."""

    def run(*argv):
        code = main(["predict", *map(str, argv)])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("photo") / "coffee.png"
    Image.open(PHOTO).resize((150, 100)).save(path)
    return path


def save(model, processor, folder):
    torch.manual_seed(3)
    for parameter in model.parameters():  # far from the near-uniform scores of fresh weights
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 / parameter[0].numel() ** 0.5)
    if hasattr(model, "class_predictor"):
        model.class_predictor.bias.data[-1] = -9.0  # every query finds something
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mask2former(tmp_path_factory):
    backbone = transformers.SwinConfig(
        image_size=32, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        encoder_layers=1, num_attention_heads=2, dim_feedforward=16, decoder_layers=2, num_queries=4, id2label=NAMES,
    )  # fmt: skip
    model = transformers.Mask2FormerForUniversalSegmentation(config)
    processor = transformers.Mask2FormerImageProcessor(size=SIZE)
    return save(model, processor, tmp_path_factory.mktemp("mask2former"))


@pytest.fixture(scope="module")
def deformable_detr(tmp_path_factory):
    config = deformable_detr_config(encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=9, id2label=NAMES)
    model = transformers.DeformableDetrForObjectDetection(config)
    processor = transformers.DeformableDetrImageProcessor(size=SIZE)
    return save(model, processor, tmp_path_factory.mktemp("deformable-detr"))


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    pytest.importorskip("mmdet")
    from deformops_models.patches import mmcv_lite

    mmcv_lite.install()
    import mmdet.models
    from mmdet.registry import MODELS
    from mmengine.config import Config
    from mmengine.registry import DefaultScope

    folder = tmp_path_factory.mktemp("dino")
    package = os.path.dirname(mmdet.__file__)
    config = Config.fromfile(f"{package}/.mim/configs/dino/dino-4scale_r50_8xb2-12e_coco.py")
    layer = {"num_layers": 1, "layer_cfg": {"ffn_cfg": {"feedforward_channels": 32}}}
    config.merge_from_dict(
        {
            "model": {
                "backbone": {"depth": 18, "init_cfg": None},
                "neck": {"in_channels": [128, 256, 512]},
                "bbox_head": {"num_classes": 3},
                "encoder": layer,
                "decoder": layer,
                "num_queries": 9,
                "test_cfg": {"max_per_img": 20},
            }
        }
    )
    for step in config.test_dataloader.dataset.pipeline:
        if step.type == "Resize":
            step.scale = (96, 64)
    config.dump(folder / "tiny.py")
    torch.manual_seed(3)
    with DefaultScope.overwrite_default_scope("mmdet"):
        model = MODELS.build(config.model)
    torch.nn.init.normal_(model.level_embed)
    meta = {"dataset_meta": {"classes": tuple(NAMES.values())}}
    torch.save({"meta": meta, "state_dict": model.state_dict()}, folder / "tiny.pth")
    return folder


def only(folder):
    """The one JSON document in a folder, whose picture must lie beside it."""
    [record] = folder.glob("*.json")
    document = json.loads(record.read_text())
    assert sorted(os.listdir(folder)) == [record.name, record.with_suffix(".png").name]
    assert document["overlay"] == str(record.with_suffix(".png"))
    return document


def mask_of(prediction):
    """Decodes the run lengths."""
    height, width = prediction["mask"]["size"]
    runs = torch.tensor(prediction["mask"]["counts"])
    values = torch.arange(len(runs)) % 2
    return values.repeat_interleave(runs).view(width, height).T.bool()


def upstream(model_class, processor_class, folder, path):
    """The same checkpoint through plain transformers."""
    model = model_class.from_pretrained(folder).eval()
    processor = processor_class.from_pretrained(folder)
    with torch.no_grad():
        return processor, model(**processor(images=Image.open(path), return_tensors="pt"))


# Values


def test_deformable_detr_gives_what_transformers_gives(run, photo, deformable_detr, tmp_path):
    code, out, err = run(photo, "--model", deformable_detr, "--out", tmp_path, "--threshold", 0.4)
    assert code == 0, err
    document = only(tmp_path)
    assert (document["image"], document["width"], document["height"]) == (str(photo), 150, 100)
    assert (document["task"], document["threshold"]) == ("object", 0.4)
    processor, outputs = upstream(
        transformers.DeformableDetrForObjectDetection, transformers.DeformableDetrImageProcessor, deformable_detr, photo
    )
    [expected] = processor.post_process_object_detection(outputs, threshold=0.4, target_sizes=[(100, 150)])
    found = document["predictions"]
    assert 0 < len(found) < 27
    assert [p["label_id"] for p in found] == expected["labels"].tolist()
    assert [p["label"] for p in found] == [NAMES[p["label_id"]] for p in found]
    torch.testing.assert_close(torch.tensor([p["box"] for p in found]), expected["boxes"])
    torch.testing.assert_close(torch.tensor([p["score"] for p in found]), expected["scores"])
    assert out.startswith(f"{photo}: ")
    assert Image.open(document["overlay"]).size == (900, 600)  # enlarged for its labels


def test_mask2former_instances(run, photo, mask2former, tmp_path):
    code, _, err = run(photo, "--model", mask2former, "--out", tmp_path, "--threshold", 0.1)
    assert code == 0, err
    document = only(tmp_path)
    assert document["task"] == "instance"
    processor, outputs = upstream(
        transformers.Mask2FormerForUniversalSegmentation, transformers.Mask2FormerImageProcessor, mask2former, photo
    )
    [expected] = processor.post_process_instance_segmentation(
        outputs, threshold=0.1, target_sizes=[(100, 150)], return_binary_maps=True
    )
    found = document["predictions"]
    assert len(found) == len(expected["segments_info"]) > 0
    for prediction, segment, mask in zip(found, expected["segments_info"], expected["segmentation"], strict=True):
        assert prediction["label_id"] == segment["label_id"]
        assert prediction["score"] == pytest.approx(segment["score"], abs=1e-5)
        assert torch.equal(mask_of(prediction), mask.bool())
        ys, xs = mask.nonzero().unbind(1)
        assert prediction["box"] == [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
    before, after = Image.open(photo).convert("RGB"), Image.open(document["overlay"])
    pictures = before.resize(after.size), after
    pixels = [torch.frombuffer(bytearray(i.tobytes()), dtype=torch.uint8).view(600, 900, 3) for i in pictures]
    changed = (pixels[0] != pixels[1]).any(-1)
    union = torch.stack([mask_of(p) for p in found]).any(0)
    union = union.repeat_interleave(6, 0).repeat_interleave(6, 1)
    assert changed[union].float().mean() > 0.99


def test_mask2former_panoptic_and_semantic(run, photo, mask2former, tmp_path):
    processor, outputs = upstream(
        transformers.Mask2FormerForUniversalSegmentation, transformers.Mask2FormerImageProcessor, mask2former, photo
    )
    options = ("--model", mask2former, "--threshold", 0.1)
    assert run(photo, *options, "--out", tmp_path / "p", "--task", "panoptic")[0] == 0
    [expected] = processor.post_process_panoptic_segmentation(outputs, threshold=0.1, target_sizes=[(100, 150)])
    found = only(tmp_path / "p")["predictions"]
    assert len(found) == len(expected["segments_info"]) > 0
    for prediction, segment in zip(found, expected["segments_info"], strict=True):
        assert torch.equal(mask_of(prediction), expected["segmentation"] == segment["id"])

    assert run(photo, *options, "--out", tmp_path / "s", "--task", "semantic")[0] == 0
    [classes] = processor.post_process_semantic_segmentation(outputs, target_sizes=[(100, 150)])
    found = only(tmp_path / "s")["predictions"]
    assert [p["label_id"] for p in found] == classes.unique().tolist()
    assert {p["score"] for p in found} == {None}
    assert all(torch.equal(mask_of(p), classes == p["label_id"]) for p in found)


def test_task_follows_the_checkpoint(mask2former, tmp_path):
    loader = predict.load_mask2former
    assert predict._choose_loader("mask2former-swin-tiny-coco-panoptic", None) == (loader, "panoptic")
    assert predict._choose_loader("facebook/mask2former-swin-large-ade-semantic", None) == (loader, "semantic")
    assert predict._choose_loader("mask2former-swin-tiny-coco-panoptic", "instance") == (loader, "instance")
    assert predict._choose_loader("mmdet-dino-4scale_r50_8xb2-12e_coco", None) == (predict._load_mmdet, "object")
    named = tmp_path / "my-panoptic-model"
    named.symlink_to(mask2former)
    assert predict._choose_loader(str(mask2former), None) == (loader, "instance")
    named.unlink()
    named.mkdir()
    (named / "config.json").write_text((mask2former / "config.json").read_text())
    assert predict._choose_loader(str(named), None) == (loader, "panoptic")


def test_task_of_a_folder(mask2former, tmp_path, capsys):
    def task(folder, **config):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "mask2former", **config}))
        return predict._choose_loader(str(folder), None)[1]

    cached = tmp_path / "models--facebook--mask2former-swin-large-ade-semantic" / "snapshots" / "abc"
    assert task(cached) == "semantic"
    assert task(tmp_path / "semantic" / "coco-panoptic") == "panoptic"
    assert task(tmp_path / "panoptic-then-instance") == "instance"
    assert task(tmp_path / "a", _name_or_path="facebook/mask2former-swin-tiny-coco-panoptic") == "panoptic"
    assert predict._choose_loader(str(predict.hub.SHIPPED["shapes-tiny"]), None)[1] == "instance"
    assert capsys.readouterr().err == ""
    assert task(tmp_path / "b") == "instance"
    problem = f"--model {tmp_path / 'b'}: neither its path nor its config names a task"
    expected = f"deformops-models: {problem}, instance is assumed; --task takes another\n"
    assert capsys.readouterr().err == expected
    assert predict._choose_loader(str(tmp_path / "b"), "semantic")[1] == "semantic"
    assert capsys.readouterr().err == ""


def test_dino_gives_what_mmdet_gives(run, photo, dino, tmp_path):
    code, _, err = run(photo, "--model", dino, "--out", tmp_path, "--threshold", 0.3)
    assert code == 0, err
    document = only(tmp_path)
    from mmdet.apis import inference_detector, init_detector

    model = init_detector(str(dino / "tiny.py"), None, device="cpu")
    model.load_state_dict(torch.load(dino / "tiny.pth", weights_only=True)["state_dict"])
    expected = inference_detector(model, str(photo)).pred_instances
    expected = expected[expected.scores > 0.3]
    found = document["predictions"]
    assert len(found) == len(expected) > 0
    assert [p["label"] for p in found] == [NAMES[label] for label in expected.labels.tolist()]
    torch.testing.assert_close(torch.tensor([p["box"] for p in found]), expected.bboxes, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(torch.tensor([p["score"] for p in found]), expected.scores)


def test_masks_of_mmdet_are_refused(run, photo, tmp_path):
    pytest.importorskip("mmdet")
    from models import DETECTORS

    base = predict.hub.mmdet.mmdet_config("configs/mask2former/mask2former_r50_8xb2-lsj-50e_coco.py")
    from mmengine.config import Config

    model, config = DETECTORS["mmdet-mask2former"].build(), Config.fromfile(base)
    config.model = model.cfg.model
    folder = tmp_path / "model"
    folder.mkdir()
    config.dump(folder / "config.py")
    torch.save(model.state_dict(), folder / "weights.pth")
    for name in (folder, "mmdet-mask2former_r50_8xb2-lsj-50e_coco"):
        code, _, err = run(photo, "--model", name, "--out", tmp_path / "out")
        expected = f"deformops-models: --model {name}: predict draws transformers' Mask2Former and "
        assert code == 2 and err.splitlines()[-1].startswith(expected)


@pytest.mark.parametrize("dtype", ["bf16", "float16"])
@pytest.mark.parametrize("model", ["mask2former", "deformable_detr", "dino"])
def test_half_precision(run, photo, model, dtype, request, tmp_path):
    model = request.getfixturevalue(model)
    documents = []
    for name in ("float32", dtype):
        options = ("--model", model, "--threshold", 0, "--dtype", name, "--task", "semantic")
        options = options if "mask2former" in str(model) else options[:-2]
        code, _, err = run(photo, *options, "--out", tmp_path / name)
        assert code == 0, err
        documents.append(only(tmp_path / name)["predictions"])
    exact, half = documents
    if exact[0]["score"] is None:
        regions = [{p["label_id"]: mask_of(p) for p in d} for d in documents]
        common = sum((a & regions[1][label]).sum() for label, a in regions[0].items() if label in regions[1])
        assert common > 0.9 * 100 * 150
    else:
        best = [max(p["score"] for p in d) for d in (exact, half)]
        assert best[1] == pytest.approx(best[0], abs=0.05)
        assert len(half) == len(exact)


def test_json_on_stdout(run, photo, deformable_detr, tmp_path):
    code, out, err = run(photo, "--model", deformable_detr, "--out", tmp_path, "--json")
    assert code == 0, err
    assert json.loads(out) == [only(tmp_path)]


def test_size_option(run, photo, deformable_detr, tmp_path, monkeypatch):
    sizes = []
    processor = predict.hub.DeformableDETR.processor
    record = classmethod(lambda cls, name, size: (sizes.append(size), processor(name, "hub"))[1])
    monkeypatch.setattr(predict.hub.DeformableDETR, "processor", record)
    for extra in ((), ("--size", "eval")):
        assert run(photo, "--model", deformable_detr, "--out", tmp_path, *extra)[0] == 0
    assert sizes == ["hub", "eval"]


# Images


def test_images_are_read_upright_and_in_rgb(tmp_path):
    red = Image.new("RGB", (4, 2), (250, 5, 9))
    red.putpixel((0, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 270 degrees to see it upright
    red.save(tmp_path / "turned.png", exif=exif)
    turned = predict.read_image(tmp_path / "turned.png")
    assert (turned.size, turned.getpixel((1, 0)), turned.getpixel((0, 0))) == ((2, 4), (0, 0, 255), (250, 5, 9))

    cases = {
        "gray.png": (Image.new("L", (3, 2), 77), (77, 77, 77)),
        "gray16.png": (Image.new("I;16", (3, 2), 77 * 256), (77, 77, 77)),
        "gray16-big-endian.tif": (Image.frombytes("I;16B", (3, 2), bytes([77, 0]) * 6), (77, 77, 77)),
        "gray16.pgm": (Image.new("I;16", (3, 2), 77 * 256), (77, 77, 77)),
        "alpha.png": (Image.new("RGBA", (3, 2), (1, 2, 3, 40)), (1, 2, 3)),
        "gray-alpha.png": (Image.new("LA", (3, 2), (9, 40)), (9, 9, 9)),
        "palette.gif": (red.quantize(4), (250, 5, 9)),
        "bit.png": (Image.new("1", (3, 2), 1), (255, 255, 255)),
    }
    for name, (image, color) in cases.items():
        image.save(tmp_path / name)
        read = predict.read_image(tmp_path / name)
        assert (read.mode, read.getpixel((2, 1))) == ("RGB", color), name
    for mode in "IF":
        Image.new(mode, (3, 2), 1).save(tmp_path / "wide.tif")
        with pytest.raises(predict.ImageError, match="wide.tif: cannot read it: levels of 32 bits have no known range"):
            predict.read_image(tmp_path / "wide.tif")


def test_names_do_not_collide(run, photo, deformable_detr, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
    image = Image.open(photo)
    image.save(first / "x.png")
    image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(second / "x.png")
    image.save(second / "X.bmp")
    out = tmp_path / "out"
    arguments = (first / "x.png", second, first / "x.png", "--model", deformable_detr, "--out", out, "--json")
    code, text, err = run(*arguments)
    assert code == 0, err
    documents = json.loads(text)
    assert [d["image"] for d in documents] == [str(first / "x.png"), str(second / "X.bmp"), str(second / "x.png")]
    names = ["X-2.predictions", "x-3.predictions", "x.predictions"]
    assert sorted(os.listdir(out)) == sorted(f"{name}.{kind}" for name in names for kind in ("json", "png"))
    assert all(json.loads((out / f"{name}.json").read_text())["overlay"] == str(out / f"{name}.png") for name in names)


def test_inputs_stay_and_outputs_are_no_inputs(run, photo, deformable_detr, tmp_path):
    Image.open(photo).save(tmp_path / "x.png")
    (tmp_path / "notes.txt").write_text("not an image, but not taken for one either")
    (tmp_path / "._x.png").write_text("what macOS leaves behind")
    before = (tmp_path / "x.png").read_bytes()
    for _ in range(2):
        code, out, err = run(tmp_path, "--model", deformable_detr, "--out", tmp_path)
        assert code == 0, err
        assert len(out.splitlines()) == 1
    assert (tmp_path / "x.png").read_bytes() == before
    names = ["._x.png", "notes.txt", "x.png", "x.predictions.json", "x.predictions.png"]
    assert sorted(os.listdir(tmp_path)) == names


def test_damaged_image_does_not_stop_the_others(run, photo, deformable_detr, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    whole = photo.read_bytes()
    (folder / "a.png").write_bytes(whole[: len(whole) // 2])
    (folder / "b.png").write_bytes(whole)
    code, out, err = run(folder, "--model", deformable_detr, "--out", tmp_path / "out")
    assert code == 2
    assert [line.split(":")[:2] for line in err.splitlines()] == [["deformops-models", f" {folder / 'a.png'}"]]
    assert only(tmp_path / "out")["image"] == str(folder / "b.png")
    assert len(out.splitlines()) == 1


def test_outputs_that_cannot_be_written_stop_no_others(run, photo, deformable_detr, tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    (out / "b.predictions.png").mkdir(parents=True)
    folder.mkdir()
    long = "a" * 240
    for name in (long, "b", "c"):
        shutil.copy(photo, folder / f"{name}.png")
    code, text, err = run(folder, "--model", deformable_detr, "--out", out)
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("deformops")]
    for line, name in zip(lines, (long, "b"), strict=True):
        picture = out / f"{name}.predictions.png"
        assert line.startswith(f"deformops-models: {folder / name}.png: cannot write {picture}: ")
    assert len(text.splitlines()) == 1
    assert sorted(os.listdir(out)) == ["b.predictions.png", "c.predictions.json", "c.predictions.png"]


# Drawing


def test_draw_marks_boxes_masks_and_names():
    image = Image.new("RGB", (200, 100), (10, 10, 10))
    mask = torch.zeros(100, 200, dtype=torch.bool)
    mask[60:80, 120:160] = True
    boxed = predict.Prediction("cup", 0, 0.9, (20, 30, 90, 70))
    drawn = predict.draw(image, [boxed])
    assert drawn.size == (1000, 500)  # five times as large, for the label
    assert drawn.getpixel((450, 350)) == predict._color(0) != (10, 10, 10)
    assert drawn.getpixel((102, 148)) == predict._color(0)  # the label is above the box
    assert drawn.getpixel((250, 275)) == (10, 10, 10)
    region = predict.draw(image, [predict.Prediction("table", 1, None, (120, 60, 160, 80), mask)])
    tinted, outside = region.getpixel((790, 310)), region.getpixel((500, 310))
    assert outside == (10, 10, 10)
    assert all(10 < t < c for t, c in zip(tinted, predict._color(1), strict=True) if c > 30)
    assert image.getpixel((89, 70)) == (10, 10, 10)
    # Boxes beyond the border, upside down or empty are no reason to fail.
    odd = [predict.Prediction("a", 0, 0.1, box) for box in ((-50, -9, 900, 900), (9, 9, 3, 3), (5, 5, 5, 5))]
    assert predict.draw(image, odd).size == (1000, 500)
    large = Image.effect_noise((1030, 20), 90).convert("RGB")
    assert predict.draw(large, []).tobytes() == large.tobytes()


@pytest.mark.parametrize("rows", [["010", "110"], ["111", "111"], ["000", "001"], ["100", "000"]])
def test_run_lengths_are_cocos(rows):
    mask = torch.tensor([[c == "1" for c in row] for row in rows])
    counts = predict._run_lengths(mask)
    assert sum(counts) == 6
    assert torch.equal(mask_of({"mask": {"size": [2, 3], "counts": counts}}), mask)
    if rows == ["010", "110"]:
        assert counts == [1, 3, 2]  # down the columns: 0, 1 1 1, 0 0


def test_names_lie_inside_their_region():
    ring = torch.zeros(40, 40, dtype=torch.bool)
    ring[5:35, 5:35] = True
    ring[8:32, 8:32] = False
    split = torch.zeros(40, 40, dtype=torch.bool)
    split[0, 0] = split[39, 39] = True
    for mask in (ring, split):
        x, y = predict._inner_point(mask)
        assert mask[int(y), int(x)]


# Bad input: one line, exit code 2


def bad_inputs(tmp_path, photo, model):
    text, empty, taken = tmp_path / "text.png", tmp_path / "empty", tmp_path / "taken"
    text.write_text("no image")
    empty.mkdir()
    taken.write_text("a file")
    other, bare, broken, listed = (tmp_path / name for name in ("other", "bare", "broken", "listed"))
    for folder in (other, bare, broken, listed):
        folder.mkdir()
    (listed / "config.json").write_text('{"model_type": ["deformable_detr"]}')
    (other / "config.json").write_text('{"model_type": "bert"}')
    (broken / "config.json").write_text("{")
    out = ["--out", str(tmp_path / "out")]
    good = [str(photo), "--model", str(model), *out]
    return {
        "no such file": [str(tmp_path / "none.jpg"), "--model", str(model), *out],
        "not an image": [str(text), "--model", str(model), *out],
        "no images in this folder": [str(empty), "--model", str(model), *out],
        "nearest: mask2former-swin-tiny-coco-instance": [
            str(photo), "--model", "mask2former-swin-tiny-coco-instanc", *out,
        ],
        "no such folder": [str(photo), "--model", "./nowhere", *out],
        "'bert' is not supported": [str(photo), "--model", str(other), *out],
        "['deformable_detr'] is not supported": [str(photo), "--model", str(listed), *out],
        "an IMAGE is empty": ["", "--model", str(model), *out],
        "--out is empty": [str(photo), "--model", str(model), "--out", ""],
        "--model is empty": [str(photo), "--model", "", *out],
        "neither a config.json": [str(photo), "--model", str(bare), *out],
        "cannot read its config.json": [str(photo), "--model", str(broken), *out],
        "unknown dtype 'int3'": [*good, "--dtype", "int3"],
        "unknown device 'gpu'": [*good, "--device", "gpu"],
        "device 'meta' cannot be used": [*good, "--device", "meta"],
        "device 'hpu' cannot be used": [*good, "--device", "hpu"],
        "7 is not between 0 and 1": [*good, "--threshold", "7"],
        "x is not between 0 and 1": [*good, "--threshold", "x"],
        "this is a file, a folder is needed": [str(photo), "--model", str(model), "--out", str(taken)],
        "cannot write there": [str(photo), "--model", str(model), "--out", str(taken / "below")],
        "--task is for Mask2Former": [*good, "--task", "panoptic"],
        "the following arguments are required: --out": [str(photo), "--model", str(model)],
    }  # fmt: skip


def test_bad_input_is_one_line(run, photo, deformable_detr, tmp_path):
    for expected, argv in bad_inputs(tmp_path, photo, deformable_detr).items():
        code, out, err = run(*argv)
        assert (code, out) == (2, ""), (expected, err)
        assert err.startswith("deformops-models: "), err
        assert expected in err
        assert err.count("\n") == 1, err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_no_gpu_is_one_line(run, photo, deformable_detr, tmp_path, device):
    code, out, err = run(photo, "--model", deformable_detr, "--out", tmp_path, "--device", device)
    assert (code, out) == (2, "")
    assert err == (
        f"deformops-models: device {device!r}: no CUDA GPU can be used here; leave --device out or use --device cpu\n"
    )


def test_unreadable_input(run, photo, deformable_detr, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root can read everything")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    code, _, err = run(closed, "--model", deformable_detr, "--out", tmp_path / "out")
    assert code == 2
    assert "Permission denied" in err


def test_incomplete_model_folder_is_one_line(run, photo, deformable_detr, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((deformable_detr / "config.json").read_text())
    code, out, err = run(photo, "--model", folder, "--out", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(folder) in err


def test_outputs_that_are_not_finite_stop_no_other_image(run, photo, deformable_detr, tmp_path, capsys):
    model = transformers.DeformableDetrForObjectDetection.from_pretrained(deformable_detr)
    with torch.no_grad():
        model.class_embed[-1].bias.fill_(float("nan"))
    broken = tmp_path / "broken"
    model.save_pretrained(broken)
    transformers.DeformableDetrImageProcessor(size=SIZE).save_pretrained(broken)
    capsys.readouterr()
    again = shutil.copy(photo, tmp_path / "again.png")
    code, out, err = run(photo, again, "--model", broken, "--out", tmp_path / "out", "--json")
    assert code == 2 and json.loads(out) == []
    problem = "the model gives numbers that are not finite in float32 on cpu"
    expected = [f"deformops-models: {image}: {problem}" for image in (photo, again)]
    assert [line for line in err.splitlines() if line.startswith("deformops")] == expected


@pytest.mark.parametrize("change", [{"d_model": "abc"}, {"num_queries": 33}], ids=str)
def test_damaged_config_is_one_line(run, photo, deformable_detr, tmp_path, change):
    folder = tmp_path / "model"
    shutil.copytree(deformable_detr, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    code, _, err = run(photo, "--model", folder, "--out", tmp_path / "out")
    assert code == 2
    assert len(err.splitlines()) == 1 and err.startswith("deformops-models: cannot load ")


def test_an_image_that_the_processor_refuses_stops_no_other(run, photo, deformable_detr, tmp_path):
    thin = tmp_path / "thin.png"
    Image.new("RGB", (3000, 1)).save(thin)
    code, out, err = run(thin, photo, "--model", deformable_detr, "--out", tmp_path / "out", "--size", "eval")
    assert code == 2
    assert err.splitlines()[-1].startswith(f"deformops-models: {thin}: the model's image processor fails: ")
    assert out.startswith(f"{photo}: ") and len(out.splitlines()) == 1


def test_a_broken_image_in_a_folder_stops_no_other(run, photo, deformable_detr, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"")
    Image.open(photo).save(folder / "b.png")
    code, out, err = run(folder, "--model", deformable_detr, "--out", tmp_path / "out")
    assert code == 2 and err.splitlines()[-1] == f"deformops-models: {folder / 'a.png'}: not an image"
    assert out.startswith(f"{folder / 'b.png'}: ") and len(out.splitlines()) == 1


def test_a_training_folder_is_not_the_model_in_it(run, photo, tmp_path):
    (tmp_path / "run" / "best").mkdir(parents=True)
    code, _, err = run(photo, "--model", tmp_path / "run", "--out", tmp_path / "out")
    assert code == 2 and f"did you mean {tmp_path / 'run' / 'best'}?" in err
