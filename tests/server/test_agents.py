"""Requests as coding agents and other public clients send them, cut down to what once failed."""

from __future__ import annotations

import json
import re

import pytest

from moeserve.server.dialects.messages_request import BILLING_LINE
from tests.server.test_tools import ARGUMENTS, CALLS, TEMPLATE, TOOLS, answering

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hi"}
# The shortest body of each route
BODIES = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"model": "org/tiny", "input": "hi"},
    MESSAGES: {"model": "org/tiny", "max_tokens": 5, "messages": [USER]},
    COMPLETIONS: {"prompt": "hi"},
}

# Templates of gpt-oss, Qwen3 and others search the content of every assistant's message for marks,
# which fails where it is null; GLM's and MiniMax's write the word None.
SEARCHES_CONTENT = TEMPLATE.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if '</think>' in m.content %}{% endif %}",
).replace("{{ m.content if m.content is not none else '-' }}", "{{ m.content }}")


def assistant(**fields) -> dict:
    return {"role": "assistant"} | fields


def calling(arguments) -> dict:
    function = {"name": "weather", "arguments": arguments}
    return assistant(
        content=None, tool_calls=[{"id": "c1", "type": "function", "function": function}]
    )


# The second step of a tool loop: a call without text, and its result.
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CHAT_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sun"}
SECOND_STEPS = {
    "null content": (
        CHAT,
        {"messages": [USER, assistant(content=None, tool_calls=[CHAT_CALL]), CHAT_RESULT]},
    ),
    "no content": (CHAT, {"messages": [USER, assistant(tool_calls=[CHAT_CALL]), CHAT_RESULT]}),
    "responses": (
        RESPONSES,
        {
            "input": [
                USER,
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "sun"},
            ]
        },
    ),
    "messages": (
        MESSAGES,
        {
            "max_tokens": 5,
            "messages": [
                USER,
                assistant(
                    content=[{"type": "tool_use", "id": "c1", "name": "weather", "input": {}}]
                ),
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sun"}],
                },
            ],
        },
    ),
}


@pytest.mark.parametrize(("path", "body"), SECOND_STEPS.values(), ids=SECOND_STEPS)
async def test_calls_without_text_are_rendered_with_empty_content(path, body):
    async with answering(CALLS, SEARCHES_CONTENT) as live:
        status, answer, _ = await live.post(path, {"model": "org/tiny"} | body)
        assert status == 200, answer
        _, _, turn = live.engine.prompt.partition("<|im_start|>assistant\n")
        assert turn.startswith(
            '<tool_call>{"name": "weather", "arguments": {}}</tool_call><|im_end|>'
        )
        assert "None" not in live.engine.prompt


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"stop": "A fox"}, {"max_tokens": 9}, {}])
@pytest.mark.parametrize("answer", [CALLS, "<|im_end|>", "<think>\n\n</think>\n\n<|im_end|>"])
async def test_every_answer_is_taken_back(answer, fields):
    async with answering(answer) as live:
        body = {"messages": [USER], "tools": TOOLS} | fields
        _, given, _ = await live.post(CHAT, body)
        message = given["choices"][0]["message"]
        assert (message["content"] is None) == (
            message.get("tool_calls") is not None and not message["content"]
        )
        again = body | {"messages": [USER, message, USER]}
        status, answered, response = await live.post(CHAT, again)
        assert (status, response.headers.get("Warning")) == (200, None), answered

        body = {"model": "org/tiny", "input": [USER], "max_output_tokens": fields.get("max_tokens")}
        _, given, _ = await live.post(RESPONSES, body)
        status, answered, _ = await live.post(
            RESPONSES, body | {"input": [USER, *given["output"], USER]}
        )
        assert status == 200, answered

        body = {"model": "org/tiny", "messages": [USER], "max_tokens": fields.get("max_tokens", 99)}
        _, given, _ = await live.post(MESSAGES, body)
        turns = [USER, {"role": "assistant", "content": given["content"]}, USER]
        status, answered, _ = await live.post(MESSAGES, body | {"messages": turns})
        assert status == 200, answered


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (assistant(content=None, refusal=None, annotations=[]), ""),
        (assistant(), ""),
        (assistant(content=None, refusal="I will not"), "I will not"),
        (assistant(content=[{"type": "refusal", "refusal": "No."}]), "No."),
        ({"role": "tool", "content": None, "tool_call_id": "c"}, ""),
    ],
)
async def test_messages_without_text(message, text):
    async with answering(CALLS) as live:
        _, shown, _ = await live.post(f"{CHAT}/render", {"messages": [USER, message, USER]})
        assert f"{message['role']}\n{text}<|im_end|>" in shown["prompt"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("null", "{}"),
        (" ", "{}"),
        ("", "{}"),
        (None, "{}"),
        ('{"city": "Os', '{"raw": "{\\"city\\": \\"Os"}'),
        ("[1]", '{"raw": "[1]"}'),
        ('{"a": 1e400}', '{"raw": "{\\"a\\": 1e400}"}'),
        ('{"city": "Oslo"}', '{"city": "Oslo"}'),
        ({"city": "Oslo"}, '{"city": "Oslo"}'),
    ],
)
async def test_old_arguments_never_end_a_conversation(arguments, shown):
    async with answering(CALLS) as live:
        body = {"messages": [USER, calling(arguments), CHAT_RESULT]}
        status, answer, _ = await live.post(f"{CHAT}/render", body)
        assert status == 200, answer
        text = re.search(r'"arguments": (.*)}</tool_call>', answer["prompt"])[1]
        assert json.loads(text) == json.loads(shown)


async def test_the_type_of_an_old_call_may_be_null():
    async with answering(CALLS) as live:
        calls = [CHAT_CALL | {"type": None}]
        body = {"messages": [USER, assistant(tool_calls=calls), CHAT_RESULT]}
        assert (await live.post(CHAT, body))[0] == 200


# --- Claude Code

CLAUDE = {
    "model": "org/tiny",
    "max_tokens": 20,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}],
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
}
KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
CLEARS = {"edits": [{"type": "clear_tool_uses_20250919"}]}


@pytest.mark.parametrize("management", [KEEPS_ALL, CLEARS, {"edits": []}])
async def test_context_management_is_accepted_and_changes_nothing(live, management):
    body = CLAUDE | {"context_management": management}
    path = f"{MESSAGES}?beta=true"
    _, plain, _ = await live.post(path, CLAUDE)
    status, whole, response = await live.post(path, body)
    warns = 'no effect here: context_management"' in response.headers.get("Warning", "")
    assert (status, warns) == (200, management["edits"] != [])
    assert "context_management" not in plain
    assert whole.pop("context_management") == {"applied_edits": []}
    assert whole["content"] == plain["content"]
    assert whole["usage"] == plain["usage"]
    events = {event["type"]: event for event in await live.typed_events(path, body)}
    assert events["message_delta"]["context_management"] == {"applied_edits": []}
    assert "context_management" not in events["message_start"]["message"]
    path = f"{MESSAGES}/count_tokens?beta=true"
    status, counted, response = await live.post(path, body)
    num = plain["usage"]["input_tokens"] + plain["usage"]["cache_read_input_tokens"]
    assert status == 200
    assert counted == {"input_tokens": num, "context_management": {"original_input_tokens": num}}


async def test_a_line_about_billing_is_no_part_of_the_prompt(live):
    await live.post(MESSAGES, CLAUDE)
    expected = live.engine.prompt
    line = f"{BILLING_LINE} cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli;"
    for system in (
        [{"type": "text", "text": line}, *CLAUDE["system"]],
        f"{line}\nYou are an agent.",
    ):
        await live.post(MESSAGES, CLAUDE | {"system": system})
        assert live.engine.prompt == expected
    await live.post(MESSAGES, CLAUDE | {"system": [{"type": "text", "text": line}]})
    assert "system" not in live.engine.prompt
    later = [*CLAUDE["system"], {"type": "text", "text": line}]
    await live.post(MESSAGES, CLAUDE | {"system": later})
    assert line in live.engine.prompt


async def test_system_messages_before_the_first_answer_come_first(live):
    """Claude Code sends one behind the user's first message. So conversations share a prefix."""
    late = {"role": "system", "content": "The machine runs Linux."}
    answer = {"role": "assistant", "content": "Hello."}
    prompts = []
    for text in ("Say hello.", "Sort a list."):
        turns = [{"role": "user", "content": text}, late, {"role": "user", "content": "Now."}]
        await live.post(MESSAGES, CLAUDE | {"messages": turns})
        prompts.append(live.engine.prompt)
        start, _, rest = prompts[-1].partition(text)
        assert "You are an agent." in start
        assert "The machine runs Linux." in start
        assert "Now." in rest
        # The next turn continues the prompt. Later messages stay where they are.
        more = [*turns, answer, {"role": "user", "content": "More."}, late]
        await live.post(MESSAGES, CLAUDE | {"messages": more})
        assert live.engine.prompt.startswith(prompts[-1])
        assert live.engine.prompt.rindex("Linux") > live.engine.prompt.index("More.")
    assert prompts[0].partition("Say hello.")[0] == prompts[1].partition("Sort a list.")[0]


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_trigger_compaction(live):
    for text in ("a b c d " * 100, "word " * 2560):
        messages = [{"role": "user", "content": text}]
        status, answer, _ = await live.post(MESSAGES, CLAUDE | {"messages": messages})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        found = re.search(
            r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", answer["error"]["message"]
        )
        assert int(found[1]) > int(found[2]) == live.engine.context - 1


async def test_other_routes_keep_their_words_and_name_their_fields(live):
    text = "a b c d " * 100
    for path, body, param in (
        (CHAT, {"messages": [{"role": "user", "content": text}]}, "messages"),
        (RESPONSES, {"model": "org/tiny", "input": text}, "input"),
        ("/v1/completions", {"prompt": text}, "prompt"),
    ):
        status, answer, _ = await live.post(path, body)
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert error["message"].startswith("this model's maximum context length is 256 tokens")


@pytest.mark.parametrize(
    ("path", "tool", "schema"),
    [
        (CHAT, lambda f: {"type": "function", "function": f}, "function.parameters"),
        (RESPONSES, lambda f: {"type": "function"} | f, "parameters"),
        (
            MESSAGES,
            lambda f: {"name": f["name"], "input_schema": f["parameters"], "strict": True},
            "input_schema",
        ),
    ],
)
async def test_errors_about_tools_name_the_dialects_fields(path, tool, schema):
    body = {"model": "org/tiny", "max_tokens": 5, "messages": [USER]}
    if path == RESPONSES:
        body = {"model": "org/tiny", "input": [USER]}
    good = {"name": "good", "parameters": {"type": "object"}, "strict": True}
    bad = {"name": "bad", "parameters": {"type": "object", "properties": {"a": {"type": "odd"}}}}
    async with answering(CALLS) as live:
        tools = [tool(good), tool(bad | {"strict": True})]
        status, answer, _ = await live.post(path, body | {"tools": tools})
        assert status == 400
        assert answer["error"]["message"].startswith(f"tools[1].{schema}"), answer
        assert path == MESSAGES or answer["error"]["param"] == f"tools[1].{schema}"


async def test_errors_of_a_template_name_the_list():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    body = {"model": "org/tiny"}
    async with answering(CALLS, "{{ raise_exception('no') }}") as live:
        items = [{"type": "reasoning", "summary": []}, USER, call]
        _, answer, _ = await live.post(RESPONSES, body | {"input": items})
        assert answer["error"]["param"] == "input"
        turns = [USER, {"role": "assistant", "content": [use]}, USER]
        _, answer, _ = await live.post(MESSAGES, body | {"max_tokens": 5, "messages": turns})
        assert answer["error"]["message"].endswith("rejects these messages: no")


async def test_errors_about_parameters_keep_their_names(live):
    body = {"model": "org/tiny", "input": "hi", "stop": ""}
    for path, fields in ((CHAT, {"messages": [USER], "prompt_logprobs": 21}), (RESPONSES, body)):
        _, answer, _ = await live.post(path, fields)
        assert answer["error"]["param"] in fields


async def test_thinking_that_only_its_maker_reads_is_left_out(live):
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Hello"}]
    turns = [USER, {"role": "assistant", "content": blocks}, USER]
    status, _, response = await live.post(MESSAGES, CLAUDE | {"messages": turns})
    assert status == 200
    assert "messages[1].content[0]" in response.headers["Warning"]
    assert "assistant\nHello<|im_end|>" in live.engine.prompt


async def test_a_tools_input_is_the_same_whole_and_streamed():
    """Numbers that many readers of JSON do not take, too."""
    calls = CALLS.replace('"Köln 😀"', '[1e300, 123456789012345678901234567890, "\\u00fc"]')
    async with answering(calls) as live:
        tools = [{"name": "weather", "input_schema": {"type": "object"}}]
        body = CLAUDE | {"tools": tools, "max_tokens": 500}
        async with live.session.post(live.url + MESSAGES, json=body) as response:
            raw = await response.text()
        deltas = [event.get("delta", {}) for event in await live.typed_events(MESSAGES, body)]
        streamed = "".join(delta.get("partial_json", "") for delta in deltas)
        assert streamed.startswith('{"city": [1e300, 123456789012345678901234567890, "\\u00fc"]}')
        assert f'"input":{streamed[: streamed.index("}") + 1]}' in raw


# --- Codex, and others of /v1/responses


async def test_reasoning_that_nobody_can_read_is_left_out(live):
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    body = {"model": "org/tiny", "input": [USER, item, USER], "max_output_tokens": 5}
    status, answer, response = await live.post(RESPONSES, body)
    assert status == 200, answer
    assert "input[1].encrypted_content" in response.headers["Warning"]
    assert "assistant\n<|im_end|>" not in live.engine.prompt
    own = {"type": "reasoning", "summary": [], "content": [], "encrypted_content": None}
    status, _, response = await live.post(RESPONSES, body | {"input": [USER, own, USER]})
    assert (status, "Warning" in response.headers) == (200, False)
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    await live.post(RESPONSES, body | {"input": [USER, refusal, USER]})
    assert "assistant\nNo.<|im_end|>" in live.engine.prompt


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (RESPONSES, {"max_tool_calls": 3}, "max_tool_calls"),
        (RESPONSES, {"prompt_cache_key": "k"}, "prompt_cache_key"),
        (RESPONSES, {"safety_identifier": "s"}, "safety_identifier"),
        (RESPONSES, {"service_tier": "flex"}, "service_tier"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (CHAT, {"store": True}, "store"),
        (CHAT, {"prompt_cache_key": "k"}, "prompt_cache_key"),
        (CHAT, {"safety_identifier": "s"}, "safety_identifier"),
        (CHAT, {"service_tier": "priority"}, "service_tier"),
        (CHAT, {"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        (MESSAGES, {"cache_control": {"type": "ephemeral"}}, "cache_control"),
        (MESSAGES, {"service_tier": "priority"}, "service_tier"),
        (COMPLETIONS, {"store": True}, "store"),
        (COMPLETIONS, {"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ],
)
async def test_fields_without_effect_are_named_in_the_warning_header(launch, path, fields, name):
    async with launch(strict=True) as live:  # which refuses unknown fields only
        status, _, response = await live.post(path, BODIES[path] | fields)
        assert (status, response.headers["Warning"]) == (
            200,
            f'299 moeserve "no effect here: {name}"',
        )


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"service_tier": "auto", "spaces_between_special_tokens": True}),
        (CHAT, {"service_tier": "default", "prompt_cache_key": None}),
        (RESPONSES, {"service_tier": "auto", "max_tool_calls": None}),
        (MESSAGES, CLAUDE | {"service_tier": "standard_only"}),  # with a nested cache_control
    ],
)
async def test_default_values_of_fields_without_effect_are_not_named(live, path, fields):
    status, _, response = await live.post(path, BODIES[path] | fields)
    assert (status, response.headers.get("Warning")) == (200, None)


async def test_a_warning_header_tells_both_kinds_of_ignored_fields(live):
    body = {"messages": [USER], "store": True, "colour": 1}
    _, _, response = await live.post(CHAT, body)
    assert response.headers["Warning"] == (
        '299 moeserve "unknown fields ignored: colour", 299 moeserve "no effect here: store"'
    )


async def test_a_json_object_with_a_schema_is_a_json_schema(live):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    formats = (
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    grammars = []
    for response_format in formats:
        status, answer, _ = await live.post(
            CHAT, {"messages": [USER], "response_format": response_format}
        )
        assert status == 200, answer
        grammars.append(live.engine.submitted.sampling.grammar)
    assert grammars[0] == grammars[1] is not None
    bad = {"type": "json_object", "schema": {"type": "nothing"}}
    _, answer, _ = await live.post(CHAT, {"messages": [USER], "response_format": bad})
    assert answer["error"]["param"] == "response_format.schema"
    text = {"type": "text", "schema": schema}
    _, answer, _ = await live.post(CHAT, {"messages": [USER], "response_format": text})
    assert answer["error"]["param"] == "response_format.schema"


async def test_details_of_usage_are_never_empty(live):
    _, answer, _ = await live.post(CHAT, {"messages": [USER]})
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_arguments_are_rendered_as_they_were_answered():
    async with answering(CALLS) as live:
        body = {"messages": [USER], "tools": TOOLS}
        _, given, _ = await live.post(CHAT, body)
        message = given["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
        _, shown, _ = await live.post(f"{CHAT}/render", body | {"messages": [USER, message]})
        assert '"arguments": {"city": "K' in shown["prompt"]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
async def test_a_limit_of_minus_one_is_none(live, route):
    status, body, _ = await live.post(route, BODIES[route] | {"max_tokens": -1})
    assert status == 200, body
    assert live.engine.submitted.sampling.max_tokens > 200  # the context has 256 tokens
    status, body, _ = await live.post(route, BODIES[route] | {"max_tokens": -2})
    assert (status, body["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"enable_thinking": False}, False),
        ({"thinking": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "auto"}}, True),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
async def test_the_switch_of_thinking_has_several_names(fields, thinks):
    async with answering("ok<|im_end|>") as live:
        status, body, response = await live.post(CHAT, BODIES[CHAT] | fields)
        assert status == 200, body
        assert "Warning" not in response.headers
        assert ("</think>" not in live.engine.prompt) == thinks


async def test_llama_cpps_name_of_the_repetition_penalty(live):
    await live.post(CHAT, BODIES[CHAT] | {"repeat_penalty": 1.5})
    assert live.engine.submitted.sampling.repetition_penalty == 1.5
    await live.post(CHAT, BODIES[CHAT] | {"repeat_penalty": 1.5, "repetition_penalty": 1.25})
    assert live.engine.submitted.sampling.repetition_penalty == 1.25


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/messages/", "/v1/messages"),
        ("/v1/livez", "/livez"),
    ],
)
async def test_a_wrong_base_url_is_answered_with_the_right_path(live, path, meant):
    status, body, _ = await live.post(path, BODIES[CHAT])
    assert status == 404
    assert f"did you mean {meant}?" in body["error"]["message"]


async def test_models_have_the_context_length_under_every_name(live):
    _, models = await live.get("/v1/models")
    (card,) = models["data"]
    length = card["max_model_len"]
    assert length > 0
    assert (card["context_length"], card["max_input_tokens"]) == (length, length)
    assert card["meta"] == {"n_ctx_train": length, "n_ctx": length}


async def test_codex_sends_metadata_that_is_known(live):
    body = BODIES[RESPONSES] | {"client_metadata": {"session_id": "x"}}
    status, _, response = await live.post(RESPONSES, body)
    assert status == 200
    assert "Warning" not in response.headers


PICTURES = {
    CHAT: {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    MESSAGES: {"type": "image", "source": {"type": "base64"}},
    RESPONSES: {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
}
TEXT = {"type": "text", "text": "sun"}
PICTURE_RESULTS = {
    CHAT: (
        [
            assistant(content=None, tool_calls=[CHAT_CALL]),
            {"role": "tool", "tool_call_id": "c1", "content": [TEXT, PICTURES[CHAT]]},
        ],
        "messages[2].content[1]",
    ),
    MESSAGES: (
        [
            assistant(content=[{"type": "tool_use", "id": "c1", "name": "weather", "input": {}}]),
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [TEXT, PICTURES[MESSAGES]],
                    }
                ],
            },
        ],
        "messages[2].content[0].content[1]",
    ),
    RESPONSES: (
        [
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [
                    {"type": "input_text", "text": "sun"},
                    PICTURES[RESPONSES],
                ],
            },
        ],
        "input[2].output[1]",
    ),
}


@pytest.mark.parametrize("route", PICTURE_RESULTS)
async def test_a_picture_in_a_tools_result_does_not_end_the_session(route):
    turns, place = PICTURE_RESULTS[route]
    field = "input" if route == RESPONSES else "messages"
    async with answering("ok<|im_end|>") as live:
        body = BODIES[route] | {field: [USER, *turns]}
        status, answer, response = await live.post(route, body)
        assert status == 200, answer
        assert "sun\n[image: not shown" in live.engine.prompt
        assert place in response.headers["Warning"]
        # One that the user sends is refused, because the answer would be about it.
        turn = {"role": "user", "content": [PICTURES[route]]}
        status, _, _ = await live.post(route, BODIES[route] | {field: [turn]})
        assert status == 400


async def test_a_tools_picture_may_be_the_users_next_message():
    """Cline and Kimi Code send it so, because a chat's tool messages have text only."""
    call = assistant(content=None, tool_calls=[CHAT_CALL])
    picture = {"role": "user", "content": [TEXT | {"text": "Attached:"}, PICTURES[CHAT]]}
    async with answering("ok<|im_end|>") as live:
        turns = [USER, call, CHAT_RESULT, picture]
        for messages in (turns, [*turns, assistant(content="ok"), USER]):
            status, answer, response = await live.post(CHAT, {"messages": messages})
            assert status == 200, answer
            assert "user\nAttached:\n[image: not shown" in live.engine.prompt
            assert "messages[3].content[1]" in response.headers["Warning"]
        for messages in ([picture], [USER, picture], [*turns, assistant(content="ok"), picture]):
            status, answer, _ = await live.post(CHAT, {"messages": messages})
            place = f"messages[{len(messages) - 1}].content[1].type"
            assert (status, answer["error"]["param"]) == (400, place)
        audio = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
        status, _, _ = await live.post(CHAT, {"messages": [USER, call, CHAT_RESULT, audio]})
        assert status == 400


async def test_an_answer_has_calls_only_if_the_request_has_tools():
    async with answering(CALLS) as live:
        for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            body = {"messages": [USER]} | fields
            _, whole, _ = await live.post(CHAT, body)
            events = await live.events(CHAT, body)
            streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            choice = whole["choices"][0]
            assert "tool_calls" not in choice["message"]
            assert choice["message"]["content"] == streamed
            assert streamed.startswith("I look.\n<tool_call>")
            assert choice["message"]["reasoning"] == "A fox 😀?"
            assert choice["finish_reason"] == "stop"
        _, whole, _ = await live.post(RESPONSES, BODIES[RESPONSES])
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
        _, whole, _ = await live.post(MESSAGES, BODIES[MESSAGES] | {"max_tokens": 200})
        assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
        assert whole["stop_reason"] == "end_turn"
