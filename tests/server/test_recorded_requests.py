"""Requests as public agents, editors and libraries sent them, one per file of the folder below.

A file has the client, the path and the body, cut down to what is essential. `expected` has the
status, the `Warning` header, the prompt by turns as the model reads it, and a part of the answer.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from moeserve.text.answer_data import find_format
from moeserve.text.chat_template import ChatTemplate
from tests.server.conftest import Live, live_server, make_tokenizer

FOLDER = Path(__file__).parent / "data" / "recorded_requests"
RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
TEXT = "Hello."
END = "<|im_end|>"
# Shows all that the model reads, one turn per line. The comment selects the format of calls.
TEMPLATE = (
    "{# <tool_call>{name, arguments}</tool_call> #}"
    "{% if tools %}tools: {{ tools|map(attribute='function.name')|join(' ') }}<|im_end|>{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments|tojson }})"
    "{% endfor %}<|im_end|>{% endfor %}"
)


@asynccontextmanager
async def answering(text: str, context: int = 2048) -> AsyncIterator[Live]:
    """Yield a server whose model writes `text`."""
    tokenizer = make_tokenizer()
    async with live_server(tokenizer, context=context) as live:
        live.front.chat_template = ChatTemplate(TEMPLATE)
        live.front.answer_format = find_format(TEMPLATE, tokenizer)
        live.engine.script = tokenizer.encode(text + END)
        yield live


async def send(live: Live, path: str, body: Any) -> tuple[int, str | None, Any]:
    """Return the status, the `Warning` header, and the answer; for a stream the list of events."""
    async with live.session.post(live.url + path, json=body) as response:
        warning = response.headers.get("Warning")
        if response.content_type == "application/x-ndjson":
            lines = (await response.text()).splitlines()
            return response.status, warning, [json.loads(line) for line in lines]
        if response.content_type != "text/event-stream":
            return response.status, warning, json.loads(await response.text())
        frames = (await response.text()).split("\n\n")
    assert frames.pop() == ""
    datas = [frame.partition("data: ")[2] for frame in frames]
    if path.startswith("/v1/chat"):
        assert datas.pop() == "[DONE]"
    return response.status, warning, [json.loads(data) for data in datas]


def whole(path: str, answer: Any) -> Any:
    """Return the answer; for a stream that which its events make together."""
    if not isinstance(answer, list):
        return answer
    if path.startswith("/v1/responses"):
        assert [event["sequence_number"] for event in answer] == list(range(len(answer)))
        assert answer[0]["type"] == "response.created"
        assert answer[-1]["type"] == "response.completed"
        return answer[-1]["response"]
    if path.startswith("/v1/messages"):
        return _whole_message(answer)
    if path.startswith("/api/"):
        text = "".join(line["message"]["content"] for line in answer)
        return answer[-1] | {"message": {"content": text}}
    return _whole_chat(answer)


def _whole_message(events: list[Any]) -> Any:
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "message_stop"
    message = events[0]["message"]
    for event in events:
        match event:
            case {"type": "content_block_start"}:
                message["content"].append(event["content_block"])
                written = ""
            case {"type": "content_block_delta", "delta": {"text": text}}:
                message["content"][-1]["text"] += text
            case {"type": "content_block_delta", "delta": {"partial_json": text}}:
                written += text
                message["content"][-1]["input"] = json.loads(written) if written else {}
            case {"type": "message_delta"}:
                message |= event["delta"] | {"usage": event["usage"]}
                if "context_management" in event:
                    message["context_management"] = event["context_management"]
    return message


def _whole_chat(events: list[Any]) -> Any:
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    message = {"role": choices[0]["delta"]["role"], "content": text}
    choice = {"message": message, "finish_reason": choices[-1]["finish_reason"]}
    return {"object": "chat.completion", "choices": [choice], "usage": events[-1]["usage"]}


def has(answer: Any, expected: Any) -> bool:
    """Return whether the answer has all that is expected: of each object the expected keys."""
    if isinstance(expected, dict):
        return isinstance(answer, dict) and all(
            key in answer and has(answer[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return len(answer) == len(expected) and all(map(has, answer, expected))
    return answer == expected


@pytest.mark.parametrize("recorded", RECORDED.values(), ids=RECORDED)
async def test_a_recorded_request(recorded):
    text = recorded.get("model_writes", TEXT)
    expected = recorded["expected"]
    async with answering(text, recorded.get("context_length", 2048)) as live:
        path = recorded["path"]
        status, warning, answer = await send(live, path, recorded["body"])
        assert (status, warning) == (expected["status"], expected["warning"]), answer
        assert isinstance(answer, list) == (status == 200 and recorded["body"].get("stream", False))
        assert has(whole(path, answer), expected["answer"]), answer
        if "turns" in expected:
            assert live.engine.prompt.removesuffix(END).split(END) == expected["turns"]


async def test_a_response_is_continued_with_its_id():
    recorded = RECORDED["agentframework_previous_response"]
    body = recorded["body"]
    call = '<tool_call>\n{"name": "w", "arguments": {"c": "Oslo"}}\n</tool_call>'
    async with answering(call) as live:
        first = {"model": body["model"], "input": "weather?", "tools": body["tools"]}
        _, _, given = await send(live, recorded["path"], first)
        (asked,) = given["output"]
        live.engine.script = live.engine.tokenizer.encode(TEXT + END)
        output = body["input"][0] | {"call_id": asked["call_id"]}
        body = body | {"previous_response_id": given["id"], "input": [output]}
        status, warning, answer = await send(live, recorded["path"], body)
        assert (status, warning) == (200, None), answer
        assert answer["output"][0]["content"][0]["text"] == TEXT
        assert live.engine.prompt.removesuffix(END).split(END) == [
            "tools: w",
            "system: brief",
            "user: weather?",
            'assistant: w({"c": "Oslo"})',
            "tool: sunny",
        ]


async def test_an_alias_takes_the_place_of_claude_codes_model():
    recorded = RECORDED["claude_other_model"]
    async with answering(TEXT) as live:
        live.front.model_names = ("org/tiny", recorded["body"]["model"])
        status, _, answer = await send(live, recorded["path"], recorded["body"])
        assert status == 200
        assert whole(recorded["path"], answer)["content"][0]["text"] == TEXT
