"""A connector that breaks every promise it may: a host store behind a slow, forgetful courier."""

from __future__ import annotations

import random
from collections.abc import Sequence

from moeserve.config import Limits
from moeserve.engine.blocks import Key, KVGroup
from moeserve.engine.connector import KVConnector, Lookup, When
from moeserve.engine.store import HostStore


class LateStore(KVConnector):
    """Fetches blocks of the host store some time after `begin`.

    They arrive late, partially, in any order, or never, and are evicted again even while a request
    waits for them.
    """

    may_wait = True
    wait_s = 1.0
    lease_s = 3.0

    def __init__(
        self, limits: Limits, groups: tuple[KVGroup, ...], rng: random.Random, chance: float = 0.3
    ) -> None:
        sizes = (limits.num_store_blocks, limits.num_store_states)
        self.store = HostStore(sizes, [group.pool_index for group in groups])
        self.rng = rng
        self.chance = chance  # of a fetch to end, or a lookup to be answered
        self.near: set[Key] = set()
        self.fetches: dict[int, Sequence[Key]] = {}  # in progress
        self.ended: list[int] = []
        self.num_begun = 0
        self.num_loaded = 0

    def lookup(self, keys: Sequence[Key]) -> Lookup:
        number, _ = self.store.lookup(keys)
        if set(keys[:number]) <= self.near:
            return Lookup(number)
        if self.rng.random() > self.chance:
            return Lookup(0, When.ASK_AGAIN)
        return Lookup(number, When.LATER)

    def begin(self, ticket: int, keys: Sequence[Key]) -> None:
        assert keys
        assert ticket not in self.fetches
        self.fetches[ticket] = keys
        self.num_begun += 1

    def finished(self) -> list[int]:
        reports = [-1] if self.rng.random() < 0.1 else []
        for ticket, keys in list(self.fetches.items()):
            if self.rng.random() < self.chance:
                found = list(keys[: self.rng.choice([len(keys), len(keys), 1, 0])])
                self.near.update(key for key in found if self.store.lookup([key]).number)
                reports += [ticket] * self.rng.choice([0, 1, 1, 1, 2])
        if self.near and self.rng.random() < 0.1:
            self.near.discard(self.rng.choice(sorted(self.near)))
        self.rng.shuffle(reports)
        return reports

    def end(self, ticket: int) -> None:
        del self.fetches[ticket]  # exactly once
        self.ended.append(ticket)

    def load(self, key: Key) -> int:
        assert key in self.near
        self.num_loaded += 1
        return self.store.load(key)

    def save(self, key: Key) -> int | None:
        entry = self.store.save(key)
        self.near = {key for key in self.near if self.store.lookup([key]).number}
        return entry

    def end_plan(self) -> None:
        self.store.end_plan()

    def clear(self) -> None:
        self.near.clear()
        self.store.clear()

    def contents(self, pool: int) -> dict[Key, int]:
        return self.store.contents(pool)

    def audit(self) -> None:
        self.store.audit()
