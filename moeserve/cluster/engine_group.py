"""Brings the engines of a group together: one Join to each per epoch, again after every loss.
Combines their facts.
"""

import asyncio
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from moeserve.cluster.engine_handle import EngineHandle
from moeserve.cluster.rendezvous import Rendezvous, bracketed
from moeserve.errors import ConfigError, Overloaded
from moeserve.messages import Join, PlacementTable, Ready

log = logging.getLogger(__name__)

JOIN_S = 600.0  # loading weights that a new placement asks for included
SETTLE_S = 0.1  # survivors often tell of a death before its own notice comes
MAX_FAILURES = 6  # meetings in a row that fail although nobody died
_EQUAL = (
    "version", "architecture", "dtype", "vocab_size", "block_size", "eos_token_ids", "num_params", "num_moe_layers",
    "num_experts", "checkpoint",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupMet:
    """All engines of the group serve, together."""

    group: "EngineGroup"


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """The engines of a group will never serve together."""

    cause: str
    exit_code: int


class EngineGroup:
    """A group of engines, which meet again whenever one was lost or replaced. `regroup` changes its
    members.

    machines: where the engines run. alone: the engines have one process each and no others to meet,
    so they serve as soon as they are up. tell: gets GroupMet and GroupFailed.
    """

    def __init__(
        self,
        engines: list[EngineHandle],
        machines: Rendezvous,
        *,
        placement: PlacementTable | None,
        alone: bool,
        tell: Callable[[GroupMet | GroupFailed], None],
    ) -> None:
        self.engines = engines
        self.placement = placement
        self.epoch = 0
        self._machines = machines
        self._alone = alone
        self._tell = tell
        self._stale = True  # who belongs to it has changed since the last meeting
        self._changed = asyncio.Event()
        self._outcomes: list[asyncio.Future[str]] = []
        self._folder = ""  # of the epoch in force
        self._life = asyncio.get_running_loop().create_task(
            self._run(), name=f"group of {engines[0].name}"
        )

    @property
    def complete(self) -> bool:
        """Whether all engines serve, together."""
        return not self._stale and all(engine.epoch == self.epoch for engine in self.engines)

    def poke(self) -> None:
        """Takes note of a change in an engine's standing: if the group is broken, all of its
        engines wait.
        """
        if not self.complete:
            for engine in self.engines:
                engine.held = not self._alone
        self._changed.set()

    def regroup(
        self, engines: list[EngineHandle], placement: PlacementTable | None
    ) -> asyncio.Future[str]:
        """Makes these engines the group, from the next meeting on; the future holds why that
        meeting failed, or "".
        """
        self.engines = engines
        self.placement = placement
        self._stale = True
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._outcomes.append(outcome)
        self.poke()
        return outcome

    async def close(self) -> None:
        """Ends the group, not its engines: those that are connected stay connected."""
        self._life.cancel()
        await asyncio.wait([self._life])
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _run(self) -> None:
        try:
            await self._keep_together()
        except Exception as error:  # a fault of ours
            log.exception("an engine group failed")
            self._tell(GroupFailed(f"the group of {self.engines[0].name} failed: {error!r}", 1))

    async def _keep_together(self) -> None:
        """Forms the group anew whenever it is not complete; returns after GroupFailed."""
        failures = 0
        while True:
            await self._until(lambda: not self.complete)
            self.poke()
            if any(engine.parted for engine in self.engines):
                await asyncio.sleep(SETTLE_S)
            await self._until(lambda: all(engine.up for engine in self.engines))
            engines = self.engines
            try:
                combined([engine.ready for engine in engines if engine.ready is not None])
            except ConfigError as error:  # together they would compute nonsense
                self._tell(GroupFailed(str(error), error.exit_code))
                return
            began_s = time.monotonic()
            cause = await self._meet(engines, self.placement)
            if not cause:
                failures = 0
                level = (
                    logging.INFO if self.epoch > 1 else logging.DEBUG
                )  # a start ends with a line of its own
                took_s = time.monotonic() - began_s
                log.log(
                    level, "%d engines serve in epoch %d (%.2f s)", len(engines), self.epoch, took_s
                )
                self._tell(GroupMet(self))
            self._resolve(cause)
            if not cause:
                continue
            log.warning("epoch %d did not come about: %s", self.epoch, cause)
            failures += all(engine.up for engine in engines)
            if failures >= MAX_FAILURES:
                self._tell(
                    GroupFailed(
                        f"the engines could not meet, {failures} times in a row: {cause}", 1
                    )
                )
                return
            await asyncio.sleep(min(0.05 * 2.0**failures, 5.0))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _resolve(self, cause: str) -> None:
        if self._stale:
            return  # regrouped meanwhile: the meeting that was asked for is yet to come
        outcomes = self._outcomes
        self._outcomes = []
        for outcome in outcomes:
            if not outcome.done():
                outcome.set_result(cause)

    async def _meet(self, engines: list[EngineHandle], placement: PlacementTable | None) -> str:
        """Sends each engine its Join and waits for all; returns why the meeting failed, or ""."""
        epoch = self.epoch = next(self._machines.epochs)
        self._stale = False
        for engine in engines:
            engine.epoch = 0
            engine.parted = None
        if self._alone:
            for engine in engines:
                engine.join(epoch)
            return ""
        folder = os.path.join(self._machines.here.folder, f"epoch-{epoch}")
        os.mkdir(folder, 0o700)
        cause = self._send_joins(engines, epoch, placement)

        def joined() -> bool:
            """Returns whether all are there, although the group may have got other members
            meanwhile.
            """
            return all(engine.epoch == epoch for engine in engines)

        try:
            async with asyncio.timeout(JOIN_S):
                await self._until(lambda: bool(cause or self._broken(engines)) or joined())
            cause = cause or self._broken(engines)
        except TimeoutError:
            cause = self._give_up_on_late(engines, epoch)
        if cause:
            shutil.rmtree(folder, ignore_errors=True)
            return cause
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = folder
        for engine in engines:
            engine.held = False
        return ""

    def _send_joins(
        self, engines: list[EngineHandle], epoch: int, placement: PlacementTable | None
    ) -> str:
        hosts = tuple(engine.host.name for engine in engines)
        # Free now: if one of the ports is taken meanwhile, they meet again with others.
        store, vote = (
            _free_addresses(self._machines.address, 2) if len(set(hosts)) > 1 else ("", "")
        )
        token = secrets.token_hex(16)
        for number, engine in enumerate(engines):
            folder = os.path.join(engine.host.folder, f"epoch-{epoch}")
            try:
                engine.send(
                    Join(
                        epoch=epoch,
                        dp_rank=number,
                        tp_size=engine.role.world.tp_size,
                        hosts=hosts,
                        directory=folder,
                        store=store or os.path.join(folder, "store.sock"),
                        vote=vote,
                        token=token,
                        placement=placement,
                    )
                )
            except Overloaded as error:
                return f"{engine.name} does not read its messages: {error}"
        return ""

    def _broken(self, engines: list[EngineHandle]) -> str:
        for engine in engines:
            if not engine.up:
                return f"{engine.name} ended"
        for engine in engines:
            if engine.parted is not None and engine.parted.epoch == self.epoch:
                return f"{engine.name} said: {engine.parted.cause}"
        return ""

    def _give_up_on_late(self, engines: list[EngineHandle], epoch: int) -> str:
        late = [engine for engine in engines if engine.epoch != epoch]
        for engine in late:
            engine.process.kill(f"did not join epoch {epoch} within {JOIN_S:g} s")
        return f"{', '.join(engine.name for engine in late)} did not join within {JOIN_S:g} s"


def combined(facts: Sequence[Ready]) -> Ready:
    """Returns the facts of all engines together: capacities add up, limits are the smallest.

    Raises ConfigError if the models are not the same.
    """
    first = facts[0]
    for other in facts[1:]:
        for name in _EQUAL:
            ours = getattr(first, name)
            theirs = getattr(other, name)
            if ours != theirs:
                raise ConfigError(
                    f"the engines disagree: {name} is {ours!r} in process {first.pid}, {theirs!r} in {other.pid}; "
                    "the model's files are not the same on all machines, or changed since the first of them read them"
                )
    return msgspec.structs.replace(
        first,
        max_model_len=min(engine.max_model_len for engine in facts),
        max_num_seqs=sum(engine.max_num_seqs for engine in facts),
        num_blocks=1 + sum(engine.num_blocks - 1 for engine in facts),  # each has a null block
        startup_s=max(engine.startup_s for engine in facts),
        step_s=max(engine.step_s for engine in facts),
        notes=tuple(dict.fromkeys(note for engine in facts for note in engine.notes)),
    )


def _free_addresses(address: str, count: int) -> list[str]:
    """Returns addresses host:port, as in a URL, whose ports are free now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for probe in probes:
            probe.bind((address, 0))
        return [f"{bracketed(address)}:{probe.getsockname()[1]}" for probe in probes]
