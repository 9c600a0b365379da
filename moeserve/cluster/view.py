"""Snapshots of a fleet as plain structs: for the banner, /v1/experts, metrics and tests."""

import msgspec

from moeserve.messages import PlacementTable


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
