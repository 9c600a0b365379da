"""Engines of one group as threads of one process: real runners, stepped by hand in lockstep."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.comm.world import World
from moeserve.config import config_of
from moeserve.engine.plan import BlockDiff, StepDecision, StepPlan, StepResult
from moeserve.messages import Join, PlacementResult, PlacementTable
from moeserve.models.hf_config import read_model_spec
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.group import GroupedRunner
from tests.ports import free_port
from tests.runner.harness import Driver, Request

Chunks = Sequence[tuple[Request, int]]
NOTHING = np.zeros(0, dtype=np.int32)


def runner_of(path: Path, world: World, grouped: bool = True, **settings: Any) -> CPUModelRunner:
    values = {
        "max_num_seqs": 8,
        "kv_cache_bytes": 1 << 22,
        "threads": 1,
        "max_num_batched_tokens": 256,
    }
    return CPUModelRunner(
        config_of(path, **(values | settings)), read_model_spec(path), path, world, grouped=grouped
    )


def alone(path: Path, **settings: Any) -> Driver:
    """Return the same model on one rank, without a group."""
    runner = runner_of(path, World(), grouped=False, **settings)
    runner.prepare()
    return Driver(runner)


class Engine:
    """One data-parallel engine with its own requests."""

    def __init__(self, model: CPUModelRunner) -> None:
        self.model = model
        self.runner = GroupedRunner(model)
        self.placements: list[PlacementResult] = []
        self.runner.on_placement_result = self.placements.append
        self.driver: Driver

    async def prepare(self) -> None:
        await self.runner.call(self.model.prepare)
        self.driver = Driver(self.model)


class Group:
    """`size` engines of one rank each."""

    def __init__(self, path: Path, size: int, directory: Path, **settings: Any) -> None:
        worlds = [
            World(rank=rank, size=size, ranks_on_host=size, host_rank=rank) for rank in range(size)
        ]
        self.engines = [Engine(runner_of(path, world, **settings)) for world in worlds]
        self.epoch = 0
        self.step = 0
        self._directory = directory

    async def prepare(self) -> Group:
        for engine in self.engines:
            await engine.prepare()
        return self

    async def join(self, placement: PlacementTable | None = None, size: int | None = None) -> None:
        """Start the next epoch, with this placement or the loaded one.

        With `size`, the first engines of so many join; some of them may be missing.
        """
        self.epoch = self.epoch + 1
        self.step = 0
        folder = self._directory / f"epoch-{self.epoch}"
        folder.mkdir()
        store = f"127.0.0.1:{free_port()}"
        joins = []
        for rank, engine in enumerate(self.engines[:size]):
            assert engine.model.placement is not None
            join = Join(
                epoch=self.epoch,
                dp_rank=rank,
                tp_size=1,
                hosts=("here",) * (size or len(self.engines)),
                directory=str(folder),
                store=store,
                token="secret",
                placement=placement or engine.model.placement.to_table(),
            )
            joins.append(engine.runner.join(join))
        await asyncio.gather(*joins)

    async def leave(self) -> None:
        await asyncio.gather(*(engine.runner.leave() for engine in self.engines))

    def plans(
        self, work: Sequence[Chunks], *, two_ubatches: bool = False, trace: bool = False
    ) -> list[StepPlan]:
        """Return each engine's plan of one step; without chunks an engine has no tokens."""
        drafts = [
            engine.driver.plan(chunks) if chunks else empty_plan(len(engine.model.groups))
            for engine, chunks in zip(self.engines, work, strict=True)
        ]
        return self.agree(drafts, two_ubatches=two_ubatches, trace=trace)

    def agree(
        self, drafts: Sequence[StepPlan], *, two_ubatches: bool = False, trace: bool = False
    ) -> list[StepPlan]:
        splits = [draft.num_tokens // 2 if two_ubatches else 0 for draft in drafts]
        most = max(
            max(split_at, draft.num_tokens - split_at)
            for draft, split_at in zip(drafts, splits, strict=True)
        )
        active = min(engine.runner.prepared for engine in self.engines)
        ubatches = 2 if two_ubatches else 1
        decision = StepDecision(
            self.step, ubatches, (most, most if two_ubatches else 0), active, trace
        )
        self.step += 1
        return [
            replace(draft, decision=decision, split_at=split_at)
            for draft, split_at in zip(drafts, splits, strict=True)
        ]

    async def run(self, *work: Chunks, **options: bool) -> list[StepResult]:
        """Run one step on all engines."""
        plans = self.plans(work, **options)
        handles = [
            engine.runner.start(plan) for engine, plan in zip(self.engines, plans, strict=True)
        ]
        results = list(await asyncio.gather(*(handle.result() for handle in handles)))
        for engine, chunks, plan, result in zip(self.engines, work, plans, results, strict=True):
            if chunks:
                engine.driver.update_from_output(chunks, plan, result)
        return results

    def close(self) -> None:
        for engine in self.engines:
            engine.runner.close()


def empty_plan(num_groups: int) -> StepPlan:
    """Return a step in which an engine has no tokens."""
    no_diff = BlockDiff(NOTHING, NOTHING, NOTHING)
    return StepPlan(-1, NOTHING, NOTHING, NOTHING, np.zeros(0, np.bool_), (no_diff,) * num_groups)
