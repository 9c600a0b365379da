"""Balancing requests over simulated engines: even work, prefix affinity, and no starvation."""

from __future__ import annotations

import random
from array import array
from collections import deque

import pytest

from moeserve.cluster.balance import CHUNK, MAX_PREFIXES, Balancer
from moeserve.messages import FinishReason, StepOutput, StepRecord, Submit
from moeserve.sampling import TokenSampling

ROOM = 16, 10_000  # tokens of a block, and blocks


def request(rid: int, tokens: list[int], max_tokens: int = 100, salt: str = "") -> Submit:
    sampling = TokenSampling(seed=1, max_tokens=max_tokens)
    return Submit(
        rid=rid,
        tokens=array("i", tokens).tobytes(),
        num_prompt=len(tokens),
        sampling=sampling,
        salt=salt,
    )


class Engine:
    """Computes prompts `budget` tokens a step, in order, and a token per step of each running
    request.
    """

    def __init__(self, budget: int = 256, num_blocks: int = 10_000) -> None:
        self.budget = budget
        self.free = num_blocks - 1
        self.cache: set[tuple[int, ...]] = set()
        self.prompts: deque[list] = (
            deque()
        )  # [rid, tokens left to compute, tokens to generate, cached]
        self.running: dict[int, int] = {}
        self.computed = 0
        self.steps = self.generated = 0

    def submit(self, msg: Submit, num_tokens: int) -> None:
        tokens = memoryview(msg.tokens).cast("i").tolist()
        cached = 0
        for end in range(CHUNK, len(tokens), CHUNK):
            if tuple(tokens[:end]) in self.cache:
                cached = end
            self.cache.add(tuple(tokens[:end]))
        self.prompts.append([msg.rid, len(tokens) - cached, num_tokens, cached])

    @property
    def idle(self) -> bool:
        return not self.prompts and not self.running

    def step(self) -> StepOutput:
        self.steps += 1
        left = self.budget - len(self.running)
        rids = []
        finish = []
        cached = {}
        num_tokens = len(self.running)
        for rid in list(self.running):
            self.running[rid] -= 1
            rids.append(rid)
            finish.append(FinishReason.LENGTH if self.running[rid] == 0 else 0)
            if finish[-1]:
                del self.running[rid]
        while self.prompts and left > 0:
            head = self.prompts[0]
            part = min(left, head[1])
            head[1] = head[1] - part
            left = left - part
            num_tokens = num_tokens + part
            self.computed += part
            if head[1] == 0:
                self.prompts.popleft()
                self.running[head[0]] = head[2] - 1
                rids.append(head[0])
                finish.append(0)
                cached[head[0]] = head[3]
        record = StepRecord(
            step=self.steps,
            at_s=0.0,
            num_tokens=num_tokens,
            num_requests=len(rids),
            num_running=len(self.running),
            num_waiting=len(self.prompts),
            num_free_blocks=self.free,
            num_blocks=self.free + 1,
        )
        self.generated += len(rids)
        return StepOutput(
            rids=array("q", rids).tobytes(),
            tokens=array("i", [1] * len(rids)).tobytes(),
            finish=bytes(finish),
            cached=cached,
            record=record,
        )


class Simulation:
    def __init__(self, num_engines: int) -> None:
        self.engines = [Engine() for _ in range(num_engines)]
        self.balancer = Balancer()
        self.placed: dict[int, int] = {}
        self.peaks: list[float] = []
        for rank in range(num_engines):
            self.balancer.add_engine(rank, *ROOM)

    def arrive(self, msg: Submit, num_tokens: int) -> int:
        rank = self.balancer.choose(msg, range(len(self.engines)))
        self.balancer.assign(msg, rank)
        self.engines[rank].submit(msg, num_tokens)
        self.placed[msg.rid] = rank
        return rank

    def step(self) -> None:
        for rank, engine in enumerate(self.engines):
            if engine.idle:
                continue
            out = engine.step()
            self.balancer.on_step_output(rank, out)
            for rid, finish in zip(memoryview(out.rids).cast("q"), out.finish, strict=True):
                if finish:
                    self.balancer.remove_request(rid)
        for load in self.balancer.loads.values():
            assert load.num_reserved_blocks == sum(load.reserved_blocks.values())

    def drain(self) -> None:
        while not all(engine.idle for engine in self.engines):
            self.step()


@pytest.mark.parametrize("num_engines", [2, 4, 8])
def test_work_is_even_when_lengths_are_not(num_engines: int) -> None:
    rng = random.Random(num_engines)
    sim = Simulation(num_engines)
    for rid in range(150 * num_engines):
        prompt = [rng.randrange(100) for _ in range(int(rng.paretovariate(1.2) * 20) % 2000 + 1)]
        num_tokens = min(int(rng.expovariate(1 / 60)) + 2, 400)
        sim.arrive(request(rid, prompt, max_tokens=400), num_tokens)
        if rid % num_engines == 0:
            sim.step()
            sim.step()
        if rid > 40 * num_engines:
            rows = [len(engine.running) + len(engine.prompts) for engine in sim.engines]
            sim.peaks.append(max(rows) / (sum(rows) / num_engines))
    sim.drain()
    assert sum(sim.peaks) / len(sim.peaks) < 1.35
    generated = [engine.generated for engine in sim.engines]
    assert max(generated) / (sum(generated) / num_engines) < 1.2


def test_predictions_end_at_nothing_when_the_work_does() -> None:
    sim = Simulation(3)
    rng = random.Random(5)
    for rid in range(300):
        sim.arrive(request(rid, [rng.randrange(4)] * rng.randrange(1, 600)), rng.randrange(2, 90))
        if rid % 4 == 0:
            sim.step()
        if rid % 17 == 0:
            sim.balancer.remove_request(rid)  # aborted; the engine goes on a little
    sim.drain()
    assert [load.work for load in sim.balancer.loads.values()] == [0.0, 0.0, 0.0]
    assert sim.balancer._requests == {}


def test_prefixes_stay_with_their_engine_under_a_skewed_load() -> None:
    rng = random.Random(3)
    sim = Simulation(4)
    systems = [[100 + s] * 512 for s in range(12)]
    homes: dict[int, set[int]] = {}
    total = 0
    for rid in range(800):
        which = min(int(rng.paretovariate(0.8)) - 1, 11)
        prompt = systems[which] + [rng.randrange(100) for _ in range(40)]
        total += len(prompt)
        homes.setdefault(which, set()).add(sim.arrive(request(rid, prompt), rng.randrange(20, 60)))
        sim.step()
    sim.drain()
    computed = sum(engine.computed for engine in sim.engines)
    assert computed < 0.2 * total  # a balancer without affinity computes each prefix on each engine
    assert computed - 800 * 40 < 30 * 512
    assert len(homes[0]) == 4  # half of all requests are too many for one engine
    rare = [len(homes[which]) for which in homes if which > 6]
    assert sum(rare) / len(rare) < 2.5


def test_equal_engines_are_chosen_in_order_and_always_alike() -> None:
    chosen = []
    for _ in range(2):
        balancer = Balancer()
        for rank in (2, 0, 1):
            balancer.add_engine(rank, *ROOM)
        ranks = []
        for rid in range(6):
            msg = request(rid, [rid] * 10)
            ranks.append(balancer.choose(msg, [1, 0, 2]))
            balancer.assign(msg, ranks[-1])
        chosen.append(ranks)
    assert chosen == [[0, 1, 2, 0, 1, 2]] * 2


def test_a_full_engine_is_passed_over_until_all_are_full() -> None:
    balancer = Balancer()
    balancer.add_engine(0, 16, 1000)
    balancer.add_engine(1, 16, 11)
    for rid in range(20):
        msg = request(rid, [rid] * 64)  # four blocks
        rank = balancer.choose(msg, [0, 1])
        balancer.assign(msg, rank)
    assert len(balancer.loads[1].live_rids) == 2
    huge = request(99, [1] * 16 * 2000)
    assert (
        balancer.choose(huge, [0, 1]) == 1
    )  # it waits wherever it goes; there is less before it there


def test_a_closed_engine_is_forgotten_with_its_prefixes() -> None:
    balancer = Balancer()
    balancer.add_engine(0, *ROOM)
    balancer.add_engine(1, *ROOM)
    shared = [7] * 400
    balancer.assign(request(1, shared), 1)
    balancer.remove_request(1)
    assert balancer.choose(request(2, shared), [0, 1]) == 1
    balancer.assign(request(3, shared), 1)
    balancer.remove_engine(1)
    balancer.on_step_output(1, StepOutput(rids=b"", tokens=b"", finish=b""))
    balancer.remove_request(3)
    balancer.add_engine(1, *ROOM)
    assert balancer.choose(request(4, shared), [0, 1]) == 0


def test_another_tenants_prefix_counts_for_nothing() -> None:
    balancer = Balancer()
    for rank in (0, 1):
        balancer.add_engine(rank, *ROOM)
    balancer.assign(request(1, [7] * 400, salt="a"), 1)
    balancer.remove_request(1)
    assert balancer.choose(request(2, [7] * 400, salt="a"), [0, 1]) == 1
    assert balancer.choose(request(2, [7] * 400, salt="b"), [0, 1]) == 0


def test_the_table_of_prefixes_is_bounded() -> None:
    balancer = Balancer()
    balancer.add_engine(0, *ROOM)
    for rid in range(40):
        balancer.assign(request(rid, [rid] * CHUNK * 1000), 0)
    assert len(balancer._prefixes) == MAX_PREFIXES
