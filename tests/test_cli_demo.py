"""`demo` through the entry point."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

Image = pytest.importorskip("PIL.Image")
for framework in ("transformers", "timm"):
    pytest.importorskip(framework)

from deformops_models import demo, hub  # noqa: E402
from deformops_models.cli import main  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
#: Pictures of the model that the package holds.
SHAPES = ["shapes.png"] * (hub.local_name("shapes-tiny") != "shapes-tiny")


def test_demo_runs_all_detectors(tmp_path):
    pytest.importorskip("mmdet")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "deformops_models.cli", "demo"]
    result = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert "3 of 3 detectors that ran agree" in result.stdout
    assert [int(n) for n in re.findall(r"attentions swapped +(\d+)", result.stdout)] == [2, 4, 4]
    pictures = ["deformable_detr.png", "dino.png", "mask2former.png"]
    assert {p.name for p in (tmp_path / "deformops-demo").iterdir()} == {*pictures, *SHAPES}
    if not torch.cuda.is_available():
        assert result.stdout.count("upstream's own forward") == 3 + len(SHAPES)
        assert result.stdout.count("outputs 0.0e+00, gradients 0.0e+00 of the largest value: agrees") == 3
    photo = Image.open(demo.PHOTO)
    assert all(
        Image.open(tmp_path / "deformops-demo" / p).size == (2 * photo.width, 2 * photo.height) for p in pictures
    )


def tiny_deformable_detr():
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = DeformableDetrConfig(
        backbone_config=backbone, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=9,
    )  # fmt: skip
    return DeformableDetrForObjectDetection(config)


@pytest.fixture
def one_detector(monkeypatch):
    """Only Deformable DETR, on a smaller picture."""
    detector = replace(demo.DETECTORS[1], build=tiny_deformable_detr)
    monkeypatch.setattr(demo, "DETECTORS", (detector,))
    monkeypatch.setattr(demo, "_SHIPPED", "none")
    monkeypatch.setattr(demo, "_SIZE", (96, 64))
    return detector


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A Mask2Former in the place of the model that the package holds."""
    from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessor

    from deformops_models.train.shapes import SHAPES
    from deformops_models.train.tasks import CONFIGS

    torch.manual_seed(0)
    names = dict(enumerate(SHAPES))
    model = Mask2FormerForUniversalSegmentation(CONFIGS["shapes-tiny"](id2label=names))
    model.class_predictor.bias.data[:] = torch.tensor([9.0, 0, 0, 0, 0, 0, 0])  # every query is a circle
    folder = tmp_path / "shapes_tiny"
    model.save_pretrained(folder)
    Mask2FormerImageProcessor(size={"shortest_edge": 64, "longest_edge": 64}).save_pretrained(folder)
    monkeypatch.setitem(hub.SHIPPED, "shapes-tiny", folder)
    return folder


def test_demo_detects_shapes_with_the_model_that_the_package_holds(
    one_detector, shipped, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(demo, "_SHIPPED", "shapes-tiny")
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"detected +\d+ circle$", out, re.MULTILINE)
    photo = Image.open(demo.SHAPES)
    picture = Image.open(tmp_path / "out" / "shapes.png")
    assert picture.size == (4 * photo.width, 4 * photo.height)
    # The drawing covers a part of the picture.
    assert picture.tobytes() != photo.convert("RGB").resize(picture.size).tobytes()


def test_demo_says_so_when_a_detector_disagrees(one_detector, tmp_path, monkeypatch, capsys):
    swap, restore = demo.patch, demo.unpatch

    def damage(model, factor):
        next(m for n, m in model.named_modules() if n.endswith("output_proj")).weight.data *= factor

    def bad_patch(model):
        damage(model, 2)
        return swap(model)

    # unpatch takes the damage back, so that the float64 run is of the model as it was.
    monkeypatch.setattr(demo, "patch", bad_patch)
    monkeypatch.setattr(demo, "unpatch", lambda model: (damage(model, 0.5), restore(model)))
    assert main(["demo", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "DISAGREES" in out
    assert "0 of 1 detectors that ran agree" in out


def test_demo_budget_is_of_float64(one_detector):
    torch.manual_seed(0)
    model = one_detector.build().eval()
    demo._stir(model)
    pixels = demo._pixels(demo._photo())
    reference = demo._measure(one_detector, model, pixels)

    def moved(factor):
        outputs = {name: t * factor for name, t in reference.outputs.items()}
        return demo.Run(outputs, reference.gradients, 0)

    assert demo._within_budget(one_detector, model, pixels, reference, moved(1 + 2**-24))
    assert not demo._within_budget(one_detector, model, pixels, reference, moved(1 + 1e-4))
    assert torch.get_default_dtype() == torch.float32


def test_demo_leaves_out_what_is_not_installed(one_detector, tmp_path, monkeypatch, capsys):
    absent = demo.Detector("Absent", "absent", "mmdet", ("no_such_framework",), None, None)
    monkeypatch.setattr(demo, "DETECTORS", (one_detector, absent))
    assert main(["demo", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "no_such_framework is not installed: pip install 'deformops-models[mmdet]'" in out
    assert "1 of 1 detectors that ran agree" in out
    assert os.listdir(tmp_path) == ["deformable_detr.png"]


def test_demo_with_a_broken_framework_only(one_detector, tmp_path, monkeypatch, capsys):
    def build():
        import no_such_framework  # noqa: F401

    monkeypatch.setattr(demo, "DETECTORS", (replace(one_detector, build=build),))
    assert main(["demo", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "cannot be imported: No module named 'no_such_framework'" in out
    assert "0 of 0 detectors that ran agree" in out


def test_demo_needs_a_folder(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main(["demo", "--out", str(tmp_path / "taken")]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"deformops-models: --out {tmp_path / 'taken'}: this is a file, a folder is needed\n")


def test_demo_samples_are_the_modules_own(one_detector):
    """Sampling at what `_samples` returns, by the same weights, gives the module's own output."""
    import deformops_models as dm

    torch.manual_seed(0)
    model = one_detector.build().eval()
    demo._stir(model)
    pixels = demo._pixels(demo._photo())
    name = next(n for n, m in model.named_modules() if n.endswith("encoder.layers.0.self_attn"))
    module = model.get_submodule(name)
    seen = {}
    hooks = [
        module.value_proj.register_forward_hook(lambda _, args, output: seen.update(value=output)),
        module.output_proj.register_forward_pre_hook(lambda _, args: seen.update(output=args[0])),
        module.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True),
    ]
    centres, locations, weights = demo._samples(model, name, lambda: one_detector.forward(model, pixels))
    for hook in hooks:
        hook.remove()
    sizes = seen["spatial_shapes"].tolist()
    value = seen["value"].unflatten(-1, (module.n_heads, -1))
    ours = dm.msda(value, sizes, None, locations[None], weights[None])[0]
    height, width = sizes[0]
    rows = [int(y * height) * width + int(x * width) for x, y in demo._SPOTS]
    torch.testing.assert_close(ours, seen["output"][0, rows], rtol=1e-4, atol=1e-5)
    for (x, y), centre in zip(demo._SPOTS, centres.tolist(), strict=True):
        assert centre == pytest.approx((x, y), abs=0.5 / min(height, width) + 0.05)


def test_photo_may_be_shipped():
    licence = (demo.PHOTO.parent / "LICENSE.txt").read_text()
    assert "CC0 1.0" in licence
    assert "scikit-image" in licence
    assert demo.PHOTO.stat().st_size < 150_000
