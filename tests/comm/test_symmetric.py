"""Symmetric memory on a fake CUDA runtime: its calls, and the messages of its errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeserve.comm import cudart
from moeserve.comm.cudart import CudaMemory
from moeserve.errors import ConfigError
from moeserve.ops.native import native

pytestmark = pytest.mark.skipif(native() is None, reason="the native module was not built")
ADDRESS = 0x7F00_0000_0000


class Runtime:
    """libcudart, as ctypes calls it: handles are the addresses' bytes, and open somewhere else."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.codes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name == "cudaGetErrorString":
                return b"no luck"
            self.log.append((name, *(a for a in arguments if isinstance(a, int))))
            if name == "cudaMalloc":
                arguments[0]._obj.value = ADDRESS
            elif name == "cudaIpcGetMemHandle":
                ctypes.memmove(arguments[0]._obj.bytes, arguments[1].to_bytes(8, "little"), 8)
            elif name == "cudaIpcOpenMemHandle":
                arguments[0]._obj.value = (
                    int.from_bytes(bytes(arguments[1].bytes)[:8], "little") + 1
                )
            return self.codes.get(name, 0)

        vars(self)[name] = call
        return call


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Two GPUs, of which this process uses the first; neither reaches the other."""
    found = Runtime()
    monkeypatch.setattr(cudart.ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(
        cudart, "tensor_at", lambda address, size, device: torch.empty(size, dtype=torch.uint8)
    )
    gpus = {
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: found.log.append(("synchronize",)),
        "current_device": lambda: 0,
        "device_count": lambda: 2,
        "get_device_properties": lambda i: SimpleNamespace(
            uuid=f"gpu{i if isinstance(i, int) else 0}"
        ),
        "can_device_access_peer": lambda here, there: False,
    }
    for name, call in gpus.items():
        monkeypatch.setattr(torch.cuda, name, call)
    return found


def test_memory_is_made_once_and_opened_by_others(runtime: Runtime) -> None:
    ours, theirs = (CudaMemory(torch.device("cuda")) for _ in range(2))
    region_B, offer = ours.allocate(5 << 20)
    assert ours.allocate(5 << 20)[0] is region_B
    assert [entry for entry in runtime.log if entry[0] == "cudaMalloc"] == [("cudaMalloc", 6 << 20)]
    assert ("cudaMemset", ADDRESS, 0, 6 << 20) in runtime.log
    assert theirs.open(0, offer.fd) == ADDRESS + 1
    theirs.close()
    theirs.close()
    assert runtime.log.count(("cudaIpcCloseMemHandle", ADDRESS + 1)) == 1
    runtime.log.clear()
    ours.close()
    assert runtime.log == [("synchronize",)]


@pytest.mark.parametrize(
    ("gpu", "failing", "why"),
    [
        (
            "gpu1",
            "",
            r"GPU 0 cannot reach the memory of GPU 1 \(rank 3\): .* use --all2all deepep_v2",
        ),
        ("gpu7", "", "GPU gpu7 of rank 3 is hidden from this rank; .* CUDA_VISIBLE_DEVICES"),
        (
            "gpu0",
            "cudaIpcOpenMemHandle",
            r"cudaIpcOpenMemHandle: no luck \(CUDA error 2\); rank 3's memory",
        ),
        ("gpu0", "cudaIpcGetMemHandle", "lends no device memory between processes"),
        ("gpu0", "cudaMalloc", "2 MiB are asked for; lower --memory-utilization"),
    ],
)
def test_memory_out_of_reach(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, gpu: str, failing: str, why: str
) -> None:
    runtime.codes[failing] = 2
    memory = CudaMemory(torch.device("cuda"))

    def offered_and_opened() -> None:
        with monkeypatch.context() as there:
            there.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=gpu))
            _, offer = memory.allocate(1000)
        memory.open(3, offer.fd)

    with pytest.raises(ConfigError, match=why):
        offered_and_opened()
