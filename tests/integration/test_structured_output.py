"""Answers that match: the `openai` package's parse with pydantic models, every kind of constraint,
and Python's LLM.
"""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from moeserve import LLM, SamplingParams, StructuredOutputsParams
from moeserve.errors import InvalidRequest, RequestFailed
from tests.text.schemas import generated

MESSAGES = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]
SHORT = Annotated[str, Field(max_length=8)]


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["fox", "owl", "hare"]
    name: SHORT
    age: Annotated[int, Field(ge=0, le=99)]


class Story(BaseModel):
    title: SHORT
    animals: Annotated[list[Animal], Field(min_length=1, max_length=2)]
    ending: Literal["happy", "sad"] | None


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as it:
        yield it


def asked(**extra):
    compact = {
        "structured_outputs": {"disable_any_whitespace": True}
    }  # a small model likes whitespace
    return {"model": "demo", "messages": MESSAGES, "max_tokens": 300, "extra_body": compact} | extra


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parse(client, temperature):
    answer = client.chat.completions.parse(
        **asked(temperature=temperature, seed=1, n=2), response_format=Story
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Story)
        assert Story.model_validate_json(choice.message.content) == choice.message.parsed


def test_stream(client):
    whole = (
        client.chat.completions.parse(**asked(temperature=0), response_format=Story)
        .choices[0]
        .message
    )
    with client.chat.completions.stream(**asked(temperature=0), response_format=Story) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == whole.parsed
    assert (
        "".join(event.delta for event in events if event.type == "content.delta") == whole.content
    )
    assert any(event.type == "content.done" and event.parsed == whole.parsed for event in events)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-f]{2,4}[0-9]"}, r"[a-f]{2,4}[0-9]"),
        ({"guided_choice": ["a fox", "an owl", "漢字"]}, "a fox|an owl|漢字"),
        ({"guided_grammar": 'root ::= "x" ("y" | "z") "ü"'}, "x[yz]ü"),
        ({"structured_outputs": {"grammar": 'start: "a" B\nB: /[0-9]{3}/'}}, "a[0-9]{3}"),
        (
            {
                "structured_outputs": {"structural_tag": {"structures": [], "triggers": []}},
                "guided_regex": None,
            },
            None,
        ),
        (
            {
                "guided_json": {
                    "type": "array",
                    "items": {"type": "boolean"},
                    "minItems": 2,
                    "maxItems": 2,
                },
                "guided_whitespace_pattern": " ",
            },
            r"\[ ?(true|false) ?, ?(true|false) ?\]",
        ),
    ],
)
def test_every_kind_on_both_routes(server, fields, pattern):
    sampling = {"model": "demo", "max_tokens": 60, "temperature": 1, "seed": 3} | fields
    for path, prompt in (
        ("chat/completions", {"messages": MESSAGES}),
        ("completions", {"prompt": "Once upon"}),
    ):
        status, answer = server.post(f"/v1/{path}", prompt | sampling)
        if pattern is None:
            assert (status, answer["error"]["code"]) == (400, "invalid_grammar")
            continue
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert re.fullmatch(pattern, text), text
        assert choice["finish_reason"] == "stop"
        body = json.dumps(prompt | sampling | {"stream": True}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            events = [
                json.loads(line[6:])
                for line in response.read().decode().splitlines()
                if line[:7] == "data: {"
            ]
        deltas = [
            choice.get("text") or choice.get("delta", {}).get("content") or ""
            for e in events
            for choice in e["choices"]
        ]
        assert "".join(deltas) == text


def test_bad_schemas_are_400s_with_their_place(client):
    schema = {
        "name": "x",
        "schema": {"type": "object", "properties": {"a": {"uniqueItems": True, "type": "array"}}},
    }
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **asked(response_format={"type": "json_schema", "json_schema": schema})
        )
    assert caught.value.param == "response_format.json_schema.schema"
    assert "/properties/a" in caught.value.message


def test_offline():
    def one(llm, constraint, **sampling):
        params = SamplingParams(
            structured_outputs=constraint, **({"max_tokens": 99, "seed": 5} | sampling)
        )
        return llm.generate(["Once upon a time", "A fox"], params, use_tqdm=False)

    with LLM("demo", threads=1, max_model_len=512) as llm:
        schema = StructuredOutputsParams(
            json=Animal.model_json_schema(), disable_any_whitespace=True
        )
        for out in one(llm, schema, n=2):
            for answer in out.outputs:
                Animal.model_validate_json(answer.text)
                assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        # A complete text ends the answer, whatever min_tokens and ignore_eos say; one that may go
        # on heeds them.
        choice = StructuredOutputsParams(choice=["fox"])
        assert one(llm, choice, min_tokens=40, ignore_eos=True)[0].outputs[0].text == "fox"
        letters = StructuredOutputsParams(regex="[ab]{0,60}")
        for out in one(llm, letters, min_tokens=30):
            assert 30 <= len(out.outputs[0].token_ids) <= 60
            assert re.fullmatch("[ab]*", out.outputs[0].text)
        cut = one(llm, letters, max_tokens=5, min_tokens=5)[0].outputs[0]
        assert cut.finish_reason == "length"
        assert (
            one(llm, StructuredOutputsParams(regex="[a-z ]{30}"), stop="e")[0]
            .outputs[0]
            .stop_reason
            == "e"
        )
        with pytest.raises(InvalidRequest, match="not"):
            one(llm, StructuredOutputsParams(json={"not": {}}))
        with pytest.raises(
            RequestFailed, match="no token is left"
        ):  # its next step is planned already
            one(llm, letters, allowed_token_ids=[50])
        plain = one(llm, None, temperature=0, logprobs=2)[0].outputs[0]
        held = one(llm, StructuredOutputsParams(regex="(.|\n)*"), temperature=0, logprobs=2)[
            0
        ].outputs[0]
        assert held.text == plain.text
        assert held.logprobs == plain.logprobs


def test_offline_without_a_tokenizer():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with (
        LLM("demo", threads=1, max_model_len=64, skip_tokenizer_init=True) as llm,
        pytest.raises(InvalidRequest, match="tokenizer"),
    ):
        llm.generate([{"prompt_token_ids": [1]}], params, use_tqdm=False)


def test_drafts_and_preemption_change_nothing():
    """They run beside requests without a grammar, with repeating text."""
    schemas = generated(12)
    constraints = [
        StructuredOutputsParams(json=schema, disable_any_whitespace=True) for schema in schemas
    ]
    constraints += [
        None,
        StructuredOutputsParams(regex="(ab){3,30}"),
        StructuredOutputsParams(regex="[ab]*"),
    ] * 2
    params = [
        SamplingParams(
            max_tokens=60,
            seed=i,
            temperature=[0, 0.8, 1.2][i % 3],
            logprobs=1,
            structured_outputs=asked,
        )
        for i, asked in enumerate(constraints)
    ]
    prompts = [
        f'{{"a":1,"b":[true,false]}} {{"a":1,"b":[true,abababababab {i % 5}'
        for i in range(len(params))
    ]
    answers = []
    for settings in (
        {},
        {"speculate": "ngram:3"},
        {"speculate": "suffix:4", "kv_cache_bytes": 9 << 16},
    ):
        with LLM("demo", threads=1, max_model_len=256, max_num_seqs=12, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            preempted = llm.stats.preemptions
        answers.append(
            [
                (o.token_ids, o.text, o.finish_reason, o.logprobs)
                for out in outputs
                for o in out.outputs
            ]
        )
    assert answers[0] == answers[1]
    assert answers[0] == answers[2]
    assert preempted
    assert sum(reason == "stop" for _, _, reason, _ in answers[0]) > len(schemas) // 2
