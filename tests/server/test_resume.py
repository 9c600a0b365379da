"""Resumed streams: after every event of a stream, the same bytes follow.

Also: streams whose readers never return.
"""

from __future__ import annotations

import asyncio
import json

import aiohttp
import msgspec
import pytest

from moeserve.frontend.journal import Change, Journal
from moeserve.messages import Abort, Submit

from .conftest import live_server, until
from .test_tools import CALLS, answering, asked

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 40, "seed": 3}
USAGE = {"stream_options": {"include_usage": True}}
REQUESTS = [
    (CHAT, ASK | USAGE),
    (
        CHAT,
        ASK
        | {
            "n": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "stream_options": {"continuous_usage_stats": True},
        },
    ),
    (CHAT, ASK | {"n": 2, "stop": ["old harbour"], "return_token_ids": True}),
    (
        "/v1/completions",
        {"prompt": "Once", "stream": True, "max_tokens": 30, "n": 2, "logprobs": 1, "echo": False},
    ),
    (
        "/v1/messages",
        {"model": "org/tiny", "messages": ASK["messages"], "stream": True, "max_tokens": 30},
    ),
]


@pytest.fixture
async def kept(tokenizer):
    """A server that keeps streams."""
    async with live_server(tokenizer, resume_window=30.0) as live:
        yield live


async def read(
    live, path, body, last=None, num=None, status=200, **headers
) -> list[tuple[str, str]]:
    """(id, the rest) of each event, of all or of the first `num`, after which the connection
    breaks.
    """
    if last is not None:
        headers["Last-Event-ID"] = last
    found = []
    text = ""
    async with live.session.post(live.url + path, json=body, headers=headers) as response:
        assert response.status == status, await response.text()
        if status != 200:
            return [("", await response.text())]
        async for piece in response.content.iter_any():
            text += piece.decode()
            *events, text = text.split("\n\n")
            for event in events:
                if not event.startswith(":"):
                    assert event.startswith("id: ")
                    id, rest = event[4:].split("\n", 1)
                    found.append((id, rest))
            if num is not None and len(found) >= num:
                response.close()
                return found[:num]
    return found


def flat(value) -> list[str]:
    """All numbers and texts in a piece of JSON, columns of logprobs included."""
    if isinstance(value, dict):
        value = [[key, inner] for key, inner in value.items() if inner is not None]
    if isinstance(value, list):
        return [text for inner in value for text in flat(inner)]
    return [str(value)]


def texts(events) -> list[object]:
    """Return all choices' values by field, however tokens are merged into events."""
    found: dict[object, list[str]] = {}
    for _, event in events:
        shown = event.split("data: ", 1)[1]
        if shown == "[DONE]":
            continue
        for choice in json.loads(shown).get("choices", ()):
            index = choice["index"]
            delta = choice.get("delta") or {}
            for name in ("text", "token_ids", "finish_reason", "stop_reason"):
                found.setdefault((index, name), []).extend(
                    flat(choice.get(name)) if choice.get(name) else []
                )
            found.setdefault((index, "content"), []).append(delta.get("content") or "")
            for name, rows in (choice.get("logprobs") or {}).items():
                found.setdefault((index, f"logprobs {name}"), []).extend(flat(rows) if rows else [])
    joined = ("text", "content")
    return sorted(
        (key, "".join(value) if key[1] in joined else value) for key, value in found.items()
    )


def data(events) -> str:
    return "\n".join(event for _, event in events)


def unmerged(events) -> list[tuple[str, str]]:
    """Return events' contents in order, with adjacent texts of one kind joined."""
    found: list[tuple[str, str]] = []
    for _, event in events:
        name, shown = event.rsplit("data: ", 1)
        body = {} if shown == "[DONE]" else json.loads(shown)
        choice = (body.get("choices") or [{}])[0]
        inner = choice.get("delta") or body.get("delta") or {}
        text = "".join(
            inner.pop(name, None) or "" for name in ("content", "reasoning", "text", "thinking")
        )
        text += inner.pop("partial_json", "")
        for call in inner.get("tool_calls") or ():
            text += call["function"].pop("arguments", "")
        kind = json.dumps([name, choice or body])
        if found and found[-1][0] == kind:
            text = found.pop()[1] + text
        found.append((kind, text))
    return found


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_the_rest_of_a_stream_is_the_same_from_each_event(kept, path, body):
    events = await read(kept, path, body)
    assert len({id for id, _ in events}) == len(events)
    for number, (id, _) in enumerate(events, 1):
        rest = await read(kept, path, body, last=id)
        whole = [*events[:number], *rest]
        if path == "/v1/messages":
            whole_text = "".join(
                json.loads(e.split("data: ", 1)[1]).get("delta", {}).get("text", "")
                for _, e in whole
            )
            assert whole_text == "".join(
                json.loads(e.split("data: ", 1)[1]).get("delta", {}).get("text", "")
                for _, e in events
            )
            assert data(whole[-2:]) == data(events[-2:])
        else:
            assert texts(whole) == texts(events)
            assert [e for _, e in rest[-1:]] == ([] if number == len(events) else ["data: [DONE]"])
    for id, _ in events[::7]:
        rest = await read(kept, path, body, last=id)
        assert data(await read(kept, path, body, last=id)) == data(
            rest
        )  # from a place, the same bytes each time


async def test_a_stream_goes_on_while_it_runs_and_tokens_come_one_by_one(kept):
    body = ASK | USAGE
    whole = await read(kept, CHAT, body)
    first = await read(kept, CHAT, body, num=2)
    rest = await read(kept, CHAT, body, last=first[-1][0])
    assert texts([*first, *rest]) == texts(whole)
    assert json.loads(rest[-2][1][6:])["usage"] == json.loads(whole[-2][1][6:])["usage"]
    assert json.loads(rest[0][1][6:])["id"] == json.loads(first[0][1][6:])["id"]


async def test_who_leaves_for_good_has_his_request_aborted_after_the_window(tokenizer):
    async with live_server(tokenizer, resume_window=0.05) as live:
        live.engine.gate.clear()
        asking = asyncio.create_task(live.session.post(live.url + CHAT, json=ASK))
        await until(lambda: live.engine.rows)
        live.engine._step()
        (await asking).close()
        await until(lambda: any(isinstance(told, Abort) for told in live.engine.told))
        assert not live.front.resumable.journal.streams
        assert not live.front.running.sequences


async def test_the_newer_of_two_readers_wins(kept):
    kept.engine.gate.clear()
    task = asyncio.create_task(read(kept, CHAT, ASK))
    await until(lambda: kept.front.running.sequences)
    kept.engine._step()
    (stream,) = await asyncio.sleep(0.05, kept.front.resumable.journal.streams.values())
    second = asyncio.create_task(read(kept, CHAT, ASK, last=f"{stream.entry.id}:0"))
    with pytest.raises(aiohttp.ClientError):
        await task
    kept.engine.gate.set()
    assert texts(await second) == texts(await read(kept, CHAT, ASK))
    assert not any(isinstance(told, Abort) for told in kept.engine.told)


async def test_wrong_ids_are_refused(kept):
    ((id, _),) = await read(kept, CHAT, ASK, num=1)
    key = id.split(":")[0]
    for last, status, what in (
        ("nonsense", 400, "must be the id"),
        (f"{key}:1.2", 400, "no such event"),
        (f"{key}:999", 400, "no such event"),
        (f"{'0' * 32}:1", 404, "not kept any more"),
    ):
        ((_, text),) = await read(kept, CHAT, ASK, last=last, status=status)
        assert what in text
    ((_, text),) = await read(kept, CHAT, ASK | {"seed": 4}, last=id, status=400)
    assert "another request" in text
    for path, body in (
        ("/v1/responses", {"model": "org/tiny", "input": "Hi", "stream": True}),
        ("/tokenize", {"model": "org/tiny", "prompt": "Hi"}),
    ):
        ((_, text),) = await read(kept, path, body, last=id, status=400)
        assert "is for streams of" in text
    assert data(await read(kept, CHAT, ASK, last=id)).endswith(
        "[DONE]"
    )  # nothing of this harmed it


async def test_without_a_window_there_are_no_ids_and_the_header_is_refused(tokenizer):
    async with live_server(tokenizer) as live:
        async with live.session.post(live.url + CHAT, json=ASK) as response:
            assert b"id: " not in await response.read()
        ((_, text),) = await read(live, CHAT, ASK, last="x:1", status=400)
        assert "resume_window" in text


async def test_another_front_end_goes_on_with_what_the_first_one_told(tokenizer):
    """The client is ahead of the replicated journal; tokens depend on the request alone."""
    changes = []
    async with live_server(tokenizer, resume_window=30.0) as first:
        whole = await read(first, CHAT, ASK | {"n": 2})
        first.front.resumable.journal.listener = lambda change: changes.append(
            msgspec.msgpack.encode(change)
        )
        had = (await read(first, CHAT, ASK | {"n": 2}))[:12]
    async with live_server(tokenizer, resume_window=30.0) as second:
        journal = Journal()
        for change in changes[:6]:
            journal.apply(msgspec.msgpack.decode(change, type=Change))
        (stream,) = journal.streams.values()
        second.engine.gate.clear()
        await second.front.restart(second.front.adopt(stream))
        replayed = [told for told in second.engine.told if isinstance(told, Submit)]
        assert all(len(told.tokens) // 4 - told.num_prompt == 5 for told in replayed)
        resumed = asyncio.create_task(read(second, CHAT, ASK | {"n": 2}, last=had[-1][0]))
        second.engine.gate.set()
        assert texts([*had, *await resumed]) == texts(whole)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_reasoning_and_calls_go_on_with_the_same_ids_of_calls(path):
    async with answering(CALLS, resume_window=30.0) as live:
        body = asked(stream=True, max_tokens=300, model="org/tiny")
        if path != CHAT:
            body["tools"] = [
                {
                    "name": tool["function"]["name"],
                    "input_schema": tool["function"].get("parameters", {"type": "object"}),
                }
                for tool in body["tools"]
            ]
        events = await read(live, path, body)
        whole = unmerged(events)
        assert any("weather" in key for key, _ in whole)
        for number in range(1, len(events)):
            rest = await read(live, path, body, last=events[number - 1][0])
            assert unmerged([*events[:number], *rest]) == whole


async def test_streams_of_other_keys_and_those_that_were_ended_by_their_id_are_unknown(tokenizer):
    async with live_server(tokenizer, resume_window=30.0, api_key=("one", "two")) as live:
        one = {"Authorization": "Bearer one"}
        two = {"Authorization": "Bearer two"}
        ((id, _),) = await read(live, CHAT, ASK, num=1, **one)
        ((_, text),) = await read(live, CHAT, ASK, last=id, status=404, **two)
        assert "not kept any more" in text
        await until(lambda: not live.front.running.sequences)
        live.engine.gate.clear()
        asking = asyncio.create_task(read(live, CHAT, ASK, **one))
        await until(lambda: live.engine.rows)
        (stream,) = [
            kept
            for kept in live.front.resumable.journal.streams.values()
            if live.front.resumable.generation_of(kept).num_live
        ]
        url = f"{live.url}/v1/requests/{stream.entry.request_id}"
        async with live.session.delete(url, headers=one) as response:
            assert (await response.json())["aborted"] == 1
        await asking
        await read(live, CHAT, ASK, last=f"{stream.entry.id}:0", status=404, **one)


async def test_each_resume_is_charged_as_a_request_and_its_tokens_once(tokenizer, tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: a, key: a, requests_per_minute: 3, tokens_per_minute: 10000}]")
    async with live_server(tokenizer, resume_window=30.0, api_key_file=str(path)) as live:
        key = {"X-Api-Key": "a"}
        events = await read(live, CHAT, ASK, **key)
        rates = live.context.auth.check(key).rate_limits
        tokens = rates.headers()["X-RateLimit-Remaining-Tokens"]
        for left in ("1", "0"):
            assert await read(live, CHAT, ASK, last=events[3][0], **key)
            headers = rates.headers()
            assert headers["X-RateLimit-Remaining-Requests"] == left
            assert int(headers["X-RateLimit-Remaining-Tokens"]) >= int(tokens)
        ((_, text),) = await read(live, CHAT, ASK, last=events[3][0], status=429, **key)
        assert "this key may use 3 requests a minute" in text
