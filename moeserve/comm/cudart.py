"""Device memory that other processes can map (CUDA IPC), through calls of the CUDA runtime that
torch does not provide.
"""

import ctypes
import os
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from moeserve.comm.shm import native_module
from moeserve.errors import ConfigError
from moeserve.kernels.exchange import barrier

if TYPE_CHECKING:
    from moeserve._native import Region

LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag
# Allocations are multiples of this. A smaller allocation may share a block of the driver with other
# memory, which peers would then map, too.
BLOCK_BYTES = 2 << 20


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class Offer(msgspec.Struct, frozen=True):
    """The description of a region, with which other processes map it."""

    handle: bytes
    gpu: str  # the UUID of its GPU


class CudaMemory:
    """Regions of device memory that are shared over CUDA IPC.

    The processes must use one GPU, or GPUs with peer access. Errors of the CUDA runtime are raised
    as ConfigError with a remedy. Tests replace this class by one with host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._region: tuple[Tensor, Region] | None = None
        self._mapped_addresses: list[int] = []
        major = (torch.version.cuda or "").partition(".")[0]
        try:
            lib = ctypes.CDLL(f"libcudart.so.{major}")  # the library that torch has loaded
        except OSError as error:
            raise ConfigError(
                f"cuda_ipc needs the CUDA runtime that torch {torch.__version__} uses ({error});"
                " install a wheel of torch for CUDA, or put libcudart on LD_LIBRARY_PATH"
            ) from None
        address = ctypes.c_void_p
        lib.cudaMalloc.argtypes = (ctypes.POINTER(address), ctypes.c_size_t)
        lib.cudaMemset.argtypes = (address, ctypes.c_int, ctypes.c_size_t)
        lib.cudaIpcGetMemHandle.argtypes = (ctypes.POINTER(IpcHandle), address)
        lib.cudaIpcOpenMemHandle.argtypes = (
            ctypes.POINTER(address),
            IpcHandle,
            ctypes.c_uint,
        )
        lib.cudaIpcCloseMemHandle.argtypes = (address,)
        lib.cudaGetErrorString.restype = ctypes.c_char_p
        self._lib = lib

    def allocate(self, num_bytes: int) -> "tuple[Tensor, Region]":
        """Return this rank's region as a uint8 tensor, and shared memory with its `Offer`.

        The region is allocated and zeroed by the first call; later calls return the same one. It is
        freed with the process.
        """
        if self._region is None or self._region[0].nbytes != num_bytes:
            address = ctypes.c_void_p()
            handle = IpcHandle()
            allocated_bytes = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
            remedy = (
                f"{allocated_bytes >> 20} MiB are asked for; lower --memory-utilization, or"
                " --max-num-batched-tokens"
            )
            torch.cuda.empty_cache()  # frees the memory that torch's allocator caches
            self._call(remedy, "cudaMalloc", ctypes.byref(address), allocated_bytes)
            start = int(address.value or 0)
            self._call(remedy, "cudaMemset", start, 0, allocated_bytes)
            torch.cuda.synchronize()
            remedy = "this system lends no device memory between processes (WSL, some virtual GPUs)"
            self._call(
                f"{remedy}; use another --all2all",
                "cudaIpcGetMemHandle",
                ctypes.byref(handle),
                start,
            )
            offer = msgspec.msgpack.encode(Offer(bytes(handle.bytes), _uuid(self.device)))
            region = native_module().Region(len(offer))
            memoryview(region)[:] = offer
            self._region = tensor_at(start, num_bytes, self.device), region
        return self._region

    def open(self, rank: int, fd: int) -> int:
        """Map another rank's region and return its address. fd: shared memory with its `Offer`.

        Raises ConfigError if that GPU cannot be accessed.
        """
        offer = msgspec.msgpack.decode(os.pread(fd, os.fstat(fd).st_size, 0), type=Offer)
        own_gpu = torch.cuda.current_device()
        gpus = {_uuid(index): index for index in range(torch.cuda.device_count())}
        peer_gpu = gpus.get(offer.gpu)
        if peer_gpu is None:
            raise ConfigError(
                f"cuda_ipc: GPU {offer.gpu} of rank {rank} is hidden from this rank; let all"
                " ranks of a host see all their GPUs in CUDA_VISIBLE_DEVICES, each takes its own"
            )
        if peer_gpu != own_gpu and not torch.cuda.can_device_access_peer(own_gpu, peer_gpu):
            raise ConfigError(
                f"cuda_ipc: GPU {own_gpu} cannot reach the memory of GPU {peer_gpu} (rank {rank}):"
                " neither NVLink nor PCIe peer access; use --all2all deepep_v2, or GPUs that"
                " `nvidia-smi topo -p2p r` shows as OK"
            )
        address = ctypes.c_void_p()
        handle = IpcHandle.from_buffer_copy(offer.handle)
        remedy = f"rank {rank}'s memory is out of reach"
        self._call(remedy, "cudaIpcOpenMemHandle", ctypes.byref(address), handle, LAZY_PEER_ACCESS)
        self._mapped_addresses.append(int(address.value or 0))
        return self._mapped_addresses[-1]

    def close(self) -> None:
        """Wait until this rank's device is idle, and unmap the memory that `open` mapped."""
        if self._region is not None:
            torch.cuda.synchronize(self.device)
        while self._mapped_addresses:
            self._call(
                "the device failed before; start again",
                "cudaIpcCloseMemHandle",
                self._mapped_addresses.pop(),
            )

    def pinned_words(self, count: int) -> Tensor:
        """Return int32 zeros in pinned host memory, which host and device both read and write."""
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def launch_barrier(
        self,
        bases_R: Tensor,
        state: Tensor,
        rank: int,
        control: Tensor,
        timeout_s: float,
        call: int,
    ) -> None:
        """Launch the kernel that waits for all ranks; see kernels/exchange.py."""
        barrier(bases_R, state, rank, control, timeout_s, call)

    def _call(self, remedy: str, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            # Clear the error, so that the next launch does not report it.
            self._lib.cudaGetLastError()
            words = self._lib.cudaGetErrorString(code).decode()
            raise ConfigError(f"{name}: {words} (CUDA error {code}); {remedy}")


class _DeviceBytes:
    """Device memory that torch wraps without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return a uint8 tensor [num_bytes] over device memory that it does not own."""
    return torch.as_tensor(_DeviceBytes(address, num_bytes), device=device)


def _uuid(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
