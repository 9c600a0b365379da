"""Form groups of engines that compute in lockstep.

An `EngineGroup` sends a Join to each member, and the members connect to each other. After every
loss of a member it forms the group again, in a new epoch.
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

import msgspec

from moeserve.actor.tasks import cancel, spawn
from moeserve.cluster.engine_state import EngineState, Held, JoinSent
from moeserve.cluster.engine_table import EngineTable
from moeserve.cluster.rendezvous import Rendezvous, bracketed
from moeserve.errors import ConfigError, Overloaded
from moeserve.messages import Join, Joined, PlacementTable, Ready

log = logging.getLogger(__name__)

JOIN_S = 600.0  # timeout of an epoch's joins, which may load weights for a new placement
SETTLE_PAUSE_S = 0.1  # survivors often report a dead engine before its supervisor notices
MAX_FAILURES = 6  # the group fails for good after so many failed epochs in a row, without a death
_EQUAL_FACTS = (  # fields of Ready that must be the same on all engines
    "version",
    "architecture",
    "dtype",
    "vocab_size",
    "block_size",
    "eos_token_ids",
    "num_params",
    "num_moe_layers",
    "num_experts",
    "checkpoint",
)


class EngineGroup:
    """A group of engines, which is formed again whenever an engine is lost or replaced."""

    def __init__(
        self,
        table: EngineTable,
        members: Sequence[int],
        rendezvous: Rendezvous,
        *,
        placement: PlacementTable | None,
        on_formed: Callable[["EngineGroup"], None],
        on_failed: Callable[[str, int], None],
    ) -> None:
        """Start to form a group.

        Args:
            members: the engines' ranks, in the order of their dp ranks within the group.
            rendezvous: the machines of the fleet, and the numbers of epochs.
            placement: the experts' placement, None if every engine has all experts.
            on_formed: called each time when all engines serve together.
            on_failed: called with cause and exit code if the engines will never serve together.
        """
        self.members = tuple(members)
        self.placement = placement
        self.epoch = 0
        self._table = table
        self._rendezvous = rendezvous
        self._on_formed = on_formed
        self._on_failed = on_failed
        self._needs_epoch = True  # `members` or `placement` have changed since the last epoch
        self._regroup_outcomes: list[asyncio.Future[str]] = []  # see `regroup`
        self._folder = ""  # for the sockets of the present epoch
        name = f"group of {self._states[0].name}"
        self._task = spawn(self._keep_together(), name=name, on_error=self._on_error)

    @property
    def complete(self) -> bool:
        """Whether all engines serve together."""
        return not self._needs_epoch and all(state.epoch == self.epoch for state in self._states)

    @property
    def _states(self) -> list[EngineState]:
        return self._table.states_of(self.members)

    def hold_if_incomplete(self) -> None:
        """Hold the engines if the group is not complete: they wait, and get no new requests."""
        if not self.complete:
            for rank in self.members:
                self._table.apply(rank, Held(True))

    def set_placement(self, placement: PlacementTable | None) -> None:
        """Use this placement from the next epoch on."""
        self.placement = placement

    def regroup(
        self, members: Sequence[int], placement: PlacementTable | None
    ) -> asyncio.Future[str]:
        """Form the group again, with these members.

        Return a future. Its result is why the group could not be formed, or "".
        """
        self.members = tuple(members)
        self.placement = placement
        self._needs_epoch = True
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._regroup_outcomes.append(outcome)
        self.hold_if_incomplete()
        self._table.wake()  # `_keep_together` waits for an incomplete group
        return outcome

    async def close(self) -> None:
        """Stop forming the group. Its engines run on, and stay connected to each other."""
        await cancel(self._task)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _on_error(self, name: str, error: Exception) -> None:
        log.error("the %s failed", name, exc_info=error)
        self._on_failed(f"the {name} failed: {error!r}", 1)

    async def _keep_together(self) -> None:
        """Form the group whenever it is not complete. Return after a final failure."""
        num_failures = 0  # in a row
        while True:
            await self._table.wait_until(lambda: not self.complete)
            self.hold_if_incomplete()
            if any(state.left_group for state in self._states):
                await asyncio.sleep(SETTLE_PAUSE_S)
            await self._table.wait_until(lambda: all(state.up for state in self._states))
            members = self.members
            try:
                check_same_model([state.ready for state in self._states if state.ready is not None])
            except ConfigError as error:
                self._on_failed(str(error), error.exit_code)
                return
            began_at_s = time.monotonic()
            cause = await self._form(members, self.placement)
            if not cause:
                num_failures = 0
                self._log_formed(len(members), took_s=time.monotonic() - began_at_s)
                if self.complete:  # no member was lost, and `regroup` was not called, meanwhile
                    self._on_formed(self)
                self._resolve_outcomes("")
                continue
            self._resolve_outcomes(cause)
            log.warning("epoch %d failed: %s", self.epoch, cause)
            if not self._first_ended(members):
                num_failures += 1
            if num_failures >= MAX_FAILURES:
                self._on_failed(
                    f"the engines could not form a group, {num_failures} times in a row: {cause}", 1
                )
                return
            await asyncio.sleep(min(0.05 * 2.0**num_failures, 5.0))

    def _log_formed(self, num_members: int, took_s: float) -> None:
        # The end of a server's start has a log line of its own.
        level = logging.INFO if self.epoch > 1 else logging.DEBUG
        log.log(level, "%d engines serve in epoch %d (%.2f s)", num_members, self.epoch, took_s)

    def _resolve_outcomes(self, cause: str) -> None:
        """Resolve the futures of `regroup`."""
        if self._needs_epoch:
            return  # `regroup` was called meanwhile, and the epoch of its members is still to come
        outcomes = self._regroup_outcomes
        self._regroup_outcomes = []
        for outcome in outcomes:
            if not outcome.done():
                outcome.set_result(cause)

    async def _form(self, members: Sequence[int], placement: PlacementTable | None) -> str:
        """Send each engine its Join, and wait for all. Return why the epoch failed, or ""."""
        table = self._table
        epoch = next(self._rendezvous.epochs)
        self.epoch = epoch
        self._needs_epoch = False
        for rank in members:
            table.apply(rank, JoinSent())
        if not any(state.grouped for state in table.states_of(members)):
            # An engine that computes alone needs no Join: it has joined at once.
            for rank in members:
                table.apply(rank, Joined(epoch, took_s=0.0))
            return ""
        folder = os.path.join(self._rendezvous.local_host.folder, f"epoch-{epoch}")
        os.mkdir(folder, 0o700)
        cause = self._send_joins(members, epoch, placement)
        if not cause:
            cause = await self._wait_joined(members, epoch)
        if cause:
            shutil.rmtree(folder, ignore_errors=True)
            return cause
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = folder
        for rank in members:
            table.apply(rank, Held(False))
        return ""

    async def _wait_joined(self, members: Sequence[int], epoch: int) -> str:
        """Wait until all engines have joined. Return why the epoch failed, or ""."""

        # Both use `members`, because the group may have others by now.
        def has_failed() -> bool:
            return bool(self._loss_of(members))

        def all_joined() -> bool:
            return all(state.epoch == epoch for state in self._table.states_of(members))

        try:
            async with asyncio.timeout(JOIN_S):
                await self._table.wait_until(lambda: has_failed() or all_joined())
        except TimeoutError:
            return self._kill_late(members, epoch)
        return self._loss_of(members)

    def _send_joins(
        self, members: Sequence[int], epoch: int, placement: PlacementTable | None
    ) -> str:
        """Send each engine its Join. Return why one cannot be sent, or ""."""
        hosts = tuple(state.host for state in self._table.states_of(members))
        # On one machine, the store and the vote use Unix sockets in the epoch's folder.
        store_address = ""
        vote_address = ""
        if len(set(hosts)) > 1:
            # The ports are free now. If one is taken meanwhile, the next epoch uses others.
            store_address, vote_address = _free_addresses(self._rendezvous.address, count=2)
        token = secrets.token_hex(16)
        for dp_rank, rank in enumerate(members):
            supervisor = self._table.supervisor(rank)
            folder = os.path.join(supervisor.host.folder, f"epoch-{epoch}")
            join = Join(
                epoch=epoch,
                dp_rank=dp_rank,
                tp_size=supervisor.role.world.tp_size,
                hosts=hosts,
                directory=folder,
                store=store_address or os.path.join(folder, "store.sock"),
                vote=vote_address,
                token=token,
                placement=placement,
            )
            try:
                supervisor.send(join)
            except Overloaded as error:
                return f"{supervisor.name} does not read its messages: {error}"
        return ""

    def _loss_of(self, members: Sequence[int]) -> str:
        """Return which engine has ended or left this epoch, or ""."""
        if ended := self._first_ended(members):
            return f"{ended} ended"
        for state in self._table.states_of(members):
            if state.left_group is not None and state.left_group.epoch == self.epoch:
                return f"{state.name} reported: {state.left_group.cause}"
        return ""

    def _first_ended(self, members: Sequence[int]) -> str:
        """Return the name of the first engine that has ended, or ""."""
        for rank in members:
            # An engine that has left the fleet meanwhile is not in the table.
            if rank not in self._table or not self._table[rank].up:
                return f"engine {rank}"
        return ""

    def _kill_late(self, members: Sequence[int], epoch: int) -> str:
        """Kill the engines that have not joined in time. Return why the epoch failed."""
        remaining = [rank for rank in members if rank in self._table]
        late = [state for state in self._table.states_of(remaining) if state.epoch != epoch]
        for state in late:
            reason = f"did not join epoch {epoch} within {JOIN_S:g} s"
            self._table.supervisor(state.rank).kill(reason)
        return f"{', '.join(state.name for state in late)} did not join within {JOIN_S:g} s"


def check_same_model(facts: Sequence[Ready]) -> None:
    """Raise ConfigError if the engines' models differ."""
    first = facts[0]
    for other in facts[1:]:
        for name in _EQUAL_FACTS:
            first_value = getattr(first, name)
            other_value = getattr(other, name)
            if first_value != other_value:
                raise ConfigError(
                    f"the engines disagree: {name} is {first_value!r} in process {first.pid},"
                    f" {other_value!r} in {other.pid}; the model's files differ between machines,"
                    " or have changed since the first engine read them"
                )


def combined(facts: Sequence[Ready]) -> Ready:
    """Return the sums of the engines' capacities and the smallest of their limits as one Ready.

    Raises ConfigError if the engines' models differ.
    """
    check_same_model(facts)
    first = facts[0]
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
    """Return `count` addresses host:port (as in a URL) whose ports are free now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for probe in probes:
            probe.bind((address, 0))
        return [f"{bracketed(address)}:{probe.getsockname()[1]}" for probe in probes]
