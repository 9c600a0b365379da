"""Route the requests of a fleet to engines, and queue them while no engine serves."""

import asyncio
from collections.abc import Callable, Collection, Sequence

from moeserve.cluster.balance import Balancer
from moeserve.errors import Overloaded
from moeserve.messages import Abort, EngineIn, StepOutput, Submit

RETRY_S = 0.05  # pause before queued requests are sent again, if their engine did not keep up


class Traffic:
    """Sends each request to the engine that the `Balancer` chooses."""

    def __init__(
        self,
        serving: Callable[[], Collection[int]],
        send: Callable[[int, EngineIn], object],
        fail: Callable[[Exception], None],
    ) -> None:
        """Create the traffic of a fleet.

        Args:
            serving: returns the ranks of the engines that can take requests.
            send: sends a message to an engine; raises Overloaded if it does not keep up.
            fail: called with an error in a retry, because a retry has no caller.
        """
        self.balancer = Balancer()
        self._serving_ranks = serving
        self._send = send
        self._on_error = fail
        # Requests that wait for an engine, by rid, oldest first.
        self._waiting: dict[int, Submit] = {}
        self._retry_timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for an engine."""
        return len(self._waiting)

    def submit(self, request: Submit) -> None:
        """Send a request to an engine, or queue it while no engine serves.

        Raises Overloaded if the engine does not keep up.
        """
        ranks = self._serving_ranks()
        if not ranks:
            self._waiting[request.rid] = request
            return
        rank = self.balancer.choose(request, ranks)
        self._send(rank, request)  # before `assign`, because it may raise Overloaded
        self.balancer.assign(request, rank)

    def flush(self) -> None:
        """Send the queued requests, oldest first, as far as engines accept them."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None
        waiting = self._waiting
        self._waiting = {}
        for rid, request in waiting.items():
            try:
                self.submit(request)
            except Overloaded:
                self._waiting[rid] = request
        if self._waiting and self._serving_ranks():
            loop = asyncio.get_running_loop()
            self._retry_timer = loop.call_later(RETRY_S, self._flush_again)

    def _flush_again(self) -> None:
        try:
            self.flush()
        except Exception as error:
            self._on_error(error)

    def forget_waiting(self) -> None:
        """Drop the queued requests, which the front end will submit again."""
        self._waiting.clear()

    def abort(self, rids: Sequence[int]) -> None:
        """Abort requests.

        Raises Overloaded if an engine does not keep up; call again with the same requests then.
        """
        rids_by_rank: dict[int, list[int]] = {}
        for rid in rids:
            if self._waiting.pop(rid, None) is not None:
                continue
            rank = self.balancer.rank_of(rid)
            if rank is not None:
                rids_by_rank.setdefault(rank, []).append(rid)
        failure: Overloaded | None = None
        for rank, engine_rids in rids_by_rank.items():
            try:
                self._send(rank, Abort(engine_rids))
            except Overloaded as error:  # the other engines still get theirs
                failure = error
        if failure is not None:
            raise failure

    def on_step_output(self, rank: int, out: StepOutput) -> None:
        """Update the engine's load after a step, and remove the requests that finished."""
        self.balancer.on_step_output(rank, out)
        if any(out.finish):
            for rid, finish in zip(memoryview(out.rids).cast("q"), out.finish, strict=True):
                if finish:
                    self.balancer.remove_request(rid)
