"""The few calls of the CUDA runtime that torch does not offer: memory that other processes may open."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from moeserve.errors import ConfigError

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
WHOLE = 2 << 20  # smaller allocations may share a block with others, which would be opened with them


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t; calls take it by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaRuntime:
    """Raises ConfigError with the runtime's own words; `remedy` of a call says what to do about it."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "").partition(".")[0]
        try:
            self._lib = ctypes.CDLL(f"libcudart.so.{major}")  # torch has loaded it: this finds the same one
        except OSError as error:
            raise ConfigError(
                f"cuda_ipc needs the CUDA runtime that torch {torch.__version__} uses ({error}); install a wheel of "
                "torch for CUDA, or put libcudart on LD_LIBRARY_PATH"
            ) from None
        pointer = ctypes.c_void_p
        calls: dict[str, tuple[Any, ...]] = {
            "cudaMalloc": (ctypes.POINTER(pointer), ctypes.c_size_t),
            "cudaMemset": (pointer, ctypes.c_int, ctypes.c_size_t),
            "cudaIpcGetMemHandle": (ctypes.POINTER(Handle), pointer),
            "cudaIpcOpenMemHandle": (ctypes.POINTER(pointer), Handle, ctypes.c_uint),
            "cudaIpcCloseMemHandle": (pointer,),
        }
        for name, types in calls.items():
            call = getattr(self._lib, name)
            call.argtypes, call.restype = types, ctypes.c_int
        self._lib.cudaGetErrorString.argtypes = (ctypes.c_int,)
        self._lib.cudaGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: Any, remedy: str) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            self._lib.cudaGetLastError()  # else the next launch would report it again
            words = self._lib.cudaGetErrorString(code).decode()
            raise ConfigError(f"{name}: {words} (CUDA error {code}); {remedy}")

    def allocate(self, num_bytes: int) -> int:
        """The address of zeroed memory on the current device, which lives as long as the process."""
        address = ctypes.c_void_p()
        torch.cuda.empty_cache()  # what torch holds in reserve nobody else can have
        whole = -(-num_bytes // WHOLE) * WHOLE
        remedy = f"{whole >> 20} MiB are asked for; lower --memory-utilization, or --max-num-batched-tokens"
        self._call("cudaMalloc", ctypes.byref(address), whole, remedy=remedy)
        self._call("cudaMemset", address, 0, whole, remedy="report this")
        torch.cuda.synchronize()
        return int(address.value or 0)

    def handle(self, address: int) -> bytes:
        """What lets another process open memory that `allocate` returned."""
        found = Handle()
        remedy = "this system lends no device memory between processes (WSL, some virtual GPUs); use another --all2all"
        self._call("cudaIpcGetMemHandle", ctypes.byref(found), address, remedy=remedy)
        return bytes(found.bytes)

    def open(self, handle: bytes, remedy: str) -> int:
        """The address at which another process's memory is from now on seen here."""
        address = ctypes.c_void_p()
        asked = Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), asked, LAZY_PEER_ACCESS, remedy=remedy)
        return int(address.value or 0)

    def close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address, remedy="report this")


class _Array:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] over device memory that somebody else owns."""
    found: Tensor = torch.as_tensor(_Array(address, num_bytes), device=device)
    return found
