"""A transfer in two phases: `start` returns a `Pending`, and `wait` returns its result.

`UBatch.overlap` does other work between the two. Backends (`moe/all2all/`) return these.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from moeserve.comm.gloo import ON_DEVICE

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The result of a transfer that was started."""

    @property
    def arrived_ns(self) -> int:
        """Return the monotonic time at which the last row arrived; valid after `wait`.

        0: nothing travelled, or the time is unknown. `ON_DEVICE` (comm/gloo.py): `wait` did not
        wait on the host; it only told the device to wait.
        """

    def arrive(self) -> None:
        """Launch the receiving side early, if there is one.

        The other micro-batch calls this before it sends, any number of times.
        """
        return

    def wait(self) -> T_co:
        """Return the result, once.

        Raises PeerLost with the missing ranks: at once when they are gone, after the members'
        deadline when they are silent. For a `Checked` backend this only makes the current stream
        wait.
        """


@dataclass(slots=True)
class Transfer(Pending[T]):
    """A transfer without a separate receiving side.

    finish: the implementation of `wait`.
    arrived: the implementation of `arrived_ns`.
    """

    finish: Callable[[], T]
    arrived: Callable[[], int] = lambda: ON_DEVICE

    @property
    def arrived_ns(self) -> int:
        return self.arrived()

    def wait(self) -> T:
        return self.finish()


@dataclass(slots=True)
class Completed(Pending[T]):
    """A result that needed no communication."""

    value: T
    arrived_ns: ClassVar[int] = 0

    def wait(self) -> T:
        return self.value
