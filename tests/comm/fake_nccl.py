"""What NCCL does for ranks with a GPU each, by Gloo between CPU tensors.

As with NCCL, a collective whose peer is gone ends when the group is aborted or its deadline is over, without saying
anything but in `get_error`, and with whatever was in memory.
"""

from __future__ import annotations

import contextlib
import time
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


class Group:
    def __init__(self, store: Any, rank: int, size: int, deadline_s: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._threads = 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        self.gloo = dist.ProcessGroupGloo(store, rank, size, options)
        self.deadline_s = deadline_s
        self.error = "SUCCESS"
        self.is_aborted = False

    def __getattr__(self, name: str) -> Any:
        def start(*args: Any) -> SimpleNamespace:
            if self.is_aborted:
                raise RuntimeError("NCCL communicator was aborted")
            work = getattr(self.gloo, name)(*args)
            return SimpleNamespace(wait=lambda: self._wait(work))

        return start

    def _wait(self, work: Any) -> None:
        until_s = time.monotonic() + self.deadline_s
        while True:
            try:
                work.wait(TURN)
                return
            except RuntimeError:
                if self.is_aborted or time.monotonic() > until_s or work.is_completed():
                    self.error = "COMM_ERROR"
                    return

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.error)

    def abort(self) -> None:
        self.is_aborted = True
        for peer in range(self.gloo.size()):
            if peer != self.gloo.rank():
                with contextlib.suppress(RuntimeError):
                    self.gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, BREAK_TAG).wait(timedelta(milliseconds=1))


def use(patch: pytest.MonkeyPatch) -> None:
    """Device meshes are between CPU tensors from now on."""

    def make(mesh: DeviceMesh, store: Any) -> Group:
        return Group(store, mesh.members.rank, mesh.members.size, mesh.members.deadline_s)

    patch.setattr(DeviceMesh, "_open", make)
    patch.setattr(DeviceMesh, "_connect_devices", lambda mesh, group: None)
    patch.setattr(backends, "comm_stream", lambda device: CommStream())
