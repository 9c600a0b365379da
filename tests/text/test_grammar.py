"""Grammars: valid answers from random choices under masks, hostile grammars, drafts, rollback,
replay and threads.
"""

from __future__ import annotations

import gc
import ipaddress
import json
import random
import re
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime

import jsonschema
import numpy as np
import pytest
from llguidance import LLParserLimits

from moeserve.errors import CheckpointError, InvalidRequest, RequestFailed
from moeserve.sampling import GrammarSpec, StructuredOutputsParams
from moeserve.text import grammar, grammar_check
from moeserve.text.grammar import Grammars
from moeserve.text.grammar_check import GrammarChecker
from moeserve.text.grammar_limits import MAX_JSON_BYTES
from moeserve.text.grammar_source import special_tokens
from moeserve.text.json_schema import MAX_ENUM
from moeserve.text.structured_outputs import grammar_of
from moeserve.text.tokenizer import Tokenizer
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


EXTRA = 40  # rows of the model's vocabulary without a token
CLOSING = '"}],'
HINTS = {"unanchored pattern": '"12', "email": '"a@.b'}


class Case:
    """A tokenizer with its grammars."""

    def __init__(self, tokenizer: Tokenizer, end: str) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.backend.token_to_id(end)
        self.size = tokenizer.backend.get_vocab_size()
        self.grammars = Grammars(tokenizer, self.size + EXTRA, [self.end], 2)
        self.mask_W = np.zeros(self.grammars.mask_words, np.int32)

    def allowed(self, matcher) -> list[int]:
        self.mask_W[:] = 7
        matcher.fill(self.mask_W[None])
        return bits(self.mask_W)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=False)

    def text(self, tokens: list[int]) -> str:
        assert tokens[-1] == self.end
        return b"".join(map(self.tokenizer.token_bytes, tokens[:-1])).decode()

    def generate(self, spec: GrammarSpec, rng: random.Random, hint: str = "") -> list[int]:
        """Random tokens under masks; after 20 of them, those that close something, or begin with a
        hint, come first.
        """
        closing = {
            i
            for i in range(self.size)
            if self.tokenizer.token_text(i)[:1] in tuple(hint or CLOSING)
        }
        matcher = self.grammars.matcher(spec)
        tokens = []
        while not tokens or tokens[-1] != self.end:
            allowed = self.allowed(matcher)
            if len(tokens) > 20 or rng.random() < 0.3:
                close = [self.end] if self.end in allowed else [i for i in allowed if i in closing]
                allowed = close or allowed
            tokens.append(rng.choice(allowed))
            matcher.accept(tokens[-1:])
            assert len(tokens) < 700, "does not end"
        assert matcher.is_done
        return tokens


def bits(mask_W) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist()


def schema_spec(schema, **options) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), **options)


@pytest.fixture(scope="module")
def bytes_case(byte_level):
    return Case(byte_level, "<|im_end|>")


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def case(request, bytes_case):
    if request.param == "byte_level":
        return bytes_case
    return Case(request.getfixturevalue("sentencepiece"), "</s>")


@pytest.fixture(scope="module")
def checker(byte_level):
    made = GrammarChecker(
        byte_level,
        byte_level.backend.get_vocab_size() + EXTRA,
        [byte_level.backend.token_to_id("<|im_end|>")],
    )
    made.check(GrammarSpec("json_object"), "x")  # starts the process
    yield made
    made.close()


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


def deep(inner: str, depth: int) -> str:
    return '{"items":' * depth + inner + "}" * depth


HOSTILE = {
    "reference to another document": (
        "json_schema",
        {"$ref": "https://example.com/a.json"},
        "only references",
    ),
    "missing reference": (
        "json_schema",
        closed(a={"$ref": "#/$defs/b"}),
        "at /properties/a: .*does not exist",
    ),
    "reference to itself": ("json_schema", {"$ref": "#"}, "no text"),
    "circle of references": (
        "json_schema",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "no text",
    ),
    "chain of references": (
        "json_schema",
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(4000)} | {"4000": {}},
        },
        "too deeply",
    ),
    "deep": ("json_schema", deep("{}", 70), "deeper than"),
    "very deep": ("json_schema", deep("{}", 5000), "deeply"),
    "one megabyte": ("json_schema", {"enum": ["x" * 1000] * 1000}, "bytes"),
    "many values": ("json_schema", {"enum": [[1] * 2000] * 15}, "20,000 values"),
    "large enum": (
        "json_schema",
        closed(**{"a/~b": {"enum": list(range(MAX_ENUM + 1))}}),
        "at /properties/a~1~0b/enum: 5,001 values",
    ),
    "crossed patterns": (
        "json_schema",
        {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(60)]},
        "too long|too large",
    ),
    "exponential unions": (
        "json_schema",
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(3)]} for i in range(80)]},
        "too large|too long",
    ),
    "thousands of optional properties": (
        "json_schema",
        closed(tuple(map(str, range(3000))), **{str(i): {} for i in range(3000)}),
        "too long|too many",
    ),
    "not a schema": ("json_schema", [1], "object or a boolean"),
    "no JSON": ("json_schema", "{", "not JSON"),
    "NaN": ("json_schema", '{"minimum": NaN}', "NaN"),
    "wrong type": ("json_schema", closed(a={"type": "strng"}), "at /properties/a: .*strng"),
    "wrong properties": ("json_schema", {"properties": []}, "properties must be an object"),
    "unsupported": (
        "json_schema",
        closed(a={"type": "array", "items": {"not": {}}}),
        'at /properties/a/items: .*"not"',
    ),
    "unsupported in a union": (
        "json_schema",
        {"anyOf": [{"type": "null"}, {"if": {}, "then": {}}]},
        'at /anyOf/1: .*"if"',
    ),
    "unique items": ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    "overlapping oneOf": (
        "json_schema",
        closed(a={"oneOf": [{"type": "string"}, {"minLength": 3}]}),
        "at /properties/a: .*anyOf",
    ),
    "bad pattern": (
        "json_schema",
        closed(a={"type": "string", "pattern": "("}),
        "at /properties/a: .*unclosed",
    ),
    "look-ahead": ("json_schema", {"type": "string", "pattern": "(?=a)"}, "look-around"),
    "long pattern": (
        "json_schema",
        {"type": "string", "pattern": "a" * 10_000},
        "at /pattern: .*8,192",
    ),
    "nothing fits": ("json_schema", {"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
    "no values": ("json_schema", {"enum": []}, "empty"),
    "false": ("json_schema", False, "empty"),
    "smuggled options": ("json_schema", {"x-guidance": {"lenient": True}, "not": {}}, "not"),
    "error beside another": (
        "json_schema",
        {"anyOf": [{"anyOf": [{"type": "null"}] * 3}, {"not": {}}, {"$ref": "#/anyOf/1"}]},
        'at /anyOf/1: .*"not"',
    ),
    "long fractions": (
        "json_schema",
        closed(a={"const": [0.9020643004116283]}),
        "at /properties/a/const/0: .*15 digits",
    ),
    "large integers": (
        "json_schema",
        closed(a={"enum": [1, 10**20]}),
        "at /properties/a/enum/1: values of 64 bits",
    ),
    "names that could repeat": (
        "json_schema",
        {"items": {"required": ["a"], "minProperties": 3}},
        "at /items: minProperties",
    ),
    "invalid regex": ("regex", "a(b", "unclosed"),
    "back-reference": ("regex", r"(a)\1", "backreferences"),
    "nested parentheses": ("regex", "(" * 4000 + "a" + ")" * 4000, "nest"),
    "long regex": ("regex", "a" * 10_000, "8,192"),
    "no grammar": ("lark", "what is this", "Expected|expected"),
    "unknown rule": ("lark", "start: x", "unknown name"),
    "unknown special token": ("lark", "start: <nothing>", "unknown special token: .<nothing>."),
    "endless rule": ("lark", "start: start", "no text"),
    "chain of rules": (
        "lark",
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(2400)) + '\na2400: "a"',
        "too deeply",
    ),
    "deep parentheses": ("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "deep"),
    "options in a grammar": (
        "lark",
        '%llguidance {"no_forcing": false}\nstart: "a"',
        "%llguidance",
    ),
    "no root": ("gbnf", 'x ::= "a"', "root|start"),
    "deep GBNF": ("gbnf", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000, "deep"),
    "broken GBNF": ("gbnf", 'root ::= "a', "GBNF"),
    "large grammar": ("lark", 'start: "a"\n' * 9000, "32,768"),
    "tag without trigger": (
        "structural_tag",
        {"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["y"]},
        "'x' begins with none",
    ),
    "another format of tags": ("structural_tag", {"format": {"type": "x"}}, "format"),
    "no tags": ("structural_tag", {}, "structures is required"),
    "tags in a bad schema": (
        "structural_tag",
        {
            "structures": [{"begin": "x", "schema": {"$ref": "http://x"}, "end": ""}],
            "triggers": ["x"],
        },
        "only references",
    ),
    "a special token within a trigger": (
        "structural_tag",
        {
            "structures": [{"begin": "x<|im_start|>", "schema": {}, "end": ""}],
            "triggers": ["x<|im_start|>"],
        },
        "only be at the beginning",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_time(checker, name):
    kind, text, message = HOSTILE[name]
    spec = GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text))
    started = time.thread_time()
    with pytest.raises(InvalidRequest, match=f"^field(?s:.)*({message})") as caught:
        checker.check(spec, "field")
    assert caught.value.param == "field"
    assert len(caught.value.message) < 900
    assert time.thread_time() - started < 0.5  # the sandbox has 0.4 s of CPU time, besides
    started = time.perf_counter()
    with pytest.raises(InvalidRequest):
        checker.check(spec, "again")
    assert time.perf_counter() - started < 0.1
    checker.check(GrammarSpec("json_object"), "x")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(.*a){20}x"),
        ("regex", "((a{0,100}){0,100}){0,100}"),
        ("regex", "(x+x+)+y"),
        ("regex", r"[^\n]*(a|b){0,20}[ab]{500}"),
        ("json_schema", '{"type": "string", "maxLength": 2147483647}'),
        ("json_schema", '{"type": "string", "pattern": "(a|aa)*(b|bb)*(.*a.{30})"}'),
        ("json_schema", '{"type": "array", "items": {}, "minItems": 1000000000}'),
        ("lark", 'start: T\nT: (("a" "b"){3000}){3000}'),
        ("lark", "start: /b+/ /b+/"),
        (
            "lark",
            (
                'start: r0\nr0: (r2 T2)? | ("a" r0){2000} T1\nr2: (T1){2000}\nT1: "bc" ("bc")*\n'
                'T2: "<" | ("<" | "a")+'
            ),
        ),
        ("json_schema", json.dumps(closed(a={"$ref": "#"}))),
        ("lark", "start: s\ns: s s | s s s | /a|b/ | start"),
    ],
)
def test_explosive_grammars_stay_small(bytes_case, checker, kind, text):
    spec = GrammarSpec(kind, text)
    rng = random.Random(0)
    checker.check(spec, "x")
    matcher = bytes_case.grammars.matcher(spec)
    started = time.thread_time()
    for _ in range(60):
        matcher.accept([rng.choice(bytes_case.allowed(matcher))])
        if matcher.is_done:
            break
    assert time.thread_time() - started < 1


def test_a_dead_sandbox_starts_again(byte_level):
    checker = GrammarChecker(byte_level, 1000, [0])
    process = checker._sandboxes._processes[0]
    for choice in ("a", "b"):
        checker.check(GrammarSpec("choice", json.dumps([choice])), "x")
        process._process.kill()
        process._process.wait()
    checker.close()
    checker.close()


def test_verdicts_are_kept(byte_level, monkeypatch):
    monkeypatch.setattr(grammar_check, "MAX_VERDICTS", 2)
    checker = GrammarChecker(byte_level, 1000, [0])
    compiled = []
    monkeypatch.setattr(checker, "_compile", lambda spec, _: compiled.append(spec.text) or "")
    for text in "aabacab":
        checker.check(GrammarSpec("regex", text), "x")
    assert compiled == ["a", "b", "c", "a", "b"]
    checker.close()


def test_verdicts_keep_no_text(checker):
    texts = [
        "(" * 4000 + "x" * 5_000_000,
        '{"a": "' + "x" * 200_000,
        '{"a": NaN, "b": "' + "y" * 10**5 + '"}',
    ]
    for text in texts:
        spec = GrammarSpec("json_schema", text)
        before = sys.getrefcount(text)
        with pytest.raises(InvalidRequest) as caught:
            checker.check(spec, "x")
        assert len(caught.value.message) < 1100
        del caught
        gc.collect()
        assert sys.getrefcount(text) == before
    assert max(map(len, checker._verdicts)) == 32


def test_over_long_constraints_are_refused_before_they_become_a_grammar():
    for params in (
        StructuredOutputsParams(json={"a": "x" * MAX_JSON_BYTES}),
        StructuredOutputsParams(
            json=json.dumps("\U0001f600" * (MAX_JSON_BYTES // 4), ensure_ascii=False)
        ),
        StructuredOutputsParams(regex="x" * 10_000),
        StructuredOutputsParams(grammar="x" * 40_000),
        StructuredOutputsParams(choice=["x" * MAX_JSON_BYTES]),
        StructuredOutputsParams(json_object=True, whitespace_pattern="x" * 10_000),
    ):
        with pytest.raises(InvalidRequest, match=r"field: .*(at most|longer than)"):
            grammar_of(params, "field")


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


def test_one_request_cannot_exhaust_a_grammar_for_others(byte_level, monkeypatch):
    monkeypatch.setattr(
        grammar, "limits", lambda: LLParserLimits(max_lexer_states=600, verbose_errors=False)
    )
    case = Case(byte_level, "<|im_end|>")
    spec = GrammarSpec("regex", r"(.|\n)*a(.|\n){14}b")
    rng = random.Random(0)
    failed = 0
    a = case.ids("a")[0]
    x = case.ids("x")[0]
    for _ in range(6):  # each learns states of its own
        matcher = case.grammars.matcher(spec)
        try:
            for _ in range(200):
                case.allowed(matcher)
                matcher.accept([rng.choice([a, x])])
        except RequestFailed as error:
            failed += "too many states" in str(error)
        fresh = case.grammars.matcher(spec, [a, x])
        assert case.end not in case.allowed(fresh)
        bitmask_RW = np.zeros((1, case.grammars.mask_words), np.int32)
        assert len(case.grammars.fill_all([(matcher, 0, [])], bitmask_RW)) <= 1
    assert failed


def test_compiled_grammars_are_kept_within_bounds(byte_level, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_CACHED", 3)
    grammars = Case(byte_level, "<|im_end|>").grammars
    for text in ["a", "b", "c", "a", "d"]:
        grammars.matcher(GrammarSpec("regex", text))
    assert [spec.text for spec in grammars._cached] == ["c", "a", "d"]


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
