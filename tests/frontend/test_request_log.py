"""The request log and the hash of the weights: threads of their own, bounds, and quick ends."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from moeserve.errors import CheckpointError, ConfigError
from moeserve.frontend import receipt_signer, request_log
from moeserve.frontend.async_engine import AsyncEngine
from moeserve.frontend.receipt_signer import ReceiptSigner
from moeserve.frontend.request_log import RequestLog
from moeserve.sampling import SamplingParams


@pytest.fixture
def slow_hash(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hashing takes until the event is set, or until the server stops."""
    ready = threading.Event()

    def digest(model_dir: Path, alive) -> tuple[str, str]:
        while not ready.wait(0.01):
            alive()
        return "digest", "fingerprint"

    monkeypatch.setattr(receipt_signer, "weights_digest", digest)
    return ready


async def test_lines_are_written_while_the_weights_are_hashed(
    slow_hash: threading.Event, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    async with AsyncEngine("demo", request_log=str(log)) as engine:
        async for _ in engine.generate("A dog", SamplingParams(max_tokens=5)):
            pass
        while not log.read_bytes():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert b'"weights":""' in log.read_bytes()


async def test_the_end_waits_neither_for_the_hash_nor_in_the_way_of_others(
    slow_hash: threading.Event,
) -> None:
    signer = ReceiptSigner("m", Path("/nowhere"), None, "/dev/null")
    turns = 0
    closing = asyncio.create_task(signer.close())
    while not closing.done():
        turns += 1
        await asyncio.sleep(0.001)
    await closing
    assert turns > 2  # the thread looks for the end each 10 ms
    assert not slow_hash.is_set()
    with pytest.raises(CheckpointError, match="stops"):
        await signer._hash.wait()


async def test_a_slow_disk_costs_lines_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_log, "MAX_WAITING_BYTES", 100)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    log = RequestLog(pipe)
    line = b"x" * 60_000
    for _ in range(20):  # a pipe takes 64 KiB
        log.add(line)
        await asyncio.sleep(0.01)
    assert log._lines.qsize() <= 2
    assert "the disk is too slow" in caplog.text
    os.set_blocking(reader, True)
    draining = asyncio.create_task(asyncio.to_thread(_read_all, reader))
    while log._added_bytes - log._written_bytes > 100:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    log.add(b"the last one")
    await log.close()
    written = (await draining).split(b"\n")
    assert 2 <= written.count(line) <= 4
    assert written[-2:] == [b"the last one", b""]
    assert f"{20 - written.count(line)} lines were lost" in caplog.text


def _read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()


async def test_a_full_disk_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(Path("/dev/full"))
    for _ in range(5):
        log.add(b"a line")
    await log.close()
    assert caplog.text.count("No space left") == 1


def test_a_path_below_a_home_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    for key, log in (("~/key.pem", None), (None, "~/log.jsonl")):
        with pytest.raises(ConfigError, match=r"~/.*absolute path, or set HOME"):
            ReceiptSigner("m", Path("/nowhere"), key, log)
