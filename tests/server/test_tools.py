"""Chats with tools and reasoning, for a model that answers as Qwen3 does; `test_harmony` has
gpt-oss's form.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import chain

import pytest

from moeserve.messages import Submit
from moeserve.text.answer_data import find_format
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.fit_calls import TEXT_CALL_FORMAT
from tests.server.conftest import live_server, make_tokenizer
from tests.server.test_harmony import CHAT, USER, join, plain

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools|tojson }} "
    "<tool_call>{name, arguments}</tool_call><|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.content is not none else '-' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function|tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
STRICT = [{"type": "function", "function": WEATHER["function"] | {"strict": True}}]
ARGUMENTS = '{"city": "Köln 😀"}'
CALLS = (
    "<think>\nA fox 😀?\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 😀"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|im_end|>'
)
MESSAGE = {
    "role": "assistant",
    "tool_calls": [
        {"id": True, "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
        {"id": True, "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ],
}


@asynccontextmanager
async def answering(answer: str, template: str = TEMPLATE, **settings):
    tokenizer = make_tokenizer()
    async with live_server(tokenizer, context=2048, **settings) as live:
        live.front.chat_template = ChatTemplate(template)
        live.front.answer_format = find_format(template, tokenizer)
        live.engine.script = tokenizer.encode(answer)
        yield live


async def test_tools_of_a_model_whose_template_has_none():
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    template = "{% for m in messages %}" + turn + "{% endfor %}"
    async with answering(CALLS, template) as live:
        live.front.text_call_format = find_format("", live.front.tokenizer, TEXT_CALL_FORMAT)
        status, answer, _ = await live.post(CHAT, asked())
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "weather"
        listing, _, _ = live.engine.prompt.partition("<|im_end|>")
        assert '{"name": "clock"}' in listing
        assert '<tool_call>\n{"name": "NAME"' in listing
        messages = [USER, message, {"role": "tool", "tool_call_id": "c", "content": "sun"}, USER]
        status, answer, _ = await live.post(CHAT, {"messages": messages})
        assert status == 200, answer
        assert "user\n<tool_response>\nsun\n</tool_response><|im_end|>" in live.engine.prompt


def asked(**fields) -> dict:
    return {"messages": [USER], "tools": TOOLS} | fields


async def grammars(live, **fields) -> list:
    """The grammars that the engine gets with a request that it is to take."""
    live.engine.told.clear()
    status, answer, _ = await live.post(CHAT, asked(**fields))
    assert status == 200, answer
    return [told.sampling.grammar for told in live.engine.told if isinstance(told, Submit)]


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}, {"n": 3}]
)
async def test_calls_whole_and_streamed(more):
    async with answering(CALLS) as live:
        body = asked(**more)
        status, whole, _ = await live.post(CHAT, body)
        assert status == 200
        events = await live.events(CHAT, body | {"stream_options": {"include_usage": True}})
        assert events[-1]["usage"] == whole["usage"]
        assert (
            5
            < whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
            < len(live.engine.script) * 3
        )
        for choice in whole["choices"]:
            of_choice = [
                {"choices": [c]}
                for event in events
                for c in event["choices"]
                if c["index"] == choice["index"]
            ]
            found = plain(choice)
            assert plain(join(of_choice)) == found
            assert found["finish_reason"] == "tool_calls"
            assert found["message"].pop("reasoning").strip() == "A fox 😀?"
            assert found["message"].pop("content").strip() == "I look."
            assert found["message"] == MESSAGE
            parts = [event["choices"][0] for event in of_choice]
            if "logprobs" in more:
                ids = [*chain.from_iterable(part.get("token_ids", []) for part in parts)]
                assert ids == choice["token_ids"] == live.engine.script
                rows = [
                    row
                    for part in parts
                    if part.get("logprobs")
                    for row in part["logprobs"]["content"]
                ]
                assert rows == choice["logprobs"]["content"]
        ids = [
            call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]
        ]
        assert len(set(ids)) == len(ids)


async def test_a_call_is_streamed_once_it_is_complete():
    async with answering(CALLS) as live:
        events = await live.events(CHAT, asked())
        calls = [call for e in events for call in e["choices"][0]["delta"].get("tool_calls", ())]
        assert [call["index"] for call in calls if "id" in call] == [0, 1]
        assert sum("id" not in call and call["index"] == 0 for call in calls) == 1
        assert all(call.keys() == {"index", "function"} for call in calls if "id" not in call)


async def test_an_answer_that_is_cut_off_or_aborted_shows_what_there_is():
    async with answering(CALLS) as live:
        for num_tokens in range(1, len(live.engine.script), 7):
            _, whole, _ = await live.post(CHAT, asked(max_tokens=num_tokens))
            assert plain(join(await live.events(CHAT, asked(max_tokens=num_tokens)))) == plain(
                whole["choices"][0]
            )
            assert whole["choices"][0]["finish_reason"] == "length"
        live.engine.gate.clear()
        task = asyncio.create_task(live.post(CHAT, asked(), X_Request_Id="x"))
        async with asyncio.timeout(20):
            while not live.engine.rows:  # noqa: ASYNC110
                await asyncio.sleep(0)
        for _ in range(8):
            live.engine._step()
        await live.context.running["x"][0].abort()
        _, answer, _ = await task
        assert answer["choices"][0]["finish_reason"] == "abort"


async def test_a_forced_call_that_is_cut_off_in_its_first_mark_leaves_no_piece_of_it():
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|im_end|>'
    async with answering(call) as live:
        for num_tokens in range(1, 12):
            body = asked(max_tokens=num_tokens, tool_choice="required")
            _, whole, _ = await live.post(CHAT, body)
            choice = whole["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
            assert plain(join(await live.events(CHAT, body))) == plain(choice)
        _, whole, _ = await live.post(CHAT, asked(max_tokens=3))
        assert whole["choices"][0]["message"]["content"].startswith("<")  # it may be a text
        _, whole, _ = await live.post(CHAT, asked(tool_choice="required"))
        assert len(whole["choices"][0]["message"]["tool_calls"]) == 1


async def test_reasoning_can_be_left_out():
    async with answering(CALLS) as live:
        body = asked(include_reasoning=False)
        _, whole, _ = await live.post(CHAT, body)
        assert plain(join(await live.events(CHAT, body))) == plain(whole["choices"][0])
        assert "reasoning" not in whole["choices"][0]["message"]
        status, answer, _ = await live.post(CHAT, body | {"logprobs": True})
        assert (status, answer["error"]["param"]) == (400, "logprobs")


async def test_what_is_enforced():
    named = {"type": "function", "function": {"name": "clock"}}
    allowed = {"mode": "required", "tools": [named]}
    async with answering(CALLS) as live:
        assert await grammars(live) == [None]
        assert await grammars(live, tool_choice="none", n=2) == [None, None]
        (any_tool,) = await grammars(live, tool_choice="required")
        assert await grammars(live, tool_choice="required", receipt=True) == [any_tool]
        (only_clock,) = await grammars(live, tool_choice=named)
        assert await grammars(
            live, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
        ) == [only_clock]
        (single,) = await grammars(live, tool_choice="required", parallel_tool_calls=False)
        (strict,) = await grammars(live, tools=STRICT)
        (json_only,) = await grammars(live, tools=[], response_format={"type": "json_object"})
        found = [any_tool, only_clock, single, strict, json_only]
        assert None not in found
        assert len(set(found)) == len(found)


async def test_who_names_a_tool_gets_stop():
    named = {"type": "function", "function": {"name": "weather"}}
    async with answering(CALLS) as live:
        _, whole, _ = await live.post(CHAT, asked(tool_choice=named))
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert plain(join(await live.events(CHAT, asked(tool_choice=named)))) == plain(
            whole["choices"][0]
        )
        _, whole, _ = await live.post(CHAT, asked(tool_choice="required"))
        assert whole["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_template_gets_history_and_what_is_offered():
    calls = [
        {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    ]
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "rain"}]},
    ]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    cases = [
        ({}, ["weather", "clock"]),
        ({"tool_choice": "none"}, []),
        ({"tools": []}, []),
        ({"tools": None}, []),
        (
            {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
            ["weather", "clock"],
        ),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}, ["clock"]),
    ]
    async with answering(CALLS) as live:
        for change, names in cases:
            status, answer, _ = await live.post(f"{CHAT}/render", asked(messages=history) | change)
            assert status == 200, answer
            shown, _, rest = answer["prompt"].rpartition("<|im_start|>user")
            assert [name for name in ("weather", "clock") if f'"{name}"' in shown] == names
            assert rest.startswith(
                '\na fox<|im_end|>\n<|im_start|>assistant\n<tool_call>{"name": "weather"'
            )
            assert rest.endswith("<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n")
            status, answer, _ = await live.post(CHAT, asked(messages=history) | change)
            assert status == 200, answer
        _, answer, _ = await live.post(f"{CHAT}/render", asked(reasoning_effort="none"))
        assert answer["prompt"].endswith("</think>\n\n")


def _calling(arguments: object) -> dict:
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "a", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("template", "change", "param"),
    [
        ("{{ tools }}{{ messages[0].content }}", {}, "tools"),  # the form of calls is unknown
        (TEMPLATE, {"tools": [WEATHER, WEATHER]}, "tools"),
        (TEMPLATE, {"tools": [], "tool_choice": "required"}, "tool_choice"),
        (TEMPLATE, {"tool_choice": "sometimes"}, "tool_choice"),
        (TEMPLATE, {"tool_choice": 5}, "tool_choice"),
        (TEMPLATE, {"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        (TEMPLATE, {"tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            TEMPLATE,
            {"tool_choice": {"type": "custom", "custom": {"name": "x"}}},
            "tool_choice.type",
        ),
        (
            TEMPLATE,
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "none", "tools": []},
                }
            },
            "tool_choice.allowed_tools.mode",
        ),
        (TEMPLATE, {"functions": [{"name": "x"}]}, "functions"),
        (TEMPLATE, {"messages": None}, "messages"),
        (
            TEMPLATE,
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]},
            None,
        ),
        (TEMPLATE, {"top_logprobs": 1}, "top_logprobs"),
        (TEMPLATE, {"best_of": 3}, "best_of"),
        (TEMPLATE, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (TEMPLATE, {"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools[0].type"),
        (
            TEMPLATE,
            {"tools": [{"type": "function", "function": {"name": ""}}]},
            "tools[0].function.name",
        ),
        (TEMPLATE, {"tools": "x"}, "tools"),
        (TEMPLATE, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (TEMPLATE, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        (
            TEMPLATE,
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (TEMPLATE, {"messages": [_calling(5)]}, "messages[0].tool_calls[0].function.arguments"),
    ],
)
async def test_bad_requests(template, change, param):
    async with answering(CALLS, template) as live:
        status, answer, _ = await live.post(CHAT, asked() | change)
        assert status == 400
        assert answer["error"]["param"] == (param or "tools[0].function.parameters")
        assert "`" not in answer["error"]["message"]
        status, answer, _ = await live.post(CHAT, {"model": "org/tiny"})
        assert (status, answer["error"]["param"]) == (400, "messages")


async def test_defaults_that_ask_for_nothing_are_taken():
    async with answering(CALLS) as live:
        for fields in (
            {"best_of": 2, "n": 2},
            {"best_of": 1},
            {"suffix": ""},
            {"top_logprobs": 0},
            {"functions": []},
        ):
            status, answer, _ = await live.post(CHAT, asked(**fields))
            assert status == 200, answer


async def test_errors_name_the_tool_and_the_field():
    fine = {"type": "function", "function": {"name": "fine", "parameters": {"type": "object"}}}

    def bad(parameters, name="bad"):
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    nested = {"type": "object", "properties": {"env": {"not": {}}}, "required": ["env"]}
    schema = {"properties": {"a": {"not": {}}}}
    json_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    cases = [  # the request, the field, and the beginning of the message
        (
            {"tools": [fine, bad(nested)], "tool_choice": "required"},
            "tools[1].function.parameters",
            "tools[1].function.parameters at /properties/env: ",
        ),
        (
            {
                "tools": [fine, bad(nested)],
                "tool_choice": {"type": "function", "function": {"name": "bad"}},
            },
            "tools[1].function.parameters",
            "tools[1].function.parameters at /properties/env: ",
        ),
        (
            {"tools": [fine, bad({"type": "string"})]},
            "tools[1].function.parameters",
            "tools[1].function.parameters at /type: ",
        ),
        (
            {"tools": None, "response_format": json_schema},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema at /properties/a: ",
        ),
        (
            {"tools": [fine], "response_format": json_schema},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema at /properties/a: ",
        ),
    ]
    async with answering(CALLS) as live:
        for change, param, begin in cases:
            status, answer, _ = await live.post(CHAT, asked() | change)
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert answer["error"]["message"].startswith(begin)
        quoted = bad({"type": "object"}, 'say "hi"')
        status, answer, _ = await live.post(CHAT, asked(tools=[quoted], tool_choice="required"))
        assert status == 200, answer
