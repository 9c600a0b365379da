"""The process group that deep_ep takes, on connections of the epoch's own and without process-wide state."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from moeserve.comm.gloo import Mesh
from moeserve.comm.members import Members
from moeserve.errors import PeerLost

dist: Any = torch.distributed  # its type hints lack most of what is used here

FAREWELL_S = 2.0  # how long a rank that leaves waits for the others to leave too


class DeepEPGroup:
    """A Gloo group by which buffers exchange their addresses. name, terms: as `Mesh` takes them."""

    def __init__(self, members: Members, name: str, terms: str) -> None:
        self.members = members
        self._mesh = Mesh(members, 1, name, terms)
        self._nccl: Any | None = None

    def connect(self, nccl: bool) -> Any:
        """Returns the `ProcessGroup`, with NCCL for tensors of this rank's GPU if asked. Raises PeerLost naming the
        ranks that did not come, ConfigError when terms differ."""
        self._mesh.connect()
        store, gloo = self._mesh.store, self._mesh.group
        kinds = dist.ProcessGroup.BackendType
        group = dist.ProcessGroup(store, gloo.rank(), gloo.size())
        group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        group._set_default_backend(kinds.GLOO)
        if nccl:
            device = torch.device("cuda", torch.cuda.current_device())
            prefix = dist.PrefixStore(f"{self.members.token}/{self.members.epoch}/nccl", store)
            self._nccl = dist.ProcessGroupNCCL(prefix, gloo.rank(), gloo.size(), dist.ProcessGroupNCCL.Options())
            group.bound_device_id = device
            group._register_backend(torch.device("cuda"), kinds.NCCL, self._nccl)
            self._nccl.eager_connect_single_device(device)
        return group

    def lost(self, reason: str) -> PeerLost:
        """Returns the error that names the missing ranks."""
        return self._mesh.lost(reason)

    def farewell(self) -> bool:
        """Returns whether all other ranks leave as well, so that buffers can be torn down together."""
        mesh, mine = self._mesh, torch.ones(1, dtype=torch.uint8)
        others = [rank for rank in range(self.members.size) if rank != self.members.rank]
        try:
            answers = {rank: torch.zeros(1, dtype=torch.uint8) for rank in others}
            mesh.channel(0).post(answers, dict.fromkeys(others, mine)).wait(FAREWELL_S)
        except PeerLost:
            return False
        return True

    def close(self) -> None:
        """Drops the connections."""
        if self._nccl is not None:
            self._nccl.abort()
            self._nccl = None
        self._mesh.close()
