"""CUDA C++ compiled at run time, by the NVRTC that torch's CUDA wheels bring: no toolkit, no host compiler."""

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch

from deformops_models.kernels._driver import call, loading, shared_memory

_STATIC_SHARED, _MAX_DYNAMIC_SHARED = 1, 8  # CU_FUNC_ATTRIBUTE_*_SIZE_BYTES
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_*


@cache
def _nvrtc() -> ctypes.CDLL:
    """Raises OSError where there is none."""
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        folders = Path(torch.__file__).parents[1].glob("nvidia/*/lib")
        found = next((folder / name for folder in folders if (folder / name).exists()), None)
        if found is None:
            raise
        return ctypes.CDLL(str(found))


@cache
def problem() -> str | None:
    """Why nothing can be compiled in this process, or None."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        _nvrtc()
    except OSError as error:
        return f"NVRTC is not installed ({error}): pip install nvidia-cuda-nvrtc"
    return None


def compile_source(source: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """Machine code of `source` for an architecture such as "sm_90"; a RuntimeError holds the compiler's log."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    arguments = [f"--gpu-architecture={architecture}", "--std=c++17", *options]
    flags = (ctypes.c_char_p * len(arguments))(*(a.encode() for a in arguments))
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"msda.cu", 0, None, None):
        raise RuntimeError("NVRTC cannot begin to compile: it is out of memory")
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(arguments), flags)
        if failed:
            raise RuntimeError(
                f"NVRTC cannot compile the kernels:\n{_read(nvrtc, 'ProgramLog', program).decode().rstrip(chr(0))}"
            )
        return _read(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _compiled(source: str, architecture: str) -> bytes:
    """As `compile_source`, kept in Triton's cache folder between processes."""
    from triton.runtime.cache import get_cache_manager

    version = str(torch.version.cuda)
    cache_manager = get_cache_manager(sha256(f"{version}\n{architecture}\n{source}".encode()).hexdigest())
    path = cache_manager.get_file("msda.cubin")
    if path is not None:
        return Path(path).read_bytes()
    binary = compile_source(source, architecture)
    cache_manager.put(binary, "msda.cubin", binary=True)
    return binary


class Module:
    """The kernels of one source on one device, which is current when they are loaded and launched."""

    def __init__(self, source: str, device: int):
        major, minor = torch.cuda.get_device_capability(device)
        self.device = device
        self._binary = _compiled(source, f"sm_{major}{minor}")
        self._module = ctypes.c_void_p()
        with loading():
            call(device, "cuModuleLoadData", ctypes.byref(self._module), self._binary)

    def kernel(self, name: str, layout: str, *, dynamic: bool = False) -> "Kernel":
        """A kernel by its name.

        Args:
            layout: of the arguments, as the module struct writes it: P pointer, i int32, f float32, 8s eight bytes.
            dynamic: whether it is launched with dynamic shared memory, of which it then may have all there is.
        """
        function, static = ctypes.c_void_p(), ctypes.c_int()
        with loading():
            call(self.device, "cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            if dynamic:
                call(self.device, "cuFuncGetAttribute", ctypes.byref(static), _STATIC_SHARED, function)
                most = shared_memory(self.device) - static.value
                call(self.device, "cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, most)
        return Kernel(name, function, struct.Struct(layout), self.device)


class Kernel:
    """Called as kernel(grid, threads, arguments): pointers as numbers, 0 for none."""

    def __init__(self, name: str, function: ctypes.c_void_p, layout: struct.Struct, device: int):
        self.name, self._function, self._layout, self._device = name, function, layout, device
        self._size = ctypes.c_size_t(layout.size)

    def __call__(self, grid: tuple[int, int, int], threads: int, *arguments: float, shared_bytes: int = 0) -> None:
        buffer = ctypes.create_string_buffer(self._layout.pack(*arguments), self._layout.size)
        extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(buffer), _BUFFER_SIZE, ctypes.addressof(self._size), 0
        )
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._device))
        try:
            call(
                self._device, "cuLaunchKernel", self._function, *grid, threads, 1, 1, shared_bytes, stream, None, extra
            )
        except RuntimeError as error:
            raise RuntimeError(f"{self.name}: {error}") from None
