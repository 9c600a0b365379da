"""Streamed answers: whole, cut, broken, and left early."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from moeserve import AsyncClient, errors
from moeserve.client import Stream
from tests.client.scripted import Reply, Server, error, hang_up, stream

ASK: Any = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


def chunk(text: str, finish: str | None = None) -> bytes:
    body = {
        "id": "c",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}],
        "x": 1,
    }
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def text_of(stream: Stream[Any]) -> str:
    return "".join([c.choices[0].delta.content async for c in stream if c.choices])


async def test_chunks_arrive_in_order(server: Server, client: AsyncClient) -> None:
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
    server.script = [
        stream(b": ping\n\n", chunk("a\u00e9"), chunk("b") + chunk("", "stop"), usage, DONE)
    ]
    async with await client.chat.completions.create(**ASK) as chunks:
        assert chunks.request_id == "req-9"
        assert chunks.headers["content-type"] == "text/event-stream"
        got = [c async for c in chunks]
    assert [c.choices[0].delta.content for c in got[:3]] == ["a\u00e9", "b", ""]
    assert got[2].choices[0].finish_reason == "stop"
    assert got[3].usage is not None
    assert got[3].usage.completion_tokens == 3
    assert got[0].request_id == "req-9"
    assert server.seen[0][2]["stream"] is True


async def test_completions_stream_too(server: Server, client: AsyncClient) -> None:
    server.script = [stream(b'data: {"choices": [{"text": "x", "token_ids": [4]}]}\n\n', DONE)]
    chunks = [c async for c in await client.completions.create(prompt="p", stream=True)]
    assert chunks[0].choices[0].token_ids == [4]


async def test_the_word_error_inside_text_is_text(server: Server, client: AsyncClient) -> None:
    server.script = [stream(chunk('"error": {"message": "x"}'), chunk("error"), DONE)]
    assert (
        await text_of(await client.chat.completions.create(**ASK))
        == '"error": {"message": "x"}error'
    )


@pytest.mark.parametrize("first", [error(503, retry_after_ms="1"), hang_up()])
async def test_a_stream_is_tried_again_before_its_first_byte(
    server: Server, client: AsyncClient, first: Reply
) -> None:
    server.script = [first, stream(chunk("ok"), DONE)]
    assert await text_of(await client.chat.completions.create(**ASK)) == "ok"


async def test_an_error_before_the_stream_is_raised_by_create(
    server: Server, client: AsyncClient
) -> None:
    server.script = [error(400, "invalid_value", param="n")]
    with pytest.raises(errors.InvalidRequest) as caught:
        await client.chat.completions.create(**ASK)
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        ({"error": {"message": "gone", "code": "engine_lost"}}, errors.EngineLost, 503),
        ({"error": {"message": "gone", "code": 400}}, errors.InvalidRequest, 400),
        ({"error": {"message": "gone"}}, errors.RequestFailed, 500),
        ({"error": "gone"}, errors.RequestFailed, 500),
    ],
)
async def test_an_error_chunk_is_raised_and_not_tried_again(
    server: Server, client: AsyncClient, body: Any, kind: type[errors.RequestError], status: int
) -> None:
    server.script = [stream(chunk("a"), f"data: {json.dumps(body)}\n\n".encode(), DONE)]
    chunks = await client.chat.completions.create(**ASK)
    assert (await anext(chunks)).choices[0].delta.content == "a"
    with pytest.raises(kind, match="gone") as caught:
        await anext(chunks)
    assert (caught.value.http_status, caught.value.request_id) == (status, "req-9")
    assert len(server.seen) == 1
    with pytest.raises(StopAsyncIteration):
        await anext(chunks)


@pytest.mark.parametrize("cut", [True, False])
async def test_an_end_without_done_is_an_error(
    server: Server, client: AsyncClient, cut: bool
) -> None:
    server.script = [stream(chunk("a"), cut=cut)]
    with pytest.raises(errors.Unreachable):
        await text_of(await client.chat.completions.create(**ASK))
    assert len(server.seen) == 1


async def test_garbage_in_the_stream_is_an_error(server: Server, client: AsyncClient) -> None:
    server.script = [stream(b"data: {nonsense\n\n", forever=True)]
    with pytest.raises(errors.Unreachable, match="cannot be read"):
        await text_of(await client.chat.completions.create(**ASK))
    await server.vanished.wait()


async def test_silence_inside_a_stream_is_a_timeout(server: Server) -> None:
    server.script = [stream(chunk("a"), forever=True)]
    async with AsyncClient(server.url, timeout_s=0.1) as client:
        with pytest.raises(errors.Unreachable, match=r"no byte for 0\.1 s"):
            await text_of(await client.chat.completions.create(**ASK))
    await server.vanished.wait()


async def test_leaving_the_context_closes_the_socket(server: Server, client: AsyncClient) -> None:
    server.script = [stream(chunk("a"), forever=True)]
    async with await client.chat.completions.create(**ASK) as chunks:
        await anext(chunks)
    await server.vanished.wait()


async def test_breaking_out_of_a_loop_closes_the_socket(
    server: Server, client: AsyncClient
) -> None:
    server.script = [stream(chunk("a"), forever=True)]
    async for _ in await client.chat.completions.create(**ASK):
        break
    gc.collect()
    await server.vanished.wait()


async def test_cancelling_a_reader_closes_the_socket(server: Server, client: AsyncClient) -> None:
    server.script = [stream(chunk("a"), forever=True)]
    first = asyncio.Event()

    async def read() -> None:
        async for _ in await client.chat.completions.create(**ASK):
            first.set()

    task = asyncio.create_task(read())
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await server.vanished.wait()


async def test_closing_twice_and_reading_after_is_the_end(
    server: Server, client: AsyncClient
) -> None:
    server.script = [stream(chunk("a"), forever=True)]
    chunks = await client.chat.completions.create(**ASK)
    await chunks.aclose()
    await chunks.aclose()
    assert [c async for c in chunks] == []


async def test_a_finished_stream_gives_its_connection_back(
    server: Server, client: AsyncClient
) -> None:
    server.script = [stream(chunk("a"), DONE)]
    for _ in range(5):
        await text_of(await client.chat.completions.create(**ASK))
    assert len(server.connections) == 1


def numbered(place: int, data: bytes) -> bytes:
    return b"id: k:%d\n" % place + data


async def test_a_stream_with_ids_goes_on_behind_its_last_whole_event(
    server: Server, client: AsyncClient
) -> None:
    half = numbered(3, chunk("lost"))[:-2]
    server.script = [
        stream(numbered(1, chunk("a")), numbered(2, chunk("b")) + half, cut=True),
        error(503, "model_loading"),
        stream(numbered(3, chunk("c"))),  # ends without [DONE]
        stream(numbered(4, chunk("d", "stop")) + DONE),
    ]
    assert await text_of(await client.chat.completions.create(**ASK)) == "abcd"
    assert [headers.get("last-event-id") for headers in server.headers] == [
        None,
        "k:2",
        "k:2",
        "k:3",
    ]
    assert all(seen == server.seen[0] for seen in server.seen)


async def test_a_stream_that_breaks_again_without_an_event_or_is_not_kept_fails(
    server: Server, client: AsyncClient
) -> None:
    for last in (stream(cut=True), error(404, "not_found")):
        server.script = [
            stream(numbered(1, chunk("a")), cut=True),
            last,
            stream(numbered(2, chunk("b")), DONE),
        ]
        with pytest.raises(errors.Unreachable):
            await text_of(await client.chat.completions.create(**ASK))
        assert len(server.script) == 1
