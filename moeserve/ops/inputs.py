"""The inputs of a model in one step. A forward pass takes them as arguments and reads nothing else.

T tokens of the step, R rows (requests), S rows that sample, N blocks per row (padded with block 0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The KV cache of one layer: keys and values [num_blocks, block_size, G, entry width] (ops/kv_entries.py).

    Block 0 is the null block, which belongs to no request.
    """

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """The inputs of one KV group: where new keys and values go, and where those of earlier tokens lie."""

    slot_mapping_T: Tensor  # int64: block * block_size + offset of each new token
    blocks_RN: Tensor  # int64: block table of each row, padded with 0
    block_size: int
    window: int | None  # tokens that a query sees, itself included; None: all


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tokens and rows of one step.

    Rows are contiguous in T: row i owns tokens offsets_R1[i] .. offsets_R1[i+1]-1, at positions starts_R[i],
    starts_R[i]+1, ... The host arrays hold what loops and shapes need without asking the device; where a graph is
    recorded, they are those of the largest step that will replay it.

    rows_on_device: starts_R and offsets_R1, int32, for kernels. live: int32 [1] on the device, the number of tokens
    that rows own, the rest being padding; None: all. cut: ends a graph before attention and begins another one behind
    it; attention is planned and computed in between, for whichever step replays them. None: nothing is cut.
    """

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    groups: tuple[GroupInputs, ...]
    sample_S: Tensor  # int64: which of the T tokens feed the LM head
    offsets_R1: NDArray[np.int32]  # host
    starts_R: NDArray[np.int32]  # host: first position of each row's new tokens
    rows_on_device: tuple[Tensor, Tensor]
    live: Tensor | None = None
    cut: Cut | None = None


PlanRows = Callable[[StepInputs], Any]
Attend = Callable[[Tensor, Any, Tensor], Any]  # queries, the metadata of their rows, where the result goes
Cut = Callable[[Tensor, PlanRows, Attend], Tensor]
PlanAttention = Callable[[GroupInputs, StepInputs, int, int, int], Any]  # the integers: H, G, d


def from_host(plan: Callable[..., Any]) -> PlanAttention:
    """Wraps a planner that reads host arrays into one that takes the step's inputs."""
    return lambda group, step, *heads: plan(
        group.blocks_RN, group.block_size, group.window, step.starts_R, step.offsets_R1, *heads
    )
