"""The specifications of feed-forward blocks: a dense MLP, or a router with experts.

`feed_forward_layer.py` computes them. Shapes: D model width, E experts, e local experts, I inner
width of an expert, F inner width of a dense MLP. Does not import torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moeserve.blocks.weights import GGUF_EXPERTS, BlockPlan, ExpertNames, WeightPlan
from moeserve.loader.load_plan import Index, LoadPlan, Param, Piece
from moeserve.ops.rules import SWIGLU, Activation, RouterRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A dense MLP, gated if its activation is."""

    size: int  # inner width
    bias: bool = False
    activation: Activation = SWIGLU
    name: str = "mlp"  # name of the module in the checkpoint

    def products(self, width: int) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of every product whose weights are read for each token."""
        return [(self.activation.parts * self.size, width), (width, self.size)]

    def plan(
        self, plan: WeightPlan, param_prefix: str, tensor_prefix: str, *, sharded: bool = True
    ) -> None:
        """Add gate_up (without gates: up) and down, and their biases. See `Mixer.plan`."""
        block = plan.block(param_prefix, tensor_prefix, self.name + ".")
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
    """An expert that computes every token."""

    gated: bool = False  # multiply the output by the sigmoid of one more product (Qwen2)
    scale: float = 1.0  # factor of the output (Command A+)
    name: str = "mlp.shared_expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """A mixture of experts: a router chooses `top_k` of `num_experts` experts for each token."""

    num_experts: int
    top_k: int
    size: int  # inner width of an expert
    router: RouterRule
    shared: SharedExpert | None = None
    activation: Activation = SWIGLU
    bias: bool = False  # experts have biases (gpt-oss)
    out_bias: bool = False  # the sum of the experts has a bias (JetMoE)
    router_bias: bool = False  # the router's product has a bias
    router_cap: float = 0.0  # router logits become cap * tanh(logit / cap); 0: unchanged (Laguna)
    expert_scale: bool = False  # a factor per expert on its routing weights
    # The size of the vocabulary, if a table has the experts of each token id (DeepSeek-V4); 0: the
    # router chooses them
    hashed: int = 0
    num_unused: int = 0  # experts that follow in the checkpoint (ERNIE-VL's for pictures)
    # A dense MLP whose output is added. MLP, router and experts have their own norms (Gemma 4).
    beside: Dense | None = None
    # A dense MLP with the same input. The output [T, 2 * D] has that of the MLP, then that of the
    # experts (LongCat).
    apart: Dense | None = None
    # The router also chooses among this many experts that return their input. They have the ids
    # after those of the other experts (LongCat).
    identities: int = 0
    num_empty: int = 0  # the same with experts that return 0 (ZAYA)
    # R: the router is an MLP of this width. Its input follows that of the block: [T, D + R] (ZAYA).
    router_size: int = 0
    # The last experts are shared: every token uses them, beside others, which have a choice bias.
    # The weights of all of a token's experts are renormalized together (Inkling).
    num_always: int = 0
    router_factor: bool = False  # a learned factor of all routing weights (Inkling)

    @property
    def num_choices(self) -> int:
        """The number of experts that the router chooses from."""
        return self.num_experts + self.identities + self.num_empty

    def products(self, width: int) -> list[tuple[int, int]]:
        """See `Dense`. Routed experts are omitted, because a step reads only the chosen ones."""
        shared = self.shared.products(width) if self.shared else []
        dense = self.beside or self.apart
        beside = dense.products(width) if dense else []
        size = self.router_size
        router = [(self.num_choices, size), (2 * size, size)] if size else []
        return [*(router or [(self.num_choices, width)]), *shared, *beside]

    def plan(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str) -> None:
        """Add the router, w13 and w2 of this rank's experts, and the shared expert.

        See `Mixer.plan` for the arguments.
        """
        block = plan.block(param_prefix, tensor_prefix)
        self._plan_router(block)
        self._plan_dense(plan, param_prefix, tensor_prefix)
        local = plan.placement.local_experts(plan.num_moe, plan.world.expert_rank)
        plan.num_moe += 1
        names = spelling(plan.names.experts, plan.present, tensor_prefix)
        plan.extend(self.plan_experts(names, tensor_prefix, local, plan.width, param_prefix))
        if not names.in_one:
            remote = set(range(self.num_experts + self.num_unused)) - set(local)
            plan.on_other_ranks.update(
                tensor_prefix + name.format(expert)
                for expert in remote
                for name in (names.gate, names.up, names.down)
                if name
            )
        if self.out_bias:
            block.add("experts_bias", (plan.width,), "mlp.bias")
        if self.shared:
            self.shared.plan(plan, param_prefix + "shared_", tensor_prefix, sharded=False)
            if self.shared.gated:
                block.add("shared_gate", (1, plan.width), f"{self.shared.name}_gate.weight")

    def _plan_router(self, block: BlockPlan) -> None:
        """Add the router, its biases and its table."""
        width = self.router_size or block.plan.width
        expert_shape = (self.num_choices,)
        router_fp32 = self.router.fp32
        block.add("router", (*expert_shape, width), "mlp.gate.weight", fp32=router_fp32)
        if self.router_bias:
            block.add("router_bias", expert_shape, "mlp.gate.bias", fp32=router_fp32)
        if self.router.bias:
            name = "mlp.gate.e_score_correction_bias"
            biased = (self.num_choices - self.num_always,)
            block.add("router_choice_bias", biased, name, fp32=True)
        if self.router_factor:
            block.add("router_factor", (1,), "mlp.gate.global_scale", fp32=True)
        if self.hashed:
            block.pick(
                "router_table",
                [("mlp.gate.tid2eid", self.hashed, slice(0, self.hashed))],
                self.top_k,
                int64=True,
                below=self.num_experts,
            )
        if self.expert_scale:
            block.add("expert_scale", expert_shape, "router.per_expert_scale", fp32=True)

        if self.router_size:
            block.add("router_norm", (width,), "mlp.gate.router_mlp.norm.weight")
            for param, name in (("router_first", "fc1"), ("router_second", "fc2")):
                module = f"mlp.gate.router_mlp.{name}"
                block.add(param, (width, width), f"{module}.weight")
                block.add(f"{param}_bias", (width,), f"{module}.bias")

    def _plan_dense(self, plan: WeightPlan, param_prefix: str, tensor_prefix: str) -> None:
        """Add the dense MLP, if there is one."""
        if dense := self.apart or self.beside:
            dense.plan(plan, param_prefix + "dense_", tensor_prefix)
        if self.beside:
            block = plan.block(param_prefix, tensor_prefix)
            norm_shape = (plan.width,)
            block.add("router_norm", norm_shape, "router.scale")
            block.add("experts_norm", norm_shape, "pre_feedforward_layernorm_2.weight")
            block.add("dense_post_norm", norm_shape, "post_feedforward_layernorm_1.weight")
            block.add("experts_post_norm", norm_shape, "post_feedforward_layernorm_2.weight")

    def plan_experts(
        self,
        names: ExpertNames,
        tensor_prefix: str,
        experts: Sequence[int],
        width: int,
        param_prefix: str = "",
    ) -> LoadPlan:
        """Return the load plan of some experts, in this order: w13, w2, and their biases."""
        inner = self.size
        count = len(experts)
        parts = self.activation.parts
        params = [
            Param(param_prefix + "w13", (count, parts * inner, width)),
            Param(param_prefix + "w2", (count, width, inner)),
        ]
        if self.bias:
            params += [
                Param(param_prefix + "w13_bias", (count, parts * inner)),
                Param(param_prefix + "w2_bias", (count, width)),
            ]
        pieces = [
            replace(
                piece,
                source=tensor_prefix + piece.source,
                param=param_prefix + piece.param,
                at=(local, *piece.at),
            )
            for local, expert in enumerate(experts)
            for piece in self._pieces(names, expert, width)
        ]
        return LoadPlan(tuple(params), tuple(pieces))

    def _pieces(self, names: ExpertNames, expert: int, width: int) -> Iterator[Piece]:
        """Yield the pieces of one expert, with `at` relative to the expert."""
        inner = self.size
        if names.stacked:
            yield from self._stacked_pieces(names, expert, width)
            return
        num_chosen = self.num_experts - self.num_always
        if expert >= num_chosen and names.always is not None:
            shared = replace(self, num_experts=self.num_always, num_always=0)
            yield from shared._pieces(names.always, expert - num_chosen, width)
            return
        # Leading dimension and index of the expert, in tensors that have all experts
        lead: tuple[int, ...] = (num_chosen,) if names.in_one else ()
        take: Index = (expert,) if names.in_one else ()
        shape: tuple[int, ...]
        if self.activation.parts == 1:
            yield Piece(names.up.format(expert), (*lead, inner, width), "w13", take=take)
            yield Piece(names.down.format(expert), (*lead, width, inner), "w2", take=take)
            return
        halves = (slice(0, inner), slice(inner, 2 * inner))
        in_source = (slice(0, None, 2), slice(1, None, 2)) if names.by_turns else halves
        for half, part, name in zip(halves, in_source, (names.gate, names.up), strict=True):
            at = (half,)
            if not names.gate_up:
                shape = (*lead, inner, width)
                yield Piece(name.format(expert), shape, "w13", at=at, take=take)
                if self.bias:
                    yield Piece(name + "_bias", (*lead, inner), "w13_bias", at=at, take=take)
                continue
            if names.transposed:
                shape = (*lead, width, 2 * inner)
                columns = (*take, slice(None), part)
                yield Piece(names.gate_up, shape, "w13", at=at, take=columns, transposed=True)
            else:
                shape = (*lead, 2 * inner, width)
                yield Piece(names.gate_up, shape, "w13", at=at, take=(*take, part))
            if self.bias:
                shape = (*lead, 2 * inner)
                name = names.gate_up + "_bias"
                yield Piece(name, shape, "w13_bias", at=at, take=(*take, part))
        shape = (*lead, inner, width) if names.transposed else (*lead, width, inner)
        name = names.down.format(expert)
        yield Piece(name, shape, "w2", take=take, transposed=names.transposed)
        if self.bias:
            yield Piece(names.down + "_bias", (*lead, width), "w2_bias", take=take)

    def _stacked_pieces(self, names: ExpertNames, expert: int, width: int) -> Iterator[Piece]:
        """Yield the pieces of one expert, if tensors have the rows of all experts."""
        inner = self.size
        shape = (self.num_experts * inner, width)
        take: Index = (slice(expert * inner, (expert + 1) * inner),)
        yield Piece(names.gate, shape, "w13", at=(slice(0, inner),), take=take)
        yield Piece(names.up, shape, "w13", at=(slice(inner, 2 * inner),), take=take)
        yield Piece(names.down, shape, "w2", take=take, transposed=True)


def spelling(experts: Sequence[ExpertNames], present: Any, tensor_prefix: str) -> ExpertNames:
    """Return the names of a layer's experts that are present, or the usual ones if none are."""
    for names in GGUF_EXPERTS:
        if tensor_prefix + (names.gate_up or names.up) in present:
            return names
    for names in experts:
        if tensor_prefix + names.down.format(0) in present:
            return names
    return experts[0]  # `check_plan` will list the missing tensors
