"""Cost of structured output: compiling grammars, and filling masks of a large vocabulary.

    python -m benchmarks.grammar [--tokenizer DIR]

Targets: a row's mask in 50 us (median over the steps of random answers), 32 tools compiled in 20
ms. Without a tokenizer the vocabulary is synthetic: 128,256 tokens of random words, signs and
characters.

Prints and saves microseconds for each grammar:

    check     the front end's check of a grammar that it has not seen
    compile   compiling it
    fill      the mask of one row
    accept    advancing the matcher by a token
    drafts    one call for a row and three drafts after it
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.common import parser, save
from moeserve.sampling import GrammarSpec
from moeserve.text.byte_bpe import ALPHABET_OF_BYTES
from moeserve.text.grammar import Grammars
from moeserve.text.grammar_check import GrammarChecker
from moeserve.text.tokenizer import Tokenizer

NUM_TOKENS = 128_000
SEPARATORS = ["", " ", " ", " ", "_", "\n", '"', ' "', "{", "},", ": ", "0", "12", "(", "="]
END = "<|end|>"


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--tokenizer", type=Path, help="a model directory; its first special token ends answers"
    )
    flags.add_argument(
        "--answers", type=int, default=6, help="random answers per grammar [%(default)s]"
    )
    args = flags.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer) if args.tokenizer else Tokenizer(synthetic(), {})
    added = tokenizer.backend.get_added_tokens_decoder()
    end = min(i for i, token in added.items() if token.special)
    size = tokenizer.backend.get_vocab_size()
    began = perf_counter()
    grammars = Grammars(tokenizer, size, [end], 2)
    checker = GrammarChecker(tokenizer, size, [end])
    vocabulary_s = perf_counter() - began
    checker.check(GrammarSpec("json_object"), "")  # starts the sandbox process
    results = {
        name: measure(spec, grammars, checker, end, args.answers) for name, spec in specs().items()
    }
    checker.close()
    save(
        "grammar",
        args,
        {"vocab_size": size, "vocabulary_s": round(vocabulary_s, 2), "grammars": results},
    )


def measure(
    spec: GrammarSpec, grammars: Grammars, checker: GrammarChecker, end: int, answers: int
) -> dict[str, Any]:
    times: dict[str, list[float]] = {
        name: [] for name in ("check", "compile", "fill", "accept", "drafts")
    }
    timed(times["check"], lambda: checker.check(spec, ""))
    for _ in range(5):
        timed(times["compile"], lambda: grammars.compile(spec))
    rng = random.Random(0)
    mask_RW = np.zeros((4, grammars.mask_words), np.int32)
    num_tokens = 0
    for _ in range(answers):
        matcher = grammars.matcher(spec)
        for step in range(200):
            timed(times["fill"], lambda matcher=matcher: matcher.fill(mask_RW[:1]))
            allowed = np.flatnonzero(np.unpackbits(mask_RW[0].view(np.uint8), bitorder="little"))
            ids = set(allowed[:256].tolist())
            closing = [end] if end in allowed else [byte for byte in b'"}],' if byte in ids]
            token = (
                rng.choice(closing)
                if closing and (step > 100 or rng.random() < 0.15)
                else int(rng.choice(allowed))
            )
            drafts = [token, *rng.choices(range(256), k=2)]
            timed(
                times["drafts"],
                lambda matcher=matcher, drafts=drafts: matcher.fill(mask_RW, drafts),
            )
            timed(times["accept"], lambda matcher=matcher, token=token: matcher.accept([token]))
            num_tokens += 1
            if token == end:
                break
    return {"tokens": num_tokens} | {
        f"{name}_us": percentiles(spent) for name, spent in times.items()
    }


def timed(spent: list[float], call: Any) -> None:
    began = perf_counter()
    call()
    spent.append(perf_counter() - began)


def percentiles(times: list[float]) -> dict[str, float]:
    """Return median, p90 and maximum in microseconds."""
    ordered = sorted(times)
    named = {
        "p50": ordered[len(ordered) // 2],
        "p90": ordered[len(ordered) * 9 // 10],
        "max": ordered[-1],
    }
    return {name: round(seconds * 1e6, 1) for name, seconds in named.items()}


def specs() -> dict[str, GrammarSpec]:
    """Return the grammars to measure, by name."""
    text = {"type": "string"}
    integer = {"type": "integer"}
    person = record(name=text, age=integer, tags={"type": "array", "items": text})
    node = record(value=text, children={"type": "array", "items": {"$ref": "#/$defs/node"}})
    kinds = (text, integer, {"type": "boolean"})
    calls = [
        record(
            name={"const": f"tool_{i}"},
            arguments=record(**{f"argument_{i}_{j}": kinds[j % 3] for j in range(6)}),
        )
        for i in range(32)
    ]
    schemas: dict[str, Any] = {
        "small object": person,
        "32 tools": {"anyOf": calls},
        "enum of 500": record(code={"enum": [f"value number {i}" for i in range(500)]}),
        "recursive": {"$ref": "#/$defs/node", "$defs": {"node": node}},
        "100 optional properties": record(**{f"p{i}": text for i in range(100)}) | {"required": []},
        "string of 100,000": record(s=text | {"maxLength": 100_000}),
    }
    made = {
        name: GrammarSpec("json_schema", json.dumps(schema)) for name, schema in schemas.items()
    }
    made["any object"] = GrammarSpec("json_object")
    made["regex"] = GrammarSpec("regex", r"([a-z]+ ){3,20}[0-9]{2}")
    made["choice of 500"] = GrammarSpec(
        "choice", json.dumps([f"choice number {i}" for i in range(500)])
    )
    return made


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def synthetic() -> Backend:
    """Return a byte-level tokenizer of random tokens, with the lengths and signs of real ones."""
    rng = random.Random(0)
    tokens = [bytes([byte]) for byte in range(256)]
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    weights = [1 / (i + 2) for i in range(26)]
    seen = set(tokens)
    while len(tokens) < NUM_TOKENS:
        word = rng.choice(SEPARATORS) + "".join(rng.choices(letters, weights, k=rng.randint(1, 9)))
        kind = rng.random()
        if kind < 0.05:
            word = "".join(chr(rng.randint(0x3B1, 0x9FFF)) for _ in range(rng.randint(1, 3)))
        elif kind < 0.08:
            word = str(rng.randint(0, 999))
        elif kind < 0.13:
            word += rng.choice(['"', '",', '":', ".", " "])
        if (token := word.encode()) not in seen:
            seen.add(token)
            tokens.append(token)
    names = {
        "".join(ALPHABET_OF_BYTES[byte] for byte in token): i for i, token in enumerate(tokens)
    }
    backend = Backend(models.BPE(vocab=names, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, *(f"<|special_{i}|>" for i in range(255))])
    return backend


if __name__ == "__main__":
    main()
