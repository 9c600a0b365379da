"""What a result means for the requests of its plan: new tokens, endings, and the message that says so."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from moeserve.engine.columns import Slots
from moeserve.engine.draft import Flight
from moeserve.engine.plan import I32, StepResult
from moeserve.engine.residents import Residents
from moeserve.messages import FinishReason, Logprobs, PromptLogprobs, StepOutput

NO_TOKEN = -1


def ended_rows(rids: list[int], reason: int) -> StepOutput:
    """An output whose rows only end their requests."""
    count = len(rids)
    return StepOutput(
        rids=np.array(rids, "<i8").tobytes(),
        tokens=np.full(count, NO_TOKEN, "<i4").tobytes(),
        finish=np.full(count, reason, np.uint8).tobytes(),
    )


def settle_flight(residents: Residents, flight: Flight, result: StepResult, eos_ids: Collection[int]) -> StepOutput:
    """Appends the tokens of a step, ends requests that are complete or failed, and reports all of it.

    Rows whose tenant left since the plan was made count for nothing: a preempted request computes that token
    again, an ended or aborted one has had its ending.
    """
    columns, samples = residents.columns, flight.plan.samples_R
    errors = _fail(residents, flight, result.failed) if result.failed else {}
    live = columns.generation[flight.slots] == flight.generation
    slots, tokens = flight.slots[live & samples], result.tokens_S[live[samples]]
    known = columns.known[slots] + 1
    columns.tokens[slots, known - 1] = tokens
    columns.known[slots] = known
    finish = np.zeros(len(slots), np.uint8)
    finish[known > columns.last[slots]] = FinishReason.LENGTH
    stop_ids = _stop(residents, slots, tokens, finish, eos_ids)
    cached, logprobs, prompt_logprobs = _extras(residents, flight.slots[live], slots, result)
    rids = columns.rid[slots]
    for row in np.flatnonzero(finish).tolist():
        residents.leave(int(slots[row]))
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


def _fail(residents: Residents, flight: Flight, failed: dict[int, str]) -> dict[int, str]:
    """Ends the requests that could not be sampled; returns their ids and messages."""
    columns = residents.columns
    tenant = dict(zip(flight.slots.tolist(), flight.generation.tolist(), strict=True))
    errors = {}
    for slot, message in failed.items():
        if columns.generation[slot] == tenant[slot]:
            errors[residents.leave(slot).rid] = message
    return errors


def _stop(
    residents: Residents, slots: Slots, tokens: I32, finish: np.ndarray, eos_ids: Collection[int]
) -> dict[int, int]:
    """Marks rows that a stop token ended; returns which one, where it is not the model's own end token."""
    columns, stop_ids = residents.columns, {}
    for row in residents.stops.hits(slots, tokens):
        slot, token = int(slots[row]), int(tokens[row])
        if columns.known[slot] >= columns.min_known[slot]:
            finish[row] = FinishReason.STOP
            if token not in eos_ids:
                stop_ids[int(columns.rid[slot])] = token
    return stop_ids


def _extras(
    residents: Residents, live: Slots, sampled: Slots, result: StepResult
) -> tuple[dict[int, int], dict[int, Logprobs], dict[int, PromptLogprobs]]:
    """What only some rows carry, by request id: cache hits (once), logprobs, prompt logprobs."""
    columns = residents.columns
    cached = {}
    for slot in sampled[columns.unsent[sampled]].tolist():
        request = columns.request(slot)
        cached[request.rid] = request.num_cached or 0
        request.was_sent = True
        columns.unsent[slot] = False
    if not (result.logprobs or result.prompt_logprobs):
        return cached, {}, {}
    rid_of = dict(zip(live.tolist(), columns.rid[live].tolist(), strict=True))
    logprobs = {rid_of[slot]: row for slot, row in result.logprobs.items() if slot in rid_of}
    prompt_logprobs = {}
    for slot, part in result.prompt_logprobs.items():
        if slot in rid_of and (new := _unscored(residents, slot, part)) is not None:
            prompt_logprobs[rid_of[slot]] = new
    return cached, logprobs, prompt_logprobs


def _unscored(residents: Residents, slot: int, part: PromptLogprobs) -> PromptLogprobs | None:
    """The rows that were not sent before a preemption made them come again."""
    request = residents.columns.request(slot)
    known = max(0, request.num_scored - part.start)
    if known >= len(part.rows):
        return None
    request.num_scored = part.start + len(part.rows)
    return PromptLogprobs(part.start + known, part.rows[known:]) if known else part
