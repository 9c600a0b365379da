"""The MTP head of a model with several residual streams (see models/mtp.py).

At position p it reads s_p, the model's S residual streams after its last layer, and the token at
p + 1. Its own streams begin with

    n = norm(s_p), over all streams together (Qwen3.8) or of each stream (DeepSeek-V4)
    x_i = V norm(embedding of token p + 1) + W n_i,  for each stream i

Its layer has the model's connections, and it has a `collapse` of its own, whose result the LM head
turns into logits for the token at p + 2. To draft more tokens, the head runs again with its own
streams.

Source: SGLang's Qwen4ExpForCausalLMMTP, vLLM's Qwen4ExpMultiTokenPredictor and DeepSeekV4MTP.

T: tokens. S: streams. D: model width. C = S * D.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import pad

from moeserve.blocks.build import Builder
from moeserve.blocks.kinds import build_connection
from moeserve.blocks.linear import ColumnLinear
from moeserve.blocks.norm import Norm
from moeserve.blocks.residual_layer import Residual
from moeserve.blocks.weights import MTPNames, WeightPlan
from moeserve.loader.load_plan import LoadPlan
from moeserve.models.build import build_layer, build_norm
from moeserve.models.decoder import Decoder
from moeserve.models.load_plan import plan_layer
from moeserve.models.spec import ModelSpec
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import LayerCache, RowContext, StepInputs


@dataclass(frozen=True, slots=True, eq=False)
class MergeStreams:
    """Computes the streams with which the head begins, x above."""

    embed_norm: Norm
    hidden_norm: Norm  # over C or D elements
    embed_product: ColumnLinear  # V
    hidden_product: ColumnLinear  # W

    def __call__(self, embedded_TD: Tensor, streams_TC: Tensor, context: RowContext) -> Tensor:
        """Return [T, C] from embeddings and the streams before."""
        count, width = embedded_TD.shape
        token_T1D = self.embed_product(self.embed_norm(embedded_TD), context)[:, None]
        normed = self.hidden_norm(streams_TC.reshape(-1, len(self.hidden_norm.weight_D)))
        rows = normed.view(-1, width)
        products = self.hidden_product(rows, RowContext(len(rows), context.channel))
        return (products.view(count, -1, width) + token_T1D).flatten(1)


class StreamsMTP(Decoder):
    """An MTP head that is ready to run. It reads and returns all residual streams."""

    def forward(self, inputs: StepInputs, caches: Sequence[LayerCache], ubatch: UBatch) -> Tensor:
        """Return the streams after the layer, [T, C]."""
        return super().forward(inputs, caches, ubatch)[:, self.spec.hidden_size :]

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Return logits, fp32 [T, V], from streams [T, C]."""
        assert self.collapse is not None
        rows = len(hidden_SD)
        padded = pad(hidden_SD, (0, 0, 0, self.ops.pad_rows(rows) - rows))
        collapsed, _ = self.collapse.read(Residual(padded))
        if self.norm is not None:
            collapsed = self.norm(collapsed)
        return super().logits(collapsed[:rows])

    @staticmethod
    def combine(aux_TA: Tensor) -> Tensor:
        """Return the model's streams, which are its only auxiliary hidden states."""
        return aux_TA


def with_streams_mtp(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the head as drafter. It reads the streams after the last layer."""
    assert spec.mtp is not None
    return replace(spec.with_drafter((spec.mtp,)), aux_hidden_layers=(spec.num_layers,))


def plan_streams_mtp(
    spec: ModelSpec, plan: WeightPlan, names: MTPNames, present: Collection[str]
) -> LoadPlan:
    """Add the head's parameters to an empty plan, and finish it.

    The parameters are embed_norm, hidden_norm, embedding.merge (V), hidden.merge (W), and those of
    its layer and of `collapse`.
    """
    (layer,) = spec.draft_layers
    assert spec.collapse is not None
    width = spec.hidden_size
    begin = names.begin
    plan.add("embed_norm", (width,), f"{begin}{names.embed_norm}.weight")
    normed = width if names.per_stream else spec.num_streams * width
    plan.add("hidden_norm", (normed,), f"{begin}{names.hidden_norm}.weight")
    for part, name in zip(("embedding", "hidden"), names.merge_parts, strict=True):
        plan.add(f"{part}.merge", (width, width), f"{begin}{name}.weight", sharded=True)
    if spec.has_final_norm:
        plan.add("norm", (width,), f"{begin}{names.norm}.weight")
    plan_layer(plan, spec, layer, "layer.", names.layer, names.layer)
    spec.collapse.plan(plan, "collapse_", begin)
    return plan.finish(present)


def build_streams_mtp(spec: ModelSpec, build: Builder, model: Decoder) -> Decoder:
    """Build the head of `model`."""
    merge = MergeStreams(
        embed_norm=build_norm(build, spec, "embed_norm"),
        hidden_norm=build_norm(build, spec, "hidden_norm"),
        embed_product=build.columns("embedding.merge", spec.hidden_size),
        hidden_product=build.columns("hidden.merge", spec.hidden_size),
    )
    head = StreamsMTP(
        replace(spec, aux_hidden_layers=(1,)),  # the streams after the only layer
        build.ops,
        model.embed_VD,
        layers=[build_layer(build, spec, spec.draft_layers[0], "layer.", group=0)],
        norm=build_norm(build, spec, "norm") if spec.has_final_norm else None,
        head=model.head,
        merge=merge,
        collapse=build_connection(spec.collapse, build, "collapse_"),
    )
    build.slots.finish()
    head.weight_slots = build.slots
    return head
