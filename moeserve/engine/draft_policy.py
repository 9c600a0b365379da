"""Choose how many drafts a step verifies (speculative decoding), to maximize tokens per second.

Two things are estimated from earlier steps:

- The acceptance rate, per slot and draft position, as an exponential average. A new request starts
  with the average of all requests.
- The time of a decode step without drafts, and its growth with the number of drafts, both by the
  number of rows.

Of all available drafts, the policy uses the likeliest, up to the number with the best ratio of
expected tokens to expected time.

The estimates can be wrong, so an account limits the loss. Its unit is the time of a step without
drafts. Every step pays in 1 %. A step with drafts pays in its additional tokens, and pays out its
additional time. While the account is empty, the policy uses no drafts. If drafts do not seem
worthwhile but the account has a whole step, the policy tries some in a "probe". So drafts that
never help cost 1 % in the long run. A successful probe refills the account, so that another probe
follows at once.

Suffixes: S slots, K draft positions of a row, M drafts of all rows together.
"""

import math

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.plan import I32, Slots

F64 = NDArray[np.float64]
# Assumptions before anything is measured.
_INITIAL_ACCEPTANCE = 0.7  # acceptance rate of a draft
_INITIAL_COST = 0.3  # relative cost of one draft per row
# The account, in steps.
_INCOME_PER_STEP = 0.01
_INITIAL_BALANCE = 2.0
_MAX_BALANCE = 4.0
_MIN_PROBE_BALANCE = 1.0  # balance at which a probe is allowed
_PLANNING_COST = 0.01  # relative cost of planning drafts, which is not measured
_TIME_ERROR = 0.2  # relative standard error of one measured time
_MAX_DEVIATION = 1.4  # longer or shorter times, relative to the expectation, are clipped to this
_NUM_FIRST_PLAIN = 5  # steps without drafts that are measured first
_PLAIN_INTERVAL = 48  # steps with drafts between two measured steps without; fewer at first
# Rates of the exponential averages.
_SLOT_RATE = 0.1  # acceptance of drafts that were verified
_BEYOND_RATE = 0.02  # acceptance of drafts beyond those, if all verified ones were accepted
_PLAIN_RATE = 0.05  # time without drafts
_COST_RATE = 0.03  # time with drafts


class DraftPolicy:
    """Limits the drafts of each step. There is no clock: the same calls have the same results.

    num_slots: the number of slots of the batch.
    num_drafts: the most drafts per row.
    auto: whether to choose the number of drafts. Otherwise each step uses all available drafts.
    """

    def __init__(self, num_slots: int, num_drafts: int, auto: bool) -> None:
        self.propose = True  # whether the proposer should draft tokens in the next step
        self._auto = auto
        self._num_drafts = num_drafts
        # Acceptance rates by draft position, given that the drafts before it were accepted: of each
        # slot, and of all slots together.
        self._accepted_SK: F64 = np.full((num_slots, num_drafts), _INITIAL_ACCEPTANCE)
        self._accepted_K: F64 = np.full(num_drafts, _INITIAL_ACCEPTANCE)
        # The bucket of each number of rows: one bucket each up to 8 rows, then 8 per power of two.
        rows = np.maximum(np.arange(num_slots + 1), 1)
        self._bucket_of = np.where(rows <= 8, rows, np.ceil(8 * np.log2(rows / 8)) + 8).astype(
            np.intp
        )
        num_buckets = int(self._bucket_of[-1]) + 1
        # Times of steps without drafts ("plain"): the estimate, and the first measurements.
        self._plain_us: F64 = np.zeros(num_buckets)
        self._num_plain = np.zeros(num_buckets, np.int64)
        self._first_us: F64 = np.zeros((num_buckets, _NUM_FIRST_PLAIN))
        # Sums for a least squares fit of time = plain * (1 + fixed + cost * x), where x is the
        # number of drafts per row. With y = time / plain - 1, they are the sums of 1, x, x^2, y and
        # x * y. The fit of a bucket also counts its neighbors, with the weights `_weights_of`.
        self._sums: F64 = np.zeros((5, num_buckets))
        buckets = np.arange(num_buckets)
        self._weights_of: F64 = np.exp(-np.abs(np.subtract.outer(buckets, buckets)) / 2)
        self._balance = _INITIAL_BALANCE
        self._num_probes = 0
        self._num_accepted = 0  # accepted drafts of the step for which `note` is called next
        self._num_since_plain = 0  # steps with drafts since the last measured step without

    def admit(self, slots: Slots) -> None:
        """Reset the acceptance rates of slots with new requests."""
        self._accepted_SK[slots] = self._accepted_K

    def limit(self, slots: Slots, available: I32) -> I32:
        """Return how many of its available drafts each row should use, and set `propose`.

        To be called once per step.
        """
        if not self._auto or not len(slots):
            return available
        num_rows = len(slots)
        no_drafts = np.zeros_like(available)
        bucket = self._bucket_of[num_rows]
        num_plain = int(self._num_plain[bucket])
        if num_plain < _NUM_FIRST_PLAIN or self._num_since_plain >= min(
            2 * num_plain, _PLAIN_INTERVAL
        ):
            self._num_since_plain = 0
            self.propose = False
            return no_drafts
        # The probability that each draft and all before it in its row are accepted.
        likely: F64 = self._accepted_SK[slots].cumprod(axis=1).ravel()
        order = np.argsort(-likely, kind="stable")  # a row's drafts stay in order
        fixed, cost = self._costs(bucket)
        fixed += self._margin(bucket)
        drafts_pay = self._balance > 0 and self._best(likely[order], num_rows, fixed, cost) > 0
        may_probe = self._balance >= _MIN_PROBE_BALANCE
        self.propose = drafts_pay or may_probe
        row, position = np.divmod(order, self._num_drafts)
        usable = order[position < available[row]]
        num_used = self._best(likely[usable], num_rows, fixed, cost) if drafts_pay else 0
        if not num_used and may_probe and len(usable):
            # At most as many drafts as cost the time of a whole step, which the account has.
            max_used = min(len(usable), int(num_rows / max(cost, 0.25)))
            # Vary the number: all, a half, a quarter. One number alone could not tell `fixed` from
            # `cost`.
            num_used = max(max_used >> (self._num_probes % 3), 1)
            self._num_probes += 1
        return np.bincount(usable[:num_used] // self._num_drafts, minlength=num_rows).astype(
            np.int32
        )

    def update(self, slots: Slots, num_drafts: I32, num_accepted: I32) -> None:
        """Learn from the numbers of verified and accepted drafts of each row.

        To be called before `note`.
        """
        if not self._auto:
            return
        self._num_accepted += int(num_accepted.sum())
        tried = num_drafts > 0
        slots = slots[tried]
        num_drafts = num_drafts[tried]
        num_accepted = num_accepted[tried]
        position = np.arange(self._num_drafts)
        seen = position < np.minimum(num_accepted + 1, num_drafts)[:, None]
        hit = position < num_accepted[:, None]
        rate = _SLOT_RATE * seen
        # If all drafts of a row were accepted, raise the estimates of the positions beyond, too, so
        # that they are tried.
        beyond = (num_accepted == num_drafts)[:, None] & ~seen
        rate[beyond] = _BEYOND_RATE
        self._accepted_SK[slots] += rate * ((hit | beyond) - self._accepted_SK[slots])
        count = seen.sum(0)
        self._accepted_K += (hit.sum(0) - count * self._accepted_K) / (count + 64)

    def note(
        self,
        num_tokens: int,
        num_rows: int,
        num_drafts: int,
        took_us: int,
        ran_draft_model: bool = False,
    ) -> None:
        """Learn from the time of a step. Steps with prompts are ignored.

        took_us: the time of the step, including the drafting before it.
        ran_draft_model: whether a draft model ran before the step.
        """
        num_accepted = self._num_accepted
        self._num_accepted = 0
        has_prompts = num_tokens != num_rows + num_drafts
        if not self._auto or not num_rows or has_prompts or took_us <= 0:
            return
        bucket = self._bucket_of[num_rows]
        self._balance = min(self._balance + _INCOME_PER_STEP, _MAX_BALANCE)
        if not num_drafts and not ran_draft_model:
            self._note_plain(bucket, took_us)
        elif self._num_plain[bucket]:
            fixed, cost = self._costs(bucket)
            x = num_drafts / num_rows
            expected = 1 + fixed + cost * x
            y = (
                np.clip(
                    took_us / self._plain_us[bucket],
                    expected / _MAX_DEVIATION,
                    _MAX_DEVIATION * expected,
                )
                - 1
            )
            if num_drafts:
                self._num_since_plain += 1
                self._sums[:, bucket] *= 1 - _COST_RATE
                self._sums[:, bucket] += (1, x, x * x, y, x * y)
                mean = self._sums[3, bucket] / self._sums[0, bucket]
                # Drafts do not make a step faster. So a negative mean says that the estimate of the
                # time without drafts is too high.
                self._plain_us[bucket] *= 1 + _PLAIN_RATE * min(mean, 0)
                y += self._margin(bucket)
            self._balance = min(self._balance + num_accepted / num_rows - y, _MAX_BALANCE)

    def _note_plain(self, bucket: np.intp, took_us: float) -> None:
        estimate_us = self._plain_us[bucket]
        num_before = self._num_plain[bucket]
        self._num_plain[bucket] += 1
        if num_before < _NUM_FIRST_PLAIN:
            self._first_us[bucket, num_before] = took_us
            self._plain_us[bucket] = np.median(self._first_us[bucket, : num_before + 1])
        else:
            shortest_us = estimate_us / _MAX_DEVIATION
            clipped_us = np.clip(took_us, shortest_us, _MAX_DEVIATION * estimate_us)
            rate = max(1 / (num_before + 1), _PLAIN_RATE)
            self._plain_us[bucket] += rate * (clipped_us - estimate_us)

    def _costs(self, bucket: np.intp) -> tuple[float, float]:
        """Return the relative costs `fixed` (of a step) and `cost` (per draft and row)."""
        n, x, xx, y, xy = (self._sums @ self._weights_of[bucket]).tolist()
        # The assumption before any measurement, with the weight of half a step.
        n = n + 0.5
        xx = xx + 0.5
        xy = xy + 0.5 * _INITIAL_COST
        det = n * xx - x * x
        fixed = (y * xx - x * xy) / det
        cost = (n * xy - x * y) / det
        if fixed < 0:
            return 0.0, max(xy / xx, 0.0)
        return (fixed, cost) if cost >= 0 else (max(y / n, 0.0), 0.0)

    def _margin(self, bucket: np.intp) -> float:
        """Return the relative cost to add for planning, and for errors of the plain time."""
        return _PLANNING_COST + _TIME_ERROR / math.sqrt(self._num_plain[bucket])

    def _best(self, likely_M: F64, num_rows: int, fixed: float, cost: float) -> int:
        """Return how many of the drafts, likeliest first, give the most tokens per time; 0 if all
        numbers are worse than none.
        """
        if not len(likely_M):
            return 0
        tokens = num_rows + np.cumsum(likely_M)
        time = num_rows * (1 + fixed) + cost * np.arange(1, len(likely_M) + 1)
        best = int(np.argmax(tokens / time))
        return best + 1 if tokens[best] > time[best] else 0
