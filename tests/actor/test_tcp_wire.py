"""Wires over TCP: the same secret on both sides, and every way in which it is not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from moeserve.actor.actor import Inbox
from moeserve.actor.handshake import keys_of, read_secret, token_of
from moeserve.actor.zmq_wire import PeerGone, connect, listen
from moeserve.errors import ActorStopped, ConfigError
from moeserve.messages import Ping

SECRET = b"a secret of the cluster"


async def test_tcp_with_the_same_secret() -> None:
    keys = keys_of(SECRET)
    inbox_a: Inbox[Any] = Inbox("a")
    inbox_b: Inbox[Any] = Inbox("b")
    a = listen("tcp://127.0.0.1:*", token="t", receives=Ping, inbox=inbox_a, keys=keys)
    b = connect(a.address, token="t", receives=Ping, inbox=inbox_b, keys=keys)
    try:
        await b.connected(5)
        await a.connected(5)
        b.send(Ping(7))
        assert await inbox_a.drain(wait=True) == [Ping(7)]
        a.send(Ping(8))
        assert await inbox_b.drain(wait=True) == [Ping(8)]
    finally:
        b.close()
    assert isinstance((await inbox_a.drain(wait=True))[0], PeerGone)
    a.close()


async def test_last_words_over_tcp_reach_a_peer_that_is_busy_when_they_come() -> None:
    keys = keys_of(SECRET)
    inbox: Inbox[Any] = Inbox("b")
    a = listen("tcp://127.0.0.1:*", token="t", receives=Ping, inbox=Inbox("a"), keys=keys)
    b = connect(a.address, token="t", receives=Ping, inbox=inbox, keys=keys)
    try:
        await b.connected(5)
        b.send(Ping(1))  # a will not read it
        a.send(Ping(2))
    finally:
        a.close(linger_s=1)
    time.sleep(0.05)  # noqa: ASYNC251  # ZeroMQ's thread sees the end of the connection before the loop turns
    got: list[Any] = []
    while len(got) < 2:
        got += await inbox.drain(wait=True)
    assert got[0] == Ping(2)
    assert isinstance(got[1], PeerGone)
    b.close()


async def test_tcp_with_another_secret_is_refused_with_a_reason() -> None:
    inbox: Inbox[Any] = Inbox("a")
    a = listen("tcp://127.0.0.1:*", token="t", receives=Ping, inbox=inbox, keys=keys_of(SECRET))
    b = connect(
        a.address, token="t", receives=Ping, inbox=Inbox("b"), keys=keys_of(b"not the same secret")
    )
    try:
        with pytest.raises(ActorStopped, match="cluster key"):
            await b.connected(5)
        assert not a.greeted
    finally:
        a.close()
        b.close()


async def test_tcp_without_a_listener_says_so() -> None:
    wire = connect(
        "tcp://127.0.0.1:9", token="t", receives=Ping, inbox=Inbox("b"), keys=keys_of(SECRET)
    )
    try:
        with pytest.raises(ActorStopped, match="nobody listens"):
            await wire.connected(5)
    finally:
        wire.close()


def test_what_crosses_a_network_is_encrypted() -> None:
    keys = keys_of(SECRET)
    assert keys == keys_of(SECRET) != keys_of(SECRET + b"!")
    assert (
        len({keys.server_public, keys.server_secret, keys.client_public, keys.client_secret}) == 4
    )
    assert token_of(SECRET, "a") != token_of(SECRET, "b")


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(SECRET + b"\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(str(path))
    path.chmod(0o600)
    assert read_secret(str(path)) == SECRET
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="needs at least 16"):
        read_secret(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        read_secret(str(tmp_path / "none"))
