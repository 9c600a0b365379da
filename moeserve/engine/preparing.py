"""Requests whose grammar or KV blocks are being prepared, before they can be queued.

    submit --> preparing --everything is ready--> waiting --> running
                   ^                                             |
                   +---------------- preempted ------------------+

Each thing that a request awaits has a ticket, a number that is never reused. A report with an
unknown ticket is ignored: its request was aborted or preempted in the meantime.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from moeserve.engine.plan import GrammarJob
from moeserve.engine.requests import Request


class Need(enum.Enum):
    """The things that a request can await."""

    GRAMMAR = "grammar"  # the runner compiles it and replays the answer so far
    KV = "kv"  # a connector fetches blocks of its prefix


class GrammarSource(Protocol):
    """Prepares the grammars of requests, and later calls `Scheduler.grammar_prepared`."""

    def begin(self, job: GrammarJob) -> None:
        """Start to prepare a grammar, without waiting for it."""

    def drop(self, tickets: Sequence[int]) -> None:
        """Drop prepared grammars that no request will use. Unknown tickets are ignored."""


@dataclass(slots=True)
class _Entry:
    request: Request
    open_tickets: dict[int, Need]  # the need that each ticket stands for


class PreparingSet:
    """The requests in preparation and their open tickets."""

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
        """Let a request await one (more) thing."""
        entry = self._by_rid.setdefault(request.rid, _Entry(request, {}))
        entry.open_tickets[ticket] = need
        self._rid_of[ticket] = request.rid

    def request_of(self, ticket: int) -> Request | None:
        """Return the request that awaits this ticket, if there is one."""
        rid = self._rid_of.get(ticket)
        return None if rid is None else self._by_rid[rid].request

    def close(self, ticket: int) -> Request | None:
        """Close a ticket. Return its request if that was its last open ticket."""
        rid = self._rid_of.pop(ticket, None)
        if rid is None:
            return None
        entry = self._by_rid[rid]
        del entry.open_tickets[ticket]
        if entry.open_tickets:
            return None
        del self._by_rid[rid]
        return entry.request

    def remove(self, rid: int) -> Request:
        """Remove a request and close all of its tickets."""
        entry = self._by_rid.pop(rid)
        for ticket in entry.open_tickets:
            del self._rid_of[ticket]
        return entry.request

    def audit(self) -> None:
        """Raise AssertionError unless tickets and requests match."""
        tickets = {
            ticket: rid for rid, entry in self._by_rid.items() for ticket in entry.open_tickets
        }
        assert tickets == self._rid_of, "tickets and requests in preparation disagree"
        idle = [rid for rid, entry in self._by_rid.items() if not entry.open_tickets]
        assert not idle, f"requests {idle[:8]} have no open ticket"
