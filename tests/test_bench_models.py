"""`bench --model` and `bench --convergence` on tiny detectors; on the CPU with the host's clock."""

import functools
import math
import re
import runpy
import sys
import time
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from deformops_models.bench import compiled, convergence, models, plot, record, run, steps, summary  # noqa: E402
from deformops_models.bench.presets import Case  # noqa: E402
from deformops_models.cli import main  # noqa: E402
from deformops_models.console import UsageError  # noqa: E402
from deformops_models.patching import PatchedModule, patch, report  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tiny_mask2former():
    return models.mask2former(
        2, 64, embed_dim=32, depths=(1, 1, 1, 1), window=4, feature_size=32, mask_feature_size=32, hidden_dim=32,
        encoder_feedforward_dim=32, encoder_layers=1, num_attention_heads=2, dim_feedforward=32, decoder_layers=3,
        num_queries=15, train_num_points=200,
    )  # fmt: skip


def tiny_deformable_detr():
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    return models.deformable_detr(
        2, 64, 96, backbone_config=backbone, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=20,
    )  # fmt: skip


TINY = {"tiny_mask2former": tiny_mask2former, "tiny_deformable_detr": tiny_deformable_detr}


def cpu_bench(build):
    return steps.Bench(models.Workload(build), torch.device("cpu"))


@pytest.fixture
def tiny(monkeypatch):
    """Models that are timed in a second, for `all`, and few repetitions."""
    workloads = {name: models.Workload(build) for name, build in TINY.items()}
    monkeypatch.setattr(models, "PUBLISHED", workloads)
    for name, workload in workloads.items():
        monkeypatch.setitem(models.MODELS, name, workload)
    few = {"ROUNDS": 2, "WARM_UP": 1, "STEPS": 1, "INFERENCES": 1, "_SEEDS": range(7, 10)}
    for name, value in few.items():
        monkeypatch.setattr(steps, name, value)


@pytest.fixture
def anywhere(monkeypatch):
    """Lets the command run without a GPU."""
    monkeypatch.setattr(run, "_check_gpu", lambda: None)
    monkeypatch.setattr(steps, "run", functools.partial(steps.run, device=DEVICE))
    monkeypatch.setattr(convergence, "run", functools.partial(convergence.run, device=DEVICE))


def test_time_is_counted_for_the_innermost_part(monkeypatch):
    now = iter((1.0, 2.0, 4.0, 7.0, 11.0, 16.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    line = steps.Timeline(torch.device("cpu"))
    with line.part("decoder"):
        line.wrap("loss", line.wrap("matching", lambda: None))()
    assert line.times() == pytest.approx({"total": 15e3, "decoder": 6e3, "loss": 6e3, "matching": 3e3})


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("provider", steps.PROVIDERS)
def test_every_part_of_a_step_is_found(name, provider):
    bench = cpu_bench(TINY[name])
    before = {key: dict(vars(module)) for key, module in bench.model.named_modules()}
    optimizer = torch.optim.AdamW(bench.model.parameters())
    with bench.patched(provider):
        swapped = {type(m) for m in bench.model.modules() if isinstance(m, PatchedModule)}
        assert bool(swapped) == (provider != "upstream")
        times = bench.step(optimizer).times()
    assert set(times) == {"total", *steps.PARTS}
    assert all(time > 0 for time in times.values())
    assert sum(times[part] for part in steps.PARTS) == pytest.approx(times["total"], rel=0.05)
    # Nothing that was wrapped stays so.
    assert before.keys() == {key for key, _ in bench.model.named_modules()}
    for key, module in bench.model.named_modules():
        assert vars(module).keys() == before[key].keys()


def test_command_writes_rows_a_picture_and_a_summary(tiny, anywhere, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["bench", "--model", "all", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"models.png", "results.csv"}
    rows = record.read(tmp_path / "results.csv")
    found = summary.medians(rows)
    parts = [f"part_{part}_ms" for part in steps.PARTS]
    for name in TINY:
        case = Case(name, "random", "bfloat16", "train_step")
        for provider in steps.PROVIDERS:
            train = [m for c, who, m in found if (c, who) == (case, provider)]
            assert train == [
                "error_loss", "error_grad_norm", "kernel_calls", "step_ms", *parts, "peak_mib", "images_s"
            ]  # fmt: skip
            infer = [m for c, who, m in found if (c, who) == (case._replace(op="inference"), provider)]
            assert infer == ["inference_ms", "images_s"]
            step = found[case, provider, "step_ms"]
            assert found[case, provider, "images_s"] == pytest.approx(2e3 / step, rel=1e-3)
            assert all(found[case, provider, metric] > 0 for metric in ("step_ms", "part_msda_ms", "part_backward_ms"))
            assert found[case, provider, "error_loss"] < 0.05
    out = capsys.readouterr().out
    ratio = found[case, "ours", "step_ms"] / found[case, "upstream", "step_ms"]
    assert f"{ratio:.2f} ×" in out and "[2/2] tiny_deformable_detr ours: step" in out and "COMPILING" not in out
    # The pictures need no run.
    assert main(["bench", "--plot-only", str(tmp_path / "results.csv"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "models.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_loss_fails_and_is_not_timed(tiny, anywhere, tmp_path, monkeypatch, capsys):
    compute = transformers.Mask2FormerForUniversalSegmentation.get_loss_dict

    def wrong(self, *args, **kwargs):
        losses = compute(self, *args, **kwargs)
        return {k: v * 2 for k, v in losses.items()} if isinstance(self.criterion, PatchedModule) else losses

    monkeypatch.setattr(transformers.Mask2FormerForUniversalSegmentation, "get_loss_dict", wrong)
    assert main(["bench", "--model", "tiny_mask2former", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAILED: tiny_mask2former ours: loss is off by 1.0e+00, " in out
    timed = {row["provider"] for row in record.read(tmp_path / "results.csv") if row["metric"] == "step_ms"}
    assert timed == {"upstream", "ours_attention"}


def test_an_interrupted_run_keeps_its_rows(tiny, anywhere, tmp_path, monkeypatch):
    def interrupted(self, warm_up, calls):
        raise KeyboardInterrupt

    monkeypatch.setattr(steps.Bench, "inferences", interrupted)
    assert main(["bench", "--model", "all", "--out", str(tmp_path)]) == 130
    rows = record.read(tmp_path / "results.csv")
    timed = [(row["preset"], row["provider"]) for row in rows if row["metric"] == "step_ms"]
    assert timed == [("tiny_mask2former", provider) for provider in steps.PROVIDERS]


def test_providers_take_turns_and_warm_up(tiny, monkeypatch):
    monkeypatch.setattr(steps, "ROUNDS", 3)
    monkeypatch.setattr(steps, "WARM_UP", 2)
    bench = cpu_bench(tiny_deformable_detr)
    turns, times = [], iter(range(1, 100))

    def measured(warm_up, calls):
        patched = sum(isinstance(module, PatchedModule) for module in bench.model.modules())
        turns.append((patched, warm_up, calls))
        return [{"total": float(next(times)), "peak": 5.0} for _ in range(calls)]

    found = bench.interleaved(["upstream", "ours_attention"], measured, 2)
    assert turns == [(0, 2, 2), (3, 2, 2), (0, 1, 2), (3, 1, 2), (0, 1, 2), (3, 1, 2)]
    assert found == {
        "upstream": {"total": (6.0, 2.0, 9.0), "peak": (5.0, 5.0, 5.0)},
        "ours_attention": {"total": (8.0, 4.0, 11.0), "peak": (5.0, 5.0, 5.0)},
    }
    assert not any(isinstance(module, PatchedModule) for module in bench.model.modules())
    turns.clear()
    bench.interleaved(["upstream", "ours"], measured, 1, rounds=2, settle=0)
    assert [turn[1:] for turn in turns] == [(2, 1), (2, 1), (0, 1), (0, 1)]


def test_calls_before_those_that_are_timed_leave_no_sample(tiny):
    bench = cpu_bench(tiny_deformable_detr)
    assert [set(sample) for sample in bench.inferences(2, 3)] == [{"total", "forward", "peak"}] * 3
    parts = {"total", *steps.PARTS, "peak"} - {"optimizer"}
    assert [set(sample) for sample in bench.losses(1, 2)] == [parts] * 2


def test_a_detector_that_raises_is_named_and_the_next_one_is_timed(tiny, anywhere, tmp_path, monkeypatch, capsys):
    def broken():
        raise RuntimeError("out of\nluck")

    monkeypatch.setitem(models.MODELS, "broken", models.Workload(broken))
    argv = ["bench", "--model", "broken", "tiny_deformable_detr", "--provider", "upstream", "--out", str(tmp_path)]
    assert main(argv) == 1
    assert "FAILED: broken: RuntimeError: out of luck" in capsys.readouterr().out
    rows = record.read(tmp_path / "results.csv")
    assert {row["preset"] for row in rows if row["metric"] == "inference_ms"} == {"tiny_deformable_detr"}


def test_what_is_not_installed_is_left_out_unless_it_is_named():
    absent = models.Workload(None, ("no_such_framework",))
    newer = models.Workload(None, upstream="Detr9000ForObjectDetection")
    here = models.Workload(None, upstream="RTDetrForObjectDetection")
    known = {"absent": absent, "newer": newer, "here": here, "other": here}
    why = f"transformers {transformers.__version__} has no Detr9000ForObjectDetection: install a newer one"
    chosen, left_out = run.choose("--family", ["all"], known, ["absent", "newer", "here"])
    assert chosen == {"here": here}
    gone = "no_such_framework is not installed: pip install 'deformops-models[all]'"
    assert left_out == [f"absent, {gone}", f"newer, {why}"]
    assert list(run.choose("--family", ["other", "all", "here"], known, ["here"])[0]) == ["other", "here"]
    with pytest.raises(UsageError, match=f"^--family newer: {re.escape(why)}$"):
        run.choose("--family", ["here", "newer"], known, known)
    with pytest.raises(UsageError, match="--family: nothing is left to time: absent, no_such_framework"):
        run.choose("--family", ["all"], known, ["absent"])


def test_training_steps_leave_the_weights_as_they_were(tiny):
    bench = cpu_bench(tiny_deformable_detr)
    before = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    bench.steps(1, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bench.model.state_dict().items())


def test_published_sizes_are_the_real_ones():
    pytest.importorskip("mmdet")
    built = {name: models.MODELS[name].build() for name in ("mask2former_swin_t_512", "deformable_detr_r50_b2")}
    millions = {name: sum(p.numel() for p in d.model.parameters()) / 1e6 for name, d in built.items()}
    # As counted from the published checkpoints.
    assert millions == pytest.approx({"mask2former_swin_t_512": 47.4, "deformable_detr_r50_b2": 40.1}, abs=0.5)
    attentions = {name: len(list(models.attentions(d.model))) for name, d in built.items()}
    assert attentions == {"mask2former_swin_t_512": 6, "deformable_detr_r50_b2": 12}


def test_dino_has_all_parts():
    pytest.importorskip("mmdet")
    bench = cpu_bench(lambda: models.mmdet("dino/dino-4scale_r50_8xb2-12e_coco.py", 1, 224, 288))
    found = {part for part, *_ in bench.detector.calls(bench.model)}
    assert found == {"backbone", "msda", "matching", "loss"}
    patch(bench.model)
    calls = bench.detector.calls(bench.model)
    assert len(report(bench.model).swapped) == sum(part == "msda" for part, *_ in calls)
    times = bench.step(torch.optim.AdamW(bench.model.parameters())).times()
    assert set(times) == {"total", *steps.PARTS}


# Compiled


@pytest.fixture
def quick_compiler(monkeypatch):
    """Traces and partitions as always, and then runs PyTorch's own kernels."""
    for name in ("measure_inference", "measure_training"):
        monkeypatch.setattr(compiled, name, functools.partial(getattr(compiled, name), backend="aot_eager"))


def test_compiled_inference_beside_the_eager_one(tiny, anywhere, quick_compiler, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["bench", "--model", "tiny_deformable_detr", "--compile", "--out", str(tmp_path)]) == 0
    rows = record.read(tmp_path / "results.csv")
    assert {(row["op"], row["dtype"]) for row in rows} == {("inference", "bfloat16")}
    metrics = {who: [row["metric"] for row in rows if row["provider"] == who] for who in compiled.PROVIDERS}
    eager = ["error_logits", "kernel_calls", "inference_ms", "images_s"]
    late = ["error_logits", "kernel_calls", "compile_s", "inference_ms", "images_s"]
    assert metrics == {who: late if "_" in who else eager for who in compiled.PROVIDERS}
    found = summary.medians(rows)
    case = Case("tiny_deformable_detr", "random", "bfloat16", "inference")
    for provider in compiled.PROVIDERS:
        assert 0 < found[case, provider, "error_logits"] < 0.1
        duration = found[case, provider, "inference_ms"]
        assert found[case, provider, "images_s"] == pytest.approx(2e3 / duration, rel=2e-3)
    # The first call does far more than run.
    assert found[case, "ours_compiled", "compile_s"] * 1e3 > 2 * found[case, "ours_compiled", "inference_ms"]
    table = capsys.readouterr().out
    assert "COMPILING INFERENCE, s" in table and "STEP, ms" not in table and "PEAK" not in table
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")


def test_compiled_training_beside_the_eager_one(tiny, anywhere, quick_compiler, tmp_path):
    assert main(["bench", "--model", "tiny_deformable_detr", "--compile", "training", "--out", str(tmp_path)]) == 0
    rows = record.read(tmp_path / "results.csv")
    assert {(row["op"], row["dtype"]) for row in rows} == {("train_step", "bfloat16")}
    metrics = {who: [row["metric"] for row in rows if row["provider"] == who] for who in compiled.PROVIDERS}
    errors, times = ["error_loss", "error_grad_norm", "kernel_calls"], ["step_ms", "peak_mib", "images_s"]
    assert metrics == {who: [*errors, *(["compile_s"] if "_" in who else []), *times] for who in compiled.PROVIDERS}
    assert all(0 < row["median"] < 0.2 for row in rows if row["metric"].startswith("error_"))
    found = {(row["provider"], row["metric"]): row["median"] for row in rows}
    assert found["ours_compiled", "compile_s"] * 1e3 > 2 * found["ours_compiled", "step_ms"] > 0


def test_picture_and_table_of_training_and_compiled_inference(tmp_path):
    pytest.importorskip("matplotlib")
    recorder = record.Recorder(tmp_path / "results.csv", dict.fromkeys(record.COLUMNS[:6], ""))
    case = {"preset": "some_detector", "distribution": "random", "dtype": "bfloat16"}
    for i, provider in enumerate(compiled.PROVIDERS, 1):
        recorder.add(10 * i, **case, op="inference", provider=provider, metric="inference_ms", unit="ms")
    recorder.add(50, **case, op="inference", provider="ours_compiled", metric="compile_s", unit="s")
    cells = [line.split() for line in summary.summary(recorder.rows).splitlines()]
    assert cells[0] == ["MODEL", "PROVIDER", "INFERENCE,", "ms", "COMPILING", "INFERENCE,", "s"]
    assert cells[1] == ["some_detector", "upstream", "10", "1.00", "×", "-"]
    assert cells[4] == ["some_detector", "ours_compiled", "40", "4.00", "×", "50"]
    (axis,) = plot._model_pictures(recorder.rows)["models"].axes
    assert axis.get_title() == "inference, ms"
    assert [bar.get_height() for bar in axis.patches] == [10, 20, 30, 40, 50, 60]
    for provider in steps.PROVIDERS:
        train = case | {"op": "train_step", "provider": provider}
        recorder.add(80, **train, metric="step_ms", unit="ms")
        if provider != "upstream":
            recorder.add(60, **train, metric="part_backward_ms", unit="ms")
        recorder.add(2048, **train, metric="peak_mib", unit="MiB")
    recorder.add(30, **case, op="train_step", provider="ours_ddp_2gpu", metric="step_ms", unit="ms")
    figure = plot._model_pictures(recorder.rows)["models"]
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["training step, ms", "inference, ms", "peak memory in training, GiB"]
    # What the parts do not explain is drawn too, and all of it where there are no parts.
    assert [h for bar in figure.axes[0].patches if (h := bar.get_height())] == [80, 60, 20, 60, 20]
    assert [bar.get_height() for bar in figure.axes[1].patches] == [10, 20, 30, 40, 50, 60]
    assert [bar.get_height() for bar in figure.axes[2].patches] == [2, 2, 2]
    labels = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert {*labels} == {*steps.PARTS, "rest", *steps.PROVIDERS, *compiled.PROVIDERS}
    assert len(labels) == len({*labels})


def test_wrong_compiled_outputs_fail_and_are_not_timed(tiny, anywhere, tmp_path, monkeypatch, capsys):
    logits = compiled.logits
    calls = iter(range(10))

    def wrong(outputs):
        # The float32 ones, upstream, ours, upstream_compiled, ours_compiled, and both as graphs.
        scale = 2 if next(calls) == 4 else 1
        return {name: value * scale for name, value in logits(outputs).items()}

    monkeypatch.setattr(compiled, "logits", wrong)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    assert main(["bench", "--model", "tiny_deformable_detr", "--compile", "--out", str(tmp_path)]) == 1
    assert "FAILED: tiny_deformable_detr ours_compiled: logits is off by 1.0e+00, " in capsys.readouterr().out
    rows = record.read(tmp_path / "results.csv")
    timed = [row["provider"] for row in rows if row["metric"] == "inference_ms"]
    assert sorted(timed) == ["ours", "ours_graphs", "upstream", "upstream_compiled", "upstream_graphs"]


def test_only_what_is_asked_for_is_compiled(tiny, tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: built.append(options) or model)
    recorder = record.Recorder(tmp_path / "results.csv", dict.fromkeys(record.COLUMNS[:6], ""))
    bench = cpu_bench(tiny_deformable_detr)
    assert list(compiled.measure_inference("tiny", "", bench, recorder, ["ours"])) == []
    assert built == []
    # Ours is held to upstream's eager one, which has no row.
    assert list(compiled.measure_inference("tiny", "", bench, recorder, ["ours_compiled"])) == []
    assert built == [{"backend": "inductor", "dynamic": False}]
    timed = [row["provider"] for row in recorder.rows if row["metric"] == "inference_ms"]
    assert timed == ["ours", "ours_compiled"]


def test_what_cannot_be_compiled_is_named(tiny, tmp_path, monkeypatch):
    def refuse(model, **options):
        def call(**inputs):
            raise torch._dynamo.exc.Unsupported("no such\ninstruction")

        return call if built.append(1) or len(built) == 1 else model

    built = []
    monkeypatch.setattr(torch, "compile", refuse)
    recorder = record.Recorder(tmp_path / "results.csv", dict.fromkeys(record.COLUMNS[:6], ""))
    failed = list(compiled.measure_inference("tiny", "", cpu_bench(tiny_deformable_detr), recorder, compiled.PROVIDERS))
    assert [line.partition(" no such instruction")[0] for line in failed] == ["upstream_compiled: Unsupported:"]
    timed = [row["provider"] for row in recorder.rows if row["metric"] == "inference_ms"]
    assert timed == ["upstream", "ours", "ours_compiled", "upstream_graphs", "ours_graphs"]


def test_logits_are_found_by_name_or_place():
    one, two = torch.ones(2, dtype=torch.bfloat16), torch.zeros(3)
    outputs = {"loss": two, "class_logits": one, "mask_logits": two, "auxiliary_logits": [one], "pred_boxes": one}
    found = compiled.logits(outputs)
    assert list(found) == ["class_logits", "mask_logits"] and found["class_logits"].dtype == torch.float32
    assert torch.equal(compiled.logits(([one, two], two))["logits"], torch.ones(2))


# Convergence


def test_distances_are_relative_and_of_smooth_curves():
    first = [2.0] * 40
    waves = [2.0 + 0.5 * (-1) ** i for i in range(40)]  # up and down within the window
    noise, ours = convergence.distances([first, [2.02] * 40, waves])
    assert noise == pytest.approx(math.log(1.01))
    assert ours == pytest.approx(math.log(1.01) / math.sqrt(2))  # half of the pairs are equal
    assert convergence.distances([first, waves, [2.02] * 40]) == pytest.approx((0, math.log(1.01)))


def test_patched_and_unpatched_training_go_the_same_way(anywhere, tmp_path, monkeypatch, capsys):
    for module in ("pycocotools", "torchvision", "matplotlib"):
        pytest.importorskip(module)
    for name, value in {"_IMAGES": 4, "_SIZE": 64, "_BATCH": 2}.items():
        monkeypatch.setattr(convergence, name, value)
    monkeypatch.setattr(convergence, "STEPS", 12)
    assert main(["bench", "--convergence", "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "convergence.csv").read_text().splitlines()
    assert lines[0].startswith('step,upstream,"upstream, rounded otherwise 1",') and lines[0].endswith(",ours")
    curves = torch.tensor([[float(x) for x in line.split(",")] for line in lines[1:]])
    assert curves.shape == (12, 7) and math.isfinite(curves.sum())
    assert (curves[-1, 1:] < curves[0, 1:]).all()
    assert len(set(curves[0, 1:6].tolist())) == 5  # each from other weights
    assert (tmp_path / "convergence.png").read_bytes().startswith(b"\x89PNG")
    assert "within twice that" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_two_hundred_steps_converge_within_roundings_noise(tmp_path):
    assert convergence.run(tmp_path) == 0


@pytest.mark.gpu
def test_a_tiny_detector_from_end_to_end(tiny, tmp_path):
    assert main(["bench", "--model", "all", "--out", str(tmp_path)]) == 0
    found = summary.medians(record.read(tmp_path / "results.csv"))
    for name, calls in (("tiny_mask2former", 1), ("tiny_deformable_detr", 3)):
        case = Case(name, "random", "bfloat16", "train_step")
        assert found[case, "ours", "kernel_calls"] == calls
        assert found[case, "ours", "peak_mib"] > 0


def test_the_script_for_several_gpus_in_one_process(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    script = Path(__file__).resolve().parents[1] / "benchmarks" / "multi_gpu.py"
    monkeypatch.setitem(models.MODELS, "mask2former_swin_t", models.Workload(tiny_mask2former))
    monkeypatch.setattr(sys, "argv", [str(script), "--out", str(tmp_path)])
    try:
        with pytest.raises(SystemExit) as leave:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert not leave.value.code
    rows = record.read(tmp_path / "results.csv")
    assert [row["metric"] for row in rows] == ["step_ms", "images_s", "peak_mib"]
    assert {(row["op"], row["preset"], row["provider"]) for row in rows} == {
        ("train_step", "mask2former_swin_t", "ours_1gpu")
    }
    assert rows[1]["median"] > 0
