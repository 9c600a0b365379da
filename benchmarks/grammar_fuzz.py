"""Fuzzes structured output with hostile schemas, regexes and grammars: crashes, hangs, memory.

    python -m benchmarks.grammar_fuzz [--seconds 300]

Targets: no crash, nothing that takes longer than a second, bounded memory.

Each grammar is checked as a server checks it. If it is accepted, it is followed for some random
tokens as an engine would follow it, with drafts. hypothesis makes most grammars and mixes in pieces
of handwritten ones. A worker process does the work, so that a crash is a result.

Prints and saves counts, the longest times and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import psutil
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from benchmarks.common import parser, save
from moeserve.errors import InvalidRequest, RequestFailed
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.sampling import GrammarSpec
from moeserve.text.grammar import Grammars, Matcher
from moeserve.text.grammar_check import GrammarChecker
from moeserve.text.tokenizer import Tokenizer
from tests.text.schemas import generated

HANG_S = 1.0
STEPS = 24  # tokens for which an accepted grammar is followed
BATCH = 200  # grammars per run of hypothesis
KEYWORDS = (
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems",
    "maxItems", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "pattern", "format",
    "minLength", "maxLength", "minimum", "maximum", "multipleOf", "exclusiveMaximum",
    "patternProperties", "minProperties", "maxProperties", "$ref", "$defs", "$id", "$anchor",
    "definitions", "uniqueItems", "x-guidance", "default", "title",
)  # fmt: skip
TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
REFERENCES = (
    "#",
    "#/$defs/a",
    "#/$defs/b",
    "#/properties/a",
    "#/anyOf/0",
    "#a",
    "http://x",
    "#/$defs/a~1~0",
    "##",
)
REGEXES = (
    "(a+)+$", "(a|aa)+", "(a{1,30}){1,30}", "[^a]*b{0,400}", r"\p{L}{1,200}", "(?=a)b", "(?!a)",
    r"(a)\1", "a{1000}", "((((((((((a?){9}){9}){9}){9}){9}){9})", "[\\s\\S]*[\\s\\S]*x", "^$",
    "\\b", "(?i)straße", "[z-a]", "a**", "(", ")", "|", "\\", "\\x{110000}", "\\u12",
    "(?P<n>a)(?P=n)", ".{5000}", "(.*)*(.*)*(.*)*y", "[😀-😿]{3}", "\x00", "~(a)",
)  # fmt: skip
GRAMMARS = (
    "start: start", 'start: "a" start | ""', "start: a b\na: b a |\nb: a b |", 'start: (("a"*)*)*',
    "start: /b+/ /b+/", 'start: x{1,5000}\nx: "a" | "aa"', "start: A\nA: /(a|b)*a(a|b){14}/",
    "start: <|im_end|>", "start: <[0-99999]>", "start: %json {}", 'start: %json {"$ref": "#"}',
    'root ::= root "a" | "b"', "root ::= [a-z]{1,9999}", "root ::= (x | y)+\nx ::= y x\ny ::= x y",
    'root ::= "\\u0000" [^\\n]*', "%llguidance {}", "start: @0",
    'start: s s s s s s s s\ns: t t t t t t t t\nt: u u u u u u u u\nu: "a"?', 'start: "a" ~ 4000',
)  # fmt: skip


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--seconds", type=float, default=300, help="[%(default)s]")
    flags.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    flags.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.worker:
        work(args.seconds, args.seed)
        return
    until = monotonic() + args.seconds
    results = Counter[str]()
    crashes = []
    seed = args.seed
    longest: dict[str, Any] = {}
    slow: list[str] = []
    while (left := until - monotonic()) > 1:
        worker_flags = ["--worker", "--seconds", str(left), "--seed", str(seed)]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.grammar_fuzz", *worker_flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            found = json.loads(line)
            last = found.get("begins", last)
            results.update(found.get("counts", {}))
            slow += found.get("slow", [])
            for name, value in found.get("most", {}).items():
                longest[name] = max(longest.get(name, value), value)
        if process.wait():
            crashes.append({"status": process.returncode, "grammar": last[:2000]})
        seed += 1
    save(
        "grammar-fuzz",
        args,
        {"crashes": len(crashes)} | results | longest | {"crashed": crashes[:5], "slow": slow[:9]},
    )


def work(seconds: float, seed: int) -> None:
    """Fuzz until the time is over; report in JSON lines on standard output."""
    tokenizer = Tokenizer.load(resolve_model_dir("demo"))
    size = tokenizer.backend.get_vocab_size()
    end = tokenizer.encode("<|im_end|>", special=False)[0]
    grammars = Grammars(tokenizer, size, [end])
    checker = GrammarChecker(tokenizer, size, [end])
    checker.check(GrammarSpec("json_object"), "")
    fuzzer = Fuzzer(grammars, checker, random.Random(seed))
    until = monotonic() + seconds
    turn = 0
    for kind, text in by_hand():
        fuzzer.one(GrammarSpec(kind, text))  # type: ignore[arg-type]
    while monotonic() < until:
        turn += 1
        run = settings(
            max_examples=BATCH,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(given(SPECS)(lambda spec: None if monotonic() > until else fuzzer.one(spec)))
        seeded(seed * 100_000 + turn)(run)()
        fuzzer.tell()
    checker.close()


class Fuzzer:
    """Tries grammars and counts the outcomes."""

    def __init__(self, grammars: Grammars, checker: GrammarChecker, rng: random.Random) -> None:
        self._grammars = grammars
        self._checker = checker
        self._rng = rng
        self._counts: Counter[str] = Counter()
        self._most: dict[str, float] = {}

    def one(self, spec: GrammarSpec) -> None:
        say(begins=f"{spec.kind} {spec.text}")
        self._counts["grammars"] += 1
        if not self._timed("check", spec, self._checker.check, spec, "x"):
            self._counts["refused"] += 1
            return
        self._counts["accepted"] += 1
        found: list[Matcher] = []
        self._timed("compile", spec, lambda: found.append(self._grammars.matcher(spec)))
        mask_RW = np.zeros((3, self._grammars.mask_words), np.int32)
        for matcher in found * STEPS:
            drafts = self._rng.choices(range(self._grammars.mask_words * 31), k=2)
            if matcher.is_done or not self._timed("fill", spec, matcher.fill, mask_RW, drafts):
                break
            allowed = np.flatnonzero(np.unpackbits(mask_RW[0].view(np.uint8), bitorder="little"))
            if not len(allowed):
                self._counts["states without a token"] += 1
                break
            token = int(self._rng.choice(allowed))
            if not self._timed("accept", spec, matcher.accept, [token]):
                break

    def _timed(self, what: str, spec: GrammarSpec, call: Callable[..., object], *args: Any) -> bool:
        """Time a call; return whether it succeeded."""
        began = perf_counter()
        error = ""
        try:
            call(*args)
        except (InvalidRequest, RequestFailed) as caught:
            error = caught.message
            self._counts["too costly while it ran"] += isinstance(caught, RequestFailed)
        spent = perf_counter() - began
        if spent > HANG_S:
            self._counts["longer than a second"] += 1
            say(
                slow=[
                    f"{what} {spent:.1f} s {spec.kind} {spec.text[:500]} "
                    f"({len(spec.text):,}): {error}"
                ]
            )
        self._most[f"longest {what} in ms"] = max(
            self._most.get(f"longest {what} in ms", 0), round(spent * 1e3, 1)
        )
        return not error

    def tell(self) -> None:
        """Report the counts since the last report, and the memory in use."""
        mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        children = [child.memory_info().rss >> 20 for child in psutil.Process().children()]
        say(
            counts=self._counts,
            most=self._most | {"peak MiB": mib, "checker's MiB": max(children, default=0)},
        )
        self._counts = Counter()


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def by_hand() -> list[tuple[str, str]]:
    found = [("regex", text) for text in REGEXES] + [
        ("lark", text) for text in GRAMMARS if "::=" not in text
    ]
    found += [("gbnf", text) for text in GRAMMARS if "::=" in text]
    found += [("json_schema", json.dumps(schema)) for schema in generated(24)]
    deep = '{"anyOf":[' * 30 + "{}" + "]}" * 30
    wide = {
        "anyOf": [
            {"type": "object", "properties": {f"p{i}": {"enum": list(range(i))}}}
            for i in range(120)
        ]
    }
    chain = {
        "$ref": "#/$defs/0",
        "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)} | {"3000": {}},
    }
    optional = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}
    return [
        *found,
        ("json_schema", deep),
        *(("json_schema", json.dumps(s)) for s in (wide, chain, optional)),
    ]


def schemas() -> st.SearchStrategy[Any]:
    numbers = (
        st.integers(-(2**66), 2**66)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.integers(-3, 9)
    )
    words = st.sampled_from(
        (*TYPES, *REFERENCES, *REGEXES, *KEYWORDS, "date", "ipv6", "a", "b")
    ) | st.text(max_size=9)
    leaves = st.none() | st.booleans() | numbers | words
    names = st.sampled_from((*KEYWORDS, "a", "b")) | st.text(max_size=3)

    def inside(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        free = st.dictionaries(names, inner, max_size=5) | st.lists(inner, max_size=5)
        by_name = st.dictionaries(st.sampled_from("abc") | st.text(max_size=3), inner, max_size=4)
        usual = st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), max_size=3),
                "properties": by_name,
                "patternProperties": st.dictionaries(regexes(), inner, max_size=2),
                "required": st.lists(st.sampled_from("abcz"), max_size=3),
                "items": inner,
                "anyOf": st.lists(inner, min_size=1, max_size=4),
                "oneOf": st.lists(inner, min_size=1, max_size=3),
                "allOf": st.lists(inner, min_size=1, max_size=3),
                "enum": st.lists(leaves, min_size=1, max_size=5),
                "pattern": regexes(),
                "minLength": st.integers(0, 5000),
                "maxLength": st.integers(0, 100_000),
                "minItems": st.integers(0, 2000),
                "maxItems": st.integers(0, 9000),
                "minimum": numbers,
                "maximum": numbers,
                "multipleOf": numbers,
                "$ref": st.sampled_from(REFERENCES),
                "$defs": by_name,
                "additionalProperties": inner | st.booleans(),
            },
        )
        return usual | free

    return st.recursive(leaves, inside, max_leaves=25)


def regexes() -> st.SearchStrategy[str]:
    pieces = st.sampled_from(
        (*REGEXES, "a", "b", "[^a]", ".", "\\d", "\\w", "é", "(?:", ")", "[", "]", "^", "$")
    )
    counts = st.sampled_from(
        ("", "*", "+", "?", "{2}", "{0,9}", "{3,}", "{99}", "{0,3000}", "??", "*+")
    )
    repeated = st.tuples(pieces, counts).map("".join)

    def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        several = st.lists(inner, min_size=1, max_size=4)
        return (
            several.map("".join)
            | several.map("|".join)
            | st.tuples(inner, counts).map(lambda x: f"({x[0]}){x[1]}")
        )

    return st.recursive(repeated, joined, max_leaves=10) | st.text(max_size=30)


def larks() -> st.SearchStrategy[str]:
    names = st.sampled_from(("start", "a", "b", "A", "B", "nothing"))
    atoms = names | st.sampled_from(
        ('"x"', '""', "/y*/", '"é"', "<|im_end|>", "<[3-9]>", "%json {}", "(", ")", '"')
    )
    counts = st.sampled_from(("", "*", "+", "?", "{2,5}", "{0,2000}"))
    bodies = st.lists(st.tuples(atoms, counts).map("".join), max_size=5).map(" ".join)
    rules = st.tuples(names, st.lists(bodies, min_size=1, max_size=4).map(" | ".join)).map(
        ": ".join
    )
    made = st.lists(rules, min_size=1, max_size=6).map(
        lambda lines: "\n".join(["start: a", *lines])
    )
    return (
        made
        | st.lists(st.sampled_from(GRAMMARS), min_size=1, max_size=3).map("\n".join)
        | st.text(max_size=60)
    )


SPECS: st.SearchStrategy[GrammarSpec] = st.one_of(
    *([schemas().map(lambda schema: GrammarSpec("json_schema", json.dumps(schema)))] * 3),
    schemas().map(
        lambda schema: GrammarSpec("json_schema", json.dumps(schema), any_whitespace=False)
    ),
    *([regexes().map(lambda text: GrammarSpec("regex", text))] * 2),
    larks().map(lambda text: GrammarSpec("lark", text)),
    larks().map(lambda text: GrammarSpec("gbnf", text.replace(": ", " ::= "))),
    st.lists(st.text(), min_size=1, max_size=20).map(
        lambda texts: GrammarSpec("choice", json.dumps(texts))
    ),
    st.tuples(schemas(), st.text(max_size=9), st.text(max_size=9)).map(
        lambda x: GrammarSpec(
            "structural_tag",
            json.dumps(
                {
                    "structures": [{"begin": x[1], "schema": x[0], "end": x[2]}],
                    "triggers": [x[1][:3]],
                }
            ),
        )
    ),
)


if __name__ == "__main__":
    main()
