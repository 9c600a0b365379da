"""The stored responses of /v1/responses: in memory, bounded, and visible only to their own key."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from moeserve.errors import NotFound
from moeserve.server.errors import shorten

Key = tuple[str, str]  # owner, response id: nobody sees another key's responses


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and all its input items, including those of its predecessors."""

    response: bytes  # JSON, like the items
    items: bytes

    @property
    def num_bytes(self) -> int:
        """The approximate memory use."""
        return len(self.response) + len(self.items)


class Cancellable(Protocol):
    """A running response."""

    async def cancel(self) -> msgspec.Struct:
        """Abort the response, and return it with the output so far."""


@dataclass
class ResponseStore:
    """The stored responses, least recently used first, and the running ones."""

    max_count: int  # 0: nothing is stored
    max_bytes: int
    num_bytes: int = 0
    _stored: OrderedDict[Key, Stored] = field(default_factory=OrderedDict)
    _running: dict[Key, Cancellable] = field(default_factory=dict)

    def put(self, owner: str, response_id: str, stored: Stored) -> None:
        """Store a response, and evict the least recently used ones if necessary."""
        if self.max_count == 0 or stored.num_bytes > self.max_bytes:
            return
        self._stored[owner, response_id] = stored
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self.max_count or self.num_bytes > self.max_bytes:
            _, forgotten = self._stored.popitem(last=False)
            self.num_bytes -= forgotten.num_bytes

    def get(self, owner: str, response_id: str) -> Stored:
        """Return a response. Raises NotFound, with the remedy if storing is off."""
        key = owner, response_id
        if key not in self._stored:
            raise NotFound(
                f"no response {shorten(response_id)!r} is stored{self._why()}",
                code="response_not_found",
            )
        self._stored.move_to_end(key)
        return self._stored[key]

    def delete(self, owner: str, response_id: str) -> None:
        """Delete a response. Raises NotFound."""
        self.num_bytes -= self.get(owner, response_id).num_bytes
        del self._stored[owner, response_id]

    @contextmanager
    def running(self, owner: str, response_id: str, running: Cancellable) -> Iterator[None]:
        """Register a running response for `find_running` inside the block."""
        key = owner, response_id
        self._running[key] = running
        try:
            yield
        finally:
            del self._running[key]

    def find_running(self, owner: str, response_id: str) -> Cancellable | None:
        """Return a running response, None if there is none with that id."""
        return self._running.get((owner, response_id))

    def _why(self) -> str:
        if self.max_count == 0:
            return (
                ": storing is off; set max_stored_responses under server: in a settings file, or "
                "send the whole input"
            )
        return (
            f": the server keeps the last {self.max_count} responses, in at most "
            f"{self.max_bytes:,} bytes, until it stops"
        )
