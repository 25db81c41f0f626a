"""Compiles every kernel variant for a GPU that need not be there and prints, as JSON, which instructions it uses.

A script of its own: the suite runs the kernels in Triton's interpreter, where nothing can be compiled.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deformops_models.kernels._launch import configure
from deformops_models.kernels.msda_backward import msda_backward_kernel
from deformops_models.kernels.msda_forward import msda_forward_kernel

TENSORS = {
    msda_forward_kernel: "output value shapes starts reference points weights",
    msda_backward_kernel: "grad value shapes starts reference points weights "
    "grad_value grad_reference grad_points grad_weights",
}
INTS = ("shapes", "starts")
PARAMETERS = ("reference", "points", "weights", "grad_reference", "grad_points", "grad_weights")


def compile_variant(kernel, sm, value, parameters="fp32", accumulator="fp32", coordinates=2, softmax=True,
                    counts=(4, 4, 4, 4), channels=32, need_reference=False):  # fmt: skip
    """The compiled kernel; dtypes are Triton's names, as "bf16"."""
    backward = kernel is msda_backward_kernel
    types = {}
    for name in TENSORS[kernel].split():
        dtype = "i64" if name in INTS else parameters if name in PARAMETERS else value
        dtype = {"grad_value": accumulator, "grad_reference": "fp32"}.get(name, dtype)
        types[f"{name}_ptr"] = f"*{dtype}"
    absent = ["starts_ptr"] + ([] if coordinates else ["reference_ptr"])
    if backward:
        absent += [] if need_reference else ["grad_reference_ptr"]
    BQ, warps, registers = configure(channels, max(counts), 4 if value == "fp32" else 2, backward)
    constants = dict.fromkeys(absent) | {
        "M": 8, "D": channels, "NUM_POINTS": tuple(counts), "P": sum(counts), "C": coordinates,
        "REF_LEVELS": len(counts) if coordinates else 1, "SOFTMAX": softmax, "HAS_STARTS": False, "WIDE": False,
        "BQ": BQ,
    }  # fmt: skip
    if backward:
        constants |= {"NEED_VALUE": True, "NEED_REFERENCE": need_reference}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names} | {"offset_scale": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n][0] == "*"}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps, "maxnreg": registers})


def stack_bytes(compiled) -> int | None:
    """Bytes per thread that the assembler spilled; None where Triton ships no tool to ask."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout)[1])


def main() -> None:
    rows = []
    for variant in json.load(sys.stdin):
        kernel = {"forward": msda_forward_kernel, "backward": msda_backward_kernel}[variant.pop("kernel")]
        compiled = compile_variant(kernel, **variant)
        ptx = compiled.asm["ptx"]
        rows.append({
            "atomics": sorted(set(re.findall(r"\b(?:atom|red)\.[\w.:]+", ptx))),
            "loads": sorted(set(re.findall(r"ld\.global[.\w:]*", ptx))),
            "stack": stack_bytes(compiled),
        })  # fmt: skip
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
