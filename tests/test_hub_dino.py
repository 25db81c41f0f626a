"""The mmdet loader, on detectors shrunk from the published configs and checkpoints written as mmengine writes them."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deformops_models import hub

pytest.importorskip("mmengine")
np = pytest.importorskip("numpy")
pytest.importorskip("mmdet")

DINO_ROW = hub.find_checkpoint("mmdet-dino-4scale_r50_8xb2-12e_coco")
DEFORMABLE_ROW = hub.find_checkpoint("mmdet-deformable-detr-refine-twostage_r50_16xb2-50e_coco")
CLASSES = ("cat", "dog", "owl")


def tiny_config(row):
    """Returns the published config with the smallest backbone, few layers and an input of at most 64x96."""
    from mmengine.config import Config

    hub.mmdet._prepare_mmdet()
    config = Config.fromfile(hub.mmdet.mmdet_config(row.config))
    # The width stays: mmdet's DINO has its decoder's positional encoding written for 256.
    feedforward = {"ffn_cfg": {"feedforward_channels": 32}}
    config.merge_from_dict(
        {
            "model": {
                "backbone": {"depth": 18},
                "num_queries": 12,
                "neck": {"in_channels": [128, 256, 512]},
                "encoder": {"num_layers": 1, "layer_cfg": feedforward},
                "decoder": {"num_layers": 2, "layer_cfg": feedforward},
                "bbox_head": {"num_classes": 3},
                "test_cfg": {"max_per_img": 10},
            }
        }
    )
    for step in config.test_dataloader.dataset.pipeline:
        if step.type == "Resize":
            step.scale = (96, 64)
    return config


def training_state(model):
    """Returns a checkpoint with everything that mmengine's Runner.save_checkpoint puts into one."""
    from mmengine.logging import HistoryBuffer, MessageHub

    messages = MessageHub("train")
    for step in range(3):
        messages.update_scalar("train/loss", np.float64(2.5 - step))
    messages.update_info("epoch", 11)
    # Old mmengine pickled the statistics along with the history, which takes `getattr`.
    old_buffer = HistoryBuffer([1.0, 2.0], [1, 1])
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "meta": {
            "epoch": np.int64(12),
            "iter": 7,
            "cfg": "model = dict()",
            "time": "20221202_182705",
            "mmengine_version": "0.10.7",
            "dataset_meta": {"CLASSES": CLASSES, "PALETTE": [(1, 2, 3)] * 3},
            "best": np.float32(49.0),
            "box": np.arange(4.0),
        },
        "state_dict": model.state_dict(),
        "message_hub": {**messages.state_dict(), "statistics": {"min": HistoryBuffer.min, "buffer": old_buffer}},
        "optimizer": optimizer.state_dict(),
        "param_schedulers": [{"last_step": 3, "by_epoch": True}],
    }


def build(config):
    torch.manual_seed(0)
    model = hub.mmdet._build(config)
    # mmdet begins with zeros in many places; outputs have to depend on every weight.
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def write_pth(content, folder, name="tiny"):
    """Saves `content` under a name that ends in its own sha256 prefix, as mmdet's publish_model does."""
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / "x.pth")
    digest = hashlib.sha256((folder / "x.pth").read_bytes()).hexdigest()
    return (folder / "x.pth").rename(folder / f"{name}-{digest[:8]}.pth")


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    """A folder as a user has it, the unpatched detector, and the two files in the folder."""
    folder = tmp_path_factory.mktemp("dino")
    config = tiny_config(DINO_ROW)
    model = build(config)
    weights = write_pth(training_state(model), folder)
    config.dump(folder / "tiny_dino.py")
    return folder, model, folder / "tiny_dino.py", weights


@pytest.fixture
def table(monkeypatch, tmp_path, dino):
    """A table of one alias, whose file lies at a file:// address, and an empty download folder."""
    _, _, config, weights = dino
    row = replace(
        DINO_ROW, alias="tiny-dino", url=weights.as_uri(), sha256_prefix=weights.stem[-8:], config=str(config)
    )
    monkeypatch.setattr(hub.table, "checkpoints", lambda: (row,))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
    return row


def same_state(model, original):
    state = original.state_dict()
    assert model.state_dict().keys() == state.keys()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=0)


def test_configs_of_the_table_exist_and_agree():
    from mmengine.config import Config

    hub.mmdet._prepare_mmdet()
    rows = [row for row in hub.checkpoints() if row.framework == "mmdet"]
    assert len(rows) == 21
    for row in rows:
        config = Config.fromfile(hub.mmdet.mmdet_config(row.config))
        assert config.model.type in hub.DINO.model_types
        head = config.model.get("panoptic_head", config.model)
        assert head.num_queries == row.num_queries
        attention = head.get("pixel_decoder", head).encoder.layer_cfg.self_attn_cfg
        assert attention.get("num_levels", 4) == row.num_feature_levels
        assert attention.get("num_points", 4) == row.num_points
        resize = next(s for s in config.test_dataloader.dataset.pipeline if s.type == "Resize")
        assert resize.scale == (row.eval_size["longest_edge"], row.eval_size["shortest_edge"])


def test_folder_with_training_state(dino):
    folder, original, _, _ = dino
    model = hub.DINO.from_pretrained(folder)
    from mmdet.models import DINO

    assert isinstance(model, DINO)
    assert not model.training
    same_state(model, original)
    assert model.dataset_meta["classes"] == CLASSES
    assert model.dataset_meta["palette"] == [(1, 2, 3)] * 3
    assert model.cfg.model.type == "DINO"


def test_config_options_and_classes_without_meta(dino, tmp_path):
    _, original, config, _ = dino
    torch.save(original.state_dict(), tmp_path / "w.pth")
    options = {"model.test_cfg.max_per_img": 7, "test_dataloader.dataset.metainfo": {"classes": CLASSES}}
    model = hub.DINO.from_pretrained(config, tmp_path / "w.pth", cfg_options=options)
    assert model.test_cfg.max_per_img == 7
    assert model.dataset_meta["classes"] == CLASSES
    model.cfg.dump(tmp_path / "again.py")
    same_state(hub.DINO.from_pretrained(tmp_path / "again.py", tmp_path / "w.pth"), original)


NAMELESS = {
    "COCO's 80 names": ({}, {}),
    "no test_dataloader": ({}, {"test_dataloader": None}),
    "a data set that is not known": ({}, {"test_dataloader.dataset.type": "OwlDataset"}),
    "no meta": ({"meta": None}, {}),
    "no dataset_meta": ({"meta": {"dataset_meta": None, "CLASSES": None}}, {}),
    "one name": ({"meta": {"CLASSES": "cat"}}, {}),
}


@pytest.mark.parametrize("case", NAMELESS)
def test_classes_without_names_are_numbered(dino, tmp_path, case):
    content, options = NAMELESS[case]
    torch.save({"state_dict": dino[1].state_dict(), **content}, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match=r"w\.pth has 3 classes, but .* names (0|1|80): they are called class_0"):
        model = hub.DINO.from_pretrained(dino[2], tmp_path / "w.pth", cfg_options=options)
    assert model.dataset_meta["classes"] == ("class_0", "class_1", "class_2")
    assert model.dataset_meta["palette"] == "random"


def test_a_string_is_one_class(dino, tmp_path):
    from mmengine.config import Config

    config = Config.fromfile(dino[2])
    config.model.bbox_head.num_classes = 1
    config.dump(tmp_path / "one.py")
    torch.save({"state_dict": build(config).state_dict(), "meta": {"CLASSES": "cat"}}, tmp_path / "w.pth")
    model = hub.DINO.from_pretrained(tmp_path / "one.py", tmp_path / "w.pth")
    assert model.dataset_meta["classes"] == ("cat",)


def test_classes_of_a_wrapped_data_set(dino, tmp_path):
    from mmengine.config import Config

    config = Config.fromfile(dino[2])
    config.test_dataloader.dataset.metainfo = {"classes": CLASSES}
    config.test_dataloader.dataset = {"type": "ConcatDataset", "datasets": [config.test_dataloader.dataset]}
    config.dump(tmp_path / "wrapped.py")
    torch.save(dino[1].state_dict(), tmp_path / "w.pth")
    model = hub.DINO.from_pretrained(tmp_path / "wrapped.py", tmp_path / "w.pth")
    assert model.dataset_meta["classes"] == CLASSES


def test_panoptic_needs_no_panopticapi(tmp_path):
    from mmengine.config import Config
    from models import DETECTORS

    row = hub.find_checkpoint("mmdet-mask2former_r50_8xb2-lsj-50e_coco-panoptic")
    model = DETECTORS["mmdet-mask2former"].build()
    hub.mmdet._prepare_mmdet()
    config = Config.fromfile(hub.mmdet.mmdet_config(row.config))
    config.model = model.cfg.model
    config.dump(tmp_path / "config.py")
    names = tuple(f"thing {i}" for i in range(model.panoptic_head.num_classes))
    meta = {"dataset_meta": {"classes": names}}
    torch.save({"state_dict": model.state_dict(), "meta": meta}, tmp_path / "w.pth")
    assert hub.DINO.from_pretrained(tmp_path).dataset_meta["classes"] == names
    assert len(hub.mmdet._config_meta(config)["classes"]) == 133
    image = np.zeros((40, 60, 3), dtype=np.uint8)
    for name in (tmp_path, row.alias):
        assert hub.DINO.processor(name)(image)["inputs"][0].shape[0] == 3


def test_is_patched(dino):
    from deformops_models.patching import report

    model = hub.DINO.from_pretrained(dino[0])
    assert len(report(model).swapped) == 3  # one encoder layer, two decoder layers


def test_deformable_detr(tmp_path):
    config = tiny_config(DEFORMABLE_ROW)
    original = build(config)
    weights = write_pth({"state_dict": original.state_dict(), "meta": {"CLASSES": CLASSES}}, tmp_path)
    config.dump(tmp_path / "config.py")
    model = hub.DINO.from_pretrained(tmp_path / "config.py", weights)
    assert type(model).__name__ == "DeformableDETR"
    same_state(model, original)
    assert model.dataset_meta["classes"] == CLASSES


@pytest.mark.parametrize("kind", ["state dict alone", "of a wrapped model", "legacy format", "safetensors"])
def test_other_weight_files(dino, tmp_path, kind):
    _, original, config, _ = dino
    state, weights = original.state_dict(), tmp_path / "weights.pth"
    if kind == "state dict alone":
        torch.save(state, weights)
    elif kind == "of a wrapped model":
        torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, weights)
    elif kind == "legacy format":
        torch.save(training_state(original), weights, _use_new_zipfile_serialization=False)
    else:
        from safetensors.torch import save_file

        weights = tmp_path / "weights.safetensors"
        save_file({key: value.clone() for key, value in state.items()}, weights)
    same_state(hub.DINO.from_pretrained(config, weights), original)


def test_inference_detector_and_processor_agree_with_upstream(dino):
    from mmdet.apis import inference_detector
    from PIL import Image

    folder, original, config, _ = dino
    model = hub.DINO.from_pretrained(folder)
    rgb = np.random.default_rng(0).integers(0, 255, (70, 100, 3), dtype=np.uint8)
    original.cfg = model.cfg
    expected = inference_detector(original, rgb[..., ::-1].copy()).pred_instances
    assert len(expected) > 0
    process = hub.DINO.processor(folder)
    image = Image.fromarray(rgb)
    with torch.no_grad():
        results = [
            inference_detector(model, rgb[..., ::-1].copy()),
            model.test_step(hub.DINO.processor(config)(rgb))[0],
            *model.test_step(process([image, rgb])),
        ]
    for result in results:
        # A batch of two may round another way than a batch of one.
        torch.testing.assert_close(result.pred_instances.bboxes, expected.bboxes, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(result.pred_instances.scores, expected.scores)
        assert result.ori_shape == (70, 100)
        assert result.img_shape == (64, 91)


def test_processor_reads_files(dino, tmp_path):
    from PIL import Image

    rgb = np.random.default_rng(0).integers(0, 255, (70, 100, 3), dtype=np.uint8)
    Image.fromarray(rgb).save(tmp_path / "image.png")
    process = hub.DINO.processor(dino[0])
    assert torch.equal(process(tmp_path / "image.png")["inputs"][0], process(rgb)["inputs"][0])
    with pytest.raises(ValueError, match=r"an image array is \(H, W, 3\) in uint8 and RGB order, got \(70, 100\)"):
        process(rgb[..., 0])


def test_processor_keeps_the_options_of_the_first_step(dino, tmp_path):
    from mmengine.config import Config

    config = Config.fromfile(dino[2])
    config.test_dataloader.dataset.pipeline[0].to_float32 = True
    config.dump(tmp_path / "config.py")
    image = np.zeros((40, 60, 3), dtype=np.uint8)
    assert hub.DINO.processor(tmp_path / "config.py")(image)["inputs"][0].dtype == torch.float32


def test_processor_turns_images_upright(dino, tmp_path):
    from PIL import Image

    rgb = np.random.default_rng(0).integers(0, 255, (70, 100, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(rgb).save(tmp_path / "turned.png", exif=exif)
    process = hub.DINO.processor(dino[0])
    expected = process(tmp_path / "turned.png")["inputs"][0]
    assert torch.equal(process(Image.open(tmp_path / "turned.png"))["inputs"][0], expected)
    assert torch.equal(process(np.rot90(rgb, -1))["inputs"][0], expected)


def test_processor_without_a_pipeline(dino, tmp_path):
    from mmengine.config import Config

    config = Config.fromfile(dino[2])
    config.pop("test_dataloader")
    config.dump(tmp_path / "config.py")
    with pytest.raises(hub.CheckpointError, match=r"config\.py has no test_dataloader, whose pipeline prepares images"):
        hub.DINO.processor(tmp_path / "config.py")


def test_half_precision_under_autocast(dino):
    model = hub.DINO.from_pretrained(dino[0], dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="dtype is 'auto': use a torch.dtype"):
        hub.DINO.from_pretrained(dino[0], dtype="auto")
    batch = hub.DINO.processor(dino[0])(np.zeros((64, 96, 3), dtype=np.uint8))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model.test_step(batch)[0].pred_instances.scores.isfinite().all()


# Downloads


def test_alias_downloads_once(table, dino, tmp_path):
    same_state(hub.DINO.from_pretrained("tiny-dino"), dino[1])
    [file] = (tmp_path / "torch" / "checkpoints").iterdir()
    assert file.name == dino[3].name
    before = file.stat().st_mtime_ns
    same_state(hub.DINO.from_pretrained("tiny-dino"), dino[1])
    assert file.stat().st_mtime_ns == before


def test_alias_with_a_local_file_needs_no_network(table, dino, monkeypatch):
    monkeypatch.setattr(torch.hub, "download_url_to_file", lambda *args, **kwargs: pytest.fail("it downloads"))
    same_state(hub.DINO.from_pretrained("tiny-dino", dino[3]), dino[1])


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/dino-deadbeef.pth", "file:///nothing/dino-deadbeef.pth"])
def test_unreachable_is_one_line(table, monkeypatch, tmp_path, url):
    monkeypatch.setattr(hub.table, "checkpoints", lambda: (replace(table, url=url),))
    with pytest.raises(hub.CheckpointError) as error:
        hub.DINO.from_pretrained("tiny-dino")
    message = str(error.value)
    assert message.startswith(f"cannot download tiny-dino from {url}: ")
    assert f"put it into {tmp_path}/torch/checkpoints, or pass it" in message
    assert "DINO.from_pretrained('tiny-dino', checkpoint)" in message
    assert "\n" not in message


def test_bad_download_is_not_kept(table, monkeypatch, tmp_path, dino):
    monkeypatch.setattr(hub.table, "checkpoints", lambda: (replace(table, sha256_prefix="00000000"),))
    with pytest.raises(hub.CheckpointError, match=f"invalid hash value.*00000000.*{dino[3].stem[-8:]}"):
        hub.DINO.from_pretrained("tiny-dino")
    assert list((tmp_path / "torch" / "checkpoints").iterdir()) == []


# Errors


def test_wrong_hash_names_both(dino, tmp_path):
    _, original, config, weights = dino
    wrong = tmp_path / "dino-00c0ffee.pth"
    wrong.write_bytes(weights.read_bytes())
    with pytest.raises(hub.CheckpointError) as error:
        hub.DINO.from_pretrained(config, wrong)
    assert f"its SHA-256 begins with {weights.stem[-8:]}, its name says 00c0ffee" in str(error.value)


def test_a_date_is_no_hash(dino, tmp_path):
    dated = tmp_path / "mydino-20240131.pth"
    dated.write_bytes(dino[3].read_bytes())
    same_state(hub.DINO.from_pretrained(dino[2], dated), dino[1])


def test_weights_that_do_not_fit(dino, tmp_path):
    _, original, config, _ = dino
    state = original.state_dict()
    state["extra.weight"] = state.pop("level_embed")
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    expected = r"weights 1 missing \(level_embed\) and 1 unexpected \(extra\.weight\)"
    with pytest.raises(hub.CheckpointError, match=expected + "; strict=False loads the others"):
        hub.DINO.from_pretrained(config, tmp_path / "w.pth")
    with pytest.warns(UserWarning, match=expected):
        model = hub.DINO.from_pretrained(config, tmp_path / "w.pth", strict=False)
    assert torch.equal(model.state_dict()["query_embedding.weight"], state["query_embedding.weight"])
    state["query_embedding.weight"] = torch.zeros(5, 256)
    torch.save({"state_dict": state}, tmp_path / "w.pth")
    with pytest.raises(
        hub.CheckpointError, match="does not fit the config: .*size mismatch for query_embedding.weight"
    ):
        hub.DINO.from_pretrained(config, tmp_path / "w.pth")


class Payload:
    def __reduce__(self):
        return print, ("a pickle ran code",)


class Escape:
    """What `getattr` of a real HistoryBuffer would allow: a way to the builtins."""

    def __reduce__(self):
        from mmengine.logging import HistoryBuffer

        return getattr, (HistoryBuffer.mean, "__globals__")


def test_pickle_that_would_run_code_is_refused(dino, tmp_path, capsys):
    torch.save({"state_dict": dino[1].state_dict(), "extra": Payload()}, tmp_path / "w.pth")
    with pytest.raises(hub.CheckpointError, match="it holds print, which is not loaded from a pickle"):
        hub.DINO.from_pretrained(dino[2], tmp_path / "w.pth")
    assert "a pickle ran code" not in capsys.readouterr().out


def test_getattr_in_a_pickle_reaches_nothing(dino, tmp_path):
    before = set(torch.serialization.get_safe_globals())
    torch.save({"state_dict": {"w": torch.ones(1)}, "meta": {"escape": Escape()}}, tmp_path / "w.pth")
    _, meta = hub.mmdet._read_weights(tmp_path / "w.pth")
    assert type(meta["escape"]) is hub.mmdet._Dropped
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_damaged_file(dino, tmp_path, content):
    content = dino[3].read_bytes()[:-1000] if content is None else content
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(hub.CheckpointError, match=f"cannot read {tmp_path}/w.pth: .+"):
        hub.DINO.from_pretrained(dino[2], tmp_path / "w.pth")


def test_no_state_dict(dino, tmp_path):
    torch.save({"epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(hub.CheckpointError, match="w.pth holds no state dict"):
        hub.DINO.from_pretrained(dino[2], tmp_path / "w.pth")


def test_config_of_another_detector(dino):
    config = hub.mmdet.mmdet_config("configs/retinanet/retinanet_r18_fpn_1x_coco.py")
    with pytest.raises(hub.CheckpointError, match="builds 'RetinaNet': DINO loads mmdet's DINO, DeformableDETR, "):
        hub.DINO.from_pretrained(config, dino[3])


def test_folders_and_files_that_are_missing(dino, tmp_path):
    with pytest.raises(hub.CheckpointError, match=r"should hold one \*\.py file, it holds none: name both files"):
        hub.DINO.from_pretrained(tmp_path)
    (tmp_path / "config.py").write_bytes(dino[2].read_bytes())
    with pytest.raises(hub.CheckpointError, match=r"should hold one \*\.safetensors or \*\.pth file, it holds none"):
        hub.DINO.from_pretrained(tmp_path)
    for name in ("epoch_1.pth", "epoch_2.pth"):
        (tmp_path / name).touch()
    with pytest.raises(hub.CheckpointError, match=r"it holds 2 \(epoch_1\.pth, epoch_2\.pth\)"):
        hub.DINO.from_pretrained(tmp_path)
    with pytest.raises(hub.CheckpointError, match="is only a config"):
        hub.DINO.from_pretrained(tmp_path / "config.py")
    with pytest.raises(hub.CheckpointError, match="no such file: /nothing.pth"):
        hub.DINO.from_pretrained(tmp_path / "config.py", "/nothing.pth")
    with pytest.raises(hub.CheckpointError, match="no such file: /nothing.py"):
        hub.DINO.from_pretrained("/nothing.py", Path(dino[3]))


def test_alias_of_another_framework():
    with pytest.raises(hub.CheckpointError, match=r"is a checkpoint of transformers: use Mask2Former\."):
        hub.DINO.from_pretrained("mask2former-swin-tiny-coco-instance")
    with pytest.raises(hub.CheckpointError, match="nearest: mmdet-dino-4scale_r50_8xb2-12e_coco"):
        hub.DINO.from_pretrained("dino-4scale_r50_8xb2-12e_coco")
