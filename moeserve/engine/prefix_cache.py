"""The prefix cache: finds blocks of equal prompt beginnings by a chained hash per full block and KV group.

h_0 = sha256(root + tokens of block 0), h_i = sha256(h_{i-1} + tokens of block i); tokens as little-endian int32.
The root hashes everything besides tokens that K/V depend on, each value tagged with its kind. A block may be
registered as soon as the step that computes it is submitted, because steps run in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from moeserve.engine.blocks import BlockPool, Key, KVGroup, first_live_token, longest_hit
from moeserve.engine.plan import I32, BlockMove
from moeserve.engine.requests import Request
from moeserve.engine.store import HostStore

IN_STORE = -1


@dataclass(frozen=True, slots=True)
class Hit:
    """The cached beginning of a request: blocks[g][i] for the first num_blocks blocks of group g.

    A block of 0 was passed by the window and is never read; IN_STORE is to be loaded into a new block.
    """

    num_blocks: int
    blocks: tuple[tuple[int, ...], ...]


def root_of(salt: str, num_resets: int = 0) -> bytes:
    """Returns the start of a hash chain. Requests share blocks only below equal roots."""
    extras = [(b"salt", salt.encode())] if salt else []
    if num_resets:
        extras.append((b"num_resets", num_resets.to_bytes(8, "little")))
    tagged = b"".join(tag + b"\0" + len(value).to_bytes(8, "little") + value for tag, value in extras)
    return sha256(b"moeserve kv 1\0" + tagged).digest()


def chain(parent: bytes, tokens: I32, block_size: int) -> list[bytes]:
    """Returns the hashes of the full blocks of `tokens` (little-endian int32), which follow the block `parent`."""
    step = 4 * block_size
    data = tokens.tobytes()
    hashes = []
    for at in range(0, len(data) - step + 1, step):
        parent = sha256(parent + data[at : at + step]).digest()
        hashes.append(parent)
    return hashes


class PrefixCache:
    """Finds blocks by content, in the pool and in the store behind it. A disabled cache finds and registers nothing."""

    def __init__(
        self,
        pool: BlockPool,
        groups: tuple[KVGroup, ...],
        store: HostStore | None = None,
        enabled: bool = True,
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._block_size = groups[0].block_size
        self._store = store
        self._enabled = enabled
        self._num_resets = 0
        self._miss = Hit(0, tuple(() for _ in groups))

    def match(self, request: Request) -> Hit:
        """Returns the longest cached beginning of the request, its last token excepted. Takes no references yet."""
        if not self._enabled:
            return self._miss
        self._begin(request)
        if not request.reads_cache:
            return self._miss
        limit = (len(request.tokens) - 1) // self._block_size
        self._extend(request, request.tokens, limit)
        hashes = request.hashes
        length = limit
        for g, group in enumerate(self._groups):
            if group.window is None:
                length = longest_hit(group, self._finder(hashes, g), length)
        # A shorter hit stays good for full groups but not for windows: repeat these until they all agree.
        before = -1
        while length != before:
            before = length
            for g, group in enumerate(self._groups):
                if group.window is not None:
                    length = longest_hit(group, self._finder(hashes, g), length)
        return Hit(length, tuple(self._blocks(hashes, g, length) for g in range(len(self._groups))))

    def claim(self, request: Request, hit: Hit) -> tuple[list[I32], list[BlockMove]]:
        """Takes references to the blocks of a hit. Returns each group's table entries, and the loads of new blocks."""
        absent: list[tuple[int, int, int]] = []
        tables = [np.array(blocks, np.int32) for blocks in hit.blocks]
        for g, blocks in enumerate(hit.blocks):
            for i, block in enumerate(blocks):
                if block > 0:
                    self._pool.touch(block)
                elif block == IN_STORE:
                    assert self._store is not None
                    absent.append((g, i, self._store.load((request.hashes[i], g))))
        loads = []
        for (g, i, host_block), block in zip(absent, self._pool.take(len(absent)).tolist(), strict=True):
            tables[g][i] = block
            self._pool.cache(block, (request.hashes[i], g))
            loads.append(BlockMove(block, host_block))
        return tables, loads

    def register(self, request: Request, tokens: I32, blocks: list[list[int]], first: int) -> None:
        """Makes a request's blocks from index `first` on findable. blocks[g]: group g's, 0 where a window passed."""
        if not self._enabled:
            return
        self._extend(request, tokens, first + len(blocks[0]))
        for g, row in enumerate(blocks):
            for i, block in enumerate(row, first):
                if block:
                    self._pool.cache(block, (request.hashes[i], g))

    def reset(self) -> None:
        """Drops everything: later requests find nothing that was computed until now."""
        self._num_resets += 1
        self._pool.forget()
        if self._store is not None:
            self._store.clear()

    def _begin(self, request: Request) -> None:
        """Starts the hash chain, again after a reset. Called at admission only: a request that runs during a reset
        keeps its old hashes, which no later request has."""
        if request.num_resets != self._num_resets:
            request.num_resets = self._num_resets
            request.root = root_of(request.salt, self._num_resets)
            request.hashes.clear()

    def _extend(self, request: Request, tokens: I32, num_blocks: int) -> None:
        hashes = request.hashes
        if len(hashes) >= num_blocks:
            return
        if not request.root:
            self._begin(request)
        parent = hashes[-1] if hashes else request.root
        start = len(hashes) * self._block_size
        hashes.extend(chain(parent, tokens[start : num_blocks * self._block_size], self._block_size))

    def _finder(self, hashes: list[bytes], g: int) -> Callable[[int], bool]:
        return lambda i: self._block((hashes[i], g)) is not None

    def _block(self, key: Key) -> int | None:
        block = self._pool.find(key)
        if block is None and self._store is not None and self._store.lookup(key):
            return IN_STORE
        return block

    def _blocks(self, hashes: list[bytes], g: int, length: int) -> tuple[int, ...]:
        first = first_live_token(self._groups[g], length * self._block_size) // self._block_size
        found = [self._block((hashes[i], g)) for i in range(first, length)]
        return (*(0,) * first, *(block for block in found if block is not None))
