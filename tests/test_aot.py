"""Every kind of kernel compiled ahead of time, mostly for SM 8.0 and 9.0: which instructions it uses, without a GPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

# Relaxed additions to the value's gradient, by GPU and accumulator.
ATOMICS = {
    (70, "fp32"): ["add.f32"],
    (75, "fp32"): ["add.f32"],
    (80, "fp32"): ["add.f32"],
    (80, "fp16"): ["add.noftz.f16x2"],
    (90, "fp32"): ["add.v4.f32"],
    (90, "fp16"): ["add.noftz.v8.f16"],
    (90, "bf16"): ["add.noftz.v8.bf16"],
}
FORWARD = [
    {"value": "bf16"},
    {"value": "fp16", "parameters": "fp16", "coordinates": 0, "softmax": False, "channels": 64},
    {"value": "bf16", "parameters": "bf16", "coordinates": 4, "channels": 24, "counts": [3, 6, 3]},
    {"value": "fp32", "channels": 128, "counts": [1]},
    {"value": "fp32", "coordinates": 0, "channels": 16, "counts": [16, 16]},
]
BACKWARD = [
    {"value": "bf16", "accumulator": "fp32"},
    {"value": "fp16", "accumulator": "fp32", "coordinates": 0, "softmax": False, "channels": 64, "counts": [4, 4]},
    {"value": "bf16", "accumulator": "fp32", "parameters": "bf16", "coordinates": 4, "channels": 24,
     "counts": [3, 6, 3], "need_reference": True},
    {"value": "fp32", "accumulator": "fp32", "parameters": "fp16", "channels": 128, "counts": [2, 2]},
    {"value": "fp32", "accumulator": "fp32", "coordinates": 4, "channels": 40, "counts": [8], "need_reference": True},
    {"value": "fp16", "accumulator": "fp16", "parameters": "fp16"},
    {"value": "fp16", "accumulator": "fp16", "coordinates": 0, "softmax": False, "channels": 16, "counts": [1, 2]},
    {"value": "bf16", "accumulator": "bf16", "parameters": "bf16"},
]  # fmt: skip
VARIANTS = [
    {"kernel": kernel, "sm": sm, **variant}
    for kernel, variants in (("forward", FORWARD), ("backward", BACKWARD))
    for variant in variants
    for sm in (80, 90)
    # No GPU before SM 9.0 adds bfloat16; `ops` never asks one to.
    if (sm, variant.get("accumulator")) != (80, "bf16")
]
VARIANTS += [{"kernel": "forward", "sm": sm, "value": dtype} for sm in (70, 75) for dtype in ("fp16", "bf16")]
VARIANTS += [{"kernel": "backward", "sm": sm, "value": "fp16", "accumulator": "fp32"} for sm in (70, 75)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(TESTS.parent)
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    run = subprocess.run(
        [sys.executable, TESTS / "aot.py"], input=json.dumps(VARIANTS), env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("i", range(len(VARIANTS)), ids=lambda i: "-".join(map(str, VARIANTS[i].values())))
def test_instructions(compiled, i):
    variant, result = VARIANTS[i], compiled[i]
    assert not any("cas" in name for name in result["atomics"]), result["atomics"]
    if variant["kernel"] == "forward":
        assert result["atomics"] == []
    else:
        assert all("relaxed" in name for name in result["atomics"]), result["atomics"]
        added = {re.search(r"add\..*", name)[0] for name in result["atomics"]}
        assert added == set(ATOMICS[variant["sm"], variant["accumulator"]])
    # 16 bytes of a value's row at once.
    assert any(name.endswith("v4.b32") for name in result["loads"]), result["loads"]


def test_what_is_meant_to_fit_into_registers_does(compiled):
    for variant, result in zip(VARIANTS, compiled, strict=True):
        fits = variant["value"] != "fp32" and (variant["kernel"] == "forward" or variant["sm"] == 90)
        if fits and result["stack"] is not None:
            assert result["stack"] == 0, variant
