"""`LLM` and `AsyncEngine` on the demo model."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from moeserve import LLM, AsyncEngine, SamplingParams
from moeserve.config import config_of
from moeserve.errors import CheckpointError, ConfigError, DoesNotFit, EngineLost, InvalidRequest
from moeserve.frontend.open import open_front_end

from .conftest import DEMO

GREEDY = SamplingParams(temperature=0, max_tokens=12)
WEIGHTS = "model-00001-of-00002.safetensors"


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


def test_an_int8_cache_hardly_changes_what_is_likely(llm):
    """Both caches score each token of the demo's answers after the same previous tokens."""
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    prompts = ["Once upon a time", "A fox and", "The small boat"]
    texts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in llm.generate(prompts, params)]
    judge = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)

    def judged(by):
        outputs = by.generate([{"prompt_token_ids": text} for text in texts], judge)
        rows = [row for output in outputs for row in output.prompt_logprobs[1:]]
        return np.array([row.values[0] for row in rows]), np.array([row.rank for row in rows])

    exact, ranks = judged(llm)
    with LLM("demo", threads=1, max_model_len=256, kv_cache_dtype="int8") as rounded:
        found, found_ranks = judged(rounded)
    difference = np.abs(found - exact)
    assert 0 < difference.mean() < 0.02, difference.mean()
    assert difference.max() < 0.5, difference.max()
    assert (found_ranks == ranks).mean() > 0.97, (found_ranks == ranks).mean()


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
    (out,) = llm.chat(
        [{"role": "user", "content": "Hello!"}], SamplingParams(max_tokens=3, prompt_logprobs=1)
    )
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
    assert out.prompt_logprobs[0] is None
    assert all(
        row.ids[0] == t
        for row, t in zip(out.prompt_logprobs[1:], out.prompt_token_ids[1:], strict=True)
    )


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


def test_use_after_close_says_so():
    engine = LLM("demo", threads=1, max_model_len=64)
    engine.close()
    for use in (
        lambda: engine.generate("A"),
        lambda: engine.stats,
        lambda: engine.chat([{"role": "user"}]),
    ):
        with pytest.raises(RuntimeError, match="was closed"):
            use()


def test_the_last_reference_takes_the_engine_along():
    before = set(threading.enumerate())
    engine = LLM("demo", threads=1, max_model_len=64)
    ours = set(threading.enumerate()) - before
    assert ours
    del engine
    for thread in ours:
        thread.join(5)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "del llm"])
def test_a_program_that_forgets_to_close_ends_at_once_and_in_silence(ending):
    code = f"""if True:
        from moeserve import LLM, SamplingParams
        llm = LLM("demo", threads=1, max_model_len=64)
        llm.generate("A", SamplingParams(max_tokens=1))
        {ending}"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (3 if "3" in ending else 0, "")


def test_ctrl_c_ends_a_batch_and_leaves_the_engine_well(llm):
    done_before = llm.stats.generation_tokens

    def press_when_it_runs():
        while llm.stats.generation_tokens == done_before:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=press_when_it_runs).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["A fox"] * 20, SamplingParams(max_tokens=200, ignore_eos=True))
    assert llm.generate("A fox", GREEDY)[0].finished
    assert llm.stats.num_active == 0


def test_large_batches_and_many_answers():
    with LLM(config=config_of("demo", null_runner=True, max_model_len=256)) as llm:
        prompts = ({"prompt_token_ids": [5 + i % 100]} for i in range(2500))
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [1] * 2500
        outputs = llm.generate(
            ["A"] * 90, SamplingParams(max_tokens=1, n=128), use_tqdm=False
        )  # 11,520 sequences
        assert all(len(o.outputs) == 128 for o in outputs)
        assert llm.stats.num_active == 0


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ({"prompt_token_ids": [1.5]}, GREEDY),
        ({"prompt_token_ids": ["a"]}, GREEDY),
        ({"prompt_token_ids": None}, GREEDY),
        ({"tokens": [1]}, GREEDY),
        ([1], GREEDY),
        ("A", {"max_tokens": 1}),
        ("A", SamplingParams(n="2")),
        ("A", SamplingParams(stop=5)),
        ("A", SamplingParams(bad_words="abc")),
        ("A", SamplingParams(logit_bias=[1])),
        ("A", SamplingParams(stop_token_ids=7)),
    ],
)
def test_what_is_no_request_is_refused_by_name(llm, prompt, params):
    with pytest.raises(InvalidRequest):
        llm.generate(prompt, params)
    assert llm.stats.num_active == 0


def test_a_bad_word_is_in_no_answer(llm):
    plain = SamplingParams(temperature=0, max_tokens=40)
    words = set()
    for prompt in ("Once upon a time", "Question: what is a fox?", "The weather"):
        text = llm.generate(prompt, plain)[0].outputs[0].text
        for word in set(re.findall(r"[A-Za-z]{3,}", text)) - words:
            words.add(word)
            banned = SamplingParams(temperature=0, max_tokens=40, bad_words=[word])
            answer = llm.generate(prompt, banned)[0].outputs[0].text
            assert word not in re.findall(r"[A-Za-z]+", answer)
    assert len(words) > 20


def test_arrays_of_token_ids_are_prompts(llm):
    array = llm.generate({"prompt_token_ids": np.array([10, 11, 12])}, GREEDY)
    assert array[0].outputs == llm.generate({"prompt_token_ids": [10, 11, 12]}, GREEDY)[0].outputs
    assert type(array[0].prompt_token_ids[0]) is int


@pytest.mark.parametrize("messages", ["hi", [{"content": "x"}], [], [["hi"]]])
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(InvalidRequest):
        llm.chat(messages)


async def test_an_llm_inside_a_running_loop(llm):
    assert llm.generate("A fox", GREEDY)[0].finished


@pytest.mark.parametrize(
    ("error", "match", "settings"),
    [
        (ConfigError, "did you mean 'max_num_seqs'", {"max_seqs": 2}),
        (CheckpointError, "no-such-model", {"model": "no-such-model"}),
        (ConfigError, "2048", {"max_model_len": 10**6}),
        (ConfigError, "max_model_len", {"max_model_len": "x"}),
        (ConfigError, "dtype", {"dtype": "int3"}),
        (ConfigError, "threads", {"threads": 1.5}),
        (DoesNotFit, "would fit", {"kv_cache_bytes": 200_000, "max_model_len": 2000}),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(error, match, settings):
    with pytest.raises(error, match=match):
        LLM(**({"model": "demo", "threads": 1} | settings))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda copy: [path.unlink() for path in copy.iterdir()], "config.json is missing"),
        (lambda copy: (copy / "config.json").write_text("{"), "config.json"),
        (lambda copy: (copy / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda copy: (copy / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
        (lambda copy: (copy / "model.safetensors.index.json").write_text("{}"), "weight_map"),
        (lambda copy: [path.unlink() for path in copy.glob("model*")], "no \\*.safetensors"),
        (lambda copy: os.truncate(copy / WEIGHTS, 10**6), "incomplete"),
    ],
)
async def test_damaged_models_are_refused_without_waiting_for_torch(tmp_path, damage, match):
    copy = tmp_path / "model"
    shutil.copytree(DEMO, copy)
    damage(copy)
    with pytest.raises(CheckpointError, match=match):
        async with open_front_end(config_of(str(copy)), child=True):
            pytest.fail("nothing is wrong")


async def test_async_engine_streams_and_stops_when_left():
    async with AsyncEngine("demo", threads=1, max_model_len=256) as engine:
        pieces = [p async for p in engine.generate("Once upon a time", GREEDY)]
        assert pieces[-1].finished
        assert sum(len(p.outputs[0].token_ids) for p in pieces) <= 12
        async for _ in engine.generate(
            "Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True)
        ):
            break
        again = [p async for p in engine.generate("Once upon a time", GREEDY)]
        assert "".join(p.outputs[0].text for p in again) == "".join(
            p.outputs[0].text for p in pieces
        )
    with pytest.raises(RuntimeError, match="async with"):
        _ = engine.front


async def test_leaving_an_async_engine_ends_what_still_runs():
    async def read(engine):
        return [
            p async for p in engine.generate("A", SamplingParams(max_tokens=200, ignore_eos=True))
        ]

    async with AsyncEngine("demo", threads=1, max_model_len=256) as engine:
        readers = [asyncio.create_task(read(engine)) for _ in range(3)]
        await asyncio.sleep(0.1)
    async with asyncio.timeout(5):
        assert [type(e) for e in await asyncio.gather(*readers, return_exceptions=True)] == [
            EngineLost
        ] * 3


def test_several_ranks_run_in_processes_of_their_own():
    config = config_of(
        "demo", dp=2, null_runner=True, max_model_len=256, max_num_seqs=16, kv_cache_bytes=2**24
    )
    with LLM(config=config) as llm:
        outputs = llm.generate(
            ["Once upon a time"] * 8, SamplingParams(max_tokens=20), use_tqdm=False
        )
        assert len({tuple(out.outputs[0].token_ids) for out in outputs}) == 1
        assert [len(out.outputs[0].token_ids) for out in outputs] == [20] * 8
        assert llm.ready.max_num_seqs == 32


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tp": 7}, "tp=7 cannot divide"),
        ({"nnodes": 2}, "needs --rendezvous"),
        ({"redundant_experts": 3}, "several ranks"),
    ],
)
def test_ranks_that_cannot_be_are_refused_at_once(settings, why):
    with pytest.raises(ConfigError, match=why):
        LLM("demo", **settings)


async def test_the_loop_turns_while_a_template_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = threading.Event()

    def encode(*args: object, **options: object) -> list[int]:
        assert rendered.wait(20), "the event loop stood still"
        return [5, 6, 7]

    async with AsyncEngine("demo", threads=1, max_model_len=256) as engine:
        monkeypatch.setattr(engine.front.chat_template, "encode", encode)
        asyncio.get_running_loop().call_later(0.05, rendered.set)
        outputs = [out async for out in engine.chat([{"role": "user", "content": "Hi"}], GREEDY)]
        assert outputs[0].prompt_token_ids == [5, 6, 7]


async def test_a_front_end_that_fails_to_stop_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails() -> None:
        raise ZeroDivisionError("planted")

    engine = await AsyncEngine("demo", threads=1, max_model_len=256).__aenter__()
    link = engine.front.link
    monkeypatch.setattr(engine.front._grammars, "close", fails)
    with pytest.raises(ZeroDivisionError):
        await engine.__aexit__(None, None, None)
    assert "'front end' failed" in caplog.text
    assert not link.healthy  # the engine was closed all the same


def test_an_llm_whose_engine_fails_to_close_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exits = AsyncEngine.__aexit__

    async def fails(self: AsyncEngine, *args: object) -> None:
        await exits(self, *args)
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(AsyncEngine, "__aexit__", fails)
    LLM("demo", threads=1, max_model_len=256).close()
    assert "planted" in caplog.text


async def test_a_model_may_have_several_names() -> None:
    config = config_of("demo", threads=1, max_model_len=64, served_model_name="one,two")
    async with AsyncEngine(config=config) as engine:
        assert engine.front.model_name == "one"
        assert engine.front.model_names == ("one", "two")
    with pytest.raises(ConfigError, match="has no name in it"):
        await AsyncEngine(config=config_of("demo", served_model_name=",")).__aenter__()
