"""Tokens per second with and without speculation, in turns; and the cost of grammars.

    python -m benchmarks.speculation                       # everything: half an hour on two cores
    python -m benchmarks.speculation --what edits plain    # some cases
    python -m benchmarks.speculation --layers 2 --rounds 1 --tokens 32 --no-save     # a trial

Cases:

    edits    1.5b model, batch 1. Answers repeat a file of the prompt, with 1 token in 50, 20 or 10
             replaced. The model is made to give that acceptance
             (benchmarks/speculation_model.py), so the time per token at that acceptance is
             measured; real answers' acceptance is not. Target: 1.8 with 1 edit in 20.
    plain    Same model, batch 1, text that does not repeat. "random": random prompts and tokens.
             "misleading": tokens out of only 40, so that n-grams recur by chance and predict
             nothing. Target: 0.97 with auto.
    batches  Same model, batches of 8 and 32 with auto, edits and random. Target: 0.97.
    grammar  Same model, batch 32: a different JSON schema for each request, beside requests of as
             many tokens without one. Target: 0.97.
    demo     Demo model, batch 1: answers to prompts that ask for stories, at temperature 0.8 and
             greedy, with its MTP head (target: 1.4 with the best), n-grams and suffixes. Answers
             end where the model ends them.

All engines of a model are loaded at once; idle ones use no CPU. In every round all of them answer
the same requests and must give the same tokens. Prompts are in the prefix cache before timing
starts.

Prints and saves ratios to the engine without speculation in the same round (medians over the
rounds), and acceptance: accepted drafts over verified ones, by position.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import end_as_asked, parser, save
from benchmarks.speculation_model import CONFIG, LOOP, temperature_of, write_model
from moeserve import LLM, SamplingParams, StructuredOutputsParams

OFF = "off"
EDITS = {"1 edit in 50": 0.98, "1 edit in 20": 0.95, "1 edit in 10": 0.9}
STORIES = (
    "Tell me a story about a fox and a lantern.",
    "Tell me a short story about a cat.",
    "Tell me a story.",
    "Tell me a story about a girl and the sea.",
)
WHAT = ("edits", "plain", "batches", "grammar", "demo")


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    engines: Sequence[str]  # values of `speculate`; the first one is the base
    make: Callable[[int], list[tuple[list[int] | str, SamplingParams]]]  # requests of a round
    twice: bool = False  # compare one engine with and without grammar
    alone: bool = False  # send requests one after the other


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--what", nargs="+", choices=WHAT, default=WHAT)
    flags.add_argument(
        "--model", type=Path, help="folder of the 1.5b model, written if missing [temporary]"
    )
    flags.add_argument(
        "--layers",
        type=int,
        default=CONFIG["num_hidden_layers"],
        help="fewer for a trial [%(default)s]",
    )
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument(
        "--tokens", type=int, default=128, help="tokens of each answer [%(default)s]"
    )
    args = flags.parse_args()
    end_as_asked()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-") as folder:
        if set(args.what) - {"demo"}:
            model = args.model or Path(folder, "model")
            if not (model / "model.safetensors").is_file():
                write_model(model, args.layers)
            cases = [
                case for what in args.what if what != "demo" for case in cases_of(what, args.tokens)
            ]
            settings = {
                "max_model_len": 2048,
                "max_num_seqs": 32,
                "kv_cache_bytes": 3 << 30,
                "packed_cache": folder,
            }
            results |= measure(str(model), cases, args, settings)
        if "demo" in args.what:
            results |= measure("demo", demo_cases(args.tokens), args, {})
    save("speculation", args, results)


def cases_of(what: str, tokens: int) -> list[Case]:
    if what == "edits":
        engines: tuple[str, ...] = (OFF, "ngram:4", "ngram:8", "suffix", "auto")
        return [
            Case(f"edits: {name}", engines, edits(right, 1, tokens))
            for name, right in EDITS.items()
        ]
    if what == "plain":
        engines = (OFF, "ngram:4", "auto")
        return [
            Case("plain: random", engines, plain(1, tokens)),
            Case("plain: misleading", engines, plain(1, tokens, allowed=40)),
        ]
    if what == "batches":
        return [
            case
            for batch in (8, 32)
            for case in (
                Case(
                    f"batch {batch}: 1 edit in 20", (OFF, "auto"), edits(0.95, batch, tokens // 2)
                ),
                Case(f"batch {batch}: random", (OFF, "auto"), plain(batch, tokens // 2)),
            )
        ]
    return [Case("grammar: batch 32", (OFF,), with_schemas(32, tokens // 2), twice=True)]


def edits(
    right: float, batch: int, tokens: int
) -> Callable[[int], list[tuple[list[int] | str, SamplingParams]]]:
    """Make prompts that contain the whole loop, each starting from another token."""

    def make(number: int) -> list[tuple[list[int] | str, SamplingParams]]:
        rng = random.Random(f"edits {number}")
        starts = [rng.randrange(LOOP) for _ in range(batch)]
        temperature = temperature_of(right)
        return [
            (
                [(start + i) % LOOP for i in range(LOOP)],
                SamplingParams(
                    temperature=temperature,
                    seed=rng.randrange(2**40),
                    max_tokens=tokens,
                    ignore_eos=True,
                ),
            )
            for start in starts
        ]

    return make


def plain(
    batch: int, tokens: int, allowed: int | None = None
) -> Callable[[int], list[tuple[list[int] | str, SamplingParams]]]:
    """Make random prompts of 512 tokens; at temperature 2 answers are random too.

    `allowed` limits the tokens of both to so many.
    """

    def make(number: int) -> list[tuple[list[int] | str, SamplingParams]]:
        rng = random.Random(f"plain {number}")
        made: list[tuple[list[int] | str, SamplingParams]] = []
        for _ in range(batch):
            ids = [rng.randrange(LOOP, CONFIG["eos_token_id"]) for _ in range(allowed or 512)]
            params = SamplingParams(
                temperature=2.0,
                seed=rng.randrange(2**40),
                max_tokens=tokens,
                ignore_eos=True,
                allowed_token_ids=ids if allowed else None,
            )
            made.append((rng.choices(ids, k=512) if allowed else ids, params))
        return made

    return make


def with_schemas(
    batch: int, tokens: int
) -> Callable[[int], list[tuple[list[int] | str, SamplingParams]]]:
    """Make requests for JSON arrays of records that are too long to end within `tokens`."""

    def make(number: int) -> list[tuple[list[int] | str, SamplingParams]]:
        rng = random.Random(f"schemas {number}")
        made: list[tuple[list[int] | str, SamplingParams]] = []
        for i in range(batch):
            names = {
                f"name_{number}_{i}": {"type": "string"},
                "count": {"type": "integer"},
                "kind": {"enum": ["a", "b"]},
            }
            record = {
                "type": "object",
                "properties": names,
                "required": list(names),
                "additionalProperties": False,
            }
            schema = {"type": "array", "items": record, "minItems": tokens}
            params = SamplingParams(
                temperature=2.0,
                seed=rng.randrange(2**40),
                max_tokens=tokens,
                ignore_eos=True,
                structured_outputs=StructuredOutputsParams(json=schema),
            )
            made.append(([rng.randrange(CONFIG["eos_token_id"]) for _ in range(64)], params))
        return made

    return make


def demo_cases(tokens: int) -> list[Case]:
    """Return the demo's cases. Each round asks for all stories, one after the other."""

    def stories(
        temperature: float,
    ) -> Callable[[int], list[tuple[list[int] | str, SamplingParams]]]:
        return lambda number: [
            (
                f"<|im_start|>user\n{story}<|im_end|>\n<|im_start|>assistant\n",
                SamplingParams(temperature=temperature, seed=number, max_tokens=2 * tokens),
            )
            for story in STORIES
        ]

    engines = (OFF, "mtp:1", "mtp:2", "mtp:3", "mtp:4", "auto", "ngram:4", "suffix")
    return [
        Case("demo: stories", engines, stories(0.8), alone=True),
        Case("demo: greedy", engines, stories(0.0), alone=True),
    ]


def measure(
    model: str, cases: Sequence[Case], args: argparse.Namespace, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ratios and samples of each case."""
    results = {}
    with ExitStack() as stack:
        engines: dict[str, LLM] = {}
        for case in cases:
            for name in case.engines:
                if name not in engines:
                    speculate = None if name == OFF else name
                    engines[name] = stack.enter_context(LLM(model, speculate=speculate, **settings))
            results[case.name] = one_case(case, engines, args.rounds)
            shown = {name: row.get("ratio", row) for name, row in results[case.name].items()}
            print(case.name, shown, file=sys.stderr, flush=True)
    return results


def one_case(case: Case, engines: Mapping[str, LLM], rounds: int) -> dict[str, Any]:
    names = [OFF, "grammar"] if case.twice else list(case.engines)
    rates: dict[str, list[float]] = {name: [] for name in names}
    before = {name: drafts_of(engines[name]) for name in case.engines}
    same = True
    for number in range(-1, rounds):  # round -1 is the warm-up
        requests = case.make(number)
        answers = {}
        first = (number + 1) % len(names)
        for name in names[first:] + names[:first]:
            llm = engines[OFF if case.twice else name]
            mine = (
                [(prompt, without_grammar(params)) for prompt, params in requests]
                if name == OFF
                else requests
            )
            rate, answers[name] = rate_of(llm, mine, case.alone)
            if number >= 0:
                rates[name].append(rate)
        same = same and (case.twice or all(answer == answers[OFF] for answer in answers.values()))
    found: dict[str, Any] = {}
    for name in names:
        ratios = [rate / base for rate, base in zip(rates[name], rates[OFF], strict=True)]
        found[name] = {
            "tokens_per_s": round(median(rates[name]), 1),
            "ratio": round(median(ratios), 3),
        }
        found[name] |= {"ratios": [round(ratio, 3) for ratio in ratios], "samples": rates[name]}
        if not case.twice and name != OFF:
            found[name] |= acceptance(before[name], drafts_of(engines[name]))
    return found if case.twice else found | {"same_tokens": {"with all": same}}


def without_grammar(params: SamplingParams) -> SamplingParams:
    if params.structured_outputs is None:
        return params
    return SamplingParams(
        temperature=params.temperature,
        seed=params.seed,
        max_tokens=params.max_tokens,
        ignore_eos=True,
    )


def rate_of(
    llm: LLM, requests: Sequence[tuple[list[int] | str, SamplingParams]], alone: bool
) -> tuple[float, list[list[int]]]:
    """Return tokens per second, and the tokens.

    Prompts are prefilled and grammars compiled before timing starts.
    """
    prompts: list[Any] = [
        prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        for prompt, _ in requests
    ]
    asked = [params for _, params in requests]
    first = [
        SamplingParams(max_tokens=1, seed=0, structured_outputs=params.structured_outputs)
        for params in asked
    ]
    llm.generate(prompts, first, use_tqdm=False)
    began = time.perf_counter()
    if alone:
        done = [
            llm.generate([p], [params], use_tqdm=False)[0]
            for p, params in zip(prompts, asked, strict=True)
        ]
    else:
        done = llm.generate(prompts, asked, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = [list(answer.outputs[0].token_ids) for answer in done]
    return sum(map(len, tokens)) / seconds, tokens


def drafts_of(llm: LLM) -> tuple[list[int], list[int]]:
    return list(llm.stats.drafts), list(llm.stats.accepted_drafts)


def acceptance(
    before: tuple[list[int], list[int]], after: tuple[list[int], list[int]]
) -> dict[str, Any]:
    """Return how many drafts were verified between two counts, and the accepted share."""
    verified, right = (
        [a - b for a, b in zip_longest(new, old, fillvalue=0)]
        for old, new in zip(before, after, strict=True)
    )
    shares = [round(r / v, 3) if v else None for r, v in zip(right, verified, strict=True)]
    total = sum(verified)
    return {
        "drafts": total,
        "acceptance": round(sum(right) / total, 3) if total else None,
        "by_place": shares,
    }


if __name__ == "__main__":
    main()
