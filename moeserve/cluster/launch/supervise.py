"""The launcher's policy: who is started when, what is started again, and when all end.

Machine 0 decides: where it ends by itself, all end, and its exit code is ours. A machine that is
killed or lost is started again: machine 0 with nothing of what it knew, any other one while machine
0 goes on. One that cannot be reached is tried until it can.
"""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from moeserve.actor.process import to_stderr
from moeserve.cluster.heartbeat import UNHEALTHY_S
from moeserve.cluster.launch.connection import PartNotStarted
from moeserve.cluster.launch.machine import Machine
from moeserve.cluster.launch.protocol import DRAIN, KILL, Order, PartHello
from moeserve.cluster.launch.targets import LaunchTarget
from moeserve.errors import ConfigError

RESTARTS_WITHIN_S = 3600.0
# before a restart; twice as long for each within RECENT_S
PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
RECENT_S = 60.0
REACH_S = 1.0  # between tries to reach a machine
FAREWELL_S = 10.0  # for the others to end after machine 0
KILL_S = 2.0
SETTLED_S = (
    UNHEALTHY_S + 1
)  # machine 0 says by then that it waits for a machine that has joined, or it serves with it
CONNECTING = "connecting"
KILLED = 128  # and above: exit codes by a signal
_HOPELESS = range(2, 6)  # settings, model files, port, memory: a new try would end alike

MakeOrder = Callable[[int, PartHello], Order]  # by a machine's number and machine 0's hello


class Launch:
    """All machines from their start to one exit code."""

    def __init__(
        self, targets: Sequence[LaunchTarget], make_order: MakeOrder, max_restarts: int
    ) -> None:
        self._machines = [
            Machine(target, rank, len(targets)) for rank, target in enumerate(targets)
        ]
        self._make_order = make_order
        self._max_restarts = max_restarts
        self._over = asyncio.Event()  # machine 0 has ended
        self._signals = 0
        self._killed: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Return machine 0's exit code, or the first failure's. Raises ConfigError if a machine
        cannot be used.
        """
        loop = asyncio.get_running_loop()
        killed: asyncio.Future[int] = loop.create_future()
        self._killed = killed
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        tasks: list[asyncio.Task[int]] = []
        try:
            connecting = asyncio.create_task(self._connect())
            await asyncio.wait((connecting, killed), return_when=asyncio.FIRST_COMPLETED)
            if killed.done():
                connecting.cancel()
                return killed.result()
            zero = connecting.result()
            for machine in self._machines:
                tasks.append(asyncio.create_task(self._keep(machine, zero), name=machine.name))
            self._machines[0].watch(self._on_state_of_first)
            for machine in self._machines[1:]:
                machine.watch(self._on_state_of_other)
            await asyncio.wait((*tasks, killed), return_when=asyncio.FIRST_COMPLETED)
            first = next(
                it for it in (*tasks, killed) if it.done()
            )  # machine 0's end counts, if it is among them
            return await self._finish(tasks, first.result())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(machine.end() for machine in self._machines))

    def _on_signal(self, number: signal.Signals) -> None:
        """The first signal drains, the second one ends all at once."""
        self._signals += 1
        assert self._killed is not None
        if self._signals > 1 or not self._machines[0].alive:
            if not self._killed.done():
                self._killed.set_result(128 + number)
            return
        to_stderr(f"moeserve launch: {number.name}: draining; once more stops now")
        self._machines[0].send(DRAIN)

    async def _connect(self) -> PartHello:
        """Connect to all machines at once, so that every one that cannot be used is named. Returns
        machine 0's hello."""
        for machine in self._machines:
            machine.enter(CONNECTING)
        found = await asyncio.gather(
            *(machine.connect() for machine in self._machines), return_exceptions=True
        )
        bad = []
        remedy = ""
        for machine, hello in zip(self._machines, found, strict=True):
            if isinstance(hello, PartNotStarted):
                bad.append(f"{machine.name}: {hello}")
                remedy = machine.remedy
            elif isinstance(hello, BaseException):
                raise hello
        if bad:
            raise ConfigError(f"cannot start on {'; '.join(bad).rstrip('.')}. {remedy}".rstrip())
        zero = found[0]
        assert isinstance(zero, PartHello)
        addresses = {hello.address for hello in found if isinstance(hello, PartHello)}
        if zero.address.startswith("127.") and len(addresses) > 1:
            raise ConfigError(
                f"machine 0 ({self._machines[0].name}) was reached at {zero.address}, where the"
                " others cannot reach "
                "it; name it by its address on the network that they share"
            )
        return zero

    async def _keep(self, machine: Machine, zero: PartHello) -> int:
        """A machine's lives. Return an exit code when there is no use in going on."""
        restarts: deque[float] = deque()
        while True:
            code = await self._live(machine, zero)
            if machine.rank == 0:
                if self._signals or not machine.joined or (code is not None and code < KILLED):
                    self._over.set()
                    return 1 if code is None else code
                to_stderr(
                    "moeserve launch: machine 0 is gone, and all requests with it; it starts anew"
                )
            elif code in _HOPELESS and not machine.joined:
                return self._give_up(
                    f"{machine.name} cannot take part: {machine.last_line}", int(code or 0)
                )
            now = time.monotonic()
            while restarts and now - restarts[0] > RESTARTS_WITHIN_S:
                restarts.popleft()
            pause_s = min(PAUSE_S * 2 ** sum(now - at < RECENT_S for at in restarts), MAX_PAUSE_S)
            if await self._is_over(FAREWELL_S if code == 0 else pause_s):
                return 0
            if len(restarts) >= self._max_restarts:
                told = (
                    f"{machine.name} ended {len(restarts) + 1} times within an hour;"
                    " --max-restarts allows more"
                )
                return self._give_up(told, 1)
            restarts.append(now)
            if not await self._reach(machine):
                return 0

    async def _live(self, machine: Machine, zero: PartHello) -> int | None:
        machine.enter("starting")
        code = await machine.live(self._make_order(machine.rank, zero))
        machine.enter("lost" if code is None else f"ended with code {code}")
        return code

    def _give_up(self, why: str, code: int) -> int:
        to_stderr(f"moeserve launch: giving up: {why}")
        return code

    async def _is_over(self, within_s: float) -> bool:
        """Whether machine 0 ends, within so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._over.wait()
        return self._over.is_set()

    async def _reach(self, machine: Machine) -> bool:
        """Return when the machine is connected again, False if machine 0 ends before that."""
        machine.enter("restarting")
        while True:
            try:
                await machine.connect()
                return True
            except PartNotStarted as error:
                machine.enter(f"not reachable: {error}; trying again")
            if await self._is_over(REACH_S):
                return False

    def _on_state_of_first(self, state: str) -> None:
        for machine in self._machines[1:]:
            if state == "ready" and machine.state == "joined":
                machine.enter("ready")

    def _on_state_of_other(self, state: str) -> None:
        """Machine 0 is silent about a machine that comes back so fast that no probe would fail."""
        if state == "joined" and self._machines[0].state == "ready":
            asyncio.get_running_loop().call_later(
                SETTLED_S, lambda: self._on_state_of_first(self._machines[0].state)
            )

    async def _finish(self, tasks: Sequence[asyncio.Task[int]], code: int) -> int:
        """End what still runs: with machine 0 those who have joined end on their own."""
        killed = self._killed
        assert killed is not None
        for machine in self._machines:
            if not (self._over.is_set() and machine.joined):
                machine.send(DRAIN)
        self._over.set()
        ends = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait((killed, ends), timeout=FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)
        if killed.done():
            for machine in self._machines:
                machine.send(KILL)
            await asyncio.wait((ends,), timeout=KILL_S)
            return killed.result()
        return code
