"""When a request is worth another try, and how long to wait before it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from email.utils import mktime_tz, parsedate_tz

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 8.0
LONGEST_RETRY_AFTER_S = 120.0


def should_retry(status: int, headers: Mapping[str, str]) -> bool:
    """Whether the answer says "later": 408, 409, 429 and 5xx, unless `x-should-retry` says otherwise.

    A server that asks for more than 120 s is not asked again: its caller learns the number from the error.
    """
    asked = retry_after_s(headers)
    if asked is not None and asked > LONGEST_RETRY_AFTER_S:
        return False
    match headers.get("x-should-retry", "").lower():
        case "true":
            return True
        case "false":
            return False
    return status in (408, 409, 429) or status >= 500


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks for: `retry-after-ms`, else `Retry-After` as seconds or as a date."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            value = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        if 0.0 <= value < float("inf"):
            return value
    date = parsedate_tz(headers.get("retry-after", ""))
    return None if date is None else max(0.0, mktime_tz(date) - time.time())


def delay_s(attempt: int, headers: Mapping[str, str]) -> float:
    """Seconds before try number `attempt` + 1 (0 was the first): what the server asks for, else 0.5 s doubling
    to 8 s, less up to a quarter, so that clients do not come back in step."""
    asked = retry_after_s(headers)
    if asked is not None and asked <= LONGEST_RETRY_AFTER_S:
        return asked
    backoff_s = min(FIRST_DELAY_S * 2.0**attempt, LONGEST_DELAY_S)
    return backoff_s * (1.0 - 0.25 * random.random())
