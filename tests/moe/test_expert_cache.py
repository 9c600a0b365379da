"""Experts on disk: the bits of those in memory, whatever slots there are, and an error where the
file is not whole.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.moe.experts.base import ExpertWeights
from moeserve.moe.experts.native import NativeExperts, PackedNative
from moeserve.moe.routing import Router
from moeserve.ops.native import native
from moeserve.ops.native_layer import NativeLinear
from moeserve.ops.pick import pick_ops
from moeserve.ops.rules import RouterRule
from tests.moe.test_native_experts import make, rows, run

module: Any = native()
pytestmark = pytest.mark.skipif(
    module is None or not module.serving_isa(), reason="needs the native kernels"
)
E = 7
WIDTH = 64
BF16 = torch.bfloat16


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    module.set_threads([-1] * request.param)
    yield
    module.set_threads([-1])


class Layers:
    """Layers of experts in memory, and the same in a file from `offset` on."""

    def __init__(
        self, path: Path, sizes: list[int], slots: int, offset: int = 64, **options: Any
    ) -> None:
        self.path = path
        self.in_memory = list[PackedNative]()
        self.on_disk = list[PackedNative]()
        for seed, hidden in enumerate(sizes):
            self.in_memory.append(
                NativeExperts().pack(make(BF16, WIDTH, hidden, E, seed, **options))
            )
        path.write_bytes(
            bytes(offset) + b"".join(layer.bytes_eB.numpy().tobytes() for layer in self.in_memory)
        )
        descriptor = os.open(path, os.O_RDONLY)
        self.cache = module.ExpertCache(descriptor, str(path))
        os.close(descriptor)
        for layer in self.in_memory:
            cached = self.cache.add(offset, *layer.bytes_eB.shape)
            self.on_disk.append(replace(layer, bytes_eB=layer.bytes_eB.to("meta"), cached=cached))
            offset += layer.bytes_eB.nbytes
        self.cache.open(slots * self.cache.slot_bytes)
        assert self.cache.num_slots == min(slots, E * len(sizes))

    def check(self, layer: int, counts: list[int], seed: int = 0) -> None:
        x = rows(sum(counts), WIDTH, BF16, seed)
        assert torch.equal(
            run(self.on_disk[layer], x, counts), run(self.in_memory[layer], x, counts)
        )


@pytest.mark.parametrize("slots", [1, 2, 5, 9, 100])
@pytest.mark.parametrize(("offset", "biased"), [(64, False), (4096, True), (8128, False)])
def test_has_the_bits_of_experts_in_memory(
    slots: int, offset: int, biased: bool, tmp_path: Path
) -> None:
    layers = Layers(tmp_path / "file", [48, 80, 48], slots, offset, biased=biased)
    rng = np.random.default_rng(slots)
    for step in range(30):
        counts = (rng.integers(1, 30, E) * (rng.random(E) < 0.5)).tolist()
        layers.check(step % 3, counts, step)
    hits, misses, _, read = layers.cache.take_stats()
    assert hits or slots < 9
    assert misses <= 3 * E or slots < 3 * E
    assert read >= misses * min(layer.bytes_eB.shape[1] for layer in layers.in_memory)
    assert layers.cache.take_stats() == (0, 0, 0, 0)


@pytest.mark.parametrize("hidden", [800, 12_000])
def test_experts_of_several_reads(hidden: int, tmp_path: Path) -> None:
    """Parts of a slot of their own, the last one up to the file's end in the middle of a page."""
    layers = Layers(tmp_path / "file", [hidden], 3)
    for step in range(6):
        layers.check(0, [(step >> i & 1) * 2 + (i == step) for i in range(E)])


def test_what_is_wanted_often_stays(tmp_path: Path) -> None:
    """A prompt needs all experts once; those of a stream are in memory again after it."""
    layers = Layers(tmp_path / "file", [48], 5)
    for _ in range(10):
        layers.check(0, [1, 0, 1, 0, 0, 0, 0])
    for _ in range(2):
        layers.check(0, [3] * E)
    layers.cache.take_stats()
    layers.check(0, [1, 0, 1, 0, 0, 0, 0])
    assert layers.cache.take_stats()[:2] == (2, 0)
    for _ in range(200):
        layers.check(0, [0, 1, 0, 1, 0, 1, 1])  # and what nobody wants any more goes
    layers.check(0, [0, 1, 0, 1, 1, 1, 1])
    layers.cache.take_stats()
    layers.check(0, [0, 1, 0, 1, 0, 1, 1])
    assert layers.cache.take_stats()[:2] == (4, 0)


def test_two_threads_compute_at_once(tmp_path: Path) -> None:
    layers = Layers(tmp_path / "file", [48, 48], 3)
    wrong = list[BaseException]()

    def live(layer: int) -> None:
        try:
            for step in range(40):
                layers.check(layer, [step % 3, 1, 0, 2, step % 2, 0, 1], step)
        except BaseException as error:
            wrong.append(error)

    both = [threading.Thread(target=live, args=(layer,)) for layer in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert not wrong


def test_a_file_that_is_cut_short_gives_an_error_and_no_bits(tmp_path: Path) -> None:
    layers = Layers(tmp_path / "file", [48, 48], 4)
    layers.check(0, [1, 1, 0, 0, 0, 0, 0])
    os.truncate(
        layers.path, layers.path.stat().st_size - layers.in_memory[1].bytes_eB.shape[1] // 2
    )
    layers.check(1, [1, 1, 0, 0, 0, 0, 0])
    words = (
        r"expert 6 of MoE layer 1 cannot be read from .*file, .*start again.*it ends at byte \d+"
    )
    for counts in (
        [0, 0, 0, 0, 1, 0, 1],
        [1, 0, 0, 0, 0, 0, 0],
    ):  # whatever came with the error is not used later
        with pytest.raises(RuntimeError, match=words):
            layers.check(1, counts)


def fused(layers: Layers, top_k: int, guesses: bool = True) -> list[Any]:
    """Blocks with a router each. guesses: the second one's experts are read ahead of it."""
    ops = pick_ops("cpu", BF16, "native")
    blocks = []
    for seed in range(len(layers.in_memory)):
        router = Router(NativeLinear(rows(E, WIDTH, BF16, 50 + seed)), top_k, RouterRule(), ops)
        blocks.append(NativeExperts().fuse(router))
    if guesses:
        blocks[0].predict_experts_of(blocks[1])
    return blocks


@pytest.mark.parametrize("slots", [4, 8, 14])
def test_reading_ahead_changes_no_bit(slots: int, tmp_path: Path) -> None:
    layers = Layers(tmp_path / "file", [48, 80], slots)
    blocks = fused(layers, 2)
    for step in range(60):
        x = rows(1 + step % 4, WIDTH, BF16, step)
        for block, ours, theirs in zip(blocks, layers.on_disk, layers.in_memory, strict=True):
            out, counts = block(x, ours, len(x))
            expected, expected_counts = block(x, theirs, len(x))
            assert torch.equal(out, expected)
            assert np.array_equal(counts, expected_counts)


@pytest.mark.parametrize("guesses", [True, False])
def test_a_right_guess_is_a_hit(guesses: bool, tmp_path: Path) -> None:
    """Both layers see the same row, so the guess is right."""
    layers = Layers(tmp_path / "file", [48, 80], 6)
    misses = 0
    blocks = fused(layers, 2, guesses)
    for step in range(40):
        x = rows(1, WIDTH, BF16, step)
        blocks[0](x, layers.on_disk[0], 1)
        layers.cache.take_stats()
        blocks[1](x, layers.on_disk[1], 1)
        misses += layers.cache.take_stats()[1]
    assert misses <= 4 if guesses else misses > 20


@pytest.mark.parametrize(
    ("offset", "experts", "size", "words"),
    [(63, 2, 64, "whole units"), (64, 2, 65, "whole units"), (0, 0, 64, "whole")],
)
def test_what_does_not_lie_as_kernels_need_it_is_refused(
    offset: int, experts: int, size: int, words: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file:
        cache = module.ExpertCache(file.fileno(), "file")
    with pytest.raises(ValueError, match=words):
        cache.add(offset, experts, size)
    with pytest.raises(ValueError, match="for one expert at least"):
        cache.open(1 << 20)


def test_experts_on_disk_do_not_move(tmp_path: Path) -> None:
    layers = Layers(tmp_path / "file", [48], 3)
    with pytest.raises(AssertionError, match="cannot move"):
        NativeExperts().take(layers.on_disk[0], 1)
    assert isinstance(make(BF16), ExpertWeights)
