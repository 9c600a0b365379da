"""Sends a benchmark's requests at their arrival times, and records what the client receives."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moeserve.cli.bench.datasets import Sample
from moeserve.client import AsyncClient, Stream
from moeserve.errors import RequestError
from moeserve.protocol import ChatCompletionChunk, Completion


@dataclass(slots=True)
class Outcome:
    """One request as the client saw it. `started_at_s` is a value of `time.perf_counter`."""

    prompt_len: int
    success: bool = False
    output_tokens: int = 0
    started_at_s: float = 0.0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)  # every gap between two chunks
    text: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint under load."""

    url: str
    chat: bool
    fields: Mapping[str, Any]  # in the JSON of every request

    def body(self, sample: Sample) -> dict[str, Any]:
        """Return the JSON body of a sample's streamed request."""
        body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            body["messages"] = [{"role": "user", "content": sample.prompt}]
        else:
            body["prompt"] = sample.prompt
        if sample.output_len is not None:
            body["max_completion_tokens" if self.chat else "max_tokens"] = sample.output_len
        return {**body, **self.fields}


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the seconds after the start at which each request is sent. rate inf: all at once.

    Gaps are gamma distributed with mean 1/rate and shape `burstiness` (1: a Poisson process; inf:
    constant gaps). They are scaled so that the last request is sent at count/rate: the seed changes
    the gaps, not the offered load.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.ones(count)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, size=count)
    times: list[float] = (gaps.cumsum() * (count / rate / gaps.sum())).tolist()
    return times


async def send(client: AsyncClient, target: Target, sample: Sample) -> Outcome:
    """Stream one request, from first byte sent to last byte received. Errors are returned in the
    outcome.
    """
    outcome = Outcome(sample.prompt_len, started_at_s=time.perf_counter())
    chunk_type: Any = ChatCompletionChunk if target.chat else Completion
    last_chunk_at_s = outcome.started_at_s
    try:
        response = await client.transport.open("POST", target.url, target.body(sample))
        async with Stream(response, chunk_type, client.transport.timeout_s) as stream:
            async for chunk in stream:
                if chunk.usage is not None:
                    outcome.output_tokens = chunk.usage.completion_tokens
                    outcome.prompt_len = chunk.usage.prompt_tokens or outcome.prompt_len
                for choice in chunk.choices:
                    text = choice.delta.content if target.chat else choice.text
                    if target.chat and not text and choice.finish_reason is None:
                        continue  # the chunk with the role has no token
                    now_s = time.perf_counter()
                    if outcome.ttft_s == 0.0:
                        outcome.ttft_s = now_s - outcome.started_at_s
                    else:
                        outcome.itl_s.append(now_s - last_chunk_at_s)
                    last_chunk_at_s = now_s
                    outcome.text += text or ""
    except RequestError as error:
        outcome.error = f"{type(error).__name__}: {error}"
        return outcome
    outcome.latency_s = last_chunk_at_s - outcome.started_at_s
    outcome.success = outcome.ttft_s > 0.0
    if not outcome.success:
        outcome.error = "the answer had no tokens"
    elif outcome.output_tokens == 0:
        outcome.output_tokens = 1 + len(outcome.itl_s)  # no usage: count a chunk as a token
    return outcome


async def run_load(
    client: AsyncClient,
    target: Target,
    samples: Sequence[Sample],
    times_s: Sequence[float],
    max_concurrency: int | None,
    on_done: Callable[[], Any],
) -> tuple[list[Outcome], float]:
    """Send every sample at its time. Returns the outcomes in that order, and the seconds until the
    last one has ended.
    """
    concurrency = asyncio.Semaphore(max_concurrency or len(samples))

    async def send_one(sample: Sample) -> Outcome:
        async with concurrency:
            outcome = await send(client, target, sample)
        on_done()
        return outcome

    begun_at_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for sample, arrival_s in zip(samples, times_s, strict=True):
            wait_s = begun_at_s + arrival_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(send_one(sample)))
    return [task.result() for task in tasks], time.perf_counter() - begun_at_s
