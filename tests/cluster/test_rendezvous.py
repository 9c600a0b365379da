"""The rendezvous: who is admitted, who is rejected, and the reasons. No engines here."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from moeserve.actor.actor import Inbox
from moeserve.actor.handshake import Hello, keys_of, read_secret, token_of
from moeserve.actor.zmq_wire import PeerGone, connect
from moeserve.cluster import rendezvous
from moeserve.cluster.check_parallel import check_machines
from moeserve.cluster.node import join
from moeserve.cluster.rendezvous import (
    Admitted,
    Rendezvous,
    bracketed,
    make_registration,
    resolve,
    why_rejected,
)
from moeserve.config import CacheConfig, Config, DeviceConfig, ModelConfig, ParallelConfig
from moeserve.errors import AddressInUse, ConfigError
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.messages import PROTOCOL_VERSION
from tests.ports import free_port

SECRET = "a secret of the whole cluster"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Machine 0 of three."""
    key = tmp_path / "key"
    key.write_text(SECRET)
    key.chmod(0o600)
    where = f"127.0.0.1:{free_port()}"
    return Config(
        parallel=ParallelConfig(dp=3, nnodes=3, rendezvous=where, cluster_key_file=str(key))
    )


def on(config: Config, node_rank: int, **parallel: Any) -> Config:
    return replace(config, parallel=replace(config.parallel, node_rank=node_rank, **parallel))


@asynccontextmanager
async def opened(config: Config, folder: Path) -> AsyncIterator[Rendezvous]:
    machines = await Rendezvous.open(config, str(folder))
    try:
        yield machines
    finally:
        await machines.close()


async def joins(config: Config, secret: str = SECRET, within_s: float = 20.0) -> Admitted:
    return await join(
        config, secret.encode(), make_registration(config, "/there"), time.monotonic() + within_s
    )


async def test_each_machine_is_let_in_once(config: Config, tmp_path: Path) -> None:
    async with opened(config, tmp_path) as machines:
        assert [host.name for host in machines.hosts] == ["node-0", "node-1", "node-2"]
        assert [(host.is_missing, host.waiting_phase) for host in machines.hosts] == [
            (False, ""),
            (True, "waiting for machine 1 of 3"),
            (True, "waiting for machine 2 of 3"),
        ]
        first = await joins(on(config, 1))
        second = await joins(on(config, 2))
        assert first.address != second.address
        assert first.token != second.token
        assert machines.hosts[2].folder == "/there"
        with pytest.raises(ConfigError, match="--node-rank 1: there is a machine 1 already"):
            await joins(on(config, 1))
    with pytest.raises(
        ConfigError, match=r"nobody listens at .*: start machine 0 first, or check --rendezvous"
    ):
        await joins(on(config, 1), within_s=1.0)


async def test_a_machine_that_does_not_come_back_frees_its_place(
    config: Config, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("moeserve.cluster.host.CONNECT_S", 0.1)
    async with opened(config, tmp_path):
        await joins(on(config, 1))
        deadline_s = time.monotonic() + 15
        while time.monotonic() < deadline_s:
            with suppress(ConfigError):
                await joins(on(config, 1))
                return
        raise AssertionError("its place was not freed")


async def test_another_key_is_told_apart_from_nobody_there(config: Config, tmp_path: Path) -> None:
    async with opened(config, tmp_path):
        with pytest.raises(
            ConfigError, match=r"machine 1 could not join: .* is the cluster key there the same"
        ):
            await joins(on(config, 1), "another secret of some length", within_s=2.0)
        await joins(on(config, 1))


async def test_another_protocol_is_named(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(config, tmp_path):
        keys = keys_of(SECRET.encode())
        token = token_of(SECRET.encode(), "rendezvous")
        inbox: Inbox[Any] = Inbox("node")
        address = f"tcp://{config.parallel.rendezvous}"
        monkeypatch.setattr("moeserve.actor.zmq_wire.PROTOCOL_VERSION", 99)
        wire = connect(address, token=token, receives=Admitted, inbox=inbox, keys=keys)
        try:
            (gone,) = await inbox.drain(wait=True)
        finally:
            wire.close()
        assert isinstance(gone, PeerGone)
        assert f"protocol 99, the listening one {PROTOCOL_VERSION}" in gone.cause


async def test_nonsense_and_strangers_are_not_answered(config: Config, tmp_path: Path) -> None:
    async with opened(config, tmp_path):
        keys = keys_of(SECRET.encode())
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.curve_publickey = keys.client_public
        socket.curve_secretkey = keys.client_secret
        socket.curve_serverkey = keys.server_public
        socket.connect(f"tcp://{config.parallel.rendezvous}")
        facts = msgspec.msgpack.encode(make_registration(on(config, 1)))
        for frame in (b"", b"\xc1 no msgpack", facts):  # the last one without a hello
            socket.send(frame)
        await joins(on(config, 2))  # it lives
        assert not socket.poll(100)
        socket.close(0)
        context.term()


async def test_hellos_without_a_registration_are_not_kept_for_ever(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "MAX_GREETED", 3)
    async with opened(config, tmp_path) as machines:
        own = Hello(PROTOCOL_VERSION, token_of(SECRET.encode(), "rendezvous"))
        facts = make_registration(on(config, 1))
        for number in range(10):
            frame = msgspec.msgpack.encode(own)
            assert machines._answer(b"%d" % number, frame, facts, own) == own
        assert list(machines._greeted) == [b"7", b"8", b"9"]
        await joins(on(config, 1))


async def test_an_error_costs_one_message_and_not_the_rendezvous(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with opened(config, tmp_path) as machines:
        with monkeypatch.context() as broken:
            broken.setattr(rendezvous, "why_rejected", lambda *args: 1 / 0)
            with pytest.raises(ConfigError, match="no answer"):
                await joins(on(config, 1), within_s=2.0)
        assert "background task 'rendezvous' failed: ZeroDivisionError" in caplog.text
        await joins(on(config, 1))
        assert machines.hosts[1].is_taken


async def test_an_address_that_is_taken_or_not_ours_is_named(
    config: Config, tmp_path: Path
) -> None:
    async with opened(config, tmp_path):
        with pytest.raises(AddressInUse, match=r"cannot listen at tcp://127\.0\.0\.1"):
            await Rendezvous.open(config, str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot listen at tcp://192\.0\.2\.1:29500"):
        await Rendezvous.open(on(config, 0, rendezvous="192.0.2.1:29500"), str(tmp_path))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda c: on(c, 1, dp=6), "--dp is 6 on machine 1, 3 on machine 0"),
        (lambda c: on(c, 1, tp=2), "--tp is 2 on machine 1, 1 on machine 0"),
        (lambda c: on(c, 1, nnodes=2), "--nnodes is 2 on machine 1, 3 on machine 0"),
        (lambda c: on(c, 3), "--node-rank 3: with --nnodes 3 the other machines are 1 to 2"),
        (lambda c: on(c, 0), "--node-rank 0: with --nnodes 3 the other machines are 1 to 2"),
        (lambda c: on(c, 2), "--node-rank 2: there is a machine 2 already"),
        (
            lambda c: replace(on(c, 1), cache=CacheConfig(block_size=32)),
            "--block-size is 32 on machine 1, 16 on",
        ),
        (
            lambda c: replace(on(c, 1), model=ModelConfig(dtype="float32")),
            "--dtype is float32 on machine 1, auto on",
        ),
        (lambda c: replace(on(c, 1), device=DeviceConfig(threads=3)), ""),
        (lambda c: on(c, 1, rendezvous="head:1", cluster_key_file="/elsewhere"), ""),
    ],
)
def test_what_must_be_the_same_is_compared(config: Config, changed: Any, why: str) -> None:
    found = why_rejected(make_registration(config), make_registration(changed(config)), {2})
    assert why in found
    assert bool(why) == bool(found)


def test_another_moeserve_is_named(config: Config) -> None:
    ours = make_registration(config)
    theirs = msgspec.structs.replace(make_registration(on(config, 1)), version="0.0.7")
    assert "machine 1 runs moeserve 0.0.7, machine 0 " in why_rejected(ours, theirs, set())


def test_another_model_is_found_by_its_files(config: Config, tmp_path: Path) -> None:
    demo = resolve_model_dir("demo")
    copy = tmp_path / "copy"
    shutil.copytree(demo, copy)
    ours = make_registration(config)
    there = replace(on(config, 1), model=ModelConfig(model=str(copy)))
    assert why_rejected(ours, make_registration(there), set()) == ""
    weights = min(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    weights.write_bytes(data)
    theirs = make_registration(there)
    assert f"fingerprints {theirs.model}, {ours.model}" in why_rejected(ours, theirs, set())
    shutil.copy(demo / weights.name, weights)
    assert why_rejected(ours, make_registration(there), set()) == ""
    (copy / "config.json").write_text((demo / "config.json").read_text() + "\n")
    assert "the model on machine 1 differs from the one on machine 0" in why_rejected(
        ours, make_registration(there), set()
    )


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"nnodes": 2, "dp": 2}, "--nnodes 2 needs --rendezvous"),
        ({"nnodes": 2, "dp": 2, "rendezvous": "h:1"}, "--nnodes 2 needs --cluster-key-file"),
        (
            {"nnodes": 2, "dp": 1, "rendezvous": "h:1", "cluster_key_file": "f"},
            r"--dp 1: each of the 2 machines \(--nnodes\) .* at least --dp 2",
        ),
        (
            {"nnodes": 2, "dp": 2, "rendezvous": "h", "cluster_key_file": "f"},
            "--rendezvous h: must be HOST:PORT",
        ),
        (
            {"nnodes": 2, "dp": 2, "rendezvous": "h:0", "cluster_key_file": "f"},
            "--rendezvous h:0: must be",
        ),
        (
            {"nnodes": 2, "dp": 2, "rendezvous": "h:x", "cluster_key_file": "f"},
            "--rendezvous h:x: must be",
        ),
        ({"node_rank": 1}, "--node-rank 1 needs at least --nnodes 2"),
        ({"rendezvous": "h:1"}, "--rendezvous h:1: there is only one machine"),
        ({"cluster_key_file": "f"}, "--cluster-key-file f: there is only one machine"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_machines(ParallelConfig(**settings))


def test_names_become_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("127.0.0.1", is_own=True) == "127.0.0.1"
    assert resolve("[::1]") == "::1"
    assert bracketed("::1") == "[::1]"
    assert bracketed("10.0.0.1") == "10.0.0.1"
    with pytest.raises(ConfigError, match=r"cannot resolve 'nowhere\.invalid'"):
        resolve("nowhere.invalid")
    answer = [
        (socket.AF_INET6, 1, 6, "", ("fe80::1", 0)),
        (socket.AF_INET, 1, 6, "", ("127.0.1.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: answer)
    with pytest.raises(
        ConfigError,
        match=r"'head' resolves to 127\.0\.1\.1 on this machine, which others cannot reach",
    ):
        resolve("head", is_own=True)


def test_the_key_is_in_no_message(config: Config) -> None:
    secret = read_secret(str(config.parallel.cluster_key_file))
    assert secret not in msgspec.msgpack.encode(make_registration(on(config, 1)))
