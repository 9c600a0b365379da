"""A rank's links to other ranks: the all2all of its MoE layers, the gathers of its engine, the
placement of experts.
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
from moeserve.runner.experts import ExpertStore, Read

log = logging.getLogger(__name__)


def make_tensor(world: World, num_channels: int, on_device: bool = False) -> TensorParallel:
    """Return how the ranks of an engine gather what each has computed: they share a machine, so by
    shared memory where there is native code, and by NCCL between devices."""
    if world.tp_size == 1:
        return ALONE
    kind = DeviceTensor if on_device else GlooTensor if native() is None else ShmTensor
    return kind(world.tp_rank, world.tp_size, num_channels)


class Peers:
    """A rank's links to all other ranks. Until the first `join` it warms up alone, with its own
    experts only.

    placement: where the experts are, None for a model without any. wire: the format that their rows
    travel in. read: reads an expert from the checkpoint, None if experts never move. on_placement_result:
    called with the outcome of each placement that was prepared, from any thread. To be created in
    the runner's thread, which also makes all calls but `leave`, `prepare`, `prepared` and `moving`.

    `checked`: transports whose `check`, to be called after a step, raises PeerLost if a transfer
    failed.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        tp: TensorParallel,
        rank: int,
        placement: Placement | None,
        wire: WireFormat,
        read: Read | None,
        num_ubatches: int,
        on_placement_result: Callable[[PlacementResult], object],
    ) -> None:
        self._layers = tuple(layers)
        self._tp = tp
        self._num_ubatches = num_ubatches
        self._on_placement_result = on_placement_result
        self._all2all = self._layers[0].all2all if self._layers else None  # one for all layers
        # Why no graph can record the MoE layers of several ranks; None if one can.
        self.not_recorded = self._layers[0].not_recorded if self._layers else None
        self._alone: LocalAll2All | None = None  # takes its place until there are other ranks
        self._experts_per_rank = 0 if placement is None else placement.experts_per_rank
        self._expected = 0  # the newest placement that was given to `prepare`
        self._joins = 0
        self._store: ExpertStore | None = None
        if placement is not None and not isinstance(self._all2all, LocalAll2All):
            self._alone = OwnExpertsOnly(placement.experts_per_rank, wire)
            if read is not None:
                self._store = ExpertStore(layers, read, rank, placement, on_placement_result)
        self._use(self._alone or self._all2all)

    def _use(self, all2all: All2All | None) -> None:
        if all2all is not None:
            for layer in self._layers:
                layer.all2all = all2all
        transports: tuple[object, ...] = all2all, self._tp
        self.checked = tuple(
            transport for transport in transports if isinstance(transport, Checked)
        )

    def join(self, members: Members, table: PlacementTable | None) -> None:
        """Load this rank's experts of `table` and connects to the members. Raises PeerLost when
        not all of them come."""
        if self._store is not None and table is not None:
            self._store.load_all(table, members.rank)
            self._experts_per_rank = table.experts_per_rank
            self._expected = 0
        if self._all2all is not None:
            backend = (
                self._alone if self._alone is not None and members.size == 1 else self._all2all
            )
            backend.join(members, self._experts_per_rank, self._num_ubatches)
            self._use(backend)
            if (limit := backend.caps.max_tokens) is not None:
                log.debug("rows of up to %d tokens of each rank travel at once", limit)
        self._tp.join(members)
        self._joins += 1
        log.info("rank %d of %d joined epoch %d", members.rank, members.size, members.epoch)

    @property
    def place(self) -> tuple[int, int]:
        """A value that changes with every join and every change of the placement."""
        return self._joins, 0 if self._store is None else self._store.version

    @property
    def recordable(self) -> int:
        """The tokens of the largest step that a graph can record, with the MoE layers as they are
        now.
        """
        if any(layer.not_recorded for layer in self._layers):
            return 0
        most = self._layers[0].all2all.caps.most_recorded if self._layers else None
        return sys.maxsize if most is None else most * self._tp.size

    @property
    def caps(self) -> All2AllCaps:
        """What the all2all backend of a model with experts can do."""
        assert self._all2all is not None
        return self._all2all.caps

    def leave(self) -> None:
        """Drop all connections, at any time and from any thread: a step that waits for a peer
        raises PeerLost.
        """
        if self._all2all is not None:
            self._all2all.leave()
        self._tp.leave()

    def prepare(self, table: PlacementTable) -> None:
        """Begin to load this rank's experts of a placement, in the background."""
        if self._store is None:
            self._on_placement_result(
                PlacementResult(
                    version=table.version, error="this rank has all experts, or there are none"
                )
            )
            return
        self._expected = max(self._expected, table.version)
        self._store.prepare(table)

    @property
    def prepared(self) -> int:
        """This rank's progress with the pending placement, for the vote; see `ExpertStore`."""
        return 0 if self._store is None else self._store.prepared

    @property
    def moving(self) -> bool:
        """Whether a placement was begun that is not active yet."""
        return self._store is not None and self._store.version < self._expected

    @property
    def mixed(self) -> bool:
        """Whether some layers have the next placement already, and others the one before. Unlike
        `moving` the same on all ranks in every step, which tensor-parallel ranks need: they must
        replay the same ones."""
        return self._store is not None and self._store.mixed

    def commit(self, active: int) -> None:
        """Activate the layers that all ranks have prepared, up to `active`."""
        if self._store is not None:
            self._store.commit(active)

    def close(self) -> None:
        """Leave the group and ends the background work."""
        self.leave()
        if self._store is not None:
            self._store.close()
