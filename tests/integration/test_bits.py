"""Promise 1 through the whole engine: a request's tokens and logprob bits depend on nothing but
request and model.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve import LLM, SamplingParams
from moeserve.engine.blocks import groups_of
from moeserve.models.hf_config import read_model_spec
from moeserve.ops.native import native
from moeserve.runner import kv_cache
from moeserve.runner.base import DTYPES
from tests.families import FAMILIES, FEW
from tests.gguf_files import matrices, write_gguf

PROMPT = np.random.default_rng(11).integers(3, 256, 150).tolist()
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=20),
    SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        seed=3,
        max_tokens=24,
        ignore_eos=True,
        logprobs=20,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
    ),
]


@dataclass(frozen=True)
class Crowd:
    """Circumstances that must not matter. kv_blocks: so few that requests are preempted."""

    others: int
    chunk: int
    depth: int
    repeats: int = 1
    prefix_caching: bool = True
    kv_blocks: int | None = None

    def lengths(self, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """Return the lengths of the others' prompts and answers.

        With few KV blocks, prompts are short and answers long, so that blocks run out while they
        decode.
        """
        if self.kv_blocks is None:
            return rng.integers(1, 120, self.others).tolist(), rng.integers(
                1, 30, self.others
            ).tolist()
        return rng.integers(1, 8, self.others).tolist(), rng.integers(60, 90, self.others).tolist()

    def settings(self) -> dict[str, Any]:
        return {
            "prefill_chunk": self.chunk,
            "depth": self.depth,
            "enable_prefix_caching": self.prefix_caching,
            "max_num_seqs": 64,
            "max_model_len": 256,
            "watermark": 0.0,
        }


CROWDS = {
    "one token at a time, depth 1": Crowd(others=0, chunk=1, depth=1),
    "among 63, warm cache, chunks of 64": Crowd(others=63, chunk=64, depth=2, repeats=2),
    "preempted, chunks of 7": Crowd(others=12, chunk=7, depth=2, kv_blocks=32),
}


def prompt_of(tokens: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": tokens}


def bits(output: Any) -> list[Any]:
    """Return everything that must be equal.

    These are tokens, and the exact values of twenty logprobs each.
    """
    answer = output.outputs[0]
    return [answer.token_ids, [(row.ids, row.values, row.rank) for row in answer.logprobs]]


@functools.cache
def alone(path: Any, dtype: str, **more: Any) -> list[Any]:
    settings = {
        **more,
        "depth": 1,
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
        "max_model_len": 256,
    }
    with LLM(str(path), dtype=dtype, skip_tokenizer_init=True, **settings) as llm:
        return [bits(llm.generate(prompt_of(PROMPT), params)[0]) for params in PARAMS]


@pytest.mark.full("models", keep="each")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FEW)
def test_circumstances_do_not_change_a_bit(family: str, dtype: str, make_checkpoint: Any) -> None:
    check(make_checkpoint(family).path, dtype)


@pytest.mark.full("models", keep=2)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in FEW])
def test_nor_in_any_other_family(family: str, make_checkpoint: Any) -> None:
    check(make_checkpoint(family).path, "float32")


@pytest.mark.full("models", keep=2)
@pytest.mark.timeout(240)
@pytest.mark.skipif(native() is None, reason="needs the native kernels")
@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("qwen3_moe", "bfloat16", "int8"),
        ("qwen3_moe", "float32", "int4"),
        ("qwen3_moe", "bfloat16", "int4"),
        ("qwen3_next", "bfloat16", "int8"),
        ("deepseek_v32", "bfloat16", "int8"),
    ],
)
def test_nor_with_quantized_weights(
    family: str, dtype: str, quantization: str, make_checkpoint: Any
) -> None:
    path = make_checkpoint(family).path
    assert alone(path, dtype) != alone(path, dtype, quantization=quantization)
    check(path, dtype, quantization=quantization)


@pytest.mark.full("models", keep=1)
@pytest.mark.timeout(240)
@pytest.mark.skipif(native() is None, reason="needs the native kernels")
@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q6_K"), ("MXFP4",), ("Q5_K", "IQ4_XS"), ("Q4_K",), ("Q6_K",)]
)
def test_nor_of_a_gguf_file(kinds: tuple[str, ...], make_checkpoint: Any, tmp_path: Path) -> None:
    path = make_checkpoint(
        "qwen3_moe", hidden_size=256, moe_intermediate_size=256, head_dim=64
    ).path
    file = write_gguf("qwen3_moe", path, tmp_path / "model.gguf", matrices(*kinds))
    assert alone(file, "bfloat16") != alone(file, "bfloat16", activations="float")
    check(file, "bfloat16")


@pytest.mark.full("models", keep=2)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("family", "dtype", "kernels"),
    [
        ("qwen3_moe", "bfloat16", "auto"),
        ("qwen3", "bfloat16", "torch"),
        ("llama", "float32", "auto"),
        ("qwen3_next", "bfloat16", "auto"),
    ],
)
def test_nor_with_an_int8_cache(
    family: str, dtype: str, kernels: str, make_checkpoint: Any
) -> None:
    path = make_checkpoint(family).path
    settings = {"kv_cache_dtype": "int8", "kernels": kernels}
    assert alone(path, dtype, kernels=kernels) != alone(path, dtype, **settings)
    check(path, dtype, **settings)


def check(path: Any, dtype: str, **more: Any) -> None:
    expected = alone(path, dtype, **more)
    rng = np.random.default_rng(5)
    for name, crowd in CROWDS.items():
        settings = crowd.settings() | more
        if crowd.kv_blocks is not None:
            settings |= memory_of(
                crowd.kv_blocks, 2 * 16 + 1, path, dtype, more.get("kv_cache_dtype", "auto")
            )
        with LLM(str(path), dtype=dtype, skip_tokenizer_init=True, **settings) as llm:
            for _ in range(crowd.repeats):
                prompt_lens, answer_lens = crowd.lengths(rng)
                crowd_prompts = [rng.integers(3, 256, n).tolist() for n in prompt_lens]
                crowd_params = [
                    SamplingParams(temperature=0.7, max_tokens=n, ignore_eos=True)
                    for n in answer_lens
                ]
                at = (
                    crowd.others // 2 if crowd.kv_blocks is None else crowd.others
                )  # the last one is preempted first
                prompts = [*crowd_prompts[:at], PROMPT, PROMPT, *crowd_prompts[at:]]
                params = [*crowd_params[:at], *PARAMS, *crowd_params[at:]]
                outputs = llm.generate([prompt_of(p) for p in prompts], params)
                assert [bits(o) for o in outputs[at : at + 2]] == expected, name
            if crowd.kv_blocks is not None:
                assert llm.stats.preemptions > 0, (
                    "nothing was preempted: the test tries less than it says"
                )
            if crowd.repeats > 1:
                num_blocks = (len(PROMPT) - 1) // 16  # of either prompt in the second round
                assert llm.stats.cached_prompt_tokens >= 2 * 16 * num_blocks, "the cache was cold"


def block_bytes(
    path: Any, dtype: str, kv_cache_dtype: str = "auto", tp: int = 1, pool: int = 0
) -> int:
    spec = read_model_spec(path)
    cells = torch.int8 if kv_cache_dtype == "int8" else DTYPES[dtype]
    return kv_cache.block_bytes(groups_of(spec.kv_rules, 16), spec, cells, tp, pool=pool)


def memory_of(num_blocks: int, num_states: int, *model: Any) -> dict[str, Any]:
    """Settings that give a model so many KV blocks, and blocks of states if it has any."""
    blocks = num_blocks * block_bytes(*model)
    states = num_states * block_bytes(*model, pool=1)
    share = {"state_share": (states + 0.5) / (blocks + states)} if states else {}
    return {"kv_cache_bytes": blocks + states, **share}
