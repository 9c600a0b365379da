"""/v1/batches through the openai package: every line is answered once, whatever happens."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from moeserve.messages import Submit
from moeserve.server import batches, file_store, internal
from moeserve.server.batch_file import BatchLine, ResultFile, read_input
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
    async with asyncio.timeout(20):
        while (batch := await client.batches.retrieve(id)).status not in states:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return batch


async def until(reached: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
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
        assert [msg.priority for msg in submitted(live)] == [internal.LOW_PRIORITY] * 2
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


@pytest.mark.parametrize("keys", [("one", "two"), ("one",), ()])
async def test_lines_share_prefixes_with_their_keys_requests(keeping: Any, keys: Any) -> None:
    async with keeping(api_key=keys) as live:
        salts = {}
        for key in keys or ("none",):
            async with client_of(live, key) as client:
                await client.chat.completions.create(model="org/tiny", **line("a")["body"])
                salts[key] = submitted(live)[-1].salt
                made = await start(client, line("a"), line("b", cache_salt="mine"))
                await reached(client, made.id, "completed")
                of_lines = {msg.salt for msg in submitted(live)[-2:]}  # in any order
                assert salts[key] in of_lines
                assert len(of_lines) == 2
        assert len(set(salts.values())) == max(1, len(keys))


async def test_lines_of_a_key_that_was_removed_share_with_nobody(
    keeping: Any, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text("one\ntwo\nthree\n")
    async with keeping(api_key_file=str(path)) as live:
        async with client_of(live, "one") as client:
            live.engine.gate.clear()
            file = await upload(client, line("a"))
            live.context.draining = True  # no line is asked for yet
            made = await client.batches.create(
                input_file_id=file, endpoint=CHAT, completion_window="24h"
            )
        path.write_text("two\nthree\n")
        auth = live.context.auth
        auth.use(auth.read())
        live.context.draining = False
        live.engine.gate.set()
        await until(lambda: submitted(live))
        salts = {submitted(live)[-1].salt}
        for key in ("two", "three"):
            await live.post(CHAT, line("a")["body"], X_Api_Key=key)
            salts.add(submitted(live)[-1].salt)
        assert len(salts) == 3
        assert "" not in salts
        assert made.id


async def test_a_key_ends_the_lines_of_its_batches(keeping: Any) -> None:
    async with keeping(api_key=("one", "two")) as live, client_of(live, "one") as client:
        live.engine.pause_at = 1
        made = await start(client, line("a", 9))
        await until(lambda: live.context.running)
        (id,) = live.context.running
        for key, status in (("two", 403), ("one", 200)):
            url = f"{live.url}/v1/requests/{id}"
            async with live.session.delete(url, headers={"X-Api-Key": key}) as response:
                assert response.status == status
        done = await reached(client, made.id, "completed")
        body = (await results(client, done.output_file_id))["a"]["response"]["body"]
        assert body["choices"][0]["finish_reason"] == "abort"


async def test_cancelling_keeps_what_is_answered(keeping: Any) -> None:
    async with keeping() as live, client_of(live) as client:
        live.engine.pause_at = 2
        made = await start(client, line("a"), *(line(f"slow {i}", 9) for i in range(80)))
        await until(lambda: record(live, made.id).request_counts.completed)
        with pytest.raises(openai.ConflictError):
            await client.files.delete(made.input_file_id)
        assert (await client.batches.cancel(made.id)).status == "cancelling"
        done = await reached(client, made.id, "cancelled")
        assert done.cancelling_at <= done.cancelled_at
        assert len(await results(client, done.output_file_id)) == done.request_counts.completed > 0
        assert done.request_counts.completed < done.request_counts.total
        assert not live.context.running


async def test_a_restart_goes_on_where_the_last_server_stopped(keeping: Any) -> None:
    lines = [line(f"{i}", 1 if i < 3 else 9) for i in range(6)]
    async with keeping() as live, client_of(live) as client:
        live.engine.pause_at = 2
        made = await start(client, *lines)
        await until(lambda: record(live, made.id).request_counts.completed == 3)
    async with keeping() as live, client_of(live) as client:
        done = await reached(client, made.id, "completed")
        assert (done.request_counts.total, done.request_counts.completed) == (6, 6)
        assert (await results(client, done.output_file_id)).keys() == {f"{i}" for i in range(6)}
        assert len(submitted(live)) == 3


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
        assert "no space" in done.errors.data[0].message
        assert done.request_counts.completed == len(await results(client, done.output_file_id))


async def test_lines_pay_their_keys_rates_and_wait_for_them(keeping: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys: [{key: few, requests_per_minute: 2}, {key: short, tokens_per_minute: 5}, {key: "
        "free}]"
    )
    async with keeping(api_key_file=str(path)) as live:
        async with client_of(live, "few") as client:
            waiting = await start(client, *[line(name) for name in "abc"])
            async with asyncio.timeout(20):
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


def failing(num: int, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Let the disk refuse the next `num` records. Return the list of those it refused."""
    refused: list[Path] = []
    write = file_store._write_whole

    def write_or_fail(path: Path, data: bytes) -> None:
        if len(refused) < num:
            refused.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(file_store, "_write_whole", write_or_fail)
    return refused


async def test_a_batch_waits_for_a_full_disk_and_then_ends(
    keeping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "FIRST_PAUSE_S", 0.01)
    async with keeping() as live, client_of(live) as client:
        live.engine.pause_at = 1
        made = await start(client, line("a"), line("b", temperature=-1))
        await until(lambda: live.engine.rows)
        refused = failing(4, monkeypatch)
        live.engine.pause_at = None
        live.engine.gate.set()
        done = await reached(client, made.id, "completed", "failed")
        assert done.status == "completed"
        assert done.errors is None
        assert len(refused) == 4
        assert (await results(client, done.output_file_id)).keys() == {"a"}
        assert (await results(client, done.error_file_id)).keys() == {"b"}
        assert len(submitted(live)) == 1  # its answer was not lost


async def test_a_batch_that_is_cancelled_while_the_disk_is_full_ends(
    keeping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "FIRST_PAUSE_S", 0.01)
    async with keeping() as live, client_of(live) as client:
        live.engine.pause_at = 1
        made = await start(client, line("a"))
        await until(lambda: live.engine.rows)
        refused = failing(10, monkeypatch)
        live.engine.pause_at = None
        await until(lambda: len(refused) >= 3)
        with pytest.raises(openai.InternalServerError):
            await client.batches.cancel(made.id)
        done = await reached(client, made.id, "cancelled")
        assert done.completed_at is None


async def test_a_bug_at_the_end_of_a_batch_ends_it_as_failed(
    keeping: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*args: Any) -> None:
        raise RuntimeError("planted")

    async with keeping() as live, client_of(live) as client:
        monkeypatch.setattr(live.context.batches.store, "publish", broken)
        done = await reached(client, (await start(client, line("a"))).id, "failed")
        assert done.failed_at
        assert "log" in done.errors.data[0].message
        assert "planted" in caplog.text
    monkeypatch.undo()
    async with keeping() as live, client_of(live) as client:  # the next server ends it rightly
        done = await reached(client, done.id, "completed")
        assert (await results(client, done.output_file_id)).keys() == {"a"}
        assert not submitted(live)


async def test_a_batch_is_run_though_its_sender_has_left(keeping: Any) -> None:
    async with keeping() as live, client_of(live) as client:
        file = await upload(client, line("a"))
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        store = live.context.batches.store
        (owner,) = store.owners()
        entered = asyncio.Event()
        run_in_order = store.run_in_order

        async def slow(*args: Any) -> Any:
            entered.set()
            await asyncio.sleep(0.05)
            return await run_in_order(*args)

        store.run_in_order = slow
        asking = asyncio.create_task(live.post("/v1/batches", body))
        await entered.wait()
        asking.cancel()
        await until(lambda: [batch.status for batch in store.all(owner, Batch)] == ["completed"])


def test_a_result_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.write

    def full(fd: int, data: Any) -> int:
        if b"two" in bytes(data) and len(data) > 5:
            return written(fd, bytes(data)[:5])
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "full")
        return written(fd, data)

    file = ResultFile(tmp_path / "out")
    assert file.read() == set()
    assert not file.path.exists()
    good = [BatchLine(name, 1).result(200, None, b"{}") for name in ("one", "two", "three")]
    file.append(good[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="full"):
            file.append(good[1][:20])
    file.append(good[2])
    file.close()
    assert file.path.read_bytes() == good[0] + good[2]
    assert (file.size, file.num_lines) == (len(good[0] + good[2]), 2)
    again = ResultFile(file.path)
    assert {custom_id for _, custom_id in again.read()} == {"one", "three"}
    assert (again.size, again.num_lines) == (file.size, 2)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(line("a")).encode())
    (one,) = read_input(path)
    assert (one.custom_id, one.fault) == ("a", None)
