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

CONNECT_TIMEOUT_S = 60.0  # long, because a machine that starts many processes at once is slow


class WorkerBirth(msgspec.Struct, frozen=True):
    """The first message to a worker, which it reads from stdin."""

    address: str  # the Unix socket on which its leader listens
    token: str
    tp_rank: int
    log_level: str
    log_format: Literal["text", "json"]


class Build(msgspec.Struct, frozen=True, tag=True):
    """Load this rank's part of the model. CommandDone.value: the bytes left for KV blocks."""

    config: Config
    world: World
    placement: PlacementTable | None


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Allocate the memory for these limits, and warm up."""

    limits: Limits


class Run(msgspec.Struct, frozen=True, tag=True):
    """Execute a step plan (see engine/plan.py). CommandDone.value: a checksum of the tokens."""

    plan: bytes


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Leave the group, even while a step waits for it. CommandDone follows once no step runs."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Prepare a placement in the background."""

    placement: PlacementTable


class PrepareGrammar(msgspec.Struct, frozen=True, tag=True):
    """Prepare a grammar in the background. CommandDone follows, with `error` if it failed."""

    job: GrammarJob


class DropGrammars(msgspec.Struct, frozen=True, tag=True):
    """Drop prepared grammars that no plan will use."""

    tickets: list[int]


class WorkerCommand(msgspec.Struct, frozen=True, array_like=True):
    """A command. Its CommandDone has the same `seq`."""

    seq: int
    what: Build | Allocate | Run | Join | Leave | Prepare | PrepareGrammar | DropGrammars


class CommandDone(msgspec.Struct, frozen=True, tag=True):
    """The result of a command."""

    seq: int
    value: int = 0  # the docstring of the command says what the value is
    prepared: int | None = None  # progress of the pending placement; None: not checked
    events: tuple[TraceEvent, ...] = ()  # the worker's spans, if the step is traced
    # The message of a PeerLost. The command may be repeated after the next Join.
    lost: str = ""
    missing: tuple[int, ...] = ()  # ranks that are gone, if `lost`
    error: str = ""  # why a grammar cannot be used
    kv_lost: bool = False  # see `StepResult.kv_lost`


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """Progress of the start."""

    name: str  # description of the phase, for people
    percent: int  # percent of the whole start


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The progress of the pending placement; see `ExpertStore.prepared`."""

    prepared: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker's last message, before it ends with this exit code."""

    cause: str
    exit_code: int


Report = CommandDone | LoadProgress | Prepared | Failed


def connect_to_leader(birth: WorkerBirth) -> BlockingStream[WorkerCommand]:
    """Return a worker's stream to its leader. Raises ConnectionError or TimeoutError if the leader
    is gone.
    """
    connecting = connect(birth.address, birth.token, 0, Peer(birth.tp_rank))
    return BlockingStream(
        asyncio.run(asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)).sock, WorkerCommand
    )
