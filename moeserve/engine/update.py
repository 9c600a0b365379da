"""Applies a step's result to the requests of its plan: new tokens, endings, and the message that reports them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from moeserve.engine.kv_cache_manager import KVCacheManager
from moeserve.engine.plan import I32, InFlightStep, Slots, StepResult
from moeserve.messages import FinishReason, Logprobs, PromptLogprobs, StepOutput

NO_TOKEN = -1


def ended_rows(rids: list[int], reason: int) -> StepOutput:
    """Returns an output whose rows only end their requests."""
    count = len(rids)
    return StepOutput(
        rids=np.array(rids, "<i8").tobytes(),
        tokens=np.full(count, NO_TOKEN, "<i4").tobytes(),
        finish=np.full(count, reason, np.uint8).tobytes(),
    )


def update_from_output(
    kv_manager: KVCacheManager, in_flight: InFlightStep, result: StepResult, eos_ids: Collection[int]
) -> StepOutput:
    """Appends the tokens of a step, ends requests that are complete or failed, and reports all of it.

    Rows are ignored if their request left the slot since the plan was made: a preempted request computes that token
    again, and an ended or aborted one has had its ending.
    """
    batch, samples = kv_manager.batch, in_flight.plan.samples_R
    errors = _fail(kv_manager, in_flight, result.failed) if result.failed else {}
    live = batch.occupancy[in_flight.slots] == in_flight.occupancy
    slots, tokens = in_flight.slots[live & samples], result.tokens_S[live[samples]]
    known = batch.known[slots] + 1
    batch.tokens[slots, known - 1] = tokens
    batch.known[slots] = known
    finish = np.zeros(len(slots), np.uint8)
    finish[known > batch.last[slots]] = FinishReason.LENGTH
    stop_ids = _stop(kv_manager, slots, tokens, finish, eos_ids)
    cached, logprobs, prompt_logprobs = _extras(kv_manager, in_flight.slots[live], slots, result)
    rids = batch.rid[slots]
    for row in np.flatnonzero(finish).tolist():
        kv_manager.free(int(slots[row]))
    if errors:
        rids = np.concatenate((rids, np.array(list(errors), np.int64)))
        tokens = np.concatenate((tokens, np.full(len(errors), NO_TOKEN, np.int32)))
        finish = np.concatenate((finish, np.full(len(errors), FinishReason.ERROR, np.uint8)))
    return StepOutput(
        rids=rids.astype("<i8", copy=False).tobytes(),
        tokens=tokens.astype("<i4", copy=False).tobytes(),
        finish=finish.tobytes(),
        cached=cached,
        stop_ids=stop_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        errors=errors,
    )


def _fail(kv_manager: KVCacheManager, in_flight: InFlightStep, failed: dict[int, str]) -> dict[int, str]:
    """Ends the requests that could not be sampled; returns their ids and messages."""
    batch = kv_manager.batch
    occupancy = dict(zip(in_flight.slots.tolist(), in_flight.occupancy.tolist(), strict=True))
    errors = {}
    for slot, message in failed.items():
        if batch.occupancy[slot] == occupancy[slot]:
            errors[kv_manager.free(slot).rid] = message
    return errors


def _stop(
    kv_manager: KVCacheManager, slots: Slots, tokens: I32, finish: np.ndarray, eos_ids: Collection[int]
) -> dict[int, int]:
    """Marks rows that a stop token ended; returns, by request id, stop tokens that are not the model's end tokens."""
    batch = kv_manager.batch
    stop_ids = {}
    for row in batch.stops.hits(slots, tokens):
        slot, token = int(slots[row]), int(tokens[row])
        if batch.known[slot] >= batch.min_known[slot]:
            finish[row] = FinishReason.STOP
            if token not in eos_ids:
                stop_ids[int(batch.rid[slot])] = token
    return stop_ids


def _extras(
    kv_manager: KVCacheManager, live: Slots, sampled: Slots, result: StepResult
) -> tuple[dict[int, int], dict[int, Logprobs], dict[int, PromptLogprobs]]:
    """Returns, by request id, what only some rows have: cache hits (once), logprobs, prompt logprobs."""
    batch = kv_manager.batch
    cached = {}
    for slot in sampled[batch.unsent[sampled]].tolist():
        request = batch.request(slot)
        cached[request.rid] = request.num_cached or 0
        request.was_sent = True
        batch.unsent[slot] = False
    if not (result.logprobs or result.prompt_logprobs):
        return cached, {}, {}
    rid_of = dict(zip(live.tolist(), batch.rid[live].tolist(), strict=True))
    logprobs = {rid_of[slot]: row for slot, row in result.logprobs.items() if slot in rid_of}
    prompt_logprobs = {}
    for slot, part in result.prompt_logprobs.items():
        if slot in rid_of and (new := _unscored(kv_manager, slot, part)) is not None:
            prompt_logprobs[rid_of[slot]] = new
    return cached, logprobs, prompt_logprobs


def _unscored(kv_manager: KVCacheManager, slot: int, part: PromptLogprobs) -> PromptLogprobs | None:
    """Returns the rows that were not sent before a preemption caused them to be computed again."""
    request = kv_manager.batch.request(slot)
    known = max(0, request.num_scored - part.start)
    if known >= len(part.rows):
        return None
    request.num_scored = part.start + len(part.rows)
    return PromptLogprobs(part.start + known, part.rows[known:]) if known else part
