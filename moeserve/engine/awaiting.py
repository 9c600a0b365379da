"""Requests that wait for something beside a slot and blocks, while others are admitted.

    submit --> awaiting --everything it needs is there--> waiting --> running
                  ^                                                      |
                  +---------------------- preempted ---------------------+

Each thing that a request needs has a ticket, a number that is never used twice. A report about a
ticket that nobody waits for any more is ignored: its request was aborted or preempted meanwhile.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moeserve.engine.plan import GrammarJob
from moeserve.engine.requests import Request


class Need(enum.Enum):
    """What a request can wait for."""

    GRAMMAR = "grammar"  # the runner compiles it and replays the answer so far
    KV = "kv"  # a connector fetches blocks of its prefix


class GrammarSource(Protocol):
    """Prepares the grammars of requests. It reports by `Scheduler.grammar_prepared`, later."""

    def begin(self, job: GrammarJob) -> None:
        """Start to prepare a grammar. Returns at once."""

    def drop(self, tickets: Sequence[int]) -> None:
        """Forget prepared grammars that no request will use. Unknown tickets are ignored."""


@dataclass(slots=True)
class _Entry:
    request: Request
    open: dict[int, Need]  # by ticket


class AwaitingSet:
    """The requests that wait, and the tickets that each of them waits for."""

    def __init__(self) -> None:
        self._by_rid: dict[int, _Entry] = {}
        self._rid_of: dict[int, int] = {}  # by ticket

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: int) -> bool:
        return rid in self._by_rid

    def __iter__(self) -> Iterator[Request]:
        return (entry.request for entry in self._by_rid.values())

    def add(self, request: Request, ticket: int, need: Need) -> None:
        """Let a request wait for one thing, or for one more."""
        entry = self._by_rid.setdefault(request.rid, _Entry(request, {}))
        entry.open[ticket] = need
        self._rid_of[ticket] = request.rid

    def request_of(self, ticket: int) -> Request | None:
        """Return the request that waits for this ticket, if one does."""
        rid = self._rid_of.get(ticket)
        return None if rid is None else self._by_rid[rid].request

    def close(self, ticket: int) -> Request | None:
        """Close a ticket. Return its request if that was the last thing it waited for."""
        rid = self._rid_of.pop(ticket, None)
        if rid is None:
            return None
        entry = self._by_rid[rid]
        del entry.open[ticket]
        if entry.open:
            return None
        del self._by_rid[rid]
        return entry.request

    def remove(self, rid: int) -> Request:
        """Remove a request and close all of its tickets."""
        entry = self._by_rid.pop(rid)
        for ticket in entry.open:
            del self._rid_of[ticket]
        return entry.request

    def audit(self) -> None:
        """Raise AssertionError unless every ticket leads to the request that waits for it."""
        tickets = {t: rid for rid, entry in self._by_rid.items() for t in entry.open}
        assert tickets == self._rid_of, "tickets and awaiting requests disagree"
        idle = [rid for rid, entry in self._by_rid.items() if not entry.open]
        assert not idle, f"requests {idle[:8]} wait for nothing"
