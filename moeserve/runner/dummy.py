"""Dummy steps: for warm-up, to measure memory, and to compile kernels before requests need them.

Their requests have no blocks, so that their writes go to the null block.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from moeserve.config import Limits
from moeserve.engine.plan import BlockDiff, NewRequest, StepPlan
from moeserve.sampling import TokenSampling

PROMPT_LEN = 4  # tokens of the requests that warm up a kind of sampling
MANY_ROWS = 256  # up to so many rows, there is one variant of the attention planner


def dummy_plan(
    num_groups: int, start: int, counts: Sequence[int], new_requests: tuple[NewRequest, ...] = ()
) -> StepPlan:
    """Return a plan whose row i computes counts[i] tokens of slot i from position `start` on. All
    rows sample.
    """
    nothing = np.zeros(0, dtype=np.int32)
    return StepPlan(
        step=0,
        slots_R=np.arange(len(counts), dtype=np.int32),
        starts_R=np.full(len(counts), start, dtype=np.int32),
        counts_R=np.array(counts, dtype=np.int32),
        samples_R=np.ones(len(counts), dtype=np.bool_),
        diffs=(BlockDiff(nothing, nothing, nothing),) * num_groups,
        new_requests=new_requests,
    )


def longest_rows(num_tokens: int, limits: Limits) -> list[int]:
    """Divide tokens (or as many of them as possible) into the longest rows allowed. Return the
    lengths of the rows.

    10 tokens, contexts of up to 5 -> [4, 4, 2]
    """
    max_len = max(1, min(limits.prefill_chunk, limits.max_model_len - 1))
    num_rows = min(limits.max_num_seqs, -(-num_tokens // max_len))
    return [max_len] * (num_rows - 1) + [min(max_len, num_tokens - max_len * (num_rows - 1))]


def largest_step(num_groups: int, limits: Limits) -> StepPlan:
    """Return a plan with the most tokens and the most rows of a step. All rows sample."""
    num_rows = max(1, min(limits.max_num_seqs, limits.max_num_batched_tokens))
    mean_len, num_longer = divmod(limits.max_num_batched_tokens, num_rows)
    max_len = max(1, min(limits.prefill_chunk, limits.max_model_len - 1))
    counts = [min(max_len, mean_len + (row < num_longer)) for row in range(num_rows)]
    return dummy_plan(num_groups, 0, counts)


def kernel_variants(num_groups: int, limits: Limits) -> Iterator[StepPlan]:
    """Yield steps that together compile all variants of the kernels.

    Variants differ in the number of tokens, the lengths of the longest row and its context, and the
    kinds of sampling.
    """
    num_tokens = 1
    while num_tokens < limits.max_num_batched_tokens:
        yield dummy_plan(num_groups, 0, longest_rows(num_tokens, limits))
        num_tokens *= 2
    yield dummy_plan(num_groups, 0, longest_rows(limits.max_num_batched_tokens, limits))
    yield dummy_plan(num_groups, max(0, limits.max_model_len - 2), [1])
    num_rows = MANY_ROWS
    while num_rows < min(limits.max_num_seqs, limits.max_num_batched_tokens):
        num_rows = min(2 * num_rows, limits.max_num_seqs, limits.max_num_batched_tokens)
        yield dummy_plan(num_groups, 0, [1] * num_rows)
    count = max(
        1,
        min(
            PROMPT_LEN,
            limits.prefill_chunk,
            limits.max_num_batched_tokens,
            limits.max_model_len - 1,
        ),
    )
    for sampling in (
        TokenSampling(seed=0, max_tokens=1, temperature=0.0),
        TokenSampling(seed=0, max_tokens=1),
        TokenSampling(seed=0, max_tokens=1, top_k=2, top_p=0.9, min_p=0.1),
        TokenSampling(seed=0, max_tokens=1, repetition_penalty=1.1, logit_bias={0: 1.0}),
        TokenSampling(seed=0, max_tokens=1, logprobs=5, prompt_logprobs=5),
    ):
        yield dummy_plan(
            num_groups,
            0,
            [count],
            (NewRequest(0, np.zeros(count, dtype=np.int32), count, sampling),),
        )
