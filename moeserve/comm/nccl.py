"""Collectives between GPUs over torch's NCCL, one GPU per rank. Host messages still use Gloo.

NCCL does not report which rank is missing, and does not wake a host that waits for one of its
kernels. So everything that can be exchanged in advance (which ranks have joined, how many rows to
expect) is exchanged over Gloo, with its deadlines.

When a rank leaves, the communicator is aborted. Its kernels, and all waits for the device, then end
immediately, with invalid results. `check` detects that. torch's watchdog also aborts the
communicator if a kernel waits longer than the deadline.

CUDA graphs can record collectives. torch's watchdog does not see collectives that are replayed, but
it sees the next one that is not. NCCL destroys a communicator only after all graphs that use it, so
a rank that leaves must destroy its graphs first.
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

# Runs work on some stream, and returns a function that makes the current stream wait for it.
Launch = Callable[[Callable[[], object]], Callable[[], object]]

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ABORT_TIMEOUT_S = 2.0  # of `leave`: a step that is being launched still has its graphs
# Value of HANDLING: on errors, torch aborts the communicator, but does not end the process.
ABORT_ONLY = "2"


def in_line(work: Callable[[], object]) -> Callable[[], object]:
    """Run work on the current stream: a `Launch` for work that is waited for immediately."""
    work()
    return lambda: None


class DeviceMesh(Mesh):
    """A mesh with collectives on GPU tensors, for which the host never waits.

    All ranks must launch collectives in the same order. launch: runs collectives on a stream.
    max_sms: the most multiprocessors that NCCL may use; None: as many as it chooses.
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
        """Connect the hosts over Gloo and the GPUs over NCCL. Raises the same errors as `Mesh`."""
        super().connect()
        if self.members.size == 1:
            return
        try:
            self._nccl = self._open(dist.PrefixStore("device", self.store))
            self._connect_devices(self._nccl)
        except RuntimeError as error:
            self.close()
            raise self.lost(f"NCCL did not connect the ranks: {error}") from None
        if self.closed:  # `close` was called before there was a communicator to abort
            self.close()
            raise self.lost()

    def all_gather(self, out: Tensor, mine: Tensor) -> Callable[[], None]:
        """Start to gather every rank's `mine` [N, B] in `out` [R * N, B].

        Return a function that makes the current stream wait for the result. Both raise PeerLost if
        this rank has left or a peer is lost. The host does not wait, so the timeout is NCCL's,
        which is set to the members' deadline.
        """
        return self._start(lambda nccl: nccl._allgather_base(out, mine))

    def all_to_all(
        self, out: Tensor, mine: Tensor, from_ranks: Sequence[int], to_ranks: Sequence[int]
    ) -> Callable[[], None]:
        """Start to send to_ranks[r] rows of `mine` to each rank r, in rank order, and to receive
        from_ranks[r] rows from it into `out`. Return the same as `all_gather`.
        """
        if self.members.size == 1:
            return self._checked(self._launch(lambda: out.copy_(mine)))
        return self._start(
            lambda nccl: nccl.alltoall_base(out, mine, list(from_ranks), list(to_ranks))
        )

    def _start(self, collective: Callable[[Any], Any]) -> Callable[[], None]:
        nccl = self.check()
        try:
            # NCCL's `wait` makes the current stream wait, not the host.
            return self._checked(self._launch(lambda: collective(nccl).wait()))
        except RuntimeError as error:
            raise self.lost(f"NCCL: {error}") from None

    def _checked(self, wait: Callable[[], object]) -> Callable[[], None]:
        """Return a function that calls `check`, then `wait`."""

        def check_and_wait() -> None:
            self.check()
            wait()

        return check_and_wait

    def check(self) -> Any:
        """Return NCCL's process group.

        Raises PeerLost if results on the device are invalid, because this rank has left or NCCL has
        aborted. Call this after the host has waited for the device.
        """
        nccl = self._nccl
        if self.closed or (nccl is None and self.members.size > 1):
            raise self.lost()
        if nccl is not None and (error := nccl.get_error().name) != "SUCCESS":
            self.close()
            raise self.lost(f"NCCL gave up on a rank: {error}")
        return nccl

    def close(self) -> None:
        """Close all connections, and start to abort NCCL's kernels.

        Does not wait for the abort, because the caller may still have graphs that use the
        communicator.
        """
        super().close()
        with self.lock:
            nccl = self._nccl
            self._nccl = None
            if nccl is not None:
                self._aborting = threading.Thread(target=_abort, args=(nccl,), daemon=True)
                self._aborting.start()

    def leave(self) -> None:
        """Close all connections, and wait up to ABORT_TIMEOUT_S until NCCL's kernels have ended."""
        self.close()
        aborting = self._aborting
        self._aborting = None
        if aborting is not None:
            aborting.join(ABORT_TIMEOUT_S)

    def _open(self, store: Any) -> Any:
        os.environ.setdefault(HANDLING, ABORT_ONLY)  # read by the constructor of the process group
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=self.members.deadline_s)
        if self._max_sms is not None:
            options.config.max_ctas = self._max_sms
        return dist.ProcessGroupNCCL(store, self.members.rank, self.members.size, options)

    def _connect_devices(self, nccl: Any) -> None:
        # Connect now. Otherwise, the first collective would, which takes seconds.
        nccl.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))


def _abort(nccl: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the abort took too long, and nothing waits for it
        nccl.abort()


def why_not(num_ranks: int) -> str | None:
    """Return why NCCL does not support so many ranks on this machine; None if it does."""
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL; install one for CUDA"
    if (devices := torch.cuda.device_count()) < num_ranks:
        return f"NCCL takes one GPU per rank, and {num_ranks} ranks share {devices} here"
    return None
