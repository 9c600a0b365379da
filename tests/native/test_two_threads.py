"""Two micro-batches at once, each a thread that multiplies, attends and works on rows with the same
pool: bits as alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.ops import native_layer, native_rows
from moeserve.ops.inputs import HeadShape
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear
from moeserve.ops.probe import host_step
from moeserve.ops.rules import SWIGLU, RouterRule

module: Any = native()
pytestmark = pytest.mark.skipif(
    not native_rows.AVAILABLE, reason="no native kernels for this machine"
)


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    module.set_threads([-1])


class Layer:
    """A little of everything, on its own tensors. Steps are large enough for rows to be shared
    among threads.
    """

    def __init__(self, seed: int) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16)

        generator = torch.Generator().manual_seed(seed)
        self.heads = 4 + 4 * seed
        self.size = 16 + 32 * seed
        self.tokens = 150 + 33 * seed
        self.width = self.heads * 16
        self.linear = NativeLinear(random(self.width, 500))
        self.router = NativeLinear(random(60, self.width))
        self.x = random(self.tokens, 500)
        self.norm = torch.rand(self.width, generator=generator)
        self.k, self.v = (random(2500 // self.size + 9, self.size, 2, 16) for _ in range(2))
        self.blocks = torch.randperm(len(self.k), generator=generator)[
            None, : 2400 // self.size + 1
        ].contiguous()

    def step(self) -> list[Tensor]:
        x = native_rows.rms_norm(self.linear(self.x), self.norm, 1e-6)
        step = host_step(self.blocks, self.size, [2399 - self.tokens], [0, self.tokens])
        plan = native_layer.plan_attention(*step, HeadShape(self.heads, 2, 16, 16))
        attended = native_layer.attention(x.view(-1, self.heads, 16), self.k, self.v, plan)
        last = host_step(
            self.blocks, self.size, [2398], [0, 1]
        )  # its chunks are shared among threads
        plan = native_layer.plan_attention(*last, HeadShape(self.heads, 2, 16, 16))
        alone = native_layer.attention(x[-1:].view(-1, self.heads, 16), self.k, self.v, plan)
        assert torch.equal(alone[0], attended[-1])
        added, total = native_rows.add_rms_norm(attended, x, self.norm, 1e-6)
        logits = self.router(added)
        ids, weights = native_rows.route(logits, 6, RouterRule(renormalize=True))
        order, place, _ = native_rows.group_pairs(ids, 60)
        rows = native_rows.rows_of_pairs(added, order, 6)
        out = native_rows.sum_pairs(rows, place, weights, torch.empty_like(added))
        return [
            total,
            added,
            ids,
            weights,
            out,
            native_rows.act_mul(out, SWIGLU),
            *native_rows.argmax(logits.float()),
        ]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_two_ubatches_have_the_bits_of_one(workers: int) -> None:
    layers = [Layer(0), Layer(1)]
    module.set_threads([-1])
    expected = [layer.step() for layer in layers]
    module.set_threads([-1] * workers)
    wrong: list[str] = []

    def run(ubatch: int) -> None:
        for turn in range(15):
            found = layers[ubatch].step()
            wrong.extend(
                f"micro-batch {ubatch}, turn {turn}, result {i}"
                for i, (a, b) in enumerate(zip(found, expected[ubatch], strict=True))
                if not torch.equal(a, b)
            )

    ubatches = [threading.Thread(target=run, args=(ubatch,)) for ubatch in (0, 1)]
    for ubatch in ubatches:
        ubatch.start()
    for ubatch in ubatches:
        ubatch.join()
    assert wrong == []
