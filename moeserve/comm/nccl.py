"""Collectives between GPUs by torch's NCCL, one GPU per rank; messages of the host still go by
Gloo.

NCCL neither names a rank that is missing nor wakes a host that waits for one of its kernels. So
whatever can be asked beforehand (which ranks are here, how many rows will come) is asked over Gloo,
with its deadlines. When a rank leaves, the communicator is aborted: its kernels end at once, and
with them all waits for the device, with invalid results. `check` detects that. torch's own watchdog
aborts the communicator too when a kernel waits longer than the deadline.

CUDA graphs can record collectives. torch's watchdog does not know of those that are replayed, but
of the next one that is not, behind them. And NCCL ends a communicator only after all graphs that
use it: who leaves drops them first.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from moeserve.comm.gloo import Mesh
from moeserve.comm.members import Members
from moeserve.comm.store import dist

# Does work on some stream, and returns a function that makes the current stream wait for that work.
Launch = Callable[[Callable[[], object]], Callable[[], object]]

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ABORT_S = 2.0  # that `leave` waits for it: a step that is being launched still has its graphs
ABORT = "2"  # torch's way to handle errors that ends the communicator, and not the process


def in_line(work: Callable[[], object]) -> Callable[[], object]:
    """A `Launch` on the current stream, for work that is waited for at once."""
    work()
    return lambda: None


class DeviceMesh(Mesh):
    """A mesh with collectives on tensors of this process's GPU; the host never waits for them.

    All ranks launch collectives in the same order. launch: puts them on a stream. max_sms:
    multiprocessors that NCCL takes at most, None: as many as it likes.
    """

    def __init__(
        self,
        members: Members,
        num_channels: int,
        name: str,
        terms: str = "",
        *,
        launch: Launch = in_line,
        max_sms: int | None = None,
    ) -> None:
        super().__init__(members, num_channels, name, terms)
        self._launch = launch
        self._max_sms = max_sms
        self._nccl: Any | None = None
        self._aborting: threading.Thread | None = None

    def connect(self) -> None:
        """Connect the hosts by Gloo and the GPUs by NCCL. Raises PeerLost and ConfigError as in
        `Mesh`.
        """
        super().connect()
        if self.members.size == 1:
            return
        try:
            self._nccl = self._open(dist.PrefixStore("device", self.store))
            self._connect_devices(self._nccl)
        except RuntimeError as error:
            self.close()
            raise self.lost(f"NCCL did not connect the ranks: {error}") from None
        if self.closed:  # before there was a group to abort
            self.close()
            raise self.lost()

    def all_gather(self, out: Tensor, mine: Tensor) -> Callable[[], None]:
        """Start to fill out [R * N, B] with every rank's [N, B]; see `_start`."""
        return self._start(lambda nccl: nccl._allgather_base(out, mine))

    def all_to_all(
        self, out: Tensor, mine: Tensor, from_ranks: Sequence[int], to_ranks: Sequence[int]
    ) -> Callable[[], None]:
        """Send to_ranks[r] rows of `mine` to rank r, for all ranks in order, and receives
        from_ranks[r] rows of rank r into `out`; see `_start`."""
        if self.members.size == 1:
            return self._waiting(self._launch(lambda: out.copy_(mine)))
        return self._start(
            lambda nccl: nccl.alltoall_base(out, mine, list(from_ranks), list(to_ranks))
        )

    def _start(self, collective: Callable[[Any], Any]) -> Callable[[], None]:
        """Return a function that orders what comes next on the current stream behind the
        collective. The host does not wait, so the deadline is NCCL's, which is the members'. Both
        calls raise PeerLost when the group is gone."""
        nccl = self.check()
        try:
            # NCCL's `wait` blocks the stream, not the host, whichever stream NCCL itself uses.
            return self._waiting(self._launch(lambda: collective(nccl).wait()))
        except RuntimeError as error:
            raise self.lost(f"NCCL: {error}") from None

    def _waiting(self, join: Callable[[], object]) -> Callable[[], None]:
        def wait() -> None:
            """Make the current stream wait, unless the group is gone."""
            self.check()
            join()

        return wait

    def check(self) -> Any:
        """Return NCCL's group. Raises PeerLost if what the device computed is invalid, because
        this rank left or NCCL gave up on a peer. To be called once the host has waited for the
        device."""
        nccl = self._nccl
        if self.closed or (nccl is None and self.members.size > 1):
            raise self.lost()
        if nccl is not None and (error := nccl.get_error().name) != "SUCCESS":
            self.close()
            raise self.lost(f"NCCL gave up on a rank: {error}")
        return nccl

    def close(self) -> None:
        """Close every connection and begins to abort NCCL's kernels: whoever notices a loss still
        has its graphs.
        """
        super().close()
        with self.lock:
            nccl = self._nccl
            self._nccl = None
            if nccl is not None:
                self._aborting = threading.Thread(target=_abort, args=(nccl,), daemon=True)
                self._aborting.start()

    def leave(self) -> None:
        """Close every connection, and wait until NCCL's kernels have ended, once."""
        self.close()
        aborting = self._aborting
        self._aborting = None
        if aborting is not None:
            aborting.join(ABORT_S)

    def _open(self, store: Any) -> Any:
        os.environ.setdefault(HANDLING, ABORT)  # read by the group as it is made
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=self.members.deadline_s)
        if self._max_sms is not None:
            options.config.max_ctas = self._max_sms
        return dist.ProcessGroupNCCL(store, self.members.rank, self.members.size, options)

    def _connect_devices(self, nccl: Any) -> None:
        # Not later, in the first collective: nobody expects that one to take seconds.
        nccl.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))


def _abort(nccl: Any) -> None:
    with contextlib.suppress(
        RuntimeError
    ):  # raised when aborting took too long; nothing waits any more
        nccl.abort()


def why_not(num_ranks: int) -> str | None:
    """Return why NCCL cannot serve so many ranks on this machine, None if it can."""
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL; install one for CUDA"
    if (devices := torch.cuda.device_count()) < num_ranks:
        return f"NCCL takes one GPU per rank, and {num_ranks} ranks share {devices} here"
    return None
