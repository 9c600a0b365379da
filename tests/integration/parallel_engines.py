"""Engines of one group and their tensor-parallel ranks as threads of one process.

Cores, runners, votes and transports are real; there are no processes and no wires to them.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from moeserve.actor.actor import Inbox
from moeserve.actor.process import Death
from moeserve.cluster.assemble import join_group
from moeserve.cluster.tp_worker import Worker
from moeserve.comm.world import World
from moeserve.config import Config, config_of
from moeserve.engine.group_core import GroupCore
from moeserve.engine.scheduler import Scheduler
from moeserve.messages import (
    Drain,
    EngineIn,
    EngineOut,
    FinishReason,
    Join,
    Joined,
    LeftGroup,
    Logprobs,
    PlacementResult,
    PlacementTable,
    StepOutput,
    StepRecord,
    Submit,
    UpdatePlacement,
)
from moeserve.models.hf_config import read_model_spec
from moeserve.models.spec import ModelSpec
from moeserve.moe.placement.placement import Placement
from moeserve.runner.commands import WorkerBirth, connect_to_leader
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.group import GroupedRunner
from moeserve.runner.remote import Team
from moeserve.sampling import TokenSampling
from tests.ports import free_port


class WorkerThread:
    """A worker that is a thread instead of a process."""

    pid = 0

    def __init__(self, birth: WorkerBirth) -> None:
        self._thread = threading.Thread(target=_work, args=(birth,), daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def death(self) -> Death:
        """Return when the thread has ended, however long the test takes."""
        while self._thread.is_alive():  # noqa: ASYNC110  (waiting in a thread could not be cancelled)
            await asyncio.sleep(0.02)
        return Death("a worker's thread", 0, 1, 0.0, ())

    def kill(self, reason: str) -> None:
        """Do nothing, because threads end by themselves."""


class ThreadTeam(Team):
    """A team of workers that are threads, with real commands over real sockets."""

    def _start_child(self, name: str, birth: WorkerBirth) -> Any:
        return WorkerThread(birth)


def _work(birth: WorkerBirth) -> None:
    stream = connect_to_leader(birth)
    worker = Worker(birth.tp_rank, stream)
    worker.serve()
    worker._thread.stop()
    if worker._runner is not None:
        worker._runner.close()
    stream.close()


@dataclass
class Answer:
    rid: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: str = ""

    @property
    def bits(self) -> list[Any]:
        """Everything that must be equal: tokens, and the exact values of their logprobs."""
        return [self.tokens, [(row.ids, row.values, row.rank) for row in self.logprobs]]


class Engine:
    """The engine of one data-parallel rank."""

    def __init__(
        self, config: Config, spec: ModelSpec, path: Path, world: World, folder: str
    ) -> None:
        self.world = world
        self.inbox: Inbox[EngineIn] = Inbox("engine")
        self.answers: dict[int, Answer] = {}
        self.records: list[StepRecord] = []
        self.news: list[EngineOut] = []
        team = None
        if world.tp_size > 1:
            team = ThreadTeam(("",), tempfile.mkdtemp(dir=folder), world.tp_size)
            team.start()
        self.model = CPUModelRunner(config, spec, path, world, grouped=True)
        self.runner = GroupedRunner(self.model, team)
        self._spec = spec
        self._task: asyncio.Task[None]

    async def start(self) -> None:
        limits = await asyncio.to_thread(self.runner.prepare_model, lambda name, percent: None)
        scheduler = Scheduler(
            limits, self.model.groups, eos_ids=(), vocab_size=self._spec.vocab_size
        )
        self.core = GroupCore(
            scheduler, self.runner, self.inbox, self._hear, partial(join_group, self.runner)
        )
        self._task = asyncio.create_task(self.core.run())

    def check(self) -> None:
        """Raise the error that ended the engine, if any."""
        if hasattr(self, "_task") and self._task.done():
            self._task.result()

    async def stop(self) -> None:
        if hasattr(self, "_task"):
            if not self.inbox.closed:
                self.inbox.put(Drain(0.0), force=True)
            await asyncio.wait([self._task], timeout=20)
            self._task.cancel()
        await asyncio.to_thread(self.runner.close)

    def submit(
        self, rid: int, prompt: Sequence[int], sampling: TokenSampling, priority: int = 0
    ) -> Answer:
        tokens = np.array(prompt, "<i4").tobytes()
        msg = Submit(
            rid=rid, tokens=tokens, num_prompt=len(prompt), sampling=sampling, priority=priority
        )
        self.inbox.put(msg)
        self.answers[rid] = Answer(rid)
        return self.answers[rid]

    def _hear(self, msg: EngineOut) -> None:
        if not isinstance(msg, StepOutput):
            self.news.append(msg)
            return
        if msg.record is not None:
            self.records.append(msg.record)
        rids = np.frombuffer(msg.rids, "<i8").tolist()
        for rid, token, finish in zip(
            rids, np.frombuffer(msg.tokens, "<i4").tolist(), msg.finish, strict=True
        ):
            answer = self.answers[rid]
            assert not answer.finish, f"request {rid} goes on after its end"
            answer.tokens += [token] if token >= 0 else []
            answer.logprobs += [msg.logprobs[rid].pop(0)] if msg.logprobs.get(rid) else []
            answer.finish = FinishReason.NAMES[finish]


class Engines:
    """A group of `dp` engines with `tp` ranks each.

    If there are no experts to shard, it is one engine with all of them.
    """

    def __init__(self, path: Path, dp: int, tp: int, **settings: Any) -> None:
        values = {
            "max_num_seqs": 8,
            "max_model_len": 256,
            "threads": 1,
            "kv_cache_bytes": 1 << 22,
            "watermark": 0.0,
        }
        self.config = config_of(path, dp=dp, tp=tp, **(values | settings))
        self.spec = read_model_spec(path)
        self.deals = self.config.parallel.ep == "on" and self.spec.num_experts > 0
        assert self.deals or dp == 1, "engines that share nothing are tested one by one"
        self._folder = tempfile.TemporaryDirectory(
            prefix="ms-"
        )  # short, because paths of sockets are limited
        size = dp * tp
        worlds = [
            World(rank, size, tp, self.deals, ranks_on_host=size, host_rank=rank)
            for rank in range(0, size, tp)
        ]
        self.engines = [
            Engine(self.config, self.spec, path, world, self._folder.name) for world in worlds
        ]
        self.epoch = 0
        self._num_rids = 0

    async def __aenter__(self) -> Engines:
        try:
            for engine in self.engines:
                await engine.start()
            await self.join()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self.engines))
        self._folder.cleanup()

    @property
    def placement(self) -> Placement | None:
        return self.engines[0].model.placement

    async def join(self, table: PlacementTable | None = None) -> None:
        """Start the next epoch, with this placement or the loaded one."""
        self.epoch += 1
        folder = os.path.join(self._folder.name, f"epoch-{self.epoch}")
        os.mkdir(folder, 0o700)
        if table is None and self.placement is not None:
            table = self.placement.to_table()
        join = Join(
            epoch=self.epoch,
            dp_rank=0,
            tp_size=self.config.parallel.tp,
            hosts=("here",) * len(self.engines),
            directory=folder,
            store=f"127.0.0.1:{free_port()}",
            token="secret",
            placement=table if self.deals else None,
        )
        for rank, engine in enumerate(self.engines):
            engine.inbox.put(msgspec.structs.replace(join, dp_rank=rank), force=True)
        await self.heard(
            lambda msg: isinstance(msg, Joined) and msg.epoch == self.epoch, f"epoch {self.epoch}"
        )

    async def until_left(self) -> None:
        """Wait until all engines have left the current epoch."""
        epoch = self.epoch
        self.epoch = self.epoch + 1
        await self.heard(
            lambda msg: isinstance(msg, LeftGroup) and msg.epoch == epoch, f"end of epoch {epoch}"
        )

    async def place(self, placement: Placement) -> None:
        """Move experts while requests run."""
        for engine in self.engines:
            engine.inbox.put(UpdatePlacement(placement.to_table()), force=True)
        done = await self.heard(
            lambda msg: isinstance(msg, PlacementResult) and msg.version == placement.version,
            "placement",
        )
        assert [placed.error for placed in done] == [""] * len(self.engines)

    def submit(
        self, rank: int, prompt: Sequence[int], sampling: TokenSampling, priority: int = 0
    ) -> Answer:
        self._num_rids += 1
        return self.engines[rank].submit(self._num_rids, prompt, sampling, priority)

    @property
    def records(self) -> list[StepRecord]:
        return [record for engine in self.engines for record in engine.records]

    async def answered(self) -> None:
        answers = [answer for engine in self.engines for answer in engine.answers.values()]
        await self.until(lambda: all(answer.finish for answer in answers), "answers")

    async def heard(self, wanted: Callable[[Any], bool], what: str) -> list[Any]:
        """Return one such message from each engine."""
        await self.until(
            lambda: all(any(map(wanted, engine.news)) for engine in self.engines), what
        )
        return [next(filter(wanted, engine.news)) for engine in self.engines]

    async def until(
        self, condition: Callable[[], bool], what: str, within_s: float = 120.0
    ) -> None:
        deadline_s = asyncio.get_running_loop().time() + within_s
        while not condition():
            for engine in self.engines:
                engine.check()
            left = [
                msg for engine in self.engines for msg in engine.news if isinstance(msg, LeftGroup)
            ]
            assert not [msg for msg in left if msg.epoch == self.epoch], left
            assert asyncio.get_running_loop().time() < deadline_s, f"{what} did not come in time"
            await asyncio.sleep(0.002)
