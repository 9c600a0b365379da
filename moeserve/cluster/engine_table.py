"""All engines of a fleet: the state of each, and the supervisor of its process."""

import asyncio
from collections.abc import Callable, Iterable, Iterator

from moeserve.cluster.engine_state import EngineEvent, EngineState
from moeserve.cluster.engine_supervisor import EngineSupervisor
from moeserve.messages import EngineIn, Phase


class EngineTable:
    """All engines by rank, including those that are not yet or no longer members of the fleet.

    Only `apply` changes the state of an engine.
    """

    def __init__(self) -> None:
        self._states: dict[int, EngineState] = {}
        self._supervisors: dict[int, EngineSupervisor] = {}
        self._waiters: set[asyncio.Future[None]] = set()  # resolved at the next change

    def __getitem__(self, rank: int) -> EngineState:
        return self._states[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._states))

    def __contains__(self, rank: int) -> bool:
        return rank in self._states

    def states_of(self, ranks: Iterable[int]) -> list[EngineState]:
        """Return the states of these engines."""
        return [self._states[rank] for rank in ranks]

    def supervisor(self, rank: int) -> EngineSupervisor:
        """Return the supervisor of an engine's process."""
        return self._supervisors[rank]

    def add(self, state: EngineState, supervisor: EngineSupervisor) -> None:
        """Add an engine that was not started yet."""
        assert state.rank not in self._states, state.rank
        self._states[state.rank] = state
        self._supervisors[state.rank] = supervisor

    def remove(self, rank: int) -> None:
        """Remove an engine that has ended."""
        del self._states[rank]
        del self._supervisors[rank]

    def apply(self, rank: int, event: EngineEvent) -> EngineState:
        """Apply an event to the state of an engine, and return the new state."""
        state = self._states[rank].after(event)
        if state != self._states[rank]:
            self._states[rank] = state
            # Phases are frequent, and no condition depends on them.
            if not isinstance(event, Phase):
                self.wake()
        return state

    def send(self, rank: int, msg: EngineIn) -> bool:
        """Send a message to an engine. Return False if it has no process.

        Raises Overloaded if the process does not keep up.
        """
        supervisor = self._supervisors.get(rank)
        return supervisor is not None and supervisor.send(msg)

    def wake(self) -> None:
        """Make every `wait_until` check its condition again."""
        for change in self._waiters:
            if not change.done():
                change.set_result(None)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the states holds."""
        while not condition():
            change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(change)
            try:
                await change
            finally:
                self._waiters.discard(change)
