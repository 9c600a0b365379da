"""Requests that wait for their grammar: others pass them, and each keeps its place in line."""

from __future__ import annotations

import pytest

from moeserve.engine.preparing import Need, PreparingSet
from moeserve.engine.requests import Request, request_of
from moeserve.engine.scheduler import Scheduler
from tests.engine.harness import BAD_GRAMMAR, FULL, GRAMMAR, Harness, limits_of, submit_of

PROMPT = list(range(20, 29))


def request(rid: int) -> Request:
    return request_of(submit_of(rid, PROMPT), rid, 64, 50)


def running(harness: Harness) -> list[int]:
    batch = harness.scheduler.kv_manager.batch
    return [int(batch.rid[slot]) for slot in batch.order]


def test_a_request_is_released_with_its_last_ticket() -> None:
    preparing = PreparingSet()
    preparing.add(request(7), 1, Need.GRAMMAR)
    preparing.add(request(7), 2, Need.GRAMMAR)
    preparing.add(request(8), 3, Need.GRAMMAR)
    preparing.audit()
    assert 7 in preparing
    assert len(preparing) == 2
    assert preparing.close(2) is None
    released = preparing.close(1)
    assert released is not None
    assert released.rid == 7
    assert preparing.close(1) is None
    assert preparing.request_of(1) is None
    assert preparing.remove(8).rid == 8
    assert preparing.close(3) is None
    assert len(preparing) == 0
    preparing.audit()


def test_others_go_on_while_a_grammar_is_prepared() -> None:
    harness = Harness(limits_of())
    slow = harness.submit(submit_of(0, PROMPT, grammar=GRAMMAR))
    quick = harness.submit(submit_of(1, PROMPT))
    assert harness.scheduler.num_waiting == 2
    while not quick.finish:
        harness.step()
    assert slow.tokens == []
    assert harness.scheduler.has_work
    assert not harness.scheduler.can_run
    harness.prepare(0)
    harness.run()
    harness.check_answers()


def test_a_request_keeps_its_place_in_line() -> None:
    """One slot: the request that came first gets it as soon as its grammar is there."""
    harness = Harness(limits_of(max_num_seqs=1, depth=1))
    harness.submit(submit_of(0, PROMPT))
    harness.step()
    for rid, grammar in ((1, GRAMMAR), (2, None), (3, GRAMMAR)):
        harness.submit(submit_of(rid, PROMPT, grammar=grammar))
    harness.prepare(3)
    harness.prepare(1)
    order = []
    while harness.scheduler.has_work:
        harness.step()
        order += [rid for rid in running(harness) if rid not in order]
    assert order == [0, 1, 2, 3]
    harness.check_answers()


def test_a_high_priority_request_preempts_once_its_grammar_is_there() -> None:
    harness = Harness(limits_of(max_num_seqs=1))
    harness.submit(submit_of(0, PROMPT, priority=1, max_tokens=20))
    harness.submit(submit_of(1, PROMPT, priority=0, grammar=GRAMMAR))
    for _ in range(4):
        harness.step()
    assert running(harness) == [0]
    harness.prepare(1)
    for _ in range(4):
        harness.step()
    assert running(harness) == [1]
    harness.run()
    harness.check_answers()


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    harness = Harness(limits_of())
    bad = harness.submit(submit_of(0, PROMPT, grammar=BAD_GRAMMAR))
    harness.submit(submit_of(1, PROMPT, grammar=GRAMMAR))
    harness.prepare()
    assert (bad.finish, bad.error) == ("error", "it does not compile")
    harness.run()
    harness.check_answers()


def test_an_aborted_request_is_dropped_and_a_late_report_ignored() -> None:
    harness = Harness(limits_of())
    for rid in range(3):
        harness.submit(submit_of(rid, PROMPT, grammar=GRAMMAR))
    first, second, third = harness.grammars.jobs
    harness.abort(0)
    assert list(harness.grammars.jobs) == [second, third]
    assert harness.scheduler.grammar_prepared(first) is None
    assert harness.scheduler.grammar_prepared(first, "too late") is None
    harness.prepare(1)
    harness.abort(1)  # in line, with a grammar that nobody needs any more
    assert harness.grammars.prepared == {}
    harness.take(harness.scheduler.abort_all())
    harness.check_answers()
    assert [answer.finish for answer in harness.answers.values()] == ["abort"] * 3


def test_the_same_request_twice_is_refused_while_it_awaits() -> None:
    harness = Harness(limits_of())
    harness.submit(submit_of(0, PROMPT, grammar=GRAMMAR))
    with pytest.raises(Exception, match="request 0 exists already"):
        harness.scheduler.submit(submit_of(0, PROMPT))


def test_a_preempted_request_waits_for_a_grammar_that_has_its_tokens() -> None:
    harness = Harness(limits_of(max_num_seqs=1, depth=1))
    answer = harness.submit(submit_of(0, PROMPT, priority=1, grammar=GRAMMAR, max_tokens=20))
    harness.prepare(0)
    while len(answer.tokens) < 5:
        harness.step()
    urgent = harness.submit(submit_of(1, PROMPT, priority=0, max_tokens=3))
    while not urgent.finish:
        harness.step()
    (job,) = harness.grammars.jobs.values()
    assert job.answer == answer.tokens
    assert job.priority == 1
    harness.run()
    harness.check_answers()


def test_without_a_source_a_grammar_is_left_to_the_runner() -> None:
    scheduler = Scheduler(limits_of(), FULL)
    scheduler.submit(submit_of(0, PROMPT, grammar=GRAMMAR))
    plan = scheduler.plan()
    assert plan is not None
    assert plan.new_requests[0].grammar_ticket == 0
