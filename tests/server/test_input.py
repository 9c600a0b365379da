"""Hostile and mistaken requests, case by case: a clear 4xx in OpenAI's shape, never a 5xx, nothing
big sent back.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from moeserve.engine.decoding import Decoding
from moeserve.messages import Submit
from tests.server.conftest import live_server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
COUNT = "/v1/responses/input_tokens"
COUNTED = {"model": "org/tiny", "input": "a"}
MESSAGES = [{"role": "user", "content": "Tell me a story"}]
BIG = "x" * 100_000


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": 1} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a fox", "max_tokens": 1} | fields


def content(value: Any, role: Any = "user", **fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": role, "content": value, **fields}])


def raw(fields: str) -> bytes:
    return b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,' + fields.encode() + b"}"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


# (name, path, body, status, code or None for any, param or None for any)
TOOL = {"type": "function", "function": {"name": "find"}}
CASES: list[tuple[str, str, Any, int, str | None, str | None]] = [
    ("not JSON", CHAT, b"hello", 400, "invalid_json", None),
    ("empty body", CHAT, b"", 400, "invalid_json", None),
    ("truncated", CHAT, b'{"messages": [', 400, "invalid_json", None),
    ("trailing", CHAT, b"{} x", 400, "invalid_json", None),
    ("an array", CHAT, b"[]", 400, "invalid_json", None),
    ("byte order mark", CHAT, b"\xef\xbb\xbf{}", 400, "invalid_json", None),
    ("UTF-16", CHAT, json.dumps(chat()).encode("utf-16"), 400, "invalid_json", None),
    ("bad UTF-8", CHAT, b'{"a": "\xff"}', 400, "invalid_json", None),
    ("deep", CHAT, b"[" * 100_000, 400, "invalid_json", None),
    (
        "deep in a field",
        CHAT,
        json.dumps(chat(metadata={"a": nested(70)})).encode(),
        400,
        "invalid_json",
        None,
    ),
    (
        "deep in objects",
        CHAT,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        400,
        "invalid_json",
        None,
    ),
    ("million digits", CHAT, raw('"seed":' + "9" * 1_000_000), 400, "invalid_json", None),
    ("duplicate keys", CHAT, raw('"seed":1,"seed":2'), 400, "invalid_json", None),
    ("NaN", CHAT, raw('"temperature":NaN'), 400, "invalid_json", None),
    ("Infinity", CHAT, raw('"top_p":Infinity'), 400, "invalid_json", None),
    ("1e999", CHAT, raw('"temperature":1e999'), 400, None, "temperature"),
    ("minus zero", CHAT, raw('"temperature":-0.0'), 200, None, None),
    ("lone surrogate", CHAT, raw('"user":"\\ud800"'), 400, "invalid_json", None),
    ("surrogate pair", CHAT, raw('"user":"\\ud83d\\ude00"'), 200, None, None),
    ("NUL and marks", CHAT, content("\0\u202e" + "e\u0301" * 10), 200, None, None),
    ("combining marks", CHAT, content("\u0301" * 1_000_000), 400, "context_length_exceeded", None),
    ("int as text", CHAT, chat(max_tokens="5"), 400, None, "max_tokens"),
    ("int as float", CHAT, chat(max_tokens=5.0), 200, None, None),
    ("ints as floats", CHAT, chat(n=1.0, stop_token_ids=[5.0, 6.0]), 200, None, None),
    ("int as fraction", CHAT, chat(max_tokens=5.5), 400, None, "max_tokens"),
    ("int as 1e999", CHAT, raw('"seed":1e999'), 400, None, "seed"),
    ("int as 1e300", CHAT, raw('"seed":1e300'), 400, None, "seed"),
    (
        "many ints as floats",
        CHAT,
        chat(stop_token_ids=[5.0] * 100_000),
        400,
        None,
        "stop_token_ids[16]",
    ),
    ("int as bool", CHAT, chat(n=True), 400, None, "n"),
    ("int as null", CHAT, chat(n=None, seed=None), 200, None, None),
    ("too large", CHAT, chat(seed=2**63), 400, None, "seed"),
    ("far too large", CHAT, chat(n=2**70), 400, None, "n"),
    ("smallest seed", CHAT, chat(seed=-(2**63)), 200, None, None),
    ("negative n", CHAT, chat(n=-1), 400, None, "n"),
    ("bool as int", CHAT, chat(stream=1), 400, None, "stream"),
    ("float as bool", CHAT, chat(temperature=True), 400, None, "temperature"),
    ("no messages", CHAT, {"max_tokens": 1}, 400, None, "messages"),
    ("no role", CHAT, chat(messages=[{"content": "a"}]), 400, None, "messages[0].role"),
    ("messages empty", CHAT, chat(messages=[]), 400, None, "messages"),
    ("messages a text", CHAT, chat(messages="hi"), 400, None, "messages"),
    ("no prompt", COMPLETIONS, {}, 400, None, "prompt"),
    ("prompt empty", COMPLETIONS, text(prompt=""), 400, None, "prompt"),
    ("prompt []", COMPLETIONS, text(prompt=[]), 400, None, "prompt"),
    ("prompt [[]]", COMPLETIONS, text(prompt=[[]]), 400, None, "prompt"),
    ("prompt ['']", COMPLETIONS, text(prompt=[""]), 400, None, "prompt"),
    ("prompt mixed", COMPLETIONS, text(prompt=[1, "a"]), 400, None, "prompt"),
    ("prompt of objects", COMPLETIONS, text(prompt=[{"a": 1}]), 400, None, None),
    ("prompt of bools", COMPLETIONS, text(prompt=[True]), 400, None, None),
    ("token -1", COMPLETIONS, text(prompt=[-1]), 400, None, "prompt"),
    ("token 2^31", COMPLETIONS, text(prompt=[2**31]), 400, None, "prompt"),
    ("token 2^70", COMPLETIONS, text(prompt=[1, 2**70]), 400, None, "prompt"),
    ("context - 1", COMPLETIONS, text(prompt=[1] * 255, max_tokens=99), 200, None, None),
    ("context", COMPLETIONS, text(prompt=[1] * 256), 400, "context_length_exceeded", "prompt"),
    ("context + 1", COMPLETIONS, text(prompt=[1] * 257), 400, "context_length_exceeded", "prompt"),
    ("ten contexts of text", CHAT, content("word " * 2560), 400, "context_length_exceeded", None),
    (
        "far too much text",
        COMPLETIONS,
        text(prompt="word " * 1_000_000),
        400,
        "context_length_exceeded",
        "prompt",
    ),
    ("n 0", CHAT, chat(n=0), 400, None, "n"),
    ("n 129", CHAT, chat(n=129), 400, None, "n"),
    ("n 1e9", CHAT, chat(n=10**9), 400, None, "n"),
    ("n times prompts", COMPLETIONS, text(prompt=["a"] * 9, n=128), 400, None, "prompt"),
    ("a million prompts", COMPLETIONS, text(prompt=["a"] * 1_000_000), 400, None, "prompt"),
    ("max_tokens 0", CHAT, chat(max_tokens=0), 400, None, "max_tokens"),
    ("max_tokens 0 no echo", COMPLETIONS, text(max_tokens=0), 400, None, "max_tokens"),
    ("max_tokens -2", CHAT, chat(max_tokens=-2), 400, None, "max_tokens"),
    ("max_tokens 1e12", CHAT, chat(max_tokens=10**12), 200, None, None),
    ("max_tokens over the context", CHAT, chat(max_tokens=10_000), 200, None, None),
    ("temperature 0, n 4", CHAT, chat(temperature=0, n=4), 200, None, None),
    ("temperature 1e-9", CHAT, chat(temperature=1e-9), 200, None, None),
    ("temperature 2.0001", CHAT, chat(temperature=2.0001), 400, None, "temperature"),
    ("top_p 0", CHAT, chat(top_p=0), 400, None, "top_p"),
    ("top_k -2", CHAT, chat(top_k=-2), 400, None, "top_k"),
    ("min_p 1.1", CHAT, chat(min_p=1.1), 400, None, "min_p"),
    ("penalty 3", CHAT, chat(presence_penalty=3), 400, None, "presence_penalty"),
    ("repetition 0", CHAT, chat(repetition_penalty=0), 400, None, "repetition_penalty"),
    ("min_tokens over max", CHAT, chat(min_tokens=5), 400, None, "min_tokens"),
    ("stop empty", CHAT, chat(stop=""), 400, None, "stop"),
    ("stop of 64", CHAT, chat(stop=["a" * 64] * 64), 200, None, None),
    ("stop of 65", CHAT, chat(stop=["a"] * 65), 400, None, "stop"),
    ("stop of 5 KB", CHAT, chat(stop=["a" * 1024] * 5), 400, None, "stop"),
    ("stop of 1 MB", CHAT, chat(stop="a" * 2**20), 400, None, "stop"),
    ("stop null", CHAT, chat(stop=None), 200, None, None),
    ("bias of a word", CHAT, chat(logit_bias={"abc": 1}), 400, None, None),
    ("bias too high", CHAT, chat(logit_bias={"1": 1e308}), 400, None, "logit_bias"),
    ("bias outside", CHAT, chat(logit_bias={"99999": 1}), 400, None, "logit_bias"),
    (
        "bias huge",
        CHAT,
        chat(logit_bias={str(i): 1 for i in range(100_000)}),
        400,
        None,
        "logit_bias",
    ),
    ("bias all -100", CHAT, chat(logit_bias={str(i): -100 for i in range(200)}), 200, None, None),
    ("top_logprobs 21", CHAT, chat(logprobs=True, top_logprobs=21), 400, None, "top_logprobs"),
    ("top_logprobs alone", CHAT, chat(top_logprobs=2), 400, None, "top_logprobs"),
    ("logprobs of one token", CHAT, chat(logprobs=True, top_logprobs=20), 200, None, None),
    ("logprobs 21", COMPLETIONS, text(logprobs=21), 400, None, "logprobs"),
    ("logprobs as bool", COMPLETIONS, text(logprobs=True), 400, None, "logprobs"),
    (
        "prompt_logprobs streamed",
        COMPLETIONS,
        text(prompt_logprobs=1, stream=True),
        400,
        None,
        "prompt_logprobs",
    ),
    (
        "echo with logprobs streamed",
        COMPLETIONS,
        text(echo=True, logprobs=1, stream=True),
        400,
        None,
        "stream",
    ),
    (
        "stream_options alone",
        CHAT,
        chat(stream_options={"include_usage": True}),
        400,
        None,
        "stream_options",
    ),
    ("allowed ids empty", CHAT, chat(allowed_token_ids=[]), 400, None, "allowed_token_ids"),
    ("allowed ids outside", CHAT, chat(allowed_token_ids=[99_999]), 400, None, "allowed_token_ids"),
    (
        "allowed ids outside, counted",
        COUNT,
        COUNTED | {"allowed_token_ids": [99_999]},
        400,
        None,
        "allowed_token_ids",
    ),
    ("bad words empty", CHAT, chat(bad_words=[""]), 400, None, "bad_words[0]"),
    ("bad words many", CHAT, chat(bad_words=["a"] * 129), 400, None, "bad_words"),
    ("salt with a slash", CHAT, chat(cache_salt="a/b"), 400, None, "cache_salt"),
    ("salt too long", CHAT, chat(cache_salt="a" * 129), 400, None, "cache_salt"),
    ("priority too large", CHAT, chat(priority=2**40), 400, None, "priority"),
    ("tools", CHAT, chat(tools=[{"type": "function"}]), 400, None, "tools[0].function"),
    ("tools not taken", CHAT, chat(tools=[TOOL]), 400, "unsupported_parameter", "tools"),
    ("tools not used", CHAT, chat(tools=[TOOL], tool_choice="none"), 200, None, None),
    ("tools empty", CHAT, chat(tools=[], tool_choice="none", functions=[]), 200, None, None),
    ("tool_choice auto", CHAT, chat(tool_choice="auto"), 200, None, None),
    ("tool_choice required", CHAT, chat(tool_choice="required"), 400, None, "tool_choice"),
    (
        "tools for completions",
        COMPLETIONS,
        text(tools=[TOOL]),
        400,
        "unsupported_parameter",
        "tools",
    ),
    ("JSON mode", CHAT, chat(response_format={"type": "json_object"}), 200, None, None),
    ("text mode", CHAT, chat(response_format={"type": "text"}), 200, None, None),
    ("guided", COMPLETIONS, text(guided_regex="(a+"), 400, "invalid_grammar", "guided_regex"),
    ("best_of", COMPLETIONS, text(best_of=2), 400, "unsupported_parameter", "best_of"),
    ("best_of 1", COMPLETIONS, text(best_of=1), 200, None, None),
    ("effort", CHAT, chat(reasoning_effort="low", verbosity="high"), 200, None, None),
    (
        "a path of its own",
        CHAT,
        chat(reasoning_effort="- at `$." + "A" * 99),
        400,
        "invalid_value",
        "reasoning_effort",
    ),
    (
        "no such effort",
        CHAT,
        chat(reasoning_effort="enormous"),
        400,
        "invalid_value",
        "reasoning_effort",
    ),
    ("stream_options {}", CHAT, chat(stream_options={}), 200, None, None),
    ("suffix", CHAT, chat(suffix="x"), 400, "unsupported_parameter", "suffix"),
    ("audio", CHAT, chat(audio={"voice": "a"}), 400, "unsupported_parameter", "audio"),
    ("store", CHAT, chat(store=True), 200, None, None),
    ("store is not 0", CHAT, chat(store=0), 400, "invalid_value", "store"),
    (
        "harmless",
        CHAT,
        chat(
            user="",
            metadata={"a": "b"},
            store=False,
            parallel_tool_calls=True,
            service_tier="auto",
            tools=None,
            modalities=["text"],
            prompt_cache_key="k",
            safety_identifier="s",
        ),
        200,
        None,
        None,
    ),
    (
        "own template",
        CHAT,
        chat(chat_template="{{ 1 }}"),
        400,
        "unsupported_parameter",
        "chat_template",
    ),
    (
        "tokenize kwarg",
        CHAT,
        chat(chat_template_kwargs={"tokenize": True}),
        400,
        None,
        "chat_template_kwargs",
    ),
    (
        "nested kwarg",
        CHAT,
        chat(chat_template_kwargs={"a": {"b": BIG}}),
        400,
        None,
        "chat_template_kwargs",
    ),
    (
        "long kwarg name",
        CHAT,
        chat(chat_template_kwargs={BIG: [1]}),
        400,
        None,
        "chat_template_kwargs",
    ),
    ("unknown role", CHAT, content("a", role="robot"), 400, None, "messages[0].role"),
    ("role of 100 KB", CHAT, content("a", role=BIG), 400, None, "messages[0].role"),
    ("tool role", CHAT, content("a", role="tool"), 200, None, None),
    (
        "tool calls",
        CHAT,
        content("a", role="assistant", tool_calls=[{}]),
        400,
        None,
        "messages[0].tool_calls[0].function",
    ),
    ("no tool calls", CHAT, content("a", role="assistant", tool_calls=[]), 200, None, None),
    ("content null", CHAT, content(None), 400, None, "messages[0].content"),
    ("content missing", CHAT, chat(messages=[{"role": "user"}]), 400, None, "messages[0].content"),
    ("content a number", CHAT, content(5), 400, None, "messages[0].content"),
    ("text parts", CHAT, content([{"type": "text", "text": "a"}]), 200, None, None),
    (
        "an image",
        CHAT,
        content([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]),
        400,
        None,
        "messages[0].content[0].type",
    ),
    (
        "a text part without text",
        CHAT,
        content([{"type": "text", "text": "a"}, {"type": "text", "text": None}]),
        400,
        None,
        "messages[0].content[1].text",
    ),
    (
        "a user's refusal",
        CHAT,
        content([{"type": "refusal", "refusal": "no"}]),
        400,
        None,
        "messages[0].content[0].type",
    ),
    ("typed control tokens", CHAT, content("<|im_end|>"), 200, None, None),
    (
        "both prompts",
        CHAT,
        chat(add_generation_prompt=True, continue_final_message=True),
        400,
        None,
        "continue_final_message",
    ),
    ("unknown model", CHAT, chat(model="nobody"), 404, "model_not_found", "model"),
    ("model of 100 KB", CHAT, chat(model=BIG), 404, "model_not_found", "model"),
    ("model with a slash", CHAT, chat(model="org/tiny"), 200, None, None),
    ("model a number", CHAT, chat(model=5), 400, None, "model"),
    ("unknown field", CHAT, chat(max_token=5), 200, None, None),
]


@pytest.mark.parametrize(
    ("name", "path", "body", "status", "code", "param"), CASES, ids=[case[0] for case in CASES]
)
async def test_case(live, name, path, body, status, code, param):
    got, answer, response = await live.post(path, body)
    assert got == status, answer
    assert response.headers["X-Request-Id"]
    if status == 200:
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        return
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["code"]
    assert len(json.dumps(answer)) < 1000  # no echo
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param
    assert not live.engine.rows


async def test_offsets_of_broken_json_are_told(live):
    _, answer, _ = await live.post(CHAT, b'{"a": "\xc3\xa9", x}')
    assert "byte 12" in answer["error"]["message"]


async def test_absurd_numbers_are_refused_at_once(live):
    await live.post(CHAT, chat())
    started = time.process_time()
    for _ in range(10):
        await live.post(CHAT, chat(n=10**9))
    assert time.process_time() - started < 10


async def test_clients_know_a_prompt_that_is_too_long_by_the_words(live):
    _, answer, _ = await live.post(CHAT, content("word " * 2560))
    assert answer["error"]["message"].startswith("this model's maximum context length is ")


async def test_unknown_fields_warn_or_are_refused(live, launch):
    body = chat(max_token=5) | {"messages": [{"role": "user", "content": "a", "colour": 1}]}
    _, _, response = await live.post(CHAT, body)
    assert "max_token (did you mean max_tokens?)" in response.headers["Warning"]
    assert "messages[0].colour" in response.headers["Warning"]
    _, _, response = await live.post(CHAT, chat(**{'evil"\r\nX: 1' + BIG: 1}))
    assert len(response.headers["Warning"]) < 200
    assert "X" not in response.headers
    async with launch(strict=True) as strict:
        status, answer, _ = await strict.post(CHAT, body)
        assert (status, answer["error"]["code"]) == (400, "unknown_parameter")
        status, answer, _ = await strict.post(CHAT, chat())
        assert status == 200
        earlier = answer["choices"][0]["message"] | {
            "audio": None,
            "function_call": None,
        }  # as OpenAI's clients add
        assert (
            await strict.post(
                CHAT, {"messages": [*chat()["messages"], earlier, *chat()["messages"]]}
            )
        )[0] == 200


async def test_a_model_without_a_template_serves_completions_only(live):
    live.front.chat_template = None
    status, answer, _ = await live.post(CHAT, chat())
    assert (status, answer["error"]["code"]) == (400, "no_chat_template")
    assert (await live.post(COMPLETIONS, text()))[0] == 200


async def test_a_server_without_a_tokenizer_takes_ids(live):
    live.front.tokenizer = None
    assert (await live.post(COMPLETIONS, text()))[0] == 400
    asked = text(prompt=[1, 2], return_token_ids=True, logprobs=1)
    status, answer, _ = await live.post(COMPLETIONS, asked)
    assert status == 200
    assert answer["choices"][0]["token_ids"] == live.engine.script[:1]
    assert answer["choices"][0]["logprobs"]["tokens"] == [f"token_id:{live.engine.script[0]}"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat(temperature=0.7), "temperature"),
        (CHAT, chat(temperature=0.7, stream=True), "temperature"),
        (CHAT, chat(presence_penalty=1), "presence_penalty"),
        (CHAT, chat(logprobs=True), "logprobs"),
        (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
        (COMPLETIONS, text(guided_regex="a+"), "guided_regex"),
        (COMPLETIONS, text(structured_outputs={"regex": "a+"}), "structured_outputs.regex"),
        ("/api/chat", chat(options={"temperature": 1}, stream=False), "options.temperature"),
    ],
)
async def test_a_model_that_decodes_blocks_names_what_it_refuses(tokenizer, path, body, param):
    defaults = {"temperature": 0.0}
    async with live_server(tokenizer, defaults=defaults, decoding=Decoding(4)) as live:
        status, answer, _ = await live.post(path, {"model": "org/tiny"} | body)
        assert status == 400
        error = answer["error"]
        if isinstance(error, str):  # Ollama's shape
            assert error.startswith(f"{param} is not supported by this model")
        else:
            assert (error["param"], error["code"]) == (param, "unsupported_parameter")
            assert error["message"].startswith(f"{param} is not supported by this model")
        assert not any(isinstance(told, Submit) for told in live.engine.told)
        assert (await live.post(CHAT, chat()))[0] == 200
