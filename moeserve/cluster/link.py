"""The link from a front end to its engines, wherever they run: messages in, messages out.

    link.send(EngineIn)  -->  engine  -->  link.outbox: Phase ... Ready, then StepOutput and the
                                           rest of EngineOut, and EngineGone;
                                           after a restart Phase ... Ready once more

There are two links. `Fleet` (fleet.py) supervises engine processes; when one of several dies, it
sends RequestsLost in place of EngineGone. `LocalEngine` (local_engine.py) runs in this process.
"""

from typing import Protocol

import msgspec

from moeserve.actor.actor import Inbox
from moeserve.errors import (
    AddressInUse,
    CheckpointError,
    ConfigError,
    DoesNotFit,
    EngineDied,
    MoeserveError,
)
from moeserve.messages import EngineIn, EngineOut, Ready

INBOX_LIMIT = 20_000  # messages from an engine that may wait for the front end

_ERRORS_BY_EXIT_CODE: dict[int, type[ConfigError]] = {
    error.exit_code: error for error in (ConfigError, CheckpointError, AddressInUse, DoesNotFit)
}


class EngineGone(msgspec.Struct, frozen=True, kw_only=True):
    """The engine has ended. Its requests are lost and may be submitted again."""

    exit_code: int  # 0 after an ordered stop; negative: minus the signal
    cause: str
    log_tail: tuple[str, ...] = ()
    restart_in_s: float | None = None  # seconds to the next start, None if there is none

    @property
    def restarting(self) -> bool:
        """Whether another engine follows on this link."""
        return self.restart_in_s is not None

    def error(self) -> MoeserveError:
        """Return the exception for a final end: a ConfigError by exit code, or EngineDied."""
        kind = _ERRORS_BY_EXIT_CODE.get(self.exit_code)
        return kind(self.cause) if kind else EngineDied("\n    ".join([self.cause, *self.log_tail]))


class RequestsLost(msgspec.Struct, frozen=True, kw_only=True):
    """One of several engines has ended. These requests must be submitted again."""

    rids: tuple[int, ...]
    engine: int  # its data-parallel rank
    died: bool  # False if it was removed
    cause: str


class Resized(msgspec.Struct, frozen=True):
    """Engines were added, removed or replaced, while requests continue."""

    ready: Ready  # the new facts


FromEngine = EngineOut | EngineGone | RequestsLost | Resized


def is_config_error(exit_code: int) -> bool:
    """Return whether an engine ended with a ConfigError, which a restart would repeat."""
    return exit_code in _ERRORS_BY_EXIT_CODE


class EngineLink(Protocol):
    """One engine, or several that look like one. Belongs to the loop on which it was started."""

    outbox: Inbox[FromEngine]  # messages to the front end

    @property
    def healthy(self) -> bool:
        """Whether the engine serves and makes progress, for readiness probes."""

    async def start(self) -> None:
        """Start the engine, and return before it is ready.

        Raises ConfigError if it cannot be started.
        """

    def send(self, msg: EngineIn) -> None:
        """Send the engine a message. Raises Overloaded if it does not keep up.

        If there is no engine, the message is dropped, and EngineGone was sent or is the next
        message.
        """

    async def close(self, timeout_s: float) -> None:
        """Let running requests finish for up to `timeout_s`, then end the engine.

        The last message is EngineGone. May be called again with a shorter timeout.
        """
