"""Computes n-gram embeddings (blocks/ngram_embedding.py). Norms, gates and sums are fp32.

Shapes: T tokens (including padding), D model width, S streams, C = S * D width of a token's
streams, E width of an embedding, H rows of the table that it consists of.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moeserve.blocks.build import Builder
from moeserve.blocks.gated_residual_layer import StreamNorms
from moeserve.blocks.linear import FP32
from moeserve.blocks.ngram_embedding import NgramEmbedding
from moeserve.errors import CheckpointError
from moeserve.loader.row_table import MemoryRows, Rows
from moeserve.ops.inputs import LayerCache, Positions, RowContext, StepInputs
from moeserve.ops.ngrams import NgramHash
from moeserve.ops.table import Ops

LEAST_GATE = 1e-6  # the least magnitude of which a square root is taken


@dataclass(frozen=True, slots=True, eq=False)
class NgramStep:
    """The inputs of one step: the plan of tiles, and the table's rows [T, H] without padding."""

    tiles: Any
    rows_TH: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PrepareNgrams:
    """Hashes a step's n-grams, and begins to read their rows."""

    ops: Ops
    group: int
    hash: NgramHash
    table: Rows

    def __call__(self, step: StepInputs, positions: Positions) -> NgramStep:
        assert step.earlier_ids_TN is not None, "a step without the ids of earlier tokens"
        rows_TH = self.hash(step.ids_T, step.earlier_ids_TN)
        self.table.prefetch(rows_TH)
        return NgramStep(self.ops.plan_tiles(step.groups[self.group], step), rows_TH)


class NgramEmbeddingLayer:
    """Looks up a token's n-grams, and returns what is added to all residual streams."""

    why_not_recordable = "rows of n-gram tables are read by the host"

    def __init__(self, spec: NgramEmbedding, build: Builder, name: str, group: int) -> None:
        """Build the layer. name: prefix of its parameters. group: its KV group."""
        self.spec = spec
        self.ops = build.ops
        self.table: Rows = build.slots.load((name + "ngram_table",), _as_rows, _replace)
        self.prepare = PrepareNgrams(build.ops, group, _hash(spec, build, name), self.table)
        self.inputs = build.linear(name + "ngram_in")  # E -> C + D: keys, values
        self.key_norm, self.query_norm, self.conv_norm = (
            StreamNorms(build, f"{name}norm_{part}", spec.streams)
            for part in ("key", "query", "conv")
        )
        self.conv_CK = build.fp32(name + "conv", self._dilated)

    def __call__(
        self, x_TC: Tensor, step: NgramStep, cache: LayerCache, context: RowContext
    ) -> Tensor:
        """Return what is added to the streams [T, C]. The convolution's inputs go to `cache`."""
        embedded_TE = self.table.read(step.rows_TH.flatten()).view(len(step.rows_TH), -1)
        padded_TE = pad(embedded_TE, (0, 0, 0, len(x_TC) - len(embedded_TE)))
        channels = self.spec.channels
        inputs = self.inputs(padded_TE, context)
        keys_TSD = self.key_norm(inputs[:, :channels].contiguous())
        scores_TS = _sum(keys_TSD * self.query_norm(x_TC)) / math.sqrt(keys_TSD.shape[2])
        roots_TS = scores_TS.abs().clamp_min(LEAST_GATE).sqrt() * scores_TS.sign()
        gates_TS = self.ops.sigmoid(roots_TS)
        values_TC = (gates_TS[:, :, None] * inputs[:, None, channels:].float()).flatten(1)
        normed_TC = self.conv_norm(values_TC).flatten(1)
        conv_TC = self.ops.causal_conv(normed_TC, self.conv_CK, None, True, cache, step.tiles)
        return (values_TC + conv_TC).to(x_TC.dtype)

    def _dilated(self, weight_C1K: Tensor) -> Tensor:
        """Return the kernel with zeros for the tokens in between."""
        kernel = weight_C1K.new_zeros((len(weight_C1K), self.spec.taps))
        kernel[:, :: self.spec.dilation] = weight_C1K[:, 0]
        return kernel

    @staticmethod
    def workspace(
        spec: NgramEmbedding, width: int, tokens: int, max_len: int, itemsize: int, tp_size: int
    ) -> int:
        """See `mixer_workspace`."""
        channels = spec.channels
        # Hashes and numbers of rows; the embedding, as read, in order and padded.
        num_bytes = tokens * len(spec.sizes) * 6 * FP32 * 2
        num_bytes += tokens * spec.embed_dim * 4 * itemsize
        # Keys and values, twice; the result.
        num_bytes += tokens * (3 * channels + 2 * width) * itemsize
        # In fp32: keys and queries (converted, normed, weighted), their product and its halves,
        # gated values, normed and convolved.
        return num_bytes + tokens * 12 * channels * FP32


def _as_rows(ops: Ops, table: Any) -> Rows:
    return MemoryRows(table) if isinstance(table, Tensor) else table


def _replace(table: Rows, pack: Any, ops: Ops, value: Any) -> None:
    """Put the rows of another checkpoint in the place of these."""
    table.replace(pack(ops, value))


def _hash(spec: NgramEmbedding, build: Builder, name: str) -> NgramHash:
    """Return the hash with the checkpoint's constants, or else with those of the specification.

    Raises CheckpointError if a row would not be in the table.
    """
    device = build.ops.device
    constants = []
    for part, values in spec.constants.items():
        if name + part in build.params:
            constants.append(build.slots.load((name + part,), lambda ops, value: value))
        else:
            constants.append(torch.tensor(values, device=device))
    multipliers, sizes, offsets = constants
    if (sizes < 1).any() or (offsets < 0).any() or (offsets + sizes > spec.rows).any():
        raise CheckpointError(
            f"{name}ple: the checkpoint's ngram_heads_vocab_sizes and ngram_heads_offsets lead "
            f"beyond the table of {spec.rows} rows; download it again"
        )
    return NgramHash(multipliers, sizes, offsets, spec.end_id)


def _sum(x_TSD: Tensor) -> Tensor:
    """Return the sum over the last dimension, [T, S], in an order that depends on D alone."""
    while (width := x_TSD.shape[-1]) > 1:
        half = -(-width // 2)
        x_TSD = x_TSD[..., :half] + pad(x_TSD[..., half:], (0, 2 * half - width))
    return x_TSD[..., 0]
