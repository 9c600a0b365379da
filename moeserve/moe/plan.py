"""Which all2all backend and expert kernel serve this model here: checked once at start, a reason for each no."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.errors import ConfigError
from moeserve.moe.all2all.base import All2All
from moeserve.moe.experts.base import Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class MoENeeds:
    """What the model and the launch ask of a pair."""

    hidden_size: int
    dtype: str  # "bfloat16"
    device: str  # "cpu"
    max_tokens: int  # rows of one step on one rank
    world_size: int = 1
    lanes: int = 1
    graphs: bool = False


@dataclass(frozen=True, slots=True)
class MoEPlan:
    """The pair that was picked, and why each other pair was not."""

    all2all: All2All
    experts: Experts
    reasons: tuple[tuple[str, str, str], ...]  # backend, kernel, "picked" or what is in the way

    def table(self) -> str:
        """The reasons as aligned lines for the log."""
        rows = [("all2all", "experts", ""), *self.reasons]
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
                picked = backend, kernel
                why = "picked"
            reasons.append((backend.caps.name, kernel.caps.name, why or "possible, lower preference"))
    if picked is None:
        lines = "\n".join(f"  {a} with {b}: {why}" for a, b, why in reasons) or "  nothing was offered"
        raise ConfigError(f"no all2all backend and expert kernel fit {needs}:\n{lines}")
    return MoEPlan(*picked, tuple(reasons))


def _obstacle(needs: MoENeeds, backend: All2All, kernel: Experts) -> str | None:
    wire, compute = backend.caps, kernel.caps
    checks = (
        (wire.world_sizes(needs.world_size), f"{wire.name} does not serve {needs.world_size} ranks"),
        (needs.dtype in wire.wires, f"{wire.name} does not carry {needs.dtype}"),
        (
            wire.max_tokens is None or needs.max_tokens <= wire.max_tokens,
            f"{wire.name} takes {wire.max_tokens} tokens a step, {needs.max_tokens} are asked",
        ),
        (
            wire.max_hidden is None or needs.hidden_size <= wire.max_hidden,
            f"{wire.name} takes rows of {wire.max_hidden}, the model's have {needs.hidden_size}",
        ),
        (
            wire.max_in_flight is None or needs.lanes <= wire.max_in_flight,
            f"{wire.name} has {wire.max_in_flight} dispatches in flight, {needs.lanes} lanes are asked",
        ),
        (needs.dtype in compute.dtypes, f"{compute.name} does not compute in {needs.dtype}"),
        (needs.device in compute.devices, f"{compute.name} does not run on {needs.device}"),
        (bool(wire.layouts & compute.layouts), f"{wire.name} and {compute.name} share no layout"),
        (not needs.graphs or (wire.graph_safe and compute.graph_safe), "not both can be captured in a graph"),
    )
    return next((why for holds, why in checks if not holds), None)
