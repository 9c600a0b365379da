"""Memory whose pages a thread makes ahead of those that write: a system may take longer for that
than packing does.
"""

import ctypes
import threading
import weakref

from torch import Tensor

from moeserve.ops.native_layer import HUGE, new_room

POPULATE_WRITE = 23  # advice to Linux, from 5.14 on; what is there stays


class FreshMemory:
    """One piece of so many bytes, taken at the first call, and new memory once it is used up."""

    def __init__(self, num_bytes: int) -> None:
        self._size = num_bytes
        self._used = 0
        self._memory: Tensor

    def room(self, num_bytes: int) -> tuple[Tensor, bool]:
        """A `Room`."""
        begin = self._used
        self._used = self._used + -(-num_bytes // 64) * 64
        if begin + num_bytes > self._size:
            return new_room(num_bytes)
        if not begin:
            self._memory, _ = new_room(self._size)
            threading.Thread(
                target=_populate, args=[weakref.ref(self)], name="fresh memory", daemon=True
            ).start()
        return self._memory[begin : begin + num_bytes], False

    def populate(self, number: int) -> bool:
        """Makes large page `number`; returns whether there may be more."""
        begin = self._memory.data_ptr()
        end = self._memory.data_ptr() + self._size
        page = (-(-begin // HUGE) + number) * HUGE
        advised = ctypes.c_void_p(page), ctypes.c_size_t(HUGE), POPULATE_WRITE
        return page + HUGE <= end and not ctypes.CDLL(None).madvise(
            *advised
        )  # the interpreter's lock is free


def _populate(memory: weakref.ref[FreshMemory]) -> None:
    number = 0
    while (alive := memory()) is not None and alive.populate(number):
        number += 1
        del alive
