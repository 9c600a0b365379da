"""`LLM` and `AsyncEngine` on the demo model."""

from __future__ import annotations

import threading

import pytest

from moeserve import LLM, AsyncEngine, SamplingParams
from moeserve.errors import CheckpointError, ConfigError, DoesNotFit, InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", threads=1, max_model_len=256) as it:
        yield it


def test_outputs_are_in_the_order_of_the_prompts(llm):
    prompts = ["Once upon a time", {"prompt_token_ids": [10, 11, 12]}, {"prompt": "A fox"}]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == ["Once upon a time", None, "A fox"]
    assert outputs[1].prompt_token_ids == [10, 11, 12]
    for out in outputs:
        assert out.finished
        assert 0 < len(out.outputs[0].token_ids) <= 12
        assert out.outputs[0].finish_reason in ("stop", "length")


def test_one_params_for_each_prompt(llm):
    outputs = llm.generate(["A", "B"], [SamplingParams(max_tokens=2, ignore_eos=True), GREEDY])
    assert len(outputs[0].outputs[0].token_ids) == 2
    with pytest.raises(ValueError, match="1 sampling params for 2 prompts"):
        llm.generate(["A", "B"], [GREEDY])


def test_n_logprobs_and_cached_tokens(llm):
    prompt = "Once upon a time, there was a small fox who lived near a river and a hill."
    params = SamplingParams(n=3, temperature=0.9, seed=1, max_tokens=6, logprobs=2)
    llm.generate(prompt, params)
    (out,) = llm.generate(prompt, params)
    assert len(out.outputs) == 3
    assert out.num_cached_tokens > 0
    for answer in out.outputs:
        assert len(answer.logprobs) == len(answer.token_ids)
        assert [row.ids[0] for row in answer.logprobs] == answer.token_ids
        assert answer.cumulative_logprob == sum(row.values[0] for row in answer.logprobs)


def test_chat_and_prompt_logprobs(llm):
    (out,) = llm.chat([{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=3, prompt_logprobs=1))
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
    assert out.prompt_logprobs[0] is None
    assert all(row.ids[0] == t for row, t in zip(out.prompt_logprobs[1:], out.prompt_token_ids[1:], strict=True))


def test_a_bad_request_leaves_the_engine_well(llm):
    with pytest.raises(InvalidRequest, match="vocabulary"):
        llm.generate([{"prompt_token_ids": [10]}, {"prompt_token_ids": [10**6]}], GREEDY)
    assert llm.generate("A fox", GREEDY)[0].finished


def test_close_is_idempotent_and_leaves_no_thread():
    before = set(threading.enumerate())
    engine = LLM("demo", threads=1, max_model_len=64)
    engine.close()
    engine.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize(
    ("error", "match", "settings"),
    [
        (ConfigError, "did you mean 'max_num_seqs'", {"max_seqs": 2}),
        (CheckpointError, "no-such-model", {"model": "no-such-model"}),
        (ConfigError, "2048", {"max_model_len": 10**6}),
        (DoesNotFit, "would fit", {"kv_cache_bytes": 200_000, "max_model_len": 2000}),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(error, match, settings):
    with pytest.raises(error, match=match):
        LLM(**({"model": "demo", "threads": 1} | settings))


async def test_async_engine_streams_and_stops_when_left():
    async with AsyncEngine("demo", threads=1, max_model_len=256) as engine:
        pieces = [p async for p in engine.generate("Once upon a time", GREEDY)]
        assert pieces[-1].finished
        assert sum(len(p.outputs[0].token_ids) for p in pieces) <= 12
        async for _ in engine.generate("Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True)):
            break
        again = [p async for p in engine.generate("Once upon a time", GREEDY)]
        assert "".join(p.outputs[0].text for p in again) == "".join(p.outputs[0].text for p in pieces)
    with pytest.raises(RuntimeError, match="async with"):
        _ = engine.front
