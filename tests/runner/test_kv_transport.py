"""KV blocks from outside the device: the same bits, layer by layer; torn blocks are recomputed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moeserve
from moeserve.comm.world import World
from moeserve.engine.plan import BlockMove, StepPlan
from moeserve.engine.scheduler import Scheduler
from moeserve.messages import Submit
from moeserve.runner.kv_cache import PoolCache
from moeserve.runner.kv_transport import HostTransport, LayersAsLoaded, Loading
from moeserve.runner.tables import host_upload
from moeserve.sampling import TokenSampling
from tests.runner.engines import runner_of
from tests.runner.harness import VOCAB, Driver, Request, fake_runner, greedy, spec_of

MODEL = Path(moeserve.__file__).parent / "assets" / "demo"
CPU = torch.device("cpu")


class Lazy:
    """A KVTransport whose loads bring noise, until each layer's own blocks are asked for."""

    def __init__(self, inner: HostTransport) -> None:
        self.inner = inner
        self.asked: list[int] = []
        self.pools: Mapping[int, PoolCache] = {}

    def register(self, pools: Mapping[int, PoolCache]) -> None:
        self.pools = pools
        self.inner.register(pools)

    def save(self, moves: Sequence[BlockMove]) -> None:
        self.inner.save(moves)

    def load(self, moves: Sequence[BlockMove]) -> Loading:
        for move in moves:
            for tensor in self.pools[move.pool_index].tensors:
                tensor[move.block].fill_(0x55)
        return Asked(self.inner.load(moves), self.asked)


class Asked:
    def __init__(self, inner: Loading, asked: list[int]) -> None:
        self.inner = inner
        self.asked = asked

    def before_layer(self, layer: int) -> None:
        self.asked.append(layer)
        self.inner.before_layer(layer)

    def finish(self) -> None:
        self.inner.finish()

    def lost(self) -> bool:
        return False


@torch.inference_mode()
def test_loaded_blocks_have_the_bits_of_computed_ones() -> None:
    runner = runner_of(MODEL, World(), grouped=False, host_store_bytes=1 << 20)
    runner.prepare()
    lazy = Lazy(HostTransport({0: 8}, CPU, host_upload))
    lazy.register(runner.kv.pools)
    runner.transport = lazy
    driver = Driver(runner)
    size = runner.config.cache.block_size
    prompt = list(range(5, 10 + 2 * size))
    computed = driver.add(Request(prompt, greedy()))
    driver.generate(computed, 4)
    stores = tuple(BlockMove(block, i) for i, block in enumerate(computed.blocks[0][:2]))
    other = driver.add(Request([7, 8, 9], greedy()))
    plan = replace(driver.plan([(other, 3)]), stores=stores)
    driver.update_from_output([(other, 3)], plan, runner.execute(plan))
    for move in stores:
        for tensor in runner.kv.pools[0].tensors:
            tensor[move.block].zero_()

    loaded = driver.add(Request(prompt, greedy()))
    loaded.num_computed = 2 * size
    chunks = [(loaded, len(prompt))]
    plan = driver.plan(chunks)
    loads = tuple(BlockMove(block, i) for i, block in enumerate(loaded.blocks[0][:2]))
    plan = replace(plan, loads=loads)
    driver.update_from_output(chunks, plan, runner.execute(plan))
    driver.generate(loaded, 4)
    assert lazy.asked == list(range(runner.spec.num_layers)), "once for each layer, in their order"
    assert loaded.output == computed.output
    assert all(map(torch.equal, loaded.logits, computed.logits))


def test_caches_wait_for_their_own_layer() -> None:
    asked: list[int] = []
    caches = [(torch.full((1,), float(i)),) for i in range(6)]
    layers = LayersAsLoaded(caches, asked.append)
    assert len(layers) == 6
    assert layers[-1] is caches[5]
    assert asked == [5]
    part = layers[2:5]
    assert asked == [5], "a stage's range asks for nothing yet"
    assert list(part) == caches[2:5]
    assert asked == [5, 2, 3, 4]


class Tearing(HostTransport):
    """The first loads of a plan bring something else, and it finds out when the step is done."""

    torn = 0
    loads = 0

    def load(self, moves: Sequence[BlockMove]) -> Any:
        loading = super().load(moves)
        self.loads += 1
        if self.loads == 1:
            loading.finish()
            self.torn += 1
            for move in moves:
                for tensor in self._pools[move.pool_index].cache.tensors:
                    tensor[move.block].fill_(0x33)
            loading.lost = lambda: True  # type: ignore[method-assign]
        return loading


def answers_of(runner: Any, num_blocks: int, num_store_blocks: int) -> dict[int, list[int]]:
    """The tokens of requests with one long prefix, served with other ones in between."""
    limits = replace(runner.limits, num_blocks=num_blocks, num_store_blocks=num_store_blocks)
    scheduler = Scheduler(limits, runner.groups, vocab_size=VOCAB)
    answers: dict[int, list[int]] = {}
    in_flight: deque[StepPlan] = deque()
    for rid in range(6):
        start = 3 if rid % 2 == 0 else 40
        prompt = np.arange(start, start + 30, dtype="<i4")
        prompt[-1] = rid
        sampling = TokenSampling(seed=rid, max_tokens=6, temperature=0.0)
        scheduler.submit(Submit(rid=rid, tokens=prompt.tobytes(), num_prompt=30, sampling=sampling))
        while scheduler.has_work:
            plan = scheduler.plan() if len(in_flight) < 2 else None
            if plan is not None:
                in_flight.append(plan)
                continue
            plan = in_flight.popleft()
            output = scheduler.update_from_output(plan, runner.execute(plan))
            rids = np.frombuffer(output.rids, "<i8").tolist()
            for each, token in zip(rids, np.frombuffer(output.tokens, "<i4"), strict=True):
                answers.setdefault(each, []).append(int(token))
        scheduler.audit()
    return answers


def test_torn_blocks_are_computed_again() -> None:
    """The fake model's tokens depend on every entry that they read."""
    spec = spec_of(num_layers=2)
    expected = answers_of(fake_runner(spec), 100, 0)
    runner = fake_runner(spec)
    transport = Tearing({0: 40}, CPU, host_upload)
    transport.register(runner.kv.pools)
    runner.transport = transport
    assert answers_of(runner, 13, 40) == expected
    assert transport.torn == 1
    assert transport.loads > 1, "and later ones are loaded"
