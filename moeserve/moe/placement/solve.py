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

L: layers. E: experts. R: ranks (or nodes). e: places of each. n: places of each before the change.
S: places of all ranks. N: nodes. Q: all nodes of all layers. G: groups of experts. A: layers that
are not finished.
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
MIN_GAIN = 1e-3  # of a swap, as a part of the mean load
MIN_GROUP_GAIN = 0.02  # the same for swaps of groups between nodes, which move all of their experts
# Swaps end at this highest load / mean load, because future load differs from the counted one by
# more than that.
MAX_IMBALANCE = 1.01


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


def count_fetched(old: Placement, new: Placement) -> NDArray[np.int64]:
    """Return how many experts each rank must fetch, [R]: it has them in `new`, but not in `old`."""
    fetched_LRE = _is_on_rank(new)
    num_common = min(new.num_ranks, old.num_ranks)
    fetched_LRE[:, :num_common] &= ~_is_on_rank(old)[:, :num_common]
    fetched: NDArray[np.int64] = fetched_LRE.sum((0, 2))
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
    experts_LS = current.experts_LS
    new_LS = arrange(load_LE, experts_LS, current.num_ranks, current.experts_per_rank, nodes)
    new = Placement(
        version,
        current.num_ranks,
        current.num_experts,
        keep_places(experts_LS, new_LS, current.num_ranks),
    )
    better_L = rank_loads(load_LE, new).max(1) < rank_loads(load_LE, current).max(1) * (1 - 1e-9)
    experts_LS = np.where(better_L[:, None], new.experts_LS, experts_LS)
    return Placement(version, current.num_ranks, current.num_experts, experts_LS)


def rescaled(
    placement: Placement,
    num_ranks: int,
    redundant: int,
    version: int,
    load_LE: F64 | None = None,
    nodes: Nodes = ONE_NODE,
    old_ranks: Sequence[int] | None = None,
) -> Placement:
    """Return the placement for another number of ranks. Ranks that stay keep experts if possible.

    redundant: see `Placement.initial`.
    load_LE: None: all experts have the same load.
    old_ranks: the old number of each rank, or -1 for a new one; None: ranks keep their numbers.
    """
    per_rank = -(-(placement.num_experts + redundant) // num_ranks)
    if load_LE is None:
        load_LE = np.ones((placement.num_layers, placement.num_experts))
    layers = placement.num_layers
    old_per_rank = placement.experts_per_rank
    old_rank_R = np.arange(num_ranks) if old_ranks is None else np.asarray(old_ranks)
    stays_R = (old_rank_R >= 0) & (old_rank_R < placement.num_ranks)
    width = max(per_rank, old_per_rank)
    old_LRe = np.full((layers, num_ranks, width), EMPTY, np.int32)
    old_LRe[:, stays_R, :old_per_rank] = placement.experts_LS.reshape(layers, -1, old_per_rank)[
        :, old_rank_R[stays_R]
    ]
    experts_LS = arrange(load_LE, old_LRe.reshape(layers, -1), num_ranks, per_rank, nodes)
    return Placement(
        version, num_ranks, placement.num_experts, keep_places(old_LRe, experts_LS, num_ranks)
    )


def _is_on_rank(placement: Placement) -> Bool:
    """Return which experts each rank has, [L, R, E]."""
    experts_LRe = placement.experts_LS.reshape(placement.num_layers, placement.num_ranks, -1)
    is_on_rank: Bool = _count(experts_LRe, placement.num_experts) > 0
    return is_on_rank


def arrange(
    load_LE: F64, now_LS: I32, num_ranks: int, per_rank: int, nodes: Nodes = ONE_NODE
) -> I32:
    """Return the expert of each place, [L, num_ranks * per_rank].

    now_LS: the expert of each place now, [L, num_ranks * any number]. Places may be EMPTY, and
    experts may be missing.
    """
    layers = len(load_LE)
    nodes = nodes.for_ranks(num_ranks)
    if nodes.num_groups > 1 and nodes.min_balance > 0:
        return _arrange_by_balance(load_LE, now_LS, num_ranks, per_rank, nodes)
    if nodes.num_groups > 1:
        return _arrange_groups(load_LE, now_LS, num_ranks, per_rank, nodes)
    counts_LE = replica_counts(load_LE, num_ranks * per_rank, num_ranks)
    replica_load_LE = load_LE / counts_LE
    if nodes.num_nodes > 1:
        return _arrange_on_nodes(
            now_LS, counts_LE, replica_load_LE, num_ranks, per_rank, nodes.num_nodes
        )
    experts_LRe = _assign(
        now_LS.reshape(layers, num_ranks, -1), counts_LE, replica_load_LE, per_rank
    )
    return experts_LRe.reshape(layers, -1)


def _arrange_groups(load_LE: F64, now_LS: I32, num_ranks: int, per_rank: int, nodes: Nodes) -> I32:
    """Return the same as `arrange`, with each group of experts on one node.

    Each node has experts of its own then, so the ranks of a node are arranged as if the node were a
    layer.
    """
    layers, num_experts = load_LE.shape
    ranks_per_node = num_ranks // nodes.num_nodes
    now_LNn = now_LS.reshape(layers, nodes.num_nodes, -1)
    is_on_node_LNE = _groups_on_nodes(load_LE, now_LNn, nodes.num_groups)
    load_QE = (load_LE[:, None] * is_on_node_LNE).reshape(-1, num_experts)
    counts_QE = replica_counts(
        load_QE,
        ranks_per_node * per_rank,
        ranks_per_node,
        present_LE=is_on_node_LNE.reshape(-1, num_experts),
    )
    replica_load_QE = load_QE / np.maximum(counts_QE, 1)
    experts_QRe = _assign(
        now_LS.reshape(len(counts_QE), ranks_per_node, -1), counts_QE, replica_load_QE, per_rank
    )
    return experts_QRe.reshape(layers, -1)


def _arrange_on_nodes(
    now_LS: I32,
    counts_LE: I32,
    replica_load_LE: F64,
    num_ranks: int,
    per_rank: int,
    num_nodes: int,
) -> I32:
    """Return the same as `arrange`, with the replicas of an expert on different nodes.

    Replicas are assigned to nodes, then those of each node to its ranks. Finally, ranks of all
    nodes swap experts.
    """
    layers, num_experts = counts_LE.shape
    ranks_per_node = num_ranks // num_nodes
    limit_LE = -(-counts_LE // num_nodes)  # of replicas of an expert on one node
    experts_LNe = _assign(
        now_LS.reshape(layers, num_nodes, -1),
        counts_LE,
        replica_load_LE,
        ranks_per_node * per_rank,
        limit_LE=limit_LE,
    )
    counts_QE = _count(experts_LNe, num_experts).reshape(-1, num_experts).astype(np.int32)
    experts_QRe = _assign(
        now_LS.reshape(len(counts_QE), ranks_per_node, -1),
        counts_QE,
        replica_load_LE.repeat(num_nodes, 0),
        per_rank,
    )
    experts_LRe = experts_QRe.reshape(layers, num_ranks, per_rank)
    _swap(
        experts_LRe,
        replica_load_LE,
        np.ones_like(limit_LE),
        node_limit_LE=limit_LE,
        num_nodes=num_nodes,
    )
    return experts_LRe.reshape(layers, -1)


def _arrange_by_balance(
    load_LE: F64, now_LS: I32, num_ranks: int, per_rank: int, nodes: Nodes
) -> I32:
    """Return the same as `arrange`. Groups are kept on nodes only in those layers in which that
    leaves the nodes a balance of at least `nodes.min_balance`.
    """
    now_LNn = now_LS.reshape(len(load_LE), nodes.num_nodes, now_LS.shape[1] // nodes.num_nodes)
    load_LN = (load_LE[:, None] * _groups_on_nodes(load_LE, now_LNn, nodes.num_groups)).sum(2)
    is_balanced_L = balance(load_LN) >= nodes.min_balance
    new_LS = np.empty((len(load_LE), num_ranks * per_rank), np.int32)
    for layers_L, num_groups in ((is_balanced_L, nodes.num_groups), (~is_balanced_L, 1)):
        if layers_L.any():
            layer_nodes = Nodes(nodes.num_nodes, num_groups, min_balance=0)
            new_LS[layers_L] = arrange(
                load_LE[layers_L], now_LS[layers_L], num_ranks, per_rank, layer_nodes
            )
    return new_LS


def _groups_on_nodes(load_LE: F64, now_LNn: I32, num_groups: int) -> NDArray[np.int64]:
    """Divide the groups among the nodes, the same number each.

    Return 1 for the experts of each node, and 0 for others, [L, N, E].
    """
    layers, num_experts = load_LE.shape
    num_nodes = now_LNn.shape[1]
    size = num_experts // num_groups
    counts_LNE = _count(now_LNn, num_experts)
    # The node that now has the most experts of a group
    home_LG = counts_LNE.reshape(layers, num_nodes, num_groups, size).sum(3).argmax(1)
    now_LNG = np.where(
        home_LG[:, None] == np.arange(num_nodes)[:, None],
        np.arange(num_groups, dtype=np.int32),
        EMPTY,
    )
    # Assign groups to nodes as experts are assigned to ranks, without replicas.
    groups_LNe = _assign(
        now_LNG,
        np.ones((layers, num_groups), np.int32),
        load_LE.reshape(layers, num_groups, size).sum(2),
        num_groups // num_nodes,
        min_gain=MIN_GROUP_GAIN,
    )
    return _count(groups_LNe, num_groups).repeat(size, axis=2)


def _assign(
    now_LRn: I32,
    counts_LE: I32,
    replica_load_LE: F64,
    per_rank: int,
    *,
    limit_LE: I32 | None = None,
    min_gain: float = MIN_GAIN,
) -> I32:
    """Return the experts of each rank, [L, R, per_rank], with few changes.

    counts_LE: the replicas of each expert. replica_load_LE: the load of one replica.
    limit_LE: the limit of replicas of an expert on one rank, if possible (default: 1).
    """
    limit_LE = np.ones_like(counts_LE) if limit_LE is None else limit_LE
    experts_LRe = _filled_places(
        _without_surplus(now_LRn, counts_LE, replica_load_LE, limit_LE), per_rank
    )
    _fill(experts_LRe, counts_LE, replica_load_LE, limit_LE)
    _spread(experts_LRe, replica_load_LE, limit_LE)
    _swap(experts_LRe, replica_load_LE, limit_LE, min_gain=min_gain)
    return experts_LRe


def replica_counts(
    load_LE: F64, num_places: int, max_replicas: int, present_LE: NDArray[np.int64] | None = None
) -> I32:
    """Return the number of replicas of each expert, [L, E].

    Each expert gets one, and the rest go to the expert with the highest load per replica; of equal
    experts, to the lower one. No expert gets more than `max_replicas` before all have that many.
    present_LE: 0 for experts to omit, the same number in each layer.

    loads [6, 3, 1], 5 places -> [3, 1, 1]
    """
    counts_LE = (
        np.ones_like(load_LE, np.int32) if present_LE is None else present_LE.astype(np.int32)
    )
    num_experts = int(counts_LE.sum(1).max(initial=1))
    rows = np.arange(len(load_LE))
    for placed in range(num_experts, num_places):
        limit = max(max_replicas, placed // num_experts + 1)
        chosen = np.where(
            (counts_LE > 0) & (counts_LE < limit), load_LE / np.maximum(counts_LE, 1), -1.0
        ).argmax(1)
        counts_LE[rows, chosen] += 1
    return counts_LE


def keep_places(old: I32, new_LS: I32, num_ranks: int) -> I32:
    """Reorder the experts of each rank, so that experts that were there before keep their place.

    old: [L, S] or [L, R, n], where the number of places per rank may be another one than in `new`.

    one rank, [0, 1, 2] before, {2, 3, 0} now -> [0, 3, 2]
    """
    layers = new_LS.shape[0]
    old_LRe = old.reshape(layers, num_ranks, -1)
    new_LRe = new_LS.reshape(layers, num_ranks, -1).copy()
    per_rank = new_LRe.shape[2]
    if old_LRe.shape[2] == per_rank:
        has_changed_LR = (old_LRe != new_LRe).any(2)
    else:
        has_changed_LR = np.ones((layers, num_ranks), np.bool_)
    for layer, rank in np.argwhere(has_changed_LR):
        old_experts = old_LRe[layer, rank].tolist()[:per_rank]
        unplaced = new_LRe[layer, rank].tolist()
        experts = [EMPTY] * per_rank
        for place, expert in enumerate(old_experts):
            if expert in unplaced:
                unplaced.remove(expert)
                experts[place] = expert
        rest = iter(unplaced)
        new_LRe[layer, rank] = [next(rest) if expert == EMPTY else expert for expert in experts]
    return new_LRe.reshape(layers, -1)


def _of_places(values_LE: F64, experts_LRe: I32) -> F64:
    """Return the value of each place's expert, [L, R, e]; 0 for EMPTY."""
    layers = experts_LRe.shape[0]
    flat = np.take_along_axis(values_LE, np.maximum(experts_LRe, 0).reshape(layers, -1), axis=1)
    return np.where(experts_LRe == EMPTY, 0.0, flat.reshape(experts_LRe.shape))


def _count(experts_LRe: I32, num_experts: int) -> NDArray[np.int64]:
    """Return how often each rank has each expert, [L, R, E]."""
    layers, ranks, _ = experts_LRe.shape
    width = num_experts + 1  # column 0 counts EMPTY places
    starts_LR1 = np.arange(1, layers * ranks * width, width).reshape(layers, ranks, 1)
    counts = np.bincount((experts_LRe + starts_LR1).ravel(), minlength=layers * ranks * width)
    return counts.reshape(layers, ranks, width)[:, :, 1:].astype(np.int64)


def _repeats(experts_LRe: I32, limit_LE: I32) -> Bool:
    """Return which places hold a replica too many, [L, R, e]: earlier places of the same rank have
    as many replicas of the expert as `limit_LE` allows.
    """
    layers, _, width = experts_LRe.shape
    is_earlier = np.tri(width, k=-1, dtype=np.bool_)
    is_same = (experts_LRe[..., :, None] == experts_LRe[..., None, :]) & is_earlier
    limit = np.take_along_axis(limit_LE, np.maximum(experts_LRe, 0).reshape(layers, -1), axis=1)
    repeats: Bool = (is_same.sum(3) >= limit.reshape(experts_LRe.shape)) & (experts_LRe != EMPTY)
    return repeats


def _without_surplus(now_LRn: I32, counts_LE: I32, replica_load_LE: F64, limit_LE: I32) -> I32:
    """Return the places, emptied until no expert has more than its count.

    Replicas too many on one rank are removed first, then replicas on the rank with the highest
    load.
    """
    experts_LRn = now_LRn.copy()
    layers, num_experts = counts_LE.shape
    flat_LS = experts_LRn.reshape(layers, -1)
    surplus_LE = np.maximum(_count(experts_LRn, num_experts).sum(1) - counts_LE, 0)
    layers_L = np.arange(layers)
    repeats = _repeats(experts_LRn, limit_LE).reshape(layers, -1) if surplus_LE.any() else None
    while surplus_LE.any():
        assert repeats is not None
        loads = np.repeat(
            _of_places(replica_load_LE, experts_LRn).sum(2), experts_LRn.shape[2], axis=1
        )
        # Any replica too many on one rank has a higher score than any other place.
        score = loads + np.where(repeats, 2 * loads.max() + 1, 0)
        has_surplus = np.take_along_axis(surplus_LE, np.maximum(flat_LS, 0), axis=1) > 0
        score[(flat_LS == EMPTY) | ~has_surplus] = -1
        place_L = score.argmax(1)
        is_found = score[layers_L, place_L] >= 0
        layer = layers_L[is_found]
        place = place_L[is_found]
        surplus_LE[layer, flat_LS[layer, place]] -= 1
        flat_LS[layer, place] = EMPTY
    return experts_LRn


def _filled_places(experts_LRn: I32, per_rank: int) -> I32:
    """Return `per_rank` places of each rank: those that are not EMPTY, in order, then EMPTY ones.

    If the number of places stays the same, they are returned as they are.
    """
    layers, ranks, width = experts_LRn.shape
    if width == per_rank:
        return experts_LRn
    order = np.argsort(experts_LRn == EMPTY, axis=2, kind="stable")[:, :, :per_rank]
    out = np.full((layers, ranks, per_rank), EMPTY, np.int32)
    out[:, :, : order.shape[2]] = np.take_along_axis(experts_LRn, order, axis=2)
    return out


def _fill(experts_LRe: I32, counts_LE: I32, replica_load_LE: F64, limit_LE: I32) -> None:
    """Place missing replicas, heaviest first, on the rank with the lowest load that has a free
    place and may have the expert.
    """
    count_LRE = _count(experts_LRe, counts_LE.shape[1])
    missing_LE = counts_LE - count_LRE.sum(1)
    load_LR = _of_places(replica_load_LE, experts_LRe).sum(2)
    free_LR = (experts_LRe == EMPTY).sum(2)
    active = np.flatnonzero(missing_LE.sum(1))  # layers with missing replicas
    while len(active):
        expert = np.where(missing_LE[active] > 0, replica_load_LE[active], -1.0).argmax(1)
        full_AR = count_LRE[active, :, expert] >= limit_LE[active, expert][:, None]
        # A rank that has as many replicas of the expert as allowed is chosen only if no other one
        # has a free place.
        cost = load_LR[active] + np.where(full_AR, 2 * load_LR.max() + replica_load_LE.max() + 1, 0)
        rank = np.where(free_LR[active] > 0, cost, np.inf).argmin(1)
        place = (experts_LRe[active, rank] == EMPTY).argmax(1)
        experts_LRe[active, rank, place] = expert
        count_LRE[active, rank, expert] += 1
        load_LR[active, rank] += replica_load_LE[active, expert]
        free_LR[active, rank] -= 1
        missing_LE[active, expert] -= 1
        active = active[missing_LE[active].any(1)]


def _spread(experts_LRe: I32, replica_load_LE: F64, limit_LE: I32) -> None:
    """Swap each replica too many of a rank with an expert of another rank, the one whose load is
    nearest. Neither rank may get a replica too many by the swap.
    """
    for layer in np.flatnonzero(_repeats(experts_LRe, limit_LE).any((1, 2))):
        experts_Re = experts_LRe[layer]
        replica_load_E = replica_load_LE[layer]
        limit_E = limit_LE[layer]
        swapped = True
        while swapped:
            swapped = False
            for rank, place in np.argwhere(_repeats(experts_Re[None], limit_E[None])[0]):
                expert = experts_Re[rank, place]
                full_RE = _count(experts_Re[None], len(replica_load_E))[0] >= limit_E
                fits_Re = ~full_RE[:, expert][:, None] & ~full_RE[rank][experts_Re]
                if fits_Re.any():
                    distance = np.where(
                        fits_Re, np.abs(replica_load_E[experts_Re] - replica_load_E[expert]), np.inf
                    )
                    other = np.unravel_index(distance.argmin(), distance.shape)
                    experts_Re[rank, place] = experts_Re[other]
                    experts_Re[other] = expert
                    swapped = True
                    break


def _swap(
    experts_LRe: I32,
    replica_load_LE: F64,
    limit_LE: I32,
    *,
    min_gain: float = MIN_GAIN,
    node_limit_LE: I32 | None = None,
    num_nodes: int = 1,
) -> None:
    """Swap experts of the rank with the highest load, while that lowers it.

    Each swap is the one that leaves the lowest load on the fuller of both ranks. limit_LE: the
    limit of replicas of an expert on one rank. node_limit_LE: the same for each of `num_nodes`
    nodes.
    """
    layers, ranks, _ = experts_LRe.shape
    if ranks == 1:
        return
    count_LRE = _count(experts_LRe, replica_load_LE.shape[1])
    place_load_LRe = _of_places(replica_load_LE, experts_LRe)
    load_LR = place_load_LRe.sum(2)
    mean_L = load_LR.mean(1)
    active = np.arange(layers)
    for _ in range(MAX_SWAPS):
        active = active[load_LR[active].max(1) > MAX_IMBALANCE * mean_L[active]]
        fullest = load_LR[active].argmax(1)
        peak = load_LR[active, fullest]
        # For a swap of each place of the fullest rank with each place of each rank, [A, e, R, e]:
        # the load that moves, and the higher load of the two ranks afterwards.
        moves = place_load_LRe[active, fullest][:, :, None, None] - place_load_LRe[active][:, None]
        after = np.maximum(
            peak[:, None, None, None] - moves, load_LR[active][:, None, :, None] + moves
        )
        may_swap = _may_swap(experts_LRe[active], fullest, count_LRE[active], limit_LE[active])
        after[~may_swap] = np.inf
        if node_limit_LE is not None:
            may_swap = _may_swap(
                experts_LRe[active], fullest, count_LRE[active], node_limit_LE[active], num_nodes
            )
            after[~may_swap] = np.inf
        flat = after.reshape(len(active), math.prod(after.shape[1:]))
        best = flat.argmin(1)
        is_worth_it = flat[np.arange(len(active)), best] < peak - min_gain * mean_L[active]
        active = active[is_worth_it]
        fullest = fullest[is_worth_it]
        if not len(active):
            return
        place, other, other_place = np.unravel_index(best[is_worth_it], after.shape[1:])
        given = experts_LRe[active, fullest, place]
        received = experts_LRe[active, other, other_place]
        experts_LRe[active, fullest, place] = received
        experts_LRe[active, other, other_place] = given
        moved_A = replica_load_LE[active, given] - replica_load_LE[active, received]
        place_load_LRe[active, fullest, place] -= moved_A
        place_load_LRe[active, other, other_place] += moved_A
        load_LR[active, fullest] -= moved_A
        load_LR[active, other] += moved_A
        count_LRE[active, fullest, given] -= 1
        count_LRE[active, other, received] -= 1
        count_LRE[active, fullest, received] += 1
        count_LRE[active, other, given] += 1


def _may_swap(
    experts_ARe: I32,
    fullest: NDArray[np.int64],
    count_ARE: NDArray[np.int64],
    limit_AE: I32,
    num_nodes: int = 0,
) -> Bool:
    """Return which swaps leave neither side more replicas of an expert than `limit_AE`.

    [A, e, R, e]: the place of rank `fullest` in each layer, and the other rank and its place.

    num_nodes: 0: the two sides are ranks. Otherwise they are the nodes of these ranks, and any swap
    within a node is allowed.
    """
    layers = np.arange(len(fullest))
    ranks, per_rank = experts_ARe.shape[1:]
    side = fullest
    ranks_per_side = 1
    if num_nodes:
        ranks_per_side = ranks // num_nodes
        side = fullest // ranks_per_side
        count_ARE = count_ARE.reshape(
            len(fullest), num_nodes, ranks_per_side, limit_AE.shape[1]
        ).sum(2)
    own_Ae = experts_ARe[layers, fullest]
    all_AS = experts_ARe.reshape(len(fullest), ranks * per_rank)
    # Whether the other side may get the fullest side's expert, and the other way round
    own_limit = np.take_along_axis(limit_AE, own_Ae, axis=1)[:, :, None]
    other_may = count_ARE[layers[:, None], :, own_Ae] < own_limit
    fullest_may = np.take_along_axis(count_ARE[layers, side] < limit_AE, all_AS, axis=1).reshape(
        experts_ARe.shape
    )
    fits: Bool = other_may.repeat(ranks_per_side, axis=2)[:, :, :, None] & fullest_may[:, None]
    if num_nodes:
        fits |= (np.arange(ranks) // ranks_per_side == side[:, None])[:, None, :, None]
    return fits
