"""Feed-forward blocks in numbers: a dense MLP, or experts behind a router. No torch here.

`feed_forward_layer.py` computes them. D model width, E experts, e local experts, I expert width, F
inner width of a dense MLP.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moeserve.blocks.weights import SPLIT, ExpertNames, WeightPlan
from moeserve.loader.load_plan import LoadPlan, Param, Piece
from moeserve.ops.rules import SWIGLU, Activation, RouterRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """An MLP with inner width `size` that every token passes, gated if the activation is.

    name: the checkpoint's name of the module. The methods are those of `Mixer`.
    """

    size: int
    bias: bool = False
    activation: Activation = SWIGLU
    name: str = "mlp"

    def products(self, width: int) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of every product whose weights all tokens read."""
        return [(self.activation.parts * self.size, width), (width, self.size)]

    def plan(self, plan: WeightPlan, ours: str, theirs: str, *, sharded: bool = True) -> None:
        """Add gate_up (or up alone) and down with their biases."""
        block = plan.block(ours, theirs, self.name + ".")
        rows = plan.rows(self.size, sharded)
        halves = ("gate", "up")[-self.activation.parts :]
        block.stack(
            "gate_up", [(f"{half}_proj.weight", self.size, rows) for half in halves], plan.width
        )
        block.add("down", (plan.width, self.size), "down_proj.weight", sharded=sharded)
        if self.bias:
            block.stack("gate_up_bias", [(f"{half}_proj.bias", self.size, rows) for half in halves])
            block.add("down_bias", (plan.width,), "down_proj.bias", sharded=sharded)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert(Dense):
    """An expert that every token passes. gated: behind a sigmoid of one more product (Qwen2).
    scale: of its output (Command A+)."""

    gated: bool = False
    scale: float = 1.0
    name: str = "mlp.shared_expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """E experts of inner width `size`, of which a router chooses top_k for each token.

    bias: of the experts' products (gpt-oss). router_bias: of the router's. expert_scale: a factor
    per expert on its weights. beside: an MLP of all tokens whose output is added; it, router and
    experts have their own norms (Gemma 4).
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
    beside: Dense | None = None

    def products(self, width: int) -> list[tuple[int, int]]:
        """See `Dense`; without the routed experts, whose weights only their tokens read."""
        shared = self.shared.products(width) if self.shared else []
        beside = self.beside.products(width) if self.beside else []
        return [(self.num_experts, width), *shared, *beside]

    def plan(self, plan: WeightPlan, ours: str, theirs: str) -> None:
        """Add the router's parameters, w13 and w2 of this rank's experts, shared_gate_up,
        shared_down, shared_gate.
        """
        block = plan.block(ours, theirs)
        each = (self.num_experts,)
        fp32 = self.router.fp32
        for there, param, shape, name, wide in (
            (True, "router", (*each, plan.width), "mlp.gate.weight", fp32),
            (self.router_bias, "router_bias", each, "mlp.gate.bias", fp32),
            (
                self.router.bias,
                "router_choice_bias",
                each,
                "mlp.gate.e_score_correction_bias",
                True,
            ),
            (self.expert_scale, "expert_scale", each, "router.per_expert_scale", True),
        ):
            if there:
                block.add(param, shape, name, fp32=wide)
        if self.beside:
            self.beside.plan(plan, ours + "dense_", theirs)
            for mine, name in (
                ("router_norm", "router.scale"),
                ("experts_norm", "pre_feedforward_layernorm_2.weight"),
                ("dense_post_norm", "post_feedforward_layernorm_1.weight"),
                ("experts_post_norm", "post_feedforward_layernorm_2.weight"),
            ):
                block.add(mine, (plan.width,), name)
        local = plan.placement.local(plan.num_moe, plan.world.expert_rank)
        plan.num_moe += 1
        names = spelling(plan.names.experts, plan.present, theirs)
        plan.extend(self.plan_experts(names, theirs, local, plan.width, ours))
        if not names.in_one:
            kinds = (names.gate, names.up, names.down)
            away = set(range(self.num_experts)) - set(local)
            plan.elsewhere.update(
                theirs + name.format(expert) for expert in away for name in kinds if name
            )
        if self.shared:
            self.shared.plan(plan, ours + "shared_", theirs, sharded=False)
            if self.shared.gated:
                block.add("shared_gate", (1, plan.width), f"{self.shared.name}_gate.weight")

    def plan_experts(
        self, names: ExpertNames, theirs: str, experts: Sequence[int], width: int, ours: str = ""
    ) -> LoadPlan:
        """Plan some experts: 0, 1, ... of `ours` + "w13" and "w2", and their biases."""
        inner = self.size
        count = len(experts)
        parts = self.activation.parts
        params = [
            Param(ours + "w13", (count, parts * inner, width)),
            Param(ours + "w2", (count, width, inner)),
        ]
        if self.bias:
            params += [
                Param(ours + "w13_bias", (count, parts * inner)),
                Param(ours + "w2_bias", (count, width)),
            ]
        pieces = [
            replace(
                piece, source=theirs + piece.source, param=ours + piece.param, at=(local, *piece.at)
            )
            for local, expert in enumerate(experts)
            for piece in self._pieces(names, expert, width)
        ]
        return LoadPlan(tuple(params), tuple(pieces))

    def _pieces(self, names: ExpertNames, expert: int, width: int) -> Iterator[Piece]:
        """Yield what fills one expert, without its place among the local ones."""
        inner = self.size
        whole = slice(None)
        one, take = ((self.num_experts,), (expert,)) if names.in_one else ((), ())
        if self.activation.parts == 1:
            yield Piece(names.up.format(expert), (*one, inner, width), "w13", (), take)
            yield Piece(names.down.format(expert), (*one, width, inner), "w2", (), take)
            return
        halves = (slice(0, inner), slice(inner, 2 * inner))
        taken = (slice(0, None, 2), slice(1, None, 2)) if names.by_turns else halves
        for half, part, name in zip(halves, taken, (names.gate, names.up), strict=True):
            if not names.gate_up:
                yield Piece(name.format(expert), (*one, inner, width), "w13", (half,), take)
                if self.bias:
                    yield Piece(name + "_bias", (*one, inner), "w13_bias", (half,), take)
                continue
            if names.transposed:
                yield Piece(
                    names.gate_up,
                    (*one, width, 2 * inner),
                    "w13",
                    (half,),
                    (*take, whole, part),
                    transposed=True,
                )
            else:
                yield Piece(names.gate_up, (*one, 2 * inner, width), "w13", (half,), (*take, part))
            if self.bias:
                yield Piece(
                    names.gate_up + "_bias", (*one, 2 * inner), "w13_bias", (half,), (*take, part)
                )
        down = (*one, inner, width) if names.transposed else (*one, width, inner)
        yield Piece(names.down.format(expert), down, "w2", (), take, transposed=names.transposed)
        if self.bias:
            yield Piece(names.down + "_bias", (*one, width), "w2_bias", (), take)


def spelling(experts: Sequence[ExpertNames], present: Any, theirs: str) -> ExpertNames:
    """Return the spelling of a layer's experts that is present, or the usual one."""
    if theirs + SPLIT.up in present:
        return SPLIT
    for names in experts:
        if theirs + names.down.format(0) in present:
            return names
    return experts[0]  # the loader will say which of these are missing
