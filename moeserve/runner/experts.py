"""Moves this rank's experts: prepares them in the background, layer by layer, and activates them
between two steps.

All ranks change a layer between the same two steps: every rank's vote has its progress (`prepared`),
the least of these numbers comes back with the step's decision, and `commit` activates it. The
numbers:

    version * (layers + 1) + n   the first n layers of that placement are prepared here, or active
    -version                     this rank had to give that placement up

A rank prepares the next layer only when the one before is active everywhere, so the agreed number
is at most one layer ahead. If one rank gives up, all learn it with the same step: on all ranks,
active layers stay active, the others stay as they were, and that mixture counts as the placement of
this version from then on.
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
from moeserve.loader.experts import Work
from moeserve.messages import PlacementResult, PlacementTable
from moeserve.moe.layer import MoELayer
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.placement.placement import Placement

logger = logging.getLogger(__name__)
_ELSEWHERE = "another rank gave it up"
SHARE = 0.1  # of one core's time, for background work
BYTES_PER_S = 256e6  # memory traffic that a step does not notice

# (layer, expert, work) -> w13 [2I, D], w2 [D, I]: ExpertFiles.read
Read = Callable[[int, int, Work], tuple[Any, ...]]


class Cancelled(Exception):
    """Raised in background work that is no longer wanted."""


class Pace:
    """Limits background work to a share of one core and to a memory bandwidth, so that it does not
    slow steps.

    To be called after each small piece of work; sleeps until the thread is within its limits again.

    The thread keeps its normal priority: with a low one it could be suspended while it holds the
    interpreter's lock, which would delay steps, too.
    """

    def __init__(self, cancelled: threading.Event, share: float, bytes_per_s: float) -> None:
        self._cancelled = cancelled
        self._share = share
        self._bytes_per_s = bytes_per_s
        self._mark_s = time.thread_time()

    def __call__(self, num_bytes: int) -> None:
        """Sleep as needed. num_bytes: read or written since the last call. Raises Cancelled as
        soon as it is set.
        """
        used_s = time.thread_time() - self._mark_s
        if self._cancelled.wait(max(used_s / self._share - used_s, num_bytes / self._bytes_per_s)):
            raise Cancelled
        self._mark_s = time.thread_time()


@dataclass(slots=True)
class _Layer:
    """The next layer of a placement, ready to be activated."""

    local: list[int]  # the logical expert of each local one
    changed: list[tuple[int, Any]]  # local index, packed expert
    to_physical: LogicalToPhysical


@dataclass(slots=True)
class _Move:
    """A placement that is being prepared."""

    version: int
    target: Placement | None = None  # None: not looked at yet
    ready: int = 0  # layers that are prepared or active
    done: int = 0  # layers active
    staged: _Layer | None = None
    moved_bytes: int = 0
    error: str = ""
    began_s: float = field(default_factory=time.monotonic)
    cancelled: threading.Event = field(default_factory=threading.Event)


class ExpertStore:
    """This rank's experts. To be created in the runner's thread, after the model is built.

    read: reads one expert from the checkpoint. on_placement_result: called once, from any thread, with the
    outcome of every placement that was given to `prepare`, unless `load_all` came before its end.
    `prepare` and `prepared` are for any thread; `commit` and `load_all` for the runner's.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        read: Read,
        rank: int,
        placement: Placement,
        on_placement_result: Callable[[PlacementResult], object] = lambda result: None,
    ) -> None:
        assert len(layers) == placement.num_layers, (len(layers), placement.num_layers)
        self.on_placement_result = on_placement_result
        self._layers = tuple(layers)
        self._read = read
        self._rank = rank
        self._placement = placement  # active, where no layer of `_move` is
        self._local = [placement.local(layer, rank) for layer in range(len(layers))]  # active
        self._heard = placement.version  # the newest version that ever reached this rank
        self._gone: set[int] = (
            set()
        )  # versions that the group gave up before they reached this rank
        self._waiting: deque[PlacementTable] = deque()
        self._move: _Move | None = None
        self._busy = False  # the thread works on `_move`
        self._closed = False
        self._changed = threading.Condition()
        threads = torch.get_num_threads()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="expert mover", daemon=True
        )
        self._thread.start()
        started.wait()
        torch.set_num_threads(threads)

    @property
    def version(self) -> int:
        """The version of the placement active; one that was given up counts with the layers it
        got.
        """
        return self._placement.version

    @property
    def prepared(self) -> int:
        """This rank's progress, for the vote."""
        move = self._move  # no lock: a number that is out of date is too small
        if move is None:
            return self._number(self._placement.version, len(self._layers))
        return -move.version if move.error else self._number(move.version, move.ready)

    @property
    def mixed(self) -> bool:
        """Whether a placement is active in some layers only; `commit`, `load_all` change that."""
        move = self._move
        return move is not None and move.done > 0

    def prepare(self, table: PlacementTable) -> None:
        """Begin to prepare a placement; one that is still on its way is finished first."""
        with self._changed:
            known = self._heard
            self._heard = max(self._heard, table.version)
            gone = table.version in self._gone
            self._gone.discard(table.version)
            if not gone and table.version > known:
                self._waiting.append(table)
                self._changed.notify_all()
                return
        why = _ELSEWHERE if gone else f"version {known} was here before: versions must grow"
        self.on_placement_result(PlacementResult(version=table.version, error=why))

    @torch.inference_mode()
    def commit(self, active: int) -> None:
        """Activate what the group agreed on, the least of all ranks' `prepared`. May be
        repeated.
        """
        with self._changed:
            notice = (
                self._give_up(-active)
                if active < 0
                else self._advance(*divmod(active, len(self._layers) + 1))
            )
        if notice is not None:
            self.on_placement_result(notice)

    @torch.inference_mode()
    def load_all(self, table: PlacementTable, rank: int | None = None) -> None:
        """Bring every layer to this placement, and drops the one on its way. Blocks.

        rank: this rank's new number, if that changed too. Raises CheckpointError when an expert
        cannot be read, and ConfigError when the placement is of another model; the call may be
        repeated.
        """
        target = self._checked(table)
        self._drop_all()
        self._rank = self._rank if rank is None else rank
        assert 0 <= self._rank < target.num_ranks, (self._rank, target.num_ranks)
        began_s = time.monotonic()
        num_bytes = 0
        for index, layer in enumerate(self._layers):
            num_bytes += self._load_layer(index, layer, target)
        with self._changed:
            self._placement = target
            self._heard = max(self._heard, target.version)
            self._gone.clear()
        if num_bytes:
            took_s = time.monotonic() - began_s
            logger.info(
                "placement %d: %.1f MB read in %.1f s", target.version, num_bytes / 1e6, took_s
            )

    def close(self) -> None:
        """End the background thread; the experts active stay."""
        self._drop_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # In the runner's thread.

    def _number(self, version: int, layers: int) -> int:
        return version * (len(self._layers) + 1) + layers

    def _advance(self, version: int, layers: int) -> PlacementResult | None:
        """Activate layers 0..layers-1 of `version`, which are ready on all ranks."""
        move = self._move
        if move is None or move.version != version:
            # Agreed on before a Join, or long ago. A version that never came cannot have been
            # agreed on.
            newest = max(self._heard, self._placement.version)
            assert version <= newest, f"agreed on placement {version}, newest here is {newest}"
            return None
        assert layers <= move.ready, (
            f"agreed on {layers} layers of placement {version}, {move.ready} are ready here"
        )
        if layers <= move.done:
            return None
        assert move.staged is not None
        layer = self._layers[move.done]
        for index, expert in move.staged.changed:
            layer.experts.put(layer.packed, index, expert)
        layer.to_physical = move.staged.to_physical
        self._local[move.done] = move.staged.local
        move.staged = None
        move.done += 1
        self._changed.notify_all()
        return self._end(move) if move.done == len(self._layers) else None

    def _give_up(self, version: int) -> PlacementResult | None:
        """End the move to `version`, which some rank could not prepare."""
        move = self._move
        if move is not None and move.version == version:
            move.error = move.error or _ELSEWHERE
            return self._end(move)
        waiting = [table for table in self._waiting if table.version == version]
        if not waiting and version <= self._heard:
            return None  # the move is over, or from before a Join
        self._placement = replace(self._placement, version=version)
        if not waiting:
            self._gone.add(version)
            return None
        self._waiting.remove(waiting[0])
        return PlacementResult(version=version, error=_ELSEWHERE)

    def _end(self, move: _Move) -> PlacementResult:
        """End the move with the layers that are active."""
        move.cancelled.set()
        rows = move.target or self._placement
        self._placement = self._placement.with_layers(rows, move.done, move.version)
        self._move = None
        self._changed.notify_all()
        took_s = time.monotonic() - move.began_s
        version = move.version
        if move.error:
            logger.warning(
                "placement %d ends after %d of its layers: %s", version, move.done, move.error
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
            layers=move.done,
            moved_bytes=move.moved_bytes,
            took_s=took_s,
            error=move.error,
        )

    def _drop_all(self) -> None:
        """Drop all moves, except for layers active; returns when the thread is idle."""
        with self._changed:
            self._waiting.clear()
            if self._move is not None:
                self._move.cancelled.set()
                self._move = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy)

    def _load_layer(self, index: int, layer: MoELayer, target: Placement) -> int:
        """Bring one layer to a placement, from experts that are here or the checkpoint. Returns
        the bytes read.
        """
        here = self._local[index]
        wanted = target.local(index, self._rank)
        changed, num_bytes = self._bring(index, wanted, lambda num_bytes: None)
        if len(wanted) == len(here):
            for i, expert in changed:
                layer.experts.put(layer.packed, i, expert)
        else:
            new = dict(changed)
            experts = [
                new[i] if i in new else layer.experts.take(layer.packed, i)
                for i in range(len(wanted))
            ]
            layer.packed = layer.experts.stack(experts)
        layer.to_physical = layer.to_physical.after(target)
        self._local[index] = wanted
        return num_bytes

    # In either thread, never in both at once.

    def _checked(self, table: PlacementTable) -> Placement:
        with ConfigError.instead_of(ValueError, f"placement {table.version} is damaged"):
            placement = Placement.from_table(table)
        got = placement.num_layers, placement.num_experts
        if got != (here := (self._placement.num_layers, self._placement.num_experts)):
            raise ConfigError(
                f"placement {table.version} is for (layers, experts) {got}, this model has {here}"
            )
        return placement

    def _bring(
        self, index: int, wanted: list[int], work: Work
    ) -> tuple[list[tuple[int, Any]], int]:
        """Return (local index, packed expert) for each local expert that changes, and the bytes
        read for them.
        """
        layer = self._layers[index]
        here = self._local[index]
        changed = [
            (i, expert) for i, expert in enumerate(wanted) if i >= len(here) or here[i] != expert
        ]
        packed: dict[int, Any] = {}
        num_bytes = 0
        for _, expert in changed:
            if expert in packed:
                continue
            if expert in here:
                packed[expert] = layer.experts.take(layer.packed, here.index(expert))
            else:
                weights = self._read(index, expert, work)
                num_bytes += sum(weight.nbytes for weight in weights)
                packed[expert] = layer.experts.pack_expert(*weights)
            work(0)
        return [(i, packed[expert]) for i, expert in changed], num_bytes

    # In the background thread.

    def _run(self, started: threading.Event) -> None:
        torch.set_num_threads(
            1
        )  # in this thread, and (until `__init__` sets it again) in those that start later
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
        """Wait for the next placement to prepare, while none is on its way; returns None to end
        the thread.
        """
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or (self._waiting and self._move is None))
            if self._closed:
                return None
            self._busy = True
            table = self._waiting.popleft()
            self._move = _Move(table.version)
            return self._move, table

    @torch.inference_mode()
    def _prepare(self, move: _Move, table: PlacementTable) -> None:
        target = self._checked(table)
        shape, here = ((p.num_ranks, p.experts_per_rank) for p in (target, self._placement))
        if shape != here:
            raise ConfigError(
                f"it is for (ranks, experts of a rank) {shape}, this group has {here}: "
                "only a Join changes that"
            )
        move.target = target
        pace = Pace(move.cancelled, SHARE, BYTES_PER_S)
        for index, layer in enumerate(self._layers):
            local = target.local(index, self._rank)
            changed, num_bytes = self._bring(index, local, pace)
            staged = _Layer(local, changed, layer.to_physical.after(target))
            if (device := staged.to_physical.device).type == "cuda":
                torch.cuda.current_stream(
                    device
                ).synchronize()  # not the device: a step may be recorded
            self._offer(move, staged, num_bytes)

    def _offer(self, move: _Move, staged: _Layer, num_bytes: int) -> None:
        """Offers the next layer to the vote, and waits until it is active on all ranks."""
        with self._changed:
            if move.cancelled.is_set():
                raise Cancelled
            layers = move.ready + 1
            move.staged = staged
            move.moved_bytes += num_bytes
            move.ready = layers
            self._changed.wait_for(lambda: move.done == layers or move.cancelled.is_set())
            if move.done < layers:
                raise Cancelled

    def _fail(self, move: _Move, error: Exception) -> None:
        """Make this rank's votes tell the others to give up, too."""
        with self._changed:
            if move.cancelled.is_set():
                return
            move.error = (
                str(error)
                if isinstance(error, MoeserveError)
                else f"{type(error).__name__}: {error}"
            )
        logger.error("placement %d cannot be prepared: %s", move.version, move.error)
