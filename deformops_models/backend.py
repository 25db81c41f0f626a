"""Which implementation runs: the kernels in CUDA C++, those in Triton, or plain PyTorch."""

import importlib.util
import os
import platform
import shutil
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cache

import torch

#: How often each path ran in this process: "msda_forward" and "msda_backward" count kernel launches through the
#: operators, "upstream_forward" counts patched modules that ran upstream's own forward.
call_counts: Counter[str] = Counter()

_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Backend(str, Enum):
    """An implementation of the operators."""

    CUDA = "cuda"
    TRITON = "triton"
    EAGER = "eager"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Resolution:
    """What would run, and for every other backend the reason why it would not."""

    backend: Backend
    reasons: dict[Backend, str]


def as_backend(backend: Backend | str | None) -> Backend | None:
    """Turns a name into a `Backend`; None stays None. Raises ValueError for an unknown name."""
    try:
        return None if backend is None else Backend(backend)
    except ValueError:
        names = ", ".join(repr(str(b)) for b in Backend)
        raise ValueError(f"backend={backend!r} is not known: use None, {names}") from None


def interpreting() -> bool:
    """True when TRITON_INTERPRET=1 was set before the first import, so that the kernels run on CPU tensors."""
    return _INTERPRETING


@cache
def triton_problem() -> str | None:
    """Why Triton cannot run at all in this process, or None."""
    if platform.system() != "Linux":
        return f"Triton runs on Linux, this is {platform.system()}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed: pip install triton"
    return None


@cache
def compiler() -> str | None:
    """Path of the C compiler with which Triton builds its launcher on first use, or None."""
    return next((path for c in (os.environ.get("CC"), "gcc", "clang", "cc") if c and (path := shutil.which(c))), None)


@cache
def _device_problem(device_type: str, index: int | None) -> str | None:
    if problem := triton_problem():
        return problem
    if interpreting():
        return None
    if device_type != "cuda":
        return f"tensors are on {device_type}; the kernels need CUDA"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(index)
        if torch.version.hip is None and major < 7:
            return f"compute capability {major}.{minor} is below the 7.0 that Triton supports"
    if compiler() is None:
        return "no C compiler found, which Triton needs at first launch: install gcc or set CC"
    return None


@cache
def cuda_problem(index: int | None) -> str | None:
    """Why the kernels in CUDA C++ cannot run on a CUDA device, or None."""
    if platform.system() != "Linux" or torch.version.hip is not None:
        return "the CUDA kernels run on Linux with NVIDIA GPUs"
    if interpreting():
        return "TRITON_INTERPRET=1 runs Triton's kernels in its interpreter"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        return f"compute capability {major}.{minor} is below the 8.0 of the CUDA kernels' instructions"
    from deformops_models.kernels import _nvrtc

    return _nvrtc.problem()


def _problem(backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in _KERNEL_DTYPES:
        return f"{dtype} is not supported by the kernels: use float32, float16 or bfloat16"
    # A tracer cannot follow the questions to the operating system; a kernel that cannot run raises when it is called.
    if torch.compiler.is_compiling():
        return None
    if backend is Backend.TRITON:
        return _device_problem(device.type, device.index)
    if device.type != "cuda":
        return f"tensors are on {device.type}; the CUDA kernels need an NVIDIA GPU"
    return cuda_problem(device.index)


def resolve(device: torch.device | str, dtype: torch.dtype, backend: Backend | str | None = None) -> Resolution:
    """Says which backend runs for tensors of this device and dtype, and why the others do not.

    With `backend=None`, CUDA tensors run the kernels in CUDA C++ from compute capability 8.0 on if NVRTC is installed,
    else Triton's; CPU tensors and float64 run plain PyTorch. Shapes that the CUDA kernels do not take, such as heads of
    24 channels, run Triton's.

    Raises:
        RuntimeError: the demanded backend, or every kernel on a CUDA tensor, cannot run. The text says why and what to
            do.
        ValueError, TypeError: `backend` is unknown, `dtype` is no dtype.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r}: a torch.dtype is expected")
    device, demanded = torch.device(device), as_backend(backend)
    if demanded is Backend.EAGER:
        return Resolution(demanded, _reasons(demanded, f"backend='{demanded}' was asked for"))
    problems = {b: _problem(b, device, dtype) for b in (Backend.CUDA, Backend.TRITON)}
    if demanded is not None:
        if problems[demanded]:
            raise RuntimeError(f"backend='{demanded}' cannot run: {problems[demanded]}")
        return Resolution(demanded, _reasons(demanded, f"backend='{demanded}' was asked for"))
    if dtype == torch.float64 or device.type != "cuda":
        plain = "CPU tensors run the plain path unless backend='triton' is asked for"
        return Resolution(Backend.EAGER, {b: problem or plain for b, problem in problems.items()})
    chosen = next((b for b, problem in problems.items() if not problem), None)
    if chosen is None:
        raise RuntimeError(
            f"the Triton kernel cannot run: {problems[Backend.TRITON]}, nor the CUDA kernel: "
            f"{problems[Backend.CUDA]}. Pass backend='eager' for plain PyTorch"
        )
    reasons = _reasons(chosen, "CUDA tensors run the kernels")
    if chosen is Backend.CUDA:
        reasons[Backend.TRITON] = problems[Backend.TRITON] or "it runs what the CUDA kernels do not take"
    else:
        reasons[Backend.CUDA] = problems[Backend.CUDA]
    return Resolution(chosen, reasons)


def _reasons(chosen: Backend, reason: str) -> dict[Backend, str]:
    # Named one by one: the tracer of some torch versions cannot iterate over a class.
    every = (Backend.CUDA, Backend.TRITON, Backend.EAGER)
    return {backend: reason for backend in every if backend is not chosen}
