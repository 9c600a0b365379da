"""The generations of one HTTP request, one per prompt, read as one stream of (prompt index, delta)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moeserve.errors import RequestError
from moeserve.frontend.delta import Delta
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.generation import Generation
from moeserve.sampling import SamplingParams


class _Aborted(RequestError):
    """Somebody ended the request by its id; its reader is told by finish_reason "abort"."""


class RunningAnswer:
    """`async for prompt_index, delta in running`; leaving `async with` aborts what still runs."""

    def __init__(self, generations: list[Generation], n: int, owner: str) -> None:
        self.generations = generations
        self.owner = owner
        self._open = {(prompt, index) for prompt in range(len(generations)) for index in range(n)}
        self._queue: asyncio.Queue[tuple[int, Delta] | RequestError] | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._last_words: list[tuple[int, Delta]] | None = None
        if len(generations) > 1:
            self._queue = asyncio.Queue()
            for prompt, generation in enumerate(generations):
                self._pumps.append(asyncio.create_task(self._pump(prompt, generation, self._queue)))

    @classmethod
    async def start(
        cls,
        front: FrontEnd,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        request_id: str = "",
        owner: str = "",
    ) -> RunningAnswer:
        """All prompts or none: raises what `FrontEnd.generate` raises for the first that is refused."""
        front.admit(len(prompts) * params.n)
        generations: list[Generation] = []
        try:
            for prompt in prompts:
                generations.append(
                    await front.generate(prompt, params, priority=priority, salt=salt, request_id=request_id)
                )
        except BaseException:
            for generation in generations:
                await generation.aclose()
            raise
        return cls(generations, params.n, owner)

    def __aiter__(self) -> RunningAnswer:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        if not self._open:
            raise StopAsyncIteration
        if self._last_words is None:
            try:
                prompt, delta = await self._next()
            except _Aborted:
                self._last_words = [(p, Delta(i, finish_reason="abort")) for p, i in sorted(self._open)]
            else:
                if delta.finish_reason is not None:
                    self._open.discard((prompt, delta.index))
                return prompt, delta
        if not self._last_words:
            raise StopAsyncIteration
        return self._last_words.pop(0)

    async def _next(self) -> tuple[int, Delta]:
        if self._queue is None:
            return 0, await self.generations[0].__anext__()
        item = await self._queue.get()
        if isinstance(item, RequestError):
            raise item
        return item

    @staticmethod
    async def _pump(
        prompt: int, generation: Generation, queue: asyncio.Queue[tuple[int, Delta] | RequestError]
    ) -> None:
        try:
            async for delta in generation:
                queue.put_nowait((prompt, delta))
        except RequestError as error:
            queue.put_nowait(error)

    async def abort(self) -> int:
        """Ends what runs; its reader gets finish_reason "abort". Returns how many sequences that were."""
        num_open = len(self._open)
        for generation in self.generations:
            await generation.aclose()
            generation.fail(_Aborted("aborted"))
        return num_open

    async def aclose(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for generation in self.generations:
            await generation.aclose()

    async def __aenter__(self) -> RunningAnswer:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()
