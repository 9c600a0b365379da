"""Tools through the `openai` package, on the demo model with a template that shows tools: calls
come by grammar.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from .conftest import running_server

TEMPLATE = Path(__file__).parent / "qwen_tools.jinja"
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]


def tool(name: str, properties: dict, **fields) -> dict:
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema} | fields}


TOOLS = [
    tool(
        "paint",
        {"colour": {"enum": ["red", "green", "blue"]}, "layers": {"type": "integer", "maximum": 9}},
    ),
    tool("stop", {"now": {"type": "boolean"}}),
]
NAMED = {"type": "function", "function": {"name": "paint"}}
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
COMPACT = {"temperature": 0.8, "seed": 7, "max_tokens": 120}


class Colour(BaseModel):
    name: Literal["red", "blue"]


@pytest.fixture(scope="module", params=["off", "ngram:4"])
def client(request, tmp_path_factory):
    guesses = [] if request.param == "off" else ["--speculate", request.param]
    flags = ["--chat-template", str(TEMPLATE), "--max-num-seqs", "4", "--max-model-len", "1024"]
    log = tmp_path_factory.mktemp("tools") / "log"
    with (
        running_server(log, *flags, *guesses) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it,
    ):
        yield it


def ask(client, **fields):
    return client.chat.completions.create(
        model="demo", messages=MESSAGES, **(COMPACT | {"tools": TOOLS} | fields)
    )


def checked(choice) -> list[tuple[str, dict]]:
    """The calls of an answer, which have to match their tools."""
    calls = []
    for call in choice.message.tool_calls:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])
        calls.append((call.function.name, arguments))
    return calls


@pytest.mark.parametrize(
    ("fields", "finish"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, "tool_calls"),
        ({"tool_choice": NAMED, "parallel_tool_calls": False}, "stop"),
        ({"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}, "tool_calls"),
    ],
)
def test_calls_are_valid_and_streams_equal_whole_answers(client, fields, finish):
    whole = ask(client, n=2, **fields)
    streamed: dict[int, dict] = {}
    with ask(client, n=2, stream=True, stream_options={"include_usage": True}, **fields) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                into = streamed.setdefault(choice.index, {"text": "", "finish": None, "calls": []})
                into["text"] += choice.delta.content or ""
                into["finish"] = choice.finish_reason or into["finish"]
                for call in choice.delta.tool_calls or ():
                    if call.id:
                        into["calls"].append([call.function.name, ""])
                    into["calls"][call.index][1] += call.function.arguments
            usage = chunk.usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        calls = checked(choice)
        assert len(calls) == 1
        if fields["tool_choice"] == NAMED:
            assert calls[0][0] == "paint"
        assert choice.message.content is None
        assert choice.finish_reason == finish
        texts = [
            [call.function.name, call.function.arguments] for call in choice.message.tool_calls
        ]
        assert streamed[choice.index] == {"text": "", "finish": finish, "calls": texts}


def test_the_packages_own_accumulator(client):
    with client.chat.completions.stream(
        model="demo",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        **COMPACT,
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(event.name, json.loads(event.arguments)) for event in done] == checked(final)


def test_strict_tools_are_parsed(client):
    class Paint(BaseModel):
        """Paints."""

        colour: Colour

    strict = openai.pydantic_function_tool(Paint, name="paint")
    answer = client.chat.completions.parse(
        model="demo",
        messages=MESSAGES,
        tools=[strict],
        tool_choice=NAMED,
        temperature=0,
        max_tokens=300,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Paint)


@pytest.mark.parametrize(
    "fields", [{}, {"tool_choice": "none"}, {"tools": []}, {"tools": openai.omit}]
)
def test_a_history_with_calls_goes_on(client, fields):
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "stop", "arguments": '{"now": true}'},
    }
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "stopped"},
    ]
    asked = {"tools": TOOLS, "temperature": 0, "max_tokens": 20} | fields
    answer = client.chat.completions.create(model="demo", messages=history, **asked)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_structured_output_beside_tools(client):
    shape = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    asked = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": shape | {"additionalProperties": False}},
    }
    for choice in ask(client, response_format=asked, n=4, extra_body={"cache_salt": "a"}).choices:
        if choice.message.tool_calls:
            assert checked(choice)
        else:
            assert isinstance(json.loads(choice.message.content)["ok"], bool)


def test_a_model_whose_template_does_not_reason_begins_with_the_content(client):
    for kind in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMAS["stop"]}},
    ):
        whole = client.chat.completions.create(
            model="demo", messages=MESSAGES, temperature=0, max_tokens=20, response_format=kind
        )
        assert whole.choices[0].message.content.startswith("{")


def test_speculation_changes_nothing(client):
    first = ask(client, tool_choice="required", n=3)
    again = ask(client, tool_choice="required", n=3, extra_body={"speculate": False})
    assert [
        c.message.model_dump(exclude={"tool_calls": {"__all__": {"id"}}}) for c in first.choices
    ] == [c.message.model_dump(exclude={"tool_calls": {"__all__": {"id"}}}) for c in again.choices]
