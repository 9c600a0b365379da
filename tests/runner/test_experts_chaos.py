"""Experts on the move while everything that can happen happens, at random."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeserve.messages import PlacementTable
from moeserve.moe.placement.placement import Placement
from moeserve.runner import experts
from moeserve.runner.experts import ReadExpert
from tests.runner.expert_checkpoint import E, write_experts
from tests.runner.expert_group import Group, L, shuffled


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "CPU_SHARE", 1.0)
    monkeypatch.setattr(experts, "BYTES_PER_S", 1e12)


class Chaos:
    """Places reach ranks at different times, votes are two steps old when they are carried out,
    ranks carry them out in any order, disks fail and recover, groups are formed anew in the middle.
    """

    def __init__(self, group: Group, seed: int) -> None:
        self.chance = random.Random(seed)
        self.group = group
        self.start = group.ranks[0].store._placement
        self.exchange: list[list[PlacementTable]] = [[] for _ in group.ranks]
        self.votes = [0, 0]
        self.version = self.joins = 0
        for rank in group.ranks:
            rank.store._read = self.flaky(rank.store._read)

    def flaky(self, read: ReadExpert) -> ReadExpert:
        def one(layer: int, expert: int, work: Callable[[int], None]) -> tuple[Tensor, Tensor]:
            if self.chance.random() < 0.02:
                raise OSError("bad sector")
            return read(layer, expert, work)

        return one

    def table(self) -> PlacementTable:
        self.version += 1
        return shuffled(self.start, self.version, seed=self.chance.randrange(999)).to_table()

    def step(self) -> None:
        if self.chance.random() < 0.1:
            table = self.table()
            for box in self.exchange:
                box.append(table)
        for rank, box in zip(self.group.ranks, self.exchange, strict=True):
            if box and self.chance.random() < 0.3:
                rank.store.prepare(box.pop(0))
        self.votes.append(min(rank.store.prepared for rank in self.group.ranks))
        agreed = self.votes.pop(0)
        for rank in self.chance.sample(self.group.ranks, len(self.group.ranks)):
            rank.store.commit(agreed)

    def join(self) -> None:
        """One rank is a step ahead when the group breaks; afterwards plans of the old epoch are run
        again.
        """
        self.joins += 1
        ahead, *others = self.chance.sample(self.group.ranks, len(self.group.ranks))
        ahead.store.commit(self.votes[0])
        authority = self.table()
        for rank in (ahead, *others):
            while True:
                try:
                    rank.store.load_all(authority)
                    break
                except OSError:
                    pass
        for box in self.exchange:
            box.clear()
        for rank in others:
            for agreed in self.votes:
                rank.store.commit(agreed)
        self.votes = [rank.store.prepared for rank in self.group.ranks[:2]]


@pytest.mark.parametrize("seed", range(6))
def test_any_interleaving_leaves_all_ranks_alike(tmp_path: Path, seed: int) -> None:
    write_experts(tmp_path, torch.float32, fused=True)
    group = Group(tmp_path, Placement.initial(L, E, 3, redundant=4))
    before = group.outputs()
    chaos = Chaos(group, seed)
    for number in range(4000):
        done = [notice for rank in group.ranks for notice in rank.notices if not notice.error]
        if number >= 200 and done:
            break
        chaos.step()
        if chaos.chance.random() < 0.02:
            chaos.join()
        assert len({rank.store.version for rank in group.ranks}) == 1
        if number % 3 == 0:
            assert torch.equal(group.outputs(), before)
        time.sleep(0.0003)
    assert done, "no placement ever came through"
    group.close()
