"""`bench --family` on tiny detectors on the CPU: its rows, its picture, and what it refuses."""

import pytest
import torch
from models import DETECTORS

from deformops_models.bench import families, record
from deformops_models.console import UsageError


def tiny(name: str) -> families.Work:
    detector = DETECTORS[name]
    return families.Work(detector.framework, detector.build, detector.call)


@pytest.fixture
def known():
    pytest.importorskip("transformers")
    return {"copied": tiny("copied-ms-deform-attn"), "rt_detr": tiny("hf-rt-detr")}


def test_rows_table_and_picture(known, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert families.run(["all"], tmp_path, commit="c", device="cpu", repeats=2, known=known) == 0
    rows = record.read(tmp_path / "results.csv")
    found = {(row["preset"], row["provider"], row["metric"]) for row in rows}
    times = {("upstream", "step_ms"), ("upstream", "inference_ms"), ("ours", "step_ms"), ("ours", "inference_ms")}
    losses = {("upstream", "loss"), ("ours", "loss"), ("ours", "kernel_calls")}
    assert found == {(name, *row) for name in known for row in times | losses}
    assert {row["op"] for row in rows} == {families.OP} and {row["dtype"] for row in rows} == {"bfloat16"}
    loss = {(row["preset"], row["provider"]): row["median"] for row in rows if row["metric"] == "loss"}
    # On the CPU a patched module runs upstream's own forward.
    assert all(loss[name, "ours"] == loss[name, "upstream"] for name in known)
    ratios = families.ratios(rows)
    assert ratios.keys() == known.keys() and all(ratio > 0 for r in ratios.values() for ratio in r.values())
    out = capsys.readouterr().out
    assert "[2/2] rt_detr: training step" in out and "median" in out
    assert (tmp_path / "families.png").stat().st_size > 5000


def test_ratios_and_their_median_by_hand(tmp_path):
    recorder = record.Recorder(tmp_path / "results.csv", dict.fromkeys(record.COLUMNS[:6], ""))
    for name, before, after in (("a", 200, 100), ("b", 100, 90), ("c", 100, 120)):
        for provider, time in (("upstream", before), ("ours", after)):
            recorder.add(
                time, op=families.OP, preset=name, distribution="random", dtype="bfloat16", provider=provider,
                metric="step_ms", unit="ms",
            )  # fmt: skip
    assert families.ratios(recorder.rows) == {"a": {"step_ms": 0.5}, "b": {"step_ms": 0.9}, "c": {"step_ms": 1.2}}
    assert families.summary(recorder.rows).splitlines()[-1].split() == ["median", "0.90", "-"]


def test_a_family_that_fails_is_named_and_the_next_one_is_timed(known, tmp_path, capsys):
    def broken(model, train):
        raise RuntimeError("out of\nluck")

    def nan(model, train):
        return {"loss": sum(p.sum() for p in model.parameters()) * float("nan")}

    copied = known["copied"]
    known = {
        "broken": families.Work("torch", copied.build, broken),
        "nan": families.Work("torch", copied.build, nan),
        "copied": copied,
    }
    assert families.run(["all"], tmp_path, device="cpu", repeats=1, known=known) == 1
    out = capsys.readouterr().out
    assert "FAILED: broken: RuntimeError: out of luck" in out and "FAILED: nan: " in out
    assert "copied" in families.ratios(record.read(tmp_path / "results.csv"))


def test_names(known, tmp_path, capsys):
    with pytest.raises(UsageError, match="--family: unknown 'yolo': use all, copied, rt_detr"):
        families.run(["yolo"], tmp_path, known=known)
    known["other"] = families.Work("a_library_of_nobody", known["copied"].build, known["copied"].call)
    with pytest.raises(UsageError, match="--family other: a_library_of_nobody is not installed"):
        families.run(["other"], tmp_path, known=known)
    assert families._choose(["all"], known) == ["copied", "rt_detr"]
    assert "left out: other, a_library_of_nobody is not installed" in capsys.readouterr().out


def test_every_family_of_the_rows_is_timed():
    from deformops_models.patching import families as rows

    names = {row.name for row in rows() if row.framework == "transformers"}
    assert names <= families.FAMILIES.keys()


def test_the_command_needs_a_gpu(capsys):
    from deformops_models import cli

    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert cli.main(["bench", "--family", "rt_detr"]) == 2
    assert "bench times kernels on an NVIDIA GPU" in capsys.readouterr().err


def test_plot_only(known, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from deformops_models import cli

    families.run(["copied"], tmp_path, device="cpu", repeats=1, known=known)
    assert cli.main(["bench", "--plot-only", str(tmp_path / "results.csv"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "families.png").is_file()
