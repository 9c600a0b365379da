"""A request's logit bits depend on nothing but the request: not on company, chunks, blocks, threads
or padding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.ops.native import native
from moeserve.ops.table import Choice

from .conftest import FAMILIES, FEW, Driver

MODULE: Any = native()
PROMPT = torch.randint(0, 256, (75,), generator=torch.Generator().manual_seed(1)).tolist()
ANSWER = [3, 141, 59, 26]


# For interpreted kernels: few heads and layers, as each token of a head is a program's turn. One
# family per mixer.
BOTH = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**BOTH, "linear_num_key_heads": 1, "linear_num_value_heads": 2},
    "kimi_linear": {**BOTH, "linear_num_heads": 1},
    "granite_moe_hybrid": {**BOTH, "mamba_n_heads": 4, "mamba_n_groups": 2},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "bailing_moe_linear_v2": {"num_hidden_layers": 3},
    "jamba": {"num_hidden_layers": 2},
}


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def alone(driver: Driver) -> Tensor:
    """Logits of every prompt position in one chunk, then of each answer token."""
    parts = [driver.prefill("needle", PROMPT)]
    parts += [driver.step([("needle", [token])])[0] for token in ANSWER]
    return torch.cat(parts)


def in_company(driver: Driver, others: int, chunk: int, seed: int) -> Tensor:
    """The same logits while `others` random sequences prefill, decode, leave and come, in random
    row order.
    """
    rng = np.random.default_rng(seed)
    next_other = 0
    live: list[int] = []
    parts: list[Tensor] = []
    at = 0
    while at < len(PROMPT) + len(ANSWER):
        whole = PROMPT[at : at + chunk] if at < len(PROMPT) else [ANSWER[at - len(PROMPT)]]
        rows: list[tuple[Any, list[int]]] = [("needle", whole)]
        while len(live) < others:
            live.append(next_other)
            next_other += 1
        for other in live:
            fresh = other not in driver.lengths
            count = int(rng.integers(1, 60)) if fresh else int(rng.choice([1, 1, 1, 1, 5, 9]))
            rows.append((other, rng.integers(0, 256, count).tolist()))
        order = rng.permutation(len(rows)).tolist()
        logits = driver.step([rows[i] for i in order])
        parts.append(logits[order.index(0)])
        at += len(whole)
        for other in [o for o in live if driver.lengths[o] > 90 or rng.random() < 0.1]:
            driver.drop(other)
            live.remove(other)
    return torch.cat(parts)


@functools.cache
def expected_of(path: Path, dtype: torch.dtype, kernels: Choice) -> Tensor:
    torch.set_num_threads(1)
    return alone(Driver(path, dtype, kernels=kernels))


def check(
    path: Path, dtype: torch.dtype, others: int, chunk: int, threads: int, kernels: Choice = "auto"
) -> None:
    expected = expected_of(path, dtype, kernels)
    assert expected.isfinite().all()
    torch.set_num_threads(threads)
    found = in_company(
        Driver(path, dtype, num_blocks=1024, kernels=kernels), others, chunk, seed=chunk
    )
    assert torch.equal(expected, found), (expected != found).any(-1).nonzero().flatten().tolist()


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize(("others", "chunk", "threads"), [(20, 64, 2), (63, 7, 1), (3, 1000, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_company_chunks_and_threads(
    name: str, dtype: torch.dtype, others: int, chunk: int, threads: int, make_checkpoint: Any
) -> None:
    check(make_checkpoint(name).path, dtype, others, chunk, threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2_moe", "olmoe"])
def test_token_by_token(name: str, dtype: torch.dtype, make_checkpoint: Any) -> None:
    check(make_checkpoint(name).path, dtype, 2, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_window_layers_beside_full_ones(dtype: torch.dtype, make_checkpoint: Any) -> None:
    types = ["full_attention", "sliding_attention"]
    checkpoint = make_checkpoint(
        "qwen3", layer_types=types, sliding_window=70, use_sliding_window=True
    )
    check(checkpoint.path, dtype, 9, 7, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_by_torch(dtype: torch.dtype, make_checkpoint: Any) -> None:
    check(make_checkpoint("qwen2_moe").path, dtype, 13, 40, 2, kernels="torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wider_model_with_odd_sizes(dtype: torch.dtype, make_checkpoint: Any) -> None:
    """Widths that are no multiple of a vector, six query heads on two KV heads, heads of 40."""
    checkpoint = make_checkpoint(
        "qwen3_moe",
        hidden_size=200,
        head_dim=40,
        num_attention_heads=6,
        moe_intermediate_size=72,
        vocab_size=301,
    )
    check(checkpoint.path, dtype, 25, 50, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_as_long_as_in_real_models(dtype: torch.dtype, make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint(
        "qwen3_moe", hidden_size=1536, moe_intermediate_size=1280, num_hidden_layers=1
    )
    check(checkpoint.path, dtype, 6, 50, 1)


@pytest.mark.parametrize("block_size", [4, 48, 128])
def test_block_size_does_not_matter(block_size: int, make_checkpoint: Any) -> None:
    path = make_checkpoint("qwen3_moe").path
    assert torch.equal(alone(Driver(path)), alone(Driver(path, block_size=block_size)))


@pytest.mark.parametrize("isa", MODULE.supported_isas() if MODULE else [])
@pytest.mark.parametrize("name", FEW)
def test_every_instruction_set_has_the_same_bits(name: str, isa: Any, make_checkpoint: Any) -> None:
    path = make_checkpoint(name).path
    expected = expected_of(path, torch.bfloat16, "auto")
    driver = Driver(path, torch.bfloat16, num_blocks=1024)
    best = MODULE.serving_isa()
    MODULE.use_isa(isa)
    try:
        assert torch.equal(in_company(driver, others=9, chunk=7, seed=1), expected)
    finally:
        MODULE.use_isa(best)


@pytest.fixture
def _ordered_dots() -> Iterator[None]:
    pytest.importorskip("triton")
    from tests.kernels.interpreted import ordered_dots

    with ordered_dots():
        yield


@pytest.mark.full("models")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels are not interpreted")
@pytest.mark.usefixtures("_ordered_dots")
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("qwen2_moe", {}),
        ("deepseek_v32", {"index_topk": 8}),
        ("mistral_large4", {"index_topk": 8}),
        *RECURRENT.items(),
    ],
)
def test_interpreted_triton_kernels(
    name: str, overrides: dict[str, Any], make_checkpoint: Any
) -> None:
    path = make_checkpoint(name, **overrides).path
    lone = Driver(path, kernels="triton")
    expected = torch.cat(
        [lone.prefill("needle", PROMPT[:20]), lone.step([("needle", ANSWER[:1])])[0]]
    )
    driver = Driver(path, kernels="triton")
    steps = [driver.step([("other", PROMPT[20:53]), ("needle", PROMPT[:13])])[1]]
    steps += [driver.step([("needle", PROMPT[13:20]), ("other", [1]), ("third", [2, 3])])[0]]
    steps += [driver.step([("third", [4]), ("needle", ANSWER[:1]), ("other", [5])])[1]]
    assert torch.equal(torch.cat(steps), expected)
