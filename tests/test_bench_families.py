"""`bench --family` on tiny detectors on the CPU: its rows, its picture, and what it refuses."""

import functools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from models import DETECTORS, pixels_and_mask  # noqa: E402

from deformops_models.bench import families, models, plot, record, run, steps, summary  # noqa: E402
from deformops_models.cli import main  # noqa: E402


def tiny(name: str, call=None, dtype: str = "bfloat16") -> models.Workload:
    detector = DETECTORS[name]
    call = call or detector.call

    def build() -> models.Detector:
        model = detector.build()
        return models.Detector(
            model,
            {"pixel_values": pixels_and_mask(model)[0]},
            {},
            lambda model, inputs, targets: call(model, True)["loss"],
            lambda model, inputs: call(model, False),
            dtype=dtype,
        )

    return models.Workload(build, (detector.framework,))


@pytest.fixture
def known(monkeypatch):
    """Two families, timed on the CPU with few repetitions."""
    found = {"copied": tiny("copied-ms-deform-attn"), "rt_detr": tiny("hf-rt-detr")}
    monkeypatch.setattr(models, "FAMILIES", found)
    monkeypatch.setattr(run, "_check_gpu", lambda: None)
    monkeypatch.setattr(steps, "run", functools.partial(steps.run, device="cpu"))
    monkeypatch.setattr(steps, "WARM_UP", 1)
    monkeypatch.setattr(families, "_ROUNDS", 3)
    return found


def test_rows_table_and_picture(known, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["bench", "--family", "all", "--out", str(tmp_path)]) == 0
    rows = record.read(tmp_path / "results.csv")
    found = {(row["preset"], row["provider"], row["metric"]) for row in rows}
    metrics = {"loss", "forward_backward_ms", "forward_backward_peak_mib", "inference_ms", "inference_peak_mib"}
    expected = {(provider, metric) for provider in ("upstream", "ours") for metric in metrics}
    assert found == {(name, *row) for name in known for row in expected | {("ours", "kernel_calls")}}
    assert {row["op"] for row in rows} == {"family"} and {row["dtype"] for row in rows} == {"bfloat16"}
    loss = {(row["preset"], row["provider"]): row["median"] for row in rows if row["metric"] == "loss"}
    # On the CPU a patched module runs upstream's own forward.
    assert all(loss[name, "ours"] == loss[name, "upstream"] for name in known)
    ratios = summary.ratios(summary.medians(rows))
    assert ratios.keys() == known.keys() and all(ratio > 0 for r in ratios.values() for ratio in r.values())
    out = capsys.readouterr().out
    assert "[2/2] rt_detr: forward and backward" in out and "median" in out
    assert {path.name for path in tmp_path.iterdir()} == {"families.png", "results.csv"}
    # The picture needs no run.
    assert main(["bench", "--plot-only", str(tmp_path / "results.csv"), "--out", str(tmp_path / "again")]) == 0
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["families.png"]


def test_ratios_and_their_median_by_hand(tmp_path):
    recorder = record.Recorder(tmp_path / "results.csv", dict.fromkeys(record.COLUMNS[:6], ""))
    for name, before, after in (("a", 200, 100), ("b", 100, 90), ("c", 100, 120)):
        for provider, time in (("upstream", before), ("ours", after)):
            recorder.add(
                time, op="family", preset=name, distribution="random", dtype="bfloat16", provider=provider,
                metric="forward_backward_ms", unit="ms",
            )  # fmt: skip
    found = summary.ratios(summary.medians(recorder.rows))
    assert found == {
        "a": {"forward_backward_ms": 0.5},
        "b": {"forward_backward_ms": 0.9},
        "c": {"forward_backward_ms": 1.2},
    }
    assert summary.summary(recorder.rows).splitlines()[-1].split() == ["median", "0.90", "-"]
    figure = plot._family_pictures(recorder.rows)["families"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["c", "b", "a"]


def test_a_family_that_fails_is_named_and_the_next_one_is_timed(known, tmp_path, capsys):
    def broken(model, train):
        raise RuntimeError("out of\nluck")

    def nan(model, train):
        return {"loss": sum(p.sum() for p in model.parameters()) * float("nan")}

    name = "copied-ms-deform-attn"
    copied = known.pop("copied")
    known |= {"broken": tiny(name, broken), "nan": tiny(name, nan), "copied": copied}
    assert main(["bench", "--family", "broken", "nan", "copied", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAILED: broken: RuntimeError: out of luck" in out and "FAILED: nan ours: loss is nan" in out
    rows = record.read(tmp_path / "results.csv")
    assert list(summary.ratios(summary.medians(rows))) == ["copied"]
    assert {row["preset"] for row in rows if row["metric"] == "forward_backward_ms"} == {"copied"}


def test_one_that_cannot_run_under_autocast_is_timed_in_float32(known, tmp_path):
    def call(model, train):
        dtypes.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)
        return DETECTORS["copied-ms-deform-attn"].call(model, train)

    dtypes = set()
    known["copied"] = tiny("copied-ms-deform-attn", call, dtype="float32")
    assert main(["bench", "--family", "copied", "--out", str(tmp_path)]) == 0
    assert dtypes == {torch.float32}
    assert {row["dtype"] for row in record.read(tmp_path / "results.csv")} == {"float32"}


def test_names_are_checked_before_the_gpu(known, monkeypatch, tmp_path, capsys):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--family", "yolo"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("deformops-models: --family: unknown 'yolo': use mask2former, oneformer, ")
    if not torch.cuda.is_available():
        assert main(["bench", "--family", "rt_detr"]) == 2
        assert "bench times kernels on an NVIDIA GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_family_that_this_transformers_has_not(known, tmp_path, capsys):
    known["next"] = models.Workload(None, upstream="NextForObjectDetection")
    argv = ["bench", "--out", str(tmp_path), "--family"]
    why = f"transformers {transformers.__version__} has no NextForObjectDetection: install a newer one"
    assert main([*argv, "next"]) == 2
    assert capsys.readouterr().err == f"deformops-models: --family next: {why}\n"
    assert main([*argv, "all"]) == 0
    out = capsys.readouterr().out
    assert f"left out: next, {why}\n" in out and "FAILED" not in out


def test_every_family_of_the_rows_is_timed():
    from deformops_models.patching import families as rows

    names = {row.name for row in rows() if row.framework == "transformers"}
    assert names <= models.FAMILIES.keys()


def test_every_detector_of_transformers_names_its_class_where_a_version_may_lack_it():
    for name, workload in models.FAMILIES.items():
        assert workload.upstream is None or workload.upstream.lower().startswith(name.replace("_", "")), name
    assert models.FAMILIES["pp_doclayout_v4"].upstream == "PPDocLayoutV4ForObjectDetection"


def test_only_ddq_is_timed_in_float32():
    dtypes = {name: work.build.keywords.get("dtype", "bfloat16") for name, work in models.FAMILIES.items()}
    assert [name for name, dtype in dtypes.items() if dtype == "float32"] == ["mmdet_ddq"]


def test_omdet_turbo_forgets_its_texts():
    """More texts in one call than it remembers, several times."""
    text = transformers.CLIPTextConfig(
        hidden_size=48, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=16
    )
    backbone = transformers.SwinConfig(
        image_size=32, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4], window_size=4,
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    detector = models.omdet_turbo(
        2, 64, 3, backbone_config=backbone, text_config=text, text_projection_in_dim=48, text_projection_out_dim=48,
        class_embed_dim=48, task_encoder_hidden_dim=32, num_queries=9, encoder_hidden_dim=32, decoder_hidden_dim=32,
        vision_features_channels=[32] * 3, encoder_in_channels=[32, 64, 128], encoder_attention_heads=2,
        encoder_dim_feedforward=32, decoder_num_heads=2, decoder_num_layers=2, decoder_dim_feedforward=32, cache_size=6,
    )  # fmt: skip
    losses = []
    for _ in range(3):
        torch.manual_seed(7)
        losses.append(detector.loss(detector.model, detector.inputs, detector.targets).item())
    detector.infer(detector.model, detector.inputs)
    assert losses[1:] == pytest.approx(losses[:1] * 2) and losses[0] > 0
    assert len(detector.model.language_cache_class.cache) == detector.model.language_cache_class.current_load == 6
