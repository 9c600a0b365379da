"""Messages between the fake buffers of one process.

Every operation is matched with those of the other ranks, in order.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any

import torch.distributed

dist: Any = torch.distributed
TIMEOUT_S = 10.0
_exchanges: dict[str, Exchange] = {}
_lock = threading.Lock()


class Exchange:
    """The message of each rank for each operation, numbered from 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.timeout_s = TIMEOUT_S
        self._aborted = False
        self._posted: list[dict[int, tuple[str, Any]]] = []
        self._next = [0] * size
        self._news = threading.Condition()

    @classmethod
    def over(cls, group: Any) -> Exchange:
        """Return the exchange that all ranks of the group share.

        It is found as deep_ep does it: by gathering objects.
        """
        names: list[Any] = [None] * group.size()
        dist.all_gather_object(names, uuid.uuid4().hex, group)
        with _lock:
            return _exchanges.setdefault(names[0], cls(group.size()))

    def post(self, rank: int, what: str, message: Any) -> int:
        with self._news:
            number = self._next[rank]
            self._next[rank] = self._next[rank] + 1
            if number == len(self._posted):
                self._posted.append({})
            self._posted[number][rank] = (what, message)
            self._news.notify_all()
        return number

    def take(self, number: int) -> list[Any]:
        """Wait for the messages of all ranks and return them."""
        with self._news:
            self._news.wait_for(
                lambda: self._aborted or len(self._posted[number]) == self.size, self.timeout_s
            )
            if len(self._posted[number]) < self.size:
                raise RuntimeError("DeepEP error: CPU recv timeout")
            by_rank = self._posted[number]
        kinds = {what for what, _ in by_rank.values()}
        if len(kinds) > 1:
            raise AssertionError(f"ranks do different things at the same time: {sorted(kinds)}")
        return [by_rank[rank][1] for rank in range(self.size)]

    def abort(self) -> None:
        """End all waits at once, as if they had timed out."""
        with self._news:
            self._aborted = True
            self._news.notify_all()
