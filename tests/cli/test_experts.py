"""`moeserve experts`: the picture, and a look at a server of our own."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from moeserve.cli import main
from moeserve.cli.experts import picture
from moeserve.cluster.link import Resized
from moeserve.protocol import ExpertEngine, ExpertLoads, ExpertPlacement, ExpertStatus
from tests.server.conftest import live_server, make_tokenizer


def test_replicas_share_and_busy_ranks_are_dark() -> None:
    shown = ExpertStatus(
        engines=[ExpertEngine(engine=0, state="serving", running=3)],
        load=ExpertLoads(recent=[[8.0, 0.0, 0.0], [0.0, 2.0, 2.0], [0.0, 0.0, 0.0]]),
        placement=ExpertPlacement(
            experts_per_rank=2, experts=[[0, 1, 2, 1], [0, 1, 2, 1], [0, 1, 2, 1]]
        ),
    )
    lines = picture(shown).splitlines()
    assert lines[2] == "rank   0  75.0% |█░ |"
    assert lines[3] == "rank   1  25.0% | ▓ |"
    assert lines[4].startswith("engine 0: serving, 3 running")


async def test_a_server_without_and_with_experts(capsys: pytest.CaptureFixture[str]) -> None:
    async with live_server(make_tokenizer()) as live:
        command = ["experts", "--url", f"{live.url}/v1"]
        assert await asyncio.to_thread(main.main, command) == main.FAILURE
        assert "dense" in capsys.readouterr().err
        live.engine.outbox.put(
            Resized(msgspec.structs.replace(live.engine.ready(), num_moe_layers=2, num_experts=4))
        )
        async with asyncio.timeout(20):
            while not (live.front.ready and live.front.ready.num_experts):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert await asyncio.to_thread(main.main, command) == 0
        assert "rank   0   0.0% |  |" in capsys.readouterr().out
