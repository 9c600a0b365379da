"""KV blocks that arrive late or never: waiting requests are answered, and no others wait."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from moeserve.engine.blocks import Key
from moeserve.engine.connector import Lookup, When
from moeserve.messages import StepOutput
from tests.engine.harness import FULL, GRAMMAR, HYBRID, Answer, Harness, limits_of, submit_of
from tests.engine.late_store import LateStore

PREFIX = list(range(20, 40))  # five blocks
OTHER = [45, 46, 47]


class Courier(LateStore):
    """A LateStore that does nothing by chance: the test delivers."""

    def __init__(self) -> None:
        super().__init__(limits_of(num_store_blocks=40), FULL, random.Random(0))
        self.unsure = False
        self.reports: list[int] = []
        self.finished_requests: list[tuple[int, int]] = []

    def lookup(self, keys: Sequence[Key]) -> Lookup:
        number, _ = self.store.lookup(keys)
        if self.unsure and len(keys) > 1:
            return Lookup(0, When.ASK_AGAIN)
        return Lookup(number, When.NOW if set(keys[:number]) <= self.near else When.LATER)

    def finished(self) -> list[int]:
        reports = self.reports
        self.reports = []
        return reports

    def deliver(self, ticket: int, number: int | None = None) -> None:
        """Brings the first blocks of a fetch, all if there is no number, and reports its end."""
        self.near.update(self.fetches[ticket][:number])
        self.reports.append(ticket)

    def request_finished(self, rid: int, hashes: Sequence[bytes]) -> dict[str, Any] | None:
        self.finished_requests.append((rid, len(hashes)))
        return {"from": "here"} if rid % 2 else None


def warm(**limits: int) -> tuple[Harness, Courier]:
    """A harness whose connector has the blocks of PREFIX, and whose device has not."""
    harness = Harness(limits_of(num_blocks=12, num_store_blocks=40, **limits), late=True)
    courier = harness.scheduler.kv_manager.connector = harness.connector = Courier()
    for rid, prompt in ((100, PREFIX), (101, list(range(5)) * 8)):
        harness.submit(submit_of(rid, [*prompt, 44], max_tokens=1))
        harness.run()
    courier.finished_requests.clear()
    assert len(courier.contents(0)) >= 5
    return harness, courier


def run_until(harness: Harness, answer: Answer) -> None:
    while not answer.finish:
        harness.step()


def test_others_go_on_until_the_blocks_are_there() -> None:
    harness, courier = warm()
    late = harness.submit(submit_of(0, [*PREFIX, 41]))
    quick = harness.submit(submit_of(1, OTHER))
    run_until(harness, quick)
    assert late.tokens == []
    (ticket,) = courier.fetches
    courier.deliver(ticket)
    run_until(harness, late)
    assert late.cached == len(PREFIX)
    assert courier.ended == [ticket], "the lease ends when the request is admitted"
    harness.check_answers()


def test_what_never_arrives_is_computed() -> None:
    harness, courier = warm()
    late = harness.submit(submit_of(0, [*PREFIX, 41]))
    began_s = harness.now_s
    run_until(harness, late)
    assert late.cached == 0
    assert harness.now_s - began_s < courier.wait_s + 1
    assert len(courier.ended) == 1
    harness.check_answers()


def test_time_stands_still_while_an_engine_sleeps() -> None:
    """A deadline counts from the submission, not from the last step before it."""
    harness, courier = warm()
    harness.now_s += 3600
    harness.submit(submit_of(0, [*PREFIX, 41]))
    harness.plan()
    assert len(courier.fetches) == 1
    assert harness.scheduler.check_at_s == pytest.approx(harness.now_s, abs=0.1)
    harness.run()
    harness.check_answers()


@pytest.mark.parametrize("number", [0, 2])
def test_what_does_not_arrive_though_it_was_reported_is_computed(number: int) -> None:
    harness, courier = warm()
    late = harness.submit(submit_of(0, [*PREFIX, 41]))
    courier.deliver(next(iter(courier.fetches)), number)
    run_until(harness, late)
    assert late.cached == 4 * number
    harness.check_answers()


def test_what_is_gone_again_at_the_admission_is_computed() -> None:
    harness, courier = warm(max_num_seqs=1)
    first = harness.submit(submit_of(1, OTHER))
    harness.plan()
    late = harness.submit(submit_of(0, [*PREFIX, 41]))
    courier.deliver(next(iter(courier.fetches)))
    harness.plan()
    assert not first.finish
    courier.near.clear()
    run_until(harness, late)
    assert late.cached == 0
    harness.check_answers()


def test_fetches_may_end_in_any_order_and_be_reported_twice() -> None:
    harness, courier = warm()
    answers = [harness.submit(submit_of(rid, [*PREFIX[:n], 41])) for rid, n in ((0, 20), (1, 8))]
    first, second = courier.fetches
    courier.deliver(second)
    courier.reports += [second, 4242]
    run_until(harness, answers[1])
    assert answers[1].cached == 8
    assert not answers[0].tokens
    courier.deliver(first)
    courier.reports.append(second)
    run_until(harness, answers[0])
    assert answers[0].cached == 20
    harness.check_answers()


def test_a_connector_that_does_not_know_yet_is_asked_again() -> None:
    harness, courier = warm()
    courier.unsure = True
    late = harness.submit(submit_of(0, [*PREFIX, 41]))
    for _ in range(3):
        harness.step()
    assert not courier.fetches
    courier.unsure = False
    harness.step()
    courier.deliver(next(iter(courier.fetches)))
    run_until(harness, late)
    assert late.cached == 20
    harness.check_answers()


def test_one_that_never_knows_holds_a_request_up_for_its_time_alone() -> None:
    harness, courier = warm()
    courier.unsure = True
    late = harness.submit(submit_of(0, [*PREFIX, 41]))
    run_until(harness, late)
    assert late.cached == 0
    assert courier.ended == [], "nothing was begun"
    harness.check_answers()


def test_a_request_may_wait_for_its_grammar_and_its_blocks() -> None:
    for order in ("grammar first", "blocks first"):
        harness, courier = warm()
        late = harness.submit(submit_of(0, [*PREFIX, 41], grammar=GRAMMAR))
        ticket = next(iter(courier.fetches))
        if order == "grammar first":
            harness.prepare(0)
            harness.plan()
            assert 0 in harness.scheduler.preparing
            courier.deliver(ticket)
        else:
            courier.deliver(ticket)
            harness.plan()
            assert 0 in harness.scheduler.preparing
            harness.prepare(0)
        run_until(harness, late)
        assert late.cached == 20
        harness.check_answers()


def test_an_abort_ends_the_fetch() -> None:
    harness, courier = warm()
    harness.submit(submit_of(0, [*PREFIX, 41]))
    (ticket,) = courier.fetches
    harness.abort(0)
    assert courier.ended == [ticket]
    courier.reports.append(ticket)
    harness.plan()
    assert harness.scheduler.check_at_s == math.inf
    harness.check_answers()


def test_a_lease_ends_though_its_request_waits_in_line() -> None:
    harness, courier = warm(max_num_seqs=1)
    harness.submit(submit_of(1, OTHER, max_tokens=40))
    harness.plan()
    harness.submit(submit_of(0, [*PREFIX, 41]))
    (ticket,) = courier.fetches
    courier.deliver(ticket)
    harness.plan()
    assert courier.ended == []
    harness.now_s += courier.lease_s
    harness.update_from_output()
    harness.plan()
    assert courier.ended == [ticket]
    assert 0 in harness.scheduler.waiting
    harness.run()
    harness.check_answers()


def test_a_torn_load_is_computed_again_by_all_that_may_have_read_it() -> None:
    harness, courier = warm()
    harness.runner.tears = 1.0
    bystander = harness.submit(submit_of(1, OTHER, max_tokens=30))
    for _ in range(6):
        harness.step()
    late = harness.submit(submit_of(0, [*PREFIX, 41]))
    courier.deliver(next(iter(courier.fetches)))
    harness.run()
    assert harness.runner.num_torn == 1, "what was torn once is not loaded again"
    assert harness.num_preempted == 2
    assert late.tokens
    assert bystander.tokens
    harness.check_answers()


def test_a_request_without_hits_does_not_wait() -> None:
    harness, courier = warm()
    harness.submit(submit_of(0, OTHER * 4))
    harness.submit(submit_of(1, [*PREFIX, 41], prompt_logprobs=0))
    assert len(harness.scheduler.waiting) == 2
    assert not courier.fetches
    harness.run()
    harness.check_answers()


def test_a_connector_is_told_of_ends_and_its_words_go_with_the_last_token() -> None:
    harness, courier = warm()
    for rid in (0, 1):
        harness.submit(submit_of(rid, OTHER, max_tokens=6))
    harness.submit(submit_of(3, OTHER, max_tokens=30))
    outputs: list[StepOutput] = []
    while len(courier.finished_requests) < 2:
        if len(harness.in_flight) < 2:
            harness.plan()
        else:
            outputs.append(harness.update_from_output())
    assert courier.finished_requests == [(0, 2), (1, 2)]
    assert [output.kv_params for output in outputs if output.kv_params] == [{1: {"from": "here"}}]
    harness.abort(3)
    assert courier.finished_requests[-1][0] == 3
    harness.run()
    harness.check_answers()


def test_window_groups_fetch_the_end_of_the_prefix_alone() -> None:
    harness = Harness(limits_of(num_blocks=30, num_store_blocks=60), HYBRID)
    manager = harness.scheduler.kv_manager
    harness.submit(submit_of(0, [*PREFIX, 41], max_tokens=1))
    harness.run()
    manager.pool.release(manager.pool.allocate(manager.pool.num_free))  # evicts all
    manager.pop_changes()

    class All(Courier):
        def lookup(self, keys: Sequence[Key]) -> Lookup:
            return Lookup(len(keys), When.LATER)

    manager.connector = All()
    late = harness.submit(submit_of(1, [*PREFIX, 42], max_tokens=1))
    (keys,) = manager.connector.fetches.values()
    hashes = harness.scheduler.preparing._by_rid[1].request.hashes
    assert list(keys) == [*((h, 0) for h in hashes), (hashes[3], 1), (hashes[4], 1)]
    assert np.all([len(h) == 32 for h in hashes])
    harness.abort(1)
    assert late.finish == "abort"
