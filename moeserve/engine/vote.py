"""The step vote of a group of engines.

Before each step, every engine sends a `Vote`. `decide` is a pure function of all votes, so every
engine computes the same `Decision`. comm/dp_coordinator.py exchanges the votes.
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
    """One engine's vote on a step."""

    step: int
    epoch: int
    has_work: bool = False  # the engine has a plan
    tokens: int = 0  # tokens in the engine's plan
    split_at: int = 0  # tokens in the first micro-batch, if there are two
    requests: int = 0  # rows in the engine's plan
    ubatches_ok: bool = False  # two micro-batches would be faster for the engine, or as fast
    # The engine has a newer Join: until the next group is formed, it plans nothing, and nothing is
    # in flight.
    pause: bool = False
    drained: bool = False  # the engine has a Drain, and nothing is in flight or left to do
    prepared: int = 0  # progress of preparing the pending placement (runner/experts.py)
    active: int = 0  # the progress that the last decision activated
    trace: bool = False  # the engine was asked to record the next step


class Action(enum.Enum):
    """The kinds of decision."""

    RUN = "run"  # all engines run a step; it is empty on engines without work
    PARK = "park"  # no engine has work: sleep until one wakes the others
    PAUSE = "pause"  # all engines pause or are drained, and leave the group
    STOP = "stop"  # all engines are drained


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of a vote, equal on all engines."""

    action: Action
    step_decision: StepDecision | None = None  # only with RUN


def decide(votes: Sequence[Vote]) -> Decision:
    """Return the decision that follows from the votes of all engines, in rank order.

    A step runs if any engine has work. A step also runs if the placement of experts advances: all
    engines have prepared more layers than are active, or one engine has abandoned the placement.

    The step has two micro-batches if all engines agree and at least one engine can split its batch.
    An engine that cannot split its batch runs one empty micro-batch.

    Raises StepSkew if the votes are not on the same step.
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
    max_tokens = 0
    max_first = 0  # tokens in the first of two micro-batches
    max_second = 0  # tokens in the second one
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
            max_tokens = max(max_tokens, tokens)
            max_first = max(max_first, vote.split_at)
            max_second = max(max_second, tokens - vote.split_at)
    if has_work or prepared != active:
        if ubatches_ok and is_split:
            return Decision(
                Action.RUN, StepDecision(step, 2, (max_first, max_second), prepared, trace)
            )
        return Decision(Action.RUN, StepDecision(step, 1, (max_tokens, 0), prepared, trace))
    if drained:
        return _NOTHING_TO_RUN[Action.STOP]
    return _NOTHING_TO_RUN[Action.PAUSE if paused else Action.PARK]


_NOTHING_TO_RUN = {action: Decision(action) for action in Action}


class DPCoordinator(Protocol):
    """One engine's connection to the other engines of its group (comm/dp_coordinator.py).

    All methods are called on the core's event loop.
    """

    @property
    def epoch(self) -> int:
        """The group's membership epoch."""

    @property
    def is_woken(self) -> bool:
        """Whether, after a PARK, another engine has voted on the next step and waits."""

    @property
    def lost(self) -> PeerLost | None:
        """The error that broke the group; None while it works."""

    async def exchange(self, vote: Vote) -> Decision:
        """Vote, wait for all votes, and return the common decision.

        Raises PeerLost if the group is broken, StepSkew if the engines vote on different steps.
        """

    async def wait_woken(self) -> None:
        """Wait until `is_woken` is true. Raises PeerLost."""

    async def wait_lost(self) -> None:
        """Wait until the group is broken."""

    def close(self, cause: str = "", missing_ranks: tuple[int, ...] = ()) -> None:
        """Close the connections. The other engines receive the cause and the missing ranks."""


class GroupRunner(Runner, Protocol):
    """A runner whose steps run together with those of other engines.

    A plan whose step failed with PeerLost can run again after the next `join`. Until then, later
    steps fail with PeerLost too, before they change tables or blocks. If a later step had begun
    already, the runner is `overtaken`.

    The `stores` of a plan must not be repeated with it, because the first attempt may have
    overwritten the blocks that they save.
    """

    # Set by the core. The runner calls it with the result of each placement, from any thread.
    on_placement_result: Callable[[PlacementResult], None] | None

    @property
    def overtaken(self) -> bool:
        """Whether a step of this epoch had begun when the step before it failed. Then no plan can
        run again, because the later step may have overwritten its blocks.
        """

    @property
    def prepared(self) -> int:
        """Progress of preparing the pending placement, as in the vote. It never decreases within an
        epoch.
        """

    async def join(self, join: Join) -> None:
        """Connect this engine's ranks to those of the other engines. Clear `overtaken`.

        Raises PeerLost. The caller calls `leave` if this fails or is cancelled.
        """

    async def leave(self) -> None:
        """Close the connections, so that a step which waits for other ranks fails. Wait until no
        step runs.
        """

    def prepare(self, placement: PlacementTable) -> None:
        """Start to prepare a placement in the background."""

    def ubatches_ok(self, plan: StepPlan | None) -> bool:
        """Return whether two micro-batches would be faster for this plan, or as fast.

        plan: None: this engine has no tokens in the step.
        """
