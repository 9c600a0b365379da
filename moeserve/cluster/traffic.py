"""The requests of a fleet: the engine of each, and those that wait for an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from moeserve.cluster.balance import Balancer
from moeserve.cluster.engine_handle import EngineHandle
from moeserve.errors import Overloaded
from moeserve.messages import Abort, AdminCall, AdminResult, StepOutput, Submit

RETRY_S = 0.05  # for requests whose engine did not read its messages


class Traffic:
    """Sends requests to engines, and keeps them while none serves. serving: returns those that may get requests."""

    def __init__(self, serving: Callable[[], Sequence[EngineHandle]]) -> None:
        self.balancer = Balancer()
        self._serving = serving
        self._owner: dict[int, EngineHandle] = {}
        self._waiting: dict[int, Submit] = {}
        self._retry: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for an engine."""
        return len(self._waiting)

    def submit(self, request: Submit) -> None:
        """Sends a request to the engine that suits it best. Raises Overloaded if that one does not keep up."""
        engines = {engine.rank: engine for engine in self._serving()}
        if not engines:
            self._waiting[request.rid] = request
            return
        rank = self.balancer.choose(request, engines)
        engine = engines[rank]
        engine.send(request)
        self.balancer.assign(request, rank)
        self._owner[request.rid] = engine
        engine.rids.add(request.rid)

    def flush(self) -> None:
        """Sends the requests that wait, oldest first, as far as engines take them."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        waiting, self._waiting = self._waiting, {}
        for rid, request in waiting.items():
            try:
                self.submit(request)
            except Overloaded:
                self._waiting[rid] = request
        if self._waiting and self._serving():
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self.flush)

    def forget_waiting(self) -> None:
        """Drops the requests that wait for an engine; the front end submits them again."""
        self._waiting.clear()

    def abort(self, rids: Sequence[int]) -> None:
        """Aborts requests. Raises Overloaded if an engine does not keep up; call again with the same requests then."""
        by_engine: dict[EngineHandle, list[int]] = {}
        for rid in rids:
            if self._waiting.pop(rid, None) is None and (engine := self._owner.get(rid)) is not None:
                by_engine.setdefault(engine, []).append(rid)
        failure: Overloaded | None = None
        for engine, theirs in by_engine.items():
            try:
                engine.send(Abort(theirs))
            except Overloaded as error:
                failure = error
        if failure is not None:
            raise failure

    def note(self, engine: EngineHandle, out: StepOutput) -> None:
        """Takes note of a step of this engine, and of the requests that it finished."""
        self.balancer.note(engine.rank, out)
        if any(out.finish):
            for rid, finish in zip(memoryview(out.rids).cast("q"), out.finish, strict=True):
                if finish:
                    self.end(rid)

    def end(self, rid: int) -> None:
        """Removes a request that has ended."""
        if (engine := self._owner.pop(rid, None)) is not None:
            engine.rids.discard(rid)
            self.balancer.end(rid)

    def lost(self, engine: EngineHandle) -> tuple[int, ...]:
        """Removes an engine; returns the requests that it had, oldest first."""
        rids = tuple(sorted(engine.rids))
        for rid in rids:
            del self._owner[rid]
        engine.rids.clear()
        self.balancer.close(engine.rank)
        return rids


class Polls:
    """Calls to all engines, answered once by all of them together. answer: gets the merged answer."""

    def __init__(self, answer: Callable[[AdminResult], None]) -> None:
        self._answer = answer
        self._awaited: dict[int, set[EngineHandle]] = {}
        self._faults: dict[int, list[str]] = {}

    def ask(self, call: AdminCall, engines: Sequence[EngineHandle]) -> None:
        """Passes a call on to these engines. Raises Overloaded if one does not keep up."""
        if not engines:
            self._answer(AdminResult(call.id, False, "no engine serves at the moment"))
            return
        for engine in engines:
            engine.send(call)
        self._awaited[call.id], self._faults[call.id] = set(engines), []

    def answered(self, engine: EngineHandle, msg: AdminResult) -> None:
        """Takes an engine's answer."""
        if engine in self._awaited.get(msg.id, ()):
            self._strike(msg.id, engine, "" if msg.ok else f"{engine.name}: {msg.detail}")

    def lost(self, engine: EngineHandle) -> None:
        """Counts as answers what this engine still owes."""
        for number in [number for number, awaited in self._awaited.items() if engine in awaited]:
            self._strike(number, engine, f"{engine.name} ended before it answered")

    def _strike(self, number: int, engine: EngineHandle, fault: str) -> None:
        awaited, faults = self._awaited[number], self._faults[number]
        awaited.discard(engine)
        faults += [fault] if fault else []
        if not awaited:
            del self._awaited[number], self._faults[number]
            self._answer(AdminResult(number, not faults, "; ".join(faults)))
