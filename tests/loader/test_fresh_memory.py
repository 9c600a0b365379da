"""Memory whose pages are made ahead of those that write: no byte of it changes, and pages are there
before a write.
"""

import platform
import resource
import sys
import threading

import pytest

from moeserve.loader.fresh_memory import FreshMemory
from moeserve.ops.native import native
from moeserve.ops.native_layer import HUGE

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels here")


def test_parts_follow_each_other_until_the_memory_is_used_up() -> None:
    memory = FreshMemory(4 * HUGE)
    (first, there), (second, _), (third, _) = (
        memory.allocate(100),
        memory.allocate(3 * HUGE),
        memory.allocate(HUGE),
    )
    assert not there
    assert (first.nbytes, second.nbytes, third.nbytes) == (100, 3 * HUGE, HUGE)
    assert second.data_ptr() - first.data_ptr() == 128
    assert not 0 <= third.data_ptr() - first.data_ptr() < 4 * HUGE


@pytest.mark.skipif(
    sys.platform != "linux" or [int(part) for part in platform.release().split(".")[:2]] < [5, 14],
    reason="advice of Linux from 5.14 on",
)
def test_pages_are_made_ahead_and_keep_what_was_written() -> None:
    memory = FreshMemory(16 * HUGE)
    part, _ = memory.allocate(16 * HUGE)
    part[::4096] = 7
    for thread in threading.enumerate():
        if thread.name == "fresh memory":
            thread.join()
    assert part[::4096].eq(7).all()
    rest = FreshMemory(16 * HUGE)
    rest.allocate(64)
    for thread in threading.enumerate():
        if thread.name == "fresh memory":
            thread.join()
    part, _ = rest.allocate(14 * HUGE)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    part[HUGE:].fill_(1)  # before it lies what is no whole large page
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 8
