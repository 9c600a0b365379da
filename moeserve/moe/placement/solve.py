"""Compute a placement that balances the ranks' load, and that moves as few experts as possible.

1. `replica_counts`: each expert gets one place. Further places go, one by one, to the expert with
   the highest load per replica.
2. Surplus replicas are removed from the ranks with the highest load. Missing replicas, heaviest
   first, are placed on the rank with the lowest load that has a free place and lacks the expert.
3. The rank with the highest load swaps an expert with another rank, as long as that lowers the
   higher load of the two.
4. `keep_places`: experts that stay on a rank keep their place, so that their weights need not move.

With several nodes, this is done twice: first for nodes instead of ranks, then for the ranks of each
node. If the router's groups of experts are kept on nodes, groups are divided among the nodes, and
each node replicates its own experts. In layers in which that would leave the nodes too uneven,
experts are placed on any node instead.

These are pure, deterministic functions over all layers at once. An expert's tokens are assumed to
be divided evenly among its replicas. A place is the slot of one physical expert; while a placement
is computed, it may be EMPTY.

L: layers. E: experts. R: ranks (or nodes). e: places of each. S = R * e: places. N: nodes.
G: groups. A: layers that are not finished.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeserve.moe.placement.placement import ONE_NODE, Nodes, Placement

I32 = NDArray[np.int32]
F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

EMPTY = -1
MAX_SWAPS = 1000  # per layer; a few dozen are usual
WORTH = 1e-3  # least gain of a swap, as a part of the mean load
GROUP_WORTH = 0.02  # the same for swaps of groups between nodes, which move all of their experts
# Swaps end at this highest load / mean load, because future load differs from the counted one by
# more than that.
EVEN = 1.01


def rank_loads(load_LE: F64, placement: Placement) -> F64:
    """Return the load of each rank, [L, R], in the unit of load_LE (e.g. tokens)."""
    loads_LS = np.take_along_axis(load_LE / placement.counts(), placement.experts_LS, axis=1)
    load_LR: F64 = loads_LS.reshape(placement.num_layers, placement.num_ranks, -1).sum(2)
    return load_LR


def balance(load_LR: F64) -> F64:
    """Return mean load / highest load of each layer, [L].

    1: even, or no load. 1 / R: all load on one rank.
    """
    peak_L = load_LR.max(1)
    even_L: F64 = np.divide(load_LR.mean(1), peak_L, out=np.ones_like(peak_L), where=peak_L > 0)
    return even_L


def moved(old: Placement, new: Placement) -> NDArray[np.int64]:
    """Return how many experts each rank must fetch, [R]: those in `new` that are not in `old`."""
    now_LRE, before_LRE = (_on_ranks(placement) for placement in (new, old))
    both = min(new.num_ranks, old.num_ranks)
    now_LRE[:, :both] &= ~before_LRE[:, :both]
    fetched: NDArray[np.int64] = now_LRE.sum((0, 2))
    return fetched


def solve(load_LE: F64, current: Placement, version: int, nodes: Nodes = ONE_NODE) -> Placement:
    """Return a better placement for this load, with the ranks and sizes of `current`.

    No layer gets worse, and few experts move. In layers that change, the replicas of an expert are
    on different ranks, unless there are more replicas than ranks. If groups are not kept on nodes,
    they are also on different nodes.
    """
    load_LE = np.asarray(load_LE, np.float64)
    assert load_LE.shape == (current.num_layers, current.num_experts), (
        load_LE.shape,
        current.experts_LS.shape,
    )
    rows_LS = current.experts_LS
    new_LS = arrange(load_LE, rows_LS, current.num_ranks, current.experts_per_rank, nodes)
    new = Placement(
        version,
        current.num_ranks,
        current.num_experts,
        keep_places(rows_LS, new_LS, current.num_ranks),
    )
    better_L = rank_loads(load_LE, new).max(1) < rank_loads(load_LE, current).max(1) * (1 - 1e-9)
    rows_LS = np.where(better_L[:, None], new.experts_LS, rows_LS)
    return Placement(version, current.num_ranks, current.num_experts, rows_LS)


def rescaled(
    placement: Placement,
    num_ranks: int,
    redundant: int,
    version: int,
    load_LE: F64 | None = None,
    nodes: Nodes = ONE_NODE,
    was: Sequence[int] | None = None,
) -> Placement:
    """Return the placement for another number of ranks. Ranks that stay keep experts if possible.

    redundant: see `Placement.initial`. load_LE: None: all experts have the same load. was: the old
    number of each rank, or -1 for a new one; None: the last ranks are added or removed.
    """
    per_rank = -(-(placement.num_experts + redundant) // num_ranks)
    if load_LE is None:
        load_LE = np.ones((placement.num_layers, placement.num_experts))
    layers = placement.num_layers
    old_per_rank = placement.experts_per_rank
    was_R = np.arange(num_ranks) if was is None else np.asarray(was)
    stays_R = (was_R >= 0) & (was_R < placement.num_ranks)
    width = max(per_rank, old_per_rank)
    old_LRe = np.full((layers, num_ranks, width), EMPTY, np.int32)
    old_LRe[:, stays_R, :old_per_rank] = placement.experts_LS.reshape(layers, -1, old_per_rank)[
        :, was_R[stays_R]
    ]
    rows_LS = arrange(load_LE, old_LRe.reshape(layers, -1), num_ranks, per_rank, nodes)
    return Placement(
        version, num_ranks, placement.num_experts, keep_places(old_LRe, rows_LS, num_ranks)
    )


def _on_ranks(placement: Placement) -> Bool:
    """Return which experts each rank has, [L, R, E]."""
    rows_LRe = placement.experts_LS.reshape(placement.num_layers, placement.num_ranks, -1)
    on_ranks: Bool = _count(rows_LRe, placement.num_experts) > 0
    return on_ranks


def arrange(
    load_LE: F64, now_LS: I32, num_ranks: int, per_rank: int, nodes: Nodes = ONE_NODE
) -> I32:
    """Return the expert of each place, [L, num_ranks * per_rank].

    now_LS: the expert of each place now, [L, num_ranks * any number]. Places may be EMPTY, and
    experts may be missing.
    """
    layers, num_experts = load_LE.shape
    nodes = nodes.under(num_ranks)
    if nodes.groups > 1 and nodes.even > 0:
        return _where_even(load_LE, now_LS, num_ranks, per_rank, nodes)
    ranks = num_ranks // nodes.number  # per node; from here on, each node is treated as a layer
    now_LNn = now_LS.reshape(layers, nodes.number, -1)
    if nodes.groups > 1:
        here_LNE = _share_groups(load_LE, now_LNn, nodes.groups)
        load_LE = (load_LE[:, None] * here_LNE).reshape(-1, num_experts)
        counts_LE = replica_counts(
            load_LE, ranks * per_rank, ranks, here_LNE.reshape(-1, num_experts)
        )
        share_LE = load_LE / np.maximum(counts_LE, 1)
    else:
        counts_LE = replica_counts(load_LE, num_ranks * per_rank, num_ranks)
        share_LE = load_LE / counts_LE
    if nodes.number == 1 or nodes.groups > 1:
        rows_LRe = _deal(now_LS.reshape(len(counts_LE), ranks, -1), counts_LE, share_LE, per_rank)
        return rows_LRe.reshape(layers, -1)
    most_LE = -(-counts_LE // nodes.number)
    on_nodes_LNE = _count(
        _deal(now_LNn, counts_LE, share_LE, ranks * per_rank, most_LE=most_LE), num_experts
    )
    counts_NE = on_nodes_LNE.reshape(-1, num_experts).astype(np.int32)
    rows_NRe = _deal(
        now_LS.reshape(len(counts_NE), ranks, -1),
        counts_NE,
        share_LE.repeat(nodes.number, 0),
        per_rank,
    )
    rows_LRe = rows_NRe.reshape(layers, num_ranks, per_rank)
    _swap(rows_LRe, share_LE, np.ones_like(most_LE), on_node_LE=most_LE, nodes=nodes.number)
    return rows_LRe.reshape(layers, -1)


def _where_even(load_LE: F64, now_LS: I32, num_ranks: int, per_rank: int, nodes: Nodes) -> I32:
    """Return the same as `arrange`, with groups kept on nodes only in layers whose nodes have a
    balance of at least `nodes.even` with that.
    """
    now_LNn = now_LS.reshape(len(load_LE), nodes.number, now_LS.shape[1] // nodes.number)
    load_LN = (load_LE[:, None] * _share_groups(load_LE, now_LNn, nodes.groups)).sum(2)
    even_L = balance(load_LN) >= nodes.even
    new_LS = np.empty((len(load_LE), num_ranks * per_rank), np.int32)
    for layers_L, groups in ((even_L, nodes.groups), (~even_L, 1)):
        if layers_L.any():
            there = Nodes(nodes.number, groups, even=0)
            new_LS[layers_L] = arrange(
                load_LE[layers_L], now_LS[layers_L], num_ranks, per_rank, there
            )
    return new_LS


def _share_groups(load_LE: F64, now_LNn: I32, groups: int) -> NDArray[np.int64]:
    """Divide the groups among the nodes, the same number each.

    Return 1 for the experts of each node, and 0 for others, [L, N, E].
    """
    layers, num_experts = load_LE.shape
    number = now_LNn.shape[1]
    size = num_experts // groups
    home_LG = _count(now_LNn, num_experts).reshape(layers, number, groups, size).sum(3).argmax(1)
    now_LNG = np.where(
        home_LG[:, None] == np.arange(number)[:, None], np.arange(groups, dtype=np.int32), EMPTY
    )
    load_LG = load_LE.reshape(layers, groups, size).sum(2)
    one_LG = np.ones((layers, groups), np.int32)
    return _count(
        _deal(now_LNG, one_LG, load_LG, groups // number, worth=GROUP_WORTH), groups
    ).repeat(size, axis=2)


def _deal(
    now_LRn: I32,
    counts_LE: I32,
    share_LE: F64,
    per_rank: int,
    *,
    most_LE: I32 | None = None,
    worth: float = WORTH,
) -> I32:
    """Return the experts of each rank, [L, R, per_rank], with few changes.

    counts_LE: the replicas of each expert. share_LE: the load of one replica. most_LE: the most
    replicas of an expert on one rank, if possible (default: 1).
    """
    most_LE = np.ones_like(counts_LE) if most_LE is None else most_LE
    rows_LRe = _first(_without_surplus(now_LRn, counts_LE, share_LE, most_LE), per_rank)
    _fill(rows_LRe, counts_LE, share_LE, most_LE)
    _spread(rows_LRe, share_LE, most_LE)
    _swap(rows_LRe, share_LE, most_LE, worth=worth)
    return rows_LRe


def replica_counts(
    load_LE: F64, num_places: int, most: int, here_LE: NDArray[np.int64] | None = None
) -> I32:
    """Return the number of replicas of each expert, [L, E].

    Each expert gets one, and the rest go to the expert with the highest load per replica; of equal
    experts, to the lower one. No expert gets more than `most` before all have that many. here_LE: 0
    for experts to omit, the same number in each layer.

    loads [6, 3, 1], 5 places -> [3, 1, 1]
    """
    counts_LE = np.ones_like(load_LE, np.int32) if here_LE is None else here_LE.astype(np.int32)
    num_experts = int(counts_LE.sum(1).max(initial=1))
    rows = np.arange(len(load_LE))
    for placed in range(num_experts, num_places):
        limit = max(most, placed // num_experts + 1)
        chosen = np.where(
            (counts_LE > 0) & (counts_LE < limit), load_LE / np.maximum(counts_LE, 1), -1.0
        ).argmax(1)
        counts_LE[rows, chosen] += 1
    return counts_LE


def keep_places(old: I32, new_LS: I32, num_ranks: int) -> I32:
    """Reorder the experts of each rank, so that those that were there before keep their place.

    old: [L, places] or [L, R, places of a rank], possibly with another number of places per rank.

    one rank, [0, 1, 2] before, {2, 3, 0} now -> [0, 3, 2]
    """
    layers = new_LS.shape[0]
    old_LRe = old.reshape(layers, num_ranks, -1)
    new_LRe = new_LS.reshape(layers, num_ranks, -1).copy()
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
    """Return the value of each place's expert, [L, R, e]; 0 for EMPTY."""
    layers = rows_LRe.shape[0]
    flat = np.take_along_axis(values_LE, np.maximum(rows_LRe, 0).reshape(layers, -1), axis=1)
    return np.where(rows_LRe == EMPTY, 0.0, flat.reshape(rows_LRe.shape))


def _count(rows_LRe: I32, num_experts: int) -> NDArray[np.int64]:
    """Return how often each rank has each expert, [L, R, E]."""
    layers, ranks, _ = rows_LRe.shape
    width = num_experts + 1  # column 0 counts EMPTY places
    starts_LR1 = np.arange(1, layers * ranks * width, width).reshape(layers, ranks, 1)
    counts = np.bincount((rows_LRe + starts_LR1).ravel(), minlength=layers * ranks * width)
    return counts.reshape(layers, ranks, width)[:, :, 1:].astype(np.int64)


def _repeats(rows_LRe: I32, most_LE: I32) -> Bool:
    """Return which places hold a replica too many: earlier places of the same rank have as many of
    the expert as allowed.
    """
    layers, _, width = rows_LRe.shape
    earlier = np.tri(width, k=-1, dtype=np.bool_)
    same = (rows_LRe[..., :, None] == rows_LRe[..., None, :]) & earlier
    most = np.take_along_axis(most_LE, np.maximum(rows_LRe, 0).reshape(layers, -1), axis=1)
    repeats: Bool = (same.sum(3) >= most.reshape(rows_LRe.shape)) & (rows_LRe != EMPTY)
    return repeats


def _without_surplus(now_LRn: I32, counts_LE: I32, share_LE: F64, most_LE: I32) -> I32:
    """Empty places until no expert has more than its count: first replicas too many on one rank,
    then those on the rank with the highest load.
    """
    rows = now_LRn.copy()
    layers, num_experts = counts_LE.shape
    flat = rows.reshape(layers, -1)
    surplus_LE = np.maximum(_count(rows, num_experts).sum(1) - counts_LE, 0)
    every = np.arange(layers)
    repeats = _repeats(rows, most_LE).reshape(layers, -1) if surplus_LE.any() else None
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
    """Return per_rank places of each rank: the first that are not EMPTY. If the number of places
    stays the same, they keep their order.
    """
    layers, ranks, width = rows_LRn.shape
    if width == per_rank:
        return rows_LRn
    order = np.argsort(rows_LRn == EMPTY, axis=2, kind="stable")[:, :, :per_rank]
    out = np.full((layers, ranks, per_rank), EMPTY, np.int32)
    out[:, :, : order.shape[2]] = np.take_along_axis(rows_LRn, order, axis=2)
    return out


def _fill(rows_LRe: I32, counts_LE: I32, share_LE: F64, most_LE: I32) -> None:
    """Place missing replicas, heaviest first, on the rank with the lowest load that has a free
    place and may have the expert.
    """
    have_LRE = _count(rows_LRe, counts_LE.shape[1])
    missing_LE = counts_LE - have_LRE.sum(1)
    load_LR = _per_rank(share_LE, rows_LRe).sum(2)
    free_LR = (rows_LRe == EMPTY).sum(2)
    active = np.flatnonzero(missing_LE.sum(1))
    while len(active):
        expert = np.where(missing_LE[active] > 0, share_LE[active], -1.0).argmax(1)
        full_AR = have_LRE[active, :, expert] >= most_LE[active, expert][:, None]
        cost = load_LR[active] + np.where(full_AR, 2 * load_LR.max() + share_LE.max() + 1, 0)
        rank = np.where(free_LR[active] > 0, cost, np.inf).argmin(1)
        place = (rows_LRe[active, rank] == EMPTY).argmax(1)
        rows_LRe[active, rank, place] = expert
        have_LRE[active, rank, expert] += 1
        load_LR[active, rank] += share_LE[active, expert]
        free_LR[active, rank] -= 1
        missing_LE[active, expert] -= 1
        active = active[missing_LE[active].any(1)]


def _spread(rows_LRe: I32, share_LE: F64, most_LE: I32) -> None:
    """Swap each replica too many of a rank with another rank's expert whose load is nearest."""
    for layer in np.flatnonzero(_repeats(rows_LRe, most_LE).any((1, 2))):
        rows_Re = rows_LRe[layer]
        share_E = share_LE[layer]
        most_E = most_LE[layer]
        swapped = True
        while swapped:
            swapped = False
            for rank, place in np.argwhere(_repeats(rows_Re[None], most_E[None])[0]):
                expert = rows_Re[rank, place]
                full_RE = _count(rows_Re[None], len(share_E))[0] >= most_E
                fits_Re = ~full_RE[:, expert][:, None] & ~full_RE[rank][rows_Re]
                if fits_Re.any():
                    distance = np.where(fits_Re, np.abs(share_E[rows_Re] - share_E[expert]), np.inf)
                    there = np.unravel_index(distance.argmin(), distance.shape)
                    rows_Re[rank, place] = rows_Re[there]
                    rows_Re[there] = expert
                    swapped = True
                    break


def _swap(
    rows_LRe: I32,
    share_LE: F64,
    most_LE: I32,
    *,
    worth: float = WORTH,
    on_node_LE: I32 | None = None,
    nodes: int = 1,
) -> None:
    """Swap experts of the rank with the highest load, while that lowers it.

    Each swap is the one that leaves the lowest load on the fuller of both ranks. on_node_LE: the
    most replicas of an expert on one of several nodes.
    """
    layers, ranks, _ = rows_LRe.shape
    if ranks == 1:
        return
    have_LRE = _count(rows_LRe, share_LE.shape[1])
    share_LRe = _per_rank(share_LE, rows_LRe)
    load_LR = share_LRe.sum(2)
    mean_L = load_LR.mean(1)
    active = np.arange(layers)
    for _ in range(MAX_SWAPS):
        active = active[load_LR[active].max(1) > EVEN * mean_L[active]]
        full = load_LR[active].argmax(1)
        peak = load_LR[active, full]
        less = (
            share_LRe[active, full][:, :, None, None] - share_LRe[active][:, None]
        )  # [A, e, R, e]
        after = np.maximum(
            peak[:, None, None, None] - less, load_LR[active][:, None, :, None] + less
        )
        after[~_may_swap(rows_LRe[active], full, have_LRE[active], most_LE[active])] = np.inf
        if on_node_LE is not None:
            may_swap = _may_swap(
                rows_LRe[active], full, have_LRE[active], on_node_LE[active], nodes
            )
            after[~may_swap] = np.inf
        flat = after.reshape(len(active), math.prod(after.shape[1:]))
        best = flat.argmin(1)
        gains = flat[np.arange(len(active)), best] < peak - worth * mean_L[active]
        active = active[gains]
        full = full[gains]
        if not len(active):
            return
        i, rank, j = np.unravel_index(best[gains], after.shape[1:])
        a = rows_LRe[active, full, i]
        b = rows_LRe[active, rank, j]
        rows_LRe[active, full, i] = b
        rows_LRe[active, rank, j] = a
        less_A = share_LE[active, a] - share_LE[active, b]
        share_LRe[active, full, i] -= less_A
        share_LRe[active, rank, j] += less_A
        load_LR[active, full] -= less_A
        load_LR[active, rank] += less_A
        have_LRE[active, full, a] -= 1
        have_LRE[active, rank, b] -= 1
        have_LRE[active, full, b] += 1
        have_LRE[active, rank, a] += 1


def _may_swap(
    rows_ARe: I32,
    full: NDArray[np.int64],
    have_ARE: NDArray[np.int64],
    most_AE: I32,
    nodes: int = 0,
) -> Bool:
    """Return which swaps of the ranks `full` leave neither side more replicas than `most_AE`,
    [A, e, R, e].

    nodes: if given, the sides are nodes, and any swap within a node is allowed.
    """
    every = np.arange(len(full))
    ranks, per_rank = rows_ARe.shape[1:]
    side = full
    width = 1
    if nodes:
        width = ranks // nodes
        side = full // width
        have_ARE = have_ARE.reshape(len(full), nodes, width, most_AE.shape[1]).sum(2)
    # [A, e], [A, R * e]
    mine = rows_ARe[every, full]
    theirs = rows_ARe.reshape(len(full), ranks * per_rank)
    there = (
        have_ARE[every[:, None], :, mine] < np.take_along_axis(most_AE, mine, axis=1)[:, :, None]
    )
    here = np.take_along_axis(have_ARE[every, side] < most_AE, theirs, axis=1).reshape(
        rows_ARe.shape
    )
    fits: Bool = there.repeat(width, axis=2)[:, :, :, None] & here[:, None]
    if nodes:
        fits |= (np.arange(ranks) // width == side[:, None])[:, None, :, None]
    return fits
