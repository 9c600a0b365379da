"""`LLM`: offline batches from synchronous code. Its event loop runs in a thread."""

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from os import PathLike
from typing import Any, TypeVar

from tqdm import tqdm

from moeserve.actor.tasks import log_error
from moeserve.config import Config
from moeserve.frontend import async_engine
from moeserve.frontend.async_engine import AsyncEngine, CompletionOutput, Prompt, RequestOutput
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.stats import FrontStats
from moeserve.messages import Ready
from moeserve.sampling import SamplingParams

T = TypeVar("T")

MAX_SUBMITTED = 2048  # sequences at once; the rest of a larger batch waits here
BAR_DELAY_S = 2.0  # shorter batches have no progress bar


class LLM:
    """The engine for offline batches in synchronous code.

    with LLM("demo") as llm:
        for out in llm.generate(["Once upon a time", "A fox"], SamplingParams(max_tokens=64)):
            print(out.outputs[0].text)

    Keyword arguments are the fields of `moeserve.config`: dtype, max_model_len, max_num_seqs,
    enable_prefix_caching, skip_tokenizer_init, threads, kv_cache_bytes, ...

    May be used from several threads. `close` is called at the end of the `with` block, at the end
    of the program, or when the object is garbage-collected.

    model: a Hugging Face directory, or "demo".
    logits_processors: {name: factory} (docs/logits-processors.md).

    Raises ConfigError if the model cannot be served.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        config: Config | None = None,
        **settings: Any,
    ) -> None:
        self._engine = AsyncEngine(model, config=config, **settings)
        self._thread = LoopThread(self._engine)
        self._close = weakref.finalize(self, self._thread.close)

    @property
    def stats(self) -> FrontStats:
        """Counters since the start: tokens, preemptions, cache hits, latencies."""
        return self._front.stats

    @property
    def ready(self) -> Ready:
        """Facts about the loaded model: sizes, limits, dtype, device."""
        facts = self._front.ready
        assert facts is not None
        return facts

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Return all answers, in the order of the prompts.

        sampling_params: for all prompts, or one for each.

        Raises RequestError for the first prompt that is refused, and ends all other requests of
        this call.
        """
        batch: list[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = _params_of_each(sampling_params, len(batch), self.ready.vocab_size)
        priorities = list(priority) if priority is not None else [0] * len(batch)
        if len(priorities) != len(batch):
            raise ValueError(f"{len(priorities)} priorities for {len(batch)} prompts")
        return self._thread.call(
            self._run_all(
                self._front, batch, params=params, priorities=priorities, use_tqdm=use_tqdm
            )
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Like `generate`, for one or several conversations, with the model's chat template."""
        has_several = (
            isinstance(messages, Sequence) and messages and isinstance(messages[0], list | tuple)
        )
        conversations: Any = messages if has_several else [messages]
        prompts = [
            {"prompt_token_ids": async_engine.render_chat(self._front, conversation)}
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    @staticmethod
    async def _run_all(
        front: FrontEnd,
        batch: list[Prompt],
        *,
        params: list[SamplingParams],
        priorities: list[int],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Answer the prompts of a batch, each with its own parameters and priority."""
        submission_slots = asyncio.Semaphore(
            max(1, MAX_SUBMITTED // max((given.n for given in params), default=1))
        )
        bar = tqdm(
            total=len(batch),
            unit="req",
            delay=BAR_DELAY_S,
            disable=not use_tqdm,
            dynamic_ncols=True,
        )

        async def answer(i: int) -> RequestOutput:
            async with submission_slots:
                text, tokens = await async_engine.read_prompt(front, batch[i])
                async with await front.generate(
                    tokens, params[i], priority=priorities[i]
                ) as deltas:
                    answers = [CompletionOutput(k) for k in range(params[i].n)]
                    result = RequestOutput(str(i), text, tokens, answers, finished=True)
                    async for delta in deltas:
                        result.add(answers[delta.index], delta)
            bar.update()
            return result

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(i)) for i in range(len(batch))]
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__  # without the ExceptionGroup
        finally:
            bar.close()
        return [task.result() for task in tasks]

    def close(self) -> None:
        """Stop the engine and its threads."""
        self._close()

    @property
    def _front(self) -> FrontEnd:
        if not self._close.alive:
            raise RuntimeError("this LLM was closed")
        return self._engine.front

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, vocab_size: int
) -> list[SamplingParams]:
    """Return the checked parameters of each of `count` prompts. Raises InvalidRequest."""
    is_shared = params is None or isinstance(params, SamplingParams)
    if params is None or isinstance(params, SamplingParams):
        given = [async_engine.checked(params)]
    else:
        given = [async_engine.checked(one) for one in params]
        if len(given) != count:
            raise ValueError(f"{len(given)} sampling params for {count} prompts")
    for one in given:
        one.check(vocab_size)
    return given * count if is_shared else given


class LoopThread:
    """An event loop in a thread with an open AsyncEngine, until `close`.

    The constructor raises the error of opening the engine.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._opened: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._life = self._loop.create_task(self._live())
        self._thread = threading.Thread(target=self._run, name="moeserve loop", daemon=True)
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:  # including Ctrl-C while the model loads
            self.close()
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result. Ctrl-C cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the engine and end the thread. Running calls are cancelled."""
        with suppress(RuntimeError):  # the loop has already ended, because the engine did not open
            self._loop.call_soon_threadsafe(self._life.cancel)
        # The garbage collector may call this in any thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await asyncio.wait([self._life])
        if not self._life.cancelled() and isinstance(error := self._life.exception(), Exception):
            log_error("engine of an LLM", error)

    async def _live(self) -> None:
        try:
            async with self._engine:
                self._opened.set_result(None)
                await self._loop.create_future()  # until cancelled
        except BaseException as error:
            if self._opened.done():
                raise
            self._opened.set_exception(error)
