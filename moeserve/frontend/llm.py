"""`LLM`: offline batches from ordinary, synchronous code. The same core as the server, on a loop in a thread."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from moeserve.config import Config
from moeserve.frontend.async_engine import AsyncEngine, Prompt, read_prompt, render_chat
from moeserve.frontend.outputs import CompletionOutput, RequestOutput
from moeserve.frontend.stats import FrontStats
from moeserve.messages import Ready
from moeserve.sampling import SamplingParams

T = TypeVar("T")
IN_FLIGHT = 2048  # requests that the engine holds at a time; the rest of a larger batch waits here
BAR_DELAY_S = 2.0  # batches that are done sooner need no progress bar


class LLM:
    """with LLM("demo") as llm:
        for out in llm.generate(["Once upon a time", "A fox"], SamplingParams(max_tokens=64)):
            print(out.outputs[0].text)

    model: a Hugging Face directory, or "demo". Keyword arguments are the fields of `moeserve.config` under their own
    names: dtype, max_model_len, max_num_seqs, enable_prefix_caching, skip_tokenizer_init, threads, kv_cache_bytes, ...
    Raises ConfigError when the model cannot be served. `close()` is idempotent; leaving the `with` block calls it.
    """

    def __init__(self, model: str | None = None, *, config: Config | None = None, **settings: Any) -> None:
        self._engine = AsyncEngine(model, config=config, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="moeserve loop", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._call(self._engine.__aenter__())
        except BaseException:
            self._stop_loop()
            raise
        atexit.register(self.close)

    @property
    def stats(self) -> FrontStats:
        """Counters since the start: tokens, preemptions, cache hits, latencies."""
        return self._engine.front.stats

    @property
    def ready(self) -> Ready:
        """Facts about the loaded model: sizes, limits, dtype, device."""
        facts = self._engine.front.ready
        assert facts is not None
        return facts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """All answers, in the order of the prompts. One SamplingParams for all, or one each.

        Raises RequestError for the first prompt that is refused; nothing of that call keeps running then.
        """
        batch: list[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = _one_each(sampling_params, len(batch))
        priorities = list(priority) if priority is not None else [0] * len(batch)
        if len(priorities) != len(batch):
            raise ValueError(f"{len(priorities)} priorities for {len(batch)} prompts")
        return self._call(self._run_all(batch, params, priorities, use_tqdm))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Like `generate` for one conversation or several, through the model's chat template."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts = [{"prompt_token_ids": render_chat(self._engine.front, c)} for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    async def _run_all(
        self, batch: list[Prompt], params: list[SamplingParams], priorities: list[int], use_tqdm: bool
    ) -> list[RequestOutput]:
        front = self._engine.front
        room = asyncio.Semaphore(IN_FLIGHT)
        bar = tqdm(total=len(batch), unit="req", delay=BAR_DELAY_S, disable=not use_tqdm, dynamic_ncols=True)

        async def one(i: int) -> RequestOutput:
            text, tokens = await read_prompt(front, batch[i])
            outputs = [CompletionOutput(k) for k in range(params[i].n)]
            result = RequestOutput(str(i), text, tokens, outputs)
            async with room, await front.generate(tokens, params[i], priority=priorities[i]) as deltas:
                async for delta in deltas:
                    result.add(delta)
            bar.update()
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(i)) for i in range(len(batch))]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            bar.close()
        return [task.result() for task in tasks]

    def close(self) -> None:
        """Stops the engine and its threads."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            try:
                self._call(self._engine.__aexit__(None, None, None))
            finally:
                self._stop_loop()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()  # Ctrl-C aborts the batch in the engine too
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling params for {count} prompts")
    return list(params)
