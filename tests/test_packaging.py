"""What is installed, from wheel, sdist and checkout, and what importing it costs."""

import os
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

import deformops_models
from deformops_models import hub

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = ["transformers", "mmcv", "mmengine", "mmdet", "timm", "accelerate", "peft"]
BLOCKED = [
    *FRAMEWORKS, "triton", "torchvision", "PIL", "tqdm", "rich", "matplotlib", "safetensors", "huggingface_hub",
    "pycocotools", "psutil",
]  # fmt: skip


#: Folders of a checkout that no wheel holds.
BESIDE = ("tests", "examples", "docs", "benchmarks", ".ci")


def run(*command, cwd, expect=0, **env):
    """Runs a command in a fresh process, checks its exit code and returns what it printed on both streams."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "MAKE"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == expect, f"{command} gave {done.returncode}:\n{done.stdout}"
    return done.stdout


def python(code, cwd=ROOT):
    return run(sys.executable, "-c", textwrap.dedent(code), cwd=cwd)


def build(kind, source, out):
    """Builds a `wheel` or an `sdist` of the tree `source` without build isolation, so without a network."""
    out.mkdir()
    python(f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})", cwd=source)
    (built,) = out.iterdir()
    return built


def files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout, since a build writes build/ and *.egg-info into its tree."""
    copy = tmp_path_factory.mktemp("tree") / "checkout"
    copy.mkdir()
    for path in (*ROOT.glob("*.*"), ROOT / "LICENSE", ROOT / "Makefile"):
        if path.is_file():
            shutil.copy(path, copy)
    for folder in ("deformops_models", "kernels", "patches", *BESIDE):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    return build("wheel", tree, tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The bin/ of a fresh venv which holds the wheel and sees this environment's other packages, but no checkout."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(p for p in sys.path if p.endswith("-packages")))
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python")
    run(*pip, "install", "--no-deps", "--no-index", "--disable-pip-version-check", wheel, cwd=home)
    return home / "bin"


@pytest.mark.parametrize("folder", ["kernels", "patches"])
def test_folder_at_the_root_is_no_package(folder):
    assert list((ROOT / folder).glob("*.py"))
    assert not (ROOT / folder / "__init__.py").exists()


def test_wheel_holds_the_package_and_nothing_else(wheel):
    ours = ROOT / "deformops_models"
    expected = {"deformops_models/checkpoints.toml", "deformops_models/py.typed"}
    expected |= {f"deformops_models/{path.relative_to(ours)}" for path in ours.rglob("*.py")}
    for folder in ("assets", "shapes_tiny"):
        expected |= {f"deformops_models/{folder}/{path.name}" for path in (ours / folder).glob("*") if path.is_file()}
    for folder in ("kernels", "patches"):
        expected |= {f"deformops_models/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    expected |= {f"deformops_models/kernels/cuda/{path.name}" for path in (ROOT / "kernels/cuda").glob("*.cu*")}
    metadata = f"deformops_models-{deformops_models.__version__}.dist-info/"
    assert {name for name in files(wheel) if not name.startswith(metadata)} == expected
    assert metadata + "licenses/LICENSE" in files(wheel)


def test_wheel_from_the_sdist_is_the_wheel_from_the_checkout(tree, wheel, tmp_path):
    shutil.unpack_archive(build("sdist", tree, tmp_path / "dist"), tmp_path)
    (unpacked,) = tmp_path.glob("deformops_models-*")
    again = build("wheel", unpacked, tmp_path / "again")
    assert files(again) == files(wheel)
    # What the tests read and the README shows.
    beside = [path.relative_to(tree) for folder in BESIDE for path in (tree / folder).rglob("*") if path.is_file()]
    assert len(beside) > 50 and not [path for path in beside if not (unpacked / path).is_file()]


@pytest.mark.parametrize(
    "code", ["deformops_models" + folder for folder in ("", ".bench", ".kernels", ".patches", ".train")]
)
def test_installed_wheel_is_imported_from_its_venv(installed, code, tmp_path):
    out = run(installed / "python", "-c", f"import {code} as m; print(*m.__path__, sep=chr(10))", cwd=tmp_path)
    assert [Path(line).is_relative_to(installed.parent) for line in out.splitlines()] == [True]


def test_installed_console_script(installed, tmp_path):
    version = run(installed / "deformops-models", "--version", cwd=tmp_path)
    assert deformops_models.__version__ in version
    assert "triton" in run(installed / "deformops-models", "doctor", cwd=tmp_path).lower()
    assert "mask2former" in run(installed / "deformops-models", "checkpoints", cwd=tmp_path)


def test_installed_bench_draws_pictures(installed, tmp_path):
    pytest.importorskip("matplotlib")
    results = ROOT / "benchmarks" / "results" / "operators-h200.csv"
    run(installed / "deformops-models", "bench", "--plot-only", results, "--out", "pictures", cwd=tmp_path)
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"memory.png", "roofline.png", "speedup.png"}


def test_installed_demo(installed, tmp_path):
    assert "3 of 3 detectors" in run(installed / "deformops-models", "demo", "--out", "pictures", cwd=tmp_path)
    shipped = hub.local_name("shapes-tiny") != "shapes-tiny"
    assert len(list((tmp_path / "pictures").iterdir())) == 3 + shipped


def test_command_line_runs_from_a_checkout_where_nothing_is_installed():
    assert deformops_models.__version__ in run(sys.executable, "-m", "deformops_models.cli", "--version", cwd=ROOT)


PROBE = """
import importlib.metadata, sys
import transformers
from transformers.integrations import hub_kernels
from transformers.models.mask2former import modeling_mask2former
from transformers.utils import is_kernels_available
try:
    importlib.metadata.version("kernels")
except importlib.metadata.PackageNotFoundError:
    assert not is_kernels_available(), "the checkout's kernels/ passes for the PyPI package"
import deformops_models.kernels
assert list(deformops_models.kernels.__path__) == sys.argv[1:]
"""


def test_transformers_imports_from_the_root(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    run(sys.executable, "-m", "probe", ROOT / "kernels", cwd=ROOT, PYTHONPATH=str(tmp_path))


@pytest.mark.parametrize("name", ["kernels", "patches"])
def test_root_folder_gives_way_to_an_installed_package_of_its_name(name, tmp_path):
    package = tmp_path / name / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    (tmp_path / "probe.py").write_text(
        f"import {name}, deformops_models.{name} as ours; print({name}.__file__, *ours.__path__)"
    )
    out = run(sys.executable, "-m", "probe", cwd=ROOT, PYTHONPATH=str(tmp_path))
    assert out.split() == [str(package), str(ROOT / name)]


def test_every_export_needs_torch_only_and_starts_no_cuda():
    python(f"""
        import sys
        sys.modules.update(dict.fromkeys({BLOCKED}))  # each import of these fails, as if not installed
        from deformops_models import *
        import torch
        assert not torch.cuda.is_initialized()
    """)


def test_all_exports_import_no_other_library_and_take_a_tenth_of_a_second_after_torch():
    def seconds():
        output = python(f"""
            import sys, time, torch
            before = set(sys.modules)
            start = time.perf_counter()
            from deformops_models import *
            print(time.perf_counter() - start)
            assert not (set(sys.modules) - before) & set({BLOCKED})
        """)
        return float(output)

    # A busy machine may delay one process, hardly three in a row.
    assert any(seconds() < 0.1 for _ in range(3))


@pytest.fixture
def make(tmp_path):
    """`make` over a venv that claims to be installed already; nothing is executed by `--question`."""
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    (tmp_path / "bin").mkdir()
    for name in ("bin/python", ".installed-all", ".installed-test"):
        (tmp_path / name).touch()

    def make(*arguments, **expect):
        return run("make", f"VENV={tmp_path}", *arguments, cwd=ROOT, **expect)

    return make


def test_make_installs_again_for_the_metadata_and_not_for_sources(make, tmp_path):
    stamp = tmp_path / ".installed-test"
    make("--question", stamp)
    make("--question", "-W", "deformops_models/__init__.py", stamp)
    make("--question", "-W", "pyproject.toml", stamp, expect=1)
    make("--question", "-W", "setup.py", stamp, expect=1)


def test_make_says_in_one_line_that_python_is_too_old(make, tmp_path):
    (tmp_path / "bin" / "python").unlink()
    out = make("PYTHON=false", "demo", expect=2)
    message = out.splitlines()[0]
    assert message == "deformops-models needs Python 3.10 or newer, and false is not: make PYTHON=/path/to/python"


def test_changelog_names_this_version():
    assert f"\n## {deformops_models.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_ci_script_is_executable():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
