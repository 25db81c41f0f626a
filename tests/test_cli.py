"""The command line through its entry point, on tiny models that the tests save."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deformops_models import __version__, console, doctor, hub
from deformops_models.cli import main

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(capsys):
    """Runs the command and returns exit code, stdout, stderr."""

    def run(*argv):
        code = main([str(argument) for argument in argv])
        return (code, *capsys.readouterr())

    return run


def command(*argv, cwd):
    """Runs `python -m deformops_models.cli` in a fresh process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": ""}
    argv = [sys.executable, "-m", "deformops_models.cli", *map(str, argv)]
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


# The command itself


def test_version_and_help(capsys):
    for argv, expected in (
        (["--version"], __version__),
        (["--help"], "doctor"),
        (["predict", "--help"], "--threshold"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 0
        assert expected in capsys.readouterr().out


def test_import_is_cheap():
    code = (
        "import sys, deformops_models.cli; "
        "print([m for m in ('torch', 'transformers', 'triton', 'mmcv', 'PIL', 'tqdm') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_module_runs_from_another_folder(tmp_path):
    listing = command("checkpoints", "--task", "panoptic", "--framework", "transformers", "--json", cwd=tmp_path)
    assert listing.returncode == 0, listing.stderr
    rows = json.loads(listing.stdout)
    assert rows and all("panoptic" in row["task"] for row in rows)
    assert "mask2former-swin-tiny-coco-panoptic" in [row["alias"] for row in rows]
    bad = command("predict", "none.jpg", "--model", "x", "--out", "out", cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "deformops-models: none.jpg: no such file or folder\n"


def test_an_error_of_another_process_names_its_rank(run, monkeypatch):
    for rank, start in (("0", "deformops-models: "), ("3", "deformops-models, rank 3: ")):
        monkeypatch.setenv("RANK", rank)
        code, _, err = run("predict", "x.jpg", "--model", "nothing", "--out", "o")
        assert code == 2 and err.startswith(start) and err.count("\n") == 1, err


def test_interrupt_is_130(run, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "checkpoints", interrupted)
    assert run("checkpoints") == (130, "", "")


def test_reader_that_leaves():
    script = f"{sys.executable} -m deformops_models.cli checkpoints | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert result.stdout.startswith("ALIAS")
    assert result.stderr == ""


# checkpoints


def test_checkpoints_table(run):
    code, out, _ = run("checkpoints")
    lines = out.splitlines()
    assert code == 0
    assert len(lines) == 1 + len(hub.checkpoints())
    assert lines[0].split() == ["ALIAS", "FRAMEWORK", "TASK", "DATASET", "BACKBONE", "METRIC", "LICENCE"]
    row = next(line for line in lines if line.startswith("mask2former-swin-tiny-coco-instance "))
    assert "mask_AP 45.0" in row
    columns = {line.find("transformers") for line in lines if "  transformers  " in line}
    assert len(columns) == 1


def test_checkpoints_json_is_every_fact(run):
    code, out, _ = run("checkpoints", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps([dataclasses.asdict(row) for row in hub.checkpoints()]))


def test_checkpoints_filters(run):
    _, out, _ = run("checkpoints", "--framework", "mmdet", "--json")
    assert {row["framework"] for row in json.loads(out)} == {"mmdet"}
    assert len(json.loads(out)) == sum(row.framework == "mmdet" for row in hub.checkpoints())


# doctor


def test_doctor(run):
    code, out, _ = run("doctor")
    assert code == 0
    assert torch.__version__ in out
    assert f"deformops-models  {__version__}" in out
    for name in ("transformers", "mmdet", "timm", "accelerate", "peft"):
        assert any(line.split()[:1] == [name] for line in out.splitlines())
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        assert any(line.split()[:3] == ["cpu", dtype, "eager"] for line in out.splitlines())
    if not torch.cuda.is_available():
        assert "GPU               none that torch can use" in out


def test_doctor_says_what_can_be_patched(run, monkeypatch):
    from deformops_models import patching

    family = patching.families()[0]
    monkeypatch.setattr(patching, "check_family", lambda f: "another version" if f is family else None)
    _, out, _ = run("doctor")
    lines = {line.split()[1]: line for line in out.partition("Can be patched")[2].splitlines() if line.strip()}
    assert lines[family.class_name].endswith("no: another version")
    others = [f.class_name for f in patching.families() if f is not family]
    assert others
    assert all("  yes" in lines[name] for name in others)


def test_doctor_lists_every_family(run):
    from deformops_models import patching

    _, out, _ = run("doctor")
    lines = out.partition("Can be patched")[2].splitlines()
    assert len([line for line in lines if line.strip()]) == len(patching.families())
    assert any(line.split()[:4] == ["any", "project", "MSDeformAttn", "yes,"] for line in lines)
    if importlib.util.find_spec("detrex") is None:
        (line,) = (line for line in lines if line.split()[:1] == ["detrex"])
        assert line.endswith("no: not found: No module named 'detrex'")


def test_verify(run, monkeypatch):
    monkeypatch.setattr(doctor, "_QUERIES", 6)
    code, out, _ = run("doctor", "--verify")
    assert code == 0
    # Four operators, five mixes of dtypes; two kernels on each GPU, or the plain path.
    cases = 20 * (2 * torch.cuda.device_count() or 1)
    assert f"{cases} of {cases} cases are within their bounds" in out
    assert out.count("  ok  ") == cases
    assert ("there is no GPU" in out) == (not torch.cuda.is_available())


@pytest.mark.parametrize("broken", ["output", "gradient", "raises"])
def test_verify_finds_a_broken_operator(run, monkeypatch, broken):
    monkeypatch.setattr(doctor, "_QUERIES", 6)
    monkeypatch.setattr(doctor, "_CASES", {"bfloat16": (torch.bfloat16, torch.bfloat16)})
    good = doctor.msda

    def bad(value, *args, **options):
        if broken == "raises":
            raise RuntimeError("no kernel\nfor you")
        if broken == "gradient":  # the same output, 3 % more gradient
            value = value * 1.03 - (value * 0.03).detach()
        result = good(value, *args, **options)
        return result * 1.03 if broken == "output" else result

    monkeypatch.setattr(doctor, "msda", bad)
    code, out, _ = run("doctor", "--verify")
    assert code == 1
    targets = 2 * torch.cuda.device_count() or 1
    assert f"{2 * targets} of {4 * targets} cases are within their bounds" in out
    assert [line.split()[2] for line in out.splitlines() if "FAILED" in line] == ["msda", "msda"] * targets
    assert ("no kernel for you" in out) == (broken == "raises")


def test_verify_keeps_away_from_whole_pixels():
    for operator in ("msda", "deformable_attention 2", "deformable_attention 4"):
        operands, _ = doctor._operands(operator, (torch.bfloat16, torch.bfloat16))
        assert not doctor._near_a_kink(operands["points"], operands.get("reference")).any()
        assert operands["points"].dtype == torch.bfloat16


# What the commands share


def test_whole_file_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), console.whole_file(target) as temporary:
        temporary.write_text("half")
        assert target.read_text() == "old"
        raise ZeroDivisionError
    assert target.read_text() == "old"
    with console.whole_file(target) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.json"]
    (tmp_path / "b").touch()
    assert target.stat().st_mode == (tmp_path / "b").stat().st_mode


def test_missing_package_is_one_line_with_the_pip_command(run, monkeypatch, tmp_path):
    found = console.importlib.util.find_spec
    monkeypatch.setattr(console.importlib.util, "find_spec", lambda name: None if name == "PIL" else found(name))
    code, out, err = run("predict", "a.png", "--model", "x", "--out", tmp_path)
    assert (code, out) == (2, "")
    assert err == "deformops-models: PIL is not installed: pip install 'deformops-models[transformers]'\n"
    code, out, err = run("demo", "--out", tmp_path)
    assert (code, out) == (2, "")
    assert err == "deformops-models: no detector framework is installed: pip install 'deformops-models[all]'\n"
