"""checkpoints.toml and the transformers loaders, on checkpoints that the tests write in the published formats."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

from deformops_models import hub

transformers = pytest.importorskip("transformers")

REPO = "facebook/mask2former-swin-tiny-coco-instance"
ALIAS = "mask2former-swin-tiny-coco-instance"


def tiny_mask2former():
    config = transformers.Mask2FormerConfig(
        backbone_config=transformers.SwinConfig(
            image_size=32,
            embed_dim=8,
            depths=[1, 1, 1, 1],
            num_heads=[1, 1, 2, 2],
            window_size=4,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        num_attention_heads=2,
        dim_feedforward=16,
        decoder_layers=2,
        num_queries=5,
        num_labels=3,
    )
    return transformers.Mask2FormerForUniversalSegmentation(config).eval()


def tiny_deformable_detr():
    config = transformers.DeformableDetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=transformers.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 8, 8, 8],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_features=["stage2", "stage3", "stage4"],
        ),
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=5,
        num_labels=3,
    )
    return transformers.DeformableDetrForObjectDetection(config).eval()


def write_bin(model, folder):
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def write_sharded_bin(model, folder):
    model.config.save_pretrained(folder)
    state = model.state_dict()
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    weight_map = {key: names[i % 2] for i, key in enumerate(state)}
    for name in names:
        torch.save({key: value for key, value in state.items() if weight_map[key] == name}, folder / name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


FORMATS = {
    "safetensors": (lambda model, folder: model.save_pretrained(folder), "model.safetensors"),
    "sharded-safetensors": (
        lambda model, folder: model.save_pretrained(folder, max_shard_size="40KB"),
        "model.safetensors.index.json",
    ),
    "bin": (write_bin, "pytorch_model.bin"),
    "sharded-bin": (write_sharded_bin, "pytorch_model.bin.index.json"),
}
LOADERS = {
    "mask2former": (hub.Mask2Former, tiny_mask2former),
    "deformable_detr": (hub.DeformableDETR, tiny_deformable_detr),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of the tiny Mask2Former in safetensors, and its weights."""
    folder = tmp_path_factory.mktemp("mask2former")
    model = tiny_mask2former()
    model.save_pretrained(folder)
    return folder, model.state_dict()


def put_in_cache(cache, repo, folder):
    """Lays `folder` out in `cache` as the Hub client does after a download."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(revision)
    (root / "snapshots").mkdir()
    (root / "snapshots" / revision).symlink_to(folder, target_is_directory=True)


# checkpoints.toml


def test_table_is_complete_and_consistent():
    rows = hub.checkpoints()
    aliases = [row.alias for row in rows]
    assert len(set(aliases)) == len(rows) == 122
    assert sorted({row.loader for row in rows}) == ["DINO", "DeformableDETR", "Mask2Former", "Transformers"]
    loaded = {row.model_type for row in rows if row.framework == "transformers"}
    # The one whose weights were never published.
    assert loaded == hub.transformers.MODEL_CLASSES.keys() - {"pp_doclayout_v4"}
    assert all(alias == alias.lower() for alias in aliases)
    for row in rows:
        assert hasattr(hub, row.loader)
        assert set(row.formats) <= {"safetensors", "bin", "pth"}
        assert row.num_points in (None, 2, 4, (3, 6, 3), (6, 6))
        assert row.num_queries in (None, 100, 150, 200, 250, 300, 900)
        assert row.num_feature_levels == (3 if row.model_type == "mask2former" else row.num_feature_levels)
        if isinstance(row.num_points, tuple):
            assert len(row.num_points) == row.num_feature_levels
        assert all(0 < value < 100 for value in row.metrics.values())
        assert bool(row.metrics) == bool(row.metrics_of) == bool(row.published)
        assert row.metrics or not row.eval_size
        assert row.revision is None or re.fullmatch(r"[0-9a-f]{40}", row.revision)
        for size in filter(None, (row.eval_size, row.hub_size)):
            assert set(size) in ({"shortest_edge", "longest_edge"}, {"height", "width"})
        if row.framework == "transformers":
            assert re.fullmatch(r"[\w-]+/[\w.-]+", row.repo_id)
            assert not (row.config or row.url or row.sha256_prefix)
        else:
            assert row.url.startswith("https://")
            if row.sha256_prefix:
                assert re.fullmatch(r"[0-9a-f]{8}", row.sha256_prefix)
                assert row.url.endswith(f"-{row.sha256_prefix}.pth")
            assert not (row.repo_id or row.revision)


def test_values_are_strings_where_they_should_be():
    text = {f.name for f in fields(hub.Checkpoint) if str(f.type).startswith("str")}
    for row in hub.checkpoints():
        assert all(isinstance(getattr(row, name), str | None) for name in text)


def test_published_numbers_of_known_rows():
    row = hub.find_checkpoint("mask2former-swin-base-coco-instance")
    assert (row.metrics, row.num_queries) == ({"mask_AP": 46.7}, 100)
    assert row.eval_size == {"shortest_edge": 800, "longest_edge": 1333}
    row = hub.find_checkpoint("deformable-detr-with-box-refine-two-stage")
    assert (row.metrics, row.two_stage, row.num_labels) == ({"box_AP": 46.9}, True, 91)
    row = hub.find_checkpoint("mmdet-dino-5scale_swin-l_8xb2-36e_coco")
    assert (row.metrics, row.num_feature_levels, row.sha256_prefix) == ({"box_AP": 58.4}, 5, "5486e051")


def test_find_by_repo_id_and_case():
    row = hub.find_checkpoint("mask2former-swin-base-in21k-coco-instance")
    assert hub.find_checkpoint("facebook/mask2former-swin-base-IN21k-coco-instance") is row
    assert hub.find_checkpoint("mask2former-swin-base-IN21k-coco-instance") is row


def test_mistyped_alias_names_the_nearest():
    with pytest.raises(hub.CheckpointError) as error:
        hub.find_checkpoint("mask2former-swin-tiny-coco-instanse")
    assert str(error.value).startswith("unknown checkpoint 'mask2former-swin-tiny-coco-instanse'; nearest: ")
    assert ALIAS in str(error.value)
    with pytest.raises(hub.CheckpointError, match="`deformops-models checkpoints` lists them"):
        hub.find_checkpoint("yolo")
    with pytest.raises(hub.CheckpointError, match="nearest: .*deformable-detr"):
        hub.DeformableDETR.from_pretrained("deformable-dter")


# Weights


@pytest.mark.parametrize("model_type", LOADERS)
@pytest.mark.parametrize("format", FORMATS)
def test_loads_every_format(model_type, format, tmp_path):
    loader, build = LOADERS[model_type]
    write, expected_file = FORMATS[format]
    original = build()
    write(original, tmp_path)
    assert (tmp_path / expected_file).is_file()
    model = loader.from_pretrained(tmp_path)
    assert not model.training
    assert isinstance(model, type(original))
    state = original.state_dict()
    assert model.state_dict().keys() == state.keys()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=0)


def test_safetensors_come_before_a_pickle(saved, tmp_path):
    folder, state = saved
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save({key: torch.zeros_like(value) for key, value in state.items()}, tmp_path / "pytorch_model.bin")
    model = hub.Mask2Former.from_pretrained(tmp_path)
    key = "class_predictor.weight"
    assert torch.equal(model.state_dict()[key], state[key])


def test_loaded_model_is_patched_and_predicts(saved):
    from deformops_models.patching import report

    folder, state = saved
    model = hub.Mask2Former.from_pretrained(folder)
    swapped = report(model).swapped
    assert [entry.part for entry in swapped] == ["attention", "mask_predictor", "loss", "matcher"]
    plain = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(folder).eval()
    pixels = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        mine, theirs = model(pixel_values=pixels), plain(pixel_values=pixels)
    assert torch.equal(mine.masks_queries_logits, theirs.masks_queries_logits)
    assert torch.equal(mine.class_queries_logits, theirs.class_queries_logits)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_device_and_upstream_arguments(saved, dtype):
    model = hub.Mask2Former.from_pretrained(
        str(saved[0]), dtype=dtype, device="meta", id2label={0: "a", 1: "b", 2: "c"}
    )
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}


@pytest.mark.parametrize("dtype", ["bf17", "load", 16])
def test_unknown_dtype(saved, dtype):
    with pytest.raises(ValueError, match=f"dtype is {dtype!r}: use a torch.dtype or its name, such as 'bfloat16'"):
        hub.Mask2Former.from_pretrained(saved[0], dtype=dtype)


# The Hub


@pytest.mark.parametrize("name", [ALIAS, REPO, "someone/fine-tuned"])
def test_loads_from_the_hub_cache(saved, tmp_path, name):
    put_in_cache(tmp_path, REPO if name == ALIAS else name, saved[0])
    model = hub.Mask2Former.from_pretrained(name, cache_dir=tmp_path, local_files_only=True)
    assert torch.equal(model.state_dict()["class_predictor.weight"], saved[1]["class_predictor.weight"])


def test_missing_from_the_cache_is_one_line(tmp_path):
    with pytest.raises(hub.CheckpointError) as error:
        hub.Mask2Former.from_pretrained(ALIAS, cache_dir=tmp_path, local_files_only=True)
    message = str(error.value)
    assert message.startswith(f"cannot load {ALIAS} ({REPO}) from the Hub or its cache: ")
    assert f"`hf download {REPO}`" in message
    assert "pass that folder" in message
    assert "HF_HUB_OFFLINE=1" in message
    assert "\n" not in message


def test_unreachable_hub_is_one_line_at_once(tmp_path):
    code = f"""
import deformops_models as dm
from deformops_models.hub import CheckpointError
for load in (dm.Mask2Former.from_pretrained, dm.Mask2Former.processor):
    try:
        load({ALIAS!r})
    except CheckpointError as error:
        print(error)
"""
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout + done.stderr
    for line in lines:
        assert line.startswith(f"cannot load {ALIAS} ({REPO}): the Hub cannot be reached (")
        assert line.endswith("copy its Hub cache here and set HF_HUB_OFFLINE=1")
    assert "Retrying" not in done.stderr


def test_what_cannot_be_patched_is_one_line(tmp_path):
    from models import DETECTORS

    model = DETECTORS["hf-rt-detr-v2"].build()
    for module in model.modules():
        if hasattr(module, "method"):
            module.method = "discrete"
    model.config.decoder_method = "discrete"
    model.save_pretrained(tmp_path)
    with pytest.raises(hub.CheckpointError) as error:
        hub.from_pretrained(tmp_path)
    assert re.fullmatch(
        r"no deformable attention was patched in RTDetrV2ForObjectDetection; .*discrete.*: load it with "
        "transformers itself",
        str(error.value),
    )


def test_arguments_are_checked_before_anything_is_loaded():
    for arguments, error, problem in (
        ({"backend": "nope"}, ValueError, "backend='nope' is not known"),
        ({"device": "nowhere"}, ValueError, "device='nowhere' is not known: use 'cpu'"),
        ({"output_loading_info": True}, TypeError, "output_loading_info=True"),
    ):
        with pytest.raises(error, match=problem):
            hub.from_pretrained("/no/such/folder", **arguments)
    with pytest.raises(TypeError, match="'weights.pth': only mmdet's loader takes a second argument"):
        hub.from_pretrained("/no/such/folder", "weights.pth")


@pytest.mark.parametrize("kind", ["lost", "renamed"])
def test_missing_parameters_are_an_error(tmp_path, kind):
    from safetensors.torch import load_file, save_file

    tiny_deformable_detr().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    if kind == "lost":
        weights = {name: t for name, t in weights.items() if "decoder.layers.0" not in name}
    else:
        weights = {f"other.{name}": t for name, t in weights.items()}
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(hub.CheckpointError, match=r"lacks \d+ weights of DeformableDetrForObjectDetection, such as"):
        hub.DeformableDETR.from_pretrained(tmp_path)
    assert hub.DeformableDETR.from_pretrained(tmp_path, strict=False).training is False


def drop_weights(folder, part):
    """Removes every tensor with `part` in its name from the folder's safetensors file."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if part not in name}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("part", ["running_mean", "normalization."])
def test_missing_buffers_are_an_error(tmp_path, part):
    tiny_deformable_detr().save_pretrained(tmp_path)
    drop_weights(tmp_path, part)
    with pytest.raises(hub.CheckpointError, match=rf"lacks \d+ weights of Deformable.*, such as .*{part}"):
        hub.DeformableDETR.from_pretrained(tmp_path)
    assert hub.DeformableDETR.from_pretrained(tmp_path, strict=False).training is False


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("hf-mask2former", "criterion.empty_weight"),
        ("hf-rt-detr", "num_batches_tracked"),
        ("hf-rt-detr-v2", "n_points_scale"),
        ("hf-d-fine", "num_points_scale"),
    ],
)
def test_buffers_that_upstream_computes_may_be_missing(tmp_path, name, part):
    from models import DETECTORS

    DETECTORS[name].build().save_pretrained(tmp_path)
    drop_weights(tmp_path, part)
    hub.from_pretrained(tmp_path)


@pytest.mark.parametrize("change", [{"d_model": "abc"}, {"num_queries": 33}, {"encoder_layers": None}], ids=str)
def test_a_damaged_config_is_one_line(tmp_path, change):
    tiny_deformable_detr().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(hub.CheckpointError, match=r"^cannot load ") as caught:
        hub.DeformableDETR.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_other_sizes_than_the_configs_are_named(tmp_path):
    tiny_deformable_detr().save_pretrained(tmp_path)
    text = (
        rf"^cannot load {tmp_path}: it holds model.query_position_embeddings.weight with shape \(5, 64\), its config "
        r"asks for \(7, 64\): correct the config, or pass ignore_mismatched_sizes=True"
    )
    with pytest.raises(hub.CheckpointError, match=text):
        hub.DeformableDETR.from_pretrained(tmp_path, num_queries=7)
    model = hub.DeformableDETR.from_pretrained(tmp_path, num_queries=7, ignore_mismatched_sizes=True, strict=False)
    assert model.config.num_queries == 7


@pytest.mark.parametrize("kind", [["deformable_detr"], {"a": 1}, None, 7], ids=str)
def test_a_model_type_that_is_no_name(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    text = f"its config.json says model_type {kind!r}; known are"
    with pytest.raises(hub.CheckpointError, match=re.escape(text)):
        hub.from_pretrained(tmp_path)


def test_doubtful_repo_is_said_to_be_one(tmp_path):
    with pytest.raises(hub.CheckpointError, match="it may not exist on the Hub"):
        hub.Mask2Former.from_pretrained(
            "mask2former-swin-base-in21k-coco-panoptic", cache_dir=tmp_path, local_files_only=True
        )


@pytest.mark.parametrize(
    ("module", "load", "extra"),
    [
        ("transformers", hub.Mask2Former.from_pretrained, "transformers"),
        ("transformers", hub.DeformableDETR.processor, "transformers"),
        ("mmdet.models", hub.DINO.from_pretrained, "mmdet"),
    ],
)
def test_missing_framework_names_the_extra(monkeypatch, module, load, extra):
    if module == "mmdet.models":
        pytest.importorskip("mmengine")
        pytest.importorskip("mmcv")
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(
        hub.CheckpointError, match=rf"{package} is not installed: pip install 'deformops-models\[{extra}\]'"
    ):
        load("mmdet-dino-4scale_r50_8xb2-12e_coco")


# Bad folders


def test_alias_of_another_loader():
    with pytest.raises(hub.CheckpointError) as error:
        hub.Mask2Former.from_pretrained("deformable-detr")
    expected = "deformable-detr is a deformable_detr checkpoint of transformers: use DeformableDETR.from_pretrained"
    assert str(error.value) == expected
    with pytest.raises(hub.CheckpointError, match=r"use DINO\.from_pretrained"):
        hub.DeformableDETR.from_pretrained("mmdet-deformable-detr_r50_16xb2-50e_coco")


def test_folder_of_another_model_type(saved):
    with pytest.raises(hub.CheckpointError) as error:
        hub.DeformableDETR.from_pretrained(saved[0])
    expected = f"{saved[0]} is no deformable_detr checkpoint: its config.json says model_type 'mask2former'"
    assert str(error.value) == expected


def test_folder_without_config(tmp_path):
    with pytest.raises(hub.CheckpointError, match="is no mask2former checkpoint: it holds no config.json"):
        hub.Mask2Former.from_pretrained(tmp_path)


def test_folder_without_weights(saved, tmp_path):
    (tmp_path / "config.json").write_bytes((saved[0] / "config.json").read_bytes())
    with pytest.raises(hub.CheckpointError, match=f"cannot load {tmp_path}: .*no file named model.safetensors"):
        hub.Mask2Former.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "load", [hub.from_pretrained, hub.Mask2Former.from_pretrained, hub.DINO.from_pretrained, hub.DINO.processor]
)
def test_an_empty_name_is_not_the_working_folder(load, tmp_path, monkeypatch):
    (tmp_path / "config.py").write_text("raise SystemExit('was run')")
    (tmp_path / "weights.pth").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    for name in ("", None):
        with pytest.raises(hub.CheckpointError, match=f"{name!r} is no checkpoint: give an alias, a repo id or a path"):
            load(name)


def test_a_shipped_model_that_is_missing_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setitem(hub.SHIPPED, "shapes-tiny", tmp_path)
    with pytest.raises(hub.CheckpointError, match="holds no weights of shapes-tiny: .* finetune --model shapes-tiny"):
        hub.from_pretrained("shapes-tiny")


@pytest.mark.parametrize("path", ["./nothing", "/nothing", "a/b/c"])
def test_no_such_folder(path):
    with pytest.raises(hub.CheckpointError, match=f"no such folder: {path}"):
        hub.Mask2Former.from_pretrained(path)


def test_truncated_safetensors(saved, tmp_path):
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(hub.CheckpointError, match=f"cannot load {tmp_path}: "):
        hub.Mask2Former.from_pretrained(tmp_path)


class Payload:
    def __reduce__(self):
        return print, ("a pickle ran code",)


def test_pickle_that_would_run_code_is_refused(saved, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((saved[0] / "config.json").read_bytes())
    torch.save({**saved[1], "extra": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(hub.CheckpointError, match=f"cannot load {tmp_path}: "):
        hub.Mask2Former.from_pretrained(tmp_path)
    assert "a pickle ran code" not in capsys.readouterr().out


# Image processors

LEGACY_PRESETS = {
    "mask2former": {"size": {"height": 384, "width": 384}, "image_processor_type": "Mask2FormerImageProcessor"},
    "deformable_detr": {"size": 600, "max_size": 1000, "feature_extractor_type": "DeformableDetrFeatureExtractor"},
}


@pytest.mark.parametrize(("model_type", "hub_shape"), [("mask2former", (384, 384)), ("deformable_detr", (600, 800))])
def test_two_sizes_of_a_preset(model_type, hub_shape, tmp_path):
    pytest.importorskip("torchvision")
    loader = LOADERS[model_type][0]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(LEGACY_PRESETS[model_type]))
    image = torch.zeros(3, 480, 640, dtype=torch.uint8)
    evaluation, preset = loader.processor(tmp_path), loader.processor(tmp_path, size="hub")
    assert type(evaluation).__name__ == loader.processor_class
    wide = 1088 if model_type == "mask2former" else 1066  # Mask2Former rounds up to multiples of 32
    assert evaluation(images=image, return_tensors="pt")["pixel_values"].shape == (1, 3, 800, wide)
    assert preset(images=image, return_tensors="pt")["pixel_values"].shape == (1, 3, *hub_shape)


def test_eval_size_of_an_alias(tmp_path):
    pytest.importorskip("torchvision")
    folder, cache = tmp_path / "preset", tmp_path / "cache"
    folder.mkdir()
    (folder / "preprocessor_config.json").write_text(json.dumps(LEGACY_PRESETS["mask2former"]))
    row = hub.find_checkpoint("mask2former-swin-tiny-cityscapes-semantic")
    put_in_cache(cache, row.repo_id, folder)
    processor = hub.Mask2Former.processor(row.alias, cache_dir=cache, local_files_only=True)
    assert (processor.size["shortest_edge"], processor.size["longest_edge"]) == (1024, 2048)
    processor = hub.Mask2Former.processor(row.alias, size="hub", cache_dir=cache, local_files_only=True)
    assert (processor.size["height"], processor.size["width"]) == (384, 384)


def test_folder_without_preset(saved):
    pytest.importorskip("torchvision")
    processor = hub.Mask2Former.processor(saved[0])
    assert (processor.size["shortest_edge"], processor.size["longest_edge"]) == (800, 1333)


def test_preset_in_a_subfolder(saved, tmp_path):
    pytest.importorskip("torchvision")
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "preprocessor_config.json").write_text(json.dumps(LEGACY_PRESETS["mask2former"]))
    processor = hub.Mask2Former.processor(tmp_path, "hub", subfolder="best")
    assert (processor.size["height"], processor.size["width"]) == (384, 384)


def test_unknown_size():
    for loader in (hub.Mask2Former, hub.DINO):
        with pytest.raises(ValueError, match='size is \'big\': use "eval" or "hub"'):
            loader.processor(ALIAS, size="big")
