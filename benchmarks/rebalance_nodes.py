"""Experts on several machines: keeping router groups on one node, or spreading replicas over nodes.

    python -m benchmarks.rebalance_nodes

This is pure computation with simulated ranks. The router is DeepSeek-V3's (256 experts in 8 groups;
a token's 8 experts come from its best 4 groups), and the same router without groups. Experts have
Zipf weights, in another order in each layer; a token draws its experts by weight. Placements are
computed from one half of the tokens and judged on the other half.

Policies:

    flat      ignores nodes
    spread    puts an expert's replicas on different nodes
    groups    keeps each router group on one node, always
    auto      the engine's: groups in layers where the nodes' loads stay even enough, else spread

Prints and saves for each, among others:

    copies_per_token   copies sent to nodes other than the token's own, one for each node that has
                       one of its experts
    experts_lost       largest share of experts that one node alone has
    replicated_lost    mean number of experts whose replicas are all on one node
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import parser, save
from benchmarks.rebalance import zipf
from moeserve.moe.placement.placement import Nodes, Placement
from moeserve.moe.placement.solve import balance, count_fetched, rank_loads, solve

LAYERS = 8
TOKENS = 8192
EXPERTS = 256
GROUPS = 8
KEPT = 4
TOP_K = 8
SHAPES = ((8, 2, 32), (8, 4, 32), (64, 8, 64))  # (ranks, nodes, redundant experts)


def main() -> None:
    flags = parser(__doc__)
    args = flags.parse_args()
    cases = [(s, groups) for groups in (GROUPS, 1) for s in (0.5, 1.0)]
    save("rebalance-nodes", args, [result for case in cases for result in compared(*case)])


def compared(s: float, groups: int) -> list[dict[str, Any]]:
    """Return the figures of all shapes under one load, for each policy that applies."""
    rng = np.random.default_rng(0)
    share_LE = zipf(LAYERS, EXPERTS, s, rng)
    seen, later = ([chosen(row, groups, rng) for row in share_LE] for _ in range(2))
    results = []
    for ranks, nodes, redundant in SHAPES:
        policies = {"flat": Nodes(), "spread": Nodes(nodes)}
        if groups > 1:
            policies |= {
                "groups": Nodes(nodes, groups, min_balance=0),
                "auto": Nodes(nodes, groups),
            }
        results.append(
            {
                "zipf_s": s,
                "router_groups": groups,
                "ranks": ranks,
                "nodes": nodes,
                "redundant": redundant,
            }
            | {
                name: judged(policy, ranks, nodes, redundant, seen, later)
                for name, policy in policies.items()
            }
        )
    return results


def chosen(
    share_E: NDArray[np.float64], groups: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return the experts of each token, [T, K].

    They are drawn by weight, without repetition, from the groups whose two best scores sum highest.
    """
    score_TE = np.log(share_E) + rng.gumbel(size=(TOKENS, EXPERTS))
    if groups > 1:
        score_TGe = score_TE.reshape(TOKENS, groups, -1)
        best_TG = np.sort(score_TGe, 2)[:, :, -2:].sum(2)
        left_TG = best_TG.argsort(1)[:, :-KEPT]
        np.put_along_axis(score_TGe, left_TG[:, :, None], -np.inf, axis=1)
    return score_TE.argpartition(-TOP_K, axis=1)[:, -TOP_K:]


def judged(
    policy: Nodes,
    ranks: int,
    nodes: int,
    redundant: int,
    seen: list[NDArray[np.int64]],
    later: list[NDArray[np.int64]],
) -> dict[str, Any]:
    seen_LE, later_LE = (
        np.stack([np.bincount(ids.ravel(), minlength=EXPERTS) for ids in tokens]).astype(np.float64)
        for tokens in (seen, later)
    )
    start = Placement.initial(LAYERS, EXPERTS, ranks, redundant, policy)
    began_s = time.perf_counter()
    new = solve(seen_LE, start, 1, policy)
    took_s = time.perf_counter() - began_s
    load_LR = rank_loads(later_LE, new)
    on_LNE = np.stack(
        [
            [
                np.bincount(row, minlength=EXPERTS)
                for row in new.experts_LS[layer].reshape(nodes, -1)
            ]
            for layer in range(LAYERS)
        ]
    )
    counts_LNE = new.counts()[:, None]
    lost_LN = (on_LNE == counts_LNE).sum(2)
    return {
        "mean_over_fullest_rank": round(float(balance(load_LR).mean()), 4),
        "mean_over_fullest_node": round(
            float(balance(load_LR.reshape(LAYERS, nodes, -1).sum(2)).mean()), 4
        ),
        "copies_per_token": round(
            float(np.mean([copies(new, layer, later[layer], nodes) for layer in range(LAYERS)])), 3
        ),
        "experts_lost": round(float(lost_LN.max(1).mean()) / EXPERTS, 4),
        "replicated_lost": round(
            float(((on_LNE == counts_LNE) & (counts_LNE > 1)).sum(2).mean()), 2
        ),
        "experts_fetched_share": round(
            float(count_fetched(start, new).sum() / new.experts_LS.size), 4
        ),
        "solve_s": round(took_s, 4),
    }


def copies(placement: Placement, layer: int, ids_TK: NDArray[np.int64], nodes: int) -> float:
    """Return how many copies of a token leave its node, on average.

    Replicas take turns as in the engine.
    """
    physical_EN, counts_E = placement.replicas(layer)
    turn_T1 = np.arange(len(ids_TK))[:, None] // nodes + layer  # by index on the token's node
    place_TK = physical_EN[ids_TK, turn_T1 % counts_E[ids_TK]]
    node_TK = place_TK * nodes // placement.experts_LS.shape[1]
    reached_TN = (node_TK[:, :, None] == np.arange(nodes)).any(1)
    own_T = np.arange(len(ids_TK)) % nodes
    reached_TN[np.arange(len(ids_TK)), own_T] = False
    return float(reached_TN.sum(1).mean())


if __name__ == "__main__":
    main()
