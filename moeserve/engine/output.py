"""Process a step's result for its requests: new tokens, finish reasons, cache hits and logprobs."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.plan import I32, Slots, StepPlan, StepResult, ranges
from moeserve.engine.requests import InputBatch
from moeserve.messages import FinishReason, Logprobs, PromptLogprobs, StepOutput

NO_TOKEN = -1  # the entry in `StepOutput.tokens` of a request that ends without a token


def append_tokens(
    batch: InputBatch,
    plan: StepPlan,
    slots_R: Slots,
    live_R: NDArray[np.bool_],
    result: StepResult,
    end_ids: frozenset[int],
) -> tuple[Slots, I32, NDArray[np.uint8], dict[int, int]]:
    """Append the tokens of live rows, up to the end of each request, and count them as known.

    Return the slot, the value and the finish reason of each token, and the stop tokens by request
    id.

    live_R: whether the row's request still holds its slot.
    end_ids: the model's own end tokens, which are not returned as stop tokens.
    """
    counts_S = result.counts_S
    tokens = result.tokens_N
    live_S = live_R[plan.samples_R]
    slots = slots_R[live_R & plan.samples_R]
    index = None  # the index of each token in its row, from 0; None: each row has one token
    if counts_S is None:
        tokens = tokens[live_S]
        known = batch.known[slots] + 1
    else:
        tokens = tokens[np.repeat(live_S, counts_S)]
        counts = counts_S[live_S].copy()
        slots = np.repeat(slots, counts)
        index = ranges(np.zeros_like(counts), counts)
        if result.complete:
            is_kept = index < [result.complete.get(slot, len(tokens)) for slot in slots.tolist()]
            slots = slots[is_kept]
            tokens = tokens[is_kept]
            index = index[is_kept]
        known = batch.known[slots] + (index + 1).astype(np.int32)
    batch.tokens[slots, known - 1] = tokens
    finish = np.zeros(len(slots), np.uint8)
    finish[known >= batch.max_total[slots]] = FinishReason.LENGTH
    stop_ids = _apply_stop_ids(batch, slots, tokens, known, finish, end_ids)
    for slot in result.complete:
        last_row = np.flatnonzero(slots == slot)[-1:]  # empty if the request has left the slot
        finish[last_row] = FinishReason.STOP
    if index is not None and finish.any():  # drop the tokens after the end of a request
        num_ends: NDArray[np.int64] = np.cumsum(finish > 0) - (finish > 0)  # before each token
        is_kept = num_ends == num_ends[np.arange(len(slots)) - index]
        slots = slots[is_kept]
        tokens = tokens[is_kept]
        known = known[is_kept]
        finish = finish[is_kept]
    batch.known[slots] = known  # of a repeated slot, the last value remains, which is the largest
    return slots, tokens, finish, stop_ids


def _apply_stop_ids(
    batch: InputBatch,
    slots: Slots,
    tokens: I32,
    known: I32,
    finish: NDArray[np.uint8],
    end_ids: frozenset[int],
) -> dict[int, int]:
    """Set `finish` of the tokens that stop their request. Return the stop tokens by request id,
    without the model's own end tokens.
    """
    stop_ids: dict[int, int] = {}
    ended: set[int] = set()
    for row in batch.stops.hits(slots, tokens):
        slot = int(slots[row])
        token = int(tokens[row])
        if known[row] >= batch.min_known[slot] and slot not in ended:
            ended.add(slot)
            finish[row] = FinishReason.STOP
            if token not in end_ids:
                stop_ids[int(batch.rid[slot])] = token
    return stop_ids


def take_unsent_hits(batch: InputBatch, slots: Slots) -> dict[int, int]:
    """Return the number of cached prompt tokens of requests whose first token this is, by request
    id. Mark them as sent.
    """
    cached: dict[int, int] = {}
    for slot in slots[batch.is_unsent[slots]].tolist():
        request = batch.request(slot)
        cached[request.rid] = request.num_cached or 0
        request.was_sent = True
        batch.is_unsent[slot] = False
    return cached


def take_outputs(
    batch: InputBatch, slots_R: Slots, live_R: NDArray[np.bool_], result: StepResult
) -> tuple[dict[int, list[Logprobs]], dict[int, PromptLogprobs], dict[int, list[bytes]]]:
    """Return logprobs, prompt logprobs and digests by request id.

    Prompt logprobs that were sent before a preemption are omitted when they are computed again.
    Therefore `Request.num_scored` counts the prompt positions whose logprobs were returned.
    """
    logprobs: dict[int, list[Logprobs]] = {}
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    digests: dict[int, list[bytes]] = {}
    if not result.outputs:
        return logprobs, prompt_logprobs, digests
    live = set(slots_R[live_R].tolist())
    for slot, output in result.outputs.items():
        if slot not in live:
            continue
        request = batch.request(slot)
        if output.logprobs:
            logprobs[request.rid] = output.logprobs
        if output.digests:
            digests[request.rid] = output.digests
        if (scored := output.prompt_logprobs) is not None:
            end = scored.start + len(scored.rows)
            start = max(scored.start, request.num_scored)
            if start < end:
                rows = scored.rows[start - scored.start :]
                prompt_logprobs[request.rid] = PromptLogprobs(start, rows)
                request.num_scored = end
    return logprobs, prompt_logprobs, digests


def endings(rids: Sequence[int], finish: int, errors: dict[int, str] | None = None) -> StepOutput:
    """Return the output that ends requests without a token."""
    count = len(rids)
    return StepOutput(
        rids=np.array(rids, "<i8").tobytes(),
        tokens=np.full(count, NO_TOKEN, "<i4").tobytes(),
        finish=np.full(count, finish, np.uint8).tobytes(),
        errors=errors or {},
    )
