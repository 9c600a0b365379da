"""`moeserve verify` compares an answer with the tokens of its receipt."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from moeserve.cli.answers import read_answers
from moeserve.cli.verify import _entry_difference, _equal_parts
from moeserve.config import config_of
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.open import open_front_end
from moeserve.frontend.signing_key import make_key
from tests.integration.conftest import Server, running_server

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 5},
                "days": {"type": "integer", "maximum": 9, "minimum": 1},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
HI = {"messages": [{"role": "user", "content": "Hi"}], "seed": 2, "max_tokens": 40}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", HI | {"logprobs": True, "top_logprobs": 2, "n": 2}),
    "text": ("completions", {"prompt": "A fox", "seed": 3, "logprobs": 2, "stop": "e"}),
    "echo": ("completions", {"prompt": "A fox", "seed": 3, "logprobs": 1, "echo": True}),
    "call": (
        "chat/completions",
        HI | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200},
    ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Each request's whole answer, and "stream NAME" for its events."""
    folder = tmp_path_factory.mktemp("answers")
    make_key(folder / "key")
    (folder / "settings.yaml").write_text(f"server: {{receipt_key: {folder / 'key'}}}")
    flags = (
        "--max-model-len",
        "512",
        "--tool-format",
        "hermes",
        "--config",
        str(folder / "settings.yaml"),
    )
    found = {}
    with running_server(folder / "log", *flags) as server:
        for name, (route, body) in REQUESTS.items():
            found[name] = posted(server, route, body | {"receipt": True})
            if name != "echo":  # an echo with logprobs cannot be streamed
                found[f"stream {name}"] = posted(
                    server, route, body | {"receipt": True, "stream": True}
                )
    return found


def posted(server: Server, route: str, body: dict[str, Any]) -> bytes:
    import urllib.request

    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/v1/{route}", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


@pytest.fixture
async def front() -> AsyncIterator[FrontEnd]:
    config = config_of("demo", max_model_len=512, threads=1, tool_format="hermes")
    async with open_front_end(config, child=False, signs=False) as front:
        await front.wait_ready()
        yield front


async def differences(front: FrontEnd, content: bytes, folder: Path) -> list[str]:
    (folder / "answer").write_bytes(content)
    return [await _entry_difference(front, one) for one in read_answers(folder / "answer")]


Change = Callable[[dict[str, Any]], None]


def _set(*path: str | int, to: Any) -> Change:
    def change(choice: dict[str, Any]) -> None:
        for key in path[:-1]:
            choice = choice[key]
        choice[path[-1]] = to(choice[path[-1]]) if callable(to) else to

    return change


CHANGES: list[tuple[str, Change, str]] = [
    ("chat", _set("message", "content", to=lambda text: "It x" + text[4:]), "content: from char"),
    ("chat", _set("finish_reason", to="tool_calls"), "finish_reason: 'tool_calls'"),
    ("chat", _set("logprobs", "content", 3, "logprob", to=-1.5), "logprobs.content[3]"),
    (
        "chat",
        _set("logprobs", "content", 5, "top_logprobs", 1, "token", to="x"),
        "logprobs.content[5]",
    ),
    ("text", _set("text", to=lambda text: text + "!"), "text: from character"),
    ("text", _set("stop_reason", to="x"), "stop_reason: 'x'"),
    ("text", _set("logprobs", "token_logprobs", 1, to=-0.5), "logprobs.token_logprobs[1]"),
    ("echo", _set("text", to=lambda text: text.replace("A fox", "A dog")), "text: from character"),
    ("call", _set("message", "tool_calls", 0, "function", "name", to="other"), "function.name"),
    (
        "call",
        _set("message", "tool_calls", 0, "function", "arguments", to="{}"),
        "function.arguments",
    ),
    ("call", _set("message", "tool_calls", to=None), "tool_calls: 0 in the answer"),
    ("call", _set("message", "content", to="Hello"), "content: from character 0 on 'Hello'"),
]


async def test_answers_as_they_were_sent_are_equal(answers, front, tmp_path) -> None:
    for name, content in answers.items():
        found = await differences(front, content, tmp_path)
        assert found == [""] * (2 if "chat" in name else 1), (name, found)
        (tmp_path / "answer").write_bytes(content)
        assert "the answer are equal" in _equal_parts(read_answers(tmp_path / "answer")[0])
    lines = [
        json.dumps({"custom_id": name, "response": {"body": json.loads(answers[name])}})
        for name in ("text", "call")
    ]
    assert await differences(front, "\n".join(lines).encode(), tmp_path) == ["", ""]


async def test_the_first_change_of_an_answer_is_named(answers, front, tmp_path) -> None:
    for name, change, said in CHANGES:
        answer = json.loads(answers[name])
        change(answer["choices"][0])
        found = await differences(front, json.dumps(answer).encode(), tmp_path)
        assert said in found[0], (name, said, found)
        assert not any(found[1:])


async def test_a_changed_event_of_a_stream_is_named(answers, front, tmp_path) -> None:
    lines = answers["stream text"].split(b"\n")
    at = next(i for i, line in enumerate(lines) if b'"text":"' in line and b'"text":""' not in line)
    event = json.loads(lines[at][6:])
    event["choices"][0]["text"] += "?"
    lines[at] = b"data: " + json.dumps(event).encode()
    (found,) = await differences(front, b"\n".join(lines), tmp_path)
    assert found.startswith("text: from character")


async def test_a_receipt_alone_says_that_no_text_was_compared(answers, front, tmp_path) -> None:
    receipt = json.loads(answers["text"])["choices"][0]["receipt"]
    for content in (receipt, [copy.deepcopy(receipt)]):
        (tmp_path / "receipt").write_text(json.dumps(content))
        (one,) = read_answers(tmp_path / "receipt")
        assert await _entry_difference(front, one) == ""
        assert "the file has no text to compare" in _equal_parts(one)
