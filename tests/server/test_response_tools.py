"""Namespaces, custom tools and hosted tools of /v1/responses, as Codex sends them."""

from __future__ import annotations

import json

import pytest

from tests.server.test_responses import ASK, RESPONSES
from tests.server.test_tools import answering

PATCH = '*** Begin Patch\n+ Köln "😀"\n*** End Patch'
STRING = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
EXEC = {"type": "function", "name": "exec_command", "parameters": STRING, "strict": False}
WORDS = {"type": "function", "name": "words", "description": "w", "parameters": STRING}
PICS = {"type": "namespace", "name": "mcp__pics", "description": "Pictures.", "tools": [WORDS]}
APPLY = {
    "type": "custom",
    "name": "apply_patch",
    "description": "FREEFORM",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch"},
}
SEARCH = {"type": "web_search", "external_web_access": False}
TOOLS = [EXEC, PICS, APPLY, {"type": "tool_search", "execution": "client"}, SEARCH]
CALLS = (
    '<tool_call>\n{"name": "mcp__pics__words", "arguments": {"name": "x"}}\n</tool_call>\n'
    + '<tool_call>\n{"name": "apply_patch", "arguments": '
    + json.dumps({"input": PATCH}, ensure_ascii=False)
    + "}\n</tool_call><|im_end|>"
)


async def test_calls_have_the_names_of_the_request() -> None:
    async with answering(CALLS) as live:
        body = ASK | {"tools": TOOLS}
        status, whole, response = await live.post(RESPONSES, body)
        assert status == 200, whole
        assert "tools[2].format, tools[3], tools[4]" in response.headers["Warning"]
        words, patch = whole["output"]
        assert (words["type"], words["name"], words["namespace"]) == (
            "function_call",
            "words",
            "mcp__pics",
        )
        assert json.loads(words["arguments"]) == {"name": "x"}
        assert (patch["type"], patch["name"], patch["input"]) == (
            "custom_tool_call",
            "apply_patch",
            PATCH,
        )
        assert "namespace" not in patch
        shown = live.engine.prompt
        assert "mcp__pics__words" in shown
        assert "start: begin_patch" in shown
        assert "web_search" not in shown
        assert [tool["type"] for tool in whole["tools"]] == [tool["type"] for tool in TOOLS]

        events = await live.typed_events(RESPONSES, body)
        names = [event["type"].removeprefix("response.") for event in events]
        assert names[-5:] == [
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
            "completed",
        ]
        assert events[-3]["input"] == PATCH
        streamed = events[-1]["response"]["output"]
        assert [item["name"] for item in streamed] == ["words", "apply_patch"]


async def test_a_history_with_their_calls() -> None:
    async with answering("ok<|im_end|>") as live:
        calls = [
            {"type": "message", "role": "user", "content": "hi"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "words",
                "namespace": "mcp__pics",
                "arguments": '{"name": "x"}',
            },
            {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": PATCH},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        ]
        status, body, response = await live.post(RESPONSES, ASK | {"input": calls, "tools": TOOLS})
        assert status == 200, body
        assert "input[1]" in response.headers["Warning"]
        prompt = live.engine.prompt
        assert '"mcp__pics__words"' in prompt
        assert "*** Begin Patch" in prompt
        assert prompt.index("sun") < prompt.index("Begin Patch") < prompt.rindex("done")


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "words", "namespace": "mcp__pics"}, "mcp__pics__words"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [SEARCH, {"type": "function", "name": "exec_command"}],
            },
            "exec_command",
        ),
    ],
)
async def test_a_choice_names_any_of_them(choice: dict, name: str) -> None:
    async with answering(CALLS) as live:
        status, body, _ = await live.post(RESPONSES, ASK | {"tools": TOOLS, "tool_choice": choice})
        assert status == 200, body
        grammar = live.engine.submitted.sampling.grammar.text.replace("\\x{5F}", "_")
        others = {"mcp__pics__words", "apply_patch", "exec_command"} - {name}
        assert name in grammar
        assert not any(other in grammar for other in others)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([SEARCH], "tools"),
        ([PICS, {"type": "function", "name": "mcp__pics__words"}], "tools"),
        (
            [{"type": "namespace", "name": "n", "tools": [{"type": "image"}]}],
            "tools[0].tools[0].type",
        ),
        ([{"type": "namespace", "name": "n", "tools": [PICS]}], "tools[0].tools[0].type"),
        ([{"type": "custom"}], "tools[0].name"),
        ([{"type": ["custom"]}], "tools[0].type"),
        ([{"type": "custom", "name": "x", "format": "text"}], "tools[0].format"),
    ],
)
async def test_what_is_refused(live, tools: list, param: str) -> None:
    status, answer, _ = await live.post(RESPONSES, ASK | {"tools": tools})
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_input_that_was_cut_off_is_shown() -> None:
    async with answering(CALLS) as live:
        body = ASK | {"tools": [APPLY], "max_output_tokens": len(live.engine.script) - 12}
        status, whole, _ = await live.post(RESPONSES, body)
        assert (status, whole["status"]) == (200, "incomplete")
        assert "Begin Patch" in json.dumps(whole["output"])
