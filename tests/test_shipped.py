"""The model that the package holds: what its card says is true."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

for module in ("transformers", "torchvision", "pycocotools"):
    pytest.importorskip(module)

import deformops_models as dm  # noqa: E402
from deformops_models import hub  # noqa: E402
from deformops_models.cli import main  # noqa: E402
from deformops_models.demo import SHAPES  # noqa: E402
from deformops_models.train import shapes  # noqa: E402

FOLDER = hub.SHIPPED["shapes-tiny"]
pytestmark = pytest.mark.skipif(not (FOLDER / "config.json").is_file(), reason="shapes-tiny has no weights yet")


@pytest.fixture(scope="module")
def card():
    return (FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_card_names_data_command_and_result(card):
    assert re.search(r"^deformops-models finetune --model shapes-tiny ", card, re.MULTILINE)
    assert re.search(r"^\| train images \| \d+ \(deformops-models shapes, .*--seed \d+\) \|$", card, re.MULTILINE)
    assert f"| classes | {', '.join(shapes.SHAPES)} |" in card
    assert (FOLDER / "model.safetensors").stat().st_size <= 6_000_000


def test_eval_gives_the_cards_average_precision(card, tmp_path, capsys):
    count, size, seed = map(int, re.search(r"\| val images \| (\d+) \(.*--size (\d+) --seed (\d+)\) \|", card).groups())
    published = float(re.search(r"\| mask AP on val \| ([\d.]+) % \|", card)[1])
    shapes.write(tmp_path, "val", count, size, seed)
    capsys.readouterr()
    options = ("--data", str(tmp_path), "--device", "cpu", "--workers", "0", "--compare", "--json")
    assert main(["eval", "--model", "shapes-tiny", *options]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["images"] == count
    assert found["patched"]["AP"] >= 80
    # The card's number comes from a GPU in bfloat16.
    assert found["patched"]["AP"] == pytest.approx(published, abs=0.5)
    assert found["unpatched"]["AP"] == pytest.approx(found["patched"]["AP"], abs=0.1)


def test_predict_finds_the_shapes_of_the_picture(tmp_path):
    assert main(["predict", str(SHAPES), "--out", str(tmp_path), "--device", "cpu"]) == 0
    document = json.loads((tmp_path / "shapes.predictions.json").read_text())
    labels = Counter(prediction["label"] for prediction in document["predictions"])
    assert labels == {"triangle": 1, "ring": 1, "square": 1, "cross": 1, "circle": 1}


def test_from_pretrained_knows_the_name():
    model = dm.Mask2Former.from_pretrained("shapes-tiny")
    assert list(model.config.id2label.values()) == list(shapes.SHAPES)
    assert any(entry.part == "attention" for entry in dm.report(model).swapped)
    pixels = dm.Mask2Former.processor("shapes-tiny")(images=torch.zeros(3, 192, 256).byte(), return_tensors="pt")
    assert tuple(pixels["pixel_values"].shape) == (1, 3, 192, 256)
    assert Path(hub.local_name("shapes-tiny")) == FOLDER
