"""All ranks of a group in this process, on a checkpoint of experts.

A step takes the lowest number that all ranks have prepared and commits it on each. Tokens are
computed with the weights that are in the ranks' slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.experts import ExpertFiles
from moeserve.messages import PlacementResult
from moeserve.models.load_plan import expert_load_plan
from moeserve.moe.all2all.local import LocalAll2All
from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.reference import ReferenceExperts
from moeserve.moe.layer import MoELayer
from moeserve.moe.physical import LogicalToPhysical
from moeserve.moe.placement.placement import Placement
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch
from moeserve.ops.pick import pick_ops
from moeserve.ops.table import Ops
from moeserve.runner.experts import ExpertStore, ReadExpert
from tests.runner.expert_checkpoint import SPEC, D, E

L = 2
K = 3
OPS: dict[torch.dtype, Ops] = {}


def ops_of(dtype: torch.dtype) -> Ops:
    if dtype not in OPS:
        OPS[dtype] = pick_ops("cpu", dtype)
    return OPS[dtype]


def no_router(x_TD: Tensor, num_tokens: int) -> Routing:
    raise AssertionError("rows are routed by the test")


@dataclass
class Rank:
    store: ExpertStore
    layers: list[MoELayer]
    notices: list[PlacementResult] = field(default_factory=list)


class Group:
    """Ranks that hold the experts of the checkpoint in `folder` as `placement` says."""

    def __init__(
        self, folder: Path, placement: Placement, dtype: torch.dtype = torch.float32
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.ops = ops_of(dtype)
        self.files: list[ExpertFiles] = []
        self.ranks = [self.rank(rank, placement) for rank in range(placement.num_ranks)]
        make = torch.Generator().manual_seed(5)
        self.x = torch.randn(L, 9, D, generator=make).to(dtype)
        ids = torch.stack([torch.randperm(E, generator=make)[:K] for _ in range(9 * L)]).to(
            torch.int32
        )
        self.routing = [
            Routing(part, torch.rand(9, K, generator=make)) for part in ids.view(L, 9, K)
        ]

    def reader(self) -> ExpertFiles:
        checkpoint = open_checkpoint(self.folder)
        names = checkpoint.tensors.keys()
        self.files.append(
            ExpertFiles(
                checkpoint, lambda layer, e: expert_load_plan(SPEC, names, layer, [e]), self.dtype
            )
        )
        return self.files[-1]

    def rank(self, rank: int, placement: Placement, read: ReadExpert | None = None) -> Rank:
        files = self.reader()
        layers = []
        for layer in range(L):
            ones = [files.read(layer, expert) for expert in placement.local_experts(layer, rank)]
            weights = ExpertWeights(
                torch.stack([w13 for w13, _ in ones]), torch.stack([w2 for _, w2 in ones])
            )
            kernel = ReferenceExperts(self.ops)
            router: Any = no_router
            all2all = LocalAll2All(placement.experts_per_rank)
            layers.append(
                MoELayer(
                    router,
                    all2all,
                    kernel,
                    kernel.pack(weights),
                    LogicalToPhysical(placement, layer),
                )
            )
        made = Rank(ExpertStore(layers, read or files.read, rank, placement), layers)
        made.store.on_placement_result = made.notices.append
        return made

    def outputs(self) -> Tensor:
        """Return the layers' outputs for the test's tokens.

        They are computed in the slots that the ranks' maps give.
        """
        out = torch.empty_like(self.x)
        for layer in range(L):
            slots = [rank.layers[layer].to_physical(self.routing[layer]) for rank in self.ranks]
            assert all(torch.equal(one.ids_TK, slots[0].ids_TK) for one in slots), (
                "ranks disagree about the slots"
            )
            packed = [one for rank in self.ranks for one in rank.layers[layer].packed]
            kernel = ReferenceExperts(self.ops)
            ubatch = UBatch()
            all2all = LocalAll2All(len(packed))
            ticket = all2all.dispatch(self.x[layer], slots[0], ubatch).wait()
            y = torch.empty_like(ticket.inbound.x)
            kernel.run(ticket.inbound, packed, y)
            all2all.combine(ticket, y, out[layer], ubatch).wait()
        return out

    def prepare(self, placement: Placement) -> None:
        for rank in self.ranks:
            rank.store.prepare(placement.to_table())

    def step(self) -> int:
        agreed = min(rank.store.prepared for rank in self.ranks)
        for rank in self.ranks:
            rank.store.commit(agreed)
        return agreed

    def until_placed(self, each_step: Callable[[], None] = lambda: None) -> list[PlacementResult]:
        """Step until every rank has reported; return the reports."""
        deadline_s = time.monotonic() + 20
        while not all(rank.notices for rank in self.ranks):
            assert time.monotonic() < deadline_s, [rank.store.prepared for rank in self.ranks]
            self.step()
            each_step()
            time.sleep(0.0005)
        return [rank.notices.pop(0) for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.store.close()
        for files in self.files:
            files.close()


def shuffled(like: Placement, version: int, seed: int) -> Placement:
    """Return a random placement, another for each layer; ranks may hold an expert twice."""
    rng = np.random.default_rng(seed)
    slots = like.experts_LS.shape[1]
    rows = [np.concatenate((np.arange(E), rng.integers(0, E, slots - E))) for _ in range(L)]
    return Placement(
        version,
        like.num_ranks,
        E,
        np.stack([rng.permutation(row) for row in rows]).astype(np.int32),
    )
