"""Snapshots of a fleet as plain structs: for the banner, /v1/experts, metrics and tests."""

import msgspec

from moeserve.messages import PlacementTable


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine."""

    rank: int
    host: str  # name of its machine
    pid: int | None
    # loading; waiting (for other engines); serving; draining; lost (it is being restarted); gone
    state: str
    epoch: int  # of its group, 0 for none
    restarts: int
    num_requests: int


class RebalanceDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one attempt to move experts."""

    at_s: float  # monotonic clock
    forced: bool
    version: int
    moved_bytes: int = 0
    took_s: float = 0.0
    error: str = ""  # why it failed, empty if the placement is active everywhere


class ExpertsView(msgspec.Struct, frozen=True, kw_only=True):
    """The experts, sharded over ranks, and their load. Arrays are [layers, experts], row-major."""

    placement: PlacementTable
    num_layers: int
    counts: bytes  # int64: tokens of each expert since the start, as far as reported
    recent: bytes  # float64: the same with older tokens weighted less (see `Rebalancer`)
    balance: float  # mean over maximum of the ranks' recent load, averaged over layers; 1 is even
    moved_bytes: int  # since the start, over all ranks
    why: str  # the last decision as text
    decisions: tuple[RebalanceDecision, ...]  # the most recent ones
    num_placed: int = 0  # decisions that became active
    num_given_up: int = 0  # decisions that failed


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """All engines."""

    dp: int
    tp: int
    is_one_group: bool  # whether all engines form one group
    epoch: int  # the highest of all groups
    complete: bool  # all engines serve
    waiting: int  # requests that wait for an engine
    engines: tuple[EngineView, ...]
    experts: ExpertsView | None  # None for a dense model or with --ep off
    machines: dict[str, str] = {}  # by name: "here", "missing" (waited for) or "drained"
