"""/v1/responses: what is asked becomes a chat, its answer becomes items and events; some responses
are kept.
"""

from __future__ import annotations

import json

import pytest

from moeserve.errors import InvalidRequest, NotFound
from moeserve.server.dialects.responses_request import chat_messages
from moeserve.server.response_store import ResponseStore, Stored
from tests.server.test_tools import ARGUMENTS, CALLS, answering

RESPONSES = "/v1/responses"
ASK = {"model": "org/tiny", "input": "Tell me a story", "temperature": 0}
TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {}}},
    },
    {"type": "function", "name": "clock"},
]


def without_ids(items: list) -> list:
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in items
    ]


async def test_a_whole_answer(live, story):
    status, body, _ = await live.post(
        RESPONSES, ASK | {"metadata": {"a": "b"}, "instructions": "Be kind"}
    )
    assert status == 200
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", "org/tiny")
    (message,) = body["output"]
    assert message["content"] == [
        {"type": "output_text", "text": story, "annotations": [], "logprobs": []}
    ]
    assert (message["type"], message["role"], message["status"]) == (
        "message",
        "assistant",
        "completed",
    )
    assert body["usage"]["output_tokens"] == len(live.engine.script)
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 2}
    assert (body["metadata"], body["instructions"]) == ({"a": "b"}, "Be kind")
    assert (body["temperature"], body["text"], body["tool_choice"]) == (
        0,
        {"format": {"type": "text"}},
        "auto",
    )
    assert body["store"] is True
    assert body["completed_at"] >= body["created_at"]


async def test_events_come_in_order_and_say_what_the_whole_says(live, story):
    _, whole, _ = await live.post(RESPONSES, ASK)
    events = await live.typed_events(RESPONSES, ASK)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    types = [event["type"].removeprefix("response.") for event in events]
    assert types[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(types[4:-4]) == {"output_text.delta"}
    assert types[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == events[2]["item"]["content"] == []
    assert "".join(event["delta"] for event in events[4:-4]) == events[-4]["text"] == story
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
    assert {event["item_id"] for event in events[3:-2]} == {events[2]["item"]["id"]}


async def test_reasoning_and_calls_are_items():
    async with answering(CALLS) as live:
        ask = ASK | {"tools": TOOLS}
        _, whole, _ = await live.post(RESPONSES, ask)
        assert [item["type"] for item in whole["output"]] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        reasoning, message, weather, clock = whole["output"]
        assert "A fox 😀?" in reasoning["content"][0]["text"]
        assert message["content"][0]["text"].strip() == "I look."
        assert (weather["name"], json.loads(weather["arguments"])) == (
            "weather",
            json.loads(ARGUMENTS),
        )
        assert (clock["name"], clock["arguments"], clock["status"]) == ("clock", "{}", "completed")
        events = await live.typed_events(RESPONSES, ask)
        assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
        for kind, index, text in (
            ("reasoning_text", 0, reasoning["content"][0]["text"]),
            ("function_call_arguments", 2, weather["arguments"]),
        ):
            mine = [
                e
                for e in events
                if e["type"] == f"response.{kind}.delta" and e["output_index"] == index
            ]
            assert "".join(event["delta"] for event in mine) == text
        added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
        assert [item["status"] for item in added] == ["in_progress"] * 4
        assert added[2]["arguments"] == ""


async def test_the_items_of_a_turn_are_one_message():
    call = {
        "type": "function_call",
        "call_id": "c1",
        "name": "weather",
        "arguments": "{}",
        "id": "fc",
        "status": "x",
    }
    items = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Hi"},
                {"type": "input_text", "text": "you"},
            ],
        },
        {
            "type": "reasoning",
            "id": "r",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait", "logprobs": []}],
        },
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "rain"}],
        },
        {"role": "assistant", "content": "Sun", "phase": "final_answer"},
        {"role": "assistant", "content": "and rain"},
    ]
    user, turn, first, second, third, fourth = chat_messages(items)
    assert (user.role, user.content) == ("user", "Hi\nyou")
    assert (turn.role, turn.reasoning_content, turn.content) == ("assistant", "hm", "Wait")
    assert [made["id"] for made in turn.tool_calls] == ["c1", "c2"]
    assert [(tool.role, tool.tool_call_id, tool.content) for tool in (first, second)] == [
        ("tool", "c1", "sun"),
        ("tool", "c2", "rain"),
    ]
    assert (third.content, fourth.content) == ("Sun", "and rain")


async def test_instructions_join_the_first_system_message(live):
    system = {"role": "developer", "content": "Be brief"}
    user = {"role": "user", "content": "Hi"}
    await live.post(
        RESPONSES,
        ASK | {"input": [system, user], "instructions": "Be kind", "max_output_tokens": 1},
    )
    assert live.engine.prompt.startswith(
        "<|im_start|>system\nBe kind\n\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>"
    )


async def test_a_limit_makes_it_incomplete(live):
    _, whole, _ = await live.post(RESPONSES, ASK | {"max_output_tokens": 3})
    *_, last = await live.typed_events(RESPONSES, ASK | {"max_output_tokens": 3})
    assert last["type"] == "response.incomplete"
    for response in (whole, last["response"]):
        assert (response["status"], response["completed_at"]) == ("incomplete", None)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"


async def test_an_answer_without_text_has_an_empty_message():
    async with answering("<|im_end|>") as live:
        _, whole, _ = await live.post(RESPONSES, ASK)
        assert whole["output"][0]["content"][0]["text"] == ""
        events = await live.typed_events(RESPONSES, ASK)
        assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])


async def test_logprobs_of_all_tokens(live, tokenizer):
    ask = ASK | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    _, whole, _ = await live.post(RESPONSES, ask)
    rows = whole["output"][0]["content"][0]["logprobs"]
    assert [row["token"] for row in rows] == [
        tokenizer.token_text(token) for token in live.engine.script
    ]
    assert {len(row["top_logprobs"]) for row in rows} == {2}
    events = await live.typed_events(RESPONSES, ask)
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == rows
    told = [
        row
        for event in events
        if event["type"] == "response.output_text.delta"
        for row in event["logprobs"]
    ]
    assert told == rows[: len(told)]


async def test_a_schema_becomes_a_grammar(live):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    await live.post(
        RESPONSES,
        ASK | {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
    )
    assert live.engine.submitted.sampling.grammar is not None
    bad = {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}
    status, body, _ = await live.post(RESPONSES, ASK | {"text": {"format": bad}})
    assert (status, body["error"]["param"]) == (400, "text.format.schema")


async def test_without_a_store_errors_name_the_remedy(launch):
    async with launch(max_stored_responses=0) as live:
        _, body, _ = await live.post(RESPONSES, ASK | {"store": True})
        status, error = await live.get(f"{RESPONSES}/{body['id']}")
        assert (status, error["error"]["code"]) == (404, "response_not_found")
        assert "max_stored_responses" in error["error"]["message"]
        status, error, _ = await live.post(RESPONSES, ASK | {"previous_response_id": body["id"]})
        assert (status, error["error"]["code"]) == (400, "previous_response_not_found")
        assert "max_stored_responses" in error["error"]["message"]
        reference = {"type": "item_reference", "id": body["output"][0]["id"]}
        status, error, _ = await live.post(RESPONSES, ASK | {"input": [reference]})
        assert (status, error["error"]["code"]) == (400, "item_not_found")
        assert "store: false" in error["error"]["message"]


async def test_references_to_items_are_resolved(live, story):
    _, first, _ = await live.post(RESPONSES, ASK)
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    turns = [{"role": "user", "content": "One"}, reference, {"role": "user", "content": "Two"}]
    _, second, _ = await live.post(RESPONSES, ASK | {"input": turns})
    assert f"assistant\n{story}" in live.engine.prompt
    _, page = await live.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")
    assert page["data"][1]["content"][0]["text"] == story
    for wrong in ("msg_1", f"{reference['id']}9", "x" * 9999):
        turns[1] = {"type": "item_reference", "id": wrong}
        status, error, _ = await live.post(RESPONSES, ASK | {"input": turns})
        assert (status, error["error"]["param"]) == (400, "input[1]")


async def test_stored_responses_go_on(launch, story):
    async with launch(max_stored_responses=9) as live:
        _, first, _ = await live.post(RESPONSES, ASK)
        events = await live.typed_events(
            RESPONSES, {"model": "org/tiny", "input": "More", "previous_response_id": first["id"]}
        )
        second = events[-1]["response"]
        turns = ["", f"user\n{ASK['input']}", f"assistant\n{story}", "user\nMore", "assistant\n"]
        assert live.engine.prompt.replace("<|im_end|>\n", "") == "<|im_start|>".join(turns)
        assert (await live.get(f"{RESPONSES}/{second['id']}"))[1] == second
        items = f"{RESPONSES}/{second['id']}/input_items"
        _, page = await live.get(f"{items}?limit=2")
        assert [item["role"] for item in page["data"]] == ["user", "assistant"]
        assert page["has_more"]
        _, rest = await live.get(f"{items}?limit=2&after={page['last_id']}")
        assert rest["data"][0]["content"] == [{"type": "input_text", "text": ASK["input"]}]
        assert not rest["has_more"]
        async with live.session.delete(f"{live.url}{RESPONSES}/{first['id']}") as response:
            assert (await response.json())["deleted"]
        assert (await live.get(f"{RESPONSES}/{first['id']}"))[0] == 404
        assert (await live.get(items))[0] == 200  # a response holds all that it answers
        _, kept_out, _ = await live.post(RESPONSES, ASK | {"store": False})
        assert (await live.get(f"{RESPONSES}/{kept_out['id']}"))[0] == 404


async def test_keys_do_not_see_each_others_responses(launch):
    async with launch(max_stored_responses=9, api_key=("one", "two")) as live:
        _, body, _ = await live.post(RESPONSES, ASK, X_Api_Key="one")
        path = f"{RESPONSES}/{body['id']}"
        assert (await live.get(path, **{"X-Api-Key": "one"}))[0] == 200
        for asked in (path, f"{path}/input_items"):
            assert (await live.get(asked, **{"X-Api-Key": "two"}))[0] == 404
        for verb, asked in (("DELETE", path), ("POST", f"{path}/cancel")):
            async with live.session.request(
                verb, live.url + asked, headers={"X-Api-Key": "two"}
            ) as response:
                assert response.status == 404
        status, error, _ = await live.post(
            RESPONSES, ASK | {"previous_response_id": body["id"]}, X_Api_Key="two"
        )
        assert (status, error["error"]["param"]) == (400, "previous_response_id")


def test_a_full_store_forgets_what_was_used_least_recently():
    store = ResponseStore(max_count=2, max_bytes=100)
    for name in ("a", "b"):
        store.put("", name, Stored(b"1" * 10, b"2" * 10))
    store.get("", "a")
    store.put("", "c", Stored(b"1" * 10, b"2" * 10))
    with pytest.raises(NotFound):
        store.get("", "b")
    store.put("", "d", Stored(b"1" * 90, b""))
    with pytest.raises(NotFound):
        store.get("", "c")
    store.put("", "e", Stored(b"1" * 101, b""))  # larger than all the store
    assert store.get("", "d").num_bytes == store.num_bytes == 90
    store.delete("", "d")
    assert store.num_bytes == 0


async def test_a_running_response_can_be_cancelled(launch):
    async with launch(max_stored_responses=9) as live:
        async with live.session.post(
            live.url + RESPONSES, json=ASK | {"stream": True, "bad_words": ["x"]}
        ) as response:
            head = (await response.content.readuntil(b"\n\n")).decode()
            name = json.loads(head.split("data: ")[1])["response"]["id"]
            status, body, _ = await live.post(f"{RESPONSES}/{name}/cancel", {})
            assert (status, body["id"], body["status"]) == (200, name, "cancelled")
            end = (await response.read()).decode().split("\n\n")[-2]
        assert json.loads(end.split("data: ")[1])["response"]["status"] == "cancelled"
        assert (await live.get(f"{RESPONSES}/{name}"))[1]["status"] == "cancelled"
        status, error, _ = await live.post(f"{RESPONSES}/{name}/cancel", {})
        assert (status, error["error"]["code"]) == (409, "conflict")
        assert (await live.post(f"{RESPONSES}/resp_none/cancel", {}))[0] == 404
        assert not live.engine.rows


async def test_a_failure_before_and_after_the_first_token(live):
    live.engine.break_after = 0
    status, body, _ = await live.post(RESPONSES, ASK | {"stream": True})
    assert (status, body["error"]["code"]) == (500, "internal_error")
    live.engine.break_after = 3
    *_, last = await live.typed_events(RESPONSES, ASK)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert "secret" not in str(last)


async def test_input_tokens_are_those_that_are_billed(live):
    _, counted, _ = await live.post(f"{RESPONSES}/input_tokens", ASK)
    _, body, _ = await live.post(RESPONSES, ASK)
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": body["usage"]["input_tokens"],
    }


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
REFUSED = [
    ({"model": None}, "model"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [IMAGE]}, "input[0].content[0].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"truncation": "sometimes"}, "truncation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"n": 2}, "n"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"temperature": 3}, "temperature"),
]


@pytest.mark.parametrize(
    ("fields", "param"), REFUSED, ids=[str(fields)[:40] for fields, _ in REFUSED]
)
async def test_what_is_refused_is_named(live, fields, param):
    body = {name: value for name, value in (ASK | fields).items() if value is not None}
    status, answer, _ = await live.post(RESPONSES, body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert answer["error"]["message"].startswith(param.split("[")[0].split(".")[0])


async def test_harmless_values_are_taken(live):
    harmless = {
        "background": False,
        "truncation": "disabled",
        "n": 1,
        "service_tier": "auto",
        "conversation": None,
    }
    status, _, response = await live.post(RESPONSES, ASK | harmless | {"user": "me"})
    assert (status, "Warning" in response.headers) == (200, False)
    with pytest.raises(
        InvalidRequest, match=r"input\[0\].type must be message or function_call or"
    ):
        chat_messages([{"type": "compaction"}])
