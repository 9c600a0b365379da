"""NCCL for ranks with a GPU each, played by Gloo between CPU tensors.

On a fake CUDA device (tests/runner/fake_cuda.py) collectives run on a stream of their own, and
graphs record them. Ranks that call different collectives fail, and aborting waits for the remaining
graphs.

As with NCCL, a collective whose peer is gone ends when the group is aborted or its deadline passes.
The only sign of it is `get_error`, and the output is whatever was in memory.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeserve.comm.gloo import BREAK_TAG
from moeserve.comm.nccl import DeviceMesh
from moeserve.comm.store import dist
from moeserve.moe.all2all import nccl as backends
from moeserve.moe.streams import CommStream

TURN = timedelta(milliseconds=100)
ABORTS_S = 10.0


class Group:
    """One rank's process group.

    `key` is the same on all ranks. `device` returns the fake CUDA device, if there is one.
    """

    # (group, number of the collective) -> name and bytes on the first rank to arrive.
    called: dict[tuple[str, int], str]

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        deadline_s: float,
        key: str = "",
        device: Callable[[], Any] | None = None,
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._threads = 1
        options._timeout = timedelta(seconds=max(deadline_s + 1, ABORTS_S))  # its destructor waits
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)
        ]
        self.gloo = dist.ProcessGroupGloo(store, rank, size, options)
        self.deadline_s = deadline_s
        self.error = "SUCCESS"
        self.is_aborted = False
        self.key = key
        self.device = device
        self.number = 0
        self.stream: Any = None
        self.recorded_in: weakref.WeakSet[Any] = weakref.WeakSet()

    def __getattr__(self, name: str) -> Any:
        def start(*args: Any) -> SimpleNamespace:
            if self.is_aborted:
                raise RuntimeError("NCCL communicator was aborted")
            if self.device is not None:
                return self._on_device(name, *args)
            work = getattr(self.gloo, name)(*args)
            return SimpleNamespace(wait=lambda: self._wait(work))

        return start

    def _on_device(
        self, name: str, out: torch.Tensor, mine: torch.Tensor, *splits: Any
    ) -> SimpleNamespace:
        assert self.device is not None
        device = self.device()
        here = device.current_stream()
        stream = self.stream or device.Stream()
        self.stream = stream

        def run() -> None:
            self.number += 1
            ours = name if splits else f"{name} of {mine.nbytes} bytes"
            theirs = self.called.setdefault((self.key, self.number), ours)
            assert ours == theirs, (
                f"collective {self.number} is {theirs} on one rank and {ours} on another"
            )
            self._wait(getattr(self.gloo, name)(out, mine, *splits))

        if device.capturing is not None:
            self.recorded_in.add(device.capturing)
        stream.wait_stream(here)
        with device.stream(stream):
            device.collective(run, mine, out, name)
        return SimpleNamespace(wait=lambda: device.current_stream().wait_stream(stream))

    def _wait(self, work: Any) -> None:
        until_s = time.monotonic() + self.deadline_s
        while True:
            try:
                work.wait(TURN)
                return
            except RuntimeError:
                if work.is_completed():  # it may have succeeded just after the timeout
                    with contextlib.suppress(RuntimeError):
                        work.wait()
                        return
                if self.is_aborted or time.monotonic() > until_s or work.is_completed():
                    self.error = "COMM_ERROR"
                    return

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.error)

    def abort(self) -> None:
        self.is_aborted = True
        until_s = time.monotonic() + ABORTS_S
        while self.recorded_in:
            if time.monotonic() > until_s:
                raise RuntimeError("graphs are left that use this communicator")
            time.sleep(0.01)
        for peer in range(self.gloo.size()):
            if peer != self.gloo.rank():
                with contextlib.suppress(RuntimeError):
                    self.gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, BREAK_TAG).wait(
                        timedelta(milliseconds=1)
                    )


def use(patch: pytest.MonkeyPatch, device: Callable[[], Any] | None = None) -> None:
    """Make device meshes use CPU tensors and this module."""
    patch.setattr(Group, "called", {}, raising=False)

    def make(mesh: DeviceMesh, store: Any) -> Group:
        members = mesh.members
        return Group(store, members.rank, members.size, members.deadline_s, members.store, device)

    patch.setattr(DeviceMesh, "_open", make)
    patch.setattr(DeviceMesh, "_connect_devices", lambda mesh, group: None)
    patch.setattr(backends, "comm_stream", lambda device: CommStream())
