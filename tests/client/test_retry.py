"""The errors after which the client retries, and the pauses between tries."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from moeserve.client.faults import delay_s, retry_after_s, should_retry


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (400, {}, False),
        (404, {}, False),
        (408, {}, True),
        (409, {}, True),
        (429, {}, True),
        (500, {}, True),
        (503, {}, True),
        (503, {"x-should-retry": "false"}, False),
        (400, {"x-should-retry": "true"}, True),
        (503, {"x-should-retry": "perhaps"}, True),
        (503, {"retry-after": "121"}, False),
        (503, {"retry-after": "120"}, True),
        (400, {"x-should-retry": "true", "retry-after": "9999"}, False),
    ],
)
def test_which_answers_are_tried_again(
    status: int, headers: dict[str, str], expected: bool
) -> None:
    assert should_retry(status, headers) is expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "whenever"}, None),
        ({"retry-after": formatdate(time.time() - 60)}, 0.0),
    ],
)
def test_what_the_server_asks_for(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(headers) == expected


def test_a_date_counts_from_now() -> None:
    asked = retry_after_s({"retry-after": formatdate(time.time() + 60, usegmt=True)})
    assert asked is not None
    assert 50 < asked <= 61


@pytest.mark.parametrize(
    ("attempt", "longest"), [(0, 0.5), (1, 1.0), (2, 2.0), (3, 4.0), (4, 8.0), (5, 8.0), (40, 8.0)]
)
def test_backoff_doubles_to_8_s_less_up_to_a_quarter(attempt: int, longest: float) -> None:
    delays = [delay_s(attempt, {}) for _ in range(200)]
    assert all(0.75 * longest <= d <= longest for d in delays)
    assert len(set(delays)) > 100


def test_the_servers_wish_wins_over_backoff() -> None:
    assert delay_s(3, {"retry-after-ms": "1500"}) == 1.5
