"""Times of whole engines with random weights of published shapes.

Measured are start to first token, prefill, decode and idle time. Each engine has a process of its
own: its start counts from the start of the process, and its memory must be freed at the end.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from moeserve import LLM, SamplingParams
from tools.gpu.bench import Bench
from tools.gpu.models import ENGINES, SMALL, Engine, prompt_flops, step_bytes

CONTEXT = 1024
PREFILL = 4096
PROMPTS = 16
ROUNDS = 4
FEW = 64  # new tokens per request
MANY = 192
STEP_TOKENS = 8192
LEAST_CONTEXT = 128


def run(bench: Bench, name: str) -> None:
    engine = ENGINES[name]
    context, prefill, prompts, batches = CONTEXT, PREFILL, PROMPTS, engine.batches
    if bench.smoke:
        context, prefill, prompts, batches = 20, 40, 2, (1, 3)
    settings: dict[str, Any] = {
        **engine.settings,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": max(prefill, context + MANY) + 16,
        "max_num_seqs": max(batches),
    }
    settings |= {} if bench.smoke else {"max_num_batched_tokens": STEP_TOKENS}
    with tempfile.TemporaryDirectory(prefix="moeserve-model-") as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(engine, bench.smoke)))
        bench.begin("start")
        with LLM(folder, **settings) as llm:
            llm.generate(random_prompts(llm, 1, 8), SamplingParams(max_tokens=1), use_tqdm=False)
            bench.found["start_to_first_token_s"] = time.time() - psutil.Process().create_time()
            bench.found["kv_tokens"] = llm.ready.num_blocks * llm.ready.block_size
            bench.end()
            bench.each(
                "decode", batches, lambda batch: decode(llm, batch, context, Path(folder), engine)
            )
            if engine.prefill:
                flops = prompt_flops(Path(folder), prefill)
                bench.each(
                    "prefill", (prefill,), lambda length: prompt_rate(llm, prompts, length, flops)
                )
            if engine.alone:
                bench.each(
                    "alone as in company", ("",), lambda _: {"same": same_in_company(bench, llm)}
                )


def config_of(engine: Engine, smoke: bool) -> dict[str, Any]:
    return {**engine.config, **(SMALL | dict(engine.small) if smoke else {})}


def decode(llm: LLM, batch: int, context: int, folder: Path, engine: Engine) -> dict[str, Any]:
    """Return decode figures: the time of MANY new tokens less that of FEW.

    Prefill delays the last requests alike in both, so the difference has only steps of the whole
    batch. `idle_share` is the part of it in which the device ran no step. The context is shorter if
    the cache has no room for it.
    """
    room = llm.ready.num_blocks * llm.ready.block_size // batch - MANY - 2 * llm.ready.block_size
    if room < min(context, LEAST_CONTEXT):
        return {
            "batch": batch,
            "problem": f"the cache has room for {room} tokens of each request's prompt",
        }
    rounds = []
    context = min(context, room)
    for _ in range(ROUNDS):
        short_s, short_busy_s = generated(llm, batch, context, FEW)
        long_s, long_busy_s = generated(llm, batch, context, MANY)
        rounds.append((long_s - short_s, long_busy_s - short_busy_s))
    seconds, busy_s = sorted(rounds[1:])[(len(rounds) - 1) // 2]
    return {
        "batch": batch,
        "context": context,
        "tokens_per_s": batch * (MANY - FEW) / seconds,
        "idle_share": 1 - busy_s / seconds,
        "samples_s": rounds,
        "step_bytes": step_bytes(folder, engine.settings, batch, context + (FEW + MANY) // 2),
    }


def prompt_rate(llm: LLM, prompts: int, length: int, flops: float) -> dict[str, Any]:
    taken = [generated(llm, prompts, length, 1)[0] for _ in range(ROUNDS)]
    rate = prompts * length / min(taken[1:])
    return {
        "length": length,
        "tokens_per_s": rate,
        "tflop_s": rate * flops / 1e12,
        "samples_s": taken,
    }


def same_in_company(bench: Bench, llm: LLM) -> bool:
    """Return whether a request has the same tokens and log probabilities alone and in a batch."""
    needle, *others = random_prompts(llm, min(9, llm.ready.max_num_seqs), 40)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, logprobs=1, ignore_eos=True)
    alone, company = (
        llm.generate(prompts, params, use_tqdm=False)[0]
        for prompts in ([needle], [needle, *others])
    )
    found = [(one.outputs[0].token_ids, repr(one.outputs[0].logprobs)) for one in (alone, company)]
    if found[0] != found[1]:
        bench.found["wrong"].append("a request's bits alone and in company")
    return found[0] == found[1]


def generated(llm: LLM, batch: int, length: int, new: int) -> tuple[float, float]:
    """Return the seconds of a batch of new prompts, and those in which the model ran."""
    prompts = random_prompts(llm, batch, length)
    before_s = llm.stats.total.step_s
    begun_s = time.perf_counter()
    llm.generate(
        prompts, SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True), use_tqdm=False
    )
    return time.perf_counter() - begun_s, llm.stats.total.step_s - before_s


def random_prompts(llm: LLM, count: int, length: int) -> list[Any]:
    ids = range(llm.ready.vocab_size)
    return [{"prompt_token_ids": random.choices(ids, k=length)} for _ in range(count)]
