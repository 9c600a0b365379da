"""Symmetric memory: a region of each rank of one host that all others have mapped, and how their
streams meet there.

A region is allocated once, offered again in every epoch, and lives as long as the process, so no
rank writes to memory that is gone. Leftovers of an old epoch cannot be taken for something of a new
one: before a rank joins again its device has finished, and flags hold numbers that grow from epoch
to epoch.

R ranks, B bytes.
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
from moeserve.kernels.exchange import FAILED, TOLD, WRONG

HEAD_BYTES = 4096  # of each micro-batch's part: a flag of 8 bytes per rank
MEETINGS = (
    38  # bits for the number of a meeting within its epoch, of the 53 that a flag has for numbers
)


@dataclass(frozen=True, slots=True)
class Window:
    """One micro-batch's part of all regions, and its state; see kernels/exchange.py. own_B: this
    rank's part. control: words that the host reads and writes, in any thread. meet(call): makes the
    current stream wait until all ranks are in this call."""

    rank: int
    bases_R: Tensor
    own_B: Tensor
    state: Tensor
    control: NDArray[np.int32]
    meet: Callable[[int], None]


class Symmetric:
    """All windows of this rank. A group that has failed stays failed until the next `join`: its
    kernels move nothing and each wait ends at once. A group fails when a rank leaves, when a rank
    ends (a thread watches the connections), or when a rank stays away for longer than the members'
    deadline."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._group: ShmGroup | None = None
        self._watcher: threading.Thread | None = None
        self._windows: list[Window] = []
        self._deadline_s = 0.0
        self._left = threading.Event()
        self._gone: tuple[int, ...] = ()

    def join(self, members: Members, ubatches: int, ubatch_bytes: int, facts: str) -> list[Window]:
        """Return a window for each micro-batch. facts: what must be the same on all ranks. Raises
        PeerLost, or ConfigError when facts differ."""
        assert 8 * members.size <= HEAD_BYTES, f"{members.size} ranks of one host"
        self.leave()
        self._memory.close()
        self._deadline_s = members.deadline_s
        self._left = threading.Event()
        self._gone = ()
        self._windows = []
        group = self._group = ShmGroup(members, range(members.size), "symmetric", 1)
        region_B, offer = self._memory.allocate(ubatches * ubatch_bytes)
        peers = group.connect([offer], f"{ubatches} micro-batches of {ubatch_bytes} bytes, {facts}")
        bases = dict.fromkeys(range(members.size), region_B.data_ptr())
        bases |= {rank: self._memory.open(rank, fd) for rank, (_, fd) in peers.items()}
        bases_R = torch.tensor(list(bases.values()), device=self._memory.device)
        parts = region_B.view(ubatches, ubatch_bytes)
        self._windows = [
            self._window(members, bases_R + ubatch * ubatch_bytes, own_B)
            for ubatch, own_B in enumerate(parts)
        ]
        links = {connection: rank for rank, (connection, _) in peers.items()}
        watch = (links, self._windows, self._left, group)
        watcher = threading.Thread(target=self._watch, args=watch, name="peers", daemon=True)
        watcher.start()
        self._watcher = watcher
        return self._windows

    def _window(self, members: Members, bases_R: Tensor, own_B: Tensor) -> Window:
        state = torch.tensor([members.epoch << MEETINGS, 0], device=self._memory.device)
        control = self._memory.words(WRONG + members.size)
        meet_all = partial(
            self._memory.meet, bases_R, state, members.rank, control, members.deadline_s
        )
        return Window(members.rank, bases_R, own_B, state, control.numpy(), meet_all)

    def _watch(
        self,
        links: Mapping[socket.socket, int],
        windows: list[Window],
        left: threading.Event,
        group: ShmGroup,
    ) -> None:
        """End this epoch when the first rank is gone. This rank stays connected until it leaves
        itself.
        """
        with selectors.DefaultSelector() as selector:
            for connection in links:
                selector.register(connection, selectors.EVENT_READ)
            if links:
                ready = [key.fileobj for key, _ in selector.select()]
                self._gone = tuple(
                    sorted(rank for connection, rank in links.items() if connection in ready)
                )
                _tell(windows)
        left.wait()
        group.close()

    def leave(self) -> None:
        """End all waits, here and at the peers, on devices and for other ranks to come. From any
        thread, any time.
        """
        _tell(self._windows)
        self._left.set()
        if self._group is not None:
            self._group.leave()
        if self._watcher is not None:
            self._watcher.join()  # it ends at once, and not while the process does

    def check(self) -> None:
        """Raise PeerLost if kernels have given up since `join`: their results, and all after them,
        are invalid. Raises RuntimeError if ranks made different calls, which is a bug. It reads
        host memory only, so wait for an event behind the results in question first."""
        failed = [window for window in self._windows if window.control[FAILED]]
        if not failed:
            return
        if self._left.is_set():
            raise PeerLost("this rank left its group")
        wrong_WR = np.stack([window.control[WRONG:] for window in failed])
        if (wrong_WR == 2).any():
            strangers = (wrong_WR == 2).any(0).nonzero()[0].tolist()
            raise RuntimeError(
                f"ranks {strangers} make other calls than this one, or for other numbers of tokens"
            )
        late = (wrong_WR == 1).any(0).nonzero()[0].tolist()
        missing = self._gone or tuple(late)
        why = "are gone" if self._gone else f"did not come in {self._deadline_s:g} s"
        raise PeerLost(f"ranks that {why}: {', '.join(map(str, missing))}", missing)


def _tell(windows: list[Window]) -> None:
    for window in windows:
        window.control[TOLD] = 1
