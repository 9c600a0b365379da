"""/api/chat and /api/generate of Ollama, used by PyPI's `ollama` as it comes."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime

import numpy as np
import ollama
import pytest

from moeserve.messages import Submit
from moeserve.server.dialects.ollama_request import OllamaChatRequest
from moeserve.server.requests import HIDDEN_IMAGE, decode
from tests.server.conftest import until
from tests.server.test_tools import CALLS, CLOCK, TEMPLATE, WEATHER, answering

CHAT = "/api/chat"
GENERATE = "/api/generate"
MODEL = "org/tiny"
USER = {"role": "user", "content": "hi"}
ASK = {"model": MODEL, "messages": [USER], "stream": False}
PIXEL = "iVBORw0KGgo="


async def lines(live, path: str, body: dict) -> list[dict]:
    """Return the objects of a stream."""
    async with live.session.post(live.url + path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "application/x-ndjson"
        raw = (await response.read()).decode()
    *texts, rest = raw.split("\n")
    assert rest == ""
    return [json.loads(text) for text in texts]


# ---- answers


async def test_a_whole_chat(ollama_client, live, story):
    answer = await ollama_client.chat(MODEL, [USER])
    assert (answer.message.role, answer.message.content) == ("assistant", story)
    assert (answer.model, answer.done, answer.done_reason) == (MODEL, True, "stop")
    assert answer.message.thinking is None
    assert answer.message.tool_calls is None
    assert answer.eval_count == len(live.engine.script)
    assert answer.prompt_eval_count == live.engine.submitted.num_prompt
    parts = answer.load_duration, answer.prompt_eval_duration, answer.eval_duration
    assert all(part > 0 for part in parts)
    assert sum(parts) <= answer.total_duration + len(parts)
    age = datetime.now(UTC) - datetime.fromisoformat(answer.created_at)
    assert 0 <= age.total_seconds() < 60


async def test_a_streamed_chat_has_the_same_text_and_ends_with_the_counts(
    ollama_client, live, story
):
    chunks = [chunk async for chunk in await ollama_client.chat(MODEL, [USER], stream=True)]
    assert "".join(chunk.message.content for chunk in chunks) == story
    *parts, last = chunks
    assert len(parts) > 5
    assert not any(part.done or part.eval_count or part.done_reason for part in parts)
    assert (last.done, last.done_reason, last.message.content) == (True, "stop", "")
    assert last.eval_count == len(live.engine.script)


@pytest.mark.parametrize(
    ("path", "asked"), [(CHAT, {"messages": [USER]}), (GENERATE, {"prompt": "a"})]
)
async def test_a_stream_is_the_default(live, path, asked):
    async with live.session.post(live.url + path, json={"model": MODEL} | asked) as response:
        assert response.headers["Content-Type"] == "application/x-ndjson"
        assert (await response.read()).count(b"\n") > 5


async def test_curl_needs_no_content_type_but_pages_of_other_origins_cannot_use_that(live):
    for kind in ("application/x-www-form-urlencoded", "application/octet-stream"):
        headers = {"Content_Type": kind}
        status, answer, _ = await live.post(CHAT, ASK, **headers)
        assert status == 200, answer
        status, answer, _ = await live.post(CHAT, ASK, Origin="http://evil.example", **headers)
        assert (status, answer) == (415, {"error": "the Content-Type must be application/json"})
        assert (await live.post("/v1/chat/completions", {"messages": [USER]}, **headers))[0] == 415
    assert (await live.post(CHAT, ASK, Content_Type="text/plain"))[0] == 415


async def test_logprobs_belong_to_the_tokens(ollama_client, live):
    asked = {"logprobs": True, "top_logprobs": 2}
    whole = await ollama_client.chat(MODEL, [USER], **asked)
    assert len(whole.logprobs) == whole.eval_count
    assert all(len(row.top_logprobs) == 2 and row.logprob < 0 for row in whole.logprobs)
    chunks = [
        chunk async for chunk in await ollama_client.generate(MODEL, "hi", stream=True, **asked)
    ]
    streamed = [row for chunk in chunks for row in chunk.logprobs or ()]
    assert [row.token for row in streamed] == [row.token for row in whole.logprobs]
    bare = await ollama_client.chat(MODEL, [USER], logprobs=True)
    assert not any(row.top_logprobs for row in bare.logprobs)
    assert (await ollama_client.chat(MODEL, [USER], top_logprobs=2)).logprobs is None


async def test_silence_is_filled_with_empty_objects(launch, story):
    async with launch(sse_ping_s=0.1) as live:
        live.engine.gate.clear()
        async with ollama.AsyncClient(host=live.url) as ollama_client:
            chunks = await ollama_client.chat(MODEL, [USER], stream=True)
            empty = [(await anext(chunks)).message.content for _ in range(2)]
            assert empty == ["", ""]
            live.engine.gate.set()
            assert "".join([chunk.message.content async for chunk in chunks]) == story


# ---- tools and reasoning


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_round_trip_with_tools(streamed):
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: The city.
        """
        return f"sun in {city}"

    async with answering(CALLS) as live, ollama.AsyncClient(host=live.url) as ollama_client:
        history = [USER]
        if streamed:
            stream = await ollama_client.chat(MODEL, history, tools=[weather, CLOCK], stream=True)
            chunks = [chunk.message async for chunk in stream]
            calls = [call for chunk in chunks for call in chunk.tool_calls or ()]
            assert sum(chunk.tool_calls is not None for chunk in chunks) == 2
            message = ollama.Message(
                role="assistant",
                content="".join(chunk.content for chunk in chunks),
                thinking="".join(chunk.thinking or "" for chunk in chunks),
                tool_calls=calls,
            )
        else:
            answer = await ollama_client.chat(MODEL, history, tools=[weather, CLOCK])
            assert answer.done_reason == "stop"
            message = answer.message
        assert message.thinking.strip() == "A fox 😀?"
        assert message.content.strip() == "I look."
        found = [(call.function.name, call.function.arguments) for call in message.tool_calls]
        assert found == [("weather", {"city": "Köln 😀"}), ("clock", {})]
        history += [
            message,
            {"role": "tool", "tool_name": "weather", "content": weather(city="Köln 😀")},
            {"role": "tool", "tool_name": "clock", "content": "noon"},
        ]
        await ollama_client.chat(MODEL, history, tools=[weather, CLOCK])
        prompt = live.engine.prompt
        assert (
            '<tool_call>{"name": "weather", "arguments": {"city": "Köln 😀"}}</tool_call>' in prompt
        )
        assert (
            "<|im_start|>tool\nsun in Köln 😀<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>" in prompt
        )
        assert '"description": "Tell the weather."' in prompt


async def test_calls_have_ids_and_numbers(live):
    async with answering(CALLS) as live:
        body = ASK | {"tools": [WEATHER, CLOCK]}
        _, whole, _ = await live.post(CHAT, body)
        calls = whole["message"]["tool_calls"]
        assert [call["function"]["index"] for call in calls] == [0, 1]
        assert len({call["id"] for call in calls}) == 2
        *_, last = await lines(live, CHAT, body)
        assert "tool_calls" not in last["message"]


async def test_every_object_of_a_stream_is_one_line():
    """Clients that use httpx end lines at more signs than a line feed."""
    text = "a\u2028b\u2029c\x85d"
    arguments = '{\n  "city":\r\n  "Köln\u2028"\n}'
    written = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    async with (
        answering(f"{text}\n{written}<|im_end|>") as live,
        ollama.AsyncClient(live.url) as it,
    ):
        stream = await it.chat(MODEL, [USER], tools=[WEATHER], stream=True)
        messages = [part.message async for part in stream]
    assert "".join(message.content or "" for message in messages).strip() == text
    (call,) = [call for message in messages for call in message.tool_calls or ()]
    assert call.function.arguments == {"city": "Köln\u2028"}


SHOWS_IDS = TEMPLATE.replace(
    "{{ m.role }}\n", "{{ m.role }} {{ m.name }} {{ m.tool_call_id }}\n"
).replace("{{ c.function|tojson }}", "{{ c.id }}:{{ c.function|tojson }}")


def call_of(name: str, **more) -> dict:
    return {"function": {"name": name, "arguments": {}}} | more


@pytest.mark.parametrize(
    ("calls", "results", "expected"),
    [
        ([call_of("f"), call_of("g")], [{}, {}], [("f", 0), ("g", 1)]),
        (
            [call_of("f"), call_of("g")],
            [{"tool_name": "g"}, {"tool_name": "f"}],
            [("g", 1), ("f", 0)],
        ),
        ([call_of("f", id="a"), call_of("g", id="b")], [{"tool_call_id": "b"}], [("g", 1)]),
        ([call_of("f"), call_of("f")], [{"tool_call_id": "x"}, {}], [("f", 0), ("f", 1)]),
        (
            [call_of("f", id="a"), call_of("f"), call_of("g")],
            [{}, {"tool_call_id": "a", "tool_name": "g"}, {"tool_name": "f"}],
            [("f", 0), ("g", 2), ("f", 1)],
        ),
    ],
)
async def test_results_belong_to_calls_without_ids(calls, results, expected):
    """Home Assistant sends neither ids nor names; litellm sends ids that no call has."""
    async with answering(CALLS, SHOWS_IDS) as live:
        turns = [{"role": "tool", "content": "r", **result} for result in results]
        messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *turns]
        status, answer, _ = await live.post(CHAT, ASK | {"messages": messages})
        assert status == 200, answer
        shown = live.engine.prompt.split("<tool_call>")[1:]
        ids = [one.partition(":")[0] for one in shown]
        assert all(ids)
        assert len(set(ids)) == len(calls)
        heads = [turn.split("\n")[0] for turn in live.engine.prompt.split("<|im_start|>tool ")[1:]]
        assert heads == [f"{name} {ids[number]}" for name, number in expected]


def test_the_results_of_many_calls_are_found_at_once():
    """The event loop waits meanwhile."""
    names = [f"f{i}" for i in range(20_000)]
    calling = {"role": "assistant", "tool_calls": [call_of(name) for name in names]}
    results = [{"role": "tool", "content": "", "tool_name": name} for name in reversed(names)]
    body = {"model": MODEL, "messages": [USER, calling, *results]}
    request = decode(body, OllamaChatRequest).request
    started = time.perf_counter()
    chat = request.chat(lambda name, number: f"{name}:{number}")
    assert time.perf_counter() - started < 2
    assert chat.messages[2].tool_call_id == "f19999:19999"


@pytest.mark.parametrize(
    ("think", "shown"),
    [
        (None, ["unset", "unset"]),
        (True, ["True", "unset"]),
        (False, ["False", "unset"]),
        ("low", ["True", "low"]),
        ("max", ["True", "max"]),
    ],
)
async def test_think_sets_the_templates_switch(think, shown):
    template = TEMPLATE + (
        "{{ enable_thinking if enable_thinking is defined else 'unset' }} "
        "{{ reasoning_effort if reasoning_effort is defined else 'unset' }}"
    )
    async with (
        answering(CALLS, template) as live,
        ollama.AsyncClient(host=live.url) as ollama_client,
    ):
        for ask in (
            ollama_client.chat(MODEL, [USER], think=think),
            ollama_client.generate(MODEL, "a", think=think),
        ):
            answer = await ask
            assert live.engine.prompt.split("\n")[-1].split(" ") == shown
            thinking = answer.thinking if "thinking" in answer else answer.message.thinking
            assert thinking.strip() == "A fox 😀?"


@pytest.mark.parametrize("think", [True, "high"])
async def test_think_is_refused_where_the_model_cannot(ollama_client, think):
    for asked in (
        ollama_client.chat(MODEL, [USER], think=think),
        ollama_client.generate(MODEL, "a", think=think),
    ):
        with pytest.raises(ollama.ResponseError, match="does not support thinking") as failed:
            await asked
        assert failed.value.status_code == 400
    assert (await ollama_client.chat(MODEL, [USER], think=False)).done


async def test_a_format_constrains_the_answer(ollama_client, live):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    for asked, kind in (("json", "json_object"), (schema, "json_schema")):
        await ollama_client.chat(MODEL, [USER], format=asked)
        assert live.engine.submitted.sampling.grammar.kind == kind
        await ollama_client.generate(MODEL, "a", format=asked)
        assert live.engine.submitted.sampling.grammar.kind == kind
    await ollama_client.chat(MODEL, [USER], format="")
    assert live.engine.submitted.sampling.grammar is None
    status, answer, _ = await live.post(CHAT, ASK | {"format": {"type": "robot"}})
    assert (status, answer["error"][:6]) == (400, "format")


async def test_an_assistants_last_message_is_continued(live):
    body = ASK | {"messages": [USER, {"role": "assistant", "content": "Once upon"}]}
    assert (await live.post(CHAT, body))[0] == 200
    assert live.engine.prompt.endswith("assistant\nOnce upon")


# ---- generate


async def test_generate_uses_the_template_and_raw_does_not(ollama_client, live, story):
    answer = await ollama_client.generate(MODEL, "hi", system="Be brief.")
    assert (answer.response, answer.done_reason) == (story, "stop")
    assert live.engine.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    raw = await ollama_client.generate(
        MODEL, "<|im_start|>hi", raw=True, options={"stop": ["lantern"]}
    )
    assert live.engine.prompt == "<|im_start|>hi"
    assert raw.response == story.partition("lantern")[0]
    assert raw.context is None
    chunks = [one async for one in await ollama_client.generate(MODEL, "hi", raw=True, stream=True)]
    assert "".join(chunk.response for chunk in chunks) == story


async def test_the_context_of_an_answer_continues_its_conversation(ollama_client, live):
    first = await ollama_client.generate(MODEL, "hi")
    assert list(first.context)[-1] == live.engine.end
    before = live.engine.prompt
    second = await ollama_client.generate(MODEL, "go on", context=first.context)
    given = np.frombuffer(live.engine.submitted.tokens, np.int32).tolist()
    assert given[: len(first.context)] == list(first.context)
    assert live.engine.prompt.startswith(before)
    assert live.engine.prompt.endswith("<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
    assert list(second.context)[: len(given)] == given
    status, answer, _ = await live.post(
        GENERATE, {"model": MODEL, "prompt": "a", "context": [10**6]}
    )
    assert (status, "10" in answer["error"]) == (400, True)


async def test_a_suffix_fills_in_the_middle(ollama_client, live, monkeypatch):
    answer = await ollama_client.generate(MODEL, "a = ", suffix="\nb")
    assert answer.done
    assert live.engine.prompt == "<|fim_prefix|>a = <|fim_suffix|>\nb<|fim_middle|>"
    with pytest.raises(ollama.ResponseError, match="system is for prompts in the chat template"):
        await ollama_client.generate(MODEL, "a", suffix="b", system="c")
    monkeypatch.setattr(live.front.tokenizer, "fim", None)
    with pytest.raises(ollama.ResponseError, match="suffix: this model's tokenizer has no fill-in"):
        await ollama_client.generate(MODEL, "a", suffix="b")


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [
        (None, "load"),
        ("5m", "load"),
        (-1, "load"),
        (0, "unload"),
        ("0s", "unload"),
        (0.0, "unload"),
    ],
)
async def test_nothing_to_answer_loads(ollama_client, live, keep_alive, reason):
    chat = await ollama_client.chat(MODEL, keep_alive=keep_alive)
    assert (chat.done, chat.done_reason, chat.message.content) == (True, reason, "")
    text = await ollama_client.generate(MODEL, keep_alive=keep_alive)
    assert (text.done, text.done_reason, text.response) == (True, reason, "")
    streamed = [
        one async for one in await ollama_client.chat(MODEL, keep_alive=keep_alive, stream=True)
    ]
    assert [one.done_reason for one in streamed] == [reason]
    assert not [told for told in live.engine.told if isinstance(told, Submit)]
    assert (await ollama_client.chat(MODEL, [USER])).done  # it is still there


# ---- options


async def test_options_reach_the_engine(live):
    options = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 5.0,  # many clients have only floats
        "min_p": 0.125,
        "seed": 7,
        "num_predict": 4,
        "repeat_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repeat_last_n": -1,
        "mirostat": 0,
        "tfs_z": 1,
        "typical_p": 1.0,
    }
    status, answer, response = await live.post(CHAT, ASK | {"options": options})
    assert (status, answer["done_reason"], answer["eval_count"]) == (200, "length", 4), answer
    assert "Warning" not in response.headers
    sampling = live.engine.submitted.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 5)
    assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.125, 7, 4)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.25, 0.5)
    assert sampling.frequency_penalty == -0.5


@pytest.mark.parametrize("num_predict", [0, -1, -2, None])
async def test_an_answer_without_a_limit(live, num_predict):
    asked = {"options": {"num_predict": num_predict, "stop": "fox"}}
    for path, body in (
        (CHAT, ASK),
        (GENERATE, {"model": MODEL, "prompt": "a", "raw": True, "stream": False}),
    ):
        status, answer, _ = await live.post(path, body | asked)
        assert (status, answer["done_reason"]) == (200, "stop")
        submitted = live.engine.submitted
        assert submitted.sampling.max_tokens == live.engine.context - submitted.num_prompt


@pytest.mark.parametrize(
    ("options", "penalty"),
    [
        ({"repeat_penalty": 1.5, "repeat_last_n": 0}, 1.0),
        ({"repeat_last_n": 0}, 1.0),
        ({}, 1.25),
        ({"repeat_penalty": 1.0, "repeat_last_n": 64}, 1.0),
        ({"repeat_penalty": 1.5}, 1.5),
    ],
)
async def test_penalties_count_all_tokens_or_none(live, options, penalty):
    live.front.defaults = {"repetition_penalty": 1.25}
    assert (await live.post(CHAT, ASK | {"options": options}))[0] == 200
    assert live.engine.submitted.sampling.repetition_penalty == penalty


async def test_a_number_of_tokens_without_penalties_has_no_effect(live):
    options = {"repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0}
    status, _, response = await live.post(CHAT, ASK | {"options": options})
    warning = '299 moeserve "no effect here: options.repeat_last_n"'
    assert (status, response.headers["Warning"]) == (200, warning)


async def test_top_p_of_0_is_the_most_likely_token(live):
    assert (await live.post(CHAT, ASK | {"options": {"top_p": 0}}))[0] == 200
    assert 0 < live.engine.submitted.sampling.top_p < 1e-5


async def test_home_assistants_request_is_taken_and_says_what_has_no_effect(live):
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "You are a voice."}, USER],
        "tools": [],
        "stream": True,
        "keep_alive": "300s",
        "options": {"num_ctx": 8192, "num_gpu": 99, "tepmerature": 1, "num_keep": None},
        "think": False,
        "truncate": True,
        "shift": False,
    }
    async with live.session.post(live.url + CHAT, json=body) as response:
        assert response.status == 200
        assert response.headers["Warning"] == (
            '299 moeserve "unknown fields ignored: options.tepmerature (did you mean '
            'temperature?)", 299 moeserve "no effect here: keep_alive, truncate, '
            'options.num_ctx, options.num_gpu"'
        )
    async with live.session.post(live.url + CHAT, json=ASK | {"keep_alive": -1}) as response:
        assert "Warning" not in response.headers


async def test_pictures_are_refused_but_not_in_the_results_of_tools(ollama_client, live):
    with pytest.raises(ollama.ResponseError, match=r"messages\[0\].images: this server supports"):
        await ollama_client.chat(MODEL, [USER | {"images": [PIXEL]}])
    with pytest.raises(ollama.ResponseError, match="images: this server supports text only"):
        await ollama_client.generate(MODEL, "What is it?", images=[PIXEL])
    async with answering(CALLS) as live:
        asked = [
            USER,
            {"role": "assistant", "tool_calls": [call_of("look")]},
            {"role": "tool", "content": "here", "images": [PIXEL]},
        ]
        status, _, response = await live.post(CHAT, ASK | {"messages": asked})
        assert status == 200
        assert f"here\n{HIDDEN_IMAGE}" in live.engine.prompt
        assert response.headers["Warning"] == '299 moeserve "no effect here: messages[2].images"'


REFUSED = [
    (CHAT, {"model": None}, "model is required"),
    (CHAT, {"model": "other"}, "model 'other' not found; this server has 'org/tiny'"),
    (CHAT, {"messages": "hi"}, "messages must be"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role must be one of"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [1]}]}, "messages[0].content"),
    (CHAT, {"messages": [USER | {"tool_calls": [{"function": 3}]}]}, "messages[0].tool_calls[0]"),
    (CHAT, {"messages": [USER | {"tool_calls": [3]}]}, "messages[0].tool_calls[0]"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (CHAT, {"tools": [CLOCK, CLOCK]}, "tools: two tools have the same name"),
    (CHAT, {"tool_choice": "required"}, "tool_choice: use /v1/chat/completions"),
    (CHAT, {"options": []}, "options must be"),
    (CHAT, {"options": {"temperature": "hot"}}, "options.temperature must be"),
    (CHAT, {"options": {"temperature": 3}}, "options.temperature must be"),
    (CHAT, {"options": {"num_ctx": "big"}}, "options.num_ctx must be"),
    (CHAT, {"options": {"num_predict": -3}}, "options.num_predict must be"),
    (CHAT, {"options": {"stop": ["a" * 1000] * 5}}, "options.stop has 5,000 characters"),
    (CHAT, {"options": {"mirostat": 2}}, "options.mirostat: this way of sampling"),
    (CHAT, {"options": {"tfs_z": 0.5}}, "options.tfs_z: this way of sampling"),
    (CHAT, {"options": {"typical_p": 0.5}}, "options.typical_p: this way of sampling"),
    (
        CHAT,
        {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}},
        "options.repeat_last_n: penalties count all tokens, not the last 64",
    ),
    (CHAT, {"format": "xml"}, "format is not accepted"),
    (CHAT, {"think": "deeply"}, "think is not accepted"),
    (CHAT, {"top_logprobs": 21}, "top_logprobs must be"),
    (CHAT, {"keep_alive": "soon"}, "keep_alive must"),
    (CHAT, {"keep_alive": "1" * 10**6}, "keep_alive must"),
    (CHAT, {"keep_alive": True}, "keep_alive must be"),
    (CHAT, {"n": 2}, "n: this is supported on /v1/chat/completions only"),
    (CHAT, {"response_format": {"type": "text"}}, "response_format: use format"),
    (CHAT, {"_debug_render_only": True}, "_debug_render_only: use /v1/chat/completions/render"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 400}]}, "this model's maximum context"),
    (GENERATE, {"prompt": ["a"]}, "prompt must be"),
    (GENERATE, {"prompt": "a", "template": "{{ .Prompt }}"}, "template: a request cannot have"),
    (GENERATE, {"prompt": "a", "raw": True, "system": "b"}, "system is for prompts in the chat"),
    (GENERATE, {"prompt": "a", "raw": True, "context": [1]}, "context is for prompts in the chat"),
    (GENERATE, {"prompt": "a", "context": ["b"]}, "context[0] must be"),
    (GENERATE, {"prompt": "a " * 400, "raw": True}, "this model's maximum context"),
    (GENERATE, {"prompt": "a", "tools": [CLOCK]}, "tools: tools are only supported in chats"),
    ("/api/show", {"model": "other"}, "model 'other' not found"),
    ("/api/show", {"model": None}, "model is required"),
]


@pytest.mark.parametrize(
    ("path", "fields", "start"), REFUSED, ids=[str(i) for i in range(len(REFUSED))]
)
async def test_a_wrong_request_names_the_field(live, path, fields, start):
    body = ASK | fields if path == CHAT else {"model": MODEL, "stream": False} | fields
    status, answer, response = await live.post(
        path, {k: v for k, v in body.items() if v is not None}
    )
    assert status == (404 if "not found" in start else 400), answer
    assert list(answer) == ["error"]
    assert answer["error"].startswith(start)
    assert "X-Request-Id" in response.headers
    assert not live.context.running


# ---- errors


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": "org/tiny", "messages": [[]]}'])
async def test_errors_have_ollamas_shape(live, body):
    status, answer, _ = await live.post(CHAT, body)
    assert (status, list(answer)) == (400, ["error"])


async def test_a_failure_in_the_middle_is_a_line(ollama_client, live):
    live.engine.break_after = 0
    with pytest.raises(ollama.ResponseError, match="internal server error") as failed:
        await ollama_client.chat(MODEL, [USER])
    assert failed.value.status_code == 500
    live.engine.break_after = 3
    found = await lines(live, CHAT, ASK)
    assert len(found) > 1
    assert list(found[-1]) == ["error"]
    assert "secret" not in str(found)
    with pytest.raises(ollama.ResponseError, match="internal server error"):
        async for _ in await ollama_client.generate(MODEL, "a", stream=True):
            pass


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_aborts(live, streamed):
    live.engine.gate.clear()
    task = asyncio.create_task(live.post(CHAT, ASK | {"stream": streamed}))
    await until(lambda: len(live.engine.rows) == 1)
    task.cancel()
    await until(lambda: not live.engine.rows and not live.context.running)


async def test_a_key_is_asked_for(launch):
    async with launch(api_key=("right",)) as live:
        for path in ("/api/tags", "/api/ps", "/api/version", "/api/nothing"):
            assert (await live.get(path))[0] == 401
        assert "missing or wrong API key" in (await live.get("/api/tags"))[1]["error"]
        status, answer = await live.get("/api/v0/models")
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        headers = {"Authorization": "Bearer right"}
        async with ollama.AsyncClient(host=live.url, headers=headers) as ollama_client:
            assert (await ollama_client.chat(MODEL, [USER])).done
            assert (await ollama_client.list()).models


async def test_an_overloaded_server_says_when_to_return(live):
    live.context.draining = True
    status, answer, response = await live.post(CHAT, ASK)
    assert (status, list(answer)) == (503, ["error"])
    assert "Retry-After" in response.headers


async def test_options_of_ollama_on_openais_route_are_named(live):
    """Hermes sends them there to a server that has Ollama's routes."""
    body = {"messages": [USER], "options": {"num_ctx": 4096}}
    status, _, response = await live.post("/v1/chat/completions", body)
    assert (status, response.headers["Warning"]) == (200, '299 moeserve "no effect here: options"')
