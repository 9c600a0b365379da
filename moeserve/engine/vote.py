"""The step vote: the message of each engine before a step, and the decision as a pure function of
all of them.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from moeserve.engine.plan import Runner, StepDecision, StepPlan
from moeserve.errors import PeerLost, StepSkew
from moeserve.messages import Join, PlacementResult, PlacementTable


class Vote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One engine's vote on a step.

    tokens: those of its next plan, `split_at` of them in the first micro-batch if there are two.
    ubatches_ok: two micro-batches would pay, or would not matter, on this engine. prepared: how far
    the pending placement is prepared; active: how far the last decision put it in force.
    """

    step: int
    epoch: int
    has_work: bool = False
    tokens: int = 0
    split_at: int = 0
    requests: int = 0
    ubatches_ok: bool = False
    pause: bool = (
        False  # has a newer Join: nothing is in flight or planned until the next group is formed
    )
    drained: bool = False  # has a Drain, and nothing is in flight or left to do
    prepared: int = 0
    active: int = 0
    trace: bool = False


class Action(enum.Enum):
    """The kinds of decision."""

    RUN = "run"  # all run a step, those without work an empty one
    PARK = "park"  # no engine has work: sleep until one wakes the others
    PAUSE = "pause"  # all pause or are drained: the group may be left between two steps
    STOP = "stop"  # all are drained


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of a vote, equal on all engines."""

    action: Action
    step_decision: StepDecision | None = None  # for RUN


def decide(votes: Sequence[Vote]) -> Decision:
    """Returns the decision that follows from the votes of all engines, in rank order.

    A step runs if any engine has work, or if the placement needs one: all have prepared more than
    is in force, or one has given it up. Two micro-batches need the consent of all and a split
    inside some batch; engines with nothing to split run one empty micro-batch. Raises StepSkew if
    the votes are not on the same step.
    """
    first = votes[0]
    step = first.step
    epoch = first.epoch
    has_work = False
    ubatches_ok = True
    is_split = False
    trace = False
    drained = True
    paused = True
    most = most_first = most_second = 0
    prepared = first.prepared
    active = first.active
    for vote in votes:
        if vote.step != step or vote.epoch != epoch:
            raise StepSkew([(vote.epoch, vote.step) for vote in votes])
        has_work |= vote.has_work
        trace |= vote.trace
        drained &= vote.drained
        paused &= vote.pause or vote.drained
        prepared = min(prepared, vote.prepared)
        active = max(active, vote.active)
        ubatches_ok &= vote.ubatches_ok
        if tokens := vote.tokens:
            is_split |= 0 < vote.split_at < tokens
            most = max(most, tokens)
            most_first = max(most_first, vote.split_at)
            most_second = max(most_second, tokens - vote.split_at)
    if has_work or prepared != active:
        if ubatches_ok and is_split:
            return Decision(
                Action.RUN, StepDecision(step, 2, (most_first, most_second), prepared, trace)
            )
        return Decision(Action.RUN, StepDecision(step, 1, (most, 0), prepared, trace))
    return _NOTHING_TO_RUN[Action.STOP if drained else Action.PAUSE if paused else Action.PARK]


_NOTHING_TO_RUN = {action: Decision(action) for action in Action}


class DPCoordinator(Protocol):
    """One engine's connection to the engines that step together (comm/dp_coordinator.py), on the
    core's loop.
    """

    @property
    def epoch(self) -> int:
        """The group's membership epoch."""

    @property
    def woken(self) -> bool:
        """Whether, after a PARK, another engine has voted on the next step and waits for us."""

    @property
    def lost(self) -> PeerLost | None:
        """The error that broke the group; None while it works."""

    async def decide(self, vote: Vote) -> Decision:
        """Votes, waits for all votes, and returns the common decision. Raises PeerLost if the group
        is broken, StepSkew if the engines do not vote on the same step."""

    async def wait_woken(self) -> None:
        """Returns once `woken` is true. Raises PeerLost."""

    async def broken(self) -> None:
        """Returns once the group is broken."""

    def close(self, cause: str = "", missing: tuple[int, ...] = ()) -> None:
        """Drops the connections. The other engines learn the cause and the ranks known to be
        missing.
        """


class GroupRunner(Runner, Protocol):
    """A runner whose steps run together with those of other engines.

    After a step that failed with PeerLost, the same plan can run again after the next `join`. Until
    then later steps fail with PeerLost as well, before they touch tables or blocks; if one has
    touched them, the runner is `overtaken`. A repeated plan must not repeat its `stores`: its first
    attempt may have overwritten the blocks that they save.
    """

    on_placement_result: (
        Callable[[PlacementResult], None] | None
    )  # set by the core, called from any thread

    @property
    def overtaken(self) -> bool:
        """Whether a step of this epoch had begun when one before it failed. Then no plan can run
        again: its blocks may have been overwritten by the later step."""

    @property
    def prepared(self) -> int:
        """Progress of preparing the pending placement, as in the vote; never decreases within an
        epoch.
        """

    async def join(self, join: Join) -> None:
        """Connects this engine's ranks with the other engines' and forgets a failed step. Raises
        PeerLost.

        `leave` is called if this fails or is cancelled."""

    async def leave(self) -> None:
        """Drops the connections, which fails a step that waits on them; returns when no step runs
        any more.
        """

    def prepare(self, placement: PlacementTable) -> None:
        """Starts preparing a placement in the background."""

    def ubatches_ok(self, plan: StepPlan | None) -> bool:
        """Returns whether two micro-batches would pay for this plan, or would cost nothing (None:
        no tokens).
        """
