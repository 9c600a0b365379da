"""Watching two ranks with two micro-batches at work: a trace of one step, experts and engines as a
stream, metrics.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from moeserve.client import AsyncClient
from tests.server.test_trace import check

from .conftest import Server, running_server
from .test_expert_parallel import ADMIN, BODIES, tokens
from .test_faults import until

FLAGS = ("--dp", "2", "--dbo", "on", "--max-model-len", "1024", "--kv-cache-bytes", "32MiB")


async def trace(
    session: aiohttp.ClientSession, url: str, timeout_s: float
) -> tuple[int, dict[str, Any]]:
    async with session.post(f"{url}/v1/admin/trace?timeout_s={timeout_s}", headers=ADMIN) as answer:
        return answer.status, await answer.json()


def look_at(file: dict[str, Any]) -> None:
    spans = check(file)
    assert file["otherData"]["missing"] == []
    titles = {title for title, _ in spans}
    assert titles == {"rank 0 (engine 0, tp 0)", "rank 1 (engine 1, tp 0)"}
    for title in titles:
        for ubatch in ("0", "1"):
            work = spans[title, f"micro-batch {ubatch}"]
            transfers = spans[title, f"transfer {ubatch}"]
            assert {"attention", "experts"} <= {span["name"] for span in work}
            names = [(span["name"], span["args"]["layer"]) for span in transfers]
            assert sorted(names) == sorted(
                (name, layer) for name in ("dispatch", "combine") for layer in range(4)
            )
        (run,) = (span for span in spans[title, "engine"] if span["name"] == "run")
        inside = [
            span for ubatch in ("micro-batch 0", "micro-batch 1") for span in spans[title, ubatch]
        ]
        assert all(
            run["ts"] <= s["ts"] and s["ts"] + s["dur"] <= run["ts"] + run["dur"] + 0.01
            for s in inside
        )


async def watch(server: Server, client: AsyncClient, session: aiohttp.ClientSession) -> None:
    status, told = await trace(session, server.url, 0.2)
    assert (status, told["error"]["code"]) == (409, "conflict"), "nothing runs"
    seen: list[list[int]] = [[] for _ in BODIES]
    bodies = [body | {"max_tokens": 40} for body in BODIES]
    asking = [
        asyncio.create_task(tokens(session, server.url, *one))
        for one in zip(bodies, seen, strict=True)
    ]
    await until(lambda: all(seen), 60)
    status, file = await trace(session, server.url, 20)
    assert status == 200, file
    look_at(file)
    assert [len(answer) for answer in await asyncio.gather(*asking)] == [40] * 8
    await asyncio.sleep(1.2)  # loads are reported once a second
    shown = await client.experts()
    rows_L = [sum(layer) for layer in shown.load.total]
    assert rows_L[0] > 2 * 8 * 40, "two experts per token"
    assert rows_L == [rows_L[0]] * 4
    assert sum(rank.share or 0 for rank in shown.ranks) == pytest.approx(1, abs=1e-3)
    assert [engine.state for engine in shown.engines] == ["serving", "serving"]
    assert all(
        engine.steps > 30 and engine.comm_s > 0 and engine.mean_step_s > 0
        for engine in shown.engines
    )
    metrics = server.get("/metrics")[1]
    assert (
        sum(
            line.startswith("moeserve:engine_up{") and line.endswith(" 1.0")
            for line in metrics.splitlines()
        )
        == 2
    )
    assert (
        sum(line.startswith("moeserve:expert_rows_total{") for line in metrics.splitlines()) == 32
    )


async def test_two_ranks_are_watched(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("root\n")
    with running_server(
        tmp_path / "log", *FLAGS, "--admin-key-file", str(tmp_path / "admin")
    ) as server:
        async with AsyncClient(server.url + "/v1") as client, aiohttp.ClientSession() as session:
            await watch(server, client, session)
            async with await client.watch_experts(interval_s=60) as stream:
                first = await anext(stream)
                assert first.ep_sharded
                assert json.loads(msgspec.json.encode(first.balance))["ranks"] <= 1
                ending = asyncio.create_task(asyncio.to_thread(server.stop))
                async with asyncio.timeout(30):
                    assert [more async for more in stream] == []
            assert await ending == 0
