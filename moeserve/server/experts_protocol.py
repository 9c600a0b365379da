"""What GET /v1/experts answers. L MoE layers, E experts, R ranks; times in seconds, counters since the start."""

from __future__ import annotations

from typing import Literal

import msgspec


class EngineStatus(msgspec.Struct, kw_only=True):
    """state: loading, waiting (for the others), serving, draining, lost (a new one starts) or gone.

    step_s: in the model, of the newest step with requests of its own; mean_step_s: over some 64 of them. vote_s: until
    all engines had agreed on the newest step. comm_s: rows on their way, summed over transfers; exposed_comm_s: the
    part for which the model stood still; overlap_efficiency: 1 - exposed / all.
    """

    engine: int
    host: str
    pid: int | None
    state: str
    epoch: int
    restarts: int
    requests: int
    running: int
    waiting: int
    steps: int
    step_s: float
    mean_step_s: float
    vote_s: float
    ubatches: int
    comm_s: float
    exposed_comm_s: float
    overlap_efficiency: float


class RankStatus(msgspec.Struct, kw_only=True):
    """One process. slots: experts that it holds, replicas included. share: of the rows of late, by its slots; null if
    nothing was counted, or every engine has all experts and computes what its own requests ask for."""

    rank: int
    engine: int
    tp_rank: int
    slots: int
    share: float | None


class BalanceStatus(msgspec.Struct, kw_only=True):
    """Mean over fullest, for the rows of late; 1 is even. ranks: over ranks, averaged over layers; experts: over
    experts, wherever they are; by_layer: the same for each layer, [L]."""

    ranks: float
    experts: float
    ranks_by_layer: list[float]
    experts_by_layer: list[float]


class LoadStatus(msgspec.Struct, kw_only=True):
    """Rows (a token counts once for each expert that it chose), [L][E]. total: since the start. recent: what is older
    counts less, by half every two minutes."""

    total: list[list[int]]
    recent: list[list[float]]


class PlacementStatus(msgspec.Struct, kw_only=True):
    """experts: the expert in each slot, [L][R * experts_per_rank]; slot s belongs to rank s // experts_per_rank."""

    version: int
    experts_per_rank: int
    experts: list[list[int]]


class DecisionStatus(msgspec.Struct, kw_only=True):
    """One attempt to move experts. error "": it came into force everywhere."""

    age_s: float
    version: int
    forced: bool
    moved_bytes: int
    took_s: float
    error: str


class RebalancingStatus(msgspec.Struct, kw_only=True):
    """why: the last decision, for people. moved_bytes: over all ranks. decisions: the last 32, newest first."""

    mode: Literal["auto", "off"]
    why: str
    moved_bytes: int
    placed: int
    given_up: int
    decisions: list[DecisionStatus]


class ExpertsResponse(msgspec.Struct, kw_only=True):
    """ep_sharded: experts lie on all ranks together; otherwise every engine has all of them, and slots are those of one
    engine. complete: all engines serve. waiting: requests that wait for an engine. created: Unix time."""

    object: Literal["experts"] = "experts"
    created: float
    ep_sharded: bool
    dp: int
    tp: int
    epoch: int
    complete: bool
    waiting: int
    num_layers: int
    num_experts: int
    engines: list[EngineStatus]
    ranks: list[RankStatus]
    balance: BalanceStatus
    load: LoadStatus
    placement: PlacementStatus
    rebalancing: RebalancingStatus
