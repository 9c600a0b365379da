"""Two ranks on one card: experts sharded, with dual-batch overlap and without, must give one rank's tokens.

    python -m tools.gpu.ranks RESULT.json [--smoke]

The built-in model: each rank draws dummy weights for its own share, so two ranks would not have those of one. --smoke:
CPU ranks over shared memory. A process of its own for each way, so that nothing of one is left for the next.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tools.gpu.process import run_module

WAYS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {"dp": 2, "dbo": "off"},
    "two ranks, two micro-batches": {"dp": 2, "dbo": "on"},
}
TOPICS = ("the sea", "a clock", "bread", "two ranks", "winter", "a door", "numbers", "the moon")
REQUESTS, NEW = 32, 48


def run(seconds: float, smoke: bool) -> dict[str, Any]:
    """Whether all ways give the same tokens, and how fast each is."""
    end_s, found = time.monotonic() + seconds, {}
    for way in WAYS:
        options = [way, *(["--smoke"] * smoke)]
        found[way] = run_module("tools.gpu.ranks", end_s - time.monotonic(), *options)
    tokens = [found[way].pop("token_ids", None) for way in WAYS]
    same = {way: mine is not None and mine == tokens[0] for way, mine in zip(WAYS, tokens, strict=True)}
    wrong = [way for way, is_same in same.items() if not is_same]
    return {"identical": same, "ways": found} | ({"wrong": wrong} if wrong else {})


def main() -> None:
    result, way, smoke = Path(sys.argv[1]), sys.argv[2], "--smoke" in sys.argv
    from moeserve import LLM, SamplingParams

    settings: dict[str, Any] = {"determinism": "full", "max_num_seqs": REQUESTS, **WAYS[way]}
    settings |= {"device": "cpu", "threads": 1} if smoke else {"device": "cuda", "memory_utilization": 0.2}
    if "dp" in settings:
        settings["all2all"] = "shm" if smoke else "cuda_ipc"
    count, new = (4, 6) if smoke else (REQUESTS, NEW)
    prompts = [f"Tell me about {TOPICS[i % len(TOPICS)]}. " * (1 + i % 5) for i in range(count)]
    sampling = SamplingParams(temperature=0.8, seed=7, max_tokens=new, ignore_eos=True)
    with LLM("demo", **settings) as llm:
        llm.generate(prompts, sampling, use_tqdm=False)
        begun_s = time.perf_counter()
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begun_s
    ids = [list(answer.outputs[0].token_ids) for answer in answers]
    result.write_text(json.dumps({"token_ids": ids, "tokens_per_s": count * new / seconds}))


if __name__ == "__main__":
    main()
