"""Memory that a background thread pre-faults before it is written.

Page faults on fresh memory can take longer than packing the weights into it.
"""

import ctypes
import threading
import weakref

from torch import Tensor

from moeserve.ops.native_layer import HUGE, allocate_new

POPULATE_WRITE = 23  # MADV_POPULATE_WRITE (Linux 5.14): faults pages in, and keeps their content


class FreshMemory:
    """An arena of `num_bytes`, allocated at the first call of `allocate` and pre-faulted meanwhile.

    When it is used up, `allocate` allocates other memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self._size = num_bytes
        self._used = 0
        self._memory: Tensor

    def allocate(self, num_bytes: int) -> tuple[Tensor, bool]:
        """Return memory for packed weights, and False: it is not filled yet (an `Allocate`)."""
        begin = self._used
        self._used = self._used + -(-num_bytes // 64) * 64
        if begin + num_bytes > self._size:
            return allocate_new(num_bytes)
        if not begin:
            self._memory, _ = allocate_new(self._size)
            threading.Thread(
                target=_populate, args=[weakref.ref(self)], name="fresh memory", daemon=True
            ).start()
        return self._memory[begin : begin + num_bytes], False

    def populate(self, number: int) -> bool:
        """Fault in huge page `number`, and return whether there may be more pages.

        ctypes releases the GIL during the call.
        """
        begin = self._memory.data_ptr()
        end = begin + self._size
        page = (-(-begin // HUGE) + number) * HUGE
        if page + HUGE > end:
            return False
        libc = ctypes.CDLL(None)
        failed = libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE), POPULATE_WRITE)
        return not failed


def _populate(memory: weakref.ref[FreshMemory]) -> None:
    number = 0
    while (alive := memory()) is not None and alive.populate(number):
        number += 1
        del alive
