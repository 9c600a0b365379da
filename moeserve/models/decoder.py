"""The decoder of all model families: embedding, layers, final norm and LM head.

T: tokens. T': tokens, padded for the kernels. D: model width. V: vocabulary. S: rows to sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from moeserve.blocks.feed_forward_layer import FeedForwardLayer
from moeserve.blocks.mixer import MixerLayer, Prepare
from moeserve.blocks.norm import Norm
from moeserve.blocks.residual_layer import (
    AddNorm,
    ConnectionLayer,
    Junction,
    Reconnect,
    Residual,
    read,
)
from moeserve.blocks.weight_slots import WeightSlots
from moeserve.models.spec import ModelSpec
from moeserve.moe.layer import MoELayer
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import EmbedPatch, LayerCache, Positions, RowContext, StepInputs
from moeserve.ops.linear import LinearMethod
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, as described by `LayerSpec`."""

    mixer: MixerLayer  # attention or a recurrent block
    feed_forward: FeedForwardLayer | None
    attn_norm: Norm | None = None
    attn_post_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    parallel: bool = False  # both blocks read the same input
    scale: Tensor | None = None  # multiplies the residual stream after the layer
    reads_stream: bool = False  # the feed-forward block also reads the residual stream
    # The connections of both blocks, in models with several residual streams
    attn_connection: ConnectionLayer | None = None
    mlp_connection: ConnectionLayer | None = None


class Stream(NamedTuple):
    """The activations that are passed from layer to layer, each [T', D]."""

    x: Tensor  # the input of the next layer's mixer: the normed residual stream
    residual: Any  # the residual stream; `Residual` if the model has several
    # The residual streams before the layers `spec.aux_hidden_layers` that have run so far.
    aux: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The inputs that all layers of a step share."""

    prepared: dict[Prepare, Any]  # the mixers' shared inputs, by the function that made them
    context: RowContext
    ubatch: UBatch


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A range of a decoder's layers, which can be run by itself.

    After the last stage, `Stream.x` is normed by the final norm, as `Decoder.logits` expects it.
    """

    decoder: "Decoder"
    layers: range

    def __call__(
        self, stream: Stream, caches: Sequence[LayerCache], forward_pass: ForwardPass
    ) -> Stream:
        """Run the layers. caches: the layers' caches, to which the tokens' entries are written."""
        decoder = self.decoder
        aux_layers = decoder.spec.aux_hidden_layers
        x, residual, aux = stream
        ubatch = forward_pass.ubatch
        context = forward_pass.context
        for i, cache in zip(self.layers, caches, strict=True):
            layer = decoder.layers[i]
            if i in aux_layers:
                # A copy, because the next sum may be written to `residual`
                aux = (*aux, all_streams(residual).clone())
            prepared = forward_pass.prepared[layer.mixer.prepare]
            if layer.feed_forward is None:
                x = layer.mixer(x, prepared, cache, context)
            elif layer.parallel:
                mixed = layer.mixer(x, prepared, cache, context)
                x = layer.feed_forward(x, context, ubatch) + mixed
            else:
                x, residual = decoder.mix_and_add(
                    layer.mixer, decoder.inner[i], x, residual, prepared, cache, context
                )
                extra_inputs = (residual,) if layer.reads_stream else ()
                x = layer.feed_forward(x, context, ubatch, *extra_inputs)
            x, residual = decoder.add_to_stream(decoder.outer[i], x, residual)
        return Stream(x, residual, aux)


@dataclass(eq=False, repr=False)
class Decoder:
    """A model that is ready to run.

    The code is the same for all devices, numbers of ranks and micro-batches: `ops`, the layers and
    `ubatch` implement the differences.
    """

    spec: ModelSpec
    ops: Ops
    embed_VD: Tensor
    layers: Sequence[Layer]
    norm: Norm | None  # the final norm; None: `collapse` has normed its result
    head: LinearMethod  # the LM head
    embed_norm: Norm | None = None  # a norm of embeddings (Inkling)
    # For an MTP head: maps embeddings and the target model's hidden states, [T', D] each, to the
    # residual stream.
    merge: Callable[[Tensor, Tensor, RowContext], Tensor] | None = None
    # Reduces several residual streams to the input of the final norm
    collapse: ConnectionLayer | None = None
    # Where the model's parameters are. Set when the model is built.
    weight_slots: WeightSlots = field(init=False)

    def __post_init__(self) -> None:
        self._prepares = dict.fromkeys(layer.mixer.prepare for layer in self.layers)
        # Between a layer's two blocks (unused without a second block); after each layer
        self.inner = [self._inner_junction(layer) for layer in self.layers]
        self.outer = [self._outer_junction(i) for i in range(len(self.layers))]
        self.mix_and_add = self.ops.compile(_mix_and_add)
        self.add_to_stream = self.ops.compile(_add_to_stream)
        self._stages = self.stages(1)

    def stages(self, count: int) -> tuple[Stage, ...]:
        """Divide the layers into `count` ranges of about equal length."""
        total = len(self.layers)
        assert 1 <= count <= max(1, total), (count, total)
        borders = [total * i // count for i in range(count + 1)]
        return tuple(Stage(self, range(first, end)) for first, end in pairwise(borders))

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache], ubatch: UBatch) -> Tensor:
        """Return hidden states after the final norm, [T, D].

        If `spec.aux_hidden_layers` has n layers, their hidden states are appended as columns:
        [T, D * (1 + n * num_streams)].

        caches: the layers' caches, to which the tokens' entries are written.
        """
        num_tokens = inputs.ids_T.shape[0]
        stream, forward_pass = self.begin(inputs, ubatch)
        for stage in self._stages:
            stream = stage(stream, caches[stage.layers.start : stage.layers.stop], forward_pass)
        hidden = stream.x
        if aux_layers := self.spec.aux_hidden_layers:
            # `stream.aux` has the residual streams before the layers in `aux_layers`, in ascending
            # order. The one after the last layer is `stream.residual`: layer number `num_layers`.
            # If `aux_layers` does not have this number, `zip` drops `stream.residual`.
            last = all_streams(stream.residual)
            aux = dict(zip(sorted(aux_layers), (*stream.aux, last), strict=False))
            hidden = torch.cat((hidden, *(aux[layer] for layer in aux_layers)), 1)
        return hidden[:num_tokens]

    def begin(self, inputs: StepInputs, ubatch: UBatch) -> tuple[Stream, ForwardPass]:
        """Return the input of the first stage, and the inputs that all stages share."""
        num_tokens = inputs.ids_T.shape[0]
        ids = inputs.ids_T
        positions = inputs.positions
        target_hidden = inputs.embeds
        if extra := self.ops.pad_rows(num_tokens) - num_tokens:
            ids = pad(ids, (0, extra))
            positions = Positions(pad(positions.rows_AT, (0, extra)))
            if target_hidden is not None:
                target_hidden = EmbedPatch(pad(target_hidden.hidden_TD, (0, 0, 0, extra)))
        prepared = {prepare: prepare(inputs, positions) for prepare in self._prepares}
        context = RowContext(num_tokens if inputs.live is None else inputs.live, ubatch.index, ids)
        x, residual = self._embed(ids, target_hidden, context)
        return Stream(x, residual), ForwardPass(prepared, context, ubatch)

    def _embed(
        self, ids_T: Tensor, target_hidden: EmbedPatch | None, context: RowContext
    ) -> tuple[Tensor, Any]:
        """Embed padded tokens, and return (input of the first mixer, residual stream).

        target_hidden: the target model's hidden states, if this model is a drafter.
        """
        residual = self.ops.embedding(ids_T, self.embed_VD)
        if self.embed_norm is not None:
            residual = self.embed_norm(residual)
        if self.spec.embedding_scale != 1.0:
            residual = residual * self.spec.embedding_scale
        if self.merge is not None:
            assert target_hidden is not None
            residual = self.merge(residual, target_hidden.hidden_TD, context)
        first = self.layers[0]
        if first.attn_connection is not None:
            if self.merge is None:  # otherwise, `merge` has returned all streams
                residual = residual.repeat(1, self.spec.num_streams)
            return read(first.attn_connection, first.attn_norm, Residual(residual))
        x = residual if first.attn_norm is None else first.attn_norm(residual)
        return x, residual

    def _inner_junction(self, layer: Layer) -> Junction:
        """Return the junction between a layer's mixer and its feed-forward block."""
        if layer.attn_connection is not None and layer.mlp_connection is not None:
            return Reconnect(layer.attn_connection, layer.mlp_connection, layer.mlp_norm)
        return AddNorm(layer.mlp_norm, layer.attn_post_norm, self.spec.residual_scale)

    def _outer_junction(self, index: int) -> Junction:
        """Return the junction that follows a layer. It ends with the next layer's first norm, or
        the final norm.
        """
        layer = self.layers[index]
        is_last = index + 1 == len(self.layers)
        norm = self.norm if is_last else self.layers[index + 1].attn_norm
        before = layer.attn_connection if layer.feed_forward is None else layer.mlp_connection
        if before is None:
            return AddNorm(norm, layer.mlp_post_norm, self.spec.residual_scale, layer.scale)
        after = self.collapse if is_last else self.layers[index + 1].attn_connection
        assert after is not None, "all blocks have connections, or none has one"
        return Reconnect(before, after, norm)

    @property
    def why_not_recordable(self) -> str | None:
        """Why no CUDA graph can record `forward`; None if one can.

        A recorded `forward` must never wait for the device, and must accept a number of tokens that
        only the device knows.
        """
        if not self.ops.triton:
            return "only Triton kernels can be recorded, and this model uses others"
        of_experts = (why for layer in self.moe_layers if (why := layer.why_not_recordable))
        return next(of_experts, None) or self.why_mixers_not_recordable

    @property
    def why_mixers_not_recordable(self) -> str | None:
        """Why no CUDA graph can record one of the mixers; None if one can."""
        # Most mixers do not have this attribute.
        reasons = (getattr(layer.mixer, "why_not_recordable", None) for layer in self.layers)
        return next((why for why in reasons if why), None)

    @property
    def moe_layers(self) -> list[MoELayer]:
        """The layers with experts, in order."""
        blocks = [getattr(layer.feed_forward, "moe", layer.feed_forward) for layer in self.layers]
        return [block for block in blocks if isinstance(block, MoELayer)]

    def serve(self, ubatch: UBatch) -> None:
        """Run this rank's experts for the other ranks, in a step in which it has no tokens."""
        for layer in self.moe_layers:
            # The embedding is only an example of the width, dtype and device of rows.
            layer.serve(self.embed_VD, ubatch)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Return logits, fp32 [S, V].

        With tensor parallelism, this gathers columns with the transfers of micro-batch 0, so no
        micro-batch may run at the same time.
        """
        rows = hidden_SD.shape[0]
        if not rows:
            return hidden_SD.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        extra = self.ops.pad_rows(rows) - rows
        padded = pad(hidden_SD, (0, 0, 0, extra)) if extra else hidden_SD
        logits_SV = self.head(padded, RowContext(rows))[:rows].float()
        if self.spec.logits_divisor != 1.0:
            logits_SV = logits_SV / self.spec.logits_divisor
        if self.spec.logits_cap:
            logits_SV = self.ops.soft_cap(logits_SV, self.spec.logits_cap)
        return logits_SV


def all_streams(residual: Any) -> Tensor:
    """Return the residual stream [T', D], or all streams [T', C]."""
    return residual.streams_TC if isinstance(residual, Residual) else residual


def _mix_and_add(
    mixer: MixerLayer,
    junction: Junction,
    x: Tensor,
    residual: Any,
    prepared: Any,
    cache: LayerCache,
    context: RowContext,
) -> tuple[Tensor, Any]:
    """Run the mixer and the junction after it."""
    return junction(mixer(x, prepared, cache, context), residual)


def _add_to_stream(junction: Junction, x: Tensor, residual: Any) -> tuple[Tensor, Any]:
    """Run the junction after a layer."""
    return junction(x, residual)
