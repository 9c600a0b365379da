"""Decode rates of transformers' own engine on the shape of tools/gpu/engine.py.

It has continuous batching and grouped experts. As there, decode is the time of many new tokens less
that of few.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
import transformers

from tools.gpu.bench import Bench
from tools.gpu.engine import CONTEXT, FEW, MANY, config_of
from tools.gpu.models import BATCHES, ENGINES


def run(bench: Bench) -> None:
    bench.begin("start")
    config = transformers.Qwen3MoeConfig(**config_of(ENGINES["qwen3"], bench.smoke))
    with torch.device(bench.device):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=bench.dtype,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        ).eval()
    bench.found["transformers"] = transformers.__version__
    bench.end()
    batches, context, few, many = (
        ((1, 3), 20, 2, 6) if bench.smoke else (BATCHES, CONTEXT, FEW, MANY)
    )

    def seconds(batch: int, new: int) -> float:
        prompts = [random.choices(range(config.vocab_size), k=context) for _ in range(batch)]
        sampling = transformers.GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1
        )
        begun_s = time.perf_counter()
        answers = model.generate_batch(prompts, generation_config=sampling)
        taken_s = time.perf_counter() - begun_s
        made = sum(len(answer.generated_tokens) for answer in answers.values())
        assert made == batch * new, (made, batch, new)
        return taken_s

    def decode(batch: int) -> dict[str, Any]:
        seconds(batch, few)
        longer_s = statistics.median(
            -seconds(batch, few) + seconds(batch, many) for _ in range(1 if bench.smoke else 3)
        )
        return {"batch": batch, "tokens_per_s": batch * (many - few) / longer_s, "context": context}

    bench.each("decode", batches, decode)
