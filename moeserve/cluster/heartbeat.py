"""Detects hangs from outside: pings, pongs and a step counter tell work from a hang."""

from moeserve.messages import Ping, Pong

INTERVAL_S = 1.0
# Without progress for this long (or two long steps) an engine is not ready for new requests.
UNHEALTHY_S = 5.0
STALL_S = 60.0  # without progress for this long (or ten long steps) it is killed


class ProgressMonitor:
    """Time since the last progress of an engine. Times are monotonic seconds, given by the caller.

    An engine makes progress when it answers and either has nothing to do or has counted another
    step. So a blocked loop, a stopped process and a step that never ends all show. Engines answer
    between steps only. step_s: the longest step to expect, and so the silence that is normal.
    """

    def __init__(self, now_s: float, step_s: float = 0.0) -> None:
        self._progress_s = self._answer_s = self._ping_s = now_s
        self._step_s = step_s
        self._seq = 0
        self._steps = -1

    def ping(self, now_s: float) -> Ping:
        """Return the next ping to send; call it once per INTERVAL_S."""
        late_s = now_s - self._ping_s - INTERVAL_S
        if late_s > INTERVAL_S:
            # This process stood still (stopped, or a blocked loop), so it knows nothing.
            self._progress_s += late_s
            self._answer_s += late_s
        self._ping_s = now_s
        self._seq += 1
        return Ping(self._seq)

    def pong(self, msg: Pong, now_s: float) -> None:
        """Note an answer."""
        if not msg.busy or msg.steps != self._steps:
            self._progress_s = now_s
        self._steps = msg.steps
        self._answer_s = now_s

    def stalled_s(self, now_s: float) -> float:
        """Seconds since the last progress; a little over INTERVAL_S is normal."""
        return max(0.0, now_s - self._progress_s)

    def healthy(self, now_s: float) -> bool:
        """Return whether the last progress is recent enough for new requests."""
        return self.stalled_s(now_s) <= max(UNHEALTHY_S, 2 * self._step_s)

    def fault(
        self, now_s: float, stall_s: float = STALL_S, *, held: bool = False, grouped: bool = False
    ) -> str:
        """Return why the engine must be killed, the end of a sentence about it; "" if it need not
        be.

        held: the engine waits for others, so only answers are expected. One that leaves its group
        first ends its steps. grouped: a group stands still with any one of its engines. Those that
        answer get twice the time, because the silent one is more likely at fault.
        """
        silent_s = now_s - self._answer_s
        if held:
            self._progress_s = now_s
            return (
                f"has not answered for {silent_s:.0f} s"
                if silent_s > max(stall_s, 3 * self._step_s)
                else ""
            )
        patience_s = max(stall_s, 10 * self._step_s)
        if grouped and silent_s <= patience_s:
            patience_s *= 2
        stalled_s = self.stalled_s(now_s)
        return (
            f"has made no progress for {stalled_s:.0f} s although it has work"
            if stalled_s > patience_s
            else ""
        )
