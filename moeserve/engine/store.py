"""The block store: keeps prefix blocks that the pool evicts, by content, in host memory.

The scheduler keeps the index; the runner owns the bytes and copies them as a plan says
(`StepPlan.stores` before `StepPlan.loads`, both before the forward pass).
"""

from collections import OrderedDict

from moeserve.engine.blocks import Key


class HostStore:
    """`num_blocks` host blocks, the runner's places for the bytes. Drops the least recently used
    content first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._leased: dict[Key, None] = {}

    def lookup(self, key: Key) -> bool:
        """Returns whether `load` would find the content."""
        return key in self._blocks

    def load(self, key: Key) -> int:
        """Returns the host block to copy from. It is leased, that is not reused, until `release`."""
        self._blocks.move_to_end(key)
        self._leased[key] = None
        return self._blocks[key]

    def store(self, key: Key) -> int | None:
        """Returns the host block to copy into, leased until `release`; None if nothing must or can
        be copied.
        """
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return None
        if not self._free:
            # Leased keys were used in this very plan, so they are the newest: if the oldest is
            # leased, all are.
            oldest = next(iter(self._blocks))
            if oldest in self._leased:
                return None
            self._free.append(self._blocks.pop(oldest))
        host_block = self._free.pop()
        self._blocks[key] = host_block
        self._leased[key] = None
        return host_block

    def release(self) -> None:
        """Ends all leases. Called when the plan that uses them is complete; plans run in order."""
        self._leased.clear()

    def clear(self) -> None:
        """Drops all blocks."""
        assert not self._leased, "cleared while a plan is being made"
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._blocks.clear()

    def audit(self) -> None:
        """Raises AssertionError unless each host block is free or holds one content, and nothing is
        leased.
        """
        host_blocks = sorted([*self._free, *self._blocks.values()])
        assert host_blocks == list(range(self.num_blocks)), "host blocks do not add up"
        assert not self._leased, f"{len(self._leased)} leases outlived their plan"
