"""Chat completions: whole and streamed answers agree, shapes are OpenAI's."""

from __future__ import annotations

import asyncio

from moeserve.messages import Abort
from tests.server.conftest import until

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Tell me a story"}], "temperature": 0}


async def test_a_whole_answer(live, story):
    status, body, response = await live.post(CHAT, ASK)
    assert status == 200
    choice = body["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": story,
        "refusal": None,
        "annotations": [],
    }
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("stop", 0, None)
    assert (body["object"], body["model"]) == ("chat.completion", "org/tiny")
    assert body["id"] == f"chatcmpl-{response.headers['X-Request-Id']}"
    usage = body["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == len(live.engine.script)


async def test_streamed_is_whole(live, story):
    events = await live.events(CHAT, ASK | {"stream_options": {"include_usage": True}})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *body, usage = events
    assert all(event["usage"] is None for event in body)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(live.engine.script)
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in body)
    assert text == story
    assert [event["choices"][0]["finish_reason"] for event in body][-1] == "stop"
    assert [event["choices"][0]["finish_reason"] for event in body].count(None) == len(body) - 1


async def test_without_include_usage_no_chunk_has_usage(live):
    events = await live.events(CHAT, ASK)
    assert all("usage" not in event for event in events)


async def test_stop_strings_cut_the_same_streamed_or_not(live, story):
    for stop in ("😀", ["knew", "time a"], "\n"):
        _, whole, _ = await live.post(CHAT, ASK | {"stop": stop})
        events = await live.events(CHAT, ASK | {"stop": stop})
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        first = min((story.index(s), s) for s in ([stop] if isinstance(stop, str) else stop))
        assert text == whole["choices"][0]["message"]["content"] == story[: first[0]]
        assert (
            whole["choices"][0]["stop_reason"]
            == events[-1]["choices"][0]["stop_reason"]
            == first[1]
        )


async def test_several_choices_do_not_mix(live, story):
    _, whole, _ = await live.post(CHAT, ASK | {"n": 3})
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert {c["message"]["content"] for c in whole["choices"]} == {story}
    assert whole["usage"]["completion_tokens"] == 3 * len(live.engine.script)
    events = await live.events(CHAT, ASK | {"n": 3})
    texts = ["", "", ""]
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [story] * 3


async def test_logprobs(live, tokenizer):
    asked = ASK | {"logprobs": True, "top_logprobs": 3, "max_tokens": 4}
    _, whole, _ = await live.post(CHAT, asked)
    rows = whole["choices"][0]["logprobs"]["content"]
    assert [row["token"] for row in rows] == [
        tokenizer.token_text(i) for i in live.engine.script[:4]
    ]
    assert all(len(row["top_logprobs"]) == 3 for row in rows)
    assert rows[0]["top_logprobs"][0]["logprob"] == rows[0]["logprob"] == -0.5
    assert bytes(rows[0]["bytes"]).decode() == rows[0]["token"]
    events = await live.events(CHAT, asked)
    streamed = [
        row for e in events for row in ((e["choices"][0]["logprobs"] or {}).get("content") or [])
    ]
    assert streamed == rows
    _, bare, _ = await live.post(CHAT, ASK | {"logprobs": True, "max_tokens": 1})
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_token_ids_on_request(live):
    asked = ASK | {
        "return_token_ids": True,
        "max_tokens": 5,
        "return_tokens_as_token_ids": True,
        "logprobs": True,
    }
    _, whole, _ = await live.post(CHAT, asked)
    assert whole["choices"][0]["token_ids"] == live.engine.script[:5]
    assert whole["usage"]["prompt_tokens"] == len(whole["prompt_token_ids"])
    first = whole["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == f"token_id:{live.engine.script[0]}"
    events = await live.events(CHAT, asked)
    assert [i for e in events for i in e["choices"][0].get("token_ids", [])] == live.engine.script[
        :5
    ]
    assert events[0]["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]


async def test_running_usage(live):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await live.events(CHAT, ASK | {"max_tokens": 3, "stream_options": options})
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 3)


async def test_the_rendered_prompt_can_be_seen(live, tokenizer):
    _, body, _ = await live.post(CHAT + "/render", ASK)
    assert body["prompt"] == "<|im_start|>user\nTell me a story<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(body["prompt_token_ids"], skip_special_tokens=False) == body["prompt"]


async def test_defaults_of_the_model_apply_unless_given(launch):
    async with launch(defaults={"temperature": 0.25, "top_k": 7}) as live:
        await live.post(CHAT, {"messages": ASK["messages"], "max_tokens": 1, "top_k": 3})
        sampling = live.engine.told[-1].sampling
        assert (sampling.temperature, sampling.top_k) == (0.25, 3)


async def test_an_error_before_the_first_token_is_a_real_status(live):
    live.engine.break_after = 0
    for stream in (False, True):
        status, body, response = await live.post(CHAT, ASK | {"stream": stream})
        assert status == 500
        assert response.headers["X-Request-Id"] in body["error"]["message"]
        assert "secret" not in body["error"]["message"]


async def test_an_error_in_the_middle_is_an_event_before_done(live):
    live.engine.break_after = 3
    events = await live.events(CHAT, ASK)
    assert events[-1]["error"]["code"] == "internal_error"
    assert "secret" not in str(events)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    status, _, _ = await live.post(CHAT, ASK)
    assert status == 500


async def test_an_engine_that_refuses_is_a_400(live):
    live.engine.refuse = "too many blocks"
    status, body, _ = await live.post(CHAT, ASK | {"stream": True})
    assert (status, body["error"]["code"], body["error"]["message"]) == (
        400,
        "refused",
        "too many blocks",
    )


async def test_a_client_that_leaves_aborts(live):
    live.engine.gate.clear()
    for stream in (False, True):
        told = len(live.engine.told)
        task = asyncio.create_task(live.post(CHAT, ASK | {"stream": stream, "n": 2}))
        await until(lambda: len(live.engine.rows) == 2)
        task.cancel()
        await until(lambda: not live.engine.rows)
        assert isinstance(live.engine.told[-1], Abort)
        assert len(live.engine.told) == told + 3
        await until(lambda: not live.context.running and not live.context.streams)


async def test_a_client_that_leaves_mid_stream_aborts(live):
    async with live.session.post(
        live.url + CHAT, json=ASK | {"stream": True, "bad_words": ["x"]}
    ) as response:
        await response.content.readany()
        live.engine.gate.clear()
        response.close()
        await until(lambda: not live.engine.rows)
    await until(lambda: not live.context.streams)
    assert live.context.responses[CHAT, 499] == 1


async def test_a_running_request_can_be_aborted_by_id(live):
    live.engine.gate.clear()
    headers = {"X_Request_Id": "mine"}
    whole = asyncio.create_task(live.post(CHAT, ASK | {"n": 2}, **headers))
    streamed = asyncio.create_task(live.events(CHAT, ASK))
    await until(lambda: len(live.engine.rows) == 3)
    ids = [name for name in live.context.running if name != "mine"]
    for name, count in (("mine", 2), (f"chatcmpl-{ids[0]}", 1)):
        async with live.session.delete(f"{live.url}/v1/requests/{name}") as response:
            assert (await response.json())["aborted"] == count
    _, body, _ = await whole
    assert [c["finish_reason"] for c in body["choices"]] == ["abort", "abort"]
    assert (await streamed)[-1]["choices"][0]["finish_reason"] == "abort"
    async with live.session.delete(f"{live.url}/v1/requests/mine") as response:
        assert response.status == 404
    assert not live.engine.rows


async def test_silence_is_filled_with_pings(launch, story):
    async with launch(sse_ping_s=0.1) as live:
        live.engine.gate.clear()
        async with live.session.post(live.url + CHAT, json=ASK | {"stream": True}) as response:
            assert response.status == 200  # headers come although no token did
            raw = b""
            while raw.count(b": ping\n\n") < 2:
                raw += await response.content.readany()
            live.engine.gate.set()
            raw += await response.read()
        assert raw.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"stop"' in raw


async def test_two_live_requests_may_share_an_id(live, story):
    answers = await asyncio.gather(*(live.post(CHAT, ASK, X_Request_Id="same") for _ in range(2)))
    assert [body["choices"][0]["message"]["content"] for _, body, _ in answers] == [story, story]
    assert not live.context.running
