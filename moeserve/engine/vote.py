"""The step vote: what each engine says before a step, and what follows from all of it, as a pure function."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from moeserve.engine.plan import Agreed, Runner, StepPlan
from moeserve.errors import PeerLost, StepSkew
from moeserve.messages import Join, Placed, PlacementTable


class Vote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One engine's row. tokens: of the plan that it has ready, `split_at` of them in the first micro-batch if there
    are two.

    ubatches_ok: two micro-batches would pay, or would not matter, here. placed: how far the pending placement is
    prepared;
    in_force: how far the last decision put it in force.
    """

    step: int
    epoch: int
    has_work: bool = False
    tokens: int = 0
    split_at: int = 0
    requests: int = 0
    ubatches_ok: bool = False
    pause: bool = False  # told to hold: nothing is in flight, and nothing is planned until the group is formed anew
    drained: bool = False  # told to stop: nothing is in flight, and nothing left to do
    placed: int = 0
    in_force: int = 0
    trace: bool = False


class Action(enum.Enum):
    RUN = "run"  # all run a step, those without work an empty one
    PARK = "park"  # nobody has work: sleep until an engine wakes the others
    PAUSE = "pause"  # all hold, or are done: the group may be taken apart between two steps
    STOP = "stop"  # all were told to stop, and are done


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    agreed: Agreed | None = None  # for RUN


def decide(votes: Sequence[Vote]) -> Decision:
    """What follows from the votes of all engines, in rank order: the same on each of them.

    A step runs if anyone has work, or if the placement asks for one: all have prepared more of it than is in force, or
    one has to give it up. Two micro-batches need everybody's consent and a split inside of some batch; engines with
    nothing to
    split go along, one micro-batch of theirs empty. Raises StepSkew when the votes are not about the same step.
    """
    first = votes[0]
    step, epoch = first.step, first.epoch
    has_work, ubatches_ok, is_split, trace, drained, held = False, True, False, False, True, True
    most = most_first = most_second = 0
    placed, in_force = first.placed, first.in_force
    for vote in votes:
        if vote.step != step or vote.epoch != epoch:
            raise StepSkew([(vote.epoch, vote.step) for vote in votes])
        has_work |= vote.has_work
        trace |= vote.trace
        drained &= vote.drained
        held &= vote.pause or vote.drained
        placed, in_force = min(placed, vote.placed), max(in_force, vote.in_force)
        ubatches_ok &= vote.ubatches_ok
        if tokens := vote.tokens:
            is_split |= 0 < vote.split_at < tokens
            most = max(most, tokens)
            most_first, most_second = max(most_first, vote.split_at), max(most_second, tokens - vote.split_at)
    if has_work or placed != in_force:
        if ubatches_ok and is_split:
            return Decision(Action.RUN, Agreed(step, 2, (most_first, most_second), placed, trace))
        return Decision(Action.RUN, Agreed(step, 1, (most, 0), placed, trace))
    return _NOTHING_TO_RUN[Action.STOP if drained else Action.PAUSE if held else Action.PARK]


_NOTHING_TO_RUN = {action: Decision(action) for action in Action}


class DPCoordinator(Protocol):
    """The engines that step together, as the core of one of them sees it. Belongs to the core's loop.

    `comm/dp_coordinator.py` has the real one; an engine that serves alone has none.
    """

    @property
    def epoch(self) -> int: ...

    @property
    def woken(self) -> bool:
        """After a PARK: whether another engine has voted in the next step and waits for us."""
        ...

    @property
    def lost(self) -> PeerLost | None:
        """Why the group is broken, once it is."""
        ...

    async def decide(self, vote: Vote) -> Decision:
        """Votes, waits for all, and returns what all of them get. Raises PeerLost when the group is broken, StepSkew
        when the engines do not vote on the same step."""
        ...

    async def wait_woken(self) -> None:
        """Returns once `woken` is true. Raises PeerLost."""
        ...

    async def broken(self) -> None:
        """Returns once the group is broken."""
        ...

    def close(self, cause: str = "", missing: tuple[int, ...] = ()) -> None:
        """Drops the connections. The others learn why, and which ranks are missing as far as we know."""
        ...


class GroupRunner(Runner, Protocol):
    """What the core needs of a runner whose steps are run together with other engines'.

    A step that fails with PeerLost leaves the runner able to run the same plan again after the next `join`. From such
    a failure until then, later steps fail with PeerLost as well, and before they touch tables or blocks; if one has
    touched them, the runner was `overtaken`. A plan that comes again must not repeat its `stores`: the blocks that they
    save may be overwritten by its first attempt.
    """

    on_placed: Callable[[Placed], None] | None  # set by the core, called from any thread

    @property
    def overtaken(self) -> bool:
        """Whether a step of this epoch had begun when one before it failed. Then no plan can be run again: what was to
        be computed for a request that has left may be gone, and others may count on it."""
        ...

    @property
    def placed(self) -> int:
        """How far the pending placement is prepared, as the vote carries it; never falls within an epoch."""
        ...

    async def join(self, join: Join) -> None:
        """Connects this engine's ranks with the others'; forgets a step that failed. Raises PeerLost.

        A `leave` follows when it fails, or is cancelled because the others will not come."""
        ...

    async def leave(self) -> None:
        """Drops the connections, which wakes whoever waits on them; returns when no step runs any more."""
        ...

    def prepare(self, placement: PlacementTable) -> None:
        """Begins to prepare a placement in the background."""
        ...

    def ubatches_ok(self, plan: StepPlan | None) -> bool:
        """Whether two micro-batches would pay for this plan; True where there is nothing to lose (None: no tokens)."""
        ...
