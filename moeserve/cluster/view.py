"""Snapshots of a fleet as plain structs: for the banner, /v1/experts, metrics and tests."""

from typing import TYPE_CHECKING

import msgspec

from moeserve.messages import PlacementTable

if TYPE_CHECKING:
    from moeserve.cluster.engine_handle import EngineHandle
    from moeserve.cluster.fleet import Fleet


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. state: loading, waiting (for the others), serving, draining, lost (a new one
    starts) or gone.

    host: the machine's name.
    """

    rank: int
    host: str
    pid: int | None
    state: str
    epoch: int
    restarts: int
    num_requests: int


class RebalanceDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one attempt to move experts. error: why it failed, "" if the placement is in
    force everywhere.
    """

    at_s: float  # monotonic clock
    forced: bool
    version: int
    moved_bytes: int = 0
    took_s: float = 0.0
    error: str = ""


class ExpertsView(msgspec.Struct, frozen=True, kw_only=True):
    """Experts over ranks. counts: int64 [layers, experts], row-major: tokens since the start, as
    far as reported.

    recent: float64, the same with older tokens counting less (see `Rebalancer`). balance: mean over
    maximum rank load of late, averaged over layers; 1 is even. moved_bytes: since the start, over
    all ranks. why: the last decision, for people. decisions: the last few; num_placed and
    num_given_up count all.
    """

    placement: PlacementTable
    num_layers: int
    counts: bytes
    recent: bytes
    balance: float
    moved_bytes: int
    why: str
    decisions: tuple[RebalanceDecision, ...]
    num_placed: int = 0
    num_given_up: int = 0


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """epoch: the newest one. together: the engines form one group. experts: None for a dense model
    or ep off.
    """

    dp: int
    tp: int
    together: bool
    epoch: int
    complete: bool  # all engines serve
    waiting: int  # requests that wait for an engine
    engines: tuple[EngineView, ...]
    experts: ExpertsView | None
    machines: dict[str, str] = {}  # by name: here, missing (it is waited for) or drained


def fleet_view(fleet: "Fleet") -> FleetView:
    """Returns what there is to see of a fleet now."""
    loads = fleet.traffic.balancer.loads
    drained = fleet.scaling.drained
    engines = []
    for engine in fleet.engines:
        load = loads.get(engine.rank)
        engines.append(
            EngineView(
                rank=engine.rank,
                host=engine.host.name,
                pid=engine.pid,
                state=_state(engine),
                epoch=engine.epoch,
                restarts=engine.restarts,
                num_requests=len(load.live) if load is not None else 0,
            )
        )
    return FleetView(
        dp=fleet.dp,
        tp=fleet.config.parallel.tp,
        together=fleet.together,
        epoch=max((group.epoch for group in fleet.groups), default=0),
        complete=all(group.complete for group in fleet.groups),
        waiting=len(fleet.traffic.waiting),
        engines=tuple(engines),
        experts=fleet.experts.view() if fleet.experts is not None else None,
        machines={
            host.name: "here" if not host.absent else "drained" if host in drained else "missing"
            for host in (fleet.scaling.machines.hosts if fleet.engines else ())
        },
    )


def _state(engine: "EngineHandle") -> str:
    if engine.end is not None:
        return "gone"
    if not engine.up:
        return "lost" if engine.restarts else "loading"
    if engine.draining:
        return "draining"
    return "serving" if engine.epoch else "waiting"
