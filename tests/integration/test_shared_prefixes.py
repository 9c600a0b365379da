"""A tree of prompts that share prefixes of any length: what is found in the cache changes no bit,
states included.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from moeserve import LLM, SamplingParams

from .test_bits import bits, memory_of, prompt_of

CASES = [  # with room for so many KV blocks and states
    ("qwen3_next", 40, 19, {"prefill_chunk": 64, "max_num_seqs": 4, "host_store_bytes": 1 << 22}),
    ("granite_moe_hybrid", 30, 13, {"prefill_chunk": 5, "depth": 1}),
    ("kimi_linear", 60, 33, {"prefill_chunk": 24, "max_num_seqs": 16, "host_store_bytes": 1 << 20}),
    ("jamba", 60, 33, {"prefill_chunk": 100, "max_num_seqs": 16, "block_size": 32}),
    ("lfm2_moe", 30, 13, {"prefill_chunk": 16, "block_size": 64}),
    ("bailing_moe_v2_5", 200, 70, {"prefill_chunk": 7}),
    ("bailing_hybrid", 60, 33, {"prefill_chunk": 5}),
    ("glm5_next", 40, 19, {"prefill_chunk": 30, "host_store_bytes": 1 << 22}),
    ("hy_v4", 40, 0, {"prefill_chunk": 24}),
    ("qwen4_exp_text", 40, 19, {"prefill_chunk": 30, "host_store_bytes": 1 << 22}),
    ("deepseek_v4", 40, 19, {"prefill_chunk": 30, "host_store_bytes": 1 << 22}),
    ("deepseek_v32", 40, 0, {"prefill_chunk": 30, "host_store_bytes": 1 << 20}),
]


def tree(rng: random.Random) -> list[list[int]]:
    """Return prompts of up to 200 tokens that share prefixes.

    Many end, or branch off, at or next to the borders of tiles.
    """
    prompts: list[list[int]] = [[]]
    for _ in range(40):
        base = rng.choice(prompts)
        kept = rng.choice([len(base), len(base) // 16 * 16, rng.randrange(len(base) + 1)])
        more = rng.choice([1, 2, 15, 16, 17, 31, 32, 33, 48, 64, rng.randrange(1, 90)])
        prompts.append((base[:kept] + [rng.randrange(3, 256) for _ in range(more)])[:200])
    return prompts[1:] + rng.choices(prompts[1:], k=12)


@pytest.mark.full("models", keep=1)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("family", "num_blocks", "num_states", "settings"), CASES)
def test_what_is_cached_changes_no_bit(
    family: str, num_blocks: int, num_states: int, settings: dict[str, Any], make_checkpoint: Any
) -> None:
    path = make_checkpoint(family).path
    rng = random.Random(family)
    common = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
    }
    prompts = [prompt_of(prompt) for prompt in tree(rng)]
    params = [
        SamplingParams(
            temperature=rng.choice([0, 0.8]),
            seed=i,
            max_tokens=rng.choice([1, 2, 14, 16, 17, 30]),
            ignore_eos=True,
            logprobs=3,
        )
        for i in range(len(prompts))
    ]
    with LLM(str(path), enable_prefix_caching=False, **common) as llm:
        expected = [bits(output) for output in llm.generate(prompts, params)]
    blocks = settings.get("block_size", 16) // 16  # of 16 tokens: memory_of counts these
    memory = memory_of(blocks * num_blocks, blocks * num_states, path, "float32")
    found = []
    at = 0
    with LLM(str(path), watermark=0.0, **(common | memory | settings)) as llm:
        while at < len(prompts):
            until = at + rng.choice([1, 3, 8, 20])
            found += [bits(output) for output in llm.generate(prompts[at:until], params[at:until])]
            at = until
        assert llm.stats.cached_prompt_tokens > 500, "the test tries less than it says"
    assert [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b] == []
