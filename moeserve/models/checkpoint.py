"""How families name their tensors, and the one weight plan that all of them share.

D model width, V vocabulary, E experts, e local experts, I expert width, F inner width of a dense MLP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from moeserve.loader.plan import Param, Piece, WeightPlan
from moeserve.loader.spec import ModelSpec
from moeserve.parallel.world import World


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """One spelling of the routed experts, relative to `model.layers.N.`; `{}` is the expert's id.

    gate, up, down: one tensor per expert. gate_up, down: all experts in one tensor, [E, 2I, D] and [E, D, I].
    """

    down: str
    gate: str = ""
    up: str = ""
    gate_up: str = ""


PER_EXPERT = ExpertNames(
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
)
FUSED = ExpertNames(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj")


@dataclass(frozen=True, slots=True)
class Names:
    """What a family calls its MoE tensors; everything else is called alike everywhere.

    experts: the spellings that its checkpoints use, the usual one first. router: likewise.
    """

    experts: tuple[ExpertNames, ...] = (PER_EXPERT, FUSED)
    router: tuple[str, ...] = ("mlp.gate.weight",)


def weight_plan(spec: ModelSpec, names: Names, present: Collection[str], world: World | None = None) -> WeightPlan:
    """Every parameter of the decoder and the copies that fill it from a checkpoint with the tensors `present`.

    Parameters: embed, norm, lm_head (unless tied) and per layer attn_norm, qkv, q_norm, k_norm, out, mlp_norm, then
    gate_up and down, or router, w13, w2, shared_gate_up, shared_down, shared_gate; biases end in _bias.
    """
    builder = _Builder(spec, names, present, (world or World()))
    builder.add("embed", (spec.vocab_size, spec.hidden_size), "model.embed_tokens.weight")
    builder.add("norm", (spec.hidden_size,), "model.norm.weight")
    if not spec.tie_embeddings:
        builder.add("lm_head", (spec.vocab_size, spec.hidden_size), "lm_head.weight")
    for layer in range(spec.num_layers):
        builder.attention(layer)
        if layer < len(spec.moe_layers) and spec.moe_layers[layer]:
            builder.experts(layer)
        else:
            builder.dense_mlp(layer)
    ignored = {name for name in present if name.endswith("rotary_emb.inv_freq")}
    if spec.tie_embeddings:
        ignored.add("lm_head.weight")
    return WeightPlan(tuple(builder.params), tuple(builder.pieces), frozenset(ignored | builder.elsewhere))


class _Builder:
    """Collects parameters and pieces, layer by layer."""

    def __init__(self, spec: ModelSpec, names: Names, present: Collection[str], world: World) -> None:
        self.spec = spec
        self.names = names
        self.present = present
        self.local = world.experts_of(spec.num_experts)
        self.params: list[Param] = []
        self.pieces: list[Piece] = []
        self.elsewhere: set[str] = set()  # experts of other ranks

    def add(self, param: str, shape: tuple[int, ...], source: str) -> None:
        """A parameter that is one tensor of the checkpoint."""
        self.params.append(Param(param, shape))
        self.pieces.append(Piece(source, shape, param))

    def stack(self, param: str, sources: list[tuple[str, int]], *tail: int) -> None:
        """A parameter made of several tensors along the first dimension: (name, rows) of each, then other sizes."""
        self.params.append(Param(param, (sum(rows for _, rows in sources), *tail)))
        start = 0
        for source, rows in sources:
            self.pieces.append(Piece(source, (rows, *tail), param, at=(slice(start, start + rows),)))
            start += rows

    def attention(self, layer: int) -> None:
        spec, ours, theirs = self.spec, f"layers.{layer}.", f"model.layers.{layer}."
        width, heads, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows = [("q", heads), ("k", kv), ("v", kv)]
        self.add(ours + "attn_norm", (width,), theirs + "input_layernorm.weight")
        self.stack(ours + "qkv", [(f"{theirs}self_attn.{x}_proj.weight", n) for x, n in rows], width)
        if spec.qkv_bias:
            self.stack(ours + "qkv_bias", [(f"{theirs}self_attn.{x}_proj.bias", n) for x, n in rows])
        if spec.qk_norm != "none":
            per_head = spec.qk_norm == "head"
            for x, n in rows[:2]:
                shape = (spec.head_dim if per_head else n,)
                self.add(f"{ours}{x}_norm", shape, f"{theirs}self_attn.{x}_norm.weight")
        self.add(ours + "out", (width, heads), theirs + "self_attn.o_proj.weight")
        if spec.out_bias:
            self.add(ours + "out_bias", (width,), theirs + "self_attn.o_proj.bias")
        self.add(ours + "mlp_norm", (width,), theirs + "post_attention_layernorm.weight")

    def dense_mlp(self, layer: int) -> None:
        self._gated(f"layers.{layer}.", f"model.layers.{layer}.mlp.", self.spec.intermediate_size, self.spec.mlp_bias)

    def _gated(self, ours: str, theirs: str, inner: int, bias: bool) -> None:
        width = self.spec.hidden_size
        rows = [("gate", inner), ("up", inner)]
        self.stack(ours + "gate_up", [(f"{theirs}{x}_proj.weight", n) for x, n in rows], width)
        self.add(ours + "down", (width, inner), theirs + "down_proj.weight")
        if bias:
            self.stack(ours + "gate_up_bias", [(f"{theirs}{x}_proj.bias", n) for x, n in rows])
            self.add(ours + "down_bias", (width,), theirs + "down_proj.bias")

    def experts(self, layer: int) -> None:
        spec, ours, theirs = self.spec, f"layers.{layer}.", f"model.layers.{layer}."
        width = spec.hidden_size
        router = next((n for n in self.names.router if theirs + n in self.present), self.names.router[0])
        self.add(ours + "router", (spec.num_experts, width), theirs + router)
        self.params.append(Param(ours + "w13", (len(self.local), 2 * spec.expert_size, width)))
        self.params.append(Param(ours + "w2", (len(self.local), width, spec.expert_size)))
        self.pieces.extend(self._expert_pieces(ours, theirs, self._spelling(theirs)))
        if spec.shared_expert_size:
            self._gated(ours + "shared_", theirs + "mlp.shared_expert.", spec.shared_expert_size, bias=False)
            self.add(ours + "shared_gate", (1, width), theirs + "mlp.shared_expert_gate.weight")

    def _spelling(self, theirs: str) -> ExpertNames:
        for names in self.names.experts:
            if theirs + names.down.format(0) in self.present:
                return names
        return self.names.experts[0]  # the loader will say which of these are missing

    def _expert_pieces(self, ours: str, theirs: str, names: ExpertNames) -> Iterator[Piece]:
        spec, local = self.spec, self.local
        width, inner, total = spec.hidden_size, spec.expert_size, spec.num_experts
        if names.gate_up:
            here = (slice(local.start, local.stop),) if len(local) < total else ()
            yield Piece(theirs + names.gate_up, (total, 2 * inner, width), ours + "w13", take=here)
            yield Piece(theirs + names.down, (total, width, inner), ours + "w2", take=here)
            return
        for expert in range(total):
            gate, up, down = (theirs + name.format(expert) for name in (names.gate, names.up, names.down))
            if expert not in local:
                self.elsewhere.update((gate, up, down))
                continue
            slot = expert - local.start
            yield Piece(gate, (inner, width), ours + "w13", at=(slot, slice(0, inner)))
            yield Piece(up, (inner, width), ours + "w13", at=(slot, slice(inner, 2 * inner)))
            yield Piece(down, (width, inner), ours + "w2", at=(slot,))
