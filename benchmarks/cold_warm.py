"""Cold = warm: whether prefix hits and an MTP head change an answer, for each model family.

    python -m benchmarks.cold_warm                    # all families of tests/families.py
    python -m benchmarks.cold_warm deepseek_v4 qwen4_exp_text

Each family's small checkpoint answers 200 prompts greedily, first without a prefix cache (cold),
then with one that has most of each prompt (warm), and then both with the MTP head, if the family
has one. The cached parts have lengths of every class: shorter than a block, a whole number of
blocks, and one token more or less. Compared are tokens and the bits of their logprobs; with the
head, tokens.

Target: 0 different. Saves the counts, and the number of prompt tokens from the cache.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import parser, save
from moeserve import LLM, SamplingParams
from tests.checkpoints import write_checkpoint
from tests.diffusion import DIFFUSION, write_diffusion
from tests.families import FAMILIES
from tests.mtp import LAYER, write_mtp_checkpoint

BLOCK = 16
MAX_LEN = 256
NUM_CONVERSATIONS = 8  # with a common beginning each
COMMON: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": MAX_LEN}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("families", nargs="*", help="rows of tests/families.py [all]")
    flags.add_argument("--prompts", type=int, default=200)
    flags.add_argument("--max-tokens", type=int, default=16)
    args = flags.parse_args()
    names = args.families or sorted({*FAMILIES, *DIFFUSION})
    results = []
    for name in names:
        results.append(of_family(name, args))
        print(line_of(results[-1]), flush=True)
    different = sum(result["different"] + result.get("different_mtp", 0) for result in results)
    save("cold-warm", args, results, f"{len(results)} families, {different} different")


def of_family(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the counts of one family."""
    prompts = conversations(random.Random(name), args.prompts)
    result: dict[str, Any] = {
        "family": name,
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
    }
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-") as folder:
        path = Path(folder, "plain")
        path.mkdir()
        settings: dict[str, Any] = {}
        if name in DIFFUSION:
            write_diffusion(name, path)
        else:
            write_checkpoint(name, path)
            settings["logprobs"] = 1
        cold, _ = answers(path, prompts, args.max_tokens, warm=False, **settings)
        warm, result["cached_tokens"] = answers(path, prompts, args.max_tokens, **settings)
        result["different"] = num_different(cold, warm)
        if name in LAYER:
            path = Path(folder, "mtp")
            path.mkdir()
            write_mtp_checkpoint(name, path)
            cold, _ = answers(path, prompts, args.max_tokens, warm=False)
            result["different_mtp"] = 0
            for is_warm in (False, True):
                drafted, cached = answers(
                    path, prompts, args.max_tokens, warm=is_warm, speculate="mtp:3"
                )
                result["different_mtp"] += num_different(cold, drafted)
            result["cached_tokens_mtp"] = cached
    return result


def conversations(rng: random.Random, count: int) -> list[list[int]]:
    """Return prompts whose first parts are those of others, of every class of lengths."""
    beginnings = [[rng.randrange(3, 250) for _ in range(180)] for _ in range(NUM_CONVERSATIONS)]
    prompts = []
    for i in range(count):
        beginning = beginnings[i % NUM_CONVERSATIONS]
        blocks = rng.randrange(1, 11) * BLOCK
        shared = rng.choice([blocks - 1, blocks, blocks + 1, rng.randrange(1, 175)])
        own = [rng.randrange(3, 250) for _ in range(rng.choice([1, 2, 15, 16, 17, 40]))]
        prompts.append(beginning[:shared] + own)
    return prompts


def answers(
    path: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    warm: bool = True,
    logprobs: int | None = None,
    **settings: Any,
) -> tuple[list[Any], int]:
    """Return the answers, and how many tokens of prompts came from the cache.

    warm: answer all prompts once before, with a prefix cache.
    """
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs
    )
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    with LLM(str(path), enable_prefix_caching=warm, **COMMON, **settings) as llm:
        if warm:
            llm.generate(requests, params, use_tqdm=False)
        before = llm.stats.cached_prompt_tokens
        outputs = llm.generate(requests, params, use_tqdm=False)
        num_cached = llm.stats.cached_prompt_tokens - before
    return [bits(output.outputs[0]) for output in outputs], num_cached


def bits(answer: Any) -> Any:
    """Return the tokens and their logprobs."""
    rows = [(row.ids, row.values, row.rank) for row in answer.logprobs or ()]
    return list(answer.token_ids), rows


def num_different(expected: Sequence[Any], found: Sequence[Any]) -> int:
    """Return the number of answers that differ."""
    return sum(a != b for a, b in zip(expected, found, strict=True))


def line_of(result: dict[str, Any]) -> str:
    """Return one family's counts as text."""
    line = f"{result['family']:24} {result['different']} of {result['prompts']} different, "
    line += f"{result['cached_tokens']} tokens cached"
    if "different_mtp" in result:
        line += f"; with MTP {result['different_mtp']}, {result['cached_tokens_mtp']} cached"
    return line


if __name__ == "__main__":
    main()
