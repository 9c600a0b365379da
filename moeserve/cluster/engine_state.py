"""The state of one engine in the fleet: an immutable struct, and the events that change it.

`EngineState.after` is the whole state machine of an engine. Only `EngineTable` stores states.
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


class WireLost(msgspec.Struct, frozen=True):
    """Event: the wire to the engine's process is lost. The process may still be alive."""


class JoinSent(msgspec.Struct, frozen=True):
    """Event: the engine is sent a Join, which ends its membership in earlier epochs."""


class Held(msgspec.Struct, frozen=True):
    """Event: the engine begins or ends to wait for other engines of its group."""

    held: bool


class NewRequestsEnded(msgspec.Struct, frozen=True):
    """Event: the engine gets no new requests."""

    ordered: bool  # by the fleet; otherwise the engine got a SIGTERM


class LeftFleet(msgspec.Struct, frozen=True):
    """Event: the engine left the fleet, and its requests went to other engines."""


EngineEvent = FromProcess | WireLost | EngineGone | JoinSent | Held | NewRequestsEnded | LeftFleet


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine and its present process."""

    rank: int  # never changes, even if other engines are added or removed
    host: str  # name of its machine
    machine: int  # number of its machine
    grouped: bool = False  # it needs a Join before it serves
    phase: m.Phase = m.Phase("starting", 0, 0.0)  # progress of the start
    ready: m.Ready | None = None  # facts of the process, once it is loaded
    loaded: bool = False  # this process or an earlier one was ready
    epoch: int = 0  # of the group in which it serves, 0 for none
    left_group: m.LeftGroup | None = None  # why it left its group or could not join
    has_served: bool = False  # the present process was in a group
    held: bool = False  # it waits for other engines, so it need not make progress
    restarts: int = 0
    draining: bool = False  # it gets no new requests
    stop_ordered: bool = False  # the fleet ordered it to stop
    ended_by_order: bool = False  # its process stopped as ordered
    left: bool = False  # it left the fleet, so its messages are ignored
    end: EngineGone | None = None  # the end of its last process, when no restart follows

    @property
    def name(self) -> str:
        """The engine's name in logs and errors."""
        return f"engine {self.rank}"

    @property
    def up(self) -> bool:
        """Whether there is a process that can join a group."""
        return self.ready is not None and self.end is None

    @property
    def serving(self) -> bool:
        """Whether the engine can take requests. A grouped engine needs its whole group for that."""
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
            case JoinSent():
                return _replace(self, epoch=0, left_group=None)
            case m.Joined(epoch=epoch):
                return _replace(self, epoch=epoch, left_group=None, has_served=True)
            case m.LeftGroup(epoch=epoch):
                is_stale = epoch < self.epoch  # it has joined a later epoch since
                return self if is_stale else _replace(self, epoch=0, left_group=event)
            case Held(held):
                return _replace(self, held=held and self.grouped)
            case NewRequestsEnded(ordered):
                stop_ordered = self.stop_ordered or ordered
                return _replace(self, draining=True, stop_ordered=stop_ordered)
            case LeftFleet():
                return _replace(self, left=True)
            case m.Stopped(cause):
                return _replace(self, ended_by_order=not cause)
            case WireLost():
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
                return _replace(self, restarts=self.restarts + 1, ended_by_order=False)
            case EngineGone():
                return _replace(self, end=event)
            case m.StepOutput() | m.Refused() | m.ExpertLoad() | m.PlacementResult() | m.Traced():
                return self
            case _:
                assert_never(event)


_replace = msgspec.structs.replace
