"""The client with moeserve's own server, engine scripted: every resource fits every route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from moeserve import AsyncClient, errors
from moeserve.cluster.link import Resized
from moeserve.messages import Abort
from tests.server.conftest import CONTEXT, STORY, Live, live_server, make_tokenizer

ASK: Any = {"messages": [{"role": "user", "content": "Tell me"}]}


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    async with live_server(make_tokenizer()) as live:
        yield live


@pytest.fixture
async def ours(live: Live) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"{live.url}/v1", max_retries=0) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the scripted engine has no event for everything
        await asyncio.sleep(0)


async def test_streamed_is_unstreamed(ours: AsyncClient) -> None:
    whole = await ours.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    stream = await ours.chat.completions.create(
        **ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content == STORY
    assert chunks[0].choices[0].delta.role == "assistant"
    assert whole.usage is not None
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 2
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content is not None
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    assert whole.request_id
    assert stream.request_id == chunks[0].request_id != whole.request_id


async def test_completions_with_logprobs_and_several_prompts(ours: AsyncClient) -> None:
    got = await ours.completions.create(prompt=["a", "b"], logprobs=1, max_tokens=3, echo=True)
    assert [choice.index for choice in got.choices] == [0, 1]
    assert all(choice.text.startswith("ab"[choice.index]) for choice in got.choices)
    assert got.choices[0].logprobs is not None
    assert got.choices[0].logprobs.tokens is not None
    assert got.choices[0].finish_reason == "length"


async def test_models_and_tokens(ours: AsyncClient) -> None:
    (model,) = (await ours.models.list()).data
    assert (model.id, model.max_model_len) == ("org/tiny", CONTEXT)
    assert (await ours.models.retrieve("org/tiny")).id == "org/tiny"
    tokenized = await ours.tokenize(STORY)
    assert tokenized.count == len(tokenized.tokens)
    assert (await ours.detokenize(tokenized.tokens)).prompt == STORY
    assert (await ours.tokenize(messages=ASK["messages"])).count > 0


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"temperature": 3}, errors.InvalidRequest, "temperature"),
        ({"model": "other"}, errors.ModelNotFound, "model"),
        (
            {"messages": [{"role": "user", "content": "x" * 9000}]},
            errors.ContextLengthExceeded,
            "messages",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_the_servers(
    ours: AsyncClient, fields: Any, kind: type[errors.RequestError], param: str, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        await ours.chat.completions.create(**{**ASK, **fields}, stream=stream)
    assert type(caught.value) is kind
    assert caught.value.param == param
    assert caught.value.request_id


async def test_a_fault_in_the_middle_is_raised(live: Live, ours: AsyncClient) -> None:
    live.engine.break_after = 3
    stream = await ours.chat.completions.create(**ASK, stream=True)
    with pytest.raises(errors.RequestFailed) as caught:
        async for _ in stream:
            pass
    assert caught.value.request_id == stream.request_id
    assert "secret" not in str(caught.value)


async def test_leaving_a_stream_aborts_in_the_engine(live: Live, ours: AsyncClient) -> None:
    async with await ours.chat.completions.create(**ASK, stream=True, bad_words=["zz"]) as stream:
        await anext(stream)
    await until(lambda: any(isinstance(message, Abort) for message in live.engine.told))
    assert not live.engine.rows


async def test_cancelling_a_whole_answer_aborts_in_the_engine(
    live: Live, ours: AsyncClient
) -> None:
    live.engine.gate.clear()
    task = asyncio.create_task(ours.chat.completions.create(**ASK))
    await until(lambda: bool(live.engine.rows))
    task.cancel()
    await until(lambda: not live.engine.rows)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_abort_by_id_ends_the_stream_in_order(ours: AsyncClient) -> None:
    stream = await ours.chat.completions.create(**ASK, stream=True, bad_words=["zz"])
    await anext(stream)
    assert stream.request_id is not None
    assert (await ours.requests.abort(stream.request_id)).aborted == 1
    reasons = [c.choices[0].finish_reason async for c in stream if c.choices]
    assert reasons[-1] == "abort"
    with pytest.raises(errors.NotFound):
        await ours.requests.abort(stream.request_id)


async def test_keys() -> None:
    async with (
        live_server(make_tokenizer(), api_key=("k1",)) as live,
        AsyncClient(f"{live.url}/v1", "k1") as right,
        AsyncClient(f"{live.url}/v1", "no") as wrong,
    ):
        assert (await right.models.list()).data
        with pytest.raises(errors.Unauthorized):
            await wrong.models.list()
        await wrong.wait_ready(30)  # probes need no key


async def test_a_loading_server_is_not_ready() -> None:
    async with (
        live_server(make_tokenizer(), ready=False) as live,
        AsyncClient(f"{live.url}/v1") as client,
    ):
        with pytest.raises(errors.Unreachable, match=r"not ready after 0\.1 s"):
            await client.wait_ready(0.1)


async def test_experts_have_every_field_that_the_server_shows(
    ours: AsyncClient, live: Live
) -> None:
    with pytest.raises(errors.NotFound, match="dense"):
        await ours.experts()
    live.engine.outbox.put(
        Resized(msgspec.structs.replace(live.engine.ready(), num_moe_layers=2, num_experts=4))
    )
    await until(lambda: live.front.ready is not None and live.front.ready.num_experts == 4)
    told = msgspec.to_builtins(await ours.experts())
    async with live.session.get(f"{live.url}/v1/experts") as answer:
        shown = await answer.json()
    assert told.keys() == shown.keys()
    for name in ("balance", "load", "placement", "rebalancing"):
        assert told[name].keys() == shown[name].keys()
    assert (told["engines"], told["ranks"]) == (shown["engines"], shown["ranks"])
    async with await ours.watch_experts(interval_s=0.1) as stream:
        assert [(await anext(stream)).num_experts for _ in range(2)] == [4, 4]


async def test_a_stream_that_loses_its_connection_goes_on() -> None:
    async with (
        live_server(make_tokenizer(), resume_window=30.0) as live,
        AsyncClient(f"{live.url}/v1") as client,
    ):
        live.engine.gate.clear()
        asking = asyncio.create_task(client.chat.completions.create(**ASK, stream=True))
        await until(lambda: bool(live.engine.rows))
        live.engine._step()
        stream = await asking
        chunks = [await anext(stream), await anext(stream)]
        for broken in live.context.streams:
            broken.drop()
        live.engine.gate.set()
        chunks += [chunk async for chunk in stream]
        assert (
            "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            == STORY
        )
        assert len({chunk.id for chunk in chunks}) == 1
        assert not any(isinstance(told, Abort) for told in live.engine.told)
