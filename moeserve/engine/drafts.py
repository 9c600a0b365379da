"""Process the drafts of a step: unschedule the rejected ones, and store those for the next step."""

import numpy as np
from numpy.typing import NDArray

from moeserve.engine.draft_policy import DraftPolicy
from moeserve.engine.kv_cache_manager import KVCacheManager
from moeserve.engine.plan import StepResult
from moeserve.engine.step_state import InFlightStep


def settle_drafts(
    kv_manager: KVCacheManager,
    policy: DraftPolicy,
    in_flight: InFlightStep,
    live_R: NDArray[np.bool_],
    result: StepResult,
) -> dict[int, tuple[int, int]]:
    """Unschedule the positions of rejected drafts, and set the drafts of the next step.

    live_R: whether the row's request still holds its slot. Return (verified, accepted) drafts by
    request id.
    """
    batch = kv_manager.batch
    plan = in_flight.plan
    slots_R = in_flight.slots
    live_S = live_R[plan.samples_R]
    verified: dict[int, tuple[int, int]] = {}
    slots = slots_R[live_R & plan.samples_R]
    if plan.num_drafts_R is not None and result.counts_S is not None:
        num_drafts = plan.num_drafts_R[plan.samples_R][live_S]
        counts = result.counts_S[live_S]
        end = batch.scheduled[slots]
        kept = batch.known[slots] - 1
        kv_manager.release_rejected(slots, end, kept)
        batch.scheduled[slots] = kept
        policy.update(slots, num_drafts, counts - 1)
        has_drafts = num_drafts > 0
        num_appended = (
            batch.known[slots]
            - (plan.starts_R + plan.counts_R)[live_R & plan.samples_R]
            + num_drafts
        )
        # Drafts after the end of the answer do not count.
        accepted = np.minimum(counts - 1, num_appended)
        pairs = zip(num_drafts[has_drafts].tolist(), accepted[has_drafts].tolist(), strict=True)
        verified = dict(zip(batch.rid[slots[has_drafts]].tolist(), pairs, strict=True))
    if result.drafts_S is not None:
        batch.drafts[slots] = policy.limit(slots, result.drafts_S[live_S]) * batch.speculates[slots]
    return verified
