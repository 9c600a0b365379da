"""From the load of each expert to a placement that evens out the ranks' load, changing as little as possible.

Pure functions over all layers at once; equal input gives equal output. An expert's tokens are assumed to spread evenly
over its replicas. arrange.py arranges experts on ranks; this module decides which experts and ranks it is given.

L layers, E experts, R ranks, e physical experts per rank, S = R * e.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve.moe.placement.arrange import EMPTY, F64, I32, arrange, keep_places
from moeserve.moe.placement.placement import Placement


@dataclass(frozen=True, slots=True)
class Hosts:
    """`num` hosts with equally many ranks, in order of rank. num_groups: groups of experts that the router chooses as a
    whole; where the numbers divide evenly, each group stays on one host, replicas included."""

    num: int = 1
    num_groups: int = 1

    def apply(self, num_experts: int, num_ranks: int) -> bool:
        """Returns whether groups can be sharded evenly; otherwise the placement ignores hosts."""
        return (
            self.num > 1
            and num_ranks % self.num == 0
            and self.num_groups % self.num == 0
            and num_experts % self.num_groups == 0
        )


ONE_HOST = Hosts()


def rank_loads(load_LE: F64, placement: Placement) -> F64:
    """Returns what each rank would compute, [L, R], in the unit of load_LE (tokens, say)."""
    loads_LRe = _physical_loads(load_LE, placement).reshape(placement.num_layers, placement.num_ranks, -1)
    load_LR: F64 = loads_LRe.sum(2)
    return load_LR


def balance(load_LR: F64) -> F64:
    """Returns mean over fullest rank per layer [L]: 1 is even, 1 / R is everything on one rank; 1 without any load."""
    peak_L = load_LR.max(1)
    even_L: F64 = np.divide(load_LR.mean(1), peak_L, out=np.ones_like(peak_L), where=peak_L > 0)
    return even_L


def moved(old: Placement, new: Placement) -> NDArray[np.int64]:
    """Returns how many experts each rank has to fetch, [R]: those it has in `new` and not in `old`."""
    fetched = np.zeros(new.num_ranks, np.int64)
    for rank in range(new.num_ranks):
        now, before = (_on_rank(p, rank) for p in (new, old))
        fetched[rank] = (now & ~before).sum()
    return fetched


def solve(load_LE: F64, current: Placement, version: int, hosts: Hosts = ONE_HOST) -> Placement:
    """Returns a placement for this load with the ranks and sizes of `current`: no layer gets worse, few experts move.

    In layers that change, new replicas of an expert go to different ranks, unless there are more of them than ranks.
    """
    load_LE = np.asarray(load_LE, np.float64)
    assert load_LE.shape == (current.num_layers, current.num_experts), (load_LE.shape, current.experts_LS.shape)
    rows_LS = current.experts_LS
    if hosts.apply(current.num_experts, current.num_ranks):
        new_LS = _per_host(load_LE, current, hosts)
    else:
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


def _physical_loads(load_LE: F64, placement: Placement) -> F64:
    share_LE = load_LE / placement.counts()
    return np.take_along_axis(share_LE, placement.experts_LS, axis=1)


def _on_rank(placement: Placement, rank: int) -> NDArray[np.bool_]:
    """Returns which experts a rank has, [L, E]; none if the placement has no such rank."""
    there = np.zeros((placement.num_layers, placement.num_experts), np.bool_)
    if rank < placement.num_ranks:
        experts = placement.experts_LS.reshape(placement.num_layers, placement.num_ranks, -1)[:, rank]
        np.put_along_axis(there, experts, True, axis=1)
    return there


def _per_host(load_LE: F64, current: Placement, hosts: Hosts) -> I32:
    """Arranges groups on hosts as experts on ranks, then each host's experts on its ranks."""
    layers, num_experts = load_LE.shape
    ranks_per_host, group_size = current.num_ranks // hosts.num, num_experts // hosts.num_groups
    group_load_LG = load_LE.reshape(layers, hosts.num_groups, group_size).sum(2)
    groups_per_host = hosts.num_groups // hosts.num
    groups_LG = arrange(group_load_LG, _groups_now(current, hosts), hosts.num, groups_per_host)
    groups_LHg = groups_LG.reshape(layers, hosts.num, groups_per_host)
    parts = []
    for host in range(hosts.num):
        firsts = np.sort(groups_LHg[:, host], axis=1) * group_size
        mine_Le = (firsts[:, :, None] + np.arange(group_size)).reshape(layers, -1)
        index_LE = np.full((layers, num_experts), EMPTY, np.int32)  # expert -> its place in mine
        np.put_along_axis(index_LE, mine_Le, np.arange(mine_Le.shape[1], dtype=np.int32)[None], axis=1)
        here_LS = np.split(current.experts_LS, hosts.num, axis=1)[host]
        rows_LS = arrange(
            np.take_along_axis(load_LE, mine_Le, axis=1),
            np.take_along_axis(index_LE, here_LS, axis=1),
            ranks_per_host,
            current.experts_per_rank,
        )
        parts.append(np.take_along_axis(mine_Le, rows_LS, axis=1))
    return np.concatenate(parts, axis=1).astype(np.int32)


def _groups_now(current: Placement, hosts: Hosts) -> I32:
    """Returns each group on the host that has most of its experts, [L, hosts * num_groups], the rest EMPTY."""
    layers, groups = current.num_layers, np.arange(hosts.num_groups)
    group_LHS = (current.experts_LS // (current.num_experts // hosts.num_groups)).reshape(layers, hosts.num, -1)
    count_LGH = (group_LHS[:, None] == groups[None, :, None, None]).sum(3)
    rows_LHG = np.full((layers, hosts.num, hosts.num_groups), EMPTY, np.int32)
    np.put_along_axis(rows_LHG, count_LGH.argmax(2)[:, None], groups[None, None].astype(np.int32), axis=1)
    return rows_LHG.reshape(layers, -1)
