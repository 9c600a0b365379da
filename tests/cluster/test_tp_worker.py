"""Engines of two processes: the bits of one, losses that pass, and deaths that take the whole
engine along.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch

from moeserve.actor.actor import Inbox
from moeserve.actor.supervisor import RestartPolicy
from moeserve.cluster.build import build_runner
from moeserve.cluster.engine_state import EngineEvent, EngineState
from moeserve.cluster.engine_supervisor import EngineSupervisor
from moeserve.cluster.forks import LocalHost
from moeserve.cluster.link import EngineGone
from moeserve.cluster.order import Role
from moeserve.comm.world import World
from moeserve.config import Config, Limits, config_of
from moeserve.engine.plan import GrammarJob
from moeserve.engine.scheduler import Scheduler
from moeserve.errors import ConfigError, EngineDied, PeerLost
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.messages import (
    Drain,
    Join,
    Joined,
    PlacementTable,
    Ready,
    StepOutput,
    Submit,
    Traced,
    TraceNext,
)
from moeserve.moe.placement.placement import Placement
from moeserve.runner.group import GroupedRunner
from moeserve.runner.remote import Team
from moeserve.sampling import GrammarSpec, TokenSampling
from moeserve.text.tokenizer import Tokenizer
from tests.ports import free_port
from tests.runner.harness import Driver, Request

PAIR = Role(world=World(size=2, tp_size=2, ranks_on_host=2), grouped=True)
SAMPLING = TokenSampling(seed=1, max_tokens=99, temperature=0.8, logprobs=2)
PROMPT = list(range(5, 60))
DEMO = {"model": "demo", "kv_cache_bytes": 1 << 24, "max_num_seqs": 4, "threads": 1}


def quiet(name: str, percent: int) -> None:
    pass


def config(**settings: Any) -> Config:
    values = DEMO | settings
    return config_of(values.pop("model"), **values)


def join_of(directory: Path, epoch: int, placement: PlacementTable | None) -> Join:
    folder = directory / f"epoch-{epoch}"
    folder.mkdir(mode=0o700)
    return Join(
        epoch=epoch,
        dp_rank=0,
        tp_size=2,
        hosts=("here",),
        directory=str(folder),
        store=f"127.0.0.1:{free_port()}",
        token="secret",
        placement=placement,
    )


async def step(runner: Any, driver: Driver, request: Request, chunk: int) -> None:
    chunks = [(request, chunk)]
    plan = driver.plan(chunks)
    driver.update_from_output(chunks, plan, await runner.start(plan).result())


async def test_two_ranks_have_the_bits_of_one_and_survive_a_loss(short_dir: Path) -> None:
    alone, *_ = await asyncio.to_thread(build_runner, config(), Role(), quiet)
    one: Any = alone
    driver = Driver(one.runner)
    expected = driver.add(Request(list(PROMPT), SAMPLING))
    while len(expected.output) < 8:
        await step(one, driver, expected, 32)
    one.close()

    seen: list[int] = []
    role = msgspec.structs.replace(PAIR, folder=str(short_dir))
    built = await asyncio.to_thread(
        build_runner, config(tp=2), role, lambda name, percent: seen.append(percent)
    )
    pair = built[0]
    assert isinstance(pair, GroupedRunner)
    assert pair.team is not None
    assert seen == sorted(set(seen))
    assert seen[-1] >= 95
    placement = pair.runner.placement
    assert placement is not None
    driver = Driver(pair.runner)
    request = driver.add(Request(list(PROMPT), SAMPLING))
    try:
        await pair.join(join_of(short_dir, 1, placement.to_table()))
        for _ in range(3):
            await step(pair, driver, request, 32)
        plan = driver.plan([(request, 32)])
        pair._lost = PeerLost("some other engine is gone")
        with pytest.raises(PeerLost, match="some other engine"):
            await pair.start(plan).result()
        await pair.leave()
        await pair.join(join_of(short_dir, 2, placement.to_table()))
        driver.update_from_output([(request, 32)], plan, await pair.start(plan).result())
        while len(request.output) < 8:
            await step(pair, driver, request, 32)
        assert request.output == expected.output
        assert all(map(torch.equal, request.logits, expected.logits))
        assert [r.outputs for r in request.results] == [r.outputs for r in expected.results]
        pid = pair.team.pids[1]
    finally:
        await asyncio.to_thread(pair.close)
    assert not psutil.pid_exists(pid)


async def served(
    runner: Any, limits: Limits, disturb: Callable[[int], Awaitable[None]]
) -> tuple[dict, int]:
    """Run requests to their ends.

    Returns their tokens with digests, and how many drafts were accepted.
    """
    scheduler = Scheduler(replace(limits, auto_drafts=False), runner.runner.groups)
    answers = {}
    for rid in range(4):
        sampling = TokenSampling(seed=rid, max_tokens=40, temperature=0.7 * (rid % 2), receipt=True)
        tokens = np.arange(5, 40 + rid, dtype="<i4").tobytes()
        scheduler.submit(Submit(rid=rid, tokens=tokens, num_prompt=35 + rid, sampling=sampling))
    right = number = 0
    while (plan := scheduler.plan()) is not None:
        while True:
            try:
                result = await runner.start(plan).result()
                break
            except PeerLost:
                await disturb(0)
        await disturb(number := number + 1)
        output = scheduler.update_from_output(plan, result)
        assert output.record is not None
        right += sum(output.record.num_accepted)
        for rid, token in zip(array("q", output.rids), array("i", output.tokens), strict=True):
            answers.setdefault(rid, []).append((token, output.digests[rid].pop(0)))
    return answers, right


async def test_drafting_that_is_cut_off_changes_no_token(short_dir: Path) -> None:
    """The group is left or lost while both ranks draft after a step that was passed on."""

    async def nothing(number: int) -> None:
        pass

    one, limits, *_ = await asyncio.to_thread(build_runner, config(), Role(), quiet)
    expected, _ = await served(one, limits, nothing)
    one.close()
    role = msgspec.structs.replace(PAIR, folder=str(short_dir))
    pair, limits, *_ = await asyncio.to_thread(
        build_runner, config(tp=2, speculate="mtp:2"), role, quiet
    )
    epochs = iter(range(1, 99))

    async def disturb(number: int) -> None:
        if number % 6 == 0:
            await pair.leave()
            await pair.join(join_of(short_dir, next(epochs), pair.runner.placement.to_table()))
        elif number % 6 == 3:
            pair.runner.leave()

    try:
        await disturb(0)
        found, right = await served(pair, limits, disturb)
        assert found == expected
        assert right > 10
        assert next(epochs) > 5
    finally:
        await asyncio.to_thread(pair.close)


async def test_a_grammar_is_prepared_on_both_ranks(short_dir: Path) -> None:
    role = msgspec.structs.replace(PAIR, folder=str(short_dir))
    pair: Any
    pair, *_ = await asyncio.to_thread(build_runner, config(tp=2), role, quiet)
    loop = asyncio.get_running_loop()

    async def prepared(ticket: int, grammar: GrammarSpec) -> str:
        done: asyncio.Future[str] = loop.create_future()
        pair.prepare_grammar(
            GrammarJob(ticket, grammar, []),
            lambda error: loop.call_soon_threadsafe(done.set_result, error),
        )
        return await asyncio.wait_for(done, 60)

    driver = Driver(pair.runner)
    grammar = GrammarSpec("choice", '["fox", "owl"]')
    sampling = TokenSampling(seed=1, max_tokens=99, grammar=grammar)
    try:
        await pair.join(join_of(short_dir, 1, pair.runner.placement.to_table()))
        assert "does not compile" in await prepared(1, GrammarSpec("regex", "("))
        pair.drop_grammars([1])
        assert await prepared(2, grammar) == ""
        request = driver.add(Request(list(PROMPT), sampling))
        driver.new_requests = [replace(driver.new_requests[0], grammar_ticket=2)]
        complete: dict[int, int] = {}
        while not complete:  # a rank that sampled by another mask would end the engine
            await step(pair, driver, request, 64)
            complete = request.results[-1].complete
        text = Tokenizer.load(resolve_model_dir("demo")).decode(request.output)
        assert text in ("fox", "owl")
        assert not pair.runner.constraints._prepared
    finally:
        await asyncio.to_thread(pair.close)


class Ear:
    """A fleet as the supervisor of its only engine sees it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.state = EngineState(rank=0, host="node-0", machine=0, grouped=True, held=True)

    def heard(self, event: EngineEvent) -> None:
        self.state = self.state.after(event)
        self.seen.append(event)

    async def until(self, condition: Callable[[Any], bool], what: str) -> Any:
        """The first message that fulfils it; what came before is dropped."""
        deadline_s = time.monotonic() + 40
        while time.monotonic() < deadline_s:
            for i, msg in enumerate(self.seen):
                if condition(msg):
                    del self.seen[: i + 1]
                    return msg
            await asyncio.sleep(0.01)
        raise AssertionError(f"no {what}; the last words: {self.seen[-3:]}")

    async def first(self, kind: type) -> Any:
        return await self.until(lambda msg: isinstance(msg, kind), kind.__name__)


@pytest.mark.full("ranks", keep=1)
@pytest.mark.parametrize("forked", [True, False])
async def test_a_death_of_either_rank_is_the_end_of_both(short_dir: Path, forked: bool) -> None:
    ear = Ear()
    host = LocalHost(str(short_dir))
    if forked:
        host.keep_fork_server(config(tp=2))
    process = EngineSupervisor(
        "engine 0",
        host,
        config(tp=2),
        state=lambda: ear.state,
        report=ear.heard,
        outbox=Inbox("front end"),
        policy=RestartPolicy(first_pause_s=0.05, max_deaths=1),
    )
    process.start(PAIR)
    try:
        ready: Ready = await ear.first(Ready)
        assert (ready.num_moe_layers, ready.num_experts, ready.expert_bytes) == (
            4,
            8,
            3 * 256 * 320 * 2,
        )
        placement = Placement.initial(ready.num_moe_layers, ready.num_experts, 2)
        process.send(join_of(short_dir, 1, placement.to_table()))
        await ear.first(Joined)
        process.send(TraceNext())
        process.send(
            Submit(
                rid=1,
                tokens=array("i", PROMPT).tobytes(),
                num_prompt=len(PROMPT),
                sampling=SAMPLING,
            )
        )
        ranks = {(await ear.first(Traced)).tp_rank for _ in range(2)}
        assert ranks == {0, 1}
        await ear.first(StepOutput)

        (worker,) = psutil.Process(ready.pid).children()
        assert (worker.name() == "moeserve-worker") == forked
        # what stops a service goes to all of its processes: the front end decides what follows
        worker.terminate()
        await asyncio.sleep(0.2)
        assert worker.is_running()
        worker.kill()
        end: EngineGone = await ear.first(EngineGone)
        assert end.exit_code == 1
        assert end.restarting
        assert "tensor-parallel rank 1 is gone" in end.cause
        assert "SIGKILL" in end.cause

        ready = await ear.first(Ready)
        (worker,) = psutil.Process(ready.pid).children()
        os.kill(ready.pid, signal.SIGKILL)
        assert (await ear.first(EngineGone)).exit_code == -signal.SIGKILL
        _, alive = await asyncio.to_thread(psutil.wait_procs, [worker], 15)
        assert not alive
    finally:
        process.send(Drain(0.0))
        await process.close(0.0)
        await host.close()


def team_of(command: list[str], directory: Path) -> Team:
    return Team(command, str(directory), 2)


def test_a_worker_that_cannot_be_started_is_a_config_error(short_dir: Path) -> None:
    team = team_of(["/no/such/program"], short_dir)
    with pytest.raises(ConfigError, match="cannot start tp worker 1"):
        team.start()
    team.close()


def test_a_worker_that_dies_at_its_start_is_named_with_its_last_words(short_dir: Path) -> None:
    team = team_of([sys.executable, "-c", "import sys; sys.exit('no torch here')"], short_dir)
    began_s = time.monotonic()

    def start() -> None:
        team.start()  # already raises if the worker dies meanwhile
        team.wait_connected()

    with pytest.raises(EngineDied, match=r"tensor-parallel rank 1 is gone: .* exited with code 1"):
        start()
    assert time.monotonic() - began_s < 15
    team.close()


def test_heads_that_cannot_be_shared_out_are_refused_before_anything_is_loaded() -> None:
    role = Role(world=World(size=3, tp_size=3, ranks_on_host=3), grouped=True)
    with pytest.raises(ConfigError, match=r"tp=3 cannot divide 4 query heads"):
        build_runner(config(tp=3), role, quiet)


@pytest.mark.parametrize("task", ["_accept", "_await_death"])
def test_a_failure_of_what_watches_workers_ends_the_engine(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    async def fail(_: Team, what: Any, *__: object) -> None:
        if task == "_accept":
            what.close()  # the listener
        raise OSError("too many open files")

    monkeypatch.setattr(Team, task, fail)
    team = team_of([sys.executable, "-c", "import time; time.sleep(60)"], short_dir)
    began_s = time.monotonic()
    with suppress(EngineDied):  # if the task has failed already
        team.start()
    with pytest.raises(EngineDied, match=r"tp worker.*: OSError: too many open files"):
        team.wait_connected()
    assert time.monotonic() - began_s < 15
    team.close()
