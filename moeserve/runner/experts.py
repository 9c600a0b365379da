"""Change the placement of this rank's experts while it serves.

The new experts are prepared in the background, layer by layer, and activated between two steps. All
ranks activate a layer between the same two steps:

1. The vote of each engine carries the progress of its ranks (`ExpertStore.prepared`).
2. The decision about the step carries the smallest progress of all ranks.
3. `commit` activates that progress.

A progress is one of these numbers:

    version * (layers + 1) + n   the first n layers of this placement are prepared or active
    -version                     this rank cannot prepare this placement (version 0 cannot be
                                 abandoned, since -0 is 0)

A rank prepares the next layer only when the layer before is active, so that `commit` advances by
one layer at most. If a rank cannot prepare a layer, all ranks abandon the placement with the same
step: layers that are active stay active, and the others stay as they were. From then on, this
mixture is the placement of that version.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moeserve.errors import ConfigError, MoeserveError
from moeserve.loader.experts import OnProgress
from moeserve.messages import PlacementResult, PlacementTable
from moeserve.moe.layer import MoELayer
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.placement.placement import Placement

logger = logging.getLogger(__name__)
_ABANDONED_ELSEWHERE = "another rank gave it up"
CPU_SHARE = 0.1  # share of one core's time for background work
BYTES_PER_S = 256e6  # memory traffic of background work, low enough not to slow steps

# (layer, expert, on_progress) -> w13 [2I, D], w2 [D, I], as `ExpertFiles.read` does.
ReadExpert = Callable[[int, int, OnProgress], tuple[Any, ...]]


class Cancelled(Exception):
    """Raised in background work that is no longer wanted."""


class Pace:
    """Limits background work to a share of one core and to a memory bandwidth, so that it does not
    slow steps.

    Call the pace after each small piece of work. The call sleeps until the thread is within its
    limits again.

    The thread keeps its normal priority. With a low priority, the kernel could suspend it while it
    holds the GIL, which would delay steps.
    """

    def __init__(self, cancelled: threading.Event, share: float, bytes_per_s: float) -> None:
        self._cancelled = cancelled
        self._share = share
        self._bytes_per_s = bytes_per_s
        self._cpu_s_at_last_call = time.thread_time()

    def __call__(self, num_bytes: int) -> None:
        """Sleep as long as needed. Raises Cancelled as soon as `cancelled` is set.

        num_bytes: bytes read or written since the last call.
        """
        used_s = time.thread_time() - self._cpu_s_at_last_call
        if self._cancelled.wait(max(used_s / self._share - used_s, num_bytes / self._bytes_per_s)):
            raise Cancelled
        self._cpu_s_at_last_call = time.thread_time()


@dataclass(slots=True)
class _StagedLayer:
    """A layer of a placement that is prepared but not active."""

    local: list[int]  # the logical expert of each local expert
    experts: list[tuple[int, Any]]  # those that change: (local index, packed expert)
    to_physical: LogicalToPhysical


@dataclass(slots=True)
class _Move:
    """A placement that is being prepared and activated."""

    version: int
    target: Placement | None = None  # None: the table is not decoded yet
    num_prepared: int = 0  # layers prepared or active
    num_active: int = 0  # layers active: num_prepared, or one less
    staged: _StagedLayer | None = None  # the layer that is prepared but not active
    moved_bytes: int = 0
    error: str = ""
    began_at_s: float = field(default_factory=time.monotonic)
    cancelled: threading.Event = field(default_factory=threading.Event)


class ExpertStore:
    """This rank's experts. To be created in the runner's thread, after the model is built.

    `prepare` and `prepared` may be used in any thread, `commit` and `load_all` in the runner's.

    read: reads one expert from the checkpoint.
    on_placement_result: called once for each placement that was passed to `prepare`, except those
    that `load_all` drops. May be called from any thread.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        read: ReadExpert,
        rank: int,
        placement: Placement,
        on_placement_result: Callable[[PlacementResult], object] = lambda result: None,
    ) -> None:
        assert len(layers) == placement.num_layers, (len(layers), placement.num_layers)
        self.on_placement_result = on_placement_result
        self._layers = tuple(layers)
        self._read = read
        self._rank = rank
        self._placement = placement  # active, except in the first `_move.num_active` layers
        self._local_experts = [placement.local_experts(layer, rank) for layer in range(len(layers))]
        self._newest_version = placement.version  # that this rank has received
        # Versions that were abandoned before this rank received them.
        self._abandoned_versions: set[int] = set()
        self._queued: deque[PlacementTable] = deque()  # to be prepared, after `_move`
        self._move: _Move | None = None
        self._is_working = False  # whether the thread works on `_move`
        self._closed = False
        self._condition = threading.Condition()
        num_threads = torch.get_num_threads()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="expert mover", daemon=True
        )
        self._thread.start()
        started.wait()
        torch.set_num_threads(num_threads)

    @property
    def version(self) -> int:
        """The version of the active placement, which may have been abandoned after some layers."""
        return self._placement.version

    @property
    def prepared(self) -> int:
        """This rank's progress, for the vote."""
        move = self._move  # without the lock: an outdated progress is only smaller
        if move is None:
            return self._progress(self._placement.version, len(self._layers))
        return -move.version if move.error else self._progress(move.version, move.num_prepared)

    @property
    def mixed(self) -> bool:
        """Whether a placement is active in some layers only. `commit` and `load_all` change it."""
        move = self._move
        return move is not None and move.num_active > 0

    def prepare(self, table: PlacementTable) -> None:
        """Start to prepare a placement, after those that are still being prepared."""
        with self._condition:
            newest = self._newest_version
            self._newest_version = max(self._newest_version, table.version)
            abandoned = table.version in self._abandoned_versions
            self._abandoned_versions.discard(table.version)
            if not abandoned and table.version > newest:
                self._queued.append(table)
                self._condition.notify_all()
                return
        error = (
            _ABANDONED_ELSEWHERE
            if abandoned
            else f"version {table.version} is not newer than version {newest}, which came before it"
        )
        self.on_placement_result(PlacementResult(version=table.version, error=error))

    @torch.inference_mode()
    def commit(self, active: int) -> None:
        """Activate the progress that the group decided on: the smallest `prepared` of all ranks.

        Idempotent.
        """
        with self._condition:
            if active < 0:
                result = self._abandon(-active)
            else:
                version, num_layers = divmod(active, len(self._layers) + 1)
                result = self._advance(version, num_layers)
        if result is not None:
            self.on_placement_result(result)

    @torch.inference_mode()
    def load_all(self, table: PlacementTable, rank: int | None = None) -> None:
        """Change all layers to this placement, and drop the placements that are being prepared.
        Blocks.

        rank: this rank's new number, if it has changed.

        Raises CheckpointError if an expert cannot be read, and ConfigError if the placement is for
        another model. The call may be repeated.
        """
        target = self._decode(table)
        self._drop_all()
        self._rank = self._rank if rank is None else rank
        assert 0 <= self._rank < target.num_ranks, (self._rank, target.num_ranks)
        began_at_s = time.monotonic()
        num_bytes = 0
        for index, layer in enumerate(self._layers):
            num_bytes += self._load_layer(index, layer, target)
        with self._condition:
            self._placement = target
            self._newest_version = max(self._newest_version, target.version)
            self._abandoned_versions.clear()
        if num_bytes:
            took_s = time.monotonic() - began_at_s
            logger.info(
                "placement %d: %.1f MB read in %.1f s", target.version, num_bytes / 1e6, took_s
            )

    def close(self) -> None:
        """End the background thread. The active experts stay."""
        self._drop_all()
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    # In the runner's thread.

    def _progress(self, version: int, num_layers: int) -> int:
        return version * (len(self._layers) + 1) + num_layers

    def _advance(self, version: int, num_layers: int) -> PlacementResult | None:
        """Activate the first `num_layers` layers of `version`, which are prepared on all ranks."""
        move = self._move
        if move is None or move.version != version:
            # The placement is complete, or `load_all` dropped it when this rank joined a group. The
            # rank must have received the placement, because the group cannot agree on layers that
            # this rank has not prepared.
            newest = max(self._newest_version, self._placement.version)
            assert version <= newest, f"agreed on placement {version}, newest here is {newest}"
            return None
        assert num_layers <= move.num_prepared, (
            f"agreed on {num_layers} layers of placement {version}, this rank has prepared "
            f"{move.num_prepared}"
        )
        if num_layers <= move.num_active:
            return None
        assert move.staged is not None
        layer = self._layers[move.num_active]
        for index, expert in move.staged.experts:
            layer.experts.put(layer.packed, index, expert)
        layer.to_physical = move.staged.to_physical
        self._local_experts[move.num_active] = move.staged.local
        move.staged = None
        move.num_active += 1
        self._condition.notify_all()
        return self._finish(move) if move.num_active == len(self._layers) else None

    def _abandon(self, version: int) -> PlacementResult | None:
        """End the move to `version`, which some rank could not prepare."""
        move = self._move
        if move is not None and move.version == version:
            move.error = move.error or _ABANDONED_ELSEWHERE
            return self._finish(move)
        queued = [table for table in self._queued if table.version == version]
        if not queued and version <= self._newest_version:
            # The placement has ended already, or was dropped by `load_all` when this rank joined a
            # group.
            return None
        self._placement = replace(self._placement, version=version)
        if not queued:
            self._abandoned_versions.add(version)
            return None
        self._queued.remove(queued[0])
        return PlacementResult(version=version, error=_ABANDONED_ELSEWHERE)

    def _finish(self, move: _Move) -> PlacementResult:
        """End the move. The layers that are active stay active."""
        move.cancelled.set()
        target = move.target or self._placement
        self._placement = self._placement.with_layers(target, move.num_active, move.version)
        self._move = None
        self._condition.notify_all()
        took_s = time.monotonic() - move.began_at_s
        version = move.version
        if move.error:
            logger.warning(
                "placement %d was abandoned after %d layers: %s",
                version,
                move.num_active,
                move.error,
            )
        else:
            logger.info(
                "placement %d is active: %.1f MB read in %.1f s",
                version,
                move.moved_bytes / 1e6,
                took_s,
            )
        return PlacementResult(
            version=version,
            layers=move.num_active,
            moved_bytes=move.moved_bytes,
            took_s=took_s,
            error=move.error,
        )

    def _drop_all(self) -> None:
        """Drop all placements that are being prepared, and wait until the thread is idle."""
        with self._condition:
            self._queued.clear()
            if self._move is not None:
                self._move.cancelled.set()
                self._move = None
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._is_working)

    def _load_layer(self, index: int, layer: MoELayer, target: Placement) -> int:
        """Change one layer to a placement. Return the bytes read from the checkpoint."""
        current = self._local_experts[index]
        wanted = target.local_experts(index, self._rank)
        changed, num_bytes = self._packed_experts(index, wanted, on_progress=lambda num_bytes: None)
        if len(wanted) == len(current):
            for i, expert in changed:
                layer.experts.put(layer.packed, i, expert)
        else:
            new = dict(changed)
            experts = [
                new[i] if i in new else layer.experts.take(layer.packed, i)
                for i in range(len(wanted))
            ]
            layer.packed = layer.experts.stack(experts)
        layer.to_physical = layer.to_physical.with_placement(target)
        self._local_experts[index] = wanted
        return num_bytes

    # In the runner's thread or the background thread, never in both at once.

    def _decode(self, table: PlacementTable) -> Placement:
        """Decode a placement. Raises ConfigError if it is damaged or for another model."""
        with ConfigError.instead_of(ValueError, f"placement {table.version} is damaged"):
            placement = Placement.from_table(table)
        given = (placement.num_layers, placement.num_experts)
        needed = (self._placement.num_layers, self._placement.num_experts)
        if given != needed:
            raise ConfigError(
                f"placement {table.version} is for a model with (layers, experts) {given}, this "
                f"model has {needed}"
            )
        return placement

    def _packed_experts(
        self, index: int, wanted: list[int], on_progress: OnProgress
    ) -> tuple[list[tuple[int, Any]], int]:
        """Return (local index, packed expert) for each local expert that changes, and the bytes
        read for them from the checkpoint.

        wanted: the logical expert of each local expert.
        """
        layer = self._layers[index]
        current = self._local_experts[index]
        changed = [
            (i, expert)
            for i, expert in enumerate(wanted)
            if i >= len(current) or current[i] != expert
        ]
        packed: dict[int, Any] = {}
        num_bytes = 0
        for _, expert in changed:
            if expert in packed:
                continue
            if expert in current:
                packed[expert] = layer.experts.take(layer.packed, current.index(expert))
            else:
                weights = self._read(index, expert, on_progress)
                num_bytes += sum(weight.nbytes for weight in weights)
                packed[expert] = layer.experts.pack_expert(*weights)
            on_progress(0)  # no bytes were read since the last call, but time was used
        return [(i, packed[expert]) for i, expert in changed], num_bytes

    # In the background thread.

    def _run(self, started: threading.Event) -> None:
        # This applies to this thread, and to threads that are started later until `__init__`
        # restores the number.
        torch.set_num_threads(1)
        started.set()
        while (job := self._next()) is not None:
            move, table = job
            try:
                self._prepare(move, table)
            except Cancelled:
                pass
            except Exception as error:
                self._fail(move, error)

    def _next(self) -> tuple[_Move, PlacementTable] | None:
        """Wait for the next placement. Return None to end the thread."""
        with self._condition:
            self._is_working = False
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._closed or (self._queued and self._move is None))
            if self._closed:
                return None
            self._is_working = True
            table = self._queued.popleft()
            self._move = _Move(table.version)
            return self._move, table

    @torch.inference_mode()
    def _prepare(self, move: _Move, table: PlacementTable) -> None:
        target = self._decode(table)
        given = (target.num_ranks, target.experts_per_rank)
        needed = (self._placement.num_ranks, self._placement.experts_per_rank)
        if given != needed:
            raise ConfigError(
                f"it is for (ranks, experts per rank) {given}, but this group has {needed}, which "
                "only a Join can change"
            )
        move.target = target
        pace = Pace(move.cancelled, CPU_SHARE, BYTES_PER_S)
        for index, layer in enumerate(self._layers):
            local = target.local_experts(index, self._rank)
            experts, num_bytes = self._packed_experts(index, local, on_progress=pace)
            staged = _StagedLayer(local, experts, layer.to_physical.with_placement(target))
            if (device := staged.to_physical.device).type == "cuda":
                # Only this stream, because the device must not be synchronized while a CUDA graph
                # of a step is captured.
                torch.cuda.current_stream(device).synchronize()
            self._stage(move, staged, num_bytes)

    def _stage(self, move: _Move, staged: _StagedLayer, num_bytes: int) -> None:
        """Add a prepared layer to the progress, and wait until it is active."""
        with self._condition:
            if move.cancelled.is_set():
                raise Cancelled
            num_prepared = move.num_prepared + 1
            move.staged = staged
            move.moved_bytes += num_bytes
            move.num_prepared = num_prepared
            self._condition.wait_for(
                lambda: move.num_active == num_prepared or move.cancelled.is_set()
            )
            if move.num_active < num_prepared:
                raise Cancelled

    def _fail(self, move: _Move, error: Exception) -> None:
        """Make this rank vote to abandon the placement."""
        with self._condition:
            if move.cancelled.is_set():
                return
            is_ours = isinstance(error, MoeserveError)
            message = str(error) if is_ours else f"{type(error).__name__}: {error}"
            # Before `error` is set: the step that sees it may end the move at once.
            logger.error("placement %d cannot be prepared: %s", move.version, message)
            move.error = message
