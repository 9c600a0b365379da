"""The interface to KV blocks outside the device: in host memory, on disk or on other machines.

A connector has two halves. The scheduler's half (`KVConnector`, here) is the index: it knows which
blocks exist, by the keys of the prefix cache, and which requests await some. It lives in the
engine's leader rank only. The runner's half (`KVTransport`, runner/kv_transport.py) is on every
rank of the engine, and copies the bytes, as the `stores` and `loads` of a plan say.

A block is *near* if the next plan can load it. The connector may have to fetch other blocks first.
A request awaits its blocks, while other requests are admitted:

    lookup --LATER--> begin --> the request awaits --finished, or timeout--> lookup, load

A timeout (`wait_s`) is no error: the request is queued, and the rest of its prefix is computed. So
are blocks that are lost or wrong. The answers of a connector are therefore not binding: a plan uses
only the blocks that `lookup` reports as near at that moment.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from moeserve.engine.blocks import Key


class When(enum.Enum):
    """When blocks can be loaded."""

    NOW = "now"  # by the next plan
    LATER = "later"  # after `begin` has fetched them
    ASK_AGAIN = "ask again"  # the connector does not know yet whether it has them


class Lookup(NamedTuple):
    """The result of a lookup."""

    number: int  # how many leading keys the connector has
    when: When = When.NOW  # when their blocks can be loaded


class KVConnector(ABC):
    """The index of blocks outside the device. No method waits."""

    may_wait = False  # whether `lookup` ever returns LATER or ASK_AGAIN
    wait_s = 2.0  # timeout of a request's wait, from its first lookup to its last block
    lease_s = 30.0  # how long fetched blocks are kept for a request in the waiting queue

    @abstractmethod
    def lookup(self, keys: Sequence[Key]) -> Lookup:
        """Return how many leading keys the connector has, and when they can be loaded."""

    def begin(self, ticket: int, keys: Sequence[Key]) -> None:
        """Start to fetch blocks. Those that arrive stay near until `end`."""
        raise NotImplementedError

    def finished(self) -> Sequence[int]:
        """Return the tickets of fetches that have ended since the last call, in any order.

        All, some or none of their blocks may have arrived.
        """
        return ()

    def end(self, ticket: int) -> None:
        """End the lease of a fetch: its request was admitted or aborted, or its time is over."""
        raise NotImplementedError

    @abstractmethod
    def load(self, key: Key) -> int:
        """Return the connector's entry from which the next plan loads a near block.

        The entry keeps its content until that plan has run.
        """

    @abstractmethod
    def save(self, key: Key) -> int | None:
        """Return the entry to which the next plan saves a block that the device evicts.

        None: the block cannot be saved, or is saved already.
        """

    @abstractmethod
    def end_plan(self) -> None:
        """End the leases of `load` and `save`: the plan is complete. Later plans run after it."""

    def request_finished(self, rid: int, hashes: Sequence[bytes]) -> dict[str, Any] | None:
        """Handle the end of an admitted request.

        hashes: the hashes of its full blocks, in order.

        The result is sent with the last token of the request (`StepOutput.kv_params`), for an
        engine that continues the request elsewhere.
        """
        return None

    @abstractmethod
    def clear(self) -> None:
        """Drop all blocks that this engine has saved, and all near blocks."""

    def audit(self) -> None:  # noqa: B027  (optional)
        """Raise AssertionError unless all entries are accounted for. Called between two plans."""
