"""Collectives between GPUs by torch's NCCL, one GPU per rank; messages of the host still go by Gloo.

NCCL neither names a rank that is missing nor wakes a host that waits for one of its kernels. So whatever can be asked
beforehand (which ranks are here, how many rows will come) is asked over Gloo, with its deadlines. When a rank leaves,
the communicator is aborted: its kernels end at once, and with them all waits for the device, with invalid results.
`check` detects that. torch's own watchdog aborts the communicator too when a kernel waits longer than the deadline.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from moeserve.comm.gloo import ON_DEVICE, Channel, Collective, Mesh, dist
from moeserve.comm.members import Members

# Does work on some stream, and returns a function that makes the current stream wait for that work.
Launch = Callable[[Callable[[], object]], Callable[[], object]]

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ABORT = "2"  # torch's way to handle errors that ends the communicator, and not the process


def in_line(work: Callable[[], object]) -> Callable[[], object]:
    """A `Launch` on the current stream, for work that is waited for at once."""
    work()
    return lambda: None


class DeviceMesh(Mesh):
    """A mesh whose collectives take tensors of this process's GPU; the host never waits for them.

    One communicator serves all channels: all ranks launch in the same order. launch: puts collectives on a stream.
    max_sms: multiprocessors that NCCL takes at most, None: as many as it likes.
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
        self.launch = launch
        self._max_sms = max_sms
        self._group: Any | None = None

    @property
    def kind(self) -> type[Channel]:
        """The class of its channels."""
        return DeviceChannel

    def connect(self) -> None:
        """Connects the hosts by Gloo and the GPUs by NCCL. Raises PeerLost and ConfigError as in `Mesh`."""
        super().connect()
        if self.members.size == 1:
            return
        try:
            self._group = self._open(dist.PrefixStore(f"{self._prefix}/device", self.store))
            self._connect_devices(self._group)
        except RuntimeError as error:
            self.close()
            raise self.lost(f"NCCL did not connect the ranks: {error}") from None
        if self.closed:  # before there was a group to abort
            self.close()
            raise self.lost()

    def check(self) -> Any:
        """Returns NCCL's group. Raises PeerLost if what the device computed is invalid, because this rank left or NCCL
        gave up on a peer. To be called once the host has waited for the device."""
        group = self._group
        if self.closed or (group is None and self.members.size > 1):
            raise self.lost()
        if group is not None and (error := group.get_error().name) != "SUCCESS":
            self.close()
            raise self.lost(f"NCCL gave up on a rank: {error}")
        return group

    def close(self) -> None:
        """Closes every connection and aborts NCCL's kernels."""
        super().close()
        with self.lock:
            group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # raised when aborting took too long; nothing waits any more
                group.abort()

    def _open(self, store: Any) -> Any:
        os.environ.setdefault(HANDLING, ABORT)  # read by the group as it is made
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=self.members.deadline_s)
        if self._max_sms is not None:
            options.config.max_ctas = self._max_sms
        return dist.ProcessGroupNCCL(store, self.members.rank, self.members.size, options)

    def _connect_devices(self, group: Any) -> None:
        # Not later, in the first collective: nobody expects that one to take seconds.
        group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))


class DeviceChannel(Channel):
    """The collectives of one micro-batch. They begin in the order of the calls on all channels."""

    mesh: DeviceMesh

    def all_to_all(
        self, out: Tensor, mine: Tensor, from_ranks: Sequence[int], to_ranks: Sequence[int]
    ) -> DeviceCollective:
        """Sends to_ranks[r] rows of `mine` to rank r, for all ranks in order, and receives from_ranks[r] rows of rank r
        into `out`. Raises PeerLost."""
        if self.mesh.members.size == 1:
            return DeviceCollective(self.mesh, self.mesh.launch(lambda: out.copy_(mine)))
        rows = [list(from_ranks), list(to_ranks)]
        return self._collective(lambda group: group.alltoall_base(out, mine, *rows))

    def _collective(self, start: Callable[[Any], Any]) -> DeviceCollective:
        mesh = self.mesh
        group = mesh.check()
        try:
            # NCCL's `wait` blocks the stream, not the host, whichever stream NCCL itself uses.
            return DeviceCollective(mesh, mesh.launch(lambda: start(group).wait()))
        except RuntimeError as error:
            raise mesh.lost(f"NCCL: {error}") from None


class DeviceCollective(Collective):
    """One collective under way on the device."""

    def __init__(self, mesh: DeviceMesh, join: Callable[[], object]) -> None:
        self.arrived_ns = ON_DEVICE
        self._device_mesh = mesh
        self._join = join

    def wait(self, deadline_s: float | None = None) -> None:
        """Orders what comes next on the current stream behind the collective. The host does not wait, so the deadline
        is NCCL's, which is the members'. Raises PeerLost when the group is gone already."""
        self._device_mesh.check()
        self._join()


def why_not(num_ranks: int) -> str | None:
    """Returns why NCCL cannot serve so many ranks on this machine, None if it can."""
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL; install one for CUDA"
    if (devices := torch.cuda.device_count()) < num_ranks:
        return f"NCCL takes one GPU per rank, and {num_ranks} ranks share {devices} here"
    return None
