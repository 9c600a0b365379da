"""Collectives between GPUs over torch's NCCL, one GPU per rank. Host messages still use Gloo.

NCCL does not report which rank is missing, and does not wake a host that waits for one of its
kernels. So everything that can be exchanged in advance (which ranks have joined, how many rows to
expect) is exchanged over Gloo, with its deadlines.

When a rank leaves, the communicator is aborted. Its kernels, and all waits for the device, then end
immediately, with invalid results. `DeviceMesh.check` detects that. torch's watchdog thread also
aborts the communicator if a kernel waits longer than the deadline.

CUDA graphs can record collectives. The watchdog does not see the collectives of a replayed graph,
but it sees the next collective outside a graph. NCCL destroys a communicator only after all graphs
that use it, so a rank that leaves must destroy its graphs first.
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

ABORT_TIMEOUT_S = 2.0  # of `leave`: a step that is being launched still has its graphs
# torch's environment variable, and its value for which torch aborts the communicator on errors, but
# does not end the process.
HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ABORT_ONLY = "2"


def run_on_current_stream(work: Callable[[], object]) -> Callable[[], object]:
    """Run work on the current stream, which then has nothing to wait for. A `Launch`."""
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
        launch: Launch = run_on_current_stream,
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
            raise self.lost_error(f"NCCL did not connect the ranks: {error}") from None
        if self.closed:  # `close` was called before there was a communicator to abort
            self.close()
            raise self.lost_error()

    def all_gather(self, out: Tensor, mine: Tensor) -> Callable[[], None]:
        """Start to gather every rank's `mine` [N, B] in `out` [R * N, B].

        N: rows of a rank. B: bytes of a row. R: ranks.

        Return a function that makes the current stream wait for the result. This method and that
        function raise PeerLost if this rank has left or a peer is lost. The host does not wait, so
        the timeout is NCCL's, which is set to the members' deadline.
        """
        return self._start(lambda nccl: nccl._allgather_base(out, mine))

    def all_to_all(
        self, out: Tensor, mine: Tensor, from_ranks: Sequence[int], to_ranks: Sequence[int]
    ) -> Callable[[], None]:
        """Start to exchange rows with each rank. Return the same as `all_gather`.

        out: receives from_ranks[r] rows of each rank r, in rank order.
        mine: to_ranks[r] rows for each rank r, in rank order.
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
            raise self.lost_error(f"NCCL: {error}") from None

    def _checked(self, wait: Callable[[], object]) -> Callable[[], None]:
        """Return a function that calls `self.check`, then `wait`."""

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
            raise self.lost_error()
        if nccl is not None and (error := nccl.get_error().name) != "SUCCESS":
            self.close()
            raise self.lost_error(f"NCCL gave up on a rank: {error}")
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


def why_nccl_unsupported(num_ranks: int) -> str | None:
    """Return why NCCL does not support this number of ranks on this machine; None if it does."""
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL; install one for CUDA"
    if (devices := torch.cuda.device_count()) < num_ranks:
        return f"NCCL takes one GPU per rank, and {num_ranks} ranks share {devices} here"
    return None
