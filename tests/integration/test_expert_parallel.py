"""Two engines that share the experts of one model: the tokens of one, also over kill -9, shrinking
and growing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import aiohttp
import psutil
import pytest

from .conftest import Server, running_server
from .test_faults import until

BODIES = [
    {
        "prompt": f"Once upon a time, {i} little foxes",
        "max_tokens": 120,
        "temperature": 0.8,
        "seed": i,
        "ignore_eos": True,
    }
    for i in range(8)
]
ADMIN = {"X-Api-Key": "root"}
BOOT_S = 90  # two processes that import torch on a busy machine


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pair")
    (folder / "admin").write_text("root\n")
    flags = (
        "--dp",
        "2",
        "--max-model-len",
        "1024",
        "--kv-cache-bytes",
        "64MiB",
        "--rebalance",
        "off",
    )
    with running_server(folder / "log", *flags, "--admin-key-file", str(folder / "admin")) as it:
        yield it


def engines(server: Server) -> list[psutil.Process]:
    """Return the serving engines, without the fork server."""
    told = json.loads(server.get("/v1/experts")[1])["engines"]
    return [psutil.Process(engine["pid"]) for engine in told if engine["pid"] is not None]


async def tokens(
    session: aiohttp.ClientSession, url: str, body: dict, seen: list[int]
) -> list[int]:
    """Return a stream's tokens; `seen` grows with it."""
    body = body | {"model": "demo", "stream": True, "return_token_ids": True}
    async with session.post(url + "/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                seen += chunk["choices"][0].get("token_ids", []) if chunk["choices"] else []
    return seen


class Streams:
    """All of BODIES at once."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.seen: list[list[int]] = [[] for _ in BODIES]
        self.tasks = [
            asyncio.create_task(tokens(session, url, body, seen))
            for body, seen in zip(BODIES, self.seen, strict=True)
        ]

    async def begun(self, count: int = 10) -> None:
        await until(lambda: all(len(seen) >= count for seen in self.seen), 60)

    async def end(self) -> list[list[int]]:
        async with asyncio.timeout(120):
            return await asyncio.gather(*self.tasks)


@pytest.fixture(scope="module")
def alone(server: Server) -> list[list[int]]:
    """Return one engine's answers."""

    async def ask() -> list[list[int]]:
        async with aiohttp.ClientSession() as session:
            return await Streams(session, server.url).end()

    answers = asyncio.run(ask())
    assert [len(answer) for answer in answers] == [120] * 8
    return answers


async def until_two(pair: Server) -> None:
    await until(lambda: pair.get("/readyz")[0] == 200 and len(engines(pair)) == 2, BOOT_S)


def test_the_banner_says_what_runs(pair: Server) -> None:
    pids = ", ".join(str(engine.pid) for engine in engines(pair))
    assert (
        "2 engines (dp) of 1 processes (tp), experts sharded over 2 ranks; engine processes"
        in pair.log.read_text()
    )
    assert pids in pair.log.read_text()


async def test_two_engines_say_what_one_says(pair: Server, alone: list[list[int]]) -> None:
    async with aiohttp.ClientSession() as session:
        assert await Streams(session, pair.url).end() == alone


async def test_experts_move_while_streams_run(pair: Server, alone: list[list[int]]) -> None:
    async with aiohttp.ClientSession() as session:
        streams = Streams(session, pair.url)
        await streams.begun(40)
        await asyncio.sleep(1.1)  # loads are reported once a second
        async with session.post(pair.url + "/v1/admin/rebalance", headers=ADMIN) as answer:
            told = await answer.json()
            assert answer.status == 200, told
        assert await streams.end() == alone
        assert told["moved"], told["why"]
        assert told["moved_bytes"] > 0
        assert await Streams(session, pair.url).end() == alone


async def test_a_killed_engine_costs_no_stream_a_token(
    pair: Server, alone: list[list[int]]
) -> None:
    async with aiohttp.ClientSession() as session:
        streams = Streams(session, pair.url)
        await streams.begun()
        engines(pair)[1].kill()
        assert await streams.end() == alone
    await until_two(pair)


async def test_shrinking_and_growing_cost_no_stream_a_token(
    pair: Server, alone: list[list[int]]
) -> None:
    async with aiohttp.ClientSession() as session:
        streams = Streams(session, pair.url)
        await streams.begun()
        for dp, before in ((1, 2), (2, 1)):
            async with session.post(
                pair.url + "/v1/admin/scale", json={"dp": dp}, headers=ADMIN
            ) as answer:
                told = await answer.json()
                assert (answer.status, told.get("dp"), told.get("before")) == (200, dp, before), (
                    told
                )
            assert len(engines(pair)) == dp
        assert await streams.end() == alone
        assert await Streams(session, pair.url).end() == alone


async def test_nonsense_is_refused_with_its_reason(pair: Server) -> None:
    async with aiohttp.ClientSession() as session:
        for body, status, reason in (
            ({"dp": 0}, 400, "dp must be an integer >= 1"),
            ({"dp": "two"}, 400, "dp"),
            ({}, 400, "dp"),
            ({"dp": 2}, 200, ""),
        ):
            async with session.post(
                pair.url + "/v1/admin/scale", json=body, headers=ADMIN
            ) as answer:
                assert answer.status == status
                assert reason in await answer.text()


async def test_sigterm_finishes_what_runs_and_exits_0(pair: Server, alone: list[list[int]]) -> None:
    async with aiohttp.ClientSession() as session:
        streams = Streams(session, pair.url)
        await streams.begun()
        pair.process.terminate()
        await until(lambda: pair.get("/readyz")[0] == 503)
        assert await streams.end() == alone
    assert pair.process.wait(30) == 0
