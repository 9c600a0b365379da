"""Choose the all-to-all backend and the expert kernel of the MoE layers, and whether one kernel
runs the whole layer.

The choice is made once, at start, from the capabilities that the candidates declare. The plan has a
reason for each rejected pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moeserve.comm.tensor import ALONE, TensorParallel
from moeserve.errors import ConfigError
from moeserve.moe.all2all.base import All2All
from moeserve.moe.experts.base import Experts, Fusible
from moeserve.moe.layer import FusedMoELayer, MoELayer, SharedExpert, recording_obstacle
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.routing import Router
from moeserve.ops.rules import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class MoENeeds:
    """Requirements of the model and the settings on a backend and a kernel."""

    hidden_size: int
    dtype: str  # e.g. "bfloat16"
    device: str  # e.g. "cpu"
    max_tokens: int  # the most tokens of a step on one rank
    expert_size: int = 0  # inner width of an expert
    world_size: int = 1  # ranks over which the experts are sharded
    tp_size: int = 1
    replicas: bool = False  # some experts have replicas
    biases: bool = False  # experts have biases
    gated: bool = True  # experts have gates
    ubatches: int = 1  # micro-batches of a step
    exact: bool = False  # the bits of an answer must depend on its request alone


@dataclass(frozen=True, slots=True)
class MoEPlan:
    """The chosen backend and kernel, and why the other pairs were rejected."""

    all2all: All2All
    experts: Experts
    fused: bool  # one call of the kernel runs router, dispatch, experts and combine
    needs: MoENeeds
    # (backend, kernel, reason) of each pair. The reason of the chosen pair is "picked" and remarks
    # for the user.
    pairs: tuple[tuple[str, str, str], ...]
    graphs_note: str  # whether CUDA graphs can record decode steps, and why not
    fused_note: str  # whether the layer is fused, and why not

    def layer(
        self,
        router: Router,
        packed: Any,
        to_physical: LogicalToPhysical,
        shared: SharedExpert | None = None,
        tp: TensorParallel = ALONE,
    ) -> MoELayer:
        """Return a layer with this backend and kernel. packed: its weights from `experts.pack`."""
        fused = self.fused and isinstance(self.experts, Fusible) and self.experts.can_fuse(router)
        kind = FusedMoELayer if fused else MoELayer
        return kind(
            router=router,
            all2all=self.all2all,
            experts=self.experts,
            packed=packed,
            to_physical=to_physical,
            shared=shared,
            tp=tp,
            on_input=router.rule.on_input,
        )

    def with_activation(self, activation: Activation) -> "MoEPlan":
        """Return the plan for layers whose experts have another activation."""
        return replace(self, experts=self.experts.with_activation(activation))

    def table(self) -> str:
        """Format the needs, the reasons and the notes as aligned lines, for the log."""
        needs = self.needs
        header = (
            f"{needs.world_size} ranks, {needs.ubatches} micro-batches, {needs.device}, "
            f"{needs.dtype} rows of {needs.hidden_size}"
        )
        rows = [
            ("all2all", "experts", header),
            *self.pairs,
            ("graphs", self.all2all.caps.name, self.graphs_note),
            ("fused", self.experts.caps.name, self.fused_note),
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(
            f"{backend:<{widths[0]}}  {kernel:<{widths[1]}}  {reason}".rstrip()
            for backend, kernel, reason in rows
        )


def plan_moe(needs: MoENeeds, backends: Sequence[All2All], kernels: Sequence[Experts]) -> MoEPlan:
    """Choose the first pair, in the order of the arguments, that meets the needs.

    Raises ConfigError with the reasons if there is none.
    """
    pairs: list[tuple[str, str, str]] = []
    picked: tuple[All2All, Experts] | None = None
    for backend in backends:
        for kernel in kernels:
            why = _unsupported(needs, backend, kernel)
            if why is None and picked is None:
                picked = backend, kernel
                why = "; ".join(("picked", *_remarks(needs, backend)))
            pairs.append((backend.caps.name, kernel.caps.name, why or "possible, lower preference"))
    if picked is None:
        lines = (
            "\n".join(
                f"  {backend_name} with {kernel_name}: {reason}"
                for backend_name, kernel_name, reason in pairs
            )
            or "  nothing was offered"
        )
        raise ConfigError(f"no all2all backend and expert kernel fit {needs}:\n{lines}")
    backend, kernel = picked
    why_not_fused = _why_not_fused(needs, backend, kernel)
    why_no_graphs = None
    if needs.device != "cuda":
        why_no_graphs = f"there are none on {needs.device}"
    elif why_not_fused is not None:  # a fused layer can always be recorded
        why_no_graphs = recording_obstacle(backend.caps, kernel.caps)
    return MoEPlan(
        all2all=backend,
        experts=kernel,
        fused=why_not_fused is None,
        needs=needs,
        pairs=tuple(pairs),
        graphs_note=why_no_graphs or "possible: decode steps can be recorded",
        fused_note=why_not_fused or "picked: router, dispatch, experts and combine are one call",
    )


def _why_not_fused(needs: MoENeeds, backend: All2All, kernel: Experts) -> str | None:
    """Return why the layer cannot be fused; None if it can."""
    checks = (
        (isinstance(kernel, Fusible), f"{kernel.caps.name} has no fused form"),
        (
            backend.caps.in_place,
            f"{backend.caps.name} moves or rounds rows before the experts",
        ),
        (needs.tp_size == 1, f"{needs.tp_size} tensor-parallel ranks divide the tokens"),
        (
            needs.gated or kernel.caps.fuses_ungated,
            f"{kernel.caps.name} has no fused form of experts without gates",
        ),
        (not needs.replicas, "some experts have replicas, which take tokens in turn"),
    )
    return next((why for holds, why in checks if not holds), None)


def _remarks(needs: MoENeeds, backend: All2All) -> list[str]:
    """Return remarks for the user about the chosen backend."""
    caps = backend.caps
    remarks = []
    if (width := caps.pad_hidden(needs.hidden_size)) != needs.hidden_size:
        remarks.append(f"rows of {needs.hidden_size} are sent padded to {width}")
    if caps.max_tokens is not None and caps.max_tokens < needs.max_tokens:
        rounds = -(-needs.max_tokens // caps.max_tokens)
        remarks.append(
            f"a step of {needs.max_tokens} tokens is sent in {rounds} rounds of {caps.max_tokens}"
        )
    if not caps.exact:
        remarks.append("bits may depend on where experts are")
    return remarks


def _unsupported(needs: MoENeeds, backend: All2All, kernel: Experts) -> str | None:
    """Return why the pair does not meet the needs; None if it does."""
    transport = backend.caps
    compute = kernel.caps
    if transport.obstacle is not None:
        return transport.obstacle
    if compute.obstacle is not None:
        return compute.obstacle
    checks = (
        (needs.device in transport.devices, f"{transport.name} does not support {needs.device}"),
        (
            transport.supports_world_size(needs.world_size),
            f"{transport.name} does not support {needs.world_size} ranks",
        ),
        (needs.dtype in transport.row_dtypes, f"{transport.name} does not support {needs.dtype}"),
        (
            transport.pad_hidden(needs.hidden_size) is not None,
            f"{transport.name} does not support rows of {needs.hidden_size}",
        ),
        (
            transport.max_in_flight is None or needs.ubatches <= transport.max_in_flight,
            f"{transport.name} allows {transport.max_in_flight} dispatches at once, "
            f"{needs.ubatches} micro-batches need one each",
        ),
        (
            transport.exact or not needs.exact,
            f"{transport.name} does not keep the order of sums: bits may depend on where experts "
            "are; use --determinism fast",
        ),
        (compute.biases or not needs.biases, f"{compute.name} takes no experts with biases"),
        (compute.ungated or needs.gated, f"{compute.name} takes no experts without gates"),
        (needs.dtype in compute.dtypes, f"{compute.name} does not compute in {needs.dtype}"),
        (
            needs.device in compute.devices,
            compute.not_on.get(needs.device, f"{compute.name} does not run on {needs.device}"),
        ),
        (
            all(
                width % compute.width_step == 0 for width in (needs.hidden_size, needs.expert_size)
            ),
            f"{compute.name} takes multiples of {compute.width_step}; "
            f"the model is {needs.hidden_size} wide, its experts {needs.expert_size}",
        ),
        (
            bool(transport.layouts & compute.layouts),
            f"{transport.name} and {compute.name} share no layout",
        ),
        (
            compute.device_counts or not transport.device_counts,
            f"{transport.name} counts rows on the device, "
            f"{compute.name} must know them on the host",
        ),
    )
    return next((why for holds, why in checks if not holds), None)
