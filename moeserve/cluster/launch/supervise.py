"""The launcher's policy: start machines, restart those that fail, and stop all at the end.

- If machine 0 ends by itself, all machines end, and the launcher returns its exit code.
- A machine that is killed or lost is restarted. If it is machine 0, all requests are lost; if it is
  another one, machine 0 continues meanwhile.
- A machine that cannot be reached is tried again until it can.
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
PAUSE_S = 0.5  # before a restart, doubled for each restart within RECENT_S
MAX_PAUSE_S = 30.0
RECENT_S = 60.0
REACH_S = 1.0  # between attempts to reach a machine
FAREWELL_S = 10.0  # for the other machines to end after machine 0
KILL_S = 2.0
SETTLED_S = (
    UNHEALTHY_S + 1
)  # by then, machine 0 serves with a joined machine or reports that it waits
CONNECTING = "connecting"
KILLED = 128  # exit codes from here on are caused by signals
_HOPELESS = range(2, 6)  # settings, model files, port, memory: a restart would fail again

MakeOrder = Callable[[int, PartHello], Order]  # from a machine's number and machine 0's hello


class Launch:
    """All machines, from their start to a single exit code."""

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
        """Run until the end, and return the exit code of machine 0 or of the first failure.

        Raises ConfigError if a part cannot be started at the beginning.
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
            # If several have ended, machine 0, which is the first task, decides.
            first = next(it for it in (*tasks, killed) if it.done())
            return await self._finish(tasks, first.result())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(machine.end() for machine in self._machines))

    def _on_signal(self, number: signal.Signals) -> None:
        """Drain on the first signal, stop at once on the second."""
        self._signals += 1
        assert self._killed is not None
        if self._signals > 1 or not self._machines[0].alive:
            if not self._killed.done():
                self._killed.set_result(128 + number)
            return
        to_stderr(f"moeserve launch: {number.name}: draining; once more stops now")
        self._machines[0].send(DRAIN)

    async def _connect(self) -> PartHello:
        """Connect to all machines, and return machine 0's hello.

        Raises ConfigError that names every machine that cannot be used.
        """
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
                " others cannot reach it; give its address on the network that they share"
            )
        return zero

    async def _keep(self, machine: Machine, zero: PartHello) -> int:
        """Run a machine, and restart it when it ends. Return an exit code when all must end."""
        restarts: deque[float] = deque()
        while True:
            code = await self._live(machine, zero)
            if machine.rank == 0:
                if self._signals or not machine.joined or (code is not None and code < KILLED):
                    self._over.set()
                    return 1 if code is None else code
                to_stderr(
                    "moeserve launch: machine 0 is gone, and all requests with it; restarting it"
                )
            elif code in _HOPELESS and not machine.joined:
                return self._give_up(
                    f"{machine.name} cannot join: {machine.last_line}", int(code or 0)
                )
            now = time.monotonic()
            while restarts and now - restarts[0] > RESTARTS_WITHIN_S:
                restarts.popleft()
            pause_s = min(PAUSE_S * 2 ** sum(now - at < RECENT_S for at in restarts), MAX_PAUSE_S)
            if await self._is_over(FAREWELL_S if code == 0 else pause_s):
                return 0
            if len(restarts) >= self._max_restarts:
                why = (
                    f"{machine.name} ended {len(restarts) + 1} times within an hour;"
                    " --max-restarts allows more"
                )
                return self._give_up(why, 1)
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
        """Wait for up to `within_s`, and return whether machine 0 has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._over.wait()
        return self._over.is_set()

    async def _reach(self, machine: Machine) -> bool:
        """Connect to a machine again. Return False if machine 0 ends before that succeeds."""
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
        """Set a machine to "ready" some time after it has joined again.

        Machine 0 does not report it if the machine came back before a readiness probe failed.
        """
        if state == "joined" and self._machines[0].state == "ready":
            asyncio.get_running_loop().call_later(
                SETTLED_S, lambda: self._on_state_of_first(self._machines[0].state)
            )

    async def _finish(self, tasks: Sequence[asyncio.Task[int]], code: int) -> int:
        """End all machines. Those that have joined end with machine 0 by themselves."""
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
