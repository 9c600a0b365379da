"""Detect hanging engines: pings and a step counter distinguish long work from a hang."""

from moeserve.messages import Ping, Pong

INTERVAL_S = 1.0
# An engine without progress for this long (or two of its longest steps) is not ready for requests.
UNHEALTHY_S = 5.0
STALL_S = 60.0  # an engine without progress for this long (or ten of its longest steps) is killed


class ProgressMonitor:
    """The time since the last progress of an engine. Callers pass monotonic seconds.

    An engine makes progress when it answers a ping and is either idle or has counted another step.
    This detects a blocked loop, a stopped process and a step that never ends.

    step_s: the longest step to expect. Engines answer only between steps, so they may be silent for
        this long.
    """

    def __init__(self, now_s: float, step_s: float = 0.0) -> None:
        self._progress_at_s = now_s
        self._answered_at_s = now_s
        self._pinged_at_s = now_s
        self._step_s = step_s
        self._last_seq = 0  # of the last ping
        self._num_steps = -1  # as in the last answer

    def ping(self, now_s: float) -> Ping:
        """Return the next ping to send; call it once per INTERVAL_S."""
        delay_s = now_s - self._pinged_at_s - INTERVAL_S
        if delay_s > INTERVAL_S:
            # This process itself stood still (stopped or blocked), so do not blame the engine.
            self._progress_at_s += delay_s
            self._answered_at_s += delay_s
        self._pinged_at_s = now_s
        self._last_seq += 1
        return Ping(self._last_seq)

    def pong(self, msg: Pong, now_s: float) -> None:
        """Record an answer."""
        if not msg.busy or msg.steps != self._num_steps:
            self._progress_at_s = now_s
        self._num_steps = msg.steps
        self._answered_at_s = now_s

    def stalled_s(self, now_s: float) -> float:
        """Return the seconds since the last progress; a little over INTERVAL_S is normal."""
        return max(0.0, now_s - self._progress_at_s)

    def healthy(self, now_s: float) -> bool:
        """Return whether the engine is ready for new requests."""
        return self.stalled_s(now_s) <= max(UNHEALTHY_S, 2 * self._step_s)

    def fault(
        self, now_s: float, stall_s: float = STALL_S, *, held: bool = False, grouped: bool = False
    ) -> str:
        """Return why the engine must be killed, or "". The text continues "engine 0 ...".

        Args:
            held: the engine waits for other engines of its group, so it only has to answer.
            grouped: the engine has a group, which one hanging engine stops as a whole. An engine
                that still answers gets twice the time, because a silent one is more likely the
                cause.
        """
        silent_s = now_s - self._answered_at_s
        if held:
            self._progress_at_s = now_s
            # An engine that has just left its group answers only when its steps have ended.
            if silent_s > max(stall_s, 3 * self._step_s):
                return f"has not answered for {silent_s:.0f} s"
            return ""
        max_stalled_s = max(stall_s, 10 * self._step_s)
        if grouped and silent_s <= max_stalled_s:
            max_stalled_s *= 2
        stalled_s = self.stalled_s(now_s)
        if stalled_s > max_stalled_s:
            return f"has made no progress for {stalled_s:.0f} s although it has work"
        return ""
