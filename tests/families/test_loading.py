"""`from_pretrained` finds the class of every family, and an alias or a folder of another kind is one line."""

import pytest
import torch
from models import DETECTORS, attentions, import_mmcv_ops

import deformops_models as dm
from deformops_models import hub

TRANSFORMERS = [d for d in DETECTORS.values() if d.framework == "transformers"]


@pytest.mark.parametrize("detector", TRANSFORMERS, ids=lambda d: d.name)
def test_a_folder_of_transformers(detector, tmp_path):
    pytest.importorskip("transformers")
    model = detector.build()
    model.save_pretrained(tmp_path)
    loaded = dm.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and not loaded.training
    state = model.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    swapped = [entry.name for entry in dm.report(loaded).swapped if entry.part == "attention"]
    assert swapped == list(attentions(model, detector))


@pytest.mark.parametrize("name", ["mmdet-ddq-4scale", "mmdet-mask2former"])
def test_a_folder_of_mmdet(name, tmp_path):
    import_mmcv_ops()
    detector = DETECTORS[name]
    model = detector.build()
    model.cfg.dump(tmp_path / "config.py")
    torch.save({"state_dict": model.state_dict()}, tmp_path / "weights.pth")
    for found in (
        dm.from_pretrained(tmp_path),
        dm.from_pretrained(str(tmp_path / "config.py"), tmp_path / "weights.pth"),
    ):
        assert type(found) is type(model)
        assert all(torch.equal(tensor, found.state_dict()[key]) for key, tensor in model.state_dict().items())
        swapped = [entry for entry in dm.report(found).swapped if entry.part == "attention"]
        assert len(swapped) == detector.attentions


def test_a_segmenting_rf_detr_is_one(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = DETECTORS["hf-rf-detr"].build().config
    model = transformers.RfDetrForInstanceSegmentation(config)
    model.save_pretrained(tmp_path)
    assert type(dm.from_pretrained(tmp_path)) is type(model)


def test_models_that_are_not_known(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(hub.CheckpointError, match="says model_type 'bert'; known are mask2former, oneformer"):
        dm.from_pretrained(tmp_path)
    with pytest.raises(hub.CheckpointError, match="is a rt_detr checkpoint .*use deformops_models.from_pretr"):
        dm.Mask2Former.from_pretrained("rtdetr-r50vd")
    with pytest.raises(hub.CheckpointError, match="unknown checkpoint 'rtdter-r50vd'; nearest: .*rtdetr-r50vd"):
        dm.from_pretrained("rtdter-r50vd")


def test_an_alias_is_looked_up_in_the_cache(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(hub.CheckpointError, match=r"cannot load dfine-nano-coco \(ustc-community/dfine-nano-coco\)"):
        dm.from_pretrained("dfine-nano-coco", cache_dir=tmp_path, local_files_only=True)
