"""The classes of the native module (csrc/) that callers name in annotations.

The functions of the module have the type Any. An int argument named after a tensor (`ids`, `x`,
`weights`, `out`) is the address of its first element.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

class Element:
    """The dtype of rows."""

    float32: Element
    bfloat16: Element
    float16: Element

class Region(Buffer):
    """Shared memory of one rank, which other processes map by its file descriptor."""

    def __init__(self, bytes: int) -> None: ...
    @property
    def fd(self) -> int: ...

class Channel:
    """The connections of one micro-batch to all members of a group (csrc/shm/channel.hpp).

    index: this rank's index among the members. sockets, regions: the file descriptors of the
    connection to each member and of its memory, which the channel closes.
    """

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        ubatch: int,
        sockets: Sequence[int],
        own: Region,
        regions: Sequence[int],
    ) -> None: ...
    def leave(self) -> None: ...

class Shape:
    """The sizes that all members of an exchange agreed on.

    x_row_bytes: bytes of a dispatched row. y_row_bytes: bytes of a result.
    """

    def __init__(
        self,
        *,
        experts_per_rank: int,
        max_tokens: int,
        top_k: int,
        x_row_bytes: int,
        y_row_bytes: int,
    ) -> None: ...

class Exchange:
    """Dispatch and combine of one micro-batch over shared memory (csrc/shm/exchange.hpp).

    `dispatch` returns the index of the buffer that the dispatch uses until its `await_sums`.
    """

    TURNS: Final[int]  # buffers, and so dispatches in flight
    def __init__(self, channel: Channel, shape: Shape) -> None: ...
    @staticmethod
    def region_bytes(num_ranks: int, shape: Shape) -> int: ...
    @property
    def y_capacity(self) -> int: ...
    def y_offset(self, buffer: int) -> int: ...
    def arrived_ns(self, buffer: int) -> int: ...
    def dispatch(self, ids: int, tokens: int, top_k: int, x: int) -> int: ...
    # Returns the number of received rows. Copies them to `out` if `room` rows are enough.
    def await_rows(
        self, buffer: int, timeout_s: float, counts_and_ends: NDArray[np.int64], out: int, room: int
    ) -> int: ...
    def take_rows(self, buffer: int, out: int) -> None: ...
    def combine(self, buffer: int) -> None: ...
    def await_sums(
        self, buffer: int, timeout_s: float, weights: int, element: Element, dim: int, out: int
    ) -> None: ...
    def leave(self) -> None: ...

class Gather:
    """All-gather over shared memory, for tensor parallelism (csrc/shm/gather.hpp)."""

    def __init__(self, channel: Channel, part_bytes: int) -> None: ...
    @staticmethod
    def region_bytes(part_bytes: int) -> int: ...
    def columns(self, x: int, rows: int, row_bytes: int, out: int, timeout_s: float) -> None: ...
    def rows(
        self, x: int, counts: Sequence[int], row_bytes: int, out: int, timeout_s: float
    ) -> None: ...
    def leave(self) -> None: ...
