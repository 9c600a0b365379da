"""The messages between the leader of an engine (its tensor-parallel rank 0) and its workers, the
other ranks.

leader --WorkerCommand--> worker   Build, Allocate, Run, Join, Leave, Prepare,
                                   PrepareGrammar, DropGrammars
worker --Report---------> leader   CommandDone (one per command), LoadProgress, Prepared, Failed
"""

import asyncio
from typing import Literal

import msgspec

from moeserve.comm.stream import BlockingStream, Peer, connect
from moeserve.comm.world import World
from moeserve.config import Config, Limits
from moeserve.engine.plan import GrammarJob
from moeserve.messages import Join, PlacementTable, TraceEvent

CONNECT_S = 60.0  # limit on connecting; a machine that starts many processes at once is slow


class WorkerBirth(msgspec.Struct, frozen=True):
    """The first message, which a worker reads from stdin. address: the Unix socket on which its
    leader listens.
    """

    address: str
    token: str
    tp_rank: int
    log_level: str
    log_format: Literal["text", "json"]


class Build(msgspec.Struct, frozen=True, tag=True):
    """Load this rank's part of the model. CommandDone.value: bytes that are left for KV blocks."""

    config: Config
    world: World
    placement: PlacementTable | None


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Allocate what these limits need, and warm up."""

    limits: Limits


class Run(msgspec.Struct, frozen=True, tag=True):
    """Execute a step plan (see engine/plan.py). CommandDone.value: a checksum of the tokens."""

    plan: bytes


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Leave the group, even if a step waits for it. CommandDone once no step runs any more."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Prepare a placement in the background."""

    placement: PlacementTable


class PrepareGrammar(msgspec.Struct, frozen=True, tag=True):
    """Prepare a grammar beside the steps. CommandDone follows, with an `error` if it failed."""

    job: GrammarJob


class DropGrammars(msgspec.Struct, frozen=True, tag=True):
    """Forget prepared grammars that no plan will name."""

    tickets: list[int]


class WorkerCommand(msgspec.Struct, frozen=True, array_like=True):
    """One command. seq: its CommandDone carries the same."""

    seq: int
    what: Build | Allocate | Run | Join | Leave | Prepare | PrepareGrammar | DropGrammars


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    """The end of a command. With `lost` it failed because of another rank, and may come again after
    the next Join.

    prepared: how far the pending placement is prepared; None: not looked at. error: why a grammar
    cannot be used.
    """

    seq: int
    value: int = 0
    prepared: int | None = None
    events: tuple[TraceEvent, ...] = ()
    lost: str = ""
    missing: tuple[int, ...] = ()
    error: str = ""
    kv_lost: bool = False  # of the step's result


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of the start: the name of a phase for people, and percent of the whole."""

    name: str
    percent: int


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """Progress of the pending placement; see `ExpertStore.prepared`."""

    prepared: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker's last message: it ends with this exit code."""

    cause: str
    exit_code: int


Report = CommandDone | LoadProgress | Prepared | Failed


def connect_to_leader(birth: WorkerBirth) -> BlockingStream[WorkerCommand]:
    """Return a worker's stream to its leader. Raises ConnectionError or TimeoutError where that is
    gone.
    """
    connecting = connect(birth.address, birth.token, 0, Peer(birth.tp_rank))
    return BlockingStream(asyncio.run(asyncio.wait_for(connecting, CONNECT_S)).sock, WorkerCommand)
