"""The inputs of a model in one step. A forward pass depends on its arguments alone.

Shapes: T tokens of the step, R rows (requests), S tokens to sample from, N blocks per row (padded
with block 0), G KV heads, d and v widths of a key and of a value.

A KV entry has the key or value of one head at one position, d elements. An int8 entry also has the
four bytes of its fp32 scale after the d integers, so code that copies or stores entries need not
handle scales. The native kernels use the same layout (csrc/kernels/rotary.hpp).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SCALE_BYTES = 4  # an fp32


# The cache of one layer: one tensor [num_blocks, block_size, heads, entry width] for each
# `CacheTensor` of its mixer. Block 0 is the null block, which belongs to no request.
LayerCache = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The attention heads of this rank.

    Absorbed MLA has one KV head, keys of rank + rope_dim elements and values of rank elements.
    """

    num_heads: int
    num_kv_heads: int
    dim: int  # width of queries and keys
    v_dim: int  # width of values and results


class RopeCacheInputs(NamedTuple):
    """The inputs of rope and of the KV write."""

    cos_T1d: Tensor  # rotary angles, for `rotary` of ops/elementwise.py
    sin_T1d: Tensor
    slot_mapping_T: Tensor  # may be shorter than T: the other tokens are padding


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """The inputs of one KV group: the slots of new tokens, and the block tables of requests."""

    slot_mapping_T: Tensor  # int64: block * block_size + offset of each new token
    blocks_RN: Tensor  # int64: block table of each row, padded with 0
    block_size: int
    window: int | None = None  # tokens that a query sees, including itself; None: all
    # A query sees the positions of its own chunk only; chunks have this many positions, counted
    # from 0 (Llama-4). None: all.
    chunk: int | None = None
    # A query also sees the later positions of its own block, of this many positions, counted from 0
    # (ops/block_attention.py). None: it sees none.
    diffusion_block: int | None = None


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions for rotary embeddings, int64 [A, T] with A axes.

    Text has one axis, a token's index in its request. Media may have more. KV cache, causality and
    sampling noise use the index in the request, never these positions.
    """

    rows_AT: Tensor

    @classmethod
    def of_text(cls, positions_T: Tensor) -> "Positions":
        """Return the positions of text tokens."""
        return cls(positions_T[None])

    @property
    def text_T(self) -> Tensor:
        """The positions [T], for rotary embeddings with one axis."""
        assert len(self.rows_AT) == 1, self.rows_AT.shape
        return self.rows_AT[0]

    def part(self, tokens: slice) -> "Positions":
        """Return the positions of a range of the tokens."""
        return Positions(self.rows_AT[:, tokens])


@dataclass(frozen=True, slots=True)
class EmbedPatch:
    """Hidden states [T, D] that a model takes in addition to token ids.

    A draft model merges the target's hidden states into its embeddings (`Decoder.merge`).
    """

    hidden_TD: Tensor

    def part(self, tokens: slice) -> "EmbedPatch":
        """Return the hidden states of a range of the tokens."""
        return EmbedPatch(self.hidden_TD[tokens])


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tokens of one step, by rows (requests).

    Row i has the tokens offsets_R1[i] to offsets_R1[i + 1] - 1, at the positions starts_R[i],
    starts_R[i] + 1, ... of its request. Host arrays are for loops and shapes, without a device
    sync. While a CUDA graph is captured, they are those of the largest step that may replay it.
    """

    ids_T: Tensor  # int64
    positions: Positions
    groups: tuple[GroupInputs, ...]
    logits_indices_N: Tensor  # int64: indices of the tokens whose hidden states feed the LM head
    offsets_R1: NDArray[np.int32]  # host
    starts_R: NDArray[np.int32]  # host: first position of each row's new tokens
    rows_on_device: tuple[Tensor, Tensor]  # starts_R and offsets_R1, int32, for kernels
    # int32 [1] on the device: number of tokens without padding; None: all T
    live: Tensor | None = None
    # Piecewise CUDA graphs: ends a graph before attention and begins another one after it, so that
    # each step that replays them plans and computes its own attention. None: no such graphs.
    graph_break: "GraphBreak | None" = None
    embeds: EmbedPatch | None = None
    # int64 [T, N]: column j has the id of the token j + 1 positions before each token, -1 before
    # the beginning of its request. None: the model does not read them.
    earlier_ids_TN: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowContext:
    """Facts about the rows [T'] of hidden states that a layer computes.

    Every linear layer gets it (ops/linear.py), so this is the place for anything that differs
    between rows.
    """

    num_tokens: int | Tensor  # the other rows are padding; int32 [1] if only the device knows it
    channel: int = 0  # of transfers between ranks: the number of the micro-batch
    ids_T: Tensor | None = None  # the token ids, int64, 0 for padding; None: not known

    def part(self, rows: slice) -> "RowContext":
        """Return the context of a range of the rows, without padding."""
        ids = None if self.ids_T is None else self.ids_T[rows]
        return RowContext(rows.stop - rows.start, self.channel, ids)

    def select(self, rows_S: Tensor) -> "RowContext":
        """Return the context of the rows with these indices, without padding."""
        ids = None if self.ids_T is None else self.ids_T.index_select(0, rows_S)
        return RowContext(len(rows_S), self.channel, ids)


PlanRows = Callable[[StepInputs], Any]  # step -> attention metadata
Attend = Callable[[Tensor, Any, Tensor], Any]  # (queries, metadata, output)
# (queries, plan, attend, columns of the output) -> output
GraphBreak = Callable[[Tensor, PlanRows, Attend, int], Tensor]
# Makes the attention metadata of a step, for all layers of a KV group with such heads.
PlanAttention = Callable[[GroupInputs, StepInputs, HeadShape], Any]


def entry_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements of one KV entry."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def to_entries(x_TGd: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert heads to KV entries [T, G, entry_width].

    int8 entries are quantized with a scale per head, its largest magnitude / 127. For example
    [0.5, -1.27] -> [50, -127] and the scale 0.01. A head with NaN or infinity becomes zeros with
    the scale NaN, so that attention to it is NaN, as it is without quantization.
    """
    if dtype != torch.int8:
        return x_TGd.to(dtype)
    x_TGd = x_TGd.float()
    largest_TG1 = x_TGd.abs().amax(-1, keepdim=True)
    scale_TG1 = torch.where(largest_TG1.isfinite(), largest_TG1 / 127, torch.nan)
    rounded_TGd = torch.where(scale_TG1 > 0, (x_TGd / scale_TG1).round().clamp(-127, 127), 0.0)
    return torch.cat((rounded_TGd.to(torch.int8), scale_TG1.view(torch.int8)), -1)


def from_entries(entries: Tensor) -> Tensor:
    """Convert int8 entries [..., d + 4] to fp32 [..., d]; return other entries unchanged."""
    if entries.dtype != torch.int8:
        return entries
    scales = entries[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return entries[..., :-SCALE_BYTES] * scales
