"""The bound on a forward pass's memory holds, and is not absurdly far off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.comm.members import Members
from moeserve.comm.tensor import side_by_side
from moeserve.comm.world import World
from moeserve.models.workspace import workspace_bytes

from .conftest import Driver, peak_bytes

RECURRENT = [
    "qwen3_next",
    "qwen3_5_moe",
    "kimi_linear",
    "qwen4_exp_text",
    "bailing_hybrid",
    "glm5_next",
    "minimax",
    "zaya",
]


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "count", "before"),
    [(1, 512, 0), (1, 100, 900), (200, 1, 30), (12, 1, 900), (6, 64, 500)],
)
def test_peak_stays_below_the_bound(
    rows: int, count: int, before: int, dtype: torch.dtype, make_checkpoint: Any
) -> None:
    checkpoint = make_checkpoint(
        "qwen3_moe", hidden_size=256, moe_intermediate_size=128, num_attention_heads=8
    )
    driver = Driver(checkpoint.path, dtype, num_blocks=3000)
    if before:
        for key in range(rows):
            driver.step([(key, [1] * before)])
    step = [(key, [5] * count) for key in range(rows)]
    peak = peak_bytes(lambda: driver.step(step))
    bound = workspace_bytes(driver.spec, rows * count, rows, before + count, dtype)
    assert peak <= bound, (peak, bound)


class Echo:
    """Every other rank has sent what this one has."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def join(self, members: Members) -> None:
        """Do nothing: there are no other ranks."""

    def leave(self) -> None:
        """Do nothing: there are no other ranks."""

    def gather_columns(self, x_TN: Tensor, channel: int) -> Tensor:
        return side_by_side(torch.stack([x_TN] * self.size))

    def gather_rows(self, x_TD: Tensor, counts: Sequence[int], channel: int) -> Tensor:
        return torch.cat([x_TD[:count] for count in counts])


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize(
    ("name", "tp_size"), [("qwen3_moe", 2), ("olmoe", 4), ("llama", 2), ("llama", 8)]
)
@pytest.mark.parametrize(("rows", "count", "before"), [(1, 512, 0), (200, 1, 30), (6, 64, 500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bound_holds_on_one_of_several_ranks(
    name: str,
    tp_size: int,
    rows: int,
    count: int,
    before: int,
    dtype: torch.dtype,
    make_checkpoint: Any,
) -> None:
    checkpoint = make_checkpoint(name, hidden_size=256, num_attention_heads=8, vocab_size=2000)
    check_one_rank(checkpoint, tp_size, rows, count, before, dtype)


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize(("rows", "count", "before"), [(1, 90, 0), (20, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bound_holds_with_recurrent_layers(
    name: str, rows: int, count: int, before: int, dtype: torch.dtype, make_checkpoint: Any
) -> None:
    """Only few tokens are used, since the reference processes them one by one."""
    check_one_rank(make_checkpoint(name), 2, rows, count, before, dtype)


def check_one_rank(
    checkpoint: Any, tp_size: int, rows: int, count: int, before: int, dtype: torch.dtype
) -> None:
    world = World(0, tp_size, tp_size, ep=False)
    driver = Driver(checkpoint.path, dtype, num_blocks=3000, world=world, tp=Echo(tp_size))
    if before:
        for key in range(rows):
            driver.step([(key, [1] * before)])
    peak = peak_bytes(lambda: driver.step([(key, [5] * count) for key in range(rows)]))
    # The driver asks for the logits of all tokens.
    bound = workspace_bytes(driver.spec, rows * count, rows * count, before + count, dtype, tp_size)
    assert peak <= bound, (peak, bound)


def test_bound_is_near_the_peak_of_a_large_prefill(make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint(
        "qwen3_moe", hidden_size=256, moe_intermediate_size=128, num_attention_heads=8
    )
    driver = Driver(checkpoint.path, num_blocks=3000)
    peak = peak_bytes(lambda: driver.step([(key, [1] * 1000) for key in range(8)]))
    bound = workspace_bytes(driver.spec, 8000, 8, 1000, torch.float32)
    assert peak <= bound < 4 * peak + (200 << 20), (peak, bound)
