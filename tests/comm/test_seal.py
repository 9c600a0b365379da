"""Sealed messages between machines: what arrives, what an eavesdropper sees, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.comm.gloo import NUM_TAGS, Mesh
from moeserve.comm.members import Members
from moeserve.comm.seal import HEAD_BYTES, TAG_BYTES, SealedEnvelope
from moeserve.errors import ConfigError, PeerLost
from tests.comm.ranks import members_of, together

HOSTS = ("a", "a", "b")  # ranks 0 and 1 share a machine


def on_hosts(*host_of: str) -> list[Members]:
    return [replace(members, host_of=host_of) for members in members_of(len(host_of))]


def connected(*host_of: str, channels: int = 1) -> list[Mesh]:
    meshes = [Mesh(members, channels, "test", sealed=True) for members in on_hosts(*host_of)]
    together([mesh.connect for mesh in meshes])
    return meshes


def on_all(run: Callable[[Mesh], Any], meshes: list[Mesh]) -> list[Any]:
    try:
        return together([lambda mesh=mesh: run(mesh) for mesh in meshes])  # type: ignore[misc]
    finally:
        for mesh in meshes:
            mesh.close()


def text(rank: int, peer: int, size: int) -> Tensor:
    return torch.full((size,), 10 * rank + peer + 1, dtype=torch.uint8)


def swap(mesh: Mesh, size: int = 33, channel: int = 0) -> None:
    """Everyone sends something else to each rank, in a buffer that has room for more."""
    me = mesh.members.rank
    others = [rank for rank in range(mesh.members.size) if rank != me]
    taken = {rank: torch.zeros(size + 5, dtype=torch.uint8) for rank in others}
    mesh.channel(channel).post(taken, {rank: text(me, rank, size) for rank in others}).wait(5)
    for rank in others:
        assert taken[rank].tolist() == [*text(rank, me, size).tolist(), 0, 0, 0, 0, 0]


def swaps(mesh: Mesh, times: int) -> None:
    for _ in range(times):
        swap(mesh)


def test_messages_arrive_as_they_were_on_every_channel_and_beyond_the_last_tag() -> None:
    def run(mesh: Mesh) -> None:
        for channel in (0, 1):
            mesh.channel(channel)._num_exchanges = NUM_TAGS - 3
            for size in (1, 2, 16, 4097, 1 << 20, 7):
                swap(mesh, size, channel)

    on_all(run, connected(*HOSTS, channels=2))


def test_several_messages_of_an_exchange_arrive_in_order() -> None:
    def run(mesh: Mesh) -> None:
        me = mesh.members.rank
        others = [rank for rank in range(3) if rank != me]
        taken = [(rank, torch.zeros(size, dtype=torch.uint8)) for size in (3, 5) for rank in others]
        exchange = mesh.channel(0).expect(taken)
        for size in (3, 5):
            exchange.send({rank: text(me, rank, size) for rank in others}, lambda: None)
        exchange.wait(5)
        for rank, tensor in taken:
            assert tensor.tolist() == text(rank, me, len(tensor)).tolist()

    on_all(run, connected(*HOSTS))


def test_only_what_leaves_the_machine_is_sealed_and_no_two_messages_are_alike(
    monkeypatch: Any,
) -> None:
    encode = SealedEnvelope.encode
    seen = []

    def listen(self: SealedEnvelope, peer: int, tensor: Tensor) -> Tensor:
        wire = encode(self, peer, tensor)
        seen.append((peer, tensor.numpy().tobytes(), wire.numpy().tobytes()))
        return wire

    monkeypatch.setattr(SealedEnvelope, "encode", listen)
    on_all(lambda mesh: swaps(mesh, 20), connected(*HOSTS))
    sealed = [(peer, clear, wire) for peer, clear, wire in seen if clear != wire]
    assert len(seen) == 20 * 6
    assert len(sealed) == 20 * 4  # 0 and 1 with 2, both ways
    assert all(peer == 2 or clear[0] > 20 for peer, clear, _ in sealed)
    assert all(len(wire) == HEAD_BYTES + len(clear) + TAG_BYTES for _, clear, wire in sealed)
    assert not any(clear[:8] in wire for _, clear, wire in sealed)
    assert len({wire for _, _, wire in sealed}) == len(sealed)  # the same text each time


def flip(at: int) -> Callable[[list[Tensor]], Tensor]:
    def altered(wires: list[Tensor]) -> Tensor:
        wire = wires[-1].clone()
        wire[at] ^= 1
        return wire

    return altered


FORGERIES = {
    "length": flip(HEAD_BYTES - 1),
    "huge length": flip(0),
    "text": flip(HEAD_BYTES + 3),
    "tag": flip(-1),
    "an older message": lambda wires: wires[-2],
    "nothing of it": lambda wires: torch.zeros_like(wires[-1]),
    "a part": lambda wires: wires[-1][:-1].clone(),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_message_that_is_not_what_the_rank_sent_ends_the_group(
    forgery: str, monkeypatch: Any
) -> None:
    encode = SealedEnvelope.encode
    wires = []

    def forge(self: SealedEnvelope, peer: int, tensor: Tensor) -> Tensor:
        wire = encode(self, peer, tensor)
        if peer == 1:
            return wire
        wires.append(wire)
        return FORGERIES[forgery](wires) if len(wires) == 3 else wire

    def run(mesh: Mesh) -> str:
        with pytest.raises(PeerLost) as caught:
            swaps(mesh, 4)
        return str(caught.value)

    monkeypatch.setattr(SealedEnvelope, "encode", forge)
    said = on_all(run, connected("a", "b"))
    assert "rank 1 sent a message that was altered on the way, or is not its own" in said[0]


def test_all_ranks_seal_or_none() -> None:
    meshes = [Mesh(members, 1, "test", sealed=members.rank == 0) for members in on_hosts("a", "b")]

    def run(mesh: Mesh) -> None:
        with pytest.raises(ConfigError, match="encrypted"):
            mesh.connect()

    on_all(run, meshes)


def test_keys_are_of_one_direction_one_group_and_one_use() -> None:
    def wire_of(members: Members, peer: int, channel: int = 0, name: str = "test") -> bytes:
        envelope = Mesh(members, 1, name, sealed=True).envelope(channel, 1)
        return envelope.encode(peer, torch.zeros(32, dtype=torch.uint8)).numpy().tobytes()

    a, b, c = on_hosts("a", "b", "c")
    wires = [
        wire_of(a, 1),
        wire_of(a, 2),
        wire_of(b, 0),
        wire_of(c, 1),
        wire_of(a, 1, channel=1),
        wire_of(a, 1, name="other"),
        wire_of(replace(a, token="another"), 1),
        wire_of(replace(a, epoch=2), 1),
    ]
    assert len(set(wires)) == len(wires)
