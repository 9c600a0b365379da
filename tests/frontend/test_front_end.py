"""Text, stop strings, admission, endings and replays, against a scripted engine."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from moeserve.cluster.link import RequestsLost, Resized
from moeserve.errors import (
    ContextLengthExceeded,
    EngineDied,
    EngineLost,
    InvalidRequest,
    Overloaded,
    RequestError,
    RequestFailed,
)
from moeserve.frontend.generation import Delta
from moeserve.messages import (
    Abort,
    Drain,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    Refused,
    StepOutput,
    StepRecord,
    Submit,
)
from moeserve.sampling import SamplingParams, StructuredOutputsParams

from .conftest import ready

STOP = FinishReason.STOP
LENGTH = FinishReason.LENGTH
ABORT = FinishReason.ABORT
ERROR = FinishReason.ERROR


async def collect(generation) -> list[Delta]:
    return [delta async for delta in generation]


def text_of(deltas) -> str:
    return "".join(d.text for d in deltas)


async def test_tokens_become_text_and_one_ending(front, engine, tokenizer):
    ids = tokenizer.encode("A small fox ran home.", special=False)
    generation = await front.generate([5, 6], SamplingParams(max_tokens=40))
    (submit,) = engine.take(Submit)
    for token in ids[:-1]:
        await engine.rows((submit.rid, token, 0))
    await engine.rows((submit.rid, ids[-1], LENGTH), cached={submit.rid: 1})
    deltas = await collect(generation)
    assert text_of(deltas) == "A small fox ran home."
    assert [t for d in deltas for t in d.token_ids] == ids
    assert deltas[-1].finish_reason == "length"
    assert front.stats.num_active == 0
    assert front.stats.finished == {"length": 1}
    assert front.stats.generation_tokens == len(ids)


async def test_a_stop_token_is_not_shown_unless_asked_for(front, engine, tokenizer):
    word = tokenizer.encode(" fox", special=False)[0]
    for include, expected in ((False, ""), (True, tokenizer.decode([word]))):
        params = SamplingParams(stop_token_ids=[word], include_stop_str_in_output=include)
        generation = await front.generate([5], params)
        (submit,) = engine.take(Submit)
        assert submit.sampling.stop_ids == (2, word)
        await engine.rows((submit.rid, word, STOP), stop_ids={submit.rid: word})
        (delta,) = await collect(generation)
        assert (delta.text, delta.finish_reason, delta.stop_reason) == (expected, "stop", word)
        assert delta.token_ids == [word]


async def test_a_stop_string_cuts_the_text_and_aborts_in_the_engine(front, engine, tokenizer):
    ids = tokenizer.encode("One day, the fox went home. The end of it", special=False)
    generation = await front.generate([5], SamplingParams(stop=["home. The"], max_tokens=50))
    (submit,) = engine.take(Submit)
    for token in ids:
        await engine.rows((submit.rid, token, 0))
    deltas = await collect(generation)
    assert text_of(deltas) == "One day, the fox went "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "home. The")
    assert engine.take(Abort) == [Abort([submit.rid])]


async def test_deltas_are_written_directly_while_the_reader_waits(front, engine, tokenizer):
    """Each token arrives once and in order, written directly or by the reader.

    Steps that arrive together are one delta.
    """
    generation = await front.generate([5], SamplingParams(max_tokens=40))
    (submit,) = engine.take(Submit)
    written = []
    can_write = True

    def write(delta: Delta) -> bool:
        if can_write:
            written.append((delta.token_ids, generation._waiter.done()))
        return can_write

    generation.write_directly = write
    await engine.rows((submit.rid, 10, 0))  # nobody waits yet
    reading = asyncio.create_task(collect(generation))
    await engine.rows((submit.rid, 11, 0))
    await engine.rows((submit.rid, 12, 0), (submit.rid, 13, 0))
    can_write = False
    await engine.rows((submit.rid, 14, 0))
    can_write = True
    await engine.rows((submit.rid, 15, LENGTH))
    assert written == [([11], False), ([12, 13], False), ([15], False)]
    assert [delta.token_ids for delta in await reading] == [[10], [14]]


async def test_an_error_of_a_direct_write_reaches_the_reader(front, engine):
    generation, other = [await front.generate([5], SamplingParams(max_tokens=40)) for _ in range(2)]
    first, second = engine.take(Submit)
    generation.write_directly = lambda delta: 1 // 0
    reading = [asyncio.create_task(collect(one)) for one in (generation, other)]
    await asyncio.sleep(0)
    await engine.rows((first.rid, 10, 0), (second.rid, 11, LENGTH))
    with pytest.raises(ZeroDivisionError):
        await reading[0]
    assert [delta.token_ids for delta in await reading[1]] == [[11]]
    generation.abort()


async def test_a_reader_that_lags_gets_merged_deltas(front, engine, tokenizer):
    ids = tokenizer.encode("A small fox ran home.", special=False)
    generation = await front.generate([5], SamplingParams(max_tokens=50, logprobs=0))
    (submit,) = engine.take(Submit)
    for token in ids:
        await engine.rows(
            (submit.rid, token, 0), logprobs={submit.rid: [Logprobs([token], [-1.0], 1)]}
        )
    delta = await anext(generation)
    assert delta.token_ids == ids
    assert [row.ids[0] for row in delta.logprobs] == ids
    await generation.aclose()


async def test_n_sequences_share_a_request(front, engine):
    generation = await front.generate([5], SamplingParams(n=3, seed=10, max_tokens=3))
    submits = engine.take(Submit)
    assert [s.sampling.seed for s in submits] == [10, 11, 12]
    await engine.rows(*((s.rid, 7, LENGTH) for s in submits))
    deltas = await collect(generation)
    assert sorted(d.index for d in deltas) == [0, 1, 2]


async def test_leaving_aborts_what_still_runs(front, engine):
    async with await front.generate([5], SamplingParams(n=2)) as generation:
        first, second = engine.take(Submit)
        await engine.rows((first.rid, 7, LENGTH))
        await anext(generation)
    assert engine.take(Abort) == [Abort([second.rid])]
    assert front.stats.num_active == 0
    await engine.rows((second.rid, 8, 0))  # too late: nobody reads it, nothing breaks


async def test_cancelling_the_reader_aborts(front, engine):
    generation = await front.generate([5], SamplingParams())
    (submit,) = engine.take(Submit)
    reader = asyncio.create_task(collect(generation))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert engine.take(Abort) == [Abort([submit.rid])]


async def test_an_error_of_one_sequence_ends_its_request_only(front, engine):
    bad = await front.generate([5], SamplingParams(n=2))
    good = await front.generate([5], SamplingParams(max_tokens=1))
    failing, sibling, other = engine.take(Submit)
    await engine.rows(
        (failing.rid, -1, ERROR), (other.rid, 9, LENGTH), errors={failing.rid: "NaN logits"}
    )
    with pytest.raises(RequestFailed, match="NaN logits"):
        await collect(bad)
    assert engine.take(Abort) == [Abort([sibling.rid])]
    assert (await collect(good))[-1].finish_reason == "length"


async def test_refused_by_the_engine(front, engine):
    generation = await front.generate([5], SamplingParams())
    (submit,) = engine.take(Submit)
    await engine.tell(Refused(submit.rid, "does not fit", "does_not_fit"))
    with pytest.raises(RequestError, match="does not fit") as caught:
        await collect(generation)
    assert caught.value.code == "does_not_fit"


async def test_prompt_logprobs_come_once_with_the_first_delta(front, engine):
    generation = await front.generate([5, 6, 7, 8], SamplingParams(max_tokens=5, prompt_logprobs=0))
    (submit,) = engine.take(Submit)
    rows = [Logprobs([t], [-t / 10], 1) for t in (6, 7, 8)]
    await engine.rows((999, 1, 0), prompt_logprobs={submit.rid: PromptLogprobs(1, rows[:2])})
    await engine.rows((submit.rid, 1, 0), prompt_logprobs={submit.rid: PromptLogprobs(3, rows[2:])})
    await engine.rows((submit.rid, 1, LENGTH))
    first, *_ = await collect(generation)
    assert first.prompt_logprobs == [None, *rows]


async def test_bad_requests_are_refused_before_anything_is_sent(front, engine):
    cases = [
        ([], SamplingParams(), InvalidRequest),
        ([2560], SamplingParams(), InvalidRequest),
        ([-1], SamplingParams(), InvalidRequest),
        ([5] * 64, SamplingParams(), ContextLengthExceeded),
        ([5], SamplingParams(temperature=float("nan")), InvalidRequest),
        ([5], SamplingParams(stop_token_ids=[2560]), InvalidRequest),
    ]
    for prompt, params, error in cases:
        with pytest.raises(error):
            await front.generate(prompt, params)
    assert engine.sent == []
    assert front.stats.num_active == 0


async def test_no_seed_and_seed_minus_one_draw_one(front, engine):
    drawn = []
    for seed in (None, -1, None, -1):
        await front.generate([5], SamplingParams(seed=seed))
        (submit,) = engine.take(Submit)
        drawn.append(submit.sampling.seed)
    assert len(set(drawn)) == 4
    assert all(0 <= seed < 2**63 for seed in drawn)
    for seed in (-2, 0):
        await front.generate([5], SamplingParams(seed=seed))
        (submit,) = engine.take(Submit)
        assert submit.sampling.seed == seed & (2**63 - 1)


async def test_max_tokens_is_cut_to_the_context(front, engine):
    for asked in (None, 1000):
        generation = await front.generate([5] * 60, SamplingParams(max_tokens=asked))
        (submit,) = engine.take(Submit)
        assert submit.sampling.max_tokens == 4
        await generation.aclose()


async def test_a_full_queue_says_when_to_come_back(front):
    for _ in range(6):  # four run, two wait
        await front.generate([5], SamplingParams())
    with pytest.raises(Overloaded) as caught:
        await front.generate([5], SamplingParams())
    assert caught.value.retry_after_s >= 1
    assert front.stats.rejected == 1


async def test_admitted_sequences_hold_their_room_until_they_are_submitted(front):
    with front.admit(4, priority=2) as reservation:
        with pytest.raises(Overloaded):
            front.admit(3)
        assert front.running.num_behind(priority=1) == 4
        for _ in range(2):
            await front.generate([5], SamplingParams(n=2), reservation=reservation, priority=2)
        assert front.running.num_live == 4
    assert front.running.num_live == 4
    with front.admit(2):
        assert front.running.num_live == 6
    assert front.running.num_live == 4  # the block ended without a request
    front.admit(2).release()
    front.admit(2).release()


async def test_a_refused_request_gives_its_room_back(front):
    for _ in range(20):
        with pytest.raises(InvalidRequest):
            await front.generate([5], SamplingParams(logits_processors=["unknown"]))
    assert front.running.num_live == 0
    assert not front.running._num_live  # no entry for a priority that nobody has any more


async def test_admission_is_decided_once(front, monkeypatch):
    checks = []
    check = front._admission.check
    monkeypatch.setattr(
        front._admission, "check", lambda *a, **k: (checks.append(a), check(*a, **k))
    )
    with front.admit(1) as reservation:
        grammar = StructuredOutputsParams(regex="[ab]+")
        params = SamplingParams(structured_outputs=grammar)
        await front.generate([5], params, reservation=reservation)
    await front.generate([5], params)
    assert len(checks) == 2  # one for each request


async def test_an_engine_that_is_lost_after_admission_refuses_the_request(front, engine):
    with front.admit(1) as reservation:
        await engine.die(restarting=True)
        with pytest.raises(Overloaded, match="restarted"):
            await front.generate([5], SamplingParams(), reservation=reservation)
    assert not engine.take(Submit)


async def test_a_dead_engine_is_replayed_from_what_was_emitted(front, engine, tokenizer):
    ids = tokenizer.encode("A small fox ran home.", special=False)
    generation = await front.generate(
        [5, 6], SamplingParams(seed=4, max_tokens=50), priority=3, salt="tenant"
    )
    (before,) = engine.take(Submit)
    for token in ids[:3]:
        await engine.rows((before.rid, token, 0))
    await engine.die(restarting=True)
    assert front.state == "lost"
    assert not front.healthy
    with pytest.raises(Overloaded):
        await front.generate([5], SamplingParams())
    await engine.tell(ready())
    (again,) = engine.take(Submit)
    assert list(memoryview(again.tokens).cast("i")) == [5, 6, *ids[:3]]
    assert (again.num_prompt, again.sampling, again.priority, again.salt) == (
        2,
        before.sampling,
        3,
        "tenant",
    )
    for token in ids[3:]:
        await engine.rows((again.rid, token, 0))
    await engine.rows((again.rid, 2, STOP))
    assert text_of(await collect(generation)) == "A small fox ran home."
    assert front.stats.total.restarts == 1


async def test_an_engine_that_is_gone_for_good_fails_everyone(front, engine):
    generation = await front.generate([5], SamplingParams())
    await engine.die(restarting=False)
    with pytest.raises(EngineLost):
        await collect(generation)
    assert isinstance(await front.died(), EngineDied)
    with pytest.raises(EngineDied):
        await front.wait_ready()


async def test_draining_finishes_what_runs_and_refuses_the_rest(front, engine):
    generation = await front.generate([5], SamplingParams(max_tokens=2))
    (submit,) = engine.take(Submit)
    drain = asyncio.create_task(front.drain(5.0))
    await asyncio.sleep(0)
    assert engine.take(Drain) == [Drain(5.0)]
    with pytest.raises(Overloaded):
        await front.generate([5], SamplingParams())
    await engine.rows((submit.rid, 7, ABORT))
    await drain
    assert (await collect(generation))[-1].finish_reason == "abort"


async def test_one_of_several_failing_requests_does_not_hide_the_others(front, engine):
    doomed = [await front.generate([5], SamplingParams(n=2)) for _ in range(2)]
    await engine.die(restarting=False)
    for generation in doomed:
        with pytest.raises(EngineLost) as caught:
            await collect(generation)
        assert isinstance(caught.value.__cause__, EngineDied)
    assert front.stats.num_active == 0
    with pytest.raises(EngineLost, match="has ended"):
        await front.generate([5], SamplingParams())


async def test_text_that_fails_hurts_its_own_request_only(front, engine, monkeypatch):
    bad = await front.generate([5], SamplingParams(n=2))
    good = await front.generate([5], SamplingParams())
    broken, sibling, other = engine.take(Submit)

    def fail(token: int) -> str:
        raise KeyError(token)

    broken_detokenizer = type("Broken", (), {"push": staticmethod(fail)})
    monkeypatch.setattr(bad.sequences[0], "detokenizer", broken_detokenizer)
    await engine.rows((broken.rid, 7, 0), (sibling.rid, 7, 0), (other.rid, 9, LENGTH))
    with pytest.raises(RequestFailed):
        await collect(bad)
    assert (await collect(good))[-1].finish_reason == "length"
    assert sorted(rid for abort in engine.take(Abort) for rid in abort.rids) == [
        broken.rid,
        sibling.rid,
    ]


async def test_closing_leaves_nobody_waiting(front, engine):
    generation = await front.generate([5], SamplingParams(n=2))
    reader = asyncio.create_task(collect(generation))
    await asyncio.sleep(0)
    front.runs.cancel()
    with pytest.raises(EngineLost):
        await reader
    with pytest.raises(EngineLost):
        await front.generate([5], SamplingParams())


async def test_a_fault_of_the_front_end_leaves_nobody_waiting(front, engine):
    generation = await front.generate([5], SamplingParams())
    await engine.tell(StepOutput(rids=b"123", tokens=b"", finish=b""))
    with pytest.raises(EngineLost):
        await collect(generation)
    assert "front end failed" in str(await front.died())


async def test_a_request_that_the_engine_has_no_room_for_leaves_nothing_behind(front, engine):
    engine.room = 2
    with pytest.raises(Overloaded):
        await front.generate([5], SamplingParams(n=4))
    assert front.stats.num_active == 0
    first, second = engine.take(Submit)
    engine.room = 10
    await engine.rows((first.rid, 7, 0), (second.rid, 7, 0))
    (abort,) = engine.take(Abort)
    assert {first.rid, second.rid} <= set(abort.rids)


async def test_a_replay_that_does_not_fit_fails_only_what_was_left_out(front, engine):
    kept = await front.generate([5], SamplingParams())
    lost = await front.generate([5], SamplingParams(n=2))
    engine.take(Submit)
    await engine.die(restarting=True)
    engine.room = 2
    await engine.tell(ready())
    with pytest.raises(Overloaded):
        await collect(lost)
    submit, _ = engine.take(Submit)
    await engine.rows((submit.rid, 7, LENGTH))
    assert (await collect(kept))[-1].finish_reason == "length"


async def test_hits_of_a_replay_on_its_own_tokens_are_no_cached_prompt(front, engine):
    generation = await front.generate([5, 6], SamplingParams(max_tokens=9))
    (submit,) = engine.take(Submit)
    await engine.rows((submit.rid, 7, 0), cached={submit.rid: 1})
    await engine.die(restarting=True)
    await engine.tell(ready())
    await engine.rows((submit.rid, 8, LENGTH), cached={submit.rid: 2})
    (delta,) = await collect(generation)
    assert delta.cached_tokens == 1
    assert front.stats.cached_prompt_tokens == 1


async def test_an_engine_that_dies_while_draining_is_replaced_and_drained_again(front, engine):
    generation = await front.generate([5], SamplingParams(n=2))
    first, second = engine.take(Submit)
    drain = asyncio.create_task(front.drain(5.0))
    await asyncio.sleep(0)
    engine.take(Drain)
    await engine.die(restarting=True)
    assert (front.state, engine.take(Drain)) == ("draining", [])
    await engine.tell(ready())
    assert [s.rid for s in engine.take(Submit)] == [first.rid, second.rid]
    (again,) = engine.take(Drain)
    assert 0 < again.deadline_s <= 5
    await engine.rows((first.rid, 7, LENGTH), (second.rid, 7, LENGTH))
    await drain
    assert {d.finish_reason for d in await collect(generation)} == {"length"}


async def test_draining_while_the_engine_restarts_waits_for_it(front, engine):
    generation = await front.generate([5], SamplingParams())
    (submit,) = engine.take(Submit)
    await engine.die(restarting=True)
    drain = asyncio.create_task(front.drain(5.0))
    await asyncio.sleep(0)
    assert engine.take(Drain) == []  # it would end the engine that loads
    await engine.tell(ready())
    await engine.rows((submit.rid, 7, LENGTH))
    await drain
    assert (await collect(generation))[-1].finish_reason == "length"


async def test_the_engine_stopping_by_itself_is_overload_to_a_client(front, engine):
    generation = await front.generate([5], SamplingParams())
    (submit,) = engine.take(Submit)
    await engine.tell(Refused(submit.rid, "the engine is shutting down", "server_draining"))
    with pytest.raises(Overloaded):
        await collect(generation)


async def test_more_sequences_than_ever_fit_are_no_matter_of_time(front):
    with pytest.raises(InvalidRequest, match="at most 6"):
        await front.generate([5], SamplingParams(n=7))
    assert front.stats.rejected == 0


async def test_idle_time_does_not_count_as_slowness(front, engine, monkeypatch):
    clock = iter(range(0, 10**6, 3600))
    monkeypatch.setattr("moeserve.frontend.front_end.monotonic", lambda: float(next(clock)))
    for _ in range(5):  # one an hour
        generation = await front.generate([5], SamplingParams())
        await engine.rows((engine.take(Submit)[0].rid, 7, LENGTH))
        await collect(generation)
    for _ in range(6):
        await front.generate([5], SamplingParams())
    with pytest.raises(Overloaded) as caught:
        await front.generate([5], SamplingParams())
    assert caught.value.retry_after_s == 1


async def test_a_priority_is_an_integer(front, engine):
    for priority in (None, "high", 2**31):
        with pytest.raises(InvalidRequest, match="priority"):
            await front.generate([5], SamplingParams(), priority=priority)
    assert engine.sent == []


async def test_prompt_logprobs_of_a_single_token(front, engine):
    generation = await front.generate([5], SamplingParams(max_tokens=5, prompt_logprobs=0))
    (submit,) = engine.take(Submit)
    await engine.rows((submit.rid, 1, LENGTH))
    (delta,) = await collect(generation)
    assert delta.prompt_logprobs == [None]


async def test_only_the_lost_engines_requests_are_submitted_again(front, engine, tokenizer):
    ids = tokenizer.encode("A small fox ran home.", special=False)
    lost = await front.generate([5, 6], SamplingParams(max_tokens=40, prompt_logprobs=0))
    kept = await front.generate([5, 7], SamplingParams(max_tokens=40))
    first, second = engine.take(Submit)
    await engine.rows((first.rid, ids[0], 0), (second.rid, ids[0], 0))
    await engine.tell(RequestsLost(rids=(first.rid, 999), engine=1, died=True, cause="it ended"))
    (again,) = engine.take(Submit)
    assert again.rid == first.rid
    assert list(memoryview(again.tokens).cast("i")) == [5, 6, ids[0]]
    assert (again.num_prompt, again.sampling.seed) == (2, first.sampling.seed)
    assert again.sampling.prompt_logprobs is None  # they were delivered
    assert front.state == "ready"
    assert (front.stats.total.restarts, front.stats.engines[1].restarts) == (1, 1)
    for token in ids[1:-1]:
        await engine.rows((first.rid, token, 0), (second.rid, token, 0))
    await engine.rows((first.rid, ids[-1], LENGTH), (second.rid, ids[-1], LENGTH))
    assert text_of(await collect(lost)) == text_of(await collect(kept)) == "A small fox ran home."


async def test_a_retired_engine_is_no_restart_and_an_ended_request_is_not_submitted_again(
    front, engine, caplog
):
    generation = await front.generate([5], SamplingParams(max_tokens=40))
    (submit,) = engine.take(Submit)
    await generation.aclose()
    await engine.tell(
        RequestsLost(rids=(submit.rid,), engine=1, died=False, cause="only 1 shall serve")
    )
    assert engine.take(Submit) == []
    assert front.stats.total.restarts == 0
    assert "engine 1 gives requests back (only 1 shall serve)" in caplog.text


async def test_a_lost_request_that_no_engine_can_take_fails_alone(front, engine):
    generation = await front.generate([5], SamplingParams(max_tokens=40))
    (submit,) = engine.take(Submit)
    engine.room = 0
    await engine.tell(RequestsLost(rids=(submit.rid,), engine=0, died=True, cause="it ended"))
    with pytest.raises(Overloaded):
        await collect(generation)


async def test_new_facts_count_at_once(front, engine):
    await engine.tell(Resized(ready(max_model_len=8, max_num_seqs=1)))
    assert front.ready.max_num_seqs == 1
    with pytest.raises(ContextLengthExceeded):
        await front.generate([5] * 8, SamplingParams())
    assert front.stats.total.restarts == 0


async def test_gauges_are_the_sums_over_engines(front, engine):
    for rank, running in ((0, 3), (1, 2), (0, 4)):
        record = StepRecord(
            step=1, at_s=0.0, num_tokens=1, num_requests=1, num_running=running, num_waiting=1,
            num_free_blocks=10, num_blocks=20, dp_rank=rank, num_states=9, num_free_states=5,
            num_cached_states=rank + 1,
        )  # fmt: skip
        await engine.tell(StepOutput(rids=b"", tokens=b"", finish=b"", record=record))
    last = front.stats.last
    assert (last.num_running, last.num_free_blocks, last.num_blocks) == (
        6,
        20,
        39,
    )  # one null block
    assert (last.num_states, last.num_free_states, last.num_cached_states) == (17, 10, 3)
    await engine.tell(RequestsLost(rids=(), engine=1, died=False, cause=""))
    assert front.stats.last.num_running == 4
    steps = front.stats.total.steps
    idle = msgspec.structs.replace(
        record, dp_rank=0, num_requests=0, num_tokens=0, num_running=0, num_free_blocks=19
    )
    await engine.tell(
        StepOutput(rids=b"", tokens=b"", finish=b"", record=idle)
    )  # after aborts, without a step
    assert (
        front.stats.last.num_running,
        front.stats.last.num_free_blocks,
        front.stats.last.num_tokens,
    ) == (0, 19, 1)
    assert front.stats.total.steps == steps
