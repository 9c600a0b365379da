"""The load plan that all families share: every parameter of the decoder, and the copies that fill it.

D model width, V vocabulary, E experts, e local experts, I expert width, F inner width of a dense MLP.

A tensor-parallel rank holds output columns only (rows of the weights here), never a part of the inputs that a sum runs
over: the heads of qkv, and equal shares of out, gate_up, down and lm_head (`share`: those of the last ranks may be
smaller).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from moeserve.comm.tensor import share
from moeserve.comm.world import World
from moeserve.loader.load_plan import LoadPlan, Param, Piece
from moeserve.loader.spec import ModelSpec, local_heads
from moeserve.models.family import ExpertNames, Names
from moeserve.models.registry import FAMILIES
from moeserve.moe.placement.placement import Placement


def load_plan(
    spec: ModelSpec, present: Collection[str], world: World | None = None, placement: Placement | None = None
) -> LoadPlan:
    """Returns every parameter of the decoder and the copies that fill it from a checkpoint with the tensors `present`.

    placement: the experts of this rank, in order (default: `Placement.initial`). Raises ConfigError when the heads
    cannot be shared out.

    Parameters: embed, norm, lm_head (unless tied) and per layer attn_norm, qkv, q_norm, k_norm, out, mlp_norm, then
    gate_up and down, or router, w13, w2, shared_gate_up, shared_down, shared_gate; biases end in _bias.
    """
    world = world or World()
    if placement is None:
        placement = Placement.initial(sum(spec.moe_layers), max(1, spec.num_experts), world.num_expert_ranks)
    builder = _Builder(spec, present, world, placement)
    builder.add("embed", (spec.vocab_size, spec.hidden_size), "model.embed_tokens.weight")
    builder.add("norm", (spec.hidden_size,), "model.norm.weight")
    if not spec.tie_embeddings:
        builder.add("lm_head", (spec.vocab_size, spec.hidden_size), "lm_head.weight", sharded=True)
    for layer in range(spec.num_layers):
        builder.attention(layer)
        if spec.has_experts(layer):
            builder.experts(layer)
        else:
            builder.gated(f"layers.{layer}.", f"model.layers.{layer}.mlp.", spec.intermediate_size, bias=spec.mlp_bias)
    ignored = {name for name in present if name.endswith("rotary_emb.inv_freq")}
    if spec.tie_embeddings:
        ignored.add("lm_head.weight")
    return LoadPlan(tuple(builder.params), tuple(builder.pieces), frozenset(ignored | builder.elsewhere))


def expert_load_plan(spec: ModelSpec, present: Collection[str], moe_layer: int, experts: Sequence[int]) -> LoadPlan:
    """Plans some experts of one MoE layer (counted among the MoE layers), in order: w13 and w2."""
    theirs = f"model.layers.{[i for i, moe in enumerate(spec.moe_layers) if moe][moe_layer]}."
    w13 = Param("w13", (len(experts), 2 * spec.expert_size, spec.hidden_size))
    w2 = Param("w2", (len(experts), spec.hidden_size, spec.expert_size))
    spelling = _spelling(FAMILIES[spec.architecture].names, present, theirs)
    return LoadPlan((w13, w2), tuple(expert_pieces(spec, spelling, "", theirs, experts)))


def _spelling(names: Names, present: Collection[str], theirs: str) -> ExpertNames:
    for spelling in names.experts:
        if theirs + spelling.down.format(0) in present:
            return spelling
    return names.experts[0]  # the loader will say which of these are missing


@dataclass
class _Builder:
    """Collects parameters and pieces, layer by layer."""

    spec: ModelSpec
    present: Collection[str]
    world: World
    placement: Placement

    def __post_init__(self) -> None:
        self.names = FAMILIES[self.spec.architecture].names
        self.params: list[Param] = []
        self.pieces: list[Piece] = []
        self.elsewhere: set[str] = set()  # experts of other ranks
        local, dim = local_heads(self.spec, self.world), self.spec.head_dim  # rows of q, and of k and v:
        self.heads = slice(local.first * dim, (local.first + local.count) * dim)
        self.kv_heads = slice(local.first_kv * dim, (local.first_kv + local.count_kv) * dim)

    def add(self, param: str, shape: tuple[int, ...], source: str, *, sharded: bool = False) -> None:
        """Adds a parameter that is one tensor of the checkpoint. sharded: this rank takes its share of the rows."""
        self.stack(param, [(source, shape[0], self.rows(shape[0], sharded))], *shape[1:])

    def rows(self, total: int, sharded: bool) -> slice:
        """Returns the rows of a tensor that this rank takes: its share of them, or all."""
        return share(total, self.world.tp_size, self.world.tp_rank) if sharded else slice(0, total)

    def stack(self, param: str, sources: list[tuple[str, int, slice]], *tail: int) -> None:
        """Adds a parameter made of several tensors along the first dimension.

        sources: (name, rows, the rows to take) of each tensor. tail: the other sizes.
        """
        start = 0
        for source, total, rows in sources:
            end = start + rows.stop - rows.start
            self.pieces.append(Piece(source, (total, *tail), param, at=(slice(start, end),), take=(rows,)))
            start = end
        self.params.append(Param(param, (start, *tail)))

    def attention(self, layer: int) -> None:
        """Adds the norms and products around a layer's attention."""
        spec, ours, theirs = self.spec, f"layers.{layer}.", f"model.layers.{layer}."
        width, heads, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows = [("q", heads, self.heads), ("k", kv, self.kv_heads), ("v", kv, self.kv_heads)]
        self.add(ours + "attn_norm", (width,), theirs + "input_layernorm.weight")
        self.stack(ours + "qkv", [(f"{theirs}self_attn.{x}_proj.weight", n, part) for x, n, part in rows], width)
        if spec.qkv_bias:
            self.stack(ours + "qkv_bias", [(f"{theirs}self_attn.{x}_proj.bias", n, part) for x, n, part in rows])
        if spec.qk_norm != "none":
            for x, n, _ in rows[:2]:
                shape = (spec.head_dim if spec.qk_norm == "head" else n,)
                self.add(f"{ours}{x}_norm", shape, f"{theirs}self_attn.{x}_norm.weight")
        self.add(ours + "out", (width, heads), theirs + "self_attn.o_proj.weight", sharded=True)
        if spec.out_bias:
            self.add(ours + "out_bias", (width,), theirs + "self_attn.o_proj.bias", sharded=True)
        self.add(ours + "mlp_norm", (width,), theirs + "post_attention_layernorm.weight")

    def gated(self, ours: str, theirs: str, inner_size: int, *, bias: bool = False, sharded: bool = True) -> None:
        """Adds a SwiGLU block."""
        width, part = self.spec.hidden_size, self.rows(inner_size, sharded)
        halves = theirs + "gate_proj.", theirs + "up_proj."
        self.stack(ours + "gate_up", [(name + "weight", inner_size, part) for name in halves], width)
        self.add(ours + "down", (width, inner_size), theirs + "down_proj.weight", sharded=sharded)
        if bias:
            self.stack(ours + "gate_up_bias", [(name + "bias", inner_size, part) for name in halves])
            self.add(ours + "down_bias", (width,), theirs + "down_proj.bias", sharded=sharded)

    def experts(self, layer: int) -> None:
        """Adds a layer's router, the experts of this rank, and the shared expert."""
        spec, ours, theirs = self.spec, f"layers.{layer}.", f"model.layers.{layer}."
        width = spec.hidden_size
        router = next((n for n in self.names.router if theirs + n in self.present), self.names.router[0])
        self.add(ours + "router", (spec.num_experts, width), theirs + router)
        local = self.placement.local(sum(spec.moe_layers[:layer]), self.world.expert_rank)
        self.params.append(Param(ours + "w13", (len(local), 2 * spec.expert_size, width)))
        self.params.append(Param(ours + "w2", (len(local), width, spec.expert_size)))
        names = _spelling(self.names, self.present, theirs)
        self.pieces.extend(expert_pieces(spec, names, ours, theirs, local))
        if not names.gate_up:
            kinds = (names.gate, names.up, names.down)
            away = set(range(spec.num_experts)) - set(local)
            self.elsewhere.update(theirs + name.format(expert) for expert in away for name in kinds)
        if spec.shared_expert_size:
            self.gated(ours + "shared_", theirs + "mlp.shared_expert.", spec.shared_expert_size, sharded=False)
            self.add(ours + "shared_gate", (1, width), theirs + "mlp.shared_expert_gate.weight")


def expert_pieces(
    spec: ModelSpec, names: ExpertNames, ours: str, theirs: str, experts: Sequence[int]
) -> Iterator[Piece]:
    """Yields the copies that bring `experts` of layer `theirs` to places 0, 1, ... of ours + "w13" and "w2"."""
    width, inner, total = spec.hidden_size, spec.expert_size, spec.num_experts
    if names.gate_up and list(experts) == list(range(total)):
        yield Piece(theirs + names.gate_up, (total, 2 * inner, width), ours + "w13")
        yield Piece(theirs + names.down, (total, width, inner), ours + "w2")
        return
    for local, expert in enumerate(experts):
        if names.gate_up:
            yield Piece(theirs + names.gate_up, (total, 2 * inner, width), ours + "w13", at=(local,), take=(expert,))
            yield Piece(theirs + names.down, (total, width, inner), ours + "w2", at=(local,), take=(expert,))
            continue
        gate, up, down = (theirs + name.format(expert) for name in (names.gate, names.up, names.down))
        yield Piece(gate, (inner, width), ours + "w13", at=(local, slice(0, inner)))
        yield Piece(up, (inner, width), ours + "w13", at=(local, slice(inner, 2 * inner)))
        yield Piece(down, (width, inner), ours + "w2", at=(local,))
