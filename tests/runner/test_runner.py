"""The runner's steps, driven by hand-made plans over a model that checks every K/V host block it
reads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.engine.plan import BlockMove, StepPlan
from moeserve.errors import ConfigError, DoesNotFit
from moeserve.runner.gpu import RingUpload
from moeserve.sampling import TokenSampling
from tests.runner.harness import VOCAB, Driver, FakeRunner, Request, fake_runner, greedy, spec_of

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@cache
def alone(name: str) -> Request:
    """Twelve tokens of the prompt with nothing else around."""
    driver = Driver(fake_runner())
    request = driver.add(Request(list(PROMPT), SAMPLINGS[name]))
    driver.generate(request, 12)
    return request


SAMPLINGS = {
    "greedy": greedy(),
    "random": TokenSampling(seed=7, max_tokens=100, temperature=0.8),
    "filtered": TokenSampling(seed=7, max_tokens=100, top_k=20, top_p=0.9, min_p=0.01),
    "penalised": TokenSampling(
        seed=3, max_tokens=100, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2
    ),
    "ruled": greedy(logit_bias={5: 3.0}, bad_seqs=((7,), (9, 3)), min_tokens=4, stop_ids=(1, 2)),
}


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_do_not_matter(name: str, chunk: int) -> None:
    reference = alone(name)
    driver = Driver(fake_runner())
    request = driver.add(Request(list(PROMPT), SAMPLINGS[name]))
    assert driver.generate(request, 12, chunk) == reference.output
    assert all(map(torch.equal, request.logits, reference.logits))


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("depth", [1, 2])
def test_neighbours_and_depth_do_not_matter(name: str, depth: int) -> None:
    reference = alone(name)
    driver = Driver(fake_runner())
    rng = np.random.default_rng(depth)
    samplings = list(SAMPLINGS.values())
    others = [
        driver.add(Request(rng.integers(0, VOCAB, 3 + i).tolist(), samplings[i % len(samplings)]))
        for i in range(5)
    ]
    request = driver.add(Request(list(PROMPT), SAMPLINGS[name]))
    in_flight: list[tuple[Any, StepPlan, Any]] = []
    for _ in range(14):
        chunks = [(r, 4) for r in [*others, request] if r.num_known > r.num_computed]
        plan = driver.plan(chunks)
        in_flight.append((chunks, plan, driver.runner.launch(plan)))
        if len(in_flight) == depth:
            chunks, plan, collect = in_flight.pop(0)
            driver.update_from_output(chunks, plan, collect())
    assert request.output[:10] == reference.output[:10]
    assert all(map(torch.equal, request.logits[:10], reference.logits))


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(name: str) -> None:
    reference = alone(name)
    driver = Driver(fake_runner())
    request = driver.add(Request(list(PROMPT), SAMPLINGS[name]))
    driver.generate(request, 5)
    driver.remove(request)
    driver.generate(driver.add(Request([50] * 20, greedy())), 3)
    driver.add(request)
    assert driver.generate(request, 12, 6) == reference.output
    assert all(map(torch.equal, request.logits, reference.logits))


def test_a_cached_prefix_gives_the_same_bits() -> None:
    reference = alone("greedy")
    driver = Driver(fake_runner())
    first = driver.add(Request(list(PROMPT), greedy()))
    driver.generate(first, 3)
    second = driver.add(Request(list(PROMPT), greedy()))
    # Two whole blocks are shared; the driver hands them over as a scheduler's cache hit would.
    shared = first.blocks[0][:2]
    plan_blocks = [(second.slot, i, block) for i, block in enumerate(shared)]
    second.blocks = [list(shared)]
    second.num_computed = 8
    plan = driver.plan([(second, 100)])
    columns = np.array(plan_blocks, dtype=np.int32).T
    diff = type(plan.diffs[0])(
        *(np.concatenate(p) for p in zip(columns, _columns(plan), strict=True))
    )
    plan = StepPlan(
        plan.step,
        plan.slots_R,
        plan.starts_R,
        plan.counts_R,
        plan.samples_R,
        (diff,),
        plan.new_requests,
    )
    driver.update_from_output([(second, 100)], plan, driver.runner.execute(plan))
    assert driver.generate(second, 12) == reference.output


def _columns(plan: StepPlan) -> tuple[Any, ...]:
    return plan.diffs[0].slots_N, plan.diffs[0].indices_N, plan.diffs[0].blocks_N


def test_window_groups_have_their_own_tables_and_share_tensors() -> None:
    spec = spec_of(num_layers=4, windows=(None, 6, None, 6))
    runner = fake_runner(spec)
    assert [layer[0].data_ptr() for layer in runner.kv.layers[::2]] == [
        layer[0].data_ptr() for layer in runner.kv.layers[1::2]
    ]
    reference = Driver(runner)
    expected = reference.generate(reference.add(Request(list(PROMPT), greedy())), 12)
    chunked = Driver(fake_runner(spec))
    other = chunked.add(Request([4, 4, 4], greedy()))
    chunked.run([(other, 3)])
    assert chunked.generate(chunked.add(Request(list(PROMPT), greedy())), 12, 2) == expected


def test_blocks_return_from_the_store() -> None:
    driver = Driver(fake_runner(host_store_bytes=1 << 14))
    request = driver.add(Request(list(PROMPT), greedy()))
    driver.run([(request, 100)])
    expected = alone("greedy").output
    old = request.blocks[0][:2]
    new = [driver.free_blocks.pop(0), driver.free_blocks.pop(0)]
    kv = driver.runner.kv
    stores = tuple(BlockMove(block, entry) for block, entry in zip(old, (3, 0), strict=True))
    loads = tuple(BlockMove(block, entry) for block, entry in zip(new, (3, 0), strict=True))
    nothing = np.zeros(0, dtype=np.int32)
    moves = StepPlan(
        99, nothing, nothing, nothing, nothing.astype(bool), (), stores=stores, loads=loads
    )
    assert driver.runner.execute(moves).tokens_N.tolist() == []
    for layer in kv.layers:
        assert torch.equal(layer[0][new], layer[0][old])
        assert layer[0][old].any()
    assert driver.generate(request, 12) == expected


def test_dummy_runs_leave_the_pool_untouched() -> None:
    runner = fake_runner()
    runner.warm_up()
    assert not any(layer[0].any() or layer[1].any() for layer in runner.kv.layers)


def test_the_shortest_context_warms_up() -> None:
    runner = fake_runner(max_model_len=1, max_num_seqs=1)
    assert runner.limits.max_model_len == 1
    assert not runner.tables.blocks[0].any()


class RingRunner(FakeRunner):
    """Copies all inputs through the ring, as a device with memory of its own would need."""

    def _cache_device_properties(self) -> None:
        super()._cache_device_properties()
        self.upload = RingUpload(self.device, 4, pinned=False)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_device_that_copies_its_inputs_gives_the_same_tokens(name: str) -> None:
    driver = Driver(fake_runner(cls=RingRunner))
    assert (
        driver.generate(driver.add(Request(list(PROMPT), SAMPLINGS[name])), 12)
        == alone(name).output
    )


def test_tokens_outside_the_vocabulary_fail_that_request_alone() -> None:
    driver = Driver(fake_runner())
    bad = driver.add(Request([1, VOCAB, 3], greedy()))
    rules = driver.add(Request([1, 2], greedy(logit_bias={VOCAB + 5: 1.0})))
    good = driver.add(Request(list(PROMPT), greedy()))
    result = driver.run([(bad, 9), (rules, 9), (good, 9)])
    assert set(result.failed) == {bad.slot, rules.slot}
    assert "vocabulary" in result.failed[bad.slot]
    assert str(VOCAB + 5) in result.failed[rules.slot]
    assert good.output == alone("greedy").output[:1]
    driver.remove(bad)
    assert (
        driver.generate(driver.add(Request(list(PROMPT), greedy())), 12) == alone("greedy").output
    )


def test_logits_that_are_not_finite_fail_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(fake_runner())
    requests = [
        driver.add(Request(list(PROMPT), s)) for s in (greedy(), greedy(), *SAMPLINGS.values())
    ]
    plain = driver.runner.model.logits

    def with_nan(hidden_SD: torch.Tensor) -> torch.Tensor:
        logits_SV = plain(hidden_SD)
        logits_SV[1, 17] = float("nan")
        logits_SV[3, 5] = float("inf")
        return logits_SV

    monkeypatch.setattr(driver.runner.model, "logits", with_nan)
    result = driver.run([(request, 100) for request in requests])
    assert set(result.failed) == {requests[1].slot, requests[3].slot}
    assert all("not finite" in message for message in result.failed.values())
    assert result.tokens_N[[1, 3]].tolist() == [-1, -1]
    for request, name in ((requests[0], "greedy"), (requests[4], "filtered")):
        assert request.output == alone(name).output[:1]


def test_numbers_that_cannot_work_are_refused_before_loading() -> None:
    cases = {
        "block_size=12": {"block_size": 12},
        "max_model_len=1000 is more than": {"max_model_len": 1000},
        "block_size=80": {"block_size": 80},
    }
    for message, settings in cases.items():
        with pytest.raises(ConfigError, match=message):
            fake_runner(**settings)


def test_a_context_that_does_not_fit_is_reduced_or_refused() -> None:
    runner = fake_runner(kv_cache_bytes=40 * 128)
    assert runner.limits.max_model_len == 39 * 4 - 4 * int(0.01 * 40)
    assert "reduced from 512" in runner.notes[0]
    with pytest.raises(DoesNotFit, match="max_model_len=156 would fit"):
        fake_runner(kv_cache_bytes=40 * 128, max_model_len=512)
