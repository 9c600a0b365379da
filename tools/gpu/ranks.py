"""Two ranks on one card, with and without dual-batch overlap, must give one rank's tokens.

Experts are sharded. The built-in model is used, because with dummy weights each rank draws its own
share, so two ranks would have other weights than one. A smoke run has CPU ranks over shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from moeserve import LLM, SamplingParams
from tools.gpu.bench import Bench

WAYS: Mapping[str, Mapping[str, Any]] = {
    "one rank": {},
    "two ranks": {"dp": 2, "dbo": "off"},
    "two ranks, two micro-batches": {"dp": 2, "dbo": "on"},
}
TOPICS = ("the sea", "a clock", "bread", "two ranks", "winter", "a door", "numbers", "the moon")
REQUESTS = 32
NEW = 48


def run(bench: Bench) -> None:
    """Record each way's tokens, their rate, and how much of the exchange is overlapped."""
    bench.each("ways", WAYS, lambda way: measured(way, bench.smoke))


def measured(way: str, smoke: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {"determinism": "full", "max_num_seqs": REQUESTS, **WAYS[way]}
    settings |= (
        {"device": "cpu", "threads": 1} if smoke else {"device": "cuda", "memory_utilization": 0.2}
    )
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
        stats = llm.stats.total
    ids = [list(answer.outputs[0].token_ids) for answer in answers]
    return {
        "way": way,
        "token_ids": ids,
        "tokens_per_s": count * new / seconds,
        "exchange_s": stats.comm_s,
        "exposed_exchange_s": stats.exposed_comm_s,
        "overlap": stats.overlap_efficiency,
    }
