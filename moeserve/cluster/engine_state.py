"""The state of one engine as the fleet knows it: an immutable struct, and its events.

`EngineState.after` is the whole state machine of an engine. Only `EngineTable` keeps its results.
"""

from typing import assert_never

import msgspec

from moeserve import messages as m
from moeserve.cluster.link import EngineGone

FromProcess = (
    m.Phase
    | m.Ready
    | m.StepOutput
    | m.Refused
    | m.Stopped
    | m.Joined
    | m.LeftGroup
    | m.ExpertLoad
    | m.PlacementResult
    | m.Traced
)


class ProcessLost(msgspec.Struct, frozen=True):
    """Event: the engine's process sends nothing more. It may not be dead yet."""


class MeetingBegun(msgspec.Struct, frozen=True):
    """Event: the engine gets a Join; its membership of earlier epochs is void."""


class Held(msgspec.Struct, frozen=True):
    """Event: the engine waits for other engines of its group, or no longer does."""

    held: bool


class NewRequestsEnded(msgspec.Struct, frozen=True):
    """Event: the engine gets no new requests. ordered: by us; otherwise it got a SIGTERM."""

    ordered: bool


class LeftFleet(msgspec.Struct, frozen=True):
    """Event: the engine is no longer part of the fleet; its requests went to other engines."""


EngineEvent = (
    FromProcess | ProcessLost | EngineGone | MeetingBegun | Held | NewRequestsEnded | LeftFleet
)


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine and the process that it has at the moment."""

    rank: int  # stays the same, whatever other engines come and go
    host: str  # name of its machine
    machine: int  # number of its machine
    grouped: bool = False  # it serves after a Join only
    phase: m.Phase = m.Phase("starting", 0, 0.0)  # progress of its start
    ready: m.Ready | None = None  # facts of the process, from the moment when it could join
    loaded: bool = False  # one of its processes was ready
    epoch: int = 0  # of the group in which it serves, 0 for none
    left_group: m.LeftGroup | None = None  # why it left its group, or could not join
    has_served: bool = False  # the present process was in a group
    held: bool = False  # it waits for other engines, so it need not make progress
    restarts: int = 0
    draining: bool = False  # no new requests
    told_to_stop: bool = False
    obeyed: bool = False  # its process ended because it was told to
    left: bool = False  # it left the fleet: its messages do not count any more
    end: EngineGone | None = None  # the final end, which no restart follows

    @property
    def name(self) -> str:
        """The name for logs and errors."""
        return f"engine {self.rank}"

    @property
    def up(self) -> bool:
        """Whether there is a process that could join a group."""
        return self.ready is not None and self.end is None

    @property
    def serving(self) -> bool:
        """Whether the engine, and all of its group, may get requests."""
        return self.up and self.epoch > 0 and not self.held and not self.draining

    @property
    def label(self) -> str:
        """The state in one word, for `EngineView.state`."""
        if self.end is not None:
            return "gone"
        if not self.up:
            return "lost" if self.restarts else "loading"
        if self.draining:
            return "draining"
        return "serving" if self.epoch else "waiting"

    def after(self, event: EngineEvent) -> "EngineState":  # noqa: C901  (a case per event)
        """Return the state after an event."""
        match event:
            case m.Phase():
                return _replace(self, phase=event)
            case m.Ready():
                return _replace(self, ready=event, loaded=True)
            case MeetingBegun():
                return _replace(self, epoch=0, left_group=None)
            case m.Joined(epoch=epoch):
                return _replace(self, epoch=epoch, left_group=None, has_served=True)
            case m.LeftGroup(epoch=epoch):
                stale = epoch < self.epoch
                return self if stale else _replace(self, epoch=0, left_group=event)
            case Held(held):
                return _replace(self, held=held and self.grouped)
            case NewRequestsEnded(ordered):
                told_to_stop = self.told_to_stop or ordered
                return _replace(self, draining=True, told_to_stop=told_to_stop)
            case LeftFleet():
                return _replace(self, left=True)
            case m.Stopped(cause):
                return _replace(self, obeyed=not cause)
            case ProcessLost():
                return _replace(
                    self,
                    ready=None,
                    epoch=0,
                    left_group=None,
                    has_served=False,
                    held=self.grouped,
                    draining=False,
                )
            case EngineGone() if event.restarting:
                return _replace(self, restarts=self.restarts + 1, obeyed=False)
            case EngineGone():
                return _replace(self, end=event)
            case m.StepOutput() | m.Refused() | m.ExpertLoad() | m.PlacementResult() | m.Traced():
                return self
            case _:
                assert_never(event)


_replace = msgspec.structs.replace
