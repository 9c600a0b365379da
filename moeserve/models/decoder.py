"""The decoder of every family here: embed, layers of a mixer and an MLP or experts, norm, LM head.

T tokens, rounded up to T' rows for the kernels; D model width, V vocabulary, S rows that sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.blocks.feed_forward_layer import FeedForwardLayer
from moeserve.blocks.mixer import MixerLayer
from moeserve.blocks.norm import Norm
from moeserve.models.spec import ModelSpec
from moeserve.moe.layer import MoELayer
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import LayerCache, StepInputs
from moeserve.ops.linear import Linear
from moeserve.ops.table import Ops


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; see `LayerSpec`. reads_stream: the feed-forward block takes the residual
    stream, too.
    """

    mixer: MixerLayer
    feed_forward: FeedForwardLayer | None
    attn_norm: Norm | None = None
    attn_post_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    parallel: bool = False
    scale: Tensor | None = None
    reads_stream: bool = False


@dataclass(eq=False, repr=False)
class Decoder:
    """A model ready to run. `ops`, the layers and the micro-batch hide devices, ranks and
    micro-batches.

    head: scores of the whole vocabulary. merge: of a drafter, makes the residual stream of
    embeddings and another model's hidden states, [T', D] each.
    """

    spec: ModelSpec
    ops: Ops
    embed_VD: Tensor
    layers: Sequence[Layer]
    norm: Norm
    head: Linear
    merge: Callable[[Tensor, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        self._prepares = dict.fromkeys(layer.mixer.prepare for layer in self.layers)
        self._mix, self._add = self.ops.trace(self._mix_and_add), self.ops.trace(self._add_up)

    def forward(
        self,
        step: StepInputs,
        caches: Sequence[LayerCache],
        ubatch: UBatch,
        hidden_TD: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states after the final norm, [T, D].

        With `spec.aux_hidden_layers` their hidden states follow on the right: [T, D * (1 + n)].
        caches: of the layers; the tokens' entries are written to them. hidden_TD: what `enter`
        takes beside tokens.
        """
        ops = self.ops
        aux_layers = self.spec.aux_hidden_layers
        num_tokens = step.ids_T.shape[0]
        extra = ops.pad_rows(num_tokens) - num_tokens
        ids, positions = (
            torch.nn.functional.pad(x, (0, extra)) if extra else x
            for x in (step.ids_T, step.positions_T)
        )
        prepared = {prepare: prepare(step, positions) for prepare in self._prepares}
        real = num_tokens if step.live is None else step.live
        if hidden_TD is not None and extra:
            hidden_TD = torch.nn.functional.pad(hidden_TD, (0, 0, 0, extra))
        x, residual = self.enter(ids, hidden_TD)
        aux = {}
        norms = *(layer.attn_norm for layer in self.layers[1:]), self.norm
        for i, (layer, cache, norm) in enumerate(zip(self.layers, caches, norms, strict=True)):
            if i in aux_layers:
                aux[i] = residual.clone()  # adding to the stream may write to its memory
            prepare = prepared[layer.mixer.prepare]
            if layer.feed_forward is None:
                x = layer.mixer(x, prepare, cache, ubatch.index)
            elif layer.parallel:
                mixed = layer.mixer(x, prepare, cache, ubatch.index)
                x = layer.feed_forward(x, real, ubatch) + mixed
            else:
                x, residual = self._mix(layer, x, residual, prepare, cache, ubatch.index)
                x = layer.feed_forward(
                    x, real, ubatch, *((residual,) if layer.reads_stream else ())
                )
            x, residual = self._add(x, residual, layer.mlp_post_norm, norm, layer.scale)
        if aux_layers:
            aux[len(self.layers)] = residual
            x = torch.cat((x, *(aux[layer] for layer in aux_layers)), 1)
        return x[:num_tokens]

    def enter(self, ids_T: Tensor, hidden_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (input of the first block, residual stream). hidden_TD: what `merge` takes."""
        residual = self.ops.embedding(ids_T, self.embed_VD)
        if self.spec.embedding_scale != 1.0:
            residual = residual * self.spec.embedding_scale
        if self.merge is not None:
            assert hidden_TD is not None
            residual = self.merge(residual, hidden_TD)
        first = self.layers[0].attn_norm
        return residual if first is None else first(residual), residual

    @property
    def not_recorded(self) -> str | None:
        """Why no CUDA graph can record `forward`; None if it never waits for the device, and
        accepts padding whose extent only the device knows."""
        if not self.ops.triton:
            return "not all kernels that serve can be recorded"
        return next((why for layer in self.moe_layers if (why := layer.not_recorded)), None)

    @property
    def moe_layers(self) -> list[MoELayer]:
        """The layers with experts, in order."""
        blocks = [getattr(layer.feed_forward, "moe", layer.feed_forward) for layer in self.layers]
        return [block for block in blocks if isinstance(block, MoELayer)]

    def serve(self, ubatch: UBatch) -> None:
        """Takes part in a step in which this rank has no tokens: its experts compute for other
        ranks.
        """
        for layer in self.moe_layers:
            layer.serve(self.embed_VD, ubatch)

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Returns every token's score, fp32 [S, V]. Gathers on channel 0: no micro-batch may run
        meanwhile.
        """
        rows = hidden_SD.shape[0]
        if not rows:
            return hidden_SD.new_empty((0, self.spec.vocab_size), dtype=torch.float32)
        extra = self.ops.pad_rows(rows) - rows
        padded = torch.nn.functional.pad(hidden_SD, (0, 0, 0, extra)) if extra else hidden_SD
        logits_SV = self.head(padded)[:rows].float()
        if self.spec.logits_divisor != 1.0:
            logits_SV = logits_SV / self.spec.logits_divisor
        return (
            self.ops.soft_cap(logits_SV, self.spec.logits_cap)
            if self.spec.logits_cap
            else logits_SV
        )

    def _mix_and_add(
        self, layer: Layer, x: Tensor, residual: Tensor, step: Any, cache: LayerCache, channel: int
    ) -> tuple[Tensor, Tensor]:
        """Computes a layer from behind its first norm to behind its second one."""
        return self._add_up(
            layer.mixer(x, step, cache, channel),
            residual,
            layer.attn_post_norm,
            layer.mlp_norm,
            None,
        )

    def _add_up(
        self,
        x: Tensor,
        residual: Tensor,
        post_norm: Norm | None,
        norm: Norm | None,
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (input of the next block, residual stream), the stream with a block's output x
        added.

        post_norm: of x. norm: of the next block. scale: of the layer.
        """
        if post_norm is not None:
            x = post_norm(x)
        if self.spec.residual_scale != 1.0:
            x = x * self.spec.residual_scale
        if norm is not None and scale is None:
            return norm.add(x, residual)
        total = x + residual
        if scale is not None:
            total = (total * scale).to(total.dtype)
        return total if norm is None else norm(total), total
