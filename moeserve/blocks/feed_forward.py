"""What of a layer reads no earlier tokens, in numbers: a dense MLP, or experts behind a router. No torch here.

D model width, E experts, e local experts, I expert width, F inner width of a dense MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moeserve.blocks.weights import ExpertNames, WeightPlan
from moeserve.loader.load_plan import LoadPlan, Param, Piece
from moeserve.ops.rules import SWIGLU, Activation, RouterRule

if TYPE_CHECKING:
    from moeserve.blocks.build import Builder

FeedForwardLayer = Callable[..., Any]  # (x_T'D, number of real rows, micro-batch) -> T'D


class FeedForward(Protocol):
    """A feed-forward block in numbers; the methods are those of `Mixer`."""

    def products(self, width: int) -> list[tuple[int, int]]:
        """Returns (outputs, inputs) of every product whose weights all tokens read."""
        ...

    def plan(self, plan: WeightPlan, ours: str, theirs: str) -> None:
        """Adds the block's parameters."""
        ...

    def build(self, build: Builder, name: str) -> FeedForwardLayer:
        """Returns the block, made of the parameters `name` + ..."""
        ...

    def workspace(self, width: int, tokens: int, size: int, tp_size: int) -> int:
        """Returns an upper bound of the bytes that a call needs beside the residual stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A gated MLP with inner width `size` that every token passes."""

    size: int
    bias: bool = False
    activation: Activation = SWIGLU

    def products(self, width: int) -> list[tuple[int, int]]:
        """See `FeedForward`."""
        return [(2 * self.size, width), (width, self.size)]

    def plan(self, plan: WeightPlan, ours: str, theirs: str, name: str = "mlp", *, sharded: bool = True) -> None:
        """Adds gate_up and down with their biases. name: of the checkpoint's module."""
        part = plan.rows(self.size, sharded)
        for ending, tail in (("weight", (plan.width,)), ("bias", ()))[: 1 + self.bias]:
            halves = [plan.spell(theirs, f"{name}.{half}_proj.{ending}") for half in ("gate", "up")]
            ours_ending = "" if ending == "weight" else "_bias"
            plan.stack(f"{ours}gate_up{ours_ending}", [(half, self.size, part) for half in halves], *tail)
        down = plan.spell(theirs, f"{name}.down_proj.weight")
        plan.add(ours + "down", (plan.width, self.size), down, sharded=sharded)
        if self.bias:
            plan.add(ours + "down_bias", (plan.width,), plan.spell(theirs, f"{name}.down_proj.bias"), sharded=sharded)

    def build(self, build: Builder, name: str) -> FeedForwardLayer:
        """See `FeedForward`."""
        mlp = build.gated(name, self.size, build.tp, self.activation)
        return lambda x_TD, num_tokens, ubatch: mlp(x_TD, ubatch.index)

    def workspace(self, width: int, tokens: int, size: int, tp_size: int) -> int:
        """See `FeedForward`."""
        from moeserve.blocks.feed_forward_layer import dense_workspace

        return dense_workspace(self.size, width, tokens, size, tp_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """An expert of inner width `size` that every token passes. gated: behind a sigmoid of one more product (Qwen2)."""

    size: int
    gated: bool = False
    name: str = "mlp.shared_expert"  # of the checkpoint's module
    activation: Activation = SWIGLU


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """E experts of inner width `size`, of which a router chooses top_k for each token.

    bias: experts' products have biases; router_bias: the router's product has one (gpt-oss). expert_scale: a factor per
    expert on its weights (Gemma 4).
    """

    num_experts: int
    top_k: int
    size: int
    router: RouterRule
    shared: SharedExpert | None = None
    activation: Activation = SWIGLU
    bias: bool = False
    router_bias: bool = False
    expert_scale: bool = False

    def products(self, width: int) -> list[tuple[int, int]]:
        """See `FeedForward`; without the routed experts, whose weights only their tokens read."""
        shared = Dense(size=self.shared.size).products(width) if self.shared else []
        return [(self.num_experts, width), *shared]

    def plan(self, plan: WeightPlan, ours: str, theirs: str) -> None:
        """Adds router, w13 and w2 of this rank's experts, and shared_gate_up, shared_down, shared_gate."""
        experts = (self.num_experts,)
        fp32 = self.router.fp32
        plan.add(ours + "router", (*experts, plan.width), plan.spell(theirs, "mlp.gate.weight"), fp32=fp32)
        if self.router_bias:
            plan.add(ours + "router_bias", experts, plan.spell(theirs, "mlp.gate.bias"), fp32=fp32)
        if self.router.bias:
            name = plan.spell(theirs, "mlp.gate.e_score_correction_bias")
            plan.add(ours + "router_choice_bias", experts, name, fp32=True)
        if self.expert_scale:
            plan.add(ours + "expert_scale", experts, plan.spell(theirs, "router.per_expert_scale"), fp32=True)
        local = plan.placement.local(plan.num_moe, plan.world.expert_rank)
        plan.num_moe += 1
        names = spelling(plan.names.experts, plan.present, theirs)
        plan.extend(self.plan_experts(names, theirs, local, plan.width, ours))
        if not names.gate_up:
            kinds = (names.gate, names.up, names.down)
            away = set(range(self.num_experts)) - set(local)
            plan.elsewhere.update(theirs + name.format(expert) for expert in away for name in kinds)
        if self.shared:
            Dense(size=self.shared.size).plan(plan, ours + "shared_", theirs, self.shared.name, sharded=False)
            if self.shared.gated:
                plan.add(ours + "shared_gate", (1, plan.width), plan.spell(theirs, f"{self.shared.name}_gate.weight"))

    def plan_experts(
        self, names: ExpertNames, theirs: str, experts: Sequence[int], width: int, ours: str = ""
    ) -> LoadPlan:
        """Plans some experts: 0, 1, ... of `ours` + "w13" and "w2"."""
        inner, total = self.size, self.num_experts
        w13 = Param(ours + "w13", (len(experts), 2 * inner, width))
        w2 = Param(ours + "w2", (len(experts), width, inner))
        if names.gate_up and list(experts) == list(range(total)):
            whole = Piece(theirs + names.gate_up, w13.shape, w13.name), Piece(theirs + names.down, w2.shape, w2.name)
            return LoadPlan((w13, w2), whole)
        pieces = []
        for local, expert in enumerate(experts):
            gate, up, down = (theirs + x.format(expert) for x in (names.gate_up or names.gate, names.up, names.down))
            if names.gate_up:
                pieces.append(Piece(gate, (total, 2 * inner, width), w13.name, at=(local,), take=(expert,)))
                pieces.append(Piece(down, (total, width, inner), w2.name, at=(local,), take=(expert,)))
            else:
                pieces.append(Piece(gate, (inner, width), w13.name, at=(local, slice(0, inner))))
                pieces.append(Piece(up, (inner, width), w13.name, at=(local, slice(inner, 2 * inner))))
                pieces.append(Piece(down, (width, inner), w2.name, at=(local,)))
        return LoadPlan((w13, w2), tuple(pieces))

    def build(self, build: Builder, name: str) -> FeedForwardLayer:
        """See `FeedForward`."""
        from moeserve.blocks.feed_forward_layer import build_moe

        return build_moe(self, build, name)

    def workspace(self, width: int, tokens: int, size: int, tp_size: int) -> int:
        """See `FeedForward`."""
        from moeserve.blocks.feed_forward_layer import moe_workspace

        return moe_workspace(self, width, tokens, size, tp_size)


def spelling(experts: Sequence[ExpertNames], present: Any, theirs: str) -> ExpertNames:
    """Returns the spelling of a layer's experts that is present, or the usual one."""
    for names in experts:
        if theirs + names.down.format(0) in present:
            return names
    return experts[0]  # the loader will say which of these are missing
