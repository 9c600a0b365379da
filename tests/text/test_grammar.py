"""Grammars: random choices under masks give valid answers; drafts, rollback, replay and threads."""

from __future__ import annotations

import ipaddress
import json
import random
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime

import jsonschema
import numpy as np
import pytest

from moeserve.errors import CheckpointError, InvalidRequest, RequestFailed
from moeserve.sampling import GrammarSpec
from moeserve.text.grammar import Grammars
from moeserve.text.grammar_limits import MAX_JSON_BYTES
from moeserve.text.grammar_source import special_tokens
from tests.text.grammar_case import EXTRA, Case, bits, schema_spec
from tests.text.schemas import SCHEMAS, closed

FORMATS = {
    "date-time": lambda text: datetime.fromisoformat(
        re.sub(r"\.\d+", "", text.upper()).replace("60Z", "59Z")
    ),
    "date": date.fromisoformat,
    "uuid": uuid.UUID,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
}


HINTS = {"unanchored pattern": '"12', "email": '"a@.b'}


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_are_valid(case, checker, name):
    schema = SCHEMAS[name]
    formats = jsonschema.FormatChecker(formats=())
    for kind, parse in FORMATS.items():
        formats.checks(kind, raises=ValueError)(lambda text, parse=parse: parse(text) is not None)
    validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
    for seed in range(3):
        spec = schema_spec(schema, any_whitespace=seed != 1)
        checker.check(spec, "schema")
        text = case.text(case.generate(spec, random.Random(f"{name} {seed}"), HINTS.get(name, "")))
        validator.validate(json.loads(text))


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", ['{"a": [1, {}]}', "{}"], ["[]", "1", '{"a"}']),
        ("regex", r"[a-f]{2}(\d|☃)+", ["ab1", "ff☃2"], ["a1", "ab"]),
        ("regex", "", [""], ["a"]),
        ("regex", "a/b\\/\nc", ["a/b/\nc"], ["a/b"]),
        (
            "choice",
            '["yes", "no", "yes!", "no\\"\\\\/\\n☃ <|im_end|>"]',
            ["yes", "yes!", 'no"\\/\n☃ <|im_end|>'],
            ["ye", "YES"],
        ),
        ("choice", '["a.c", "(", ""]', ["a.c", "(", ""], ["abc"]),
        ("lark", 'start: "a" b "c"\nb: /[0-9]+/ | "(" b ")"', ["a1c", "a((22))c"], ["ac", "a(1c"]),
        ("gbnf", 'root ::= "a" x\nx ::= "b" | "(" x ")" [0-9]*', ["ab", "a((b)1)"], ["a", "a(b"]),
    ],
)
def test_kinds(case, checker, kind, text, good, bad):
    spec = GrammarSpec(kind, text)
    checker.check(spec, "x")
    for answer, accepted in [(answer, True) for answer in good] + [
        (answer, False) for answer in bad
    ]:
        matcher = case.grammars.matcher(spec)
        tokens = plain_ids(case, answer)
        try:
            matcher.accept(tokens)
        except RequestFailed:
            assert not accepted
            continue
        assert matcher.state.is_accepting() is accepted, answer
        assert (case.end in case.allowed(matcher)) is accepted


def plain_ids(case, text: str) -> list[int]:
    """Tokens of one byte each, so that nothing is a special token."""
    byte = {raw: i for i in range(case.size) if len(raw := case.tokenizer.token_bytes(i)) == 1}
    return [byte[bytes([b])] for b in text.encode()]


def test_special_tokens_of_llguidance(case):
    known = special_tokens(case.tokenizer)
    assert known == {
        name: i for name, i in known.items() if case.grammars._tokenizer.is_special_token(i)
    }
    others = [
        i
        for i in range(case.size)
        if i not in known.values() and case.tokenizer.token_bytes(i) != b"\xff"
    ]
    assert not any(map(case.grammars._tokenizer.is_special_token, others))
    for i in others:
        assert case.grammars._tokenizer.decode_bytes([i]) == case.tokenizer.token_bytes(i), i


TAGS = {
    "old": {
        "structures": [
            {"begin": "<f=a>", "schema": closed(x={"type": "integer"}), "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
            {"begin": "<|im_start|>c:", "schema": {"enum": [1, 2]}, "end": "<|endoftext|>"},
        ],
        "triggers": ["<f=", "<|im_start|>"],
    },
}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "old",
            [
                "",
                "hi <f",
                'a <f=a>{"x": 1}</f> b <f=b>true</f>',
                "<|im_start|>c:1<|endoftext|> more",
            ],
            [
                "<f=c>",
                '<f=a>{"y"',
                "<f=b>1",
                "<|im_start|>d",
                "<|im_start|>c:3",
                "<|im_start|>c:1</f",
            ],
        ),
    ],
)
def test_structural_tags(bytes_case, checker, name, good, bad):
    spec = GrammarSpec("structural_tag", json.dumps(TAGS[name]))
    checker.check(spec, "x")
    for text in good:
        matcher = bytes_case.grammars.matcher(spec, bytes_case.ids(text))
        assert bytes_case.end in bytes_case.allowed(matcher), text
    for text in bad:
        with pytest.raises(RequestFailed):
            bytes_case.grammars.matcher(spec, [*bytes_case.ids(text), bytes_case.end])


def test_only_end_tokens_follow_a_complete_text(byte_level):
    ends = [byte_level.backend.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
    grammars = Grammars(byte_level, byte_level.backend.get_vocab_size() + EXTRA, [*ends, 10**6])
    matcher = grammars.matcher(
        GrammarSpec("choice", '["a"]'), byte_level.encode("a", special=False)
    )
    mask_W = np.zeros(grammars.mask_words, np.int32)
    for used in ([], ends[:1], ends, [ends[1], ends[1]]):
        matcher.accept(used)
        matcher.fill(mask_W[None])
        assert bits(mask_W) == sorted(ends)
        assert matcher.is_done
        assert matcher.state.is_accepting()
        matcher.rewind(matcher.num_tokens - len(used))
    matcher.rewind(0)
    assert not matcher.is_done
    matcher.accept(byte_level.encode("a", special=False))
    assert matcher.is_done


SPECS = [
    GrammarSpec("json_object"),
    schema_spec(SCHEMAS["tool calls"]),
    schema_spec(SCHEMAS["enum of 500"], any_whitespace=False),
    schema_spec(SCHEMAS["tree"]),
    schema_spec(SCHEMAS["number range"]),
    GrammarSpec("regex", "[a-c]{1,9}x?"),
    GrammarSpec("structural_tag", json.dumps(TAGS["old"])),
]


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_rollback_drafts_and_replay_equal_step_by_step(case, number):
    spec = SPECS[number]
    rng = random.Random(number)
    tokens = case.generate(spec, rng)
    matcher = case.grammars.matcher(spec)
    masks = []
    for token in tokens:
        masks.append(case.allowed(matcher))
        matcher.accept([token])
    masks.append(case.allowed(matcher))
    bitmask_RW = np.zeros((9, case.grammars.mask_words), np.int32)
    for _ in range(12):
        at = rng.randrange(len(tokens))
        matcher.rewind(at)
        assert case.allowed(matcher) == masks[at]
        replayed = case.grammars.matcher(spec, tokens[:at])
        assert case.allowed(replayed) == masks[at]
        drafts = tokens[at : at + rng.randrange(8)]
        num_right = len(drafts)
        if rng.random() < 0.5:
            drafts = [*drafts[:4], wrong := rng.choice([5, 77, case.end, case.end, case.size + 3])]
            num_right = min(num_right, 4) + (
                at + len(drafts) <= len(tokens) and tokens[at + len(drafts) - 1] == wrong
            )
        bitmask_RW[:] = 7
        for state in (matcher, replayed):
            state.fill(bitmask_RW[: len(drafts) + 1], drafts)
            filled = len([t for t in drafts[:num_right] if t != case.end])
            assert [bits(row) for row in bitmask_RW[: filled + 1]] == masks[at : at + filled + 1]
            assert (bitmask_RW[len(drafts) + 1 :] == 7).all()
            assert case.allowed(state) == masks[at]
        matcher.accept(tokens[at:])
        assert case.allowed(matcher) == masks[-1]


def test_a_batch_equals_single_rows(bytes_case):
    rng = random.Random(1)
    rows = []
    wanted = {}
    for number, spec in enumerate(SPECS * 4):
        tokens = bytes_case.generate(spec, rng)
        at = rng.randrange(len(tokens))
        matcher = bytes_case.grammars.matcher(spec, tokens[:at])
        rows.append((matcher, 4 * number, tokens[at : at + number % 4]))
        alone_RW = np.zeros((1 + number % 4, bytes_case.grammars.mask_words), np.int32)
        matcher.fill(alone_RW, rows[-1][2])
        wanted[4 * number] = alone_RW[: 1 + len(rows[-1][2])]
    bitmask_RW = np.full((4 * len(rows), bytes_case.grammars.mask_words), 7, np.int32)
    assert bytes_case.grammars.fill_all(rows, bitmask_RW) == {}
    for first, alone_RW in wanted.items():
        assert (bitmask_RW[first : first + len(alone_RW)] == alone_RW).all()


def test_masks_name_only_tokens_that_exist(case):
    matcher = case.grammars.matcher(GrammarSpec("regex", r"(.|\n)*"))
    allowed = set(case.allowed(matcher))
    assert max(allowed) < case.size
    assert allowed & set(special_tokens(case.tokenizer).values()) == {case.end}


def test_a_wrong_token_is_one_clear_error(bytes_case):
    spec = GrammarSpec("regex", "a+")
    for tokens in (
        [5],
        bytes_case.ids("aab"),
        [bytes_case.end],
        [bytes_case.size + 3],
    ):
        matcher = bytes_case.grammars.matcher(spec)
        with pytest.raises(RequestFailed, match="after 0 tokens"):
            matcher.accept(tokens)


def test_threads(bytes_case, checker):
    def one(seed: int) -> list[int]:
        case = Case.__new__(Case)
        case.__dict__ |= bytes_case.__dict__ | {"mask_W": bytes_case.mask_W.copy()}
        checker.check(SPECS[seed % len(SPECS)], "x")
        return case.generate(SPECS[seed % len(SPECS)], random.Random(seed))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(40))) == [one(seed) for seed in range(40)]


def test_specs_are_equal_by_content():
    import msgspec

    spec = schema_spec({"type": "object"}, any_whitespace=False)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=GrammarSpec) == spec
    assert (
        len(
            {
                spec,
                schema_spec({"type": "object"}, any_whitespace=False),
                schema_spec({"type": "object"}),
            }
        )
        == 2
    )


def test_whitespace_options(bytes_case, checker):
    for options, text, fits in [
        ({}, '{ "a" :\n1}', True),
        ({}, "{\r\n" + " " * 32 + '"a":    1\n\n}', True),
        ({}, "{\n\n\n", False),
        ({}, "{" + " " * 5, False),
        ({"whitespace_pattern": r"\s+"}, '{\n\n\n     "a":1}', True),
        ({"any_whitespace": False}, '{ "a"', False),
        ({"any_whitespace": False}, '{"a": 1}', False),
        ({"any_whitespace": False}, '{"a":1}', True),
        ({"whitespace_pattern": "[ ]"}, '{ "a"', True),
        ({"whitespace_pattern": "[ ]"}, '{\n"a"', False),
    ]:
        spec = schema_spec(closed(a={"type": "integer"}), **options)
        checker.check(spec, "x")
        if fits:
            bytes_case.grammars.matcher(spec, bytes_case.ids(text))
        else:
            with pytest.raises(RequestFailed):
                bytes_case.grammars.matcher(spec, bytes_case.ids(text))


def test_unusable_tokenizers(byte_level):
    with pytest.raises(CheckpointError, match="tokenizer"):
        Grammars(byte_level, 10, [0])
    with pytest.raises(CheckpointError, match="tokenizer"):
        Grammars(byte_level, 2000, [])


def test_a_spec_that_was_never_checked(bytes_case):
    for spec in (GrammarSpec("regex", "("), GrammarSpec("json_schema", "x" * (MAX_JSON_BYTES + 1))):
        with pytest.raises(InvalidRequest):
            bytes_case.grammars.matcher(spec)
