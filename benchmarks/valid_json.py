"""Counts invalid answers under JSON schemas.

    python -m benchmarks.valid_json [--speculate SPEC]

Target: 0 of 2,000. The demo model answers ten requests, at temperatures from 0 to 1.5, for each of
the 200 schemas in tests/text/schemas.py (recursive, enums of 500, patterns, unions, $ref, unicode).
Answers cut by max_tokens are counted apart and are not invalid. Some requests are repeated alone,
to check that the batch does not change the answer. With --speculate, answers are compared with
those without speculation.

Prints and saves the counts and some invalid answers.
"""

from __future__ import annotations

import json
import random
from time import perf_counter
from typing import Any

import jsonschema

from benchmarks.common import parser, save
from moeserve import LLM, SamplingParams, StructuredOutputsParams
from tests.text.schemas import generated

PROMPTS = ("Once upon a time", "A fox and a lantern:", "{", "The answer is")
TEMPERATURES = (0.0, 0.5, 1.0, 1.0, 1.5)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--per-schema", type=int, default=10, help="requests per schema [%(default)s]"
    )
    flags.add_argument("--max-tokens", type=int, default=400, help="[%(default)s]")
    flags.add_argument("--speculate", default="", help="as of `moeserve serve`")
    args = flags.parse_args()
    requests = [
        (schema, request(schema, n, args.max_tokens))
        for schema in generated()
        for n in range(args.per_schema)
    ]
    settings = {"speculate": args.speculate} if args.speculate else {}
    texts, results = measure(requests, settings)
    if settings:
        plain, _ = measure(requests, {})
        results["different from those without speculation"] = sum(map(differ, texts, plain))
    save("valid-json", args, results)


def request(schema: dict[str, Any], n: int, max_tokens: int) -> tuple[str, SamplingParams]:
    rng = random.Random(f"{json.dumps(schema)} {n}")
    whitespace: dict[str, Any] = (
        {"disable_any_whitespace": True} if n % 5 else {"whitespace_pattern": " ?"}
    )
    constraint = StructuredOutputsParams(json=schema, **whitespace)
    extra: dict[str, Any] = (
        {"top_p": 0.9} if n % 3 == 0 else {"repetition_penalty": 1.1} if n % 3 == 1 else {}
    )
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=rng.choice(TEMPERATURES),
        seed=n,
        structured_outputs=constraint,
        **extra,
    )
    return rng.choice(PROMPTS), params


def measure(
    requests: list[tuple[Any, tuple[str, SamplingParams]]], settings: dict[str, Any]
) -> Any:
    """Return the answers and the counts."""
    prompts, params = zip(*(asked for _, asked in requests), strict=True)
    with LLM("demo", max_model_len=512, **settings) as llm:
        began = perf_counter()
        answers = [
            out.outputs[0] for out in llm.generate(list(prompts), list(params), use_tqdm=False)
        ]
        seconds = perf_counter() - began
        few = range(0, len(requests), 97)
        alone = [llm.generate(prompts[i], params[i], use_tqdm=False)[0].outputs[0] for i in few]
    invalid = [
        {"schema": schema, "text": answer.text, "why": why}
        for (schema, _), answer in zip(requests, answers, strict=True)
        if answer.finish_reason == "stop" and (why := fault(schema, answer.text))
    ]
    found = {
        "schemas": len({json.dumps(schema) for schema, _ in requests}),
        "requests": len(requests),
        "invalid": len(invalid),
        "cut by max_tokens": sum(answer.finish_reason == "length" for answer in answers),
        "different when asked alone": sum(map(differ, alone, (answers[i] for i in few))),
        "asked alone": len(alone),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "seconds": round(seconds, 1),
        "examples": invalid[:5],
    }
    return answers, found


def fault(schema: dict[str, Any], text: str) -> str:
    """Return why an answer is invalid, or ""."""
    try:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0][:200]
    return ""


def differ(one: Any, other: Any) -> bool:
    return bool(one.token_ids != other.token_ids or one.finish_reason != other.finish_reason)


if __name__ == "__main__":
    main()
