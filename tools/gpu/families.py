"""Compare an engine's tokens on the card with those on the CPU, for every model family."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from moeserve import LLM, SamplingParams
from tests.checkpoints import write_checkpoint
from tests.families import FAMILIES
from tools.gpu.bench import Bench

PROMPTS = [[3 + (7 * i + j) % 250 for j in range(40 + 30 * i)] for i in range(3)]
NEW = 32
SMALL: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "dtype": "float32",
    "determinism": "full",
    "kv_cache_bytes": 16 << 20,
}


def run(bench: Bench) -> None:
    """Compare all families; a smoke run uses interpreted kernels in place of the card."""
    card: dict[str, Any] = (
        {"device": "cpu", "kernels": "triton"} if bench.smoke else {"device": "cuda"}
    )

    def compare(name: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="moeserve-model-") as folder:
            path = write_checkpoint(name, Path(folder)).path
            count, new = (1, 2) if bench.smoke else (len(PROMPTS), NEW)
            ours, theirs = (
                tokens(path, count, new, {**SMALL, **on}) for on in (card, {"device": "cpu"})
            )
        if ours != theirs:
            bench.found["wrong"].append(f"tokens of {name}")
        return {"name": name, "same": ours == theirs}

    bench.each("families", ("qwen3_moe",) if bench.smoke else FAMILIES, compare)


def tokens(path: Path, count: int, new: int, settings: dict[str, Any]) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    with LLM(str(path), **settings) as llm:
        answers = llm.generate(
            [{"prompt_token_ids": ids} for ids in PROMPTS[:count]], sampling, use_tqdm=False
        )
    return [list(answer.outputs[0].token_ids) for answer in answers]
