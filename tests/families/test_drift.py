"""The upstream classes that the rows name, in the installed versions: there, with a forward that is known."""

import inspect
import re
import types
from pathlib import Path

import pytest
from models import DETECTORS, import_mmcv_ops

from deformops_models import patching

ROWS = [family for family in patching.families() if family.module]


def upstream(family: patching.Family) -> type:
    """The class that a row names, or skips the test and says why."""
    if family.framework == "mmcv":
        import_mmcv_ops()
    module = pytest.importorskip(family.module, reason=f"{family.framework} is not installed, or has no {family.name}")
    return getattr(module, family.class_name)


@pytest.mark.parametrize("family", ROWS, ids=lambda f: f"{f.name}-{f.part}")
def test_the_class_is_there_with_a_known_forward(family):
    upstream(family)
    assert patching.check_family(family) is None


@pytest.mark.parametrize("family", [f for f in ROWS if f.part == "attention"], ids=lambda f: f.name)
def test_signatures_of_patched_forwards_are_upstreams(family):
    cls = upstream(family)
    before = inspect.signature(cls.forward).parameters
    patched = inspect.signature(patching.patched_class(cls, family).forward).parameters
    # What this version of upstream lacks.
    patched = {n: p for n, p in patched.items() if n in before or n not in family.optional}
    assert list(patched) == list(before)
    assert [p.kind for p in patched.values()] == [p.kind for p in before.values()]
    assert [p.default for p in patched.values()] == [p.default for p in before.values()]


def test_every_deformable_attention_of_transformers_has_a_row():
    transformers = pytest.importorskip("transformers")
    folder = Path(transformers.__file__).parent / "models"
    files = {path: path.read_text(encoding="utf-8") for path in folder.glob("*/modeling_*.py")}
    found = {
        (f"transformers.models.{path.parent.name}.{path.stem}", name)
        for path, text in files.items()
        for name in re.findall(r"^class (\w*(?:Multiscale|MultiScale)DeformableAttention)\(", text, re.MULTILINE)
        # The core that some wrappers call, which holds no projections.
        if name != "MultiScaleDeformableAttention"
    }
    rows = {(family.module, family.class_name) for family in ROWS if family.framework == "transformers"}
    assert len(found) >= 14
    assert found <= rows


def test_every_row_of_an_attention_has_a_whole_detector():
    tested = {detector.attention for detector in DETECTORS.values()}
    assert {family.class_name for family in patching.families() if family.part == "attention"} <= tested


def test_a_class_of_another_version_is_reported(monkeypatch):
    pytest.importorskip("transformers")
    from transformers.models.rt_detr import modeling_rt_detr

    class RTDetrMultiscaleDeformableAttention(modeling_rt_detr.RTDetrMultiscaleDeformableAttention):
        def forward(self, hidden_states, something_new=None):
            return hidden_states

    (family,) = (f for f in ROWS if f.name == "rt_detr")
    monkeypatch.setattr(modeling_rt_detr, family.class_name, RTDetrMultiscaleDeformableAttention)
    assert patching.check_family(family).startswith(
        "unknown signature: forward(hidden_states, something_new), known is forward(hidden_states, attention_mask, "
    )
    monkeypatch.delattr(modeling_rt_detr, family.class_name)
    assert patching.check_family(family).startswith("not found: module 'transformers.models.rt_detr")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("requests", "cannot be imported: it needs requests, which is not installed"),
        ("rfdetr", "not found: no luck"),
        ("rfdetr.models", "not found: no luck"),
        (None, "not found: no luck"),  # as transformers raises it anew
    ],
)
def test_a_package_that_upstream_needs_is_named(name, said, monkeypatch):
    def refuse(module):
        raise ModuleNotFoundError("no luck", name=name)

    (family,) = (f for f in patching.families() if f.name == "rfdetr")
    monkeypatch.setattr(patching, "importlib", types.SimpleNamespace(import_module=refuse))
    assert patching.check_family(family) == said
