"""Grammars of answer formats: the format's parser reads all that they allow as demanded."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moeserve.sampling import GrammarSpec
from moeserve.text.answer_data import find_format
from moeserve.text.answer_format import ToolFault
from moeserve.text.answer_syntax import names
from moeserve.text.grammar import Grammars
from moeserve.text.tokenizer import Detokenizer
from tests.text.test_formats import ALL, SPECIAL, marked, read, tokenizer_with, write

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "n": {"type": "integer", "minimum": 0, "maximum": 9},
                    "unit": {"type": "string", "enum": ["c", "f"]},
                    "at": {
                        "type": "object",
                        "properties": {"a": {"type": "boolean"}},
                        "additionalProperties": False,
                    },
                },
                "required": ["unit", "n"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "g"}},
]


class Walk:
    """Answers drawn from a grammar: tokens of marks often, printable ones sometimes."""

    def __init__(self, name: str) -> None:
        self.tokenizer = tokenizer_with(
            [*SPECIAL.get(name, []), *([] if name == "harmony" else ["</think>", "<think>"])]
        )
        self.format = find_format("", self.tokenizer, name)
        self.ends = [self.tokenizer.backend.token_to_id("<eos>"), *self.format.stop_ids]
        self.grammars = Grammars(self.tokenizer, self.tokenizer.backend.get_vocab_size(), self.ends)

    def answer(self, spec: GrammarSpec, seed: int) -> str | None:
        """Return a random answer, or None if it became too long."""
        matcher = self.grammars.matcher(spec)
        rng = np.random.default_rng(seed)
        text = ""
        mask = np.zeros((1, self.grammars.mask_words), np.int32)
        detokenizer = Detokenizer(self.tokenizer.marked_pieces, [])
        for _ in range(500):
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            assert len(allowed)
            ends = [token for token in allowed if token in self.ends]
            if ends and (len(ends) == len(allowed) or rng.random() < 0.5):
                return text + detokenizer.flush()
            closing = (
                [i for i in allowed if i >= 256 or self.tokenizer.token_text(int(i)) in '"}']
                if rng.random() < 0.3
                else []
            )
            printable = [
                i for i in allowed if i >= 256 or self.tokenizer.token_text(int(i)).isprintable()
            ]
            token = int(
                rng.choice(
                    [i for i in closing or printable or allowed if i not in self.ends] or allowed
                )
            )
            matcher.accept([token])
            text += detokenizer.push(token)
        return None

    def allows(self, spec: GrammarSpec, text: str) -> bool:
        """Return whether a whole answer matches."""
        matcher = self.grammars.matcher(spec)
        tokens = self.tokenizer.encode(text, special=False)
        return (
            matcher.state.try_consume_tokens(tokens) == len(tokens) and matcher.state.is_accepting()
        )


@pytest.fixture(scope="module", params=ALL)
def walk(request):
    return Walk(request.param)


@pytest.mark.parametrize("parallel", [True, False])
def test_required_answers_are_calls(walk, parallel):
    spec = walk.format.constraint(TOOLS, required=True, parallel=parallel)
    read_at_all = 0
    for seed in range(8):
        if (answer := walk.answer(spec, seed)) is None:
            continue
        _, _, calls = read(walk.format, [answer], TOOLS)
        assert 1 <= len(calls) <= (9 if parallel else 1), answer
        for name, text in calls:
            arguments = json.loads(text)
            if name == "f":
                assert arguments["unit"] in ("c", "f")
                assert arguments["n"] in range(10)
                assert arguments.keys() <= {"city", "n", "unit", "at"}
            read_at_all += 1
    assert read_at_all or walk.format.name not in ("hermes", "mistral", "pythonic", "deepseek_v3")


def test_what_models_write_is_allowed_and_else_not(walk):
    name = walk.format.name
    good = write(name, [("f", {"n": 3, "unit": "c"})])
    other = write(name, [("g", {"x": 1})])
    auto = walk.format.constraint(TOOLS)
    required = walk.format.constraint(TOOLS, required=True)
    for spec in (auto, required):
        assert walk.allows(spec, good), good
        assert walk.allows(spec, other), other
        for bad in (("f", {"n": 30, "unit": "c"}), ("h", {"x": 1})):
            assert not walk.allows(spec, write(name, [bad])), bad
    free = "<|channel|>final<|message|>Hello" if name == "harmony" else "Hello"
    assert walk.allows(auto, free)
    assert not walk.allows(required, free)
    assert walk.format.constraint(TOOLS[1:]) is None
    if name != "harmony":
        one = walk.format.constraint(TOOLS, parallel=False)
        assert walk.allows(one, good)
        two = write(name, [("g", {"x": 1}), ("g", {"x": 2})])
        assert not walk.allows(one, two), two
        assert walk.allows(walk.format.constraint(TOOLS, required=True), two), two


def test_structured_output_follows_the_reasoning(walk):
    inner = GrammarSpec(
        "json_schema",
        '{"type": "object", "properties": {"<|end|>": {"enum": [1]}}, "required": ["<|end|>"]}',
    )
    for grammar, wanted in (
        (inner, '{"<|end|>": 1'),
        (GrammarSpec("choice", '["yes", "no"]'), "yes"),
    ):
        spec = walk.format.after_reasoning(grammar)
        content = wanted + "}" if wanted[0] == "{" else wanted
        if walk.format.name == "harmony":
            before = (
                "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>"
                "final<|message|>"
            )
            tokens = walk.tokenizer.encode(before, special=False) + [
                token for char in content for token in walk.tokenizer.encode(char, special=False)
            ]
            state = walk.grammars.matcher(spec).state
            assert state.try_consume_tokens(tokens) == len(tokens)
            assert state.is_accepting()
        else:
            assert walk.allows(spec, content)
            assert not walk.allows(spec, "maybe")


def test_reasoning_may_come_before_what_is_demanded():
    walk = Walk("hermes")
    call = write("hermes", [("g", {})])
    spec = walk.format.constraint(TOOLS, required=True)
    assert walk.allows(spec, f"<think>well</think>\n\n{call}")
    opened = walk.format.constraint(TOOLS, required=True, prompt="...<think>\n")
    assert walk.allows(opened, f"well</think>\n\n{call}")
    assert not walk.allows(opened, call)
    assert walk.allows(
        walk.format.after_reasoning(GrammarSpec("regex", "a+"), prompt="...<think>\n"),
        "b</think>\n\naa",
    )


def test_schemas_that_cannot_be_kept_are_refused():
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "strict": True,
            "parameters": {"type": "object", "properties": {}},
        },
    }
    properties = tool["function"]["parameters"]["properties"]
    properties["x"] = {"type": "string", "pattern": "a+"}
    with pytest.raises(ToolFault, match="pattern cannot be enforced") as caught:
        Walk("qwen3_coder").format.constraint([tool])
    assert (caught.value.field, caught.value.where) == ("parameters", "/properties/x")
    properties["x"] = {"enum": [1.23456789e-30]}
    with pytest.raises(ToolFault) as caught:
        Walk("hermes").format.constraint([tool])
    assert (caught.value.field, caught.value.where) == ("parameters", "/properties/x/enum/0")


def test_every_format_was_tried():
    assert set(ALL) == {*names(), "harmony"}
    assert marked("<eos>", "hermes") != "<eos>"
