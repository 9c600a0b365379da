"""KV blocks that are kept outside the device: in host memory, on disk, on other machines.

A connector has two halves. The scheduler's half is the index (`KVConnector`, here): which blocks
there are, by the keys of the prefix cache, and which requests wait for some. The runner's half
moves the bytes (`KVTransport`, runner/kv_transport.py), as a plan's `stores` and `loads` say.

A block is *near* if a plan can load it, from the entry of the connector that `load` names. A block
that is not near may be fetched: the request awaits it while others are admitted.

    lookup --LATER--> begin --> the request awaits --finished, or its time is over--> lookup, load

Whatever is late, lost or wrong is computed instead. A connector need not keep its word: a plan uses
only the blocks that `lookup` calls near at that moment.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from moeserve.engine.blocks import Key


class When(enum.Enum):
    """When blocks can be loaded."""

    NOW = "now"  # by the next plan
    LATER = "later"  # once `begin` has fetched them
    ASK_AGAIN = "ask again"  # it is not known yet whether they are there


class Lookup(NamedTuple):
    """The answer to a lookup: how many of the first keys are there, and when."""

    number: int
    when: When = When.NOW


class KVConnector(ABC):
    """The index of blocks outside the device. All methods return at once."""

    may_wait = False  # whether `lookup` ever answers LATER or ASK_AGAIN
    wait_s = 2.0  # the longest that a request waits, from its first lookup to its last block
    lease_s = 30.0  # how long blocks that arrived are kept for a request that waits in line

    @abstractmethod
    def lookup(self, keys: Sequence[Key]) -> Lookup:
        """Return the number of leading keys that are there, and when they can be loaded."""

    def begin(self, ticket: int, keys: Sequence[Key]) -> None:
        """Start to fetch blocks, and keep those that arrive near until `end`."""
        raise NotImplementedError

    def finished(self) -> Sequence[int]:
        """Return the tickets whose fetches have ended since the last call, in any order, whether
        all, some or none of the blocks arrived.
        """
        return ()

    def end(self, ticket: int) -> None:
        """End the lease of a fetch: its request was admitted or aborted, or its time is over."""
        raise NotImplementedError

    @abstractmethod
    def load(self, key: Key) -> int:
        """Return the entry from which the plan in the making loads a near block. The entry keeps
        its content until that plan has run.
        """

    @abstractmethod
    def save(self, key: Key) -> int | None:
        """Return the entry to which the plan in the making saves a block that the device is about
        to lose; None if it need not, or cannot, be kept.
        """

    @abstractmethod
    def end_plan(self) -> None:
        """End the leases of `load` and `save`: the plan is made, and later ones run after it."""

    def request_finished(self, rid: int, hashes: Sequence[bytes]) -> dict[str, Any] | None:
        """Note that an admitted request has ended. hashes: of its full blocks, in order.

        What this returns goes with the request's last token (`StepOutput.kv_params`), for whoever
        continues it elsewhere.
        """
        return None

    @abstractmethod
    def clear(self) -> None:
        """Forget every block that this engine has saved, and every block that is near."""

    def audit(self) -> None:  # noqa: B027  (a connector need not have anything to check)
        """Raise AssertionError unless all entries are accounted for. Called between two plans."""
