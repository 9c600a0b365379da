"""Which all2all backend and expert kernel serve this model here: checked once at start, a reason for each no."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.errors import ConfigError
from moeserve.moe.all2all.adapters import GroupedFromSlotted
from moeserve.moe.all2all.base import All2All, Layout
from moeserve.moe.experts.base import Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class MoENeeds:
    """What the model and the launch ask of a pair."""

    hidden_size: int
    dtype: str  # "bfloat16"
    device: str  # "cpu"
    max_tokens: int  # rows of one step on one rank
    expert_size: int = 0
    world_size: int = 1
    ubatches: int = 1
    graphs: bool = False
    exact: bool = False  # determinism=batch: a request's bits depend on nothing but itself


@dataclass(frozen=True, slots=True)
class MoEPlan:
    """The pair that was picked, and why each other pair was not."""

    all2all: All2All
    experts: Experts
    needs: MoENeeds
    reasons: tuple[tuple[str, str, str], ...]  # backend, kernel, "picked" (and on which terms) or what is in the way

    def table(self) -> str:
        """The needs and the reasons as aligned lines for the log."""
        n = self.needs
        head = f"{n.world_size} ranks, {n.ubatches} micro-batches, {n.device}, {n.dtype} rows of {n.hidden_size}"
        rows = [("all2all", "experts", head), *self.reasons]
        wide = [max(len(row[i]) for row in rows) for i in range(2)]
        return "\n".join(f"{a:<{wide[0]}}  {b:<{wide[1]}}  {why}".rstrip() for a, b, why in rows)


def plan_moe(needs: MoENeeds, backends: Sequence[All2All], kernels: Sequence[Experts]) -> MoEPlan:
    """The first pair, in the callers' order of preference, that can do what is needed.

    Raises ConfigError with the table when none can.
    """
    reasons: list[tuple[str, str, str]] = []
    picked: tuple[All2All, Experts] | None = None
    for backend in backends:
        for kernel in kernels:
            why = _obstacle(needs, backend, kernel)
            if why is None and picked is None:
                picked = _joined(backend, kernel), kernel
                why = "; ".join(("picked", *_terms(needs, backend, kernel)))
            reasons.append((backend.caps.name, kernel.caps.name, why or "possible, lower preference"))
    if picked is None:
        lines = "\n".join(f"  {a} with {b}: {why}" for a, b, why in reasons) or "  nothing was offered"
        raise ConfigError(f"no all2all backend and expert kernel fit {needs}:\n{lines}")
    return MoEPlan(*picked, needs, tuple(reasons))


def _regroups(backend: All2All, kernel: Experts) -> bool:
    """Whether rows in slots have to be grouped in between."""
    return kernel.caps.layouts.isdisjoint(backend.caps.layouts) and (
        Layout.SLOTTED in backend.caps.layouts and Layout.GROUPED in kernel.caps.layouts
    )


def _joined(backend: All2All, kernel: Experts) -> All2All:
    return GroupedFromSlotted(backend) if _regroups(backend, kernel) else backend


def _terms(needs: MoENeeds, backend: All2All, kernel: Experts) -> list[str]:
    """What a user should know of a pair that serves."""
    caps, terms = backend.caps, []
    if (width := caps.pad_hidden(needs.hidden_size)) != needs.hidden_size:
        terms.append(f"rows of {needs.hidden_size} travel filled up to {width}")
    if _regroups(backend, kernel):
        terms.append(f"rows are copied between {caps.name}'s slots and {kernel.caps.name}'s groups")
    if caps.max_tokens is not None and caps.max_tokens < needs.max_tokens:
        rounds = -(-needs.max_tokens // caps.max_tokens)
        terms.append(f"a step of {needs.max_tokens} tokens goes in {rounds} rounds of {caps.max_tokens}")
    if not caps.exact:
        terms.append("bits may depend on where experts are")
    return terms


def _obstacle(needs: MoENeeds, backend: All2All, kernel: Experts) -> str | None:
    wire, compute = backend.caps, kernel.caps
    if wire.obstacle is not None:
        return wire.obstacle
    checks = (
        (needs.device in wire.devices, f"{wire.name} does not serve {needs.device}"),
        (wire.world_sizes(needs.world_size), f"{wire.name} does not serve {needs.world_size} ranks"),
        (needs.dtype in wire.wires, f"{wire.name} does not carry {needs.dtype}"),
        (
            wire.max_hidden is None or needs.hidden_size <= wire.max_hidden,
            f"{wire.name} takes rows of {wire.max_hidden}, the model's have {needs.hidden_size}",
        ),
        (wire.pad_hidden(needs.hidden_size) is not None, f"{wire.name} takes no rows of {needs.hidden_size}"),
        (
            wire.max_in_flight is None or needs.ubatches <= wire.max_in_flight,
            f"{wire.name} has {wire.max_in_flight} dispatches in flight, {needs.ubatches} micro-batches are asked",
        ),
        (
            wire.exact or not needs.exact,
            f"{wire.name} keeps no order of sums: bits may depend on where experts are; use --determinism fast",
        ),
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
        (
            bool(wire.layouts & compute.layouts) or _regroups(backend, kernel),
            f"{wire.name} and {compute.name} share no layout",
        ),
        (
            compute.device_counts or not wire.device_counts,
            f"{wire.name} counts rows on the device, {compute.name} must know them on the host",
        ),
        (not needs.graphs or (wire.graph_safe and compute.graph_safe), "not both can be captured in a graph"),
    )
    return next((why for holds, why in checks if not holds), None)
