"""Decides when to move experts: watches the load of all engines, and proposes a placement when that
pays.

NumPy only: this runs in the front end. One placement is on its way at a time.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeserve.messages import ExpertLoad, PlacementResult
from moeserve.moe.placement.placement import ONE_NODE, Nodes, Placement
from moeserve.moe.placement.solve import F64, balance, moved, rank_loads, rescaled, solve

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Thresholds for a move to a better placement. Times are seconds in which steps run.

    half_life_s: of the counted load. horizon_s: how long the load is assumed to stay the same.
    expert_share: the part of a step in which all ranks wait for the fullest one's experts.
    slowdown: the part of a step that moving takes. margin: least ratio of gain to cost. min_saving:
    least part of the experts' time that is no noise. min_tokens: to be counted per expert and layer
    before any decision. bytes_per_s: of one rank, until it was measured.
    """

    half_life_s: float = 120.0
    horizon_s: float = 600.0
    interval_s: float = 30.0
    expert_share: float = 0.5
    slowdown: float = 0.2
    margin: float = 2.0
    min_saving: float = 0.05
    min_tokens: float = 100.0
    bytes_per_s: float = 100e6


class Rebalancer:
    """The placement active as the front end knows it, the one on its way, and the load that
    decides about the next.

    current: the placement for a Join. pending: the one that was proposed and is not active yet.
    why: the last decision, in words. moved_bytes: fetched since the start, by all ranks that
    reported. expert_bytes: of one expert in one layer. nodes: under the ranks of `current`.
    """

    def __init__(
        self,
        placement: Placement,
        expert_bytes: int = 0,
        *,
        gate: Gate = Gate(),
        nodes: Nodes = ONE_NODE,
    ) -> None:
        self.current = placement
        self.pending: Placement | None = None
        self.why = "nothing was counted yet"
        self.moved_bytes = 0
        self.load_LE = np.zeros(
            (placement.num_layers, placement.num_experts)
        )  # fades with half_life_s
        self.expert_bytes = expert_bytes
        self._gate = gate
        self.nodes = nodes
        self._bytes_per_s = gate.bytes_per_s
        self._newest = placement.version
        self._noted_s: float | None = None
        self._proposed_s = 0.0
        self._not_before_s = -np.inf

    def note(self, report: ExpertLoad, now_s: float) -> None:
        """Add an engine's report to the load. now_s: on any monotonic clock, the same as for
        `propose`.
        """
        counts = np.frombuffer(report.counts, "<i8")
        if counts.size != self.load_LE.size:
            raise ValueError(
                f"a report of {counts.size} counts does not fit {self.load_LE.shape} "
                "layers and experts"
            )
        if self._noted_s is not None and now_s > self._noted_s:
            self.load_LE *= 0.5 ** ((now_s - self._noted_s) / self._gate.half_life_s)
        self._noted_s = now_s
        self.load_LE += counts.reshape(self.load_LE.shape)

    def balance(self) -> F64:
        """Return mean over fullest rank of each layer, [L], for the counted load and the placement
        active.
        """
        return balance(rank_loads(self.load_LE, self.current))

    def propose(self, now_s: float, force: bool = False) -> Placement | None:
        """Return the placement to send to all engines now, or None; `why` has the reason.

        force: at any cost, if there is a better one. Nothing is proposed while a placement is on
        its way.
        """
        if self.pending is not None:
            waited_s = now_s - self._proposed_s
            self.why = f"placement {self.pending.version} is on its way for {waited_s:.0f} s"
            return None
        if not force and (reason := self._too_early(now_s)):
            self.why = reason
            return None
        new = solve(self.load_LE, self.current, self._newest + 1, self.nodes)
        worth, self.why = self._weigh(new)
        if not worth and not (force and self._saving(new) > 0):
            self._not_before_s = now_s + self._gate.interval_s
            return None
        if not worth:
            self.why = f"asked for, though: {self.why}"
        self.pending = new
        self._newest = new.version
        self._proposed_s = now_s
        return new

    def conclude(self, notice: PlacementResult, now_s: float) -> bool:
        """Take an engine's answer. Returns whether that ends `pending`: then `current` is active
        on all ranks.
        """
        self.moved_bytes += notice.moved_bytes
        if self.pending is None or notice.version != self.pending.version:
            return False  # the other engines' answers about the same placement
        pending = self.pending
        self.pending = None
        self._not_before_s = now_s + self._gate.interval_s
        if notice.error:
            self.current = self.current.with_layers(pending, notice.layers, pending.version)
            kept = f"after {notice.layers} of {pending.num_layers} layers"
            self.why = f"placement {pending.version} was given up {kept}: {notice.error}"
            logger.warning("%s", self.why)
        else:
            self.current = pending
            self.why = (
                f"placement {pending.version} is active since {notice.took_s:.1f} s "
                "after it was proposed"
            )
            if notice.moved_bytes and notice.took_s > 0:
                # Not what a move took that waited for steps to come: it would forbid all others.
                self._bytes_per_s = max(
                    notice.moved_bytes / notice.took_s, self._gate.bytes_per_s / 10
                )
        return True

    def set_nodes(self, nodes: Nodes, expert_bytes: int) -> None:
        """Set the nodes under the ranks, and the bytes of one expert in one layer."""
        self.nodes = nodes
        self.expert_bytes = expert_bytes

    def joined(self, placement: Placement) -> None:
        """Note that a Join brings all ranks to this placement; they all drop the one that was on
        its way.
        """
        if self.pending is not None:
            logger.warning(
                "placement %d is dropped: the group is formed anew", self.pending.version
            )
        self.current = placement
        self.pending = None
        self._newest = max(self._newest, placement.version)
        self.why = f"placement {placement.version} came with a new epoch"

    def rescaled(
        self,
        num_ranks: int,
        redundant: int,
        nodes: Nodes | None = None,
        was: Sequence[int] | None = None,
    ) -> Placement:
        """Return the placement with which to Join other ranks; call `joined` with it then. was:
        see `rescaled`.
        """
        load_LE = self.load_LE if self.load_LE.any() else None
        self._newest += 1
        return rescaled(
            self.current, num_ranks, redundant, self._newest, load_LE, nodes or self.nodes, was
        )

    def _too_early(self, now_s: float) -> str:
        if now_s < self._not_before_s:
            return self.why
        counted = self.load_LE.mean(1).min()
        if counted < self._gate.min_tokens:
            return (
                f"{counted:.0f} tokens per expert were counted recently; "
                f"{self._gate.min_tokens:.0f} are needed"
            )
        return ""

    def _saving(self, new: Placement) -> float:
        """Return the part of the experts' time that `new` saves, if all layers wait for their
        fullest rank.
        """
        before, after = (rank_loads(self.load_LE, p).max(1).sum() for p in (self.current, new))
        return 1 - float(after / before) if before else 0.0

    def _weigh(self, new: Placement) -> tuple[bool, str]:
        gate = self._gate
        saving = self._saving(new)
        even = f"mean/fullest rank is {self.balance().mean():.2f}"
        if saving < gate.min_saving:
            return (
                False,
                f"{even}; another placement would save {saving:.1%} of the experts' time: "
                "not worth it",
            )
        num_bytes = int(moved(self.current, new).max()) * self.expert_bytes
        gain_s = saving * gate.expert_share * gate.horizon_s
        cost_s = num_bytes / self._bytes_per_s * gate.slowdown
        worth = gain_s > gate.margin * cost_s
        better = balance(rank_loads(self.load_LE, new)).mean()
        what = (
            f"{even}; placement {new.version} would make it {better:.2f} and save "
            f"{gain_s:.1f} s of "
            f"{gate.horizon_s:.0f} s; moving {num_bytes / 1e6:.0f} MB to a rank costs "
            f"{cost_s:.1f} s"
        )
        return worth, what if worth else f"{what}: not worth it"
