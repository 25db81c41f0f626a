"""The README's code runs, and the commands that it names exist."""

import re
from pathlib import Path

import pytest

from deformops_models import cli

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_twenty_lines_run(tmp_path, capsys):
    pytest.importorskip("transformers")
    from models import DETECTORS

    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert 10 <= len(code.splitlines()) <= 25
    detector = DETECTORS["hf-mask2former"]
    detector.build().save_pretrained(tmp_path)
    alias = re.search(r'name = "(.*?)"', code).group(1)
    photo = ROOT / "deformops_models" / "assets" / "coffee.jpg"
    for name, here in ((alias, str(tmp_path)), ("street.jpg", str(photo)), ("threshold=0.5", "threshold=0.0")):
        assert name in code
        code = code.replace(name, here)
    # The processor of a folder without a preset resizes to 800, which is slow here.
    code = code.replace('size="eval")', 'size="hub", do_resize=False)')
    scope: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), scope)
    out = capsys.readouterr().out
    assert f"{detector.attentions + 3} modules patched, 0 left alone" in out
    segments = scope["result"]["segments_info"]
    assert segments and len(re.findall(r"^LABEL_\d [01]\.\d+$", out, re.MULTILINE)) == len(segments)


def test_the_commands_exist(capsys):
    commands = set(re.findall(r"deformops-models (\w+)", TEXT))
    assert commands == {"bench", "checkpoints", "demo", "doctor", "eval", "finetune", "predict", "shapes"}
    for command in commands:
        with pytest.raises(SystemExit) as leave:
            cli.main([command, "--help"])
        assert leave.value.code == 0
        assert command in capsys.readouterr().out


def test_paths_exist():
    for path in re.findall(r"`((?:benchmarks|examples)/[\w./-]+)`", TEXT):
        assert (ROOT / path).is_file(), path
