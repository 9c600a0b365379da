"""Engines that step together: the bits of one rank, whatever joins, idles, is lost, moves or runs
in two micro-batches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.comm.world import World
from moeserve.engine.plan import BlockMove, StepDecision, decode_plan
from moeserve.engine.scheduler import Scheduler
from moeserve.errors import EngineDied, PeerLost
from moeserve.messages import PlacementResult, PlacementTable, Submit, Traced
from moeserve.moe.placement.placement import Placement
from moeserve.ops.native import native
from moeserve.runner.commands import CommandDone, Run
from moeserve.runner.group import GroupedRunner, checksum
from moeserve.sampling import TokenSampling
from tests.runner.engines import Engine, Group, alone, runner_of
from tests.runner.harness import Driver, Request, fake_runner, greedy

BACKENDS = ["torch"] + ["shm"] * (native() is not None)
FAST = BACKENDS[-1]
PROMPTS = [
    np.random.default_rng(seed).integers(0, 256, length).tolist()
    for seed, length in ((1, 40), (2, 23))
]
SAMPLINGS = [
    TokenSampling(
        seed=5,
        max_tokens=99,
        temperature=0.9,
        top_k=40,
        repetition_penalty=1.2,
        presence_penalty=0.3,
    ),
    TokenSampling(seed=6, max_tokens=99, temperature=0.0, logprobs=3, bad_seqs=((7, 8),)),
]
NUM_TOKENS = 6

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def path(make_checkpoint: Any) -> Path:
    found: Path = make_checkpoint("qwen3_moe").path
    return found


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Request]:
    """Return both requests' tokens on one rank."""
    driver = alone(path)
    requests = [driver.add(request_of(i)) for i in range(2)]
    for request in requests:
        driver.generate(request, NUM_TOKENS, chunk=16)
    return requests


@pytest.fixture
def group(path: Path, tmp_path: Path) -> Open:
    """`async with group(size, ...)` opens a joined group."""

    @asynccontextmanager
    async def open_group(size: int = 2, **settings: Any) -> AsyncIterator[Group]:
        found = Group(path, size, tmp_path, **({"all2all": FAST} | settings))
        try:
            await found.prepare()
            await found.join()
            yield found
        finally:
            await found.leave()
            found.close()

    return open_group


def request_of(i: int) -> Request:
    return Request(list(PROMPTS[i]), SAMPLINGS[i])


def same(ours: Request, theirs: Request) -> None:
    """Tokens, logit bits and logprobs."""
    assert ours.output == theirs.output[: len(ours.output)]
    assert len(ours.output) >= 1
    for a, b in zip(ours.logits, theirs.logits, strict=False):
        assert torch.equal(a, b)
    mine, others = (
        [r.outputs[x.slot].logprobs for r in x.results if x.slot in r.outputs]
        for x in (ours, theirs)
    )
    assert mine == others[: len(mine)]


async def finish(group: Group, first: Request, second: Request, **options: bool) -> None:
    """Step until both requests have all tokens; the first to finish idles."""
    requests = first, second
    while any(len(request.output) < NUM_TOKENS for request in requests):
        await group.run(
            *([(r, 16)] if len(r.output) < NUM_TOKENS else [] for r in requests), **options
        )


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_group_computes_the_bits_of_one_rank(
    backend: str, group: Open, expected: list[Request]
) -> None:
    async with group(all2all=backend) as engines:
        first = engines.engines[0].driver.add(request_of(0))
        for _ in range(2):  # the other engine idles, but its experts work
            busy, idle = await engines.run([(first, 16)], [])
            assert busy.expert_tokens_LE.sum() == 16 * 2 * 3  # tokens, layers, experts per token
            assert not idle.expert_tokens_LE.any()
            assert len(idle.tokens_N) == 0
        second = engines.engines[1].driver.add(request_of(1))
        await finish(engines, first, second)
        same(first, expected[0])
        same(second, expected[1])


async def test_four_ranks_and_rounds_of_few_tokens(group: Open, expected: list[Request]) -> None:
    """Steps of 16 tokens of one rank travel while the others have 5, 1 and none."""
    async with group(4, max_num_batched_tokens=16) as engines:
        first = engines.engines[0].driver.add(request_of(0))
        others = [engines.engines[i].driver.add(request_of(1)) for i in (1, 2)]
        while len(first.output) < 3:
            await engines.run([(first, 16)], [(others[0], 5)], [(others[1], 1)], [])
        same(first, expected[0])


async def test_two_ubatches_change_no_bit_and_are_measured(
    group: Open, expected: list[Request]
) -> None:
    async with group(dbo="on") as engines:
        first, second = (engines.engines[i].driver.add(request_of(i)) for i in range(2))
        busy, _ = await engines.run([(first, 16)], [(second, 16)], two_ubatches=True, trace=True)
        assert busy.exposed_comm_us <= busy.comm_us
        assert {event.track for event in busy.events} >= {
            "micro-batch 0",
            "micro-batch 1",
            "transfer 0",
            "transfer 1",
        }
        (busy, _) = await engines.run([(first, 16)], [(second, 16)], two_ubatches=True)
        assert busy.events == ()
        while len(first.output) < 3:
            await engines.run([(first, 4)], [(second, 4)], two_ubatches=len(first.output) == 0)
        same(first, expected[0])
        same(second, expected[1])


async def test_a_step_that_loses_a_peer_runs_again_after_the_next_join(
    group: Open, expected: list[Request]
) -> None:
    """A second step is in flight after it, and a request begins in it."""
    async with group() as engines:
        here, there = engines.engines
        first = here.driver.add(request_of(0))
        await engines.run([(first, 16)], [])
        chunks: Any = [(first, 16)]
        plans = [engines.plans([chunks, []])[0]]
        second = here.driver.add(request_of(1))
        chunks_2: Any = [(first, 16), (second, 16)]
        plans.append(engines.plans([chunks_2, []])[0])
        handles = [here.runner.start(plan) for plan in plans]
        await asyncio.sleep(0.05)  # the other engine never starts that step
        await there.runner.leave()
        for handle in handles:
            with pytest.raises(PeerLost):
                await handle.result()
        with pytest.raises(PeerLost):
            await here.runner.start(plans[0]).result()
        await here.runner.leave()
        await engines.join()
        for plan, work in zip(plans, (chunks, chunks_2), strict=True):
            ours, theirs = engines.agree([plan, engines.plans([[], []])[1]])
            handle = here.runner.start(ours)
            other = there.runner.start(theirs)
            here.driver.update_from_output(work, plan, await handle.result())
            await other.result()
        await while_short(engines, first, second)
        same(first, expected[0])
        same(second, expected[1])


async def while_short(engines: Group, *requests: Request) -> None:
    """Goes on with requests of the first engine."""
    while any(len(request.output) < NUM_TOKENS for request in requests):
        await engines.run([(r, 16) for r in requests if len(r.output) < NUM_TOKENS], [])


async def test_a_step_that_waits_for_peers_ends_when_its_own_engine_leaves(group: Open) -> None:
    async with group() as engines:
        here = engines.engines[0]
        request = here.driver.add(request_of(0))
        handle = here.runner.start(engines.plans([[(request, 16)], []])[0])
        await asyncio.sleep(0.05)
        await here.runner.leave()
        with pytest.raises(PeerLost):
            await handle.result()


async def test_nothing_runs_before_a_join_or_after_a_leave(path: Path, tmp_path: Path) -> None:
    engines = await Group(path, 2, tmp_path, all2all=FAST).prepare()
    request = engines.engines[0].driver.add(request_of(0))
    plan = engines.plans([[(request, 16)], []])[0]
    with pytest.raises(PeerLost, match="not joined"):
        await engines.engines[0].runner.start(plan).result()
    await engines.join()
    await engines.leave()
    with pytest.raises(PeerLost, match="left its group"):
        await engines.engines[0].runner.start(plan).result()
    await engines.join()
    await engines.run([(request, 16)], [])
    engines.close()


async def test_a_join_ends_when_the_engine_leaves_meanwhile(path: Path, tmp_path: Path) -> None:
    """The other one never comes."""
    engines = Group(path, 2, tmp_path, all2all=FAST)
    await engines.prepare()
    late = engines.engines.pop()
    joining = asyncio.create_task(engines.join(size=2))
    await asyncio.sleep(0.1)
    await asyncio.wait_for(engines.engines[0].runner.leave(), 5)
    with pytest.raises(PeerLost):
        await joining
    engines.close()
    late.runner.close()


async def test_closing_ends_a_step_that_waits_for_peers(path: Path, tmp_path: Path) -> None:
    engines = await Group(path, 2, tmp_path, all2all=FAST).prepare()
    await engines.join()
    here, there = engines.engines
    handle = here.runner.start(engines.plans([[(here.driver.add(request_of(0)), 16)], []])[0])
    await asyncio.sleep(0.05)
    await asyncio.wait_for(asyncio.to_thread(here.runner.close), 5)
    with pytest.raises(PeerLost):
        await handle.result()
    here.runner.close()
    there.runner.close()


async def test_a_placement_for_an_engine_that_has_all_experts_is_refused() -> None:
    runner = fake_runner()
    grouped = GroupedRunner(runner)
    heard: list[PlacementResult] = []
    grouped.on_placement_result = heard.append
    grouped.prepare(Placement.initial(2, 4, 2).to_table())
    assert "has all experts" in heard[0].error
    assert grouped.prepared == 0
    grouped.close()


def rotated(engine: Engine, version: int) -> PlacementTable:
    """Every expert on another rank than now."""
    placement = engine.model.placement
    assert placement is not None
    experts_LS = np.roll(placement.experts_LS, placement.experts_per_rank, axis=1)
    return Placement(version, placement.num_ranks, placement.num_experts, experts_LS).to_table()


async def test_experts_move_while_requests_run(group: Open, expected: list[Request]) -> None:
    async with group() as engines:
        first = engines.engines[0].driver.add(request_of(0))
        await engines.run([(first, 16)], [])
        before = [engine.runner.prepared for engine in engines.engines]
        for engine in engines.engines:
            engine.runner.prepare(rotated(engine, 1))
        deadline = asyncio.get_running_loop().time() + 20
        while not all(engine.placements for engine in engines.engines):
            assert asyncio.get_running_loop().time() < deadline
            await engines.run([], [])
            await asyncio.sleep(0.01)
        assert all(
            engine.placements[0].version == 1 and not engine.placements[0].error
            for engine in engines.engines
        )
        assert [engine.runner.prepared for engine in engines.engines] > before
        second = engines.engines[1].driver.add(request_of(1))
        await finish(engines, first, second)
        same(first, expected[0])
        same(second, expected[1])


async def test_a_join_brings_another_placement(group: Open, expected: list[Request]) -> None:
    async with group() as engines:
        first, second = (engines.engines[i].driver.add(request_of(i)) for i in range(2))
        await engines.run([(first, 16)], [(second, 16)])
        await engines.leave()
        await engines.join(rotated(engines.engines[0], 3))
        await finish(engines, first, second)
        same(first, expected[0])
        same(second, expected[1])


async def test_a_group_of_one_grows_and_shrinks(
    path: Path, tmp_path: Path, expected: list[Request]
) -> None:
    """The request's engine is alone, then the first of two, then alone again."""
    one = Group(path, 1, tmp_path, all2all=FAST)
    await one.prepare()
    await one.join()
    first = one.engines[0].driver.add(request_of(0))
    await one.run([(first, 16)])
    assert one.engines[0].model.placement is not None
    layers, experts = one.engines[0].model.placement.experts_LS.shape
    newcomer = Engine(
        runner_of(path, World(rank=1, size=2, ranks_on_host=2, host_rank=1), all2all=FAST)
    )
    await newcomer.prepare()
    one.engines.append(newcomer)
    await one.engines[0].runner.leave()
    await one.join(replaced(Placement.initial(layers, experts, 2), 1))
    await one.run([(first, 16)], [])
    await one.leave()
    await one.join(replaced(Placement.initial(layers, experts, 1), 2), size=1)
    newcomer.runner.close()
    del one.engines[1]
    while len(first.output) < NUM_TOKENS:
        await one.run([(first, 16)])
    same(first, expected[0])
    one.close()


def replaced(placement: Placement, version: int) -> PlacementTable:
    return replace(placement, version=version).to_table()


async def test_another_error_than_a_lost_peer_is_the_end() -> None:
    runner = fake_runner()
    grouped = GroupedRunner(runner)
    grouped._lost = None
    driver = Driver(runner)
    request = driver.add(Request([1, 2, 3], greedy()))
    plan = driver.plan([(request, 10)])
    runner.model.forward = None
    with pytest.raises(TypeError):
        await grouped.start(plan).result()
    await grouped.leave()
    with pytest.raises(EngineDied, match="step 1 failed before: TypeError"):
        await grouped.start(plan).result()
    grouped.close()


class OneWorker:
    """A team whose worker answers as set."""

    def __init__(self) -> None:
        self.answer = CommandDone(1)

    def send(self, what: Any) -> list[Future[CommandDone]]:
        future: Future[CommandDone] = Future()
        future.set_result(self.answer)
        return [future]

    def traced(self, done: Any, step: int, dp_rank: int) -> list[Traced]:
        return [Traced(step, dp_rank, 1, list(done[0].events))]

    def close(self) -> None:
        pass


async def test_ranks_of_an_engine_that_sample_different_tokens_are_the_end() -> None:
    runner = fake_runner()
    team = OneWorker()
    grouped = GroupedRunner(runner, team)  # type: ignore[arg-type]
    grouped._lost = None
    driver = Driver(runner)
    request = driver.add(Request([1, 2, 3], greedy()))
    first = replace(
        driver.plan([(request, 10)]), decision=StepDecision(0, most_tokens=(10, 0), trace=True)
    )
    team.answer = CommandDone(1, lost="rank 5 is gone", missing=(5,))
    with pytest.raises(PeerLost, match="rank 5 is gone") as lost:
        await grouped.start(first).result()
    assert lost.value.missing == (5,)
    grouped._lost = None
    team.answer = CommandDone(1, value=checksum(runner.execute(first)))
    heard: list[Traced] = []
    grouped.watch_traces(heard.append)
    driver.update_from_output([(request, 10)], first, await grouped.start(first).result())
    assert [traced.tp_rank for traced in heard] == [1]
    with pytest.raises(EngineDied, match="rank 1 has other tokens than rank 0 in step 2"):
        await grouped.start(driver.plan([(request, 1)])).result()
    with pytest.raises(EngineDied, match="step 2 failed before"):
        await grouped.start(driver.plan([(request, 1)])).result()
    grouped.close()


class Again:
    """A team of one worker that now and then runs a step twice, as if the first time another rank
    was lost.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.rng = random.Random(0)

    def send(self, what: Run) -> list[Future[CommandDone]]:
        plan = decode_plan(what.plan)
        if self.rng.random() < 0.3:
            self.runner.execute(plan)
        future: Future[CommandDone] = Future()
        future.set_result(CommandDone(1, value=checksum(self.runner.execute(plan))))
        return [future]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("speculate", ["ngram:4", "suffix:6"])
async def test_ranks_verify_the_leaders_drafts_wherever_their_own_proposers_are(
    path: Path, speculate: str
) -> None:
    leader, other = (runner_of(path, World(), grouped=False, speculate=speculate) for _ in range(2))
    for runner in leader, other:
        runner.prepare()
    grouped = GroupedRunner(leader, Again(other))  # type: ignore[arg-type]
    grouped._lost = None
    scheduler = Scheduler(leader.limits, leader.groups)
    for rid in range(3):
        sampling = TokenSampling(seed=rid, max_tokens=90, allowed_ids=(5, 6))
        scheduler.submit(
            Submit(rid=rid, tokens=np.full(9, 5, "<i4").tobytes(), num_prompt=9, sampling=sampling)
        )
    right = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        output = scheduler.update_from_output(plan, await grouped.start(plan).result())
        assert output.record is not None
        right += sum(output.record.num_accepted)
    assert right > 20
    grouped.close()
    other.close()


def test_blocks_are_not_saved_again_when_a_step_is_run_again() -> None:
    """The step overwrites the very block that it saved first."""
    runner = fake_runner(host_store_bytes=1 << 16)
    driver = Driver(runner)
    request = driver.add(Request(list(range(4)), greedy()))
    driver.run([(request, 4)])
    block = request.blocks[0][0]
    before = runner.kv.layers[0][0][block].clone()
    driver.remove(request)
    other = driver.add(Request(list(range(50, 54)), greedy()))
    plan = replace(driver.plan([(other, 4)]), stores=(BlockMove(block, 1),))
    assert other.blocks[0] == [block]
    forward = runner.model.forward

    def loses(*args: Any) -> Any:
        forward(*args)
        raise PeerLost("a rank is gone")

    runner.model.forward = loses
    with pytest.raises(PeerLost):
        runner.execute(plan)
    runner.model.forward = forward
    runner.execute(plan)
    assert not torch.equal(runner.kv.layers[0][0][block], before)
    with torch.inference_mode():
        runner.transport.load((BlockMove(block, 1),)).finish()
    assert torch.equal(runner.kv.layers[0][0][block], before)
