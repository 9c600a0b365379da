"""Collectives between GPUs by torch's NCCL, one GPU per rank; messages of the host still go by Gloo.

NCCL neither names a rank that is missing nor wakes a host that waits for one of its kernels. So whatever can be asked
beforehand (who is there, how many rows will come) is asked over Gloo, with its deadlines. When somebody leaves, the
communicator is aborted: its kernels end at once, and with them all waits for the device, with results that are not to
be believed. `check` tells. torch's own watchdog aborts it as well, where a kernel waits longer than the deadline.
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

# Does work on some stream; what it returns makes the current one wait for that.
Launch = Callable[[Callable[[], object]], Callable[[], object]]

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ABORT = "2"  # of torch's ways to handle errors: end the communicator, and not the process


def in_line(work: Callable[[], object]) -> Callable[[], object]:
    """On the current stream: for what is waited for at once."""
    work()
    return lambda: None


class DeviceMesh(Mesh):
    """A mesh whose collectives take tensors of this process's GPU, and of which nobody waits on the host.

    One communicator serves all channels: ranks that take turns alike launch alike. launch: on which stream. max_sms:
    multiprocessors that it takes at most, None: as NCCL likes.
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
        return DeviceChannel

    def connect(self) -> None:
        super().connect()
        if self.members.size == 1:
            return
        try:
            self._group = self._open(dist.PrefixStore(f"{self._prefix}/device", self.store))
            self._meet(self._group)
        except RuntimeError as error:
            self.close()
            raise self.lost(f"NCCL did not connect the ranks: {error}") from None
        if self.closed:  # before there was a group to abort
            self.close()
            raise self.lost()

    def check(self) -> Any:
        """To be called once the host has waited for the device: raises PeerLost if what it computed is not to be
        believed, because this rank left, or NCCL gave up on a peer. Returns NCCL's group."""
        group = self._group
        if self.closed or (group is None and self.members.size > 1):
            raise self.lost()
        if group is not None and (error := group.get_error().name) != "SUCCESS":
            self.close()
            raise self.lost(f"NCCL gave up on a rank: {error}")
        return group

    def close(self) -> None:
        super().close()
        with self.lock:
            group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # it tells that aborting took too long; nothing waits any more
                group.abort()

    def _open(self, store: Any) -> Any:
        os.environ.setdefault(HANDLING, ABORT)  # read by the group as it is made
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=self.members.deadline_s)
        if self._max_sms is not None:
            options.config.max_ctas = self._max_sms
        return dist.ProcessGroupNCCL(store, self.members.rank, self.members.size, options)

    def _meet(self, group: Any) -> None:
        """Not later, in the first collective: there nobody expects that it takes seconds."""
        group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))


class DeviceChannel(Channel):
    """One micro-batch's. Collectives begin where they are called, in the order of calls of all channels."""

    mesh: DeviceMesh

    def all_to_all(
        self, out: Tensor, mine: Tensor, from_ranks: Sequence[int], to_ranks: Sequence[int]
    ) -> DeviceCollective:
        """Rows of `mine`, by rank, to all ranks, and theirs to `out`. Raises PeerLost."""
        if self.mesh.members.size == 1:
            return DeviceCollective(self.mesh, self.mesh.launch(lambda: out.copy_(mine)))
        rows = [list(from_ranks), list(to_ranks)]
        return self._collective(lambda group: group.alltoall_base(out, mine, *rows))

    def _collective(self, start: Callable[[Any], Any]) -> DeviceCollective:
        mesh = self.mesh
        group = mesh.check()
        try:
            # NCCL's `wait` is the stream's: that one goes on behind the collective, whichever NCCL itself uses.
            return DeviceCollective(mesh, mesh.launch(lambda: start(group).wait()))
        except RuntimeError as error:
            raise mesh.lost(f"NCCL: {error}") from None


class DeviceCollective(Collective):
    """On its way on the device."""

    def __init__(self, mesh: DeviceMesh, join: Callable[[], object]) -> None:
        self.arrived_ns = ON_DEVICE
        self._device_mesh = mesh
        self._join = join

    def wait(self, deadline_s: float | None = None) -> None:
        """What comes next on the current stream runs after it. The host does not wait, so the deadline is NCCL's: that
        of the members. Raises PeerLost when the group is gone already."""
        self._device_mesh.check()
        self._join()


def why_not(num_ranks: int) -> str | None:
    """What is in the way of NCCL for so many ranks on this machine."""
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL; install one for CUDA"
    if (devices := torch.cuda.device_count()) < num_ranks:
        return f"NCCL takes one GPU per rank, and {num_ranks} ranks share {devices} here"
    return None
