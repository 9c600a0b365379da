"""The whole engine with random weights of Qwen3-30B-A3B's shape: start to first token, prefill, decode, idle time.

    python -m tools.gpu.engine RESULT.json BEGUN

A process of its own, since its start counts (from BEGUN on, seconds since 1970) and its memory must come back.
Results are written after each measurement, so that a run that is cut short keeps what it has.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.gpu.process import run_module

if TYPE_CHECKING:
    from moeserve import LLM

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "vocab_size": 151_936,
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "eos_token_id": 151_645,
}  # fmt: skip
SMALL = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64,
    "eos_token_id": None, "dtype": "float32",
}  # fmt: skip
FP8_BLOCKS = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
CONTEXT, PREFILL, PROMPTS, ROUNDS = 1024, 4096, 16, 4
FEW, MANY = 64, 192  # new tokens of each request
BATCHES = (1, 64, 256)
STEP_TOKENS = 8192


def run(seconds: float, smoke: bool) -> dict[str, Any]:
    """Starts the process and waits so long; what it measured, and why it ended early if it did."""
    return run_module("tools.gpu.engine", seconds, repr(time.time()), *(["--smoke"] * smoke))


def main() -> None:
    result, begun_s, smoke = Path(sys.argv[1]), float(sys.argv[2]), "--smoke" in sys.argv
    context, prefill, prompts, batches = (20, 40, 2, (1, 3)) if smoke else (CONTEXT, PREFILL, PROMPTS, BATCHES)
    from moeserve import LLM, SamplingParams

    found: dict[str, Any] = {}

    def keep(**more: Any) -> None:
        found.update(more)
        result.write_text(json.dumps(found))

    with tempfile.TemporaryDirectory(prefix="moeserve-model-") as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN3_30B_A3B | (SMALL if smoke else {})))
        settings: dict[str, Any] = {} if smoke else {"max_num_batched_tokens": STEP_TOKENS}
        with LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
            max_model_len=max(prefill, context + MANY) + 16, **settings,
        ) as llm:  # fmt: skip
            llm.generate(random_prompts(llm, 1, 8), SamplingParams(max_tokens=1), use_tqdm=False)
            keep(start_to_first_token_s=time.time() - begun_s)
            for batch in batches:
                keep(**{f"decode_{batch}": decode(llm, batch, context)})
            taken = [generated(llm, prompts, prefill, 1)[0] for _ in range(ROUNDS)]
            keep(prefill={"tokens_per_s": prompts * prefill / min(taken[1:]), "samples_s": taken})
        for name, stored, quantization in (("fp8", FP8_BLOCKS, "none"), ("int4", {}, "int4")):
            narrow = {**QWEN3_30B_A3B, **(SMALL if smoke else {}), **stored}
            Path(folder, "config.json").write_text(json.dumps(narrow))
            with LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
                max_model_len=context + MANY + 16, quantization=quantization, determinism="batch", **settings,
            ) as llm:  # fmt: skip
                keep(**{f"{name}_alone_as_in_company": same_in_company(llm)})
                keep(**{f"{name}_decode_{batch}": decode(llm, batch, context) for batch in batches[:2]})
    keep(wrong=[name for name, value in found.items() if value is False])


def decode(llm: LLM, batch: int, context: int) -> dict[str, Any]:
    """What MANY new tokens take longer than FEW. Prefill delays the last requests in both alike, so the difference is
    of steps with the whole batch. Idle: the part of it that no step was on the device."""
    rounds = []
    for _ in range(ROUNDS):
        short_s, short_busy_s = generated(llm, batch, context, FEW)
        long_s, long_busy_s = generated(llm, batch, context, MANY)
        rounds.append((long_s - short_s, long_busy_s - short_busy_s))
    seconds, busy_s = sorted(rounds[1:])[(len(rounds) - 1) // 2]
    return {
        "tokens_per_s": batch * (MANY - FEW) / seconds, "idle_share": 1 - busy_s / seconds, "context": context,
        "samples_s": rounds,
    }  # fmt: skip


def same_in_company(llm: LLM) -> bool:
    """Whether a request gets the same tokens, and they the same log-probabilities, with others as without."""
    from moeserve import SamplingParams

    needle, *others = random_prompts(llm, 9, 40)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=24, logprobs=1, ignore_eos=True)
    alone, company = (llm.generate(prompts, params, use_tqdm=False)[0] for prompts in ([needle], [needle, *others]))
    found = [(one.outputs[0].token_ids, repr(one.outputs[0].logprobs)) for one in (alone, company)]
    return found[0] == found[1]


def generated(llm: LLM, batch: int, length: int, new: int) -> tuple[float, float]:
    """Seconds of a batch of new prompts, and how many of them the model ran."""
    from moeserve import SamplingParams

    prompts = random_prompts(llm, batch, length)
    before_s, begun_s = llm.stats.total.step_s, time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - begun_s, llm.stats.total.step_s - before_s


def random_prompts(llm: LLM, count: int, length: int) -> list[Any]:
    ids = range(llm.ready.vocab_size)
    return [{"prompt_token_ids": random.choices(ids, k=length)} for _ in range(count)]


if __name__ == "__main__":
    main()
