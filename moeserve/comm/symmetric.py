"""Symmetric memory: each rank of a host has a region of device memory that all other ranks have
mapped, and the ranks' streams synchronize over flags in it. Used by the backend cuda_ipc.

A region is allocated once, opened again by the peers in every epoch, and freed with the process, so
no rank writes to freed memory. Values that an old epoch left in memory are never mistaken for new
ones: a rank's device has finished before the rank joins again, and flags have numbers that increase
from epoch to epoch.

Suffixes of tensors are their dimensions. W: micro-batches. R: ranks. B: bytes.
"""

import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeserve.comm.cudart import CudaMemory
from moeserve.comm.members import Members
from moeserve.comm.shm import ShmGroup
from moeserve.errors import PeerLost
from moeserve.kernels.exchange import ABORT, FAILED, RANK_STATES

HEAD_BYTES = 4096  # the head of each micro-batch's part: a flag of 8 bytes per rank
# A flag has 53 bits for the number of a barrier: the epoch, and in the lowest BARRIER_BITS the
# number within the epoch.
BARRIER_BITS = 38
# States of a rank when a barrier failed, see kernels/exchange.py.
_LATE = 1
_OTHER_CALL = 2


@dataclass(frozen=True, slots=True)
class Window:
    """One micro-batch's part of all ranks' regions, and its state; see kernels/exchange.py."""

    rank: int
    bases_R: Tensor  # the addresses of the part in all regions
    own_B: Tensor  # this rank's part
    state: Tensor  # on the device
    control: NDArray[np.int32]  # words that kernels and any thread of the host read and write
    # Makes the current stream wait until all ranks have reached the call with this number.
    barrier: Callable[[int], None]


class Symmetric:
    """The symmetric memory of this rank: a region, divided into windows.

    A group fails if a rank leaves, if its process ends (a thread watches the connections), or if it
    does not reach a barrier within the members' deadline. A failed group stays failed until the
    next `join`: its kernels move nothing, and waits end immediately.
    """

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._group: ShmGroup | None = None
        self._watcher: threading.Thread | None = None
        self._windows: list[Window] = []
        self._deadline_s = 0.0
        self._has_left = threading.Event()
        self._gone_ranks: tuple[int, ...] = ()

    def join(self, members: Members, ubatches: int, ubatch_bytes: int, facts: str) -> list[Window]:
        """Connect the ranks, and return a window for each micro-batch.

        Raises PeerLost, and ConfigError if facts differ.

        Args:
            members: the ranks, all on this host.
            ubatches: the number of micro-batches.
            ubatch_bytes: the size of a window.
            facts: settings that must be the same on all ranks.
        """
        assert 8 * members.size <= HEAD_BYTES, f"{members.size} ranks of one host"
        self.leave()
        self._memory.close()
        self._deadline_s = members.deadline_s
        self._has_left = threading.Event()
        self._gone_ranks = ()
        self._windows = []
        group = ShmGroup(members, range(members.size), name="symmetric", ubatches=1)
        self._group = group
        region_B, offer = self._memory.allocate(ubatches * ubatch_bytes)
        peers = group.connect([offer], f"{ubatches} micro-batches of {ubatch_bytes} bytes, {facts}")
        # The addresses of all regions, by rank. This rank's own address is the only one that
        # `peers` does not replace.
        base_of = dict.fromkeys(range(members.size), region_B.data_ptr())
        base_of |= {rank: self._memory.open(rank, peer.region_fd) for rank, peer in peers.items()}
        bases_R = torch.tensor(list(base_of.values()), device=self._memory.device)
        parts = region_B.view(ubatches, ubatch_bytes)
        self._windows = [
            self._make_window(members, bases_R + ubatch * ubatch_bytes, own_B)
            for ubatch, own_B in enumerate(parts)
        ]
        rank_of = {peer.sock: rank for rank, peer in peers.items()}
        watcher = threading.Thread(
            target=self._watch,
            args=(rank_of, self._windows, self._has_left, group),
            name="peers",
            daemon=True,
        )
        watcher.start()
        self._watcher = watcher
        return self._windows

    def _make_window(self, members: Members, bases_R: Tensor, own_B: Tensor) -> Window:
        state = torch.tensor([members.epoch << BARRIER_BITS, 0], device=self._memory.device)
        control = self._memory.pinned_words(RANK_STATES + members.size)
        barrier = partial(
            self._memory.launch_barrier, bases_R, state, members.rank, control, members.deadline_s
        )
        return Window(
            rank=members.rank,
            bases_R=bases_R,
            own_B=own_B,
            state=state,
            control=control.numpy(),
            barrier=barrier,
        )

    def _watch(
        self,
        rank_of: Mapping[socket.socket, int],
        windows: list[Window],
        has_left: threading.Event,
        group: ShmGroup,
    ) -> None:
        """Fail the group when the first rank is gone. Stay connected until this rank leaves."""
        with selectors.DefaultSelector() as selector:
            for connection in rank_of:
                selector.register(connection, selectors.EVENT_READ)
            if rank_of:
                ready = [key.fileobj for key, _ in selector.select()]
                self._gone_ranks = tuple(
                    sorted(rank for connection, rank in rank_of.items() if connection in ready)
                )
                _fail_barriers(windows)
        has_left.wait()
        group.close()

    def leave(self) -> None:
        """End all waits, on this rank and on its peers, in kernels and in `join`.

        May be called at any time, from any thread.
        """
        _fail_barriers(self._windows)
        self._has_left.set()
        if self._group is not None:
            self._group.leave()
        if self._watcher is not None:
            # It ends immediately. Wait for it, so that it does not run while the process ends.
            self._watcher.join()

    def check(self) -> None:
        """Raise PeerLost if kernels have failed since `join`, because all results since are
        invalid. Raises RuntimeError if ranks made different calls, which is a bug.

        This reads host memory only, so first wait for an event after the results in question.
        """
        failed = [window for window in self._windows if window.control[FAILED]]
        if not failed:
            return
        if self._has_left.is_set():
            raise PeerLost("this rank left its group")
        states_WR = np.stack([window.control[RANK_STATES:] for window in failed])
        has_other_call_R = (states_WR == _OTHER_CALL).any(0)
        if has_other_call_R.any():
            ranks = has_other_call_R.nonzero()[0].tolist()
            raise RuntimeError(
                f"ranks {ranks} make other calls than this one, or for other numbers of tokens"
            )
        late_ranks = (states_WR == _LATE).any(0).nonzero()[0].tolist()
        missing_ranks = self._gone_ranks or tuple(late_ranks)
        why = "are gone" if self._gone_ranks else f"did not come in {self._deadline_s:g} s"
        raise PeerLost(f"ranks that {why}: {', '.join(map(str, missing_ranks))}", missing_ranks)


def _fail_barriers(windows: list[Window]) -> None:
    """Make kernels that wait in a barrier give up."""
    for window in windows:
        window.control[ABORT] = 1
