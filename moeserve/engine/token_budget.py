"""The number of prompt tokens in a step with requests that decode (chunked prefill).

Every stream waits for the whole step, so prompt tokens increase the inter-token latency. With a
target for this latency (scheduler.itl_target_ms), the budget adapts to the measured times of steps:

    next prompt tokens = last prompt tokens * (target - decode time) / (step time - decode time)

The answers do not change, because they do not depend on how a prompt was divided into steps. There
is no clock here: the same calls have the same results.
"""

from moeserve.engine.plan import StepPlan
from moeserve.engine.requests import InputBatch

_INITIAL_PROMPT_TOKENS = 32.0  # per step, before any time is measured
_MIN_PROMPT_TOKENS = 8.0  # lower bound, so that prompts advance whatever the target is
# Bounds of the factor from one step to the next, because single measurements are noisy.
_MAX_CHANGE = 1.5
_MIN_CHANGE = 0.5
_DEVICE_SHARE = 0.85  # share of the target for the device; the rest is for host work and variation
_DECODE_RATE = 0.2  # rate of the moving average over steps without prompts


class TokenBudget:
    """The token budget of each step.

    max_tokens: the budget of a step in which no request decodes.
    """

    def __init__(self, max_tokens: int, target_us: float) -> None:
        self._max_tokens = max_tokens
        self._target_us = target_us * _DEVICE_SHARE
        self._prompt_tokens = float(_INITIAL_PROMPT_TOKENS)
        self._decode_us = 0.0  # average time of steps without prompts

    def tokens(self, batch: InputBatch) -> int:
        """Return the budget of the next step."""
        slots = batch.order
        decoding = slots[batch.known[slots] - batch.scheduled[slots] <= 1]
        if not len(decoding):
            return self._max_tokens
        return min(
            self._max_tokens,
            len(decoding) + int(batch.num_drafts[decoding].sum() + self._prompt_tokens),
        )

    def note(self, plan: StepPlan, took_us: int) -> None:
        """Adapt to the measured time of a step."""
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
        # Do not grow after the small rest of a prompt, which says little about larger chunks.
        if change < 1 or prompt_tokens >= self._prompt_tokens * _MIN_CHANGE:
            wanted = prompt_tokens * min(max(change, _MIN_CHANGE), _MAX_CHANGE)
            self._prompt_tokens = min(max(wanted, _MIN_PROMPT_TOKENS), self._max_tokens)
