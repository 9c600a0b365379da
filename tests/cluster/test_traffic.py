"""Requests on their way to engines that do not keep up, or are not there."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from moeserve.cluster import traffic as module
from moeserve.cluster.traffic import Traffic
from moeserve.errors import Overloaded
from moeserve.messages import Abort, EngineIn, Submit
from moeserve.sampling import TokenSampling


def request(rid: int) -> Submit:
    tokens = array("i", [1, 2, 3]).tobytes()
    sampling = TokenSampling(seed=1, max_tokens=10)
    return Submit(rid=rid, tokens=tokens, num_prompt=3, sampling=sampling)


class Engines:
    """Engines that keep what they are sent. full: those that do not read."""

    def __init__(self, *ranks: int) -> None:
        self.serving = set(ranks)
        self.full: set[int] = set()
        self.got: dict[int, list[EngineIn]] = {rank: [] for rank in ranks}
        self.errors: list[Exception] = []
        self.traffic = Traffic(lambda: self.serving, self.send, self.errors.append)
        for rank in ranks:
            self.traffic.balancer.add_engine(rank, block_size=16, num_blocks=1000)

    def send(self, rank: int, msg: EngineIn) -> None:
        if rank in self.full:
            raise Overloaded("does not read")
        self.got[rank].append(msg)

    def rids(self, rank: int) -> list[int]:
        return [msg.rid for msg in self.got[rank] if isinstance(msg, Submit)]


def test_an_engine_that_does_not_read_keeps_no_other_from_its_aborts() -> None:
    engines = Engines(0, 1)
    for rid in range(4):
        engines.traffic.submit(request(rid))
    theirs = engines.rids(1)
    assert theirs
    engines.full = {0}
    with pytest.raises(Overloaded):
        engines.traffic.abort(range(4))
    assert engines.got[1][-1] == Abort(theirs)


def test_requests_wait_in_order_while_no_engine_serves() -> None:
    engines = Engines(0)
    engines.serving = set()
    for rid in range(3):
        engines.traffic.submit(request(rid))
    engines.traffic.abort([1])
    assert engines.traffic.num_waiting == 2
    engines.serving = {0}
    engines.traffic.flush()
    assert engines.rids(0) == [0, 2]
    assert engines.traffic.num_waiting == 0


async def test_a_request_that_an_engine_did_not_read_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    engines = Engines(0)
    engines.serving = set()
    engines.traffic.submit(request(7))
    engines.serving = {0}
    engines.full = {0}
    engines.traffic.flush()
    assert engines.traffic.num_waiting == 1
    engines.full = set()
    while not engines.rids(0):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert engines.traffic.num_waiting == 0


async def test_an_error_in_a_retry_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    engines = Engines(0)
    engines.serving = set()
    engines.traffic.submit(request(7))
    engines.serving = {0}
    engines.full = {0}
    engines.traffic.flush()

    def broken(rank: int, msg: EngineIn) -> None:
        raise ZeroDivisionError("a bug")

    engines.traffic._send = broken
    while not engines.errors:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert isinstance(engines.errors[0], ZeroDivisionError)
