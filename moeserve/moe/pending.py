"""Transfers in two phases: `dispatch` and `combine` start one and return a `Pending`; its `wait`
returns the result. `UBatch.overlap` runs other work between the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from moeserve.comm.gloo import ON_DEVICE

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The future result of a transfer."""

    @property
    def arrived_ns(self) -> int:
        """When the last row arrived, in ns of the monotonic clock. Valid after `wait`.

        0: nothing was transferred, or the time is unknown. `ON_DEVICE` (comm/gloo.py): `wait` only
        makes the device wait, not the host.
        """

    def arrive(self) -> None:
        """Launch the receiving kernel now instead of in `wait`, if there is one.

        The other micro-batch calls this before it sends. Repeated calls do nothing. Without a
        receiving kernel, no call does anything.
        """
        return

    def wait(self) -> T_co:
        """Wait for the transfer and return the result. May be called once.

        Raises PeerLost with the missing ranks: immediately if they are gone, after the members'
        deadline if they are silent. With a `Checked` backend, this only makes the current stream
        wait.
        """


@dataclass(slots=True)
class Transfer(Pending[T]):
    """A transfer without a receiving kernel."""

    finish: Callable[[], T]  # implements `wait`
    arrived: Callable[[], int] = lambda: ON_DEVICE  # implements `arrived_ns`

    @property
    def arrived_ns(self) -> int:
        return self.arrived()

    def wait(self) -> T:
        return self.finish()


@dataclass(slots=True)
class Completed(Pending[T]):
    """A result that is already there, because nothing had to be transferred."""

    value: T
    arrived_ns: ClassVar[int] = 0

    def wait(self) -> T:
        return self.value
