"""The mesh of Gloo connections: messages, deadlines, leaving, dying."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch import Tensor

from moeserve.comm.gloo import Mesh
from moeserve.comm.members import Members
from moeserve.errors import ConfigError, PeerLost
from tests.comm.ranks import members_of, together
from tests.ports import free_port
from tests.warm import Program


def connected(members: list[Members], channels: int = 1) -> list[Mesh]:
    meshes = [Mesh(each, channels, "test") for each in members]
    together([mesh.connect for mesh in meshes])
    return meshes


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def swap(mesh: Mesh, ubatch: int = 0, deadline_s: float | None = None) -> dict[int, Tensor]:
    """Everyone sends its rank to everyone, rank r in r + 1 bytes."""
    me = mesh.members.rank
    size = mesh.members.size
    others = [rank for rank in range(size) if rank != me]
    taken = {rank: torch.zeros(size + 3, dtype=torch.uint8) for rank in others}
    exchange = mesh.channel(ubatch).post(
        taken, {rank: numbers(*[me + 1] * (me + 1)) for rank in others}
    )
    exchange.wait(deadline_s)
    return taken


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_messages_of_any_size_up_to_the_buffers(size: int) -> None:
    meshes = connected(members_of(size), channels=2)

    def run(mesh: Mesh) -> None:
        for ubatch in (0, 1, 0, 0, 1):
            for rank, taken in swap(mesh, ubatch).items():
                assert taken.tolist() == [rank + 1] * (rank + 1) + [0] * (size + 2 - rank)

    together([lambda mesh=mesh: run(mesh) for mesh in meshes])  # type: ignore[misc]
    for mesh in meshes:
        mesh.close()
        with pytest.raises(PeerLost, match="left the group"):
            mesh.channel(0)


def test_arrival_is_stamped_when_it_happens() -> None:
    """While two micro-batches take turns, a late wait does not make a message late."""
    meshes = connected(members_of(2), channels=2)

    def run(mesh: Mesh) -> float:
        swap(mesh, 0)
        peer = 1 - mesh.members.rank
        exchange = mesh.channel(1).post({peer: numbers(0)}, {peer: numbers(1)})
        time.sleep(0.3)
        now = time.monotonic_ns()
        exchange.wait()
        return (now - exchange.arrived_ns) / 1e9

    assert min(together([lambda mesh=mesh: run(mesh) for mesh in meshes])) > 0.05  # type: ignore[misc]
    for mesh in meshes:
        mesh.close()


def test_what_is_sent_first_lands_first() -> None:
    """Whatever the channel: rows that are needed first do not share the link with later ones."""
    meshes = connected(members_of(2), channels=2)
    size = 32 << 20

    def run(mesh: Mesh) -> None:
        peer = 1 - mesh.members.rank
        large = torch.zeros(size, dtype=torch.uint8)
        small = numbers(0)
        receives = [
            mesh.channel(ubatch).expect([(peer, tensor)])
            for ubatch, tensor in enumerate((large, small))
        ]
        swap(mesh)  # both are ready for both messages
        receives[0].send({peer: torch.ones(size, dtype=torch.uint8)}, lambda: None)
        receives[1].send({peer: numbers(1)}, lambda: None)
        receives[1].wait()
        assert small.tolist() == [1]
        assert large.min() == 1
        receives[0].wait()

    for _ in range(3):
        together([lambda mesh=mesh: run(mesh) for mesh in meshes])  # type: ignore[misc]
    for mesh in meshes:
        mesh.close()


def test_messages_of_one_exchange_land_in_order() -> None:
    meshes = connected(members_of(2))

    def run(mesh: Mesh) -> None:
        peer = 1 - mesh.members.rank
        taken = [torch.zeros(size, dtype=torch.uint8) for size in (3, 5)]
        released: list[int] = []
        exchange = mesh.channel(0).expect([(peer, tensor) for tensor in taken])
        for size in (3, 5):
            exchange.send({peer: numbers(*[size] * size)}, lambda size=size: released.append(size))  # type: ignore[misc]
        exchange.wait()
        assert [tensor.tolist() for tensor in taken] == [[3] * 3, [5] * 5]
        assert released == []  # the peer may not have them yet
        swap(mesh)
        assert released == [3, 5]

    together([lambda mesh=mesh: run(mesh) for mesh in meshes])  # type: ignore[misc]
    for mesh in meshes:
        mesh.close()


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_that_never_comes_is_named(absent: int) -> None:
    members = members_of(3, deadline_s=3.0)

    def join(rank: int) -> tuple[int, ...]:
        with pytest.raises(PeerLost) as caught:
            Mesh(members[rank], 1, "test").connect()
        return caught.value.missing

    assert together([lambda r=r: join(r) for r in range(3) if r != absent]) == [(absent,)] * 2  # type: ignore[misc]


def test_a_silent_rank_is_named_by_all() -> None:
    meshes = connected(members_of(3))

    def run(mesh: Mesh) -> tuple[int, ...]:
        with pytest.raises(PeerLost, match=r"rank 1 was silent for 1 s") as caught:
            swap(mesh, deadline_s=1.0)
        with pytest.raises(PeerLost):  # the group is broken for good
            swap(mesh)
        return caught.value.missing

    assert together([lambda: run(meshes[0]), lambda: run(meshes[2])]) == [(1,), (1,)]
    meshes[1].close()


@pytest.mark.parametrize("watched", [False, True])
def test_leaving_wakes_everyone(watched: bool) -> None:
    meshes = connected(members_of(2), channels=2)
    if watched:
        together([lambda mesh=mesh: swap(mesh, 1) for mesh in meshes])  # type: ignore[misc]
    threading.Timer(0.3, meshes[0].close).start()
    start = time.monotonic()

    def run(mesh: Mesh) -> tuple[int, ...]:
        exchange = mesh.channel(0).post({1 - mesh.members.rank: numbers(0)}, {})
        with pytest.raises(PeerLost) as caught:
            exchange.wait()
        return caught.value.missing

    assert together([lambda mesh=mesh: run(mesh) for mesh in meshes]) == [(), (0,)]  # type: ignore[misc]
    assert time.monotonic() - start < 15
    meshes[1].close()


def test_leaving_while_another_ubatch_begins_to_wait() -> None:
    """An exchange that is handed over after the end is no longer watched."""
    meshes = connected(members_of(2), channels=2)
    for ubatch in (1, 0, 1):
        together([lambda mesh=mesh, ubatch=ubatch: swap(mesh, ubatch) for mesh in meshes])  # type: ignore[misc]
    exchange = meshes[0].channel(0).expect([(1, numbers(0))])
    meshes[0].close()
    exchange.receive_in_background()
    began_s = time.monotonic()
    with pytest.raises(PeerLost):
        exchange.wait()
    assert time.monotonic() - began_s < 15
    meshes[1].close()


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("step", [1, 2])
def test_who_leaves_after_another_wakes_the_third(first: int, step: int) -> None:
    meshes = connected(members_of(3))
    second = (first + step) % 3
    third = 3 - first - second
    meshes[first].close()
    time.sleep(0.05)  # its connections are closed at the others too
    exchange = meshes[third].channel(0).post({second: torch.zeros(4, dtype=torch.uint8)}, {})
    began_s = time.monotonic()
    threading.Timer(0.1, meshes[second].close).start()
    with pytest.raises(PeerLost):
        exchange.wait()
    assert time.monotonic() - began_s < 15


def test_leaving_ends_a_join() -> None:
    for rank in (0, 1):
        mesh = Mesh(members_of(2)[rank], 1, "test")
        threading.Timer(0.2, mesh.close).start()
        with pytest.raises(PeerLost, match="left the group"):
            mesh.connect()


def test_epochs_follow_each_other_at_one_store() -> None:
    first = members_of(2)
    for epoch in (1, 2, 3):
        meshes = connected([dataclasses.replace(each, epoch=epoch) for each in first])
        together([lambda mesh=mesh: swap(mesh) for mesh in meshes])  # type: ignore[misc]
        for mesh in meshes:
            mesh.close()


def test_ranks_that_differ_do_not_join() -> None:
    meshes = [Mesh(each, 1, "test", f"width {each.rank}") for each in members_of(2)]

    def join(mesh: Mesh) -> str:
        with pytest.raises(ConfigError) as caught:
            mesh.connect()
        return str(caught.value)

    assert (
        "has width 0, rank 1 has width 1"
        in together([lambda mesh=mesh: join(mesh) for mesh in meshes])[0]
    )  # type: ignore[misc]


def test_loopback_is_no_address_for_several_machines() -> None:
    """Unless it was given as such: then all machines are this one."""
    store = f"localhost:{free_port()}"
    members = [dataclasses.replace(each, host_of=("a", "b"), store=store) for each in members_of(2)]

    def join(each: Members) -> None:
        with pytest.raises(ConfigError, match="other machines cannot reach"):
            Mesh(each, 1, "test").connect()

    together([lambda each=each: join(each) for each in members])  # type: ignore[misc]


CHILD = """
import sys, msgspec, torch, time
from moeserve.comm.gloo import Mesh
from moeserve.comm.members import Members
members, sends, receives = msgspec.json.decode(sys.argv[1], type=tuple[Members, int, int])
mesh = Mesh(members, 1, "test")
mesh.connect()
taken = torch.zeros(receives, dtype=torch.uint8)
exchange = mesh.channel(0).post({0: taken}, {0: torch.ones(sends, dtype=torch.uint8)})
print("here", flush=True)
exchange.wait()
time.sleep(60)
"""
LARGE = 1 << 28  # takes 50 ms to arrive, at the least


@contextlib.contextmanager
def other_rank(members: Members, sends: int = 1, receives: int = 1) -> Iterator[Program]:
    """A process that posts one exchange with rank 0."""
    setup = msgspec.json.encode((members, sends, receives)).decode()
    with Program(CHILD, setup) as child:
        yield child


def said_here(child: Program) -> bool:
    return child.stdout.readline() == "here\n"


def test_a_killed_process_is_named_at_once() -> None:
    members = members_of(2)
    with other_rank(members[1]) as child:
        mesh = Mesh(members[0], 1, "test")
        mesh.connect()
        swap(mesh)
        assert said_here(child)
        threading.Timer(0.2, os.kill, (child.pid, signal.SIGKILL)).start()
        start = time.monotonic()
        with pytest.raises(PeerLost, match="rank 1 is gone") as caught:
            swap(mesh)
        assert caught.value.missing == (1,)
        assert time.monotonic() - start < 15
        mesh.close()


@pytest.mark.parametrize("way", ["receives", "sends"])
def test_a_process_killed_in_the_middle_of_a_message(way: str) -> None:
    """Gloo wakes nobody then.

    The vote notices, leaves, and starts the next epoch at the same store.
    """
    members = members_of(2, deadline_s=20.0)
    large = torch.zeros(LARGE, dtype=torch.uint8)
    small = numbers(0)
    taken, sent = (large, small) if way == "receives" else (small, large)
    with other_rank(members[1], sends=len(taken), receives=len(sent)) as child:
        mesh = Mesh(members[0], 1, "test")
        mesh.connect()
        assert said_here(child)
        exchange = mesh.channel(0).post({1: taken}, {1: sent})
        time.sleep(0.01)
        child.kill()
        threading.Timer(0.3, mesh.close).start()
        start = time.monotonic()
        with pytest.raises(PeerLost):
            exchange.wait() if way == "receives" else swap(mesh)
        assert time.monotonic() - start < 15
    again = connected([dataclasses.replace(each, epoch=2) for each in members])
    together([lambda mesh=mesh: swap(mesh) for mesh in again])  # type: ignore[misc]
    for mesh in again:
        mesh.close()
