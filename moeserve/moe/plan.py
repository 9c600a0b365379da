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
from moeserve.moe.layer import FusedMoELayer, MoELayer, SharedExpert, why_not_recorded
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
    # for the user. The last two entries are about CUDA graphs and fusing.
    reasons: tuple[tuple[str, str, str], ...]

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
            router,
            self.all2all,
            self.experts,
            packed,
            to_physical,
            shared,
            tp,
            router.rule.on_input,
        )

    def with_activation(self, activation: Activation) -> "MoEPlan":
        """Return the plan for layers whose experts have another activation."""
        return replace(self, experts=self.experts.with_activation(activation))

    def table(self) -> str:
        """Format the needs and the reasons as aligned lines, for the log."""
        needs = self.needs
        header = (
            f"{needs.world_size} ranks, {needs.ubatches} micro-batches, {needs.device}, "
            f"{needs.dtype} rows of {needs.hidden_size}"
        )
        rows = [("all2all", "experts", header), *self.reasons]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(
            f"{backend:<{widths[0]}}  {kernel:<{widths[1]}}  {reason}".rstrip()
            for backend, kernel, reason in rows
        )


def plan_moe(needs: MoENeeds, backends: Sequence[All2All], kernels: Sequence[Experts]) -> MoEPlan:
    """Choose the first pair, in the order of the arguments, that meets the needs.

    Raises ConfigError with the reasons if there is none.
    """
    reasons: list[tuple[str, str, str]] = []
    picked: tuple[All2All, Experts] | None = None
    for backend in backends:
        for kernel in kernels:
            why = _unsupported(needs, backend, kernel)
            if why is None and picked is None:
                picked = backend, kernel
                why = "; ".join(("picked", *_remarks(needs, backend)))
            reasons.append(
                (backend.caps.name, kernel.caps.name, why or "possible, lower preference")
            )
    if picked is None:
        lines = (
            "\n".join(
                f"  {backend_name} with {kernel_name}: {reason}"
                for backend_name, kernel_name, reason in reasons
            )
            or "  nothing was offered"
        )
        raise ConfigError(f"no all2all backend and expert kernel fit {needs}:\n{lines}")
    backend, kernel = picked
    not_fused = _why_not_fused(needs, backend, kernel)
    eager = why_not_recorded(backend.caps, kernel.caps) if not_fused else None
    if needs.device != "cuda":
        eager = f"there are none on {needs.device}"
    reasons.append(("graphs", backend.caps.name, eager or "possible: decode steps can be recorded"))
    reasons.append(
        (
            "fused",
            kernel.caps.name,
            not_fused or "picked: router, dispatch, experts and combine are one call",
        )
    )
    return MoEPlan(backend, kernel, not_fused is None, needs, tuple(reasons))


def _why_not_fused(needs: MoENeeds, backend: All2All, kernel: Experts) -> str | None:
    """Return why the layer cannot be fused; None if it can."""
    checks = (
        (isinstance(kernel, Fusible), f"{kernel.caps.name} has no fused form"),
        (
            backend.caps.in_place,
            f"rows are sent by {backend.caps.name}, or rounded as if they were",
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
    wire = backend.caps
    compute = kernel.caps
    if wire.obstacle is not None:
        return wire.obstacle
    if compute.obstacle is not None:
        return compute.obstacle
    checks = (
        (needs.device in wire.devices, f"{wire.name} does not support {needs.device}"),
        (
            wire.world_sizes(needs.world_size),
            f"{wire.name} does not support {needs.world_size} ranks",
        ),
        (needs.dtype in wire.wires, f"{wire.name} does not support {needs.dtype}"),
        (
            wire.pad_hidden(needs.hidden_size) is not None,
            f"{wire.name} does not support rows of {needs.hidden_size}",
        ),
        (
            wire.max_in_flight is None or needs.ubatches <= wire.max_in_flight,
            f"{wire.name} supports {wire.max_in_flight} dispatches in flight, "
            f"for {needs.ubatches} micro-batches",
        ),
        (
            wire.exact or not needs.exact,
            f"{wire.name} does not keep the order of sums: bits may depend on where experts "
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
            needs.hidden_size % compute.width_step == 0 == needs.expert_size % compute.width_step,
            f"{compute.name} takes multiples of {compute.width_step}; "
            f"the model is {needs.hidden_size} wide, its experts {needs.expert_size}",
        ),
        (bool(wire.layouts & compute.layouts), f"{wire.name} and {compute.name} share no layout"),
        (
            compute.device_counts or not wire.device_counts,
            f"{wire.name} counts rows on the device, {compute.name} must know them on the host",
        ),
    )
    return next((why for holds, why in checks if not holds), None)
