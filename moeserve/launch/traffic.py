"""The requests of a fleet: which engine has which, and which wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from moeserve.errors import Overloaded
from moeserve.launch.balance import Balancer
from moeserve.launch.member import Member
from moeserve.messages import Abort, Answer, Call, StepOutput, Submit

RETRY_S = 0.05  # for requests whose engine did not read its messages


class Traffic:
    """serving: the members that may get requests now. While there is none, requests wait here."""

    def __init__(self, serving: Callable[[], Sequence[Member]]) -> None:
        self.balancer = Balancer()
        self._serving = serving
        self._owner: dict[int, Member] = {}
        self._waiting: dict[int, Submit] = {}
        self._retry: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: Submit) -> None:
        """Raises Overloaded if the engine that should have it does not keep up."""
        members = {member.rank: member for member in self._serving()}
        if not members:
            self._waiting[request.rid] = request
            return
        rank = self.balancer.choose(request, members)
        member = members[rank]
        member.seat.send(request)
        self.balancer.assign(request, rank)
        self._owner[request.rid] = member
        member.rids.add(request.rid)

    def flush(self) -> None:
        """Sends what waits, oldest first, as far as there are engines that take it."""
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

    def abort(self, rids: Sequence[int]) -> None:
        """Raises Overloaded if an engine could not be told; it may be tried again with the same requests."""
        by_member: dict[Member, list[int]] = {}
        for rid in rids:
            if self._waiting.pop(rid, None) is None and (member := self._owner.get(rid)) is not None:
                by_member.setdefault(member, []).append(rid)
        failure: Overloaded | None = None
        for member, theirs in by_member.items():
            try:
                member.seat.send(Abort(theirs))
            except Overloaded as error:
                failure = error
        if failure is not None:
            raise failure

    def note(self, member: Member, out: StepOutput) -> None:
        self.balancer.note(member.rank, out)
        if any(out.finish):
            for rid, finish in zip(memoryview(out.rids).cast("q"), out.finish, strict=True):
                if finish:
                    self.end(rid)

    def end(self, rid: int) -> None:
        if (member := self._owner.pop(rid, None)) is not None:
            member.rids.discard(rid)
            self.balancer.end(rid)

    def lost(self, member: Member) -> tuple[int, ...]:
        """The engine is gone; returns the requests that it had, oldest first."""
        rids = tuple(sorted(member.rids))
        for rid in rids:
            del self._owner[rid]
        member.rids.clear()
        self.balancer.close(member.rank)
        return rids


class Polls:
    """Calls to all engines, answered once by all of them together. answer: gets the merged answer."""

    def __init__(self, answer: Callable[[Answer], None]) -> None:
        self._answer = answer
        self._awaited: dict[int, set[Member]] = {}
        self._faults: dict[int, list[str]] = {}

    def ask(self, call: Call, members: Sequence[Member]) -> None:
        """Raises Overloaded if an engine does not read its messages."""
        if not members:
            self._answer(Answer(call.id, False, "no engine serves at the moment"))
            return
        for member in members:
            member.seat.send(call)
        self._awaited[call.id], self._faults[call.id] = set(members), []

    def answered(self, member: Member, msg: Answer) -> None:
        if member in self._awaited.get(msg.id, ()):
            self._strike(msg.id, member, "" if msg.ok else f"{member.seat.name}: {msg.detail}")

    def lost(self, member: Member) -> None:
        for number in [number for number, awaited in self._awaited.items() if member in awaited]:
            self._strike(number, member, f"{member.seat.name} ended before it answered")

    def _strike(self, number: int, member: Member, fault: str) -> None:
        awaited, faults = self._awaited[number], self._faults[number]
        awaited.discard(member)
        faults += [fault] if fault else []
        if not awaited:
            del self._awaited[number], self._faults[number]
            self._answer(Answer(number, not faults, "; ".join(faults)))
