"""Rates of an API key: so many requests and tokens a minute, in OpenAI's headers and errors."""

import math
from dataclasses import dataclass, field
from time import monotonic

from moeserve.errors import RateLimited


@dataclass
class Bucket:
    """What is left of a limit per minute. It fills up steadily, and holds one minute's worth at most.

    Answers are paid for when their length is known, so `left` may fall below zero, and later requests wait for that.
    """

    per_minute: int
    left: float = field(init=False)
    _at_s: float = field(default_factory=monotonic, init=False)

    def __post_init__(self) -> None:
        self.left = float(self.per_minute)

    def fill(self) -> None:
        """Adds what has become free since the last call."""
        now = monotonic()
        self.left = min(self.per_minute, self.left + (now - self._at_s) * self.per_minute / 60)
        self._at_s = now

    def wait_s(self, amount: float) -> float:
        """Returns the seconds until so much is there; 0 if it is."""
        return max(0.0, amount - self.left) * 60 / self.per_minute


class Rates:
    """The buckets of one key; None: no limit of that kind."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        self.limits = requests_per_minute, tokens_per_minute
        limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._buckets = {kind: Bucket(limit) for kind, limit in limits.items() if limit is not None}

    def take(self, num_tokens: int) -> None:
        """Pays for a request and its prompt. Raises RateLimited, having taken nothing."""
        amounts = {"requests": 1, "tokens": num_tokens}
        for kind, bucket in self._buckets.items():
            bucket.fill()
            amount, limit = amounts[kind], bucket.per_minute
            if amount > limit:
                what = f"the prompts have {amount} tokens and this key may use {limit} a minute: send less at once"
                raise RateLimited(what, kind=kind, retry_after_s=math.inf)
            if (wait_s := bucket.wait_s(amount)) > 0:
                what = f"this key may use {limit} {kind} a minute; try again in {math.ceil(wait_s)} s"
                raise RateLimited(what, kind=kind, retry_after_s=wait_s)
        for kind, bucket in self._buckets.items():
            bucket.left -= amounts[kind]

    def spend(self, num_tokens: int) -> None:
        """Pays for the tokens of an answer."""
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.fill()
            bucket.left -= num_tokens

    def headers(self) -> dict[str, str]:
        """Returns limits, what is left, and the time until all is back, as OpenAI's headers."""
        found = {}
        for kind, bucket in self._buckets.items():
            bucket.fill()
            found[f"X-RateLimit-Limit-{kind.title()}"] = str(bucket.per_minute)
            found[f"X-RateLimit-Remaining-{kind.title()}"] = str(max(0, math.floor(bucket.left)))
            found[f"X-RateLimit-Reset-{kind.title()}"] = _duration(bucket.wait_s(bucket.per_minute))
        return found


def _duration(seconds: float) -> str:
    """Returns a time as OpenAI writes it: 250ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
