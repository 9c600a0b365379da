"""Which requests run, wait or are preempted, and when their resources are freed."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.engine.blocks import STATES_HELD
from moeserve.engine.kv_cache_manager import Hit
from moeserve.engine.plan import StepResult
from moeserve.engine.requests import Request, fit_to_budget
from moeserve.engine.scheduler import Scheduler
from moeserve.errors import InvalidRequest
from moeserve.messages import FinishReason
from tests.engine.fake_model import POISON, oracle
from tests.engine.harness import EOS, FULL, HYBRID, STATES, Answer, Harness, limits_of, submit_of


def prompt_of(length: int, first: int = 20) -> list[int]:
    return [first + i % 17 for i in range(length)]


def running(harness: Harness) -> list[int]:
    return sorted(harness.scheduler.kv_manager.batch.slot_of)


def steps(harness: Harness, count: int) -> None:
    for _ in range(count):
        harness.plan()
        if len(harness.in_flight) == harness.limits.depth:
            harness.update_from_output()


# ---- granting


@pytest.mark.parametrize(
    ("count", "budget", "granted"),
    [
        ([5, 1, 5, 1], 8, [5, 1, 1, 1]),
        ([1, 1, 1], 2, [1, 1, 0]),
        ([9, 1], 3, [2, 1]),
        ([0, 4, -2, 1], 99, [0, 4, 0, 1]),
        ([7, 7], 1, [1, 0]),
        ([3, 1], 1, [0, 1]),
    ],
)
def test_sharing_a_token_budget(count: list[int], budget: int, granted: list[int]) -> None:
    slots = np.arange(len(count), dtype=np.intp)
    start = np.arange(len(count), dtype=np.int32) * 10
    got_slots, got_start, got = fit_to_budget(slots, start, np.array(count, np.int32), budget)
    assert {int(s): int(c) for s, c in zip(got_slots, got, strict=True)} == {
        i: c for i, c in enumerate(granted) if c
    }
    assert (got_start == got_slots * 10).all()


def test_a_long_prompt_does_not_stall_a_stream() -> None:
    harness = Harness(limits_of(max_num_batched_tokens=8, prefill_chunk=8))
    harness.submit(submit_of(0, prompt_of(4), max_tokens=20))
    steps(harness, 2)
    harness.submit(submit_of(1, prompt_of(40, 3)))
    first = len(harness.plans)
    steps(harness, 6)
    for plan in harness.plans[first : first + 5]:
        assert sorted(plan.counts_R.tolist()) == [1, 7]
    harness.run()
    harness.check_answers()


def test_no_request_computes_its_last_token() -> None:
    harness = Harness(limits_of())
    harness.submit(submit_of(0, prompt_of(5), max_tokens=1))
    harness.run()
    assert [plan.num_tokens for plan in harness.plans] == [5]
    harness.check_answers()


def test_equal_prompts_of_one_step_share_their_blocks() -> None:
    harness = Harness(limits_of(max_num_batched_tokens=100, prefill_chunk=100))
    for rid in range(4):
        harness.submit(submit_of(rid, prompt_of(18), seed=rid))
    plan = harness.plan()
    assert plan is not None
    assert plan.counts_R.tolist() == [18, 2, 2, 2]
    shared = {tuple(table[:4]) for table in harness.scheduler.kv_manager.batch.tables[0].tolist()}
    assert len(shared) == 1
    assert harness.num_free == harness.limits.num_blocks - 1 - 4 - 4
    harness.run()
    assert [a.cached for a in harness.answers.values()] == [0, 16, 16, 16]
    harness.check_answers()


def test_waiting_requests_enter_by_priority_then_arrival() -> None:
    harness = Harness(limits_of(max_num_seqs=1))
    for rid, priority in enumerate([1, 0, 1, 0, -1]):
        harness.submit(submit_of(rid, prompt_of(4, rid + 2), priority=priority, max_tokens=2))
    entered: list[int] = []
    while harness.scheduler.has_work:
        harness.step()
        entered += [rid for rid in running(harness) if rid not in entered]
    assert entered == [4, 1, 3, 0, 2]
    harness.run()
    harness.check_answers()


def test_nobody_overtakes_a_head_that_does_not_fit() -> None:
    harness = Harness(limits_of(num_blocks=12))
    harness.submit(submit_of(0, prompt_of(24, 2), max_tokens=8))
    steps(harness, 1)
    harness.submit(submit_of(1, prompt_of(24, 5), max_tokens=8))
    harness.submit(submit_of(2, prompt_of(2, 7), max_tokens=2))
    steps(harness, 3)
    assert running(harness) == [0]
    harness.run()
    harness.check_answers()
    assert harness.num_preempted == 0


def test_a_head_that_did_not_fit_enters_when_someone_else_leaves() -> None:
    harness = Harness(limits_of(num_blocks=14))
    harness.submit(submit_of(0, prompt_of(16, 2), max_tokens=20))
    harness.submit(submit_of(1, prompt_of(12, 4), max_tokens=2))
    steps(harness, 1)
    harness.submit(submit_of(2, prompt_of(23, 6), max_tokens=2))
    steps(harness, 1)
    assert running(harness) == [0, 1]
    steps(harness, 4)
    assert running(harness) == [0, 2]
    harness.run()
    harness.check_answers()
    assert harness.num_preempted == 0


def test_admission_counts_the_blocks_that_running_prompts_still_need() -> None:
    harness = Harness(limits_of(num_blocks=16, max_num_batched_tokens=12, prefill_chunk=4))
    harness.submit(submit_of(0, prompt_of(40, 2), max_tokens=2))
    harness.submit(submit_of(1, prompt_of(40, 5), max_tokens=2))
    harness.run()
    assert harness.num_preempted == 0
    harness.check_answers()


def test_a_watermark_is_kept_beside_others_but_not_alone() -> None:
    harness = Harness(limits_of(num_blocks=12, watermark_blocks=8))
    harness.submit(submit_of(0, prompt_of(24, 2), max_tokens=8))
    steps(harness, 1)
    harness.submit(submit_of(1, prompt_of(4, 9), max_tokens=2))
    steps(harness, 2)
    assert running(harness) == [0]
    harness.run()
    harness.check_answers()


# ---- preemption


def test_out_of_blocks_the_newest_yields_and_no_more_than_needed() -> None:
    harness = Harness(limits_of(num_blocks=10, max_num_seqs=3))
    for rid in range(3):
        harness.submit(submit_of(rid, prompt_of(11, 3 * rid + 2), max_tokens=12))
    while harness.num_preempted == 0:
        harness.step()
    assert running(harness) == [0, 1]
    harness.run()
    harness.check_answers()


def test_a_pool_for_one_request_serves_all_in_turn() -> None:
    harness = Harness(limits_of(num_blocks=17, max_num_seqs=4))
    answers = [
        harness.submit(submit_of(rid, prompt_of(30, rid + 2), max_tokens=34)) for rid in range(5)
    ]
    finished: list[int] = []
    while harness.scheduler.has_work:
        harness.step()
        finished += [a.msg.rid for a in answers if a.finish and a.msg.rid not in finished]
    harness.run()
    assert finished == [0, 1, 2, 3, 4], "the oldest always gets on"
    harness.check_answers()


def test_a_more_urgent_request_takes_a_slot_from_the_least_urgent() -> None:
    harness = Harness(limits_of(max_num_seqs=2))
    for rid, priority in enumerate([1, 2]):
        harness.submit(submit_of(rid, prompt_of(6, rid + 2), priority=priority, max_tokens=20))
    steps(harness, 3)
    harness.submit(submit_of(2, prompt_of(6, 9), priority=0))
    harness.plan()
    assert running(harness) == [0, 2]
    harness.run()
    harness.check_answers()


def test_a_more_urgent_request_takes_blocks_from_the_least_urgent() -> None:
    harness = Harness(limits_of(num_blocks=14))
    for rid, priority in enumerate([1, 1]):
        harness.submit(submit_of(rid, prompt_of(20, rid + 2), priority=priority, max_tokens=4))
    steps(harness, 2)
    harness.submit(submit_of(2, prompt_of(16, 9), priority=0, max_tokens=4))
    steps(harness, 1)
    assert running(harness) == [0, 2]
    harness.run()
    harness.check_answers()


def test_no_one_yields_to_an_equal_or_to_someone_who_would_still_not_fit() -> None:
    harness = Harness(limits_of(num_blocks=14, max_num_seqs=2))
    harness.submit(submit_of(0, prompt_of(24, 2), priority=1, max_tokens=8))
    harness.submit(submit_of(1, prompt_of(8, 3), priority=2, max_tokens=8))
    steps(harness, 2)
    harness.submit(submit_of(2, prompt_of(40, 9), priority=1, max_tokens=8))
    harness.submit(submit_of(3, prompt_of(4, 9), priority=2, max_tokens=8))
    steps(harness, 3)
    assert running(harness) == [0, 1]
    assert harness.num_preempted == 0
    harness.run()
    harness.check_answers()


# ---- endings


def test_an_abort_frees_slot_and_blocks_in_the_same_call() -> None:
    harness = Harness(limits_of(max_num_seqs=1))
    harness.submit(submit_of(0, prompt_of(20), max_tokens=20))
    harness.submit(submit_of(1, prompt_of(20, 3), max_tokens=20))
    harness.plan()
    harness.plan()
    harness.abort(0, 1, 77)
    assert [a.finish for a in harness.answers.values()] == ["abort", "abort"]
    assert harness.num_free == harness.limits.num_blocks - 1
    assert not harness.scheduler.has_work
    harness.submit(
        submit_of(2, prompt_of(20, 4))
    )  # in the same slot, while the old rows are in flight
    harness.run()
    harness.check_answers()


def test_abort_of_unknown_requests_says_nothing() -> None:
    harness = Harness(limits_of())
    assert harness.scheduler.abort([5]) is None
    assert harness.scheduler.abort_all() is None


def test_a_finished_request_frees_everything_though_a_step_still_has_it() -> None:
    prompt = prompt_of(6)
    tokens, _ = oracle(FULL, prompt, submit_of(0, prompt).sampling, 64)
    harness = Harness(limits_of(depth=2))
    harness.submit(submit_of(0, prompt, max_tokens=20, stop_ids=(tokens[0],)))
    harness.plan()
    harness.plan()
    harness.update_from_output()
    assert harness.answers[0].finish == "stop"
    assert harness.num_free == harness.limits.num_blocks - 1
    assert len(harness.update_from_output().rids) == 0
    harness.check_answers()


def stopped(**sampling: object) -> Answer:
    harness = Harness(limits_of())
    answer = harness.submit(submit_of(0, prompt_of(6), **sampling))
    harness.run()
    harness.check_answers()
    return answer


def test_stop_ids_end_a_request_and_are_named_unless_they_are_the_models_own() -> None:
    tokens = stopped(max_tokens=12).tokens
    assert len(set(tokens)) > 6
    answer = stopped(max_tokens=12, stop_ids=(tokens[4], EOS))
    assert (answer.finish, answer.stop_id, answer.tokens) == ("stop", tokens[4], tokens[:5])
    seed = next(s for s in range(100) if EOS in stopped(max_tokens=12, seed=s).tokens)
    answer = stopped(max_tokens=12, seed=seed, stop_ids=(EOS,))
    assert (answer.finish, answer.stop_id, answer.tokens[-1]) == ("stop", None, EOS)


def test_a_stop_token_before_min_tokens_does_not_count() -> None:
    tokens = stopped(max_tokens=12).tokens
    assert stopped(max_tokens=12, stop_ids=(tokens[2],), min_tokens=3).tokens == tokens[:3]
    assert len(stopped(max_tokens=12, stop_ids=(tokens[2],), min_tokens=4).tokens) > 3


def test_a_stop_token_at_the_last_position_is_a_stop() -> None:
    tokens = stopped(max_tokens=12).tokens
    assert stopped(max_tokens=3, stop_ids=(tokens[2],)).finish == "stop"


def test_only_the_request_that_fails_ends_with_an_error() -> None:
    harness = Harness(limits_of())
    bad = harness.submit(submit_of(0, [POISON, *prompt_of(6)]))
    good = harness.submit(submit_of(1, prompt_of(6)))
    harness.run()
    assert (bad.finish, bad.error, good.finish) == ("error", "poisoned", "length")
    harness.check_answers()


def test_a_replay_goes_on_where_it_was_cut() -> None:
    whole = stopped(max_tokens=12)
    harness = Harness(limits_of())
    answer = harness.submit(submit_of(0, whole.prompt + whole.tokens[:5], emitted=5, max_tokens=12))
    harness.run()
    assert answer.tokens == whole.tokens[5:]
    harness.check_answers()


# ---- caches


def test_the_next_turn_of_a_conversation_reuses_the_answer() -> None:
    harness = Harness(limits_of())
    first = harness.submit(submit_of(0, prompt_of(9), max_tokens=12))
    harness.run()
    second = harness.submit(submit_of(1, [*first.prompt, *first.tokens, 5, 6], max_tokens=2))
    harness.run()
    assert second.cached == 20, "21 tokens are known, the last was never computed"
    harness.check_answers()


def test_a_preempted_request_reports_its_first_hits_only() -> None:
    harness = Harness(limits_of(num_blocks=10, max_num_seqs=3))
    for rid in range(3):
        harness.submit(submit_of(rid, prompt_of(11, 3 * rid + 2), max_tokens=12))
    harness.run()
    assert harness.num_preempted > 0
    assert [a.cached for a in harness.answers.values()] == [0, 0, 0]


def test_evicted_prefixes_come_back_from_the_store() -> None:
    harness = Harness(limits_of(num_blocks=12, num_store_blocks=40))
    for rid in (0, 1, 2, 3):
        harness.submit(submit_of(rid, prompt_of(30, 3 * rid + 2), max_tokens=2))
        harness.run()
    again = harness.submit(submit_of(9, prompt_of(30, 2), max_tokens=2))
    harness.run()
    assert again.cached == 28
    assert harness.runner.num_loaded == 7
    harness.check_answers()


def test_without_prefix_caching_nothing_is_found_or_stored() -> None:
    harness = Harness(limits_of(num_blocks=12, num_store_blocks=40, enable_prefix_caching=False))
    for rid in range(4):
        harness.submit(submit_of(rid, prompt_of(30), max_tokens=2))
        harness.run()
    assert {a.cached for a in harness.answers.values()} == {0}
    assert harness.runner.num_stored == harness.scheduler.kv_manager.pool.num_cached == 0
    harness.check_answers()


def test_a_window_group_holds_no_more_than_its_window() -> None:
    harness = Harness(limits_of(depth=1), HYBRID)
    harness.submit(submit_of(0, prompt_of(8), max_tokens=50))
    batch = harness.scheduler.kv_manager.batch
    while harness.scheduler.has_work:
        harness.step()
        if harness.scheduler.num_running and not harness.in_flight and len(harness.plans) > 5:
            full, window = batch.held(batch.slot_of[0])
            assert len(window) <= 3 < len(full)
    harness.check_answers()


def test_a_running_request_holds_no_more_than_two_states() -> None:
    harness = Harness(limits_of(depth=1, num_states=40), STATES)
    harness.submit(submit_of(0, prompt_of(8), max_tokens=50))
    batch = harness.scheduler.kv_manager.batch
    most = 0
    while harness.scheduler.has_work:
        before = len(harness.in_flight)
        harness.step()
        if len(harness.in_flight) < before and harness.scheduler.num_running:
            assert harness.record is not None
            held = len(batch.held(batch.slot_of[0])[1])
            assert (harness.record.num_states, harness.record.num_free_states) == (40, 39 - held)
            assert harness.record.num_cached_states > 0
        if harness.scheduler.num_running and not harness.in_flight and len(harness.plans) > 5:
            most = max(most, len(batch.held(batch.slot_of[0])[1]))
    assert most == STATES_HELD
    harness.check_answers()


# ---- refusals


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [(30, 40, r"need 16 KV blocks.*there are 9"), (4, 60, "lower max_tokens"), (70, 1, "got 70")],
)
def test_a_request_that_can_never_fit_is_refused_at_once(
    prompt: int, max_tokens: int, words: str
) -> None:
    harness = Harness(limits_of(num_blocks=10))
    with pytest.raises(InvalidRequest, match=words):
        harness.submit(submit_of(0, prompt_of(prompt), max_tokens=max_tokens))
    assert not harness.scheduler.has_work


def test_an_id_in_use_is_refused() -> None:
    harness = Harness(limits_of(max_num_seqs=1))
    for rid in (0, 1):
        harness.submit(submit_of(rid, prompt_of(6)))
        steps(harness, 1)
    for rid in (0, 1):
        with pytest.raises(InvalidRequest, match="already"):
            harness.scheduler.submit(submit_of(rid, prompt_of(6)))


def test_a_result_out_of_order_is_our_bug() -> None:
    harness = Harness(limits_of())
    harness.submit(submit_of(0, prompt_of(6)))
    harness.plan()
    second = harness.plan()
    assert second is not None
    with pytest.raises(AssertionError):
        harness.scheduler.update_from_output(second, harness.runner.result())


def test_abort_rows_carry_no_token() -> None:
    harness = Harness(limits_of())
    harness.submit(submit_of(7, prompt_of(6)))
    output = harness.scheduler.abort([7])
    assert output is not None
    assert np.frombuffer(output.rids, "<i8").tolist() == [7]
    assert np.frombuffer(output.tokens, "<i4").tolist() == [-1]
    assert list(output.finish) == [FinishReason.ABORT]


def test_starting_over_computes_everything_anew_and_finds_nothing_old() -> None:
    """Steps in flight count for nothing, and neither does what they were to leave in blocks."""
    harness = Harness(limits_of(depth=2))
    for rid in range(6):
        harness.submit(submit_of(rid, prompt_of(9, 20 + rid // 2), max_tokens=12))
    steps(harness, 5)
    harness.plan()
    known = {rid: len(answer.tokens) for rid, answer in harness.answers.items()}
    assert any(known.values())
    assert harness.in_flight
    harness.scheduler.start_over()
    harness.in_flight.clear()
    harness.runner.catch_up()
    harness.runner.done.clear()
    for content in harness.runner.kv:
        content[:] = 666
    harness.num_resets += 1
    assert not running(harness)
    harness.scheduler.audit()
    harness.run()
    harness.check_answers()


@pytest.mark.parametrize(
    ("tokens", "emitted", "kept"), [([5, 6, 7, 8, 9], 5, 4), ([5, 6, EOS, 8, 9], 3, 3)]
)
def test_right_drafts_behind_the_end_of_an_answer_do_not_count(
    tokens: list[int], emitted: int, kept: int
) -> None:
    scheduler = Scheduler(limits_of(num_drafts=4), FULL, eos_ids=(EOS,))
    scheduler.submit(submit_of(1, prompt_of(4), max_tokens=30, stop_ids=(EOS,)))
    for new in [5], tokens:
        plan = scheduler.plan()
        assert plan is not None
        counts = np.array([len(new)], np.int32)
        drafts = np.array([4], np.int32)
        result = StepResult(
            plan.step, np.array(new, np.int32), counts_S=counts, num_drafts_S=drafts
        )
        output = scheduler.update_from_output(plan, result)
    assert len(output.finish) == emitted
    assert output.drafts == {1: (4, kept)}


def test_a_head_that_does_not_fit_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not fit even without all requests of lower priority.

    Its hash chain may be long, so it is not computed again.
    """
    harness = Harness(limits_of(num_blocks=18))
    urgent = harness.submit(submit_of(0, list(range(20, 50)), priority=0, max_tokens=12))
    harness.submit(submit_of(1, [2, 3, 4], priority=2, max_tokens=30))
    for _ in range(4):
        harness.step()
    manager = harness.scheduler.kv_manager
    match = manager.match
    looked_up: list[int] = []

    def counted(request: Request) -> Hit:
        looked_up.append(request.rid)
        return match(request)

    monkeypatch.setattr(manager, "match", counted)
    head = harness.submit(submit_of(2, list(range(49, 8, -1)), priority=1, max_tokens=3))
    num_plans = len(harness.plans)
    while not urgent.finish:
        harness.step()
        assert harness.num_preempted == 0
    assert len(harness.plans) - num_plans >= 6
    # Once each for its preemptions and for its admission, and again only when there is more room.
    assert len(looked_up) <= 4
    while not head.finish:
        harness.step()
    harness.run()
    harness.check_answers()
