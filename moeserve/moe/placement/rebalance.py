"""Decide when to move experts: collect the load of all engines, and propose a new placement when
its gain exceeds the cost of moving.

This runs in the front end, without torch. One placement is pending at a time.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeserve.messages import ExpertLoad, PlacementResult
from moeserve.moe.placement.placement import ONE_NODE, Nodes, Placement
from moeserve.moe.placement.solve import F64, balance, count_fetched, rank_loads, rescaled, solve

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveThresholds:
    """Thresholds for a move to a better placement, and the estimates behind its gain and its cost.

    Times are seconds in which steps run.
    """

    half_life_s: float = 120.0  # the counted load decays with this half-life
    horizon_s: float = 600.0  # how long the load is assumed to stay the same
    interval_s: float = 30.0  # least time between decisions
    expert_share: float = 0.5  # the part of a step in which all ranks wait for the fullest one
    slowdown: float = 0.2  # how much longer steps take while experts move, as a fraction
    margin: float = 2.0  # least ratio of gain to cost
    min_saving: float = 0.05  # the part of the experts' time below which a gain is noise
    min_tokens: float = 100.0  # least count per expert and layer before any decision
    bytes_per_s: float = 100e6  # the rate at which a rank fetches weights, until it is measured


class Rebalancer:
    """The active placement, the pending one, and the load from which the next is computed."""

    def __init__(
        self,
        placement: Placement,
        expert_bytes: int = 0,
        *,
        thresholds: MoveThresholds = MoveThresholds(),
        nodes: Nodes = ONE_NODE,
    ) -> None:
        self.current = placement  # active on all ranks; sent with a Join
        self.pending: Placement | None = None  # proposed, and not active yet
        self.why = "nothing was counted yet"  # the reason of the last decision
        self.moved_bytes = 0  # fetched since the start, by all ranks that reported
        # Tokens of each expert; decays with half_life_s.
        self.load_LE = np.zeros((placement.num_layers, placement.num_experts))
        self.expert_bytes = expert_bytes  # the size of one expert in one layer
        self._thresholds = thresholds
        self.nodes = nodes  # on which the ranks of `current` run
        self._bytes_per_s = thresholds.bytes_per_s
        self._newest_version = placement.version
        self._noted_at_s: float | None = None
        self._proposed_at_s = 0.0
        self._not_before_s = -np.inf

    def note(self, report: ExpertLoad, now_s: float) -> None:
        """Add an engine's report to the load. now_s: of the monotonic clock that `propose` uses."""
        counts = np.frombuffer(report.counts, "<i8")
        if counts.size != self.load_LE.size:
            raise ValueError(
                f"a report of {counts.size} counts does not fit {self.load_LE.shape} "
                "layers and experts"
            )
        if self._noted_at_s is not None and now_s > self._noted_at_s:
            self.load_LE *= 0.5 ** ((now_s - self._noted_at_s) / self._thresholds.half_life_s)
        self._noted_at_s = now_s
        self.load_LE += counts.reshape(self.load_LE.shape)

    def balance(self) -> F64:
        """Return the balance (mean load / highest load of a rank) of each layer, [L]."""
        return balance(rank_loads(self.load_LE, self.current))

    def propose(self, now_s: float, force: bool = False) -> Placement | None:
        """Return a placement to send to all engines, or None. `why` has the reason.

        None while another placement is pending. force: propose any better placement, whatever it
        costs.
        """
        if self.pending is not None:
            waited_s = now_s - self._proposed_at_s
            self.why = f"placement {self.pending.version} is pending for {waited_s:.0f} s"
            return None
        if not force and (reason := self._why_too_early(now_s)):
            self.why = reason
            return None
        new = solve(self.load_LE, self.current, self._newest_version + 1, self.nodes)
        is_worth_it, self.why = self._weigh_move(new)
        if not is_worth_it and not (force and self._saved_share(new) > 0):
            self._not_before_s = now_s + self._thresholds.interval_s
            return None
        if not is_worth_it:
            self.why = f"requested anyway: {self.why}"
        self.pending = new
        self._newest_version = new.version
        self._proposed_at_s = now_s
        return new

    def conclude(self, notice: PlacementResult, now_s: float) -> bool:
        """Handle an engine's result. Return whether it is the result of `pending`. `current` is
        then active on all ranks, and nothing is pending.
        """
        self.moved_bytes += notice.moved_bytes
        if self.pending is None or notice.version != self.pending.version:
            return False  # another engine has reported the same placement before
        pending = self.pending
        self.pending = None
        self._not_before_s = now_s + self._thresholds.interval_s
        if notice.error:
            # Layers that were active before the error stay active.
            self.current = self.current.with_layers(pending, notice.layers, pending.version)
            kept = f"after {notice.layers} of {pending.num_layers} layers"
            self.why = f"placement {pending.version} was aborted {kept}: {notice.error}"
            logger.warning("%s", self.why)
        else:
            self.current = pending
            self.why = (
                f"placement {pending.version} became active {notice.took_s:.1f} s "
                "after it was proposed"
            )
            if notice.moved_bytes and notice.took_s > 0:
                # Bounded below, because a move may have waited for steps. A measured rate that low
                # would prevent all further moves.
                self._bytes_per_s = max(
                    notice.moved_bytes / notice.took_s, self._thresholds.bytes_per_s / 10
                )
        return True

    def set_nodes(self, nodes: Nodes, expert_bytes: int) -> None:
        """Set the nodes on which the ranks run, and the bytes of one expert in one layer."""
        self.nodes = nodes
        self.expert_bytes = expert_bytes

    def joined(self, placement: Placement) -> None:
        """Set the placement that a Join sends to all ranks. A pending placement is dropped."""
        if self.pending is not None:
            logger.warning("placement %d is dropped: a new group joins", self.pending.version)
        self.current = placement
        self.pending = None
        self._newest_version = max(self._newest_version, placement.version)
        self.why = f"placement {placement.version} came with a new epoch"

    def next_rescaled(
        self,
        num_ranks: int,
        redundant: int,
        nodes: Nodes | None = None,
        old_ranks: Sequence[int] | None = None,
    ) -> Placement:
        """Return the placement for a Join of other ranks, with a new version.

        Call `joined` with it when the Join is sent. old_ranks: see `solve.rescaled`.
        """
        load_LE = self.load_LE if self.load_LE.any() else None
        self._newest_version += 1
        return rescaled(
            self.current,
            num_ranks,
            redundant,
            self._newest_version,
            load_LE=load_LE,
            nodes=nodes or self.nodes,
            old_ranks=old_ranks,
        )

    def _why_too_early(self, now_s: float) -> str:
        if now_s < self._not_before_s:
            return self.why  # still the reason of the last decision
        counted = self.load_LE.mean(1).min()
        if counted < self._thresholds.min_tokens:
            return (
                f"{counted:.0f} tokens per expert were counted recently; "
                f"{self._thresholds.min_tokens:.0f} are needed"
            )
        return ""

    def _saved_share(self, new: Placement) -> float:
        """Return the part of the experts' time that `new` saves, because each layer waits for the
        rank with the highest load.
        """
        before, after = (
            rank_loads(self.load_LE, placement).max(1).sum() for placement in (self.current, new)
        )
        return 1 - float(after / before) if before else 0.0

    def _weigh_move(self, new: Placement) -> tuple[bool, str]:
        """Return whether the gain of `new` exceeds the cost of moving, and the reason."""
        thresholds = self._thresholds
        saved_share = self._saved_share(new)
        now = f"mean/fullest rank is {self.balance().mean():.2f}"
        if saved_share < thresholds.min_saving:
            return (
                False,
                f"{now}; another placement would save {saved_share:.1%} of the experts' time: "
                "not worth it",
            )
        num_bytes = int(count_fetched(self.current, new).max()) * self.expert_bytes
        gain_s = saved_share * thresholds.expert_share * thresholds.horizon_s
        cost_s = num_bytes / self._bytes_per_s * thresholds.slowdown
        is_worth_it = gain_s > thresholds.margin * cost_s
        better = balance(rank_loads(self.load_LE, new)).mean()
        estimate = (
            f"{now}; placement {new.version} would make it {better:.2f} and save "
            f"{gain_s:.1f} s of {thresholds.horizon_s:.0f} s; moving {num_bytes / 1e6:.0f} MB "
            f"to a rank costs {cost_s:.1f} s"
        )
        return is_worth_it, estimate if is_worth_it else f"{estimate}: not worth it"
