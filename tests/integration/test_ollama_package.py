"""The `ollama` package, unchanged, against a live server."""

from __future__ import annotations

import json

import ollama
import pytest

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]
GREEDY = {"temperature": 0, "num_predict": 40}


@pytest.fixture
def client(server):
    with ollama.Client(host=server.url) as it:
        yield it


def test_chat_answers_counts_and_streams_the_same_text(client):
    whole = client.chat("demo", MESSAGES, options=GREEDY)
    assert whole.message.content
    assert (whole.done_reason, whole.eval_count) == ("length", 40)
    chunks = list(client.chat("demo", MESSAGES, options=GREEDY, stream=True))
    assert "".join(chunk.message.content for chunk in chunks) == whole.message.content
    assert chunks[-1].prompt_eval_count == whole.prompt_eval_count
    assert chunks[-1].eval_duration > 1
    generated = client.generate("demo", MESSAGES[0]["content"], options=GREEDY)
    assert generated.response == whole.message.content


def test_the_demo_model_calls_a_tool_and_tells_its_result(client):
    def get_weather(city: str) -> str:
        """Returns the weather in a city.

        Args:
            city: The city.
        """
        return f"7 degrees and rain in {city}"

    history = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked = {"model": "demo", "tools": [get_weather], "options": {"temperature": 0}}
    answer = client.chat(messages=history, **asked)
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    streamed = [
        chunk.message.tool_calls for chunk in client.chat(messages=history, stream=True, **asked)
    ]
    assert [calls for calls in streamed if calls] == [answer.message.tool_calls]
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather("Oslo")}
    told = client.chat(messages=[*history, answer.message, result], **asked)
    assert not told.message.tool_calls
    assert all(word in told.message.content for word in ("7", "rain", "Oslo"))


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_has_the_schema_of_its_format(client, streamed):
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "size": {"type": "integer"}},
        "required": ["colour", "size"],
        "additionalProperties": False,
    }
    answers = client.chat(
        "demo", MESSAGES, format=schema, options={"temperature": 0}, stream=streamed
    )
    parts = answers if streamed else [answers]
    answer = json.loads("".join(part.message.content for part in parts))
    assert answer.keys() == {"colour", "size"}
    assert answer["colour"] in ("red", "green")
    assert isinstance(answer["size"], int)


def test_a_conversation_goes_on_by_its_context(client):
    first = client.generate("demo", "My name is Ada.", options=GREEDY)
    second = client.generate("demo", "Go on.", context=first.context, options=GREEDY)
    assert second.prompt_eval_count > len(first.context)
    assert list(second.context)[: len(first.context)] == list(first.context)


def test_the_model_is_described(client):
    (listed,) = client.list().models
    assert listed.model == "demo"
    shown = client.show("demo")
    assert shown.details.quantization_level == "BF16"
    assert shown.modelinfo["qwen3_moe.context_length"] == 1024
    assert "tools" in shown.capabilities
    (loaded,) = client.ps().models
    assert loaded.context_length == 1024
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.show("llama3.2")
