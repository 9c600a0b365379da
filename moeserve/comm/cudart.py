"""The few calls of the CUDA runtime that torch does not offer: memory that other processes may open."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from moeserve.errors import ConfigError

LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
WHOLE = 2 << 20  # smaller allocations may share a block with others, which would be opened with them


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t; calls take it by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class CudaRuntime:
    """The CUDA runtime library that torch has loaded. Errors are ConfigErrors with its own message and a remedy."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "").partition(".")[0]
        try:
            self._lib = ctypes.CDLL(f"libcudart.so.{major}")  # the same one that torch has loaded
        except OSError as error:
            raise ConfigError(
                f"cuda_ipc needs the CUDA runtime that torch {torch.__version__} uses ({error}); install a wheel of "
                "torch for CUDA, or put libcudart on LD_LIBRARY_PATH"
            ) from None
        address = ctypes.c_void_p
        self._lib.cudaMalloc.argtypes = (ctypes.POINTER(address), ctypes.c_size_t)
        self._lib.cudaMemset.argtypes = (address, ctypes.c_int, ctypes.c_size_t)
        self._lib.cudaIpcGetMemHandle.argtypes = (ctypes.POINTER(IpcHandle), address)
        self._lib.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(address), IpcHandle, ctypes.c_uint)
        self._lib.cudaIpcCloseMemHandle.argtypes = (address,)
        self._lib.cudaGetErrorString.restype = ctypes.c_char_p

    def _call(self, remedy: str, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            self._lib.cudaGetLastError()  # else the next launch would report it again
            words = self._lib.cudaGetErrorString(code).decode()
            raise ConfigError(f"{name}: {words} (CUDA error {code}); {remedy}")

    def allocate(self, num_bytes: int) -> int:
        """Returns the address of zeroed memory on the current device, which lives as long as the process."""
        address, whole = ctypes.c_void_p(), -(-num_bytes // WHOLE) * WHOLE
        remedy = f"{whole >> 20} MiB are asked for; lower --memory-utilization, or --max-num-batched-tokens"
        torch.cuda.empty_cache()  # gives back what torch holds in reserve
        self._call(remedy, "cudaMalloc", ctypes.byref(address), whole)
        self._call(remedy, "cudaMemset", address, 0, whole)
        torch.cuda.synchronize()
        return int(address.value or 0)

    def handle(self, address: int) -> bytes:
        """Returns what another process needs to `open` memory that `allocate` returned."""
        found = IpcHandle()
        remedy = "this system lends no device memory between processes (WSL, some virtual GPUs); use another --all2all"
        self._call(remedy, "cudaIpcGetMemHandle", ctypes.byref(found), address)
        return bytes(found.bytes)

    def open(self, handle: bytes, remedy: str) -> int:
        """Maps another process's memory and returns its address here. remedy: for the error message."""
        address, asked = ctypes.c_void_p(), IpcHandle.from_buffer_copy(handle)
        self._call(remedy, "cudaIpcOpenMemHandle", ctypes.byref(address), asked, LAZY_PEER_ACCESS)
        return int(address.value or 0)

    def close(self, address: int) -> None:
        """Unmaps memory that `open` has mapped."""
        self._call("the device failed before; start again", "cudaIpcCloseMemHandle", address)


class _Array:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Returns a uint8 tensor [num_bytes] over device memory that it does not own."""
    return torch.as_tensor(_Array(address, num_bytes), device=device)
