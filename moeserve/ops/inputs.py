"""The inputs of a model in one step. A forward pass takes them as arguments and reads nothing else.

T tokens of the step, R rows (requests), S rows that sample, N blocks per row (padded with block 0),
G KV heads, d and v widths of a key and of a value.

A KV entry holds the keys or values of one head at one position. An entry of a floating-point cache
is d elements. An int8 entry is d whole numbers and the four bytes of their fp32 scale, so code that
copies, moves or stores entries need not know of scales. The native kernels have the same layout
(csrc/kernels/rotary.hpp).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SCALE_BYTES = 4


# The cache of one layer: the tensors that its mixer names, [num_blocks, block_size, heads, entry
# width] each. Block 0 is the null block, which belongs to no request.
LayerCache = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of this rank that attention is planned for; queries are as wide as keys, results as
    values.

    Absorbed latent attention has one KV head, keys of rank + rope elements and values of rank.
    """

    num_heads: int
    num_kv_heads: int
    dim: int
    v_dim: int


class RopeCacheInputs(NamedTuple):
    """What the rotation and the KV write of a step's tokens read."""

    cos_T1d: Tensor  # as `rotary` of ops/elementwise.py takes them
    sin_T1d: Tensor
    slot_mapping_T: Tensor  # of the first tokens; the rest is padding


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """The inputs of one KV group: where new keys and values go, and where those of earlier tokens
    lie.
    """

    slot_mapping_T: Tensor  # int64: block * block_size + offset of each new token
    blocks_RN: Tensor  # int64: block table of each row, padded with 0
    block_size: int
    window: int | None = None  # tokens that a query sees, itself included; None: all
    chunk: int | None = (
        None  # a query sees its own part of so many positions, counted from 0 (Llama-4); None: all
    )


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions that rotary embeddings read, int64 [A, T].

    Text has one row, A = 1: a token's index in its request. Media may have a row for each axis.
    KV cache, causality and noise go by the index alone and never read these.
    """

    rows_AT: Tensor

    @classmethod
    def of_text(cls, positions_T: Tensor) -> "Positions":
        """Return the positions of text tokens."""
        return cls(positions_T[None])

    @property
    def text_T(self) -> Tensor:
        """The only row; for rotary embeddings with one axis."""
        assert len(self.rows_AT) == 1, self.rows_AT.shape
        return self.rows_AT[0]

    def part(self, tokens: slice) -> "Positions":
        """Return the positions of a range of the tokens."""
        return Positions(self.rows_AT[:, tokens])


@dataclass(frozen=True, slots=True)
class EmbedPatch:
    """Hidden states that enter the model beside token ids, one row for each token, [T, D].

    A drafter merges the target's hidden states into its embeddings (`Decoder.merge`).
    """

    hidden_TD: Tensor

    def part(self, tokens: slice) -> "EmbedPatch":
        """Return the rows of a range of the tokens."""
        return EmbedPatch(self.hidden_TD[tokens])


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tokens and rows of one step.

    Rows are contiguous in T: row i owns tokens offsets_R1[i] .. offsets_R1[i+1]-1, at positions
    starts_R[i], starts_R[i]+1, ... The host arrays serve loops and shapes without waiting for the
    device. Where a graph is recorded, they are those of the largest step that will replay it.
    """

    ids_T: Tensor  # int64
    positions: Positions
    groups: tuple[GroupInputs, ...]
    sample_N: Tensor  # int64: which of the T tokens feed the LM head
    offsets_R1: NDArray[np.int32]  # host
    starts_R: NDArray[np.int32]  # host: first position of each row's new tokens
    rows_on_device: tuple[Tensor, Tensor]  # starts_R and offsets_R1, int32, for kernels
    # int32 [1] on the device: tokens that rows own, the rest being padding. None: all of them.
    live: Tensor | None = None
    # Ends a graph before attention and begins another one behind it. Attention is planned and
    # computed in between, for whichever step replays them. None: no graph is cut.
    cut: "Cut | None" = None
    embeds: EmbedPatch | None = None


@dataclass(frozen=True, slots=True)
class RowContext:
    """What a step says of the rows [T'] of its hidden states.

    Every linear layer gets it (ops/linear.py), so whatever differs from row to row belongs here.
    """

    num_tokens: int | Tensor  # the rest is padding; int32 [1] where only the device knows it
    channel: int = 0  # of the gathers between ranks: the rows' micro-batch

    def part(self, rows: slice) -> "RowContext":
        """Return the context of a range of the rows, none of which is padding."""
        return RowContext(rows.stop - rows.start, self.channel)

    def select(self, rows_S: Tensor) -> "RowContext":
        """Return the context of the rows with these indices, none of which is padding."""
        return RowContext(len(rows_S), self.channel)


PlanRows = Callable[[StepInputs], Any]
Attend = Callable[
    [Tensor, Any, Tensor], Any
]  # queries, the metadata of their rows, where the result goes
Cut = Callable[[Tensor, PlanRows, Attend, int], Tensor]  # the integer: columns of the result
# Makes the attention metadata of a step, for all layers of one KV group that have such heads.
PlanAttention = Callable[[GroupInputs, StepInputs, HeadShape], Any]


def entry_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the elements of `dtype` in one KV entry."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def to_entries(x_TGd: Tensor, dtype: torch.dtype) -> Tensor:
    """Round heads to entries [T, G, entry_width]; int8 in multiples of the head's largest
    magnitude / 127.

    [0.5, -1.27] -> [50, -127] and 0.01. A head that is not finite becomes zeros with the scale NaN:
    what attends to it is NaN, as without rounding.
    """
    if dtype != torch.int8:
        return x_TGd.to(dtype)
    x_TGd = x_TGd.float()
    largest_TG1 = x_TGd.abs().amax(-1, keepdim=True)
    scale_TG1 = torch.where(largest_TG1.isfinite(), largest_TG1 / 127, torch.nan)
    whole_TGd = torch.where(scale_TG1 > 0, (x_TGd / scale_TG1).round().clamp(-127, 127), 0.0)
    return torch.cat((whole_TGd.to(torch.int8), scale_TG1.view(torch.int8)), -1)


def from_entries(entries: Tensor) -> Tensor:
    """Return int8 entries [..., d + 4] as fp32 [..., d], and entries of other types as they are."""
    if entries.dtype != torch.int8:
        return entries
    return entries[..., :-SCALE_BYTES] * entries[..., -SCALE_BYTES:].contiguous().view(
        torch.float32
    )
