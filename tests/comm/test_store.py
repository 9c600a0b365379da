"""The store: what is set reaches all, strangers and DNS have no part in it, and what was altered is
not believed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from moeserve.comm.gloo import Mesh
from moeserve.comm.members import Members
from moeserve.comm.store import MembersStore, dist
from moeserve.comm.stream import Peer, connect, to_address
from moeserve.errors import PeerLost
from tests.comm.ranks import members_of, together
from tests.comm.relay import DOWN, FORGERIES, UP, Relay, once

ROOT = Path(__file__).parents[2]


@contextmanager
def stores_of(members: list[Members]) -> Iterator[list[MembersStore]]:
    stores = [MembersStore(one) for one in members]
    try:
        yield stores
    finally:
        for store in stores:
            store.close()


@pytest.mark.parametrize("path", ["", "store.sock"])
def test_what_is_set_before_and_after_all_are_there_reaches_all(path: str, tmp_path: Path) -> None:
    members = members_of(4)
    if path:
        members = [replace(one, store=str(tmp_path / path)) for one in members]
    with stores_of(members) as stores:
        for rank, store in enumerate(stores):
            store.set(f"early/{rank}", bytes([rank]))
        for store in stores:
            assert [store.get(f"early/{rank}") for rank in range(4)] == [b"\0", b"\1", b"\2", b"\3"]
        stores[2].set("late", b"")
        assert [store.get("late") for store in stores] == [b""] * 4
        assert not stores[0].check(["late", "never"])
        with pytest.raises(PeerLost, match=r"nothing of never within 0\.01 s"):
            stores[1].wait(["late", "never"], timedelta(seconds=0.01))


def test_torch_reaches_it_through_a_prefix_and_from_threads_of_its_own() -> None:
    with stores_of(members_of(2)) as stores:
        first, second = (dist.PrefixStore("a", dist.PrefixStore("b", store)) for store in stores)
        first.set("k", "v")
        assert second.get("k") == b"v"
        second.wait(["k"], timedelta(seconds=1))
        assert second.check(["k"])
        assert not first.clone().check(["other"])


def test_who_leaves_ends_the_waits_of_all_with_the_cause() -> None:
    with stores_of(members_of(3)) as stores:
        stores[1].set("here", b"")
        stores[2].get("here")
        stores[1].close(PeerLost("its device is gone", (1,)))
        for store in (stores[0], stores[2]):
            with pytest.raises(PeerLost, match="its device is gone") as caught:
                store.get("never")
            assert caught.value.missing == (1,)
            assert store.get("here") == b""


def test_who_does_not_know_the_token_is_not_let_in_and_hears_nothing() -> None:
    members = members_of(2)
    with stores_of(members[:1]) as (store,):
        store.set("secret key", b"secret value")
        with pytest.raises(ConnectionError, match="another token or epoch"):
            asyncio.run(connect(to_address(members[0].store), "another", 1, Peer(1)))
        with socket.create_connection(to_address(members[0].store)) as stranger:  # type: ignore[arg-type]
            stranger.sendall(os.urandom(40))
            assert stranger.recv(100) == b""
        with closing(MembersStore(replace(members[1], token="another"))) as other:
            other.set("forged", b"")
            with pytest.raises(
                PeerLost, match=r"did not open the store .*another token or epoch"
            ) as caught:
                other.get("secret key")
            assert caught.value.missing == (0,)
        with closing(MembersStore(members[1])) as second:
            assert second.get("secret key") == b"secret value"
        assert not store.check(["forged"])


def behind(relay: Relay, members: list[Members]) -> list[Members]:
    """Rank 0 listens at its own address; the others connect through the relay."""
    return [
        replace(one, store=relay.address, host_of=("a", "b")) if one.rank else one
        for one in members
    ]


async def test_who_listens_on_the_way_reads_neither_keys_nor_values() -> None:
    members = members_of(2)
    async with Relay(members[0].store) as relay:
        with stores_of(behind(relay, members)) as (first, second):
            first.set("its key", b"its value")
            assert await asyncio.to_thread(second.get, "its key") == b"its value"
    assert any(len(frame) > len("its key" + "its value") for frame in relay.seen)
    assert not [frame for frame in relay.seen if b"its key" in frame or b"its value" in frame]


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_message_that_is_not_what_the_rank_sent_ends_the_meeting(
    forgery: str, way: str
) -> None:
    members = members_of(2)
    async with Relay(members[0].store, once(forgery, way, 2)) as relay:
        with stores_of(behind(relay, members)) as stores:
            sender, receiver = reversed(stores) if way == UP else stores
            for number in range(3):
                sender.set(f"{number}", b"value")
            with pytest.raises(PeerLost, match="altered on the way, or is not its own"):
                await asyncio.to_thread(receiver.get, "never")
            with pytest.raises(PeerLost):
                await asyncio.to_thread(sender.get, "never")


def test_a_thread_that_waits_is_woken_by_close() -> None:
    with stores_of(members_of(2)[:1]) as (store,):
        threading.Timer(0.05, store.close).start()
        with pytest.raises(PeerLost, match="this rank left the group"):
            store.get("never")


def test_a_store_that_cannot_listen_says_where(tmp_path: Path) -> None:
    (rank, _) = [replace(one, store=str(tmp_path / "missing" / "s")) for one in members_of(2)]
    with pytest.raises(PeerLost, match=r"cannot use the store at .*missing/s: .*No such file"):
        Mesh(rank, 1, "test").connect()


NAMELESS = """
set -e
mount --bind {resolver} /etc/resolv.conf
ip link set lo up
ip address add 10.9.0.1/32 dev lo
exec {python} -m tests.comm.test_store
"""


def test_no_name_is_asked_for(tmp_path: Path) -> None:
    """Addresses need no names.

    Two machines have an address without a name, and a DNS server that records queries and never
    answers.
    """
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\n")
    script = NAMELESS.format(resolver=resolver, python=sys.executable)
    command = ["unshare", "--net", "--mount", "bash", "-c", script]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    if "Operation not permitted" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("this user may not make a network namespace")
    assert done.stdout == "met, and asked 0 names\n", done.stderr


def _meet_without_names() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as dns:
        dns.bind(("127.0.0.1", 53))
        dns.setblocking(False)
        members = [
            replace(one, store="10.9.0.1:29600", host_of=("a", "b")) for one in members_of(2)
        ]
        meshes = [Mesh(one, 1, "test") for one in members]
        together([mesh.connect for mesh in meshes])
        for mesh in meshes:
            mesh.close()
        asked = 0
        try:
            while dns.recv(1000):
                asked += 1
        except BlockingIOError:
            sys.stdout.write(f"met, and asked {asked} names\n")


if __name__ == "__main__":
    _meet_without_names()
