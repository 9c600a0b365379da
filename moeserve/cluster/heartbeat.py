"""Forward progress, seen from outside: pings, pongs and a step counter tell work from a hang."""

from __future__ import annotations

from moeserve.messages import Ping, Pong

INTERVAL_S = 1.0
UNHEALTHY_S = 5.0  # without progress for this long (or two long steps) it is not ready for new requests
STALL_S = 60.0  # without progress for this long (or ten long steps) it is given up


class Heartbeat:
    """The time of the last progress. Times are monotonic seconds, given by the caller.

    An engine makes progress when it answers and either has nothing to do or has counted another step. So one
    number covers a blocked loop, a stopped process and a step that never ends. It answers between steps only:
    step_s, the longest step to expect, says how much silence is normal.
    """

    def __init__(self, now_s: float, step_s: float = 0.0) -> None:
        self._progress_s = self._answer_s = self._ping_s = now_s
        self._step_s = step_s
        self._seq = 0
        self._steps = -1

    def ping(self, now_s: float) -> Ping:
        """The next ping to send; call it once per INTERVAL_S."""
        late_s = now_s - self._ping_s - INTERVAL_S
        if late_s > INTERVAL_S:  # it was us who stood still (stopped, or a blocked loop), so we know nothing
            self._progress_s += late_s
            self._answer_s += late_s
        self._ping_s = now_s
        self._seq += 1
        return Ping(self._seq)

    def pong(self, msg: Pong, now_s: float) -> None:
        if not msg.busy or msg.steps != self._steps:
            self._progress_s = now_s
        self._steps = msg.steps
        self._answer_s = now_s

    def rest(self, now_s: float) -> None:
        """Nothing but answers is expected of it at the moment."""
        self._progress_s = now_s

    def silent_s(self, now_s: float) -> float:
        """Seconds since the last answer."""
        return max(0.0, now_s - self._answer_s)

    def is_mute(self, now_s: float, stall_s: float = STALL_S) -> bool:
        """Whether an engine of which only answers are expected will give none any more. One that leaves its group
        lets the steps that run come to an end first."""
        return self.silent_s(now_s) > max(stall_s, 3 * self._step_s)

    def stalled_s(self, now_s: float) -> float:
        """Seconds since the last progress; a little over INTERVAL_S is normal."""
        return max(0.0, now_s - self._progress_s)

    def healthy(self, now_s: float) -> bool:
        return self.stalled_s(now_s) <= max(UNHEALTHY_S, 2 * self._step_s)

    def hangs(self, now_s: float, stall_s: float = STALL_S, *, grouped: bool = False) -> bool:
        """Whether waiting any longer makes no sense.

        A group stands still with any one of its engines: those that answer get twice the time, because it is more
        likely the silent one's fault.
        """
        patience_s = max(stall_s, 10 * self._step_s)
        if grouped and now_s - self._answer_s <= patience_s:
            patience_s *= 2
        return self.stalled_s(now_s) > patience_s
