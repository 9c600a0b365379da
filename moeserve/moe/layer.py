"""The MoE layer: router, dispatch, experts, combine.

`MoELayer` runs the four steps one after the other. `FusedMoELayer` runs them in one kernel, which
is possible if no row leaves the rank. `plan_moe` chooses between the two at start.

With tensor parallelism, all ranks of an engine route all of its tokens, and each rank dispatches an
equal share of them.

T: tokens. D: model width. K: experts per token. P: received rows.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.comm.tensor import ALONE, TensorParallel
from moeserve.comm.world import share
from moeserve.moe.all2all.base import All2All, All2AllCaps, Ticket
from moeserve.moe.experts.base import Experts, ExpertsCaps, Fusible
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.routing import Router, Routing
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import RowContext

SharedExpert = Callable[[Tensor, RowContext], Tensor]


def recording_obstacle(transport: All2AllCaps, compute: ExpertsCaps) -> str | None:
    """Return why no CUDA graph can record this backend and this kernel; None if one can."""
    if transport.why_not_recordable:
        return transport.why_not_recordable
    if not compute.device_counts:
        return f"{compute.name} must know the counts of rows on the host"
    return None


@dataclass(eq=False)
class MoELayer:
    """One MoE layer.

    `all2all`, `packed` and `to_physical` are replaced between steps when experts are moved or the
    group of ranks changes.
    """

    router: Router
    all2all: All2All
    experts: Experts
    packed: Any  # the local experts' weights, in the layout of `experts`
    to_physical: LogicalToPhysical
    shared: SharedExpert | None = None  # its result [T, D] is added for every token
    tp: TensorParallel = ALONE
    # Router weights multiply the inputs of experts (Llama 4), not their results.
    on_input: bool = False

    @property
    def why_not_recordable(self) -> str | None:
        """Why no CUDA graph can record a call; None if one can."""
        if not self.to_physical.counts_on_device:
            return "the router's choices are counted on the host"
        return recording_obstacle(self.all2all.caps, self.experts.caps)

    def __call__(
        self,
        x_TD: Tensor,
        context: RowContext,
        ubatch: UBatch,
        router_TD: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output [T, D]. router_TD: the router's input, if it is not x_TD."""
        num_tokens = context.num_tokens
        routing = self.router(x_TD if router_TD is None else router_TD, context)
        ubatch.record_layer_load(self.to_physical.count_load(routing))
        routing = self.to_physical(routing)
        tp = self.tp
        # If only the device knows where padding begins, the padding is distributed as well.
        num_rows = len(x_TD) if isinstance(num_tokens, Tensor) else num_tokens
        if tp.size == 1:
            return self._compute(x_TD, routing, context.part(slice(0, num_rows)), ubatch)
        row_shares = [share(num_rows, tp.size, rank) for rank in range(tp.size)]
        counts = [part.stop - part.start for part in row_shares]
        own_rows = row_shares[tp.rank]
        part_TD = self._compute(
            x_TD[own_rows], routing.rows(own_rows), context.part(own_rows), ubatch
        )
        out_TD = tp.gather_rows(part_TD, counts, ubatch.index)
        return torch.nn.functional.pad(out_TD, (0, 0, 0, x_TD.shape[0] - num_rows))

    def serve(self, like: Tensor, ubatch: UBatch) -> None:
        """Run the local experts for the other ranks, in a step in which this rank has no tokens.

        like: any tensor [..., D] with the dtype and device of the layer's input.
        """
        self(like.new_empty((0, like.shape[-1])), RowContext(0, ubatch.index), ubatch)

    def _compute(
        self, x_TD: Tensor, routing: Routing, context: RowContext, ubatch: UBatch
    ) -> Tensor:
        """Return the sum of the routed and the shared experts.

        All ranks dispatch in as many rounds as the rank with the most tokens needs.
        """
        num_tokens = context.num_tokens
        assert isinstance(num_tokens, int)
        routed_TD = x_TD
        out_TD = torch.empty_like(x_TD)
        shared_results: list[Tensor] = []  # [T, D], appended by run_shared
        if self.on_input:
            routed_TD, routing = routing.on_input(x_TD)
        run_shared = None
        if (shared := self.shared) is not None and len(x_TD):
            run_shared = lambda: shared_results.append(shared(x_TD, context))  # noqa: E731
        limit = self.all2all.caps.max_tokens or sys.maxsize
        if num_tokens < len(x_TD):  # padding is not dispatched
            out_TD[num_tokens:] = 0
        for start in range(0, max(1, ubatch.most_tokens, num_tokens), limit):
            rows = slice(start, min(start + limit, num_tokens))
            self._run_round(routed_TD[rows], routing.rows(rows), out_TD[rows], ubatch, run_shared)
            run_shared = None  # the first round has run the shared experts
        if routing.own_T1 is not None:
            out_TD = (out_TD.float() + x_TD.float() * routing.own_T1).to(x_TD.dtype)
        return out_TD + shared_results[0] if shared_results else out_TD

    def _run_round(
        self,
        x_TD: Tensor,
        routing: Routing,
        out_TD: Tensor,
        ubatch: UBatch,
        run_shared: Callable[[], None] | None,
    ) -> None:
        """Dispatch, run the experts, combine. `run_shared` runs during the combine.

        Writes the sum of the routed experts to out_TD.
        """
        ticket = ubatch.overlap(
            lambda: self.all2all.dispatch(x_TD, routing, ubatch), name="dispatch"
        )
        y = x_TD.new_empty(ticket.inbound.rows.shape) if ticket.y is None else ticket.y
        self._run_experts(ticket, y, ubatch)
        ubatch.overlap(
            lambda: self.all2all.combine(ticket, y, out_TD, ubatch),
            meanwhile=run_shared,
            name="combine",
        )

    def _run_experts(self, ticket: Ticket, y: Tensor, ubatch: UBatch) -> None:
        early_send = ticket.early_send
        if early_send is None:
            self.experts.run(ticket.inbound, self.packed, y)
            return
        first, rest = ticket.inbound.split(early_send.num_experts)
        self.experts.run(first, self.packed, y)
        ubatch.send_early(lambda: early_send.send(y))
        num_first_rows = int(first.ends_e[-1])
        self.experts.run(rest, self.packed, y[num_first_rows:])


@dataclass(eq=False)
class FusedMoELayer(MoELayer):
    """An MoE layer that runs router, dispatch, experts and combine in one call of the expert
    kernel.

    Its results are bitwise equal to those of `MoELayer`. Needs a single rank.
    """

    why_not_recordable = None

    def __post_init__(self) -> None:
        assert isinstance(self.experts, Fusible)
        self._fused = self.experts.fuse(self.router)

    def __call__(
        self,
        x_TD: Tensor,
        context: RowContext,
        ubatch: UBatch,
        router_TD: Tensor | None = None,
    ) -> Tensor:
        if router_TD is not None:  # the fused kernel has one input for router and experts
            return super().__call__(x_TD, context, ubatch, router_TD)
        out_TD = ubatch.run_fused(lambda: self._fused(x_TD, self.packed, context.num_tokens))
        return out_TD if self.shared is None else out_TD + self.shared(x_TD, context)

    def predict_experts_of(self, next_layer: "FusedMoELayer") -> None:
        """Let this layer's kernel predict the experts of `next_layer` and read them from disk in
        advance. Does nothing if the kernel cannot predict experts.
        """
        if hasattr(self._fused, "predict_experts_of"):
            self._fused.predict_experts_of(next_layer._fused)
