"""The few calls of the CUDA driver that torch has no word for."""

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache

import torch

_INVALID_CONTEXT = 201
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes a device current, if it is not."""
    other = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if other else contextlib.nullcontext()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Lets this thread load kernels while a CUDA graph is captured, which would end the capture otherwise."""
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    _check("cuThreadExchangeStreamCaptureMode", _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@cache
def shared_memory(device: int) -> int:
    """Bytes of shared memory that a block may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def call(device: int, name: str, *arguments) -> None:
    """Calls the driver. A thread that has not used the device yet, such as autograd's, gets torch's context first."""
    function = getattr(_driver(), name)
    result = function(*arguments)
    if result == _INVALID_CONTEXT:
        _check("cuCtxSetCurrent", _driver().cuCtxSetCurrent(_context(device)))
        result = function(*arguments)
    _check(name, result)


@cache
def _context(device: int) -> ctypes.c_void_p:
    """The primary context, which torch uses too."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _check("cuDeviceGet", _driver().cuDeviceGet(ctypes.byref(number), device))
    _check("cuDevicePrimaryCtxRetain", _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
    return context


def _check(name: str, result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"{name}: CUDA error {result}, {(text.value or b'unknown').decode()}")
