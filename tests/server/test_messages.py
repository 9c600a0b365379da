"""/v1/messages: Anthropic's conversations become chats, answers become blocks and events, errors
have their shape.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from moeserve.messages import Abort
from moeserve.server.dialects.messages_request import CountTokensRequest
from moeserve.server.requests import decode
from tests.server import test_responses
from tests.server.conftest import until
from tests.server.test_tools import ARGUMENTS, CALLS, answering

MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "Tell me a story"}
ASK = {"model": "org/tiny", "max_tokens": 200, "messages": [USER], "temperature": 0}
TOOLS = [
    {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {}}}},
    {"name": "clock", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
]


def chat(**fields):
    return decode(ASK | fields, CountTokensRequest)[0].chat(200)


def without_ids(blocks: list) -> list:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


async def test_a_whole_answer(live, story):
    status, body, response = await live.post(MESSAGES, ASK | {"metadata": {"user_id": "me"}})
    assert status == 200
    assert response.headers["Request-Id"] == response.headers["X-Request-Id"]
    assert body["content"] == [{"type": "text", "text": story, "citations": []}]
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "org/tiny")
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    usage = body["usage"]
    assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (
        2,
        len(live.engine.script),
    )
    _, counted, _ = await live.post(f"{MESSAGES}/count_tokens", ASK | {"max_tokens": None})
    assert counted == {"input_tokens": usage["input_tokens"] + 2}


async def test_events_say_what_the_whole_says(live, story):
    _, whole, _ = await live.post(MESSAGES, ASK)
    events = await live.typed_events(MESSAGES, ASK)
    types = [event["type"] for event in events]
    assert types[:3] == ["message_start", "ping", "content_block_start"]
    assert set(types[3:-3]) == {"content_block_delta"}
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert (events[0]["message"]["content"], events[0]["message"]["stop_reason"]) == ([], None)
    assert {event["delta"]["type"] for event in events[3:-3]} == {"text_delta"}
    assert "".join(event["delta"]["text"] for event in events[3:-3]) == story
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == whole["usage"]


async def test_thinking_and_calls_are_blocks():
    async with answering(CALLS) as live:
        ask = ASK | {"tools": TOOLS}
        _, whole, _ = await live.post(MESSAGES, ask)
        thinking, text, weather, clock = whole["content"]
        assert [block["type"] for block in whole["content"]] == [
            "thinking",
            "text",
            "tool_use",
            "tool_use",
        ]
        assert "A fox 😀?" in thinking["thinking"]
        assert text["text"].strip() == "I look."
        assert (weather["name"], weather["input"]) == ("weather", json.loads(ARGUMENTS))
        assert (clock["name"], clock["input"], whole["stop_reason"]) == ("clock", {}, "tool_use")
        assert (
            0
            < whole["usage"]["output_tokens_details"]["thinking_tokens"]
            < whole["usage"]["output_tokens"]
        )
        streamed: list = []
        for event in await live.typed_events(MESSAGES, ask):
            match event["type"], event.get("delta", {}).get("type"):
                case "content_block_start", _:
                    streamed.append(event["content_block"] | {"json": ""})
                case _, "text_delta" | "thinking_delta":
                    streamed[event["index"]][event["delta"]["type"][:-6]] += event["delta"][
                        event["delta"]["type"][:-6]
                    ]
                case _, "signature_delta":
                    streamed[event["index"]]["signature"] = event["delta"]["signature"]
                case _, "input_json_delta":
                    streamed[event["index"]]["json"] += event["delta"]["partial_json"]
        for block in streamed:
            if text := block.pop("json"):
                block["input"] = json.loads(text)
        assert without_ids(streamed) == without_ids(whole["content"])
        hidden = {"thinking": {"type": "adaptive", "display": "omitted"}}
        _, whole, _ = await live.post(MESSAGES, ask | hidden)
        assert whole["content"][0] == thinking | {"thinking": ""}


async def test_blocks_become_messages():
    turns = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Wait"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "c2", "name": "clock", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "sun"}],
                },
                {"type": "tool_result", "tool_use_id": "c2", "content": "broken", "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    asked = chat(messages=turns, system=[{"type": "text", "text": "Be kind"}], tools=TOOLS)
    system, user, turn, sun, clock, last = asked.messages
    assert [(m.role, m.content) for m in (system, user, last)] == [
        ("system", "Be kind"),
        ("user", "Hi\nyou"),
        ("user", "So?"),
    ]
    assert (turn.reasoning_content, turn.content) == ("hm", "Wait")
    assert [(call["id"], call["function"]["arguments"]) for call in turn.tool_calls] == [
        ("c1", {"city": "Oslo"}),
        ("c2", {}),
    ]
    assert [(m.role, m.tool_call_id, m.content) for m in (sun, clock)] == [
        ("tool", "c1", "sun"),
        ("tool", "c2", "Error: broken"),
    ]
    assert asked.tools[0] == {
        "type": "function",
        "function": {"name": "weather", "parameters": TOOLS[0]["input_schema"]},
    }
    assert asked.continue_final_message is None


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        (
            {"type": "tool", "name": "clock"},
            {"type": "function", "function": {"name": "clock"}},
            True,
        ),
    ],
)
def test_tool_choices(choice, expected, parallel):
    asked = chat(tools=TOOLS, tool_choice=choice)
    assert (asked.tool_choice, asked.parallel_tool_calls) == (expected, parallel)


def test_thinking_and_effort_become_variables_of_the_template():
    assert chat().chat_template_kwargs is None
    off = chat(thinking={"type": "disabled"})
    assert off.chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    on = decode(ASK | {"thinking": {"type": "enabled", "budget_tokens": 2048}}, CountTokensRequest)[
        0
    ].chat()
    assert on.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    assert on.reasoning_effort == "medium"
    assert chat(output_config={"effort": "low"}).reasoning_effort == "low"


async def test_an_assistants_last_turn_is_continued(live):
    await live.post(MESSAGES, ASK | {"messages": [USER, {"role": "assistant", "content": "Once"}]})
    assert live.engine.prompt.endswith("assistant\nOnce")


async def test_why_it_stopped(live):
    for fields, reason, sequence in (
        ({"stop_sequences": ["lantern"]}, "stop_sequence", "lantern"),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"ignore_eos": True, "max_tokens": 10_000}, "model_context_window_exceeded", None),
    ):
        _, whole, _ = await live.post(MESSAGES, ASK | fields)
        assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
        *_, end, _ = await live.typed_events(MESSAGES, ASK | fields)
        assert end["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_arguments_that_are_cut_off_are_no_input():
    async with answering(CALLS) as live:
        status, whole, _ = await live.post(
            MESSAGES, ASK | {"tools": TOOLS, "max_tokens": len(live.engine.script) - 40}
        )
        assert (status, whole["stop_reason"]) == (200, "max_tokens")


async def test_a_schema_becomes_a_grammar(live):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    await live.post(
        MESSAGES, ASK | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    )
    assert live.engine.submitted.sampling.grammar is not None
    bad = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}
    status, body, _ = await live.post(MESSAGES, ASK | bad)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert body["error"]["message"].startswith("output_config.format.schema")


async def test_every_error_has_anthropics_shape(launch):
    async with launch(api_key=("one",)) as live:
        key = {"X_Api_Key": "one"}
        for path, body, headers, status, kind in (
            (MESSAGES, ASK, {}, 401, "authentication_error"),
            (MESSAGES, b"{", key, 400, "invalid_request_error"),
            (MESSAGES, ASK | {"model": "other"}, key, 404, "not_found_error"),
            (f"{MESSAGES}/batches", ASK, key, 404, "not_found_error"),
            (MESSAGES, b" " * 2**25 + b" {}", key, 413, "request_too_large"),
        ):
            got, answer, response = await live.post(path, body, **headers)
            assert (got, answer["type"], answer["error"]["type"]) == (status, "error", kind)
            assert answer["request_id"] == response.headers["Request-Id"]
        assert (await live.get(MESSAGES, **{"X-Api-Key": "one"}))[1]["error"][
            "type"
        ] == "invalid_request_error"  # 405
        live.context.draining = True
        status, answer, response = await live.post(MESSAGES, ASK, **key)
        assert (status, answer["error"]["type"]) == (503, "overloaded_error")
        assert "Retry-After" in response.headers
        _, other, _ = await live.post("/v1/chat/completions", ASK, **key)
        assert other["error"]["code"] == "server_draining"  # OpenAI's


async def test_a_failure_in_the_middle_is_an_event(live):
    live.engine.break_after = 0
    status, body, _ = await live.post(MESSAGES, ASK | {"stream": True})
    assert (status, body["error"]["type"]) == (500, "api_error")
    live.engine.break_after = 3
    *_, last = await live.typed_events(MESSAGES, ASK)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "secret" not in str(last)


@pytest.mark.parametrize(
    ("path", "ask"), [(MESSAGES, ASK), (test_responses.RESPONSES, test_responses.ASK)]
)
async def test_a_client_that_leaves_aborts(live, path, ask):
    live.engine.gate.clear()
    for stream in (False, True):
        task = asyncio.create_task(live.post(path, ask | {"stream": stream}))
        await until(lambda: len(live.engine.rows) == 1)
        task.cancel()
        await until(lambda: not live.engine.rows)
        assert isinstance(live.engine.told[-1], Abort)
    await until(lambda: not live.context.running)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_is_an_error(live, stream):
    """If nothing was sent yet, the answer has a status.

    It is one after which clients do not retry.
    """
    live.engine.gate.clear()
    asked = asyncio.create_task(live.post(MESSAGES, ASK | {"stream": stream}, X_Request_Id="mine"))
    await until(lambda: "mine" in live.context.running)
    async with live.session.delete(f"{live.url}/v1/requests/mine") as response:
        assert response.status == 200
    status, body, _ = await asked
    assert (status, body["error"]["type"]) == (499, "api_error")


REFUSED = [
    ({"model": None}, "model is required"),
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": 0}, "max_tokens must be"),
    ({"messages": []}, "messages must be"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages[0].content[0].type must be text or",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema is required"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "auto", "name": "clock"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "thinking.budget_tokens must be below max_tokens",
    ),
    ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"stop": ["x"]}, "stop: use stop_sequences on this route"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"n": 2}, "n: "),
    ({"temperature": 3}, "temperature"),
]


@pytest.mark.parametrize(
    ("fields", "message"), REFUSED, ids=[str(fields)[:40] for fields, _ in REFUSED]
)
async def test_what_is_refused_is_named(live, fields, message):
    body = {name: value for name, value in (ASK | fields).items() if value is not None}
    status, answer, _ = await live.post(MESSAGES, body)
    assert (status, answer["type"], answer["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert answer["error"]["message"].startswith(message)
