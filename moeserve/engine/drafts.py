"""Process the drafts of a step: unschedule the rejected ones, and store those for the next step."""

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.draft_policy import DraftPolicy
from moeserve.engine.kv_cache_manager import KVCacheManager
from moeserve.engine.plan import I32, Slots, StepResult
from moeserve.engine.requests import InputBatch
from moeserve.engine.step_state import InFlightStep


def settle_drafts(
    kv_manager: KVCacheManager,
    policy: DraftPolicy,
    in_flight: InFlightStep,
    live_R: NDArray[np.bool_],
    result: StepResult,
) -> dict[int, tuple[int, int]]:
    """Unschedule the positions of rejected drafts, and set the drafts of the next step.

    Return (verified, accepted) drafts by request id.

    live_R: whether the row's request still holds its slot.
    """
    batch = kv_manager.batch
    plan = in_flight.plan
    slots_R = in_flight.slots
    live_S = live_R[plan.samples_R]
    verified: dict[int, tuple[int, int]] = {}
    slots = slots_R[live_R & plan.samples_R]
    if plan.num_drafts_R is not None and result.counts_S is not None:
        num_drafts = plan.num_drafts_R[plan.samples_R][live_S]
        num_accepted = result.counts_S[live_S] - 1  # the last token of a row is no draft
        end = batch.scheduled[slots]
        kept = batch.known[slots] - 1  # the position of the newest token is not computed yet
        kv_manager.release_rejected(slots, end, kept)
        batch.scheduled[slots] = kept
        policy.update(slots, num_drafts, num_accepted)
        num_known_before = (plan.starts_R + plan.counts_R)[live_R & plan.samples_R] - num_drafts
        num_appended = batch.known[slots] - num_known_before
        # Drafts after the end of the answer do not count.
        num_counted = np.minimum(num_accepted, num_appended)
        has_drafts = num_drafts > 0
        pairs = zip(num_drafts[has_drafts].tolist(), num_counted[has_drafts].tolist(), strict=True)
        verified = dict(zip(batch.rid[slots[has_drafts]].tolist(), pairs, strict=True))
    if result.num_drafts_S is not None:
        num_usable = policy.limit(slots, result.num_drafts_S[live_S])
        batch.num_drafts[slots] = num_usable * batch.speculates[slots]
    return verified


def drafts_among(batch: InputBatch, slots: Slots) -> I32:
    """Return how many of the scheduled tokens of each slot are drafts."""
    num_beyond_known = batch.scheduled[slots] - batch.known[slots]
    num_drafts: I32 = np.where(batch.num_drafts[slots] > 0, num_beyond_known, 0)
    return num_drafts
