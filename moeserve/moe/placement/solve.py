"""From the load of each expert to a placement that evens out the ranks' load, changing as little as possible.

1. `replica_counts`: places beyond one per expert go, one by one, to the expert with the most load per replica.
2. Surplus replicas leave the fullest ranks; missing ones go, heaviest first, to the lightest rank with a free place
   that lacks the expert.
3. The fullest rank swaps an expert with another rank as long as that makes the fuller of the two lighter.
4. `keep_places`: experts that stay on a rank stay in their place, so that their weights need not move.

Pure functions over all layers at once; equal input gives equal output. An expert's tokens are assumed to spread evenly
over its replicas. A place is a physical expert that may be EMPTY for now.

L layers, E experts, R ranks, e places per rank, S = R * e places, A layers still at work.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from moeserve.moe.placement.placement import Placement

I32 = NDArray[np.int32]
F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

EMPTY = -1
MAX_SWAPS = 1000  # per layer; a few dozen are usual
WORTH = 1e-3  # of the mean load: a swap that gains less is not made
EVEN = 1.01  # fullest over mean at which swaps end: the load to come differs by more from the counted one


def rank_loads(load_LE: F64, placement: Placement) -> F64:
    """Returns what each rank would compute, [L, R], in the unit of load_LE (tokens, say)."""
    loads_LS = np.take_along_axis(load_LE / placement.counts(), placement.experts_LS, axis=1)
    load_LR: F64 = loads_LS.reshape(placement.num_layers, placement.num_ranks, -1).sum(2)
    return load_LR


def balance(load_LR: F64) -> F64:
    """Returns mean over fullest rank per layer [L]: 1 is even, 1 / R is everything on one rank; 1 without any load."""
    peak_L = load_LR.max(1)
    even_L: F64 = np.divide(load_LR.mean(1), peak_L, out=np.ones_like(peak_L), where=peak_L > 0)
    return even_L


def moved(old: Placement, new: Placement) -> NDArray[np.int64]:
    """Returns how many experts each rank has to fetch, [R]: those it has in `new` and not in `old`."""
    now_LRE, before_LRE = (_on_ranks(placement) for placement in (new, old))
    both = min(new.num_ranks, old.num_ranks)
    now_LRE[:, :both] &= ~before_LRE[:, :both]
    fetched: NDArray[np.int64] = now_LRE.sum((0, 2))
    return fetched


def solve(load_LE: F64, current: Placement, version: int) -> Placement:
    """Returns a placement for this load with the ranks and sizes of `current`: no layer gets worse, few experts move.

    In layers that change, new replicas of an expert go to different ranks, unless there are more of them than ranks.
    """
    load_LE = np.asarray(load_LE, np.float64)
    assert load_LE.shape == (current.num_layers, current.num_experts), (load_LE.shape, current.experts_LS.shape)
    rows_LS = current.experts_LS
    new_LS = arrange(load_LE, rows_LS, current.num_ranks, current.experts_per_rank)
    new = Placement(version, current.num_ranks, current.num_experts, keep_places(rows_LS, new_LS, current.num_ranks))
    better_L = rank_loads(load_LE, new).max(1) < rank_loads(load_LE, current).max(1) * (1 - 1e-9)
    rows_LS = np.where(better_L[:, None], new.experts_LS, rows_LS)
    return Placement(version, current.num_ranks, current.num_experts, rows_LS)


def rescaled(
    placement: Placement, num_ranks: int, redundant: int, version: int, load_LE: F64 | None = None
) -> Placement:
    """Returns the placement for another number of ranks: ranks in both keep what they can, the last ones come or go.

    redundant: see `Placement.initial`. Without load_LE all experts count alike.
    """
    per_rank = -(-(placement.num_experts + redundant) // num_ranks)
    if load_LE is None:
        load_LE = np.ones((placement.num_layers, placement.num_experts))
    layers, old_per_rank = placement.num_layers, placement.experts_per_rank
    both = min(num_ranks, placement.num_ranks)
    width = max(per_rank, old_per_rank)
    old_LRe = np.full((layers, num_ranks, width), EMPTY, np.int32)
    old_LRe[:, :both, :old_per_rank] = placement.experts_LS.reshape(layers, -1, old_per_rank)[:, :both]
    rows_LS = arrange(load_LE, old_LRe.reshape(layers, -1), num_ranks, per_rank)
    return Placement(version, num_ranks, placement.num_experts, keep_places(old_LRe, rows_LS, num_ranks))


def _on_ranks(placement: Placement) -> Bool:
    """Returns which experts each rank has, [L, R, E]."""
    rows_LRe = placement.experts_LS.reshape(placement.num_layers, placement.num_ranks, -1)
    return _has_expert(rows_LRe, placement.num_experts)


def arrange(load_LE: F64, now_LS: I32, num_ranks: int, per_rank: int) -> I32:
    """Returns the expert in each place, [L, num_ranks * per_rank]. now_LS: where experts are, [L, num_ranks * any
    number], possibly EMPTY and without some experts."""
    layers = load_LE.shape[0]
    counts_LE = replica_counts(load_LE, num_ranks * per_rank, num_ranks)
    share_LE = load_LE / counts_LE
    kept_LRn = _without_surplus(now_LS.reshape(layers, num_ranks, -1), counts_LE, share_LE)
    rows_LRe = _first(kept_LRn, per_rank)
    _fill(rows_LRe, counts_LE, share_LE)
    _spread(rows_LRe, share_LE)
    _swap(rows_LRe, share_LE)
    return rows_LRe.reshape(layers, -1)


def replica_counts(load_LE: F64, num_places: int, most: int) -> I32:
    """Returns the replicas of each expert, [L, E]: one each, the rest where the load per replica is highest; ties go to
    the lower expert. No expert has more than `most` before all have that many.

    loads [6, 3, 1], 5 places -> [3, 1, 1]
    """
    layers, num_experts = load_LE.shape
    counts_LE = np.ones((layers, num_experts), np.int32)
    rows = np.arange(layers)
    for placed in range(num_experts, num_places):
        limit = max(most, placed // num_experts + 1)
        chosen = np.where(counts_LE < limit, load_LE / counts_LE, -1.0).argmax(1)
        counts_LE[rows, chosen] += 1
    return counts_LE


def keep_places(old: I32, new_LS: I32, num_ranks: int) -> I32:
    """Returns the same experts on each rank, those that were there before in their old place. old: [L, places] or
    [L, R, places of a rank], possibly with another number of places per rank.

    one rank, [0, 1, 2] before, {2, 3, 0} now -> [0, 3, 2]
    """
    layers = new_LS.shape[0]
    old_LRe, new_LRe = old.reshape(layers, num_ranks, -1), new_LS.reshape(layers, num_ranks, -1).copy()
    per_rank = new_LRe.shape[2]
    same_width = old_LRe.shape[2] == per_rank
    differ = (old_LRe != new_LRe).any(2) if same_width else np.ones((layers, num_ranks), np.bool_)
    for layer, rank in np.argwhere(differ):
        before = old_LRe[layer, rank].tolist()[:per_rank]
        left = new_LRe[layer, rank].tolist()
        row = [EMPTY] * per_rank
        for place, expert in enumerate(before):
            if expert in left:
                left.remove(expert)
                row[place] = expert
        fill = iter(left)
        new_LRe[layer, rank] = [next(fill) if expert == EMPTY else expert for expert in row]
    return new_LRe.reshape(layers, -1)


def _per_rank(values_LE: F64, rows_LRe: I32) -> F64:
    """Returns the values of the expert in each place, [L, R, e]; 0 for EMPTY."""
    layers = rows_LRe.shape[0]
    flat = np.take_along_axis(values_LE, np.maximum(rows_LRe, 0).reshape(layers, -1), axis=1)
    return np.where(rows_LRe == EMPTY, 0.0, flat.reshape(rows_LRe.shape))


def _has_expert(rows_LRe: I32, num_experts: int) -> Bool:
    """Returns which experts each rank has, [L, R, E]."""
    present = np.zeros((*rows_LRe.shape[:2], num_experts + 1), np.bool_)  # the last one takes what is empty
    np.put_along_axis(present, rows_LRe, True, axis=2)
    return present[:, :, :num_experts]


def _repeats(rows_LRe: I32) -> Bool:
    """Returns which places have the expert of an earlier place of the same rank."""
    width = rows_LRe.shape[2]
    earlier = np.tri(width, k=-1, dtype=np.bool_)
    same = (rows_LRe[..., :, None] == rows_LRe[..., None, :]) & earlier
    repeats: Bool = same.any(3) & (rows_LRe != EMPTY)
    return repeats


def _without_surplus(now_LRn: I32, counts_LE: I32, share_LE: F64) -> I32:
    """Empties places until no expert has more than its count: repeats on one rank first, then on the fullest rank."""
    rows = now_LRn.copy()
    layers, num_experts = counts_LE.shape
    flat = rows.reshape(layers, -1)
    have = np.stack([np.bincount(row + 1, minlength=num_experts + 1)[1:] for row in flat])
    surplus_LE = np.maximum(have - counts_LE, 0)
    every = np.arange(layers)
    repeats = _repeats(rows).reshape(layers, -1) if surplus_LE.any() else None
    while surplus_LE.any():
        assert repeats is not None
        loads = np.repeat(_per_rank(share_LE, rows).sum(2), rows.shape[2], axis=1)
        score = loads + np.where(repeats, 2 * loads.max() + 1, 0)
        excess = np.take_along_axis(surplus_LE, np.maximum(flat, 0), axis=1) > 0
        score[(flat == EMPTY) | ~excess] = -1
        place = score.argmax(1)
        hit = score[every, place] >= 0
        surplus_LE[every[hit], flat[every[hit], place[hit]]] -= 1
        flat[every[hit], place[hit]] = EMPTY
    return rows


def _first(rows_LRn: I32, per_rank: int) -> I32:
    """Returns per_rank places of each rank: the first that are not EMPTY, unmoved where the number stays the same."""
    layers, ranks, width = rows_LRn.shape
    if width == per_rank:
        return rows_LRn
    order = np.argsort(rows_LRn == EMPTY, axis=2, kind="stable")[:, :, :per_rank]
    out = np.full((layers, ranks, per_rank), EMPTY, np.int32)
    out[:, :, : order.shape[2]] = np.take_along_axis(rows_LRn, order, axis=2)
    return out


def _fill(rows_LRe: I32, counts_LE: I32, share_LE: F64) -> None:
    """Puts missing replicas, heaviest first, on the lightest rank with a free place that lacks the expert."""
    num_experts = counts_LE.shape[1]
    have = np.stack([np.bincount(row.ravel() + 1, minlength=num_experts + 1)[1:] for row in rows_LRe])
    missing_LE = counts_LE - have
    load_LR = _per_rank(share_LE, rows_LRe).sum(2)
    free_LR = (rows_LRe == EMPTY).sum(2)
    present = _has_expert(rows_LRe, num_experts)
    active = np.flatnonzero(missing_LE.sum(1))
    while len(active):
        expert = np.where(missing_LE[active] > 0, share_LE[active], -1.0).argmax(1)
        cost = load_LR[active] + np.where(present[active, :, expert], 2 * load_LR.max() + share_LE.max() + 1, 0)
        rank = np.where(free_LR[active] > 0, cost, np.inf).argmin(1)
        place = (rows_LRe[active, rank] == EMPTY).argmax(1)
        rows_LRe[active, rank, place] = expert
        present[active, rank, expert] = True
        load_LR[active, rank] += share_LE[active, expert]
        free_LR[active, rank] -= 1
        missing_LE[active, expert] -= 1
        active = active[missing_LE[active].any(1)]


def _spread(rows_LRe: I32, share_LE: F64) -> None:
    """Swaps away second replicas on one rank, each with the expert of another rank whose load is nearest."""
    for layer in np.flatnonzero(_repeats(rows_LRe).any((1, 2))):
        rows_Re, share_E = rows_LRe[layer], share_LE[layer]
        swapped = True
        while swapped:
            swapped = False
            for rank, place in np.argwhere(_repeats(rows_Re[None])[0]):
                expert, present_RE = rows_Re[rank, place], _has_expert(rows_Re[None], len(share_E))[0]
                fits_Re = ~present_RE[:, expert][:, None] & ~present_RE[rank][rows_Re]
                if fits_Re.any():
                    distance = np.where(fits_Re, np.abs(share_E[rows_Re] - share_E[expert]), np.inf)
                    there = np.unravel_index(distance.argmin(), distance.shape)
                    rows_Re[rank, place], rows_Re[there] = rows_Re[there], expert
                    swapped = True
                    break


def _swap(rows_LRe: I32, share_LE: F64) -> None:
    """The fullest rank swaps the pair of experts that leaves the fuller of both ranks lightest, while that helps."""
    layers, ranks, _ = rows_LRe.shape
    if ranks == 1:
        return
    present = _has_expert(rows_LRe, share_LE.shape[1])
    share_LRe = _per_rank(share_LE, rows_LRe)
    load_LR = share_LRe.sum(2)
    mean_L = load_LR.mean(1)
    active = np.arange(layers)
    for _ in range(MAX_SWAPS):
        active = active[load_LR[active].max(1) > EVEN * mean_L[active]]
        full = load_LR[active].argmax(1)
        peak = load_LR[active, full]
        mine, theirs = rows_LRe[active, full], rows_LRe[active]  # [A, e], [A, R, e]
        less = share_LRe[active, full][:, :, None, None] - share_LRe[active][:, None]  # [A, e, R, e]
        after = np.maximum(peak[:, None, None, None] - less, load_LR[active][:, None, :, None] + less)
        fits_mine = ~present[active[:, None], :, mine]  # [A, e, R]: the other rank lacks what it would get
        fits_theirs = ~present[active, full][np.arange(len(active))[:, None, None], theirs]  # [A, R, e]
        after[~(fits_mine[:, :, :, None] & fits_theirs[:, None])] = np.inf
        flat = after.reshape(len(active), math.prod(after.shape[1:]))
        best = flat.argmin(1)
        gains = flat[np.arange(len(active)), best] < peak - WORTH * mean_L[active]
        active, full = active[gains], full[gains]
        if not len(active):
            return
        i, rank, j = np.unravel_index(best[gains], after.shape[1:])
        a, b = rows_LRe[active, full, i], rows_LRe[active, rank, j]
        rows_LRe[active, full, i], rows_LRe[active, rank, j] = b, a
        less_A = share_LE[active, a] - share_LE[active, b]
        share_LRe[active, full, i] -= less_A
        share_LRe[active, rank, j] += less_A
        load_LR[active, full] -= less_A
        load_LR[active, rank] += less_A
        present[active, full, a] = present[active, rank, b] = False
        present[active, full, b] = present[active, rank, a] = True
