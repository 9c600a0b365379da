"""How many tokens a step computes of prompts beside requests that decode.

A step lasts as long as its tokens take, and every stream waits for it. With a target for the time
between tokens (scheduler.itl_target_ms), a step with both computes as much of the prompts as keeps
it within the target, by the measured times of the steps before: what prompts may add over what they
added last, times their tokens then. No token changes, since a request's results do not depend on
how its prompt was cut. There is no clock: the same calls have the same results.
"""

from moeserve.engine.plan import StepPlan
from moeserve.engine.requests import InputBatch

_FIRST = 32.0  # prompt tokens beside decodes before any time is known
_LEAST = 8.0  # so that a prompt ends, whatever the target
# times the tokens of the step before at most and at least: single times are disturbed
_MORE = 1.5
_LESS = 0.5
_MARGIN = 0.85  # of the target: what the host adds between steps, and times that vary
_DECODE_RATE = 0.2  # of the average of steps without prompts


class TokenBudget:
    """The tokens of a step. most: beside nobody who decodes."""

    def __init__(self, most: int, target_us: float) -> None:
        self._most = most
        self._target_us = target_us * _MARGIN
        self._prompt_tokens = float(_FIRST)
        self._decode_us = 0.0

    def tokens(self, batch: InputBatch) -> int:
        """Returns the budget of the next step of the running requests."""
        slots = batch.order
        decoding = slots[batch.known[slots] - batch.scheduled[slots] <= 1]
        if not len(decoding):
            return self._most
        return min(
            self._most, len(decoding) + int(batch.drafts[decoding].sum() + self._prompt_tokens)
        )

    def note(self, plan: StepPlan, took_us: int) -> None:
        """Takes the time of a step."""
        if took_us <= 0:
            return
        known_R = plan.counts_R if plan.num_drafts_R is None else plan.counts_R - plan.num_drafts_R
        prompt_tokens = int(known_R[known_R > 1].sum())
        if not prompt_tokens:
            self._decode_us += (took_us - self._decode_us) * (
                _DECODE_RATE if self._decode_us else 1.0
            )
        elif (known_R == 1).any():
            self._adapt(prompt_tokens, took_us)

    def _adapt(self, prompt_tokens: int, took_us: int) -> None:
        change = max(self._target_us - self._decode_us, 0.0) / max(took_us - self._decode_us, 1.0)
        # The end of a prompt has few tokens, and says little about many.
        if change < 1 or prompt_tokens >= self._prompt_tokens * _LESS:
            wanted = prompt_tokens * min(max(change, _LESS), _MORE)
            self._prompt_tokens = min(max(wanted, _LEAST), self._most)
