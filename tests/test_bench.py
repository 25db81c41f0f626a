"""`bench` through its parts: everything but the clocks runs on the CPU."""

import contextlib
import math
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import relative_error

from deformops_models import reference
from deformops_models.bench import compiled, measure, models, peers, plot, presets, record, run, steps, summary
from deformops_models.bench.presets import DTYPES, LINEAR, PRESETS, Case, Preset, Problem
from deformops_models.cli import main
from deformops_models.console import UsageError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "operators-h200.csv"
TINY = Preset(2, ((6, 9), (3, 5)), None, (4, 4), heads=3, channels=16)
SHAPES = {
    "encoder": TINY,
    "decoder": replace(TINY, queries=7),
    "boxes": replace(TINY, queries=7, coordinates=4),
    "unequal": replace(TINY, queries=7, points=(3, 2), coordinates=4),
}
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def tiny(monkeypatch):
    """Adds the presets of SHAPES to those that can be timed."""
    for name, preset in SHAPES.items():
        monkeypatch.setitem(PRESETS, f"tiny_{name}", preset)


def arguments(**given) -> Namespace:
    """What the parser gives for a plain `bench`, and what is `given`."""
    empty = {"dtype": [], "distribution": [], "op": [], "provider": []}
    what = {"preset": ["all"], "linear": False, "plot_only": None, "model": None, "convergence": False}
    return Namespace(**what | {"commit": None} | empty | given)


def problem_of(preset: Preset, op: str = "deformable_attention", dtype: str = "float32", distribution: str = "local"):
    return Problem.random(preset, distribution, dtype, op, "cpu")


# Problems


def test_sizes_are_those_of_the_published_layers():
    assert {name: p.query_count for name, p in PRESETS.items()} == {
        "encoder": 22223, "decoder": 300, "m2f1024": 21504, "rtdetr640": 300, "narrow": 3900,
        "five_levels": 89023, "eight_points": 22223, "unequal": 300, "host": 300,
    }  # fmt: skip
    encoder = PRESETS["encoder"]
    assert encoder.sizes == ((100, 167), (50, 84), (25, 42), (13, 21))
    assert encoder.corner_elements == 4 * 2 * 22223 * 8 * 16 * 32
    assert PRESETS["five_levels"].sizes == ((200, 334), *encoder.sizes)
    assert (PRESETS["narrow"].heads, PRESETS["narrow"].channels, PRESETS["narrow"].points) == (16, 16, (2,))
    assert PRESETS["unequal"].points == (3, 6, 3) and not PRESETS["unequal"].equal_points
    square = {name for name, p in PRESETS.items() if any(height == width for height, width in p.sizes)}
    assert square == {"m2f1024", "rtdetr640"}


def test_linear_sweeps_grow_one_quantity():
    for name, preset in LINEAR.items():
        number = int(name.strip("linear_qkd"))
        if name.startswith("linear_q"):
            assert preset.query_count == pytest.approx(number, rel=0.02)
            assert (preset.channels, sum(preset.points)) == (32, 20)
        else:
            assert preset.query_count == pytest.approx(22000, rel=0.02)
            assert (sum(preset.points) if "lk" in name else preset.channels) == number
        # The proportions of 1536×2048 survive the scaling.
        assert preset.sizes[0][1] / preset.sizes[0][0] == pytest.approx(4 / 3, rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", presets.OPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_operands(shape, op, dtype):
    preset = SHAPES[shape]
    problem = problem_of(preset, op, dtype)
    value, other = DTYPES[dtype]
    queries = 69 if shape == "encoder" else 7
    points = (5,) if shape == "unequal" else (2, 4)
    assert (problem.value.shape, problem.value.dtype) == ((2, 69, 3, 16), value)
    assert (problem.points.shape, problem.points.dtype) == ((2, queries, 3, *points, 2), other)
    assert (problem.weights.shape, problem.weights.dtype) == ((2, queries, 3, *points), other)
    assert (problem.grad.shape, problem.grad.dtype) == ((2, queries, 48), value)
    assert problem.starts.tolist() == [0, 54]
    if op == "msda":
        assert problem.reference is None
        total = problem.weights.float().flatten(3).sum(-1)
        assert total.sub(1).abs().max() <= 8 * torch.finfo(other).eps
    else:
        assert problem.reference.dtype == torch.float32
        assert problem.reference.shape == ((2, queries, 1, 4) if preset.coordinates == 4 else (2, queries, 2, 2))
    assert not torch.equal(problem.value, problem_of(preset, op, dtype).value)


@pytest.mark.parametrize("shape", SHAPES)
def test_local_points_lie_about_their_reference_and_uniform_ones_anywhere(shape):
    preset = replace(SHAPES[shape], batch=40)
    for distribution in presets.DISTRIBUTIONS:
        problem = problem_of(preset, distribution=distribution)
        locations = problem.locations(problem.points).flatten(3, -2).split(preset.points, 3)
        if distribution == "uniform":
            both = torch.cat(locations, 3)
            assert both.min() > -1e-5 and both.max() < 1 + 1e-5
            assert both.mean().item() == pytest.approx(0.5, abs=0.02)
            assert both.std().item() == pytest.approx(math.sqrt(1 / 12), abs=0.02)
            continue
        for (height, width), level in zip(preset.sizes, locations, strict=True):
            distance = (level - problem.reference[:, :, None, :1, :2]) * torch.tensor([width, height])
            assert distance.std().item() == pytest.approx(2, abs=0.15)
            assert distance.mean().item() == pytest.approx(0, abs=0.15)


def test_an_encoders_reference_points_lie_in_their_pixels():
    problem = problem_of(TINY)
    xy = problem.reference[:, :54, 0] * torch.tensor([9, 6])
    assert torch.equal(xy.floor()[0].long(), torch.tensor([[x, y] for y in range(6) for x in range(9)]))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_detectors_arithmetic_is_that_of_the_specification(shape):
    problem = problem_of(SHAPES[shape])
    levels = zip(
        problem.preset.sizes,
        problem.locations(problem.points).flatten(3, -2).split(problem.preset.points, 3),
        problem.points.flatten(3, -2).split(problem.preset.points, 3),
        strict=True,
    )
    for i, ((height, width), locations, points) in enumerate(levels):
        x, y = reference.pixels(points, problem.reference, i, height, width, points.shape[3], 0.5)
        torch.testing.assert_close(locations[..., 0] * width - 0.5, x, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(locations[..., 1] * height - 0.5, y, atol=1e-4, rtol=1e-4)


# Errors and the gate


@pytest.mark.parametrize("op", presets.OPS)
@pytest.mark.parametrize("shape", ["decoder", "unequal"])
def test_exact_by_heads_is_exact_at_once(shape, op):
    problem = problem_of(SHAPES[shape], op)
    leaves = [t.double().requires_grad_() for t in problem.operands]
    at_once = measure.differentiate(peers.ours(problem), leaves, problem.grad.double())
    by_heads = measure.exact(problem)
    assert by_heads.keys() == at_once.keys() == set(measure.RESULTS)
    for name, result in by_heads.items():
        assert relative_error(result, at_once[name]) < 1e-14


def test_error_of_a_result_that_is_a_quarter_too_large():
    problem = problem_of(TINY)
    good = peers.ours(problem)
    found = measure.errors(lambda *leaves: good(*leaves) * 1.25, problem, measure.exact(problem))
    assert found == {name: pytest.approx(0.25, abs=1e-4) for name in measure.RESULTS}
    output_only = measure.errors(lambda *leaves: good(*leaves).detach(), problem, measure.exact(problem))
    assert list(output_only) == ["output"]


def test_error_leaves_out_points_at_whole_pixels():
    problem = problem_of(SHAPES["decoder"], "msda")
    with torch.no_grad():
        problem.points[0, 0, 0, 0, 0] = torch.tensor([3.5 / 9, 0.3])  # x is pixel 3
        problem.points[0, 1, 0, 0, 0] = torch.tensor([3.7 / 9, 0.3])
    smooth = problem.smooth()
    assert smooth.shape == (2, 7, 3, 2, 4, 1)
    assert smooth[0, :2, 0, 0, 0, 0].tolist() == [0, 1]
    truth = measure.exact(problem)
    truth["grad_points"][0, 0, 0, 0, 0] += 1e6
    assert measure.errors(peers.ours(problem), problem, truth)["grad_points"] < 1e-4
    truth["grad_points"][0, 1, 0, 0, 0] += 1e6
    assert measure.errors(peers.ours(problem), problem, truth)["grad_points"] > 0.9


def test_gate_bounds_each_result_by_its_own_dtype():
    found = {"output": 7e-3, "grad_value": 9e-3, "grad_points": 2e-4, "grad_weights": 9e-5}
    assert measure.beyond(found, problem_of(TINY, dtype="bfloat16")) == {"grad_value": 9e-3}
    assert measure.beyond(found, problem_of(TINY, dtype="autocast")) == {"grad_value": 9e-3, "grad_points": 2e-4}
    assert list(measure.beyond({"output": math.nan}, problem_of(TINY))) == ["output"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", presets.OPS)
def test_the_plain_path_passes_the_gate(op, dtype):
    for preset in SHAPES.values():
        problem = problem_of(preset, op, dtype)
        assert measure.beyond(measure.errors(peers.ours(problem), problem, measure.exact(problem)), problem) == {}


def test_repeats_fit_a_budget():
    assert [measure.repeats(seconds) for seconds in (0, 1e-4, 0.01, 0.02, 1.0)] == [30, 30, 15, 7, 5]
    assert measure.quantiles([5.0, 1.0, 4.0, 2.0, 3.0]) == (3.0, 2.0, 5.0)


# Providers


@pytest.mark.parametrize("op", presets.OPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_computes_the_same(shape, op):
    pytest.importorskip("transformers")
    problem = problem_of(SHAPES[shape], op)
    found = measure.errors(peers.transformers(problem), problem, measure.exact(problem))
    assert max(found.values()) < 1e-4, found


def test_transformers_runs_autocasts_operands_in_float32():
    pytest.importorskip("transformers")
    problem = problem_of(TINY, dtype="autocast")
    function = peers.transformers(problem)
    assert function(*problem.operands).dtype == torch.float32
    assert max(measure.errors(function, problem, measure.exact(problem)).values()) < 8e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled in this process")
@pytest.mark.parametrize("op", presets.OPS)
@pytest.mark.parametrize("shape", ["decoder", "unequal"])
def test_bare_launch_runs_the_forward_kernel(shape, op):
    problem = problem_of(SHAPES[shape], op)
    function = peers.bare_launch(problem)
    found = measure.errors(function, problem, measure.exact(problem))
    assert list(found) == ["output"] and found["output"] < 1e-5
    first, second = function(), function()
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("op", presets.OPS)
def test_mmcv_is_called_as_its_operator_wants(monkeypatch, op, dtype):
    """On a stand-in for its compiled part that computes with the plain path."""

    class Stub:
        @staticmethod
        def ms_deform_attn_forward(value, shapes, starts, locations, weights, im2col_step):
            assert value.dtype == locations.dtype == weights.dtype
            problem = Problem(TINY, shapes, starts, shapes, None, value, locations, weights, value)
            return peers.ours(problem)(value, locations, weights)

        @staticmethod
        def ms_deform_attn_backward(value, shapes, starts, locations, weights, grad, *gradients, im2col_step):
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (value, locations, weights)]
                output = Stub.ms_deform_attn_forward(leaves[0], shapes, starts, *leaves[1:], im2col_step)
            for target, result in zip(gradients, torch.autograd.grad(output, leaves, grad), strict=True):
                target.copy_(result)

    pytest.importorskip("mmcv")
    monkeypatch.setitem(sys.modules, "mmcv._ext", Stub)
    problem = problem_of(TINY, op, dtype)
    found = measure.errors(peers.mmcv(problem), problem, measure.exact(problem))
    assert found.keys() == set(measure.RESULTS)
    if dtype == "float32" or op == "msda":
        assert measure.beyond(found, problem) == {}


def test_deterministic_mode_ends():
    with pytest.raises(ZeroDivisionError), peers.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        raise ZeroDivisionError
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_is_not_installed_is_found_out():
    assert peers._importable("torch")
    assert not peers._importable("no_such_package")
    assert not peers._importable("no_such_package._ext")


# What is timed


def test_what_is_timed_by_default(monkeypatch):
    monkeypatch.setattr(peers, "_importable", lambda package: True)
    rows, left_out = run.select(arguments())
    cases = dict.fromkeys(case for case, _ in rows)
    assert left_out == []
    assert {case.preset for case in cases} == set(PRESETS)
    for preset in ("encoder", "m2f1024"):
        found = {(c.distribution, c.dtype) for c in cases if c.preset == preset}
        assert found == {("local", dtype) for dtype in DTYPES} | {("uniform", "bfloat16")}
    assert {c.dtype for c in cases if c.preset == "five_levels"} == {"bfloat16"}
    assert {c.op for c in cases} == set(presets.OPS)
    compiled = {(c.preset, c.dtype) for c, name in rows if name == "transformers_compiled"}
    assert compiled == {(p, d) for p in ("encoder", "decoder") for d in ("float32", "bfloat16")}
    assert {c.preset for c, name in rows if name == "bare_launch"} == {"host"}
    assert {c.dtype for c, name in rows if name == "mmcv"} == {"float32", "float16"}
    assert not {name for c, name in rows if c.preset == "unequal"} & {"deformops", "deformops_softmax", "mmcv"}
    assert not [c for c, name in rows if name == "deformops_softmax" and c.op == "msda"]
    assert all(rows.count(row) == 1 for row in rows)


def test_what_is_asked_for_is_timed():
    rows, _ = run.select(
        arguments(
            preset=["unequal", "decoder"], dtype=["fp32", "float32", "autocast"], distribution=["uniform"],
            op=["msda"], provider=["ours"],
        )
    )  # fmt: skip
    assert rows == [
        (Case(preset, "uniform", dtype, "msda"), "ours")
        for preset in ("unequal", "decoder")
        for dtype in ("float32", "autocast")
    ]
    linear, _ = run.select(arguments(linear=True))
    assert linear == [(Case(name, "local", "bfloat16", "deformable_attention"), "ours") for name in LINEAR]


def test_code_is_compiled_once():
    rows = {preset: (Case(preset, "local", "bfloat16", "msda"), "ours") for preset in PRESETS}
    assert run._code(*rows["encoder"]) == run._code(*rows["decoder"]) == run._code(*rows["host"])
    assert len({run._code(*row) for row in rows.values()}) == 6
    compiled = {run._code(rows[preset][0], "transformers_compiled") for preset in ("encoder", "decoder")}
    assert len(compiled) == 2
    uniform = rows["encoder"][0]._replace(distribution="uniform")
    assert run._code(uniform, "ours") == run._code(*rows["encoder"])


def test_providers_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr(peers, "_importable", lambda package: package == "transformers")
    rows, left_out = run.select(arguments(preset=["decoder"]))
    assert {name for _, name in rows} == {"ours", "ours_deterministic", "transformers", "transformers_compiled"}
    assert "mmcv, mmcv._ext cannot be imported" in left_out
    with pytest.raises(UsageError, match="nothing is left to time: deformops, deformops cannot be imported"):
        run.select(arguments(provider=["deformops"]))


# The loop


@pytest.fixture
def clocks(monkeypatch):
    """Clocks that say what they are told instead of timing."""

    def clocks(function, problem, *, host, differentiable):
        yield "forward_us", "us", (20.0, 19.0, 22.0)
        yield "backward_us", "us", (100.0, 98.0, 110.0)

    monkeypatch.setattr(measure, "clocks", clocks)


def recorder_in(folder) -> record.Recorder:
    return record.Recorder(folder / "results.csv", record.machine("abc"))


def rows_of(*providers, preset="tiny_decoder") -> list:
    return [(Case(preset, "local", "bfloat16", "deformable_attention"), provider) for provider in providers]


def test_every_row_is_recorded(tiny, clocks, tmp_path, capsys):
    assert run.time_all(rows_of("ours"), recorder_in(tmp_path), "cpu") == []
    line = "[1/1] tiny_decoder local bfloat16 deformable_attention ours: forward 20 us, backward 100 us, error "
    assert capsys.readouterr().out.startswith(line)
    rows = record.read(tmp_path / "results.csv")
    assert [row["metric"] for row in rows] == [f"error_{name}" for name in measure.RESULTS] + [
        "forward_us", "backward_us"
    ]  # fmt: skip
    assert {row["commit"] for row in rows} == {"abc"}
    assert (rows[-1]["median"], rows[-1]["p20"], rows[-1]["p80"]) == (100, 98, 110)
    assert 0 < rows[0]["median"] < 8e-3


def test_a_wrong_result_is_reported_and_not_timed(tiny, clocks, tmp_path, monkeypatch, capsys):
    def wrong(problem):
        return lambda v, p, w: peers.ours(problem)(v, p, w) * 1.25

    wrongs = {name: replace(peers.PROVIDERS[name], build=wrong, package=None) for name in ("ours", "transformers")}
    for name, provider in wrongs.items():
        monkeypatch.setitem(peers.PROVIDERS, name, provider)
    failures = run.time_all(rows_of("ours", "transformers"), recorder_in(tmp_path), "cpu")
    assert len(failures) == 1
    assert failures[0].startswith("tiny_decoder local bfloat16 deformable_attention ours: beyond its bound: error_")
    assert failures[0] in capsys.readouterr().out
    rows = record.read(tmp_path / "results.csv")
    timed = {row["provider"] for row in rows if row["metric"] == "forward_us"}
    assert timed == {"transformers"}  # a peer's error is recorded as it is
    errors = {row["provider"]: row["median"] for row in rows if row["metric"] == "error_output"}
    assert errors == {name: pytest.approx(0.25, abs=0.01) for name in ("ours", "transformers")}


def test_a_failing_peer_and_the_deterministic_alert_skip_their_rows(tiny, clocks, tmp_path, monkeypatch, capsys):
    def raising(text):
        def build(problem):
            raise RuntimeError(text)

        return build

    alert = "msda_backward does not have a deterministic implementation, but you set"
    for name, text in (("transformers", "out of\nmemory"), ("ours_deterministic", alert)):
        provider = replace(peers.PROVIDERS[name], build=raising(text), package=None)
        monkeypatch.setitem(peers.PROVIDERS, name, provider)
    rows = rows_of("ours_deterministic", "transformers", "ours")
    assert run.time_all(rows, recorder_in(tmp_path), "cpu") == []
    out = capsys.readouterr().out
    assert "transformers: skipped: out of memory\n" in out
    assert f"ours_deterministic: skipped: {alert}\n" in out
    assert {row["provider"] for row in record.read(tmp_path / "results.csv")} == {"ours"}
    monkeypatch.setitem(peers.PROVIDERS, "ours", replace(peers.PROVIDERS["ours"], build=raising("no kernel")))
    with pytest.raises(RuntimeError, match="no kernel"):
        run.time_all(rows_of("ours"), recorder_in(tmp_path), "cpu")


@pytest.fixture
def machine(monkeypatch):
    """A machine that seems to have a GPU; problems and results stay on the CPU."""
    monkeypatch.setattr(run, "_check_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    time_all = run.time_all
    monkeypatch.setattr(run, "time_all", lambda rows, recorder: time_all(rows, recorder, "cpu"))


BENCH = ("bench", "--provider", "ours", "--op", "deformable_attention")


def test_command_writes_rows_pictures_and_a_summary(tiny, clocks, machine, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    argv = [*BENCH, "--preset", "tiny_encoder", "tiny_unequal", "--out", str(tmp_path / "a" / "b")]
    assert main(argv) == 0
    assert main(argv) == 0
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [
        "memory.png", "results.csv", "roofline.png", "speedup.png"
    ]  # fmt: skip
    assert len(record.read(tmp_path / "a" / "b" / "results.csv")) == 2 * 2 * 6
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines.count(["tiny_unequal", "local", "bfloat16", "deformable_attention", "20", "/", "100"]) == 2


def test_command_fails_on_a_wrong_result(tiny, clocks, machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "BOUNDS", dict.fromkeys(measure.BOUNDS, 1e-9))
    assert main([*BENCH, "--preset", "tiny_decoder", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAILED: tiny_decoder local bfloat16 deformable_attention ours: beyond its bound: error_output" in out
    assert "no pictures: " in out


def test_an_interrupted_run_keeps_its_rows(tiny, machine, tmp_path, monkeypatch):
    calls = []

    def clocks(*args, **options):
        if calls:
            raise KeyboardInterrupt
        calls.append(args)
        yield "forward_us", "us", (20.0, 19.0, 22.0)

    monkeypatch.setattr(measure, "clocks", clocks)
    assert main([*BENCH, "--preset", "tiny_decoder", "tiny_boxes", "--out", str(tmp_path)]) == 130
    rows = record.read(tmp_path / "results.csv")
    assert [row["metric"] for row in rows][-1] == "forward_us"
    assert {row["preset"] for row in rows} == {"tiny_decoder"}


# Rows, summary, pictures


def test_rows_come_back_as_they_were_written(tmp_path):
    recorder = recorder_in(tmp_path / "new")
    row = {"op": "msda", "preset": "host", "distribution": "local", "dtype": "autocast", "provider": "ours"}
    recorder.add(1234.5678, 1000.0, 20000.0, **row, metric="host_both_us", unit="us")
    recorder_in(tmp_path / "new").add(0.00123456, **row, metric="error_output", unit="1")
    path = tmp_path / "new" / "results.csv"
    assert path.read_text().splitlines()[0] == (
        "date,commit,gpu,driver,torch,triton,op,preset,distribution,dtype,provider,metric,unit,median,p20,p80"
    )
    rows = record.read(path)
    assert rows[:1] == recorder.rows
    assert [row["median"] for row in rows] == [1235, 0.001235]
    assert (rows[0]["p20"], rows[0]["p80"], rows[1]["p80"]) == (1000, 20000, 0.001235)
    assert rows[0].items() >= row.items()


def test_another_csv_is_refused(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("a,b\n1,2\n")
    for use in (record.read, lambda path: record.Recorder(path, {})):
        with pytest.raises(UsageError, match="is no benchmark result"):
            use(path)


def test_growth_of_times():
    line = {work: 3.0 + 2.0 * work for work in (1, 2, 3, 10)}
    assert summary.linearity(line)[1] == pytest.approx(0, abs=1e-12)
    square = {work: 5.0 * work**2 for work in (1, 2, 4)}
    exponent, deviation = summary.linearity(square)
    assert exponent == pytest.approx(2)
    # The line through (1, 5), (2, 20), (4, 80) is −25 + 25.71·work.
    assert deviation == pytest.approx(abs(5 / (-25 + 180 / 7) - 1))


def test_summary_of_the_committed_rows():
    rows = record.read(RESULTS)
    found = summary.medians(rows)
    case = Case("encoder", "local", "bfloat16", "deformable_attention")
    forward, backward = (found[case, "ours", metric] for metric in ("forward_us", "backward_us"))
    ratio = found[case, "transformers", "forward_us"] / forward
    lines = summary.summary(rows).splitlines()
    (line,) = [line for line in lines if line.split()[:4] == list(case)]
    assert f"{forward:,.4g} / {backward:,.4g}" in line and f"{ratio:.2f} / " in line
    assert sum(line.startswith("host ") for line in lines) == len({key[:2] for key in found if key[0][0] == "host"})


def test_summary_of_growth_and_of_host_times():
    linear = [Case(name, "local", "bfloat16", "deformable_attention") for name in LINEAR if "_q" in name]
    host = Case("host", "local", "bfloat16", "msda")
    medians = {(c, "ours", "backward_us"): 7.0 * c.work.corner_elements for c in linear}
    medians |= {(host, "bare_launch", "host_forward_us"): 40.0, (host, "ours", "host_forward_us"): 50.0}
    rows = [c._asdict() | {"provider": p, "metric": m, "median": t} for (c, p, m), t in medians.items()]
    lines = [line.split() for line in summary.summary(rows).splitlines()]
    assert ["queries", "ours", "backward_us", "work^1.00", "0.0", "%"] in lines
    assert [*host, "ours", "50", "-", "-", "1.25"] in lines


def test_pictures_of_the_committed_rows(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["bench", "--plot-only", str(RESULTS), "--out", str(tmp_path)]) == 0
    names = ["speedup.png", "memory.png", "roofline.png"]
    assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in names]
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 3


def test_bars_are_the_rows_numbers():
    pytest.importorskip("matplotlib")
    rows = [row for row in record.read(RESULTS) if row["op"] == "deformable_attention" and row["dtype"] == "bfloat16"]
    found = summary.medians(rows)
    shown = summary.cases(found, "backward_us")
    timed = {row["preset"] for row in rows if row["metric"] == "backward_us" and row["provider"] == "ours"}
    assert {case.preset for case in shown} == timed >= {"encoder", "m2f1024", "decoder", "rtdetr640"}
    case = shown[0]
    times = plot._series(found, shown, "forward_us")
    assert times["ours"][case] == found[case, "ours", "forward_us"]
    texts = {text.get_text() for text in plot._speedup(found, shown).axes[0].texts}
    assert plot._number(times["transformers"][case] / times["ours"][case]) in texts
    # 22.8 million rows of 64 bytes in 165 µs.
    assert plot._rate(PRESETS["encoder"], 165) == pytest.approx(22_756_352 * 64 / 165e-6 / 1e12)


# The command's help and errors


def test_help_names_everything(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {*PRESETS, *peers.PROVIDERS, *DTYPES, *presets.DISTRIBUTIONS, *presets.OPS} <= set(words)
    assert {*models.MODELS, *steps.PROVIDERS, *compiled.PROVIDERS, "--compile"} <= {w.rstrip(";") for w in words}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "encoder", "big"], "--preset: unknown 'big': use encoder, decoder, m2f1024, rtdetr640, narrow"),
        (["--dtype", "int8"], "--dtype: unknown 'int8': use float32, float16, bfloat16, fp32, fp16, bf16, autocast"),
        (["--distribution", "normal"], "--distribution: unknown 'normal': use local, uniform"),
        (["--op", "conv"], "--op: unknown 'conv': use msda, deformable_attention"),
        (["--provider", "theirs"], "--provider: unknown 'theirs': use ours, ours_deterministic, bare_launch"),
        (["--linear", "--preset", "host"], "argument --preset: not allowed with argument --linear"),
        (["--provider", "bare_launch", "--preset", "encoder"], "nothing is left to time: bare_launch, only the preset"),
        (
            ["--model", "bert"],
            "--model: unknown 'bert': use mask2former_swin_b, mask2former_swin_t, deformable_detr_r50",
        ),
        (["--model", "all", "--provider", "mmcv"], "--provider: unknown 'mmcv': use upstream, ours_attention, ours"),
        (["--compile"], "--compile: only whole detectors are compiled: name them with --model"),
        (["--family", "all", "--compile"], "--compile: only whole detectors are compiled: name them with --model"),
        (
            ["--model", "mask2former_swin_b", "--compile", "--provider", "ours_attention"],
            "--provider: unknown 'ours_attention': use upstream, ours, upstream_compiled, ours_compiled, "
            "upstream_graphs, ours_graphs",
        ),
        (["--model", "all", "--linear"], "argument --linear: not allowed with argument --model"),
        (["--plot-only", "none.csv"], "none.csv: cannot be read: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"deformops-models: {message}") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@NO_GPU
def test_without_a_gpu_it_says_what_is_needed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        "deformops-models: bench times kernels on an NVIDIA GPU and torch sees none here: run it where"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_result_is_one_line(tmp_path, capsys):
    header, row, *_ = RESULTS.read_text().splitlines(keepends=True)
    for name, text, problem in (
        ("cut.csv", header + row + row[:40], "line 3 is damaged: remove it"),
        ("wide.csv", header + row.rstrip() + ",1\n", "line 2 is damaged: remove it"),
        ("word.csv", header + row.rpartition(",")[0] + ",fast\n", "line 2 is damaged: remove it"),
    ):
        (tmp_path / name).write_text(text)
        assert main(["bench", "--plot-only", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err == f"deformops-models: {tmp_path / name}: {problem}\n"
    (tmp_path / "image.csv").write_bytes(bytes(range(128, 256)))
    assert main(["bench", "--plot-only", str(tmp_path / "image.csv"), "--out", str(tmp_path / "out")]) == 2
    assert (
        capsys.readouterr().err
        == f"deformops-models: {tmp_path / 'image.csv'} is no benchmark result: it is not text\n"
    )


def test_pictures_without_matplotlib_name_the_remedy(capsys, tmp_path, monkeypatch, tiny, clocks, machine):
    from deformops_models import console

    found = console.importlib.util.find_spec
    monkeypatch.setattr(console.importlib.util, "find_spec", lambda n: None if n == "matplotlib" else found(n))
    remedy = "matplotlib is not installed: pip install 'deformops-models[bench]'"
    assert main(["bench", "--plot-only", str(RESULTS), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"deformops-models: {remedy}\n"
    # A run keeps its numbers.
    assert main([*BENCH, "--preset", "tiny_decoder", "--out", str(tmp_path)]) == 0
    assert f"no pictures: {remedy}\n" in capsys.readouterr().out
    assert len(record.read(tmp_path / "results.csv")) == 6


# On a GPU


@pytest.mark.gpu
def test_a_tiny_run_from_end_to_end(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(PRESETS, "host", replace(TINY, queries=7, channels=32))
    options = ["--provider", "ours", "bare_launch", "--op", "deformable_attention", "--out", str(tmp_path)]
    assert main(["bench", "--preset", "tiny_encoder", "tiny_unequal", "host", *options]) == 0
    found = summary.medians(record.read(tmp_path / "results.csv"))
    device = ["forward_us", "backward_us", "both_us", "peak_mib"]
    host = ["host_forward_us", "host_grad_us", "host_both_us"]
    errors = [f"error_{name}" for name in measure.RESULTS]
    for preset, metrics in (("tiny_encoder", device), ("tiny_unequal", device), ("host", host)):
        case = Case(preset, "local", "bfloat16", "deformable_attention")
        assert [m for c, who, m in found if (c, who) == (case, "ours")] == errors + metrics
        assert all(found[case, "ours", metric] > 0 for metric in metrics)
        assert found[case, "ours", "error_output"] <= 8e-3
    bare = [metric for _, who, metric in found if who == "bare_launch"]
    assert bare == ["error_output", "host_forward_us"]
    assert "HOST TIME" in capsys.readouterr().out


@pytest.mark.gpu
def test_transformers_is_timed_compiled_and_not(tiny, tmp_path):
    pytest.importorskip("transformers")
    names = ("transformers", "transformers_compiled")
    options = ["--preset", "tiny_decoder", "--op", "deformable_attention", "--dtype", "fp32", "--out", str(tmp_path)]
    assert main(["bench", "--provider", *names, *options]) == 0
    found = summary.medians(record.read(tmp_path / "results.csv"))
    case = Case("tiny_decoder", "local", "float32", "deformable_attention")
    for name in names:
        assert found[case, name, "backward_us"] > 0
        assert found[case, name, "error_grad_value"] < 1e-4
