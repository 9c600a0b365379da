"""transformers' own engine (continuous batching, its grouped experts) on the shape that tools/gpu/engine.py measures.

    python -m tools.gpu.transformers_peer RESULT.json [--smoke]

A process of its own: its memory must come back. Decode is what many new tokens take longer than few, as there.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tools.gpu.engine import BATCHES, CONTEXT, FEW, MANY, QWEN3_30B_A3B, SMALL
from tools.gpu.process import run_module


def run(seconds: float, smoke: bool) -> dict[str, Any]:
    return run_module("tools.gpu.transformers_peer", seconds, *(["--smoke"] * smoke))


def main() -> None:
    result, smoke = Path(sys.argv[1]), "--smoke" in sys.argv
    import torch
    import transformers

    device, dtype = ("cpu", torch.float32) if smoke else ("cuda", torch.bfloat16)
    config = transformers.Qwen3MoeConfig(**(QWEN3_30B_A3B | (SMALL if smoke else {})))
    with torch.device(device):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", experts_implementation="grouped_mm"
        ).eval()
    found: dict[str, Any] = {"transformers": transformers.__version__}
    batches, context, few, many = ((1, 3), 20, 2, 6) if smoke else (BATCHES, CONTEXT, FEW, MANY)

    def seconds(batch: int, new: int) -> float:
        prompts = [random.choices(range(config.vocab_size), k=context) for _ in range(batch)]
        sampling = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
        begun_s = time.perf_counter()
        answers = model.generate_batch(prompts, generation_config=sampling)
        taken_s = time.perf_counter() - begun_s
        made = sum(len(answer.generated_tokens) for answer in answers.values())
        assert made == batch * new, (made, batch, new)
        return taken_s

    for batch in batches:
        seconds(batch, few)
        longer_s = statistics.median(-seconds(batch, few) + seconds(batch, many) for _ in range(1 if smoke else 3))
        found[f"decode_{batch}"] = {"tokens_per_s": batch * (many - few) / longer_s, "context": context}
        result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
