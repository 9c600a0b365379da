"""/v1/batches through the openai package: every line is answered once, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from moeserve.messages import Submit
from moeserve.server import inside
from moeserve.server.file_objects import Batch
from tests.server.test_files import client_of

CHAT = "/v1/chat/completions"


def line(custom_id: str, max_tokens: int = 2, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": f"Tell me {custom_id}"}],
        "max_tokens": max_tokens,
    } | fields
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


@pytest.fixture
def keeping(launch: Any, tmp_path: Path) -> Any:
    return lambda **settings: launch(files_dir=str(tmp_path / "files"), **settings)


async def upload(client: openai.AsyncOpenAI, *lines: Any) -> str:
    text = "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines)
    return (await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")).id


async def start(client: openai.AsyncOpenAI, *lines: Any, **fields: Any) -> Any:
    file = await upload(client, *lines)
    return await client.batches.create(
        input_file_id=file, endpoint=CHAT, completion_window="24h", **fields
    )


async def reached(client: openai.AsyncOpenAI, id: str, *states: str) -> Any:
    async with asyncio.timeout(10):
        while (batch := await client.batches.retrieve(id)).status not in states:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return batch


async def until(reached: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_the_time_of_one_request_does_not_end_lines_that_wait_for_all_others(keeping):
    async with keeping(request_timeout=0.05) as live, client_of(live) as client:
        live.engine.gate.clear()
        batch = await start(client, line("a"))
        await until(lambda: live.front.stats.num_active)
        await asyncio.sleep(0.1)
        live.engine.gate.set()
        batch = await reached(client, batch.id, "completed")
        assert batch.request_counts.completed == 1


def record(live: Any, id: str) -> Batch:
    (owner,) = live.context.batches.store.owners()
    found: Batch = live.context.batches.store.find(owner, id, Batch)
    return found


async def results(client: openai.AsyncOpenAI, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    lines = [json.loads(text) for text in (await client.files.content(file)).text.splitlines()]
    assert len({one["custom_id"] for one in lines}) == len(lines)
    return {one["custom_id"]: one for one in lines}


def submitted(live: Any) -> list[Submit]:
    return [msg for msg in live.engine.told if isinstance(msg, Submit)]


async def test_answers_and_errors_become_files(keeping: Any) -> None:
    async with keeping() as live, client_of(live) as client:
        lines = [
            line("a"),
            line("b", priority=7),
            "",
            line("c", temperature=-1),
            line("d", model="other"),
        ]
        made = await start(client, *lines, metadata={"who": "me"})
        assert (made.status, made.object, made.model, made.metadata) == (
            "validating",
            "batch",
            "org/tiny",
            {"who": "me"},
        )
        assert made.expires_at == made.created_at + 24 * 3600
        done = await reached(client, made.id, "completed")
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (4, 2, 2)
        assert done.in_progress_at <= done.finalizing_at <= done.completed_at
        good = await results(client, done.output_file_id)
        bad = await results(client, done.error_file_id)
        assert good.keys() == {"a", "b"}
        assert good["a"]["response"]["status_code"] == 200
        assert good["a"]["response"]["request_id"]
        assert good["a"]["response"]["body"]["choices"][0]["message"]["content"]
        assert {name: one["response"]["status_code"] for name, one in bad.items()} == {
            "c": 400,
            "d": 404,
        }
        assert bad["c"]["response"]["body"]["error"]["param"] == "temperature"
        assert (await client.files.retrieve(done.output_file_id)).purpose == "batch_output"
        assert [msg.priority for msg in submitted(live)] == [inside.LOW_PRIORITY] * 2
        assert [batch.id async for batch in client.batches.list()] == [made.id]
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(made.id)
        assert (await client.files.delete(done.input_file_id)).deleted


async def test_the_same_answer_as_over_http(keeping: Any) -> None:
    async with keeping() as live, client_of(live) as client:
        one = line("a", max_tokens=9, seed=1)
        done = await reached(client, (await start(client, one)).id, "completed")
        body = (await results(client, done.output_file_id))["a"]["response"]["body"]
        _, answer, _ = await live.post(CHAT, one["body"])
        assert (body["choices"], body["usage"]) == (answer["choices"], answer["usage"])


@pytest.mark.parametrize(
    ("lines", "code", "number", "words"),
    [
        ([], "empty_file", None, "no line"),
        (["{nonsense"], "invalid_line", 1, "not JSON"),
        ([line("a"), line("a")], "invalid_line", 2, "already on line 1"),
        (
            [line("a"), line("b") | {"url": "/v1/completions"}],
            "invalid_line",
            2,
            f"url must be {CHAT}",
        ),
        (
            [line("a"), line("b") | {"url": "/v1/admin/scale"}],
            "invalid_line",
            2,
            "url must be one of",
        ),
        ([line("a", stream=True)], "invalid_line", 1, "stream"),
    ],
)
async def test_a_file_that_is_no_batch_fails_before_anything_runs(
    keeping: Any, lines: list[Any], code: str, number: int | None, words: str
) -> None:
    async with keeping() as live, client_of(live) as client:
        done = await reached(client, (await start(client, *lines)).id, "failed")
        (error,) = done.errors.data
        assert (error.code, error.line) == (code, number)
        assert words in error.message
        assert done.failed_at
        assert done.output_file_id is None
        assert not submitted(live)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-nowhere"}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3600}},
            "output_expires_after",
        ),
    ],
)
async def test_bad_requests_are_refused(keeping: Any, fields: dict[str, Any], param: str) -> None:
    async with keeping() as live, client_of(live) as client:
        good = {
            "input_file_id": await upload(client, line("a")),
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        status, answer, _ = await live.post("/v1/batches", good | fields)
        assert status in (400, 404)
        assert param in answer["error"]["param"]
        assert (await live.get("/v1/batches"))[1]["data"] == []


async def test_cancelling_keeps_what_is_answered(keeping: Any) -> None:
    async with keeping() as live, client_of(live) as client:
        made = await start(
            client, line("a"), *(line(f"slow {i}", 250, bad_words=["x"]) for i in range(80))
        )
        await until(lambda: record(live, made.id).request_counts.completed)
        live.engine.gate.clear()
        with pytest.raises(openai.ConflictError):
            await client.files.delete(made.input_file_id)
        assert (await client.batches.cancel(made.id)).status == "cancelling"
        done = await reached(client, made.id, "cancelled")
        assert done.cancelling_at <= done.cancelled_at
        assert len(await results(client, done.output_file_id)) == done.request_counts.completed > 0
        assert done.request_counts.completed < done.request_counts.total
        live.engine.gate.set()
        assert not live.context.running


async def test_a_restart_goes_on_where_the_last_server_stopped(keeping: Any) -> None:
    lines = [line(f"{i}", 1 if i < 3 else 200) for i in range(6)]
    async with keeping() as live, client_of(live) as client:
        made = await start(client, *lines)
        await until(lambda: record(live, made.id).request_counts.completed >= 3)
        live.engine.gate.clear()
    async with keeping() as live, client_of(live) as client:
        done = await reached(client, made.id, "completed")
        assert (done.request_counts.total, done.request_counts.completed) == (6, 6)
        assert (await results(client, done.output_file_id)).keys() == {f"{i}" for i in range(6)}
        assert 0 < len(submitted(live)) <= 3


@pytest.mark.parametrize(
    ("was", "expires_in_s", "becomes"),
    [
        ("in_progress", -1, "expired"),
        ("cancelling", 99, "cancelled"),
        ("finalizing", 99, "completed"),
    ],
)
async def test_what_a_server_left_open_ends(
    keeping: Any, tmp_path: Path, was: Any, expires_in_s: int, becomes: str
) -> None:
    async with keeping() as live, client_of(live) as client:
        done = await reached(client, (await start(client, line("a"))).id, "completed")
    (path,) = (tmp_path / "files").glob("*/batch_*.json")
    batch = msgspec.json.decode(path.read_bytes(), type=Batch)
    batch.status = was
    batch.expires_at = int(time.time()) + expires_in_s
    path.write_bytes(msgspec.json.encode(batch))
    async with keeping() as live, client_of(live) as client:
        again = await reached(client, done.id, becomes)
        assert getattr(again, f"{becomes}_at")
        assert (await results(client, again.output_file_id)).keys() == {"a"}
        assert not submitted(live)


async def test_a_busy_server_only_delays_a_batch(keeping: Any) -> None:
    async with keeping(max_queued_requests=0) as live, client_of(live) as client:
        live.engine.gate.clear()
        others = asyncio.create_task(live.post(CHAT, line("", n=64)["body"]))
        await until(lambda: len(submitted(live)) == 64)
        made = await start(client, line("a"))
        await until(lambda: live.front.stats.rejected)
        live.engine.gate.set()
        done = await reached(client, made.id, "completed")
        assert done.request_counts.completed == 1
        assert (await others)[0] == 200


async def test_results_stop_where_the_room_ends(keeping: Any) -> None:
    async with keeping(files_bytes=30_000) as live, client_of(live) as client:
        made = await start(client, *(line(f"{i}") for i in range(130)))
        done = await reached(client, made.id, "failed")
        assert "no room" in done.errors.data[0].message
        assert done.request_counts.completed == len(await results(client, done.output_file_id))


async def test_lines_pay_their_keys_rates_and_wait_for_them(keeping: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys: [{key: few, requests_per_minute: 2}, {key: short, tokens_per_minute: 5}, {key: free}]"
    )
    async with keeping(api_key_file=str(path)) as live:
        async with client_of(live, "few") as client:
            waiting = await start(client, *[line(name) for name in "abc"])
            async with asyncio.timeout(10):
                while (await client.batches.retrieve(waiting.id)).request_counts.completed < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="org/tiny", **line("d")["body"])
            assert (await client.batches.retrieve(waiting.id)).status == "in_progress"
        async with client_of(
            live, "free"
        ) as client:  # a batch that waits keeps no other from going on
            done = await reached(
                client, (await start(client, *[line(name) for name in "abc"])).id, "completed"
            )
            assert done.request_counts.completed == 3
        async with client_of(live, "short") as client:  # waiting would never help
            done = await reached(client, (await start(client, line("a"))).id, "completed")
            bad = await results(client, done.error_file_id)
            assert bad["a"]["response"]["body"]["error"]["code"] == "rate_limit_exceeded"
