"""The `openai` package, unchanged, against a live server."""

from __future__ import annotations

import json

import openai
import pytest

from .conftest import running_server

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def test_chat_answers_and_counts(client):
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=40
    )
    assert answer.object == "chat.completion"
    assert answer.model == "demo"
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 40
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "required", "parallel_tool_calls": False}])
def test_the_demo_model_calls_a_tool_and_tells_its_result(client, fields):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    about = {
        "name": "get_weather",
        "description": "Returns the weather in a city.",
        "parameters": schema,
    }
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = {"model": "demo", "temperature": 0, "tools": [{"type": "function", "function": about}]}
    choice = client.chat.completions.create(messages=messages, **asked, **fields).choices[0]
    with client.chat.completions.stream(messages=messages, **asked, **fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    for given in (choice, streamed):
        assert given.finish_reason == "tool_calls"
        (call,) = given.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "get_weather",
            {"city": "Oslo"},
        )
    messages += [
        choice.message.model_dump(exclude_none=True),
        {
            "role": "tool",
            "tool_call_id": choice.message.tool_calls[0].id,
            "content": "7 degrees and rain",
        },
    ]
    answer = client.chat.completions.create(messages=messages, **asked).choices[0]
    assert answer.finish_reason == "stop"
    assert all(word in answer.message.content for word in ("7", "rain", "Oslo"))


def test_chat_streams_the_same_text(client):
    asked = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**asked).choices[0]
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.message.content
    reasons = [
        c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason
    ]
    assert reasons == [whole.finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0


def test_completions_with_several_prompts_and_n(client):
    answer = client.completions.create(
        model="demo",
        prompt=["Once upon a time", "A small boat"],
        n=2,
        max_tokens=8,
        temperature=0.9,
        seed=5,
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    again = client.completions.create(
        model="demo",
        prompt=["Once upon a time", "A small boat"],
        n=2,
        max_tokens=8,
        temperature=0.9,
        seed=5,
    )
    assert [c.text for c in answer.choices] == [c.text for c in again.choices]


def test_completion_logprobs_and_echo(client):
    answer = client.completions.create(
        model="demo", prompt="Once upon a time", echo=True, logprobs=2, max_tokens=1, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith("Once upon a time")
    lp = choice.logprobs
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset)
    assert lp.token_logprobs[0] is None
    assert all(value <= 0 for value in lp.token_logprobs[1:])
    assert "".join(lp.tokens) == choice.text


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    rows = answer.choices[0].logprobs.content
    assert len(rows) == answer.usage.completion_tokens
    for row in rows:
        assert len(row.top_logprobs) == 3
        assert row.logprob == row.top_logprobs[0].logprob  # greedy takes the best


def test_stop_string_is_cut_exactly(client):
    asked = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    full = client.chat.completions.create(**asked).choices[0].message.content
    word = full.split()[5]
    cut = client.chat.completions.create(**asked, stop=[word]).choices[0]
    assert cut.message.content == full[: full.index(word)]
    assert cut.finish_reason == "stop"


def test_models(client):
    assert [m.id for m in client.models.list().data] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (openai.NotFoundError, {"model": "no-such-model"}),
        (openai.BadRequestError, {"temperature": 3.0}),
        (openai.BadRequestError, {"max_tokens": 0}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"n": 1000}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "word " * 5000}]}),
    ],
)
def test_errors_become_the_packages_classes(client, error, asked):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**({"model": "demo", "messages": MESSAGES} | asked))
    assert caught.value.request_id
    assert caught.value.body["message"]
    assert caught.value.body["type"]


async def test_async_client_of_the_package_streams(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=10, temperature=0, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason


def test_the_package_retries_when_we_are_full(tmp_path):
    """A server with room for one: the second request gets 503 and Retry-After, and succeeds once
    the first is done.
    """
    (tmp_path / "config.yaml").write_text("server: {max_queued_requests: 0}")
    flags = ["--max-num-seqs", "1", "--config", str(tmp_path / "config.yaml")]
    with running_server(tmp_path / "log", *flags) as server:
        url = server.url + "/v1"
        with (
            openai.OpenAI(base_url=url, api_key="none", max_retries=0) as impatient,
            openai.OpenAI(base_url=url, api_key="none", max_retries=100) as patient,
        ):
            asked = {"model": "demo", "prompt": "Once upon a time", "temperature": 0}
            stream = impatient.completions.create(
                **asked, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(stream))
            with pytest.raises(openai.InternalServerError) as caught:
                impatient.completions.create(**asked, max_tokens=1)
            assert caught.value.status_code == 503
            assert float(caught.value.response.headers["retry-after"]) > 0
            assert patient.completions.create(**asked, max_tokens=1).choices[0].text
            stream.close()
