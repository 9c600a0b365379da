"""A rank's connections to other ranks.

They are the all-to-all of the MoE layers and the all-gathers of a tensor-parallel engine. `Peers`
also holds the placement of experts, which changes on all ranks together.
"""

import logging
import sys
from collections.abc import Callable, Sequence

from moeserve.comm.members import Members
from moeserve.comm.shm import ShmTensor
from moeserve.comm.tensor import ALONE, DeviceTensor, GlooTensor, TensorParallel
from moeserve.comm.world import World
from moeserve.messages import PlacementResult, PlacementTable
from moeserve.moe.all2all.base import All2All, All2AllCaps, Checked
from moeserve.moe.all2all.local import LocalAll2All, OwnExpertsOnly
from moeserve.moe.all2all.wire_format import WireFormat
from moeserve.moe.layer import MoELayer
from moeserve.moe.placement.placement import Placement
from moeserve.ops.native import native
from moeserve.runner.experts import ExpertStore, ReadExpert

log = logging.getLogger(__name__)


def make_tensor(world: World, num_channels: int, on_device: bool = False) -> TensorParallel:
    """Return the transport for all-gathers between the tensor-parallel ranks of an engine.

    Between GPUs that is NCCL. CPU ranks are on one machine, so they use shared memory, or Gloo
    without the native module.
    """
    if world.tp_size == 1:
        return ALONE
    if on_device:
        return DeviceTensor(world.tp_rank, world.tp_size, num_channels)
    kind = GlooTensor if native() is None else ShmTensor
    return kind(world.tp_rank, world.tp_size, num_channels)


class Peers:
    """A rank's connections to all other ranks.

    To be created in the runner's thread. All methods but `leave`, `prepare`, `prepared` and
    `moving` must be called there, too. Until the first `join`, MoE layers use only the experts of
    this rank, so that it can warm up alone.

    placement: the placement of experts; None for a model without experts.
    wire: the format in which activations are sent to other ranks.
    read: reads an expert from the checkpoint; None if experts never move.
    on_placement_result: called with the result of each placement, from any thread.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        tp: TensorParallel,
        rank: int,
        placement: Placement | None,
        wire: WireFormat,
        read: ReadExpert | None,
        num_ubatches: int,
        on_placement_result: Callable[[PlacementResult], object],
    ) -> None:
        self._layers = tuple(layers)
        self._tp = tp
        self._num_ubatches = num_ubatches
        self._on_placement_result = on_placement_result
        self._all2all = self._layers[0].all2all if self._layers else None  # shared by all layers
        # Why graphs cannot record the MoE layers of several ranks; None if they can.
        self.why_not_recordable = self._layers[0].why_not_recordable if self._layers else None
        # Replaces `_all2all` as long as there are no other ranks.
        self._local_all2all: LocalAll2All | None = None
        self._experts_per_rank = 0 if placement is None else placement.experts_per_rank
        self._newest_version = 0  # the newest version that was passed to `prepare`
        self._num_joins = 0
        self._store: ExpertStore | None = None
        if placement is not None and not isinstance(self._all2all, LocalAll2All):
            self._local_all2all = OwnExpertsOnly(placement.experts_per_rank, wire)
            if read is not None:
                self._store = ExpertStore(layers, read, rank, placement, on_placement_result)
        self._use(self._local_all2all or self._all2all)

    def _use(self, all2all: All2All | None) -> None:
        """Let all MoE layers use this backend."""
        if all2all is not None:
            for layer in self._layers:
                layer.all2all = all2all
        transports: tuple[object, ...] = all2all, self._tp
        # The runner calls `check` of these after each step. It raises PeerLost.
        self.transports_to_check = tuple(
            transport for transport in transports if isinstance(transport, Checked)
        )

    def join(self, members: Members, table: PlacementTable | None) -> None:
        """Load this rank's experts of `table`, and connect to the members.

        Raises PeerLost if some of them do not join.
        """
        if self._store is not None and table is not None:
            self._store.load_all(table, members.rank)
            self._experts_per_rank = table.experts_per_rank
            self._newest_version = 0
        if self._all2all is not None:
            backend = (
                self._local_all2all
                if self._local_all2all is not None and members.size == 1
                else self._all2all
            )
            backend.join(members, self._experts_per_rank, self._num_ubatches)
            self._use(backend)
            if (limit := backend.caps.max_tokens) is not None:
                log.debug("a dispatch sends at most %d tokens of each rank", limit)
        self._tp.join(members)
        self._num_joins += 1
        log.info("rank %d of %d joined epoch %d", members.rank, members.size, members.epoch)

    @property
    def topology(self) -> tuple[int, int]:
        """A value that changes with every join and every new placement."""
        return self._num_joins, 0 if self._store is None else self._store.version

    @property
    def max_recordable_tokens(self) -> int:
        """The most tokens of a step that a graph can record with the current all-to-all backend."""
        if any(layer.why_not_recordable for layer in self._layers):
            return 0
        max_per_rank = self._layers[0].all2all.caps.most_recorded if self._layers else None
        return sys.maxsize if max_per_rank is None else max_per_rank * self._tp.size

    @property
    def caps(self) -> All2AllCaps:
        """The capabilities of the all-to-all backend. The model must have experts."""
        assert self._all2all is not None
        return self._all2all.caps

    def leave(self) -> None:
        """Close all connections, so that a step which waits for a peer raises PeerLost. May be
        called at any time and from any thread.
        """
        if self._all2all is not None:
            self._all2all.leave()
        self._tp.leave()

    def prepare(self, table: PlacementTable) -> None:
        """Start to load this rank's experts of a placement in the background."""
        if self._store is None:
            self._on_placement_result(
                PlacementResult(
                    version=table.version, error="this rank has all experts, or there are none"
                )
            )
            return
        self._newest_version = max(self._newest_version, table.version)
        self._store.prepare(table)

    @property
    def prepared(self) -> int:
        """This rank's progress with the pending placement, for the vote (see experts.py)."""
        return 0 if self._store is None else self._store.prepared

    @property
    def moving(self) -> bool:
        """Whether a placement that was passed to `prepare` is not active yet."""
        return self._store is not None and self._store.version < self._newest_version

    @property
    def mixed(self) -> bool:
        """Whether some layers already have the next placement, and others the previous one.

        Unlike `moving`, it is equal on all ranks in every step. Tensor-parallel ranks need that,
        because all of them must replay a step as a graph, or none.
        """
        return self._store is not None and self._store.mixed

    def commit(self, active: int) -> None:
        """Activate the layers that all ranks have prepared, up to `active`."""
        if self._store is not None:
            self._store.commit(active)

    def close(self) -> None:
        """Leave the group, and end the background work."""
        self.leave()
        if self._store is not None:
            self._store.close()
