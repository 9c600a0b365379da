"""The requests to torch's NCCL, and the handling of its errors.

The collectives themselves run over Gloo in the tests of their users (tests/moe/contract,
test_tensor.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeserve.comm import nccl
from moeserve.comm.nccl import HANDLING, DeviceMesh, why_nccl_unsupported
from moeserve.comm.store import dist
from moeserve.errors import PeerLost
from tests.comm.ranks import members_of, together


class Nccl:
    """`ProcessGroupNCCL`: who was made how, and who was aborted."""

    made: list[Nccl]
    handling: str | None
    slow = False
    broken = ""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(max_ctas=-1)
            self._timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.options = options
        self.ranks = (rank, size)
        self.aborted = threading.Event()
        self.error = "SUCCESS"
        self.device: Any = None
        type(self).handling = os.environ.get(HANDLING)
        type(self).made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.device = device
        if self.broken:
            while (
                len(self.made) < self.ranks[1]
            ):  # the first that fails must not end the others' way here
                time.sleep(0.01)
            raise RuntimeError(self.broken)
        if self.slow and not self.aborted.wait(10):
            raise AssertionError("nobody came, and nobody aborted it")

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.error)

    def abort(self) -> None:
        self.aborted.set()
        raise RuntimeError("ncclCommAbort took too long")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Nccl]]:
    kind = type("Fake", (Nccl,), {"made": []})
    monkeypatch.setattr(
        nccl, "dist", SimpleNamespace(ProcessGroupNCCL=kind, PrefixStore=dist.PrefixStore)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.delenv(HANDLING, raising=False)
    yield kind
    os.environ.pop(HANDLING, None)


def connected(max_sms: int | None = None) -> list[DeviceMesh]:
    meshes = [
        DeviceMesh(each, 2, "test", max_sms=max_sms) for each in members_of(2, deadline_s=7.0)
    ]
    together([mesh.connect for mesh in meshes])
    return meshes


@pytest.mark.parametrize("max_sms", [None, 12])
def test_what_it_is_asked_for(max_sms: int | None, fake: type[Nccl]) -> None:
    meshes = connected(max_sms)
    assert sorted(group.ranks for group in fake.made) == [(0, 2), (1, 2)]
    for group in fake.made:
        assert group.options._timeout.total_seconds() == 7
        assert group.options.config.max_ctas == (-1 if max_sms is None else 12)
        assert group.options.is_high_priority_stream
        assert group.device == torch.device("cuda", 3)
    assert fake.handling == "2", "an error must not take the process down"
    for mesh in meshes:
        mesh.check()
        mesh.leave()
        mesh.leave()
    assert all(group.aborted.is_set() for group in fake.made)
    for mesh in meshes:
        with pytest.raises(PeerLost, match="left the group"):
            mesh.check()


def test_a_users_own_way_to_handle_errors_stays(
    fake: type[Nccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HANDLING, "1")
    for mesh in connected():
        mesh.close()
    assert fake.handling == "1"


def test_what_came_from_a_peer_that_is_gone_is_not_believed(fake: type[Nccl]) -> None:
    meshes = connected()
    fake.made[0].error = "TIMEOUT"
    mesh = meshes[fake.made[0].ranks[0]]
    with pytest.raises(PeerLost, match="NCCL gave up on a rank: TIMEOUT"):
        mesh.check()
    assert fake.made[0].aborted.wait(10), "whoever waits for its kernels goes on"
    assert mesh.closed
    for one in meshes:
        one.leave()


def test_a_loss_is_told_before_the_graphs_are_dropped(
    fake: type[Nccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborting waits for them, and leaving for aborting."""
    monkeypatch.setattr(nccl, "ABORT_TIMEOUT_S", 30.0)
    dropped, (mesh, other) = threading.Event(), connected()
    group: Any = mesh._nccl

    def abort() -> None:
        assert dropped.wait(30)
        group.aborted.set()

    group.abort = abort
    group.error = "TIMEOUT"
    began_s = time.monotonic()
    with pytest.raises(PeerLost, match="NCCL gave up on a rank: TIMEOUT"):
        mesh.check()
    assert time.monotonic() - began_s < 15
    assert not group.aborted.is_set()
    dropped.set()
    mesh.leave()
    assert group.aborted.is_set()
    other.leave()


def test_leaving_ends_a_connection_that_is_being_made(fake: type[Nccl]) -> None:
    fake.slow = True
    meshes = [DeviceMesh(each, 1, "test") for each in members_of(2)]

    def leave() -> None:
        while len(fake.made) < 2:
            time.sleep(0.01)
        for mesh in meshes:
            mesh.close()

    def connect(mesh: DeviceMesh) -> None:
        with pytest.raises(PeerLost):
            mesh.connect()

    together([leave, *(lambda mesh=mesh: connect(mesh) for mesh in meshes)])  # type: ignore[misc]


def test_why_it_does_not_connect(fake: type[Nccl]) -> None:
    fake.broken = "ncclInvalidUsage: Duplicate GPU detected"
    meshes = [DeviceMesh(each, 1, "test") for each in members_of(2)]

    def connect(mesh: DeviceMesh) -> None:
        with pytest.raises(PeerLost, match=r"NCCL did not connect the ranks: .*Duplicate GPU"):
            mesh.connect()

    together([lambda mesh=mesh: connect(mesh) for mesh in meshes])  # type: ignore[misc]
    assert all(group.aborted.wait(10) for group in fake.made)


def test_one_gpu_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has no NCCL" in str(why_nccl_unsupported(2)) or dist.is_nccl_available()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert why_nccl_unsupported(2) is None
    assert why_nccl_unsupported(3) == "NCCL takes one GPU per rank, and 3 ranks share 2 here"
