"""The front end's view of an engine, wherever that runs: messages in, messages out, and notice of its end.

    link.send(EngineIn)  -->  engine  -->  link.inbox: Phase ... Ready, then StepOutput and the rest of EngineOut,
                                           and EngineGone; after a restart Phase ... Ready once more

`ChildEngine` (child_engine.py) supervises a process, `LocalEngine` (local_engine.py) runs in this one. `Fleet`
(fleet.py) has several processes: when one of them dies, RequestsLost comes in place of EngineGone.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from moeserve.actor.inbox import Inbox
from moeserve.errors import AddressInUse, CheckpointError, ConfigError, DoesNotFit, EngineDied, MoeserveError
from moeserve.messages import EngineIn, EngineOut, Phase, Ready

_ERRORS_BY_EXIT_CODE: dict[int, type[ConfigError]] = {
    error.exit_code: error for error in (ConfigError, CheckpointError, AddressInUse, DoesNotFit)
}


class EngineGone(msgspec.Struct, frozen=True, kw_only=True):
    """The engine ended; nothing of it comes after this. What it was doing is lost and may be sent again.

    exit_code: 0 after an ordered stop, negative: minus the signal. restart_in_s None: there will be no other
    engine on this link.
    """

    exit_code: int
    cause: str
    log_tail: tuple[str, ...] = ()
    restart_in_s: float | None = None

    @property
    def restarting(self) -> bool:
        return self.restart_in_s is not None

    def error(self) -> MoeserveError:
        """What to raise where this end is the end: ConfigError and its kin by exit code, otherwise EngineDied."""
        kind = _ERRORS_BY_EXIT_CODE.get(self.exit_code)
        return kind(self.cause) if kind else EngineDied("\n    ".join([self.cause, *self.log_tail]))


class RequestsLost(msgspec.Struct, frozen=True, kw_only=True):
    """An engine among several ended: nothing more comes of these requests until they are submitted again.

    engine: its data-parallel rank. died: False when it was retired because fewer engines are wanted.
    """

    rids: tuple[int, ...]
    engine: int
    died: bool
    cause: str


class Resized(msgspec.Struct, frozen=True):
    """Engines came, went or were replaced: these are the facts from now on. Requests go on."""

    ready: Ready


FromEngine = EngineOut | EngineGone | RequestsLost | Resized


def is_config_error(exit_code: int) -> bool:
    """Whether the engine ended for a reason that another start would meet again."""
    return exit_code in _ERRORS_BY_EXIT_CODE


class EngineLink(Protocol):
    """One engine. Belongs to the loop on which it was started."""

    inbox: Inbox[FromEngine]

    @property
    def phase(self) -> Phase:
        """Progress of the start-up that runs, or the last one."""
        ...

    @property
    def ready(self) -> Ready | None:
        """The engine's facts while it serves, None while there is none or it loads."""
        ...

    @property
    def stalled_s(self) -> float:
        """Seconds for which the engine has had work and made no progress, or has not answered."""
        ...

    @property
    def healthy(self) -> bool:
        """Serves and makes progress: what a readiness probe wants to know."""
        ...

    async def start(self) -> None:
        """Begins; returns before the engine is ready. Raises ConfigError if it cannot even be started."""
        ...

    async def until_ready(self) -> Ready:
        """Waits for ready or dead. Raises `EngineGone.error()` when there will be no engine."""
        ...

    def send(self, msg: EngineIn) -> None:
        """Tells the engine. Raises Overloaded if it does not keep up.

        Without an engine the message is dropped: EngineGone has said, or will say next, that nothing reaches it.
        """
        ...

    async def stop(self, deadline_s: float) -> None:
        """Lets running requests finish for up to `deadline_s`, then ends it. The last notice is a final EngineGone.

        May be called again with a shorter deadline.
        """
        ...
