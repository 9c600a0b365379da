"""The launcher's policy: start machines, restart those that fail, and stop all at the end.

- If machine 0 ends by itself, all machines end, and the launcher returns its exit code.
- A machine that is killed or lost is restarted. With machine 0, all requests are lost. While
  another machine is restarted, machine 0 continues.
- A machine that cannot be reached is tried again until it can.
"""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from moeserve.actor.process import to_stderr
from moeserve.actor.tasks import cancel
from moeserve.cluster.heartbeat import UNHEALTHY_S
from moeserve.cluster.launch.connection import PartNotStarted
from moeserve.cluster.launch.machine import Machine
from moeserve.cluster.launch.protocol import DRAIN, KILL, Order, PartHello
from moeserve.cluster.launch.targets import LaunchTarget
from moeserve.errors import ConfigError

RESTART_WINDOW_S = 3600.0  # in which --max-restarts are allowed
PAUSE_S = 0.5  # before a restart, doubled for each restart within RECENT_S
MAX_PAUSE_S = 30.0
RECENT_S = 60.0
RECONNECT_INTERVAL_S = 1.0  # between attempts to reach a machine
END_TIMEOUT_S = 10.0  # for the other machines to end after machine 0
KILL_TIMEOUT_S = 2.0  # for killed machines to end
# Time after a machine has joined in which machine 0 either serves with it or reports that it waits.
SETTLED_S = UNHEALTHY_S + 1
CONNECTING = "connecting"
MIN_SIGNAL_CODE = 128  # exit codes from here on are caused by signals
# Exit codes for settings, model files, port and memory: a restart would fail again.
_PERMANENT_CODES = range(2, 6)

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
        self._first_has_ended = asyncio.Event()  # set when machine 0 has ended for good
        self._num_signals = 0
        # Gets the exit code when all machines must end at once.
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
                await cancel(connecting)  # otherwise a process that it has just started stays
                return killed.result()
            first_hello = connecting.result()
            for machine in self._machines:
                keeping = self._keep_running(machine, first_hello)
                tasks.append(asyncio.create_task(keeping, name=machine.name))
            self._machines[0].watch(self._on_state_of_first)
            for machine in self._machines[1:]:
                machine.watch(self._on_state_of_other)
            await asyncio.wait((*tasks, killed), return_when=asyncio.FIRST_COMPLETED)
            # If several have ended, machine 0, which is the first task, decides.
            ended = next(task for task in (*tasks, killed) if task.done())
            return await self._end_all(tasks, ended.result())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(machine.end() for machine in self._machines))

    def _on_signal(self, number: signal.Signals) -> None:
        """Drain on the first signal, stop at once on the second."""
        self._num_signals += 1
        assert self._killed is not None
        if self._num_signals > 1 or not self._machines[0].is_running:
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
            machine.set_state(CONNECTING)
        hellos = await asyncio.gather(
            *(machine.connect() for machine in self._machines), return_exceptions=True
        )
        failures = []
        remedy = ""
        for machine, hello_or_error in zip(self._machines, hellos, strict=True):
            if isinstance(hello_or_error, PartNotStarted):
                failures.append(f"{machine.name}: {hello_or_error}")
                remedy = machine.remedy
            elif isinstance(hello_or_error, BaseException):
                raise hello_or_error
        if failures:
            causes = "; ".join(failures).rstrip(".")
            raise ConfigError(f"cannot start on {causes}. {remedy}".rstrip())
        first_hello = hellos[0]
        assert isinstance(first_hello, PartHello)
        addresses = {hello.address for hello in hellos if isinstance(hello, PartHello)}
        if first_hello.address.startswith("127.") and len(addresses) > 1:
            raise ConfigError(
                f"machine 0 ({self._machines[0].name}) was reached at {first_hello.address}, where"
                " the others cannot reach it; give its address on the network that they share"
            )
        return first_hello

    async def _keep_running(self, machine: Machine, first_hello: PartHello) -> int:
        """Run a machine, and restart it when it ends. Return an exit code when all must end.

        first_hello: the hello of machine 0.
        """
        restarted_at_s: deque[float] = deque()  # times of the restarts within RESTART_WINDOW_S
        while True:
            code = await self._run_once(machine, first_hello)
            if machine.rank == 0:
                has_exited = code is not None and code < MIN_SIGNAL_CODE  # by itself
                if self._num_signals or not machine.has_joined or has_exited:
                    self._first_has_ended.set()
                    return 1 if code is None else code
                to_stderr(
                    "moeserve launch: machine 0 is gone, and all requests with it; restarting it"
                )
            elif code in _PERMANENT_CODES and not machine.has_joined:
                return self._give_up(
                    f"{machine.name} cannot join: {machine.last_line}", int(code or 0)
                )
            now_s = time.monotonic()
            while restarted_at_s and now_s - restarted_at_s[0] > RESTART_WINDOW_S:
                restarted_at_s.popleft()
            num_recent = sum(now_s - at_s < RECENT_S for at_s in restarted_at_s)
            pause_s = min(PAUSE_S * 2**num_recent, MAX_PAUSE_S)
            if code == 0:  # it was stopped, most likely because machine 0 is stopping
                pause_s = END_TIMEOUT_S
            if await self._first_ends_within(pause_s):
                return 0
            if len(restarted_at_s) >= self._max_restarts:
                cause = (
                    f"{machine.name} ended {len(restarted_at_s) + 1} times within an hour;"
                    " --max-restarts allows more"
                )
                return self._give_up(cause, 1)
            restarted_at_s.append(now_s)
            if not await self._reconnect(machine):
                return 0

    async def _run_once(self, machine: Machine, first_hello: PartHello) -> int | None:
        """Run a machine until it ends. Return its exit code, None if it was lost."""
        machine.set_state("starting")
        code = await machine.run(self._make_order(machine.rank, first_hello))
        machine.set_state("lost" if code is None else f"ended with code {code}")
        return code

    def _give_up(self, cause: str, code: int) -> int:
        """Print the cause, and return the exit code."""
        to_stderr(f"moeserve launch: giving up: {cause}")
        return code

    async def _first_ends_within(self, timeout_s: float) -> bool:
        """Wait for up to `timeout_s`, and return whether machine 0 has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._first_has_ended.wait()
        return self._first_has_ended.is_set()

    async def _reconnect(self, machine: Machine) -> bool:
        """Connect to a machine again. Return False if machine 0 ends before that succeeds."""
        machine.set_state("restarting")
        while True:
            try:
                await machine.connect()
                return True
            except PartNotStarted as error:
                machine.set_state(f"not reachable: {error}; trying again")
            if await self._first_ends_within(RECONNECT_INTERVAL_S):
                return False

    def _on_state_of_first(self, state: str) -> None:
        """Set the other machines to "ready" with machine 0, which then serves with them."""
        for machine in self._machines[1:]:
            if state == "ready" and machine.state == "joined":
                machine.set_state("ready")

    def _on_state_of_other(self, state: str) -> None:
        """Set a machine to "ready" some time after it has joined again.

        Machine 0 reports no new state if the machine came back before a readiness probe failed.
        """
        if state == "joined" and self._machines[0].state == "ready":
            asyncio.get_running_loop().call_later(
                SETTLED_S, lambda: self._on_state_of_first(self._machines[0].state)
            )

    async def _end_all(self, tasks: Sequence[asyncio.Task[int]], code: int) -> int:
        """End all machines. Those that have joined end with machine 0 by themselves."""
        killed = self._killed
        assert killed is not None
        for machine in self._machines:
            if not (self._first_has_ended.is_set() and machine.has_joined):
                machine.send(DRAIN)
        self._first_has_ended.set()
        all_ended = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait(
            (killed, all_ended), timeout=END_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if killed.done():
            for machine in self._machines:
                machine.send(KILL)
            await asyncio.wait((all_ended,), timeout=KILL_TIMEOUT_S)
            return killed.result()
        return code
