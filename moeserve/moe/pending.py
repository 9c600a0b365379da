"""Transfers in two phases.

`dispatch` and `combine` start a transfer and return a `Pending`, whose `wait` returns the result.
`UBatch.overlap` runs other work between the two calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from moeserve.comm.gloo import ON_DEVICE

ARRIVAL_UNKNOWN = 0  # `Pending.arrived_ns` if the backend does not know it

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The future result of a transfer."""

    @property
    def arrived_ns(self) -> int:
        """When the last row arrived, in ns of the monotonic clock. Valid after `wait`.

        `ARRIVAL_UNKNOWN`: nothing was transferred, or the backend does not know the time.
        `ON_DEVICE` (comm/gloo.py): `wait` only makes the device wait, not the host.
        """

    def launch_receive(self) -> None:
        """Launch the receiving kernel now instead of in `wait`, if there is one.

        The other micro-batch calls this before its own send. Repeated calls do nothing.
        """
        return

    def wait(self) -> T_co:
        """Wait for the transfer and return the result. May be called once.

        Raises PeerLost with the missing ranks. It is raised immediately if these ranks are gone,
        and after the members' deadline if they are silent. With a `Checked` backend
        (moe/all2all/base.py), this only makes the current stream wait.
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
    """A result that is available at once, because nothing had to be transferred."""

    value: T
    arrived_ns: ClassVar[int] = ARRIVAL_UNKNOWN

    def wait(self) -> T:
        return self.value
