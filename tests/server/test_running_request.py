"""The generations of one request with several prompts: one stream, bounded memory, every ending."""

from __future__ import annotations

import asyncio

import pytest

from moeserve.frontend.generation import Delta, Generation
from moeserve.sampling import SamplingParams
from moeserve.server.running import AnswerHead, Counts, RunningRequest


def generations(num: int) -> list[Generation]:
    return [
        Generation([1], SamplingParams(), "request", 0.0, lambda generation: None)
        for _ in range(num)
    ]


def running_request(each: list[Generation]) -> RunningRequest:
    head = AnswerHead("request", 0, "model", "fingerprint")
    return RunningRequest(each, n=1, owner="", head=head, counts=Counts(len(each)))


def push(generation: Generation, text: str, **fields) -> None:
    generation.push(Delta(0, text, **fields))
    generation.deliver()


async def test_a_slow_reader_of_several_prompts_gets_merged_deltas():
    one, other = generations(2)
    running = running_request([one, other])
    deltas = running.deltas()
    first = asyncio.ensure_future(anext(deltas))
    await asyncio.sleep(0)
    for _ in range(1000):  # the reader reads the first delta only
        push(one, "a")
        push(other, "b")
        await asyncio.sleep(0)
    texts = ["", ""]
    prompt, delta = await first
    texts[prompt] += delta.text
    for generation in (one, other):
        generation.num_live = 0
        push(generation, "!", finish_reason="stop")
    num = 0
    async for prompt, delta in deltas:
        texts[prompt] += delta.text
        num += 1
    assert texts == ["a" * 1000 + "!", "b" * 1000 + "!"]
    assert num < 10
    await running.aclose()


@pytest.mark.parametrize("num", [1, 3])
async def test_any_exception_ends_the_request(num):
    all_of_them = generations(num)
    running = running_request(all_of_them)

    async def read() -> None:
        async for _ in running.deltas():
            pass

    reader = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    all_of_them[-1].fail(LookupError("not a RequestError"))
    with pytest.raises(LookupError):
        await asyncio.wait_for(reader, 20)
    await running.aclose()
    assert all(task.done() for task in running._pumps)
