"""Conversations of every kind that agents send, for `render_templates.py` and the tests.

Each is the body of a request. A word that ends in `_word` must reach the model, and one that ends
in `_thought` must do so unless the template hides earlier thoughts.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

JSON = dict[str, Any]
Route = Literal["chat", "messages", "responses"]


class History(NamedTuple):
    """A request's body, and its route."""

    name: str
    route: Route
    body: JSON

    @property
    def has_empty_turn(self) -> bool:
        """Whether a message is empty itself, so that the prompt may have an empty turn."""
        return "empty" in self.name


# ---- Parts of chats


def says(role: str, content: Any, **fields: Any) -> JSON:
    """Return a message."""
    return {"role": role, "content": content} | fields


def call(call_id: str, name: str = "read", arguments: Any = '{"path": "path_word"}') -> JSON:
    """Return a call of a tool."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def calls(*made: JSON, **fields: Any) -> JSON:
    """Return an assistant's message that calls tools."""
    return {"role": "assistant", "tool_calls": list(made)} | fields


def result(call_id: str, content: Any = "result_word", **fields: Any) -> JSON:
    """Return a tool's result."""
    return {"role": "tool", "tool_call_id": call_id, "content": content} | fields


def tool(name: str, parameters: JSON | None = None, **fields: Any) -> JSON:
    """Return the definition of a tool."""
    function: JSON = {"name": name} | fields
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def properties(**given: JSON) -> JSON:
    """Return the schema of an object."""
    return {"type": "object", "properties": given, "required": list(given)[:1]}


def step(content: Any = "result_word", **fields: Any) -> list[JSON]:
    """Return a call, and its result."""
    return [calls(call("call_0001"), content=""), result("call_0001", content, **fields)]


SYSTEM = says("system", "rules_word")
USER = says("user", "ask_word")
MORE = says("user", "more_word")
ANSWER = says("assistant", "answer_word")
READ = tool(
    "read",
    properties(path={"type": "string", "description": "pathinfo_word"}),
    description="readinfo_word",
)
WRITE = tool(
    "write",
    properties(path={"type": "string"}, text={"type": "string", "description": "textinfo_word"}),
    description="writeinfo_word",
)
# Definitions as frameworks generate them
ODD_TOOLS = [
    tool("bare"),
    tool("described", description="only_word"),
    tool("empty", {"type": "object", "properties": {}}, description="noarguments_word"),
    tool("nothing", {}, description="noschema_word"),
    tool(
        "choose",
        properties(
            unit={"type": "string", "enum": ["celsius", "kelvin"]},
            either={"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
            maybe={"type": ["string", "null"], "default": None},
            item={"$ref": "#/$defs/Item"},
            items={"type": "array", "items": {"$ref": "#/$defs/Item"}},
            constant={"const": 5},
            anything={},
            deep={"type": "object", "properties": {"a": {"type": "number", "minimum": 0.5}}},
            flag={"type": "boolean", "default": True, "description": "flaginfo_word"},
        )
        | {
            "additionalProperties": False,
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$defs": {"Item": properties(name={"type": "string"})},
        },
        description="chooseinfo_word",
        strict=True,
    ),
    tool("mcp__files__read-file", {"type": "object"}, description='Line one_word.\n"two" <b>'),
]
NESTED = {
    "path": "nested_word",
    "edits": [{"old": "old_word", "new": "new_word"}, {"old": "", "new": 'line_word\n\tx = "y"'}],
    "options": {"deep": {"er": "deeper_word"}, "list": ["a_word", 1]},
}
UNICODE = {"path": "Köln 漢字 😀 unicode_word", "quote": "\"'`<b>&</b>\\ quote_word"}
NUMBERS = {"path": "number_word", "count": 42, "ratio": 0.5, "yes": True, "no": False, "none": None}
LONG_ID = "call_" + "0123456789abcdef" * 4 + "|fc_" + "9" * 40


def chat(name: str, *messages: JSON, tools: list[JSON] | None = None) -> History:
    """Return a history of /v1/chat/completions."""
    body: JSON = {"messages": list(messages)}
    if tools is not None:
        body["tools"] = tools
    return History(name, "chat", body)


def with_tools(name: str, *messages: JSON) -> History:
    """Return a history of /v1/chat/completions with two tools."""
    return chat(name, *messages, tools=[READ, WRITE])


def arguments_history(name: str, arguments: Any) -> History:
    """Return a history whose call has these arguments."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    made = calls(call("call_0001", "write", text), content="")
    return with_tools(f"arguments: {name}", USER, made, result("call_0001"), MORE)


_TWO_CALLS = (
    call("call_0001", arguments='{"path": "first_word"}'),
    call("call_0002", "write", '{"path": "second_word", "text": "body_word"}'),
)
_TWO_RESULTS = (result("call_0001", "firstresult_word"), result("call_0002", "secondresult_word"))
_OWN_ANSWER = says("assistant", "lookinto_word", tool_calls=[call("call_0001")])

CHATS = [
    chat("plain", USER),
    chat("several turns", SYSTEM, USER, ANSWER, MORE),
    chat("only a system message", SYSTEM),
    chat("two system messages", SYSTEM, says("system", "memory_word"), USER),
    chat("late system message", SYSTEM, USER, ANSWER, MORE, says("system", "late_word")),
    chat("only a late system message", USER, says("system", "late_word"), ANSWER, MORE),
    chat("developer", says("developer", "rules_word"), USER),
    chat("developer beside system", SYSTEM, says("developer", "context_word"), USER, ANSWER, MORE),
    chat("user twice", SYSTEM, USER, MORE, ANSWER, says("user", "last_word")),
    chat("assistant twice", SYSTEM, USER, ANSWER, says("assistant", "again_word"), MORE),
    chat("assistant first", ANSWER, USER),
    chat("assistant after system", SYSTEM, ANSWER, USER),
    chat("assistant last", SYSTEM, USER, ANSWER),
    chat("empty answer", USER, says("assistant", ""), MORE),
    chat("empty system", says("system", ""), USER),
    chat("empty null answer", USER, says("assistant", None, refusal=None, annotations=[]), MORE),
    chat(
        "refusal",
        USER,
        says("assistant", [{"type": "refusal", "refusal": "cannot_word"}]),
        MORE,
        says("assistant", None, refusal="willnot_word"),
        MORE,
    ),
    chat(
        "names",
        says("system", "rules_word", name="policy"),
        says("user", "ask_word", name="Ada"),
        says("assistant", "answer_word", name="helper"),
        MORE,
    ),
    chat(
        "text parts",
        says("system", [{"type": "text", "text": "rules_word"}]),
        says(
            "user",
            [{"type": "text", "text": "one_word"}, {"type": "text", "text": "two_word"}],
        ),
        says("assistant", [{"type": "text", "text": "answer_word"}]),
        MORE,
    ),
    with_tools("tools", SYSTEM, USER),
    with_tools("tools without system", USER),
    with_tools("tools after turns", SYSTEM, USER, ANSWER, MORE),
    chat("odd tools", SYSTEM, USER, tools=ODD_TOOLS),
    chat("tools of no use any more", SYSTEM, USER, *step(), ANSWER, MORE),
    with_tools("call with content null", USER, calls(call("call_0001"), content=None),
               result("call_0001")),
    with_tools("call without content", USER, calls(call("call_0001")), result("call_0001")),
    with_tools("call with content of no text", USER, *step()),
    with_tools("call with text", SYSTEM, USER, _OWN_ANSWER, result("call_0001"), ANSWER, MORE),
    with_tools("parallel calls", SYSTEM, USER, calls(*_TWO_CALLS, content=None), *_TWO_RESULTS),
    with_tools(
        "results in another order",
        USER,
        calls(*_TWO_CALLS, content=""),
        *_TWO_RESULTS[::-1],
        ANSWER,
        MORE,
    ),
    with_tools(
        "parallel calls of one tool",
        USER,
        calls(
            call("call_0001", arguments='{"path": "first_word"}'),
            call("call_0002", arguments='{"path": "second_word"}'),
        ),
        result("call_0001", "firstresult_word", name="read"),
        result("call_0002", "secondresult_word", name="read"),
    ),
    with_tools("result of parts", USER, *step([{"type": "text", "text": "part_word"},
                                               {"type": "text", "text": "otherpart_word"}])),
    with_tools(
        "result with an image",
        USER,
        *step([
            {"type": "text", "text": "shown_word"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        ]),
    ),
    with_tools("empty result", USER, *step(""), MORE),
    with_tools("empty null result", USER, *step(None), ANSWER, MORE),
    with_tools("result of JSON", USER, *step('{"t": 21, "none": null, "text": "json_word"}')),
    with_tools("result of a JSON list", USER, *step('[{"a": "list_word"}, 1, null]')),
    with_tools("result of a number", USER, *step("42"), ANSWER, MORE),
    with_tools("result with a name", USER, *step(name="read"), ANSWER),
    with_tools(
        "steps",
        SYSTEM,
        USER,
        *step("step1_word"),
        calls(
            call("call_0002", "write", '{"path": "b_word", "text": "c_word"}'),
            content="then_word",
        ),
        result("call_0002", "step2_word"),
        calls(call("call_0003"), content=None),
        result("call_0003", "step3_word"),
        ANSWER,
        MORE,
        calls(call("call_0004"), content=None),
        result("call_0004", "step4_word"),
    ),
    with_tools("user after a result", USER, *step(), MORE),
    with_tools("user between call and result", USER, calls(call("call_0001"), content=""),
               says("user", "between_word"), result("call_0001")),
    with_tools("result without its call", USER, ANSWER, MORE, result("call_0009")),
    with_tools("call without its result", USER, calls(call("call_0001"), content=""), MORE),
    with_tools("call last", USER, calls(call("call_0001"), content="")),
    with_tools("call first", SYSTEM, *step(), USER),
    with_tools("late system message in steps", SYSTEM, USER, *step(),
               says("system", "late_word"), calls(call("call_0002")), result("call_0002")),
    arguments_history("{}", "{}"),
    arguments_history("no text", ""),
    arguments_history("null", "null"),
    arguments_history("nested", NESTED),
    arguments_history("unicode", UNICODE),
    arguments_history("numbers", NUMBERS),
    arguments_history("cut off", '{"path": "cut_word'),
    with_tools("arguments: an object", USER, calls(call("call_0001", arguments=NUMBERS)),
               result("call_0001")),
    with_tools(
        "long ids", USER, calls(call(LONG_ID), call(LONG_ID + "2", "write")),
        result(LONG_ID), result(LONG_ID + "2", "other_word"), MORE,
    ),
    with_tools("short ids", USER, calls(call("1"), content=""), result("1"), MORE),
    with_tools("empty ids", USER, calls(call("") | {"id": ""}, content=""), result(""), MORE),
    with_tools(
        "no ids", USER,
        {"role": "assistant", "tool_calls": [{"function": call("")["function"]}]},
        {"role": "tool", "content": "result_word", "name": "read"},
        MORE,
    ),
    with_tools(
        "thoughts with a call",
        USER,
        calls(call("call_0001"), content="", reasoning_content="current_thought"),
        result("call_0001"),
    ),
    with_tools(
        "thoughts in earlier turns",
        SYSTEM,
        USER,
        says("assistant", "answer_word", reasoning_content="earlier_thought"),
        MORE,
        calls(call("call_0001"), content=None, reasoning="current_thought"),
        result("call_0001"),
        calls(call("call_0002"), content="then_word", reasoning_content="second_thought"),
        result("call_0002"),
    ),
    chat(
        "thoughts as tags",
        USER,
        says("assistant", "<think>\nearlier_thought\n</think>\n\nanswer_word"),
        MORE,
    ),
    chat("empty answer after thoughts", USER, says("assistant", None, reasoning="earlier_thought"),
         MORE),
]  # fmt: skip


# ---- /v1/messages


def messages(name: str, *turns: JSON, **fields: Any) -> History:
    """Return a history of /v1/messages with two tools."""
    tools = [
        {
            "name": given["function"]["name"],
            "description": given["function"]["description"],
            "input_schema": given["function"]["parameters"],
        }
        for given in (READ, WRITE)
    ]
    body = {"model": "m", "max_tokens": 9, "messages": list(turns), "tools": tools} | fields
    return History(name, "messages", body)


def text(content: str) -> JSON:
    """Return a block of text."""
    return {"type": "text", "text": content}


def use(call_id: str, name: str = "read", **arguments: Any) -> JSON:
    """Return a block that calls a tool."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def used(call_id: str, content: Any = "result_word", **fields: Any) -> JSON:
    """Return a block with a tool's result."""
    return {"type": "tool_result", "tool_use_id": call_id, "content": content} | fields


MESSAGES = [
    messages("messages: plain", USER, system="rules_word"),
    messages(
        "messages: system blocks and reminders",
        says("user", [text("<system-reminder>remind_word</system-reminder>"), text("ask_word")]),
        says("system", "late_word"),
        system=[text("rules_word"), text("environment_word") | {"cache_control": {}}],
    ),
    messages(
        "messages: a step",
        USER,
        says("assistant", [use("toolu_01", path="path_word")]),
        says("user", [used("toolu_01")]),
        system="rules_word",
    ),
    messages(
        "messages: parallel steps with thoughts",
        USER,
        says(
            "assistant",
            [
                {"type": "thinking", "thinking": "current_thought", "signature": "x"},
                text("saying_word"),
                use("toolu_01", path="first_word"),
                use("toolu_02", "write", path="second_word", text="body_word"),
            ],
        ),
        says(
            "user",
            [
                used("toolu_02", [text("secondresult_word")]),
                used("toolu_01", "firstresult_word", is_error=True),
                text("also_word"),
            ],
        ),
        says("assistant", [text("answer_word")]),
        MORE,
    ),
    messages(
        "messages: text before a result",
        USER,
        says("assistant", [use("toolu_01", path="path_word")]),
        says("user", [text("before_word"), used("toolu_01"), text("after_word")]),
    ),
    messages(
        "messages: empty result",
        USER,
        says("assistant", [use("toolu_01")]),
        says("user", [{"type": "tool_result", "tool_use_id": "toolu_01"}]),
    ),
    messages("messages: prefill", USER, says("assistant", "begin_word"), tools=[]),
    messages("messages: user twice", USER, MORE, system="rules_word"),
]


# ---- /v1/responses


def responses(name: str, *items: JSON, **fields: Any) -> History:
    """Return a history of /v1/responses with two tools."""
    tools = [{"type": "function"} | given["function"] for given in (READ, WRITE)]
    body = {"model": "m", "input": list(items), "tools": tools} | fields
    return History(name, "responses", body)


def called(call_id: str, name: str = "read", arguments: str = '{"path": "path_word"}') -> JSON:
    """Return an item that calls a tool."""
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, content: Any = "result_word") -> JSON:
    """Return an item with a tool's result."""
    return {"type": "function_call_output", "call_id": call_id, "output": content}


RESPONSES = [
    responses("responses: plain", USER, instructions="rules_word"),
    responses(
        "responses: two developers",
        says("developer", [{"type": "input_text", "text": "permissions_word"}]),
        says("user", [{"type": "input_text", "text": "context_word"}]),
        says("developer", "skills_word"),
        USER,
        instructions="rules_word",
    ),
    responses(
        "responses: steps with thoughts",
        says("developer", "rules_word"),
        USER,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "current_thought"}]},
        called("call_0001"),
        output("call_0001", [{"type": "input_text", "text": "result_word"}]),
        says("assistant", [{"type": "output_text", "text": "then_word"}]),
        called("call_0002", "write", "{}"),
        called("call_0003"),
        output("call_0002", ""),
        output("call_0003", "last_word"),
    ),
    responses(
        "responses: an answer, then a developer",
        USER,
        says("assistant", [{"type": "output_text", "text": "answer_word"}]),
        says("developer", "late_word"),
        MORE,
        instructions="rules_word",
    ),
]

HISTORIES = [*CHATS, *MESSAGES, *RESPONSES]
