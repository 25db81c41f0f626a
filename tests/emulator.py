"""Runs the CUDA C++ kernels on the CPU, a block's threads in turns: their logic without a GPU, not their speed."""

import ctypes
import hashlib
import struct
import subprocess
from pathlib import Path

from deformops_models.kernels import msda_cuda

_HEADER = Path(__file__).parent / "emulated.h"
_KERNELS = ("msda_forward", "msda_backward_points", "msda_count", "msda_sort", "msda_gather")


def source(problem: msda_cuda.Problem) -> str:
    """What `msda_cuda.source` is, for a C++ compiler."""
    text = msda_cuda.source(problem)
    instructions = (msda_cuda._FOLDER / "instructions.cuh").read_text()
    text = text.replace(instructions, "").replace("extern __shared__ int shared[];", "int *shared = dynamic_shared;")
    cases = "\n".join(
        f'if (!strcmp(name, "{name}")) launch({name}, {{x, y, z}}, threads, shared_bytes, arguments);'
        for name in _KERNELS
    )
    signature = "const char *name, u32 x, u32 y, u32 z, u32 threads, u32 shared_bytes, const char *arguments"
    return f'{_HEADER.read_text()}\n{text}\nextern "C" void emulate({signature}) {{\n{cases}\n}}\n'


class Module:
    """In place of `_nvrtc.Module`; libraries are built once in `folder`."""

    def __init__(self, problem: msda_cuda.Problem, folder: Path):
        text = source(problem)
        library = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
        if not library.exists():
            file = library.with_suffix(".cpp")
            file.write_text(text)
            # No contraction into fused multiply-adds, so that every machine rounds alike.
            flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"]
            run = subprocess.run(["g++", *flags, file, "-o", library], capture_output=True, text=True)
            assert run.returncode == 0, run.stderr[:3000]
        self._emulate = ctypes.CDLL(str(library)).emulate

    def kernel(self, name: str, layout: str, *, dynamic: bool = False):
        packed = struct.Struct(layout)

        def launch(grid, threads, *arguments, shared_bytes=0):
            assert dynamic or shared_bytes == 0
            self._emulate(name.encode(), *grid, threads, shared_bytes, packed.pack(*arguments))

        return launch
