"""Chats with a model that answers in harmony, as gpt-oss: reasoning, tool calls, and streams equal
to whole answers.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from itertools import chain

import pytest

from moeserve.text.answer_data import find_format
from moeserve.text.chat_template import ChatTemplate
from tests.server.conftest import live_server, make_tokenizer

CHAT = "/v1/chat/completions"
CONTROL = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
TEMPLATE = (
    "{{ tools|tojson }}{{ reasoning_effort }}{% for m in messages %}<|start|>{{ m.role }}"
    "{% for c in m.tool_calls or [] %} to=functions.{{ c.function.name }}"
    "<|message|>{{ c.function.arguments.city }}<|call|>"
    "{% endfor %}<|message|>{{ m.content or m.thinking }}<|end|>{% endfor %}<|start|>assistant"
)
ANALYSIS = "<|channel|>analysis<|message|>A fox 😀?<|end|><|start|>assistant"
ANSWER = f"{ANALYSIS}<|channel|>final<|message|>Once upon a time.<|return|>"
CALLS = (
    f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.find "
    '<|constrain|>json<|message|>{"fox": 1}<|end|>'
    "<|start|>assistant<|channel|>commentary to=functions.go<|message|>{}<|call|>"
)
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "a fox"}


@asynccontextmanager
async def answering(answer: str, **settings):
    tokenizer = make_tokenizer()
    tokenizer.backend.add_special_tokens(list(CONTROL))
    tokenizer = type(tokenizer)(tokenizer.backend, {})
    async with live_server(tokenizer, **settings) as live:
        live.front.chat_template = ChatTemplate(TEMPLATE)
        live.front.answer_format = find_format(TEMPLATE, tokenizer)
        live.engine.script = tokenizer.encode(answer)
        yield live


def join(events: list) -> dict:
    """Join a stream's deltas to a whole answer; empty content beside calls is null."""
    message = {"role": "assistant", "content": ""}
    finish = None
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            finish = choice["finish_reason"] or finish
            for name in ("content", "reasoning"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call.pop("index") == len(calls):
                    calls.append(call)
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    return {"message": message, "finish_reason": finish}


def plain(choice: dict) -> dict:
    message = {name: value for name, value in choice["message"].items() if value not in (None, [])}
    if "tool_calls" in message:
        message["tool_calls"] = [
            call | {"id": call["id"].startswith("call_")} for call in message["tool_calls"]
        ]
    return {"message": message, "finish_reason": choice["finish_reason"]}


@pytest.mark.parametrize(
    ("answer", "message", "finish", "options"),
    [
        (ANSWER, {"reasoning": "A fox 😀?", "content": "Once upon a time."}, "stop", {}),
        (ANSWER, {"reasoning": "A ", "content": ""}, "stop", {"stop": "fox"}),
        (ANSWER, {"reasoning": "A fox 😀?", "content": "Once "}, "stop", {"stop": ["upon"]}),
        (ANSWER, {"reasoning": "A fox 😀?", "content": ""}, "length", {"max_tokens": 22}),
        (ANSWER, {"content": ""}, "length", {"max_tokens": 1}),
        (
            CALLS,
            {
                "reasoning": "A fox 😀?",
                "content": "I look.",
                "tool_calls": [
                    {
                        "id": True,
                        "type": "function",
                        "function": {"name": "find", "arguments": '{"fox": 1}'},
                    },
                    {"id": True, "type": "function", "function": {"name": "go", "arguments": "{}"}},
                ],
            },
            "tool_calls",
            {"tools": TOOLS},
        ),
        (
            "no format.<|im_end|>",
            {"content": "no format."},
            "stop",
            {"tools": TOOLS, "tool_choice": "auto"},
        ),
    ],
)
async def test_parts_of_answers_whole_and_streamed(answer, message, finish, options):
    expected = {"message": {"role": "assistant"} | message, "finish_reason": finish}
    async with answering(answer) as live:
        for more in (
            {},
            {"logprobs": True, "return_token_ids": True},
            {"include_stop_str_in_output": "stop" not in options},
        ):
            body = {"messages": [USER]} | options | more
            status, whole, _ = await live.post(CHAT, body)
            assert status == 200
            assert plain(whole["choices"][0]) == expected
            events = await live.events(CHAT, body | {"stream_options": {"include_usage": True}})
            assert plain(join(events)) == expected
            assert events[-1]["usage"] == whole["usage"]
            if "logprobs" in more:
                choices = [choice for event in events for choice in event["choices"]]
                assert [*chain.from_iterable(c.get("token_ids", []) for c in choices)] == whole[
                    "choices"
                ][0]["token_ids"]
                logprobs = [
                    entry
                    for c in choices
                    if c.get("logprobs")
                    for entry in c["logprobs"]["content"]
                ]
                assert logprobs == whole["choices"][0]["logprobs"]["content"]


async def test_the_template_gets_tools_effort_and_history():
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "find", "arguments": '{"city": "Köln <|end|>"}'},
    }
    history = [
        USER,
        {"role": "assistant", "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c", "content": "here"},
    ]
    async with answering(ANSWER) as live:
        body = {"messages": history, "tools": TOOLS, "reasoning_effort": "high"}
        status, answer, _ = await live.post(f"{CHAT}/render", body)
        assert status == 200
        assert answer["prompt"] == (
            json.dumps(TOOLS)
            + "high<|start|>user<|message|>a fox<|end|><|start|>assistant to=functions.find"
            "<|message|>Köln <|end|><|call|><|message|>hm<|end|><|start|>tool<|message|>here<|end|>"
            "<|start|>assistant"
        )
        ends = live.front.tokenizer.backend.token_to_id("<|end|>")
        assert answer["prompt_token_ids"].count(ends) == 3  # not the typed one
        _, tokenized, _ = await live.post("/tokenize", body)
        assert tokenized["tokens"] == answer["prompt_token_ids"]
        _, answer, _ = await live.post(
            f"{CHAT}/render", {"messages": [USER], "tools": TOOLS, "tool_choice": "none"}
        )
        assert answer["prompt"].startswith("null<|start|>")
