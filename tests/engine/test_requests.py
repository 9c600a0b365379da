"""Validation of a Submit, and the order of the waiting queue."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from moeserve.engine.requests import WaitingQueue, request_of
from moeserve.errors import InvalidRequest
from moeserve.messages import Submit
from tests.engine.harness import submit_of

GOOD = submit_of(1, [1, 2, 3])


def changed(**fields: object) -> Submit:
    return msgspec.structs.replace(GOOD, **fields)


@pytest.mark.parametrize(
    ("msg", "words"),
    [
        (changed(tokens=b"123"), "3 bytes"),
        (changed(tokens=b"", num_prompt=0), r"number of tokens must lie in 1\.\.63, got 0"),
        (changed(num_prompt=0), r"num_prompt must lie in 1\.\.3, got 0"),
        (changed(num_prompt=4), r"num_prompt must lie in 1\.\.3, got 4"),
        (submit_of(1, [0, 50]), r"token ids must lie in 0\.\.49, got 50"),
        (submit_of(1, [-1, 3]), r"token ids .* got -1"),
        (submit_of(1, [1] * 64), r"number of tokens must lie in 1\.\.63, got 64"),
        (submit_of(1, [1] * 9, emitted=8, max_tokens=8), r"max_tokens must lie in 9\.\..*, got 8"),
        (submit_of(1, [1], max_tokens=0), "max_tokens .* got 0"),
        (submit_of(1, [1], stop_ids=(3, 50)), r"stop ids must lie in 0\.\.49, got 50"),
        (submit_of(1, [1], stop_ids=(-1,)), "stop ids .* got -1"),
    ],
)
def test_a_malformed_submit_is_refused_with_its_value(msg: Submit, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        request_of(msg, 0, 64, 50)


@pytest.mark.parametrize(
    ("length", "max_tokens", "total"), [(3, 8, 11), (60, 8, 64), (63, 1, 64), (3, 10**6, 64)]
)
def test_a_request_ends_at_its_limit_or_the_context(
    length: int, max_tokens: int, total: int
) -> None:
    assert (
        request_of(submit_of(1, [1] * length, max_tokens=max_tokens), 0, 64, 50).max_total == total
    )


def test_a_replay_counts_its_emitted_tokens() -> None:
    request = request_of(submit_of(1, [1, 2, 3, 4, 5], emitted=2, max_tokens=4), 0, 64, 50)
    assert (request.num_prompt, request.max_total) == (3, 7)


def test_the_queue_is_ordered_by_priority_then_arrival_whoever_leaves() -> None:
    rng = random.Random(3)
    queue = WaitingQueue()
    model = []
    for arrival in range(300):
        request = request_of(submit_of(arrival, [1], priority=rng.randint(-2, 2)), arrival, 64, 50)
        queue.push(request)
        model.append(request)
        if rng.random() < 0.3:
            gone = model.pop(rng.randrange(len(model)))
            assert queue.remove(gone.rid) is gone
        model.sort(key=lambda r: (r.priority, r.arrival))
        assert list(queue) == model
        assert queue.head is (model[0] if model else None)
        if rng.random() < 0.1:
            assert queue.pop() is model.pop(0)
    assert all(request.rid in queue for request in model)


def test_tokens_are_read_as_little_endian() -> None:
    tokens = np.array([1, 2, 3], "<i4")
    assert request_of(changed(tokens=tokens.tobytes()), 0, 64, 50).tokens.tolist() == [1, 2, 3]
