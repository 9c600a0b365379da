"""The sampler by the Triton kernels gives what the sampler in torch gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moeserve.engine.blocks import KVGroup
from moeserve.engine.kv_rule import KVRule
from moeserve.engine.plan import NewRequest
from moeserve.runner.gpu import RingUpload
from moeserve.runner.sampling.reference import ReferenceSampler
from moeserve.runner.sampling.rules import Rules
from moeserve.runner.sampling.sampler import Sampled, Sampler, Status
from moeserve.runner.sampling.triton import TritonSampler
from moeserve.runner.tables import Tables, host_upload
from moeserve.sampling import TokenSampling
from tests.runner.test_sampler import MAX_LEN, random_sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 24


def pair(vocab: int) -> tuple[Sampler, Sampler]:
    """In torch on the CPU, and by Triton."""
    upload = RingUpload(DEVICE, 64, pinned=DEVICE.type == "cuda")
    group = (KVGroup(KVRule(), 16, (0,)),)
    plain = Tables(SLOTS, MAX_LEN, group, torch.device("cpu"), host_upload)
    tables = Tables(SLOTS, MAX_LEN, group, DEVICE, upload)
    return ReferenceSampler(vocab, plain, host_upload), TritonSampler(vocab, tables, upload)


def add(
    samplers: tuple[Sampler, Sampler], slot: int, history: np.ndarray, num_prompt: int, **asked: Any
) -> None:
    for sampler in samplers:
        assert (
            sampler.add(
                NewRequest(slot, history, num_prompt, TokenSampling(**({"max_tokens": 9} | asked)))
            )
            is None
        )
        sampler._tables.add(slot, history)
        sampler._tables.apply()


def sample_both(
    samplers: tuple[Sampler, Sampler], logits: torch.Tensor, slots: Any, at: Any, masks: Any = None
) -> tuple[Sampled, Sampled]:
    plain, triton = samplers
    return plain.sample(logits.clone(), slots, at, masks), triton.sample(
        logits.to(DEVICE, copy=True), slots, at, masks
    )


@pytest.mark.full("kernels", keep=1)
@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_of_requests(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = 600
    count = 14
    samplers = pair(vocab)
    slots = rng.permutation(SLOTS)[:count].astype(np.int64)
    at = rng.integers(1, MAX_LEN, count).astype(np.int64)
    for slot, length in zip(slots.tolist(), at.tolist(), strict=True):
        history = rng.integers(0, 9, length).astype(np.int32)
        asked = random_sampling(rng, vocab)
        add(samplers, slot, history, int(rng.integers(1, length + 1)), **(asked | {"logprobs": 2}))
    logits = torch.from_numpy(rng.normal(0, 2, (count, vocab)).astype(np.float32))
    logits[3, 5] = torch.nan
    expected, found = sample_both(samplers, logits, slots, at)
    assert found.status_S.tolist() == expected.status_S.tolist()
    assert expected.status_S[3] == Status.NOT_FINITE
    assert found.tokens_S.tolist() == expected.tokens_S.tolist()
    assert expected.logprobs is not None
    assert found.logprobs is not None
    rows = [i for i in range(count) if i != 3]
    for ours, theirs in (("ids_PN", True), ("rank_P", True), ("values_PN", False)):
        a = getattr(found.logprobs, ours).cpu()[rows]
        b = getattr(expected.logprobs, ours)[rows]
        torch.testing.assert_close(a, b, rtol=0 if theirs else 1e-5, atol=0 if theirs else 1e-5)


def test_greedy_rows_alone_and_nothing_left() -> None:
    samplers = pair(70)
    history = np.array([1, 2], np.int32)
    add(samplers, 0, history, 2, seed=1, temperature=0.0)
    add(
        samplers,
        1,
        history,
        2,
        seed=1,
        temperature=0.0,
        allowed_ids=[3],
        logit_bias={3: float("-inf")},
    )
    logits = torch.randn(2, 70, generator=torch.Generator().manual_seed(2))
    slots = np.array([0, 1])
    at = np.array([2, 2])
    expected, found = sample_both(samplers, logits, slots, at)
    assert (
        found.status_S.tolist()
        == expected.status_S.tolist()
        == [Status.FINE, Status.NOTHING_ALLOWED]
    )
    assert found.tokens_S.tolist() == expected.tokens_S.tolist() == [int(logits[0].argmax()), 0]
    _, alone = sample_both(samplers, logits[:1], slots[:1], at[:1])
    assert alone.tokens_S.tolist() == found.tokens_S.tolist()[:1]
    assert not len(alone.logprob_rows_P)


def test_a_failing_row_changes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 0's bias reaches 2 of the 3 that it would need, however often rows are tried."""
    samplers = pair(70)
    for slot, token in ((0, 3), (1, 4)):
        add(
            samplers,
            slot,
            np.array([1], np.int32),
            1,
            seed=1,
            temperature=0.0,
            logit_bias={token: 2.0},
        )
    apply = Rules.apply

    def failing(self: Rules, x_V: torch.Tensor, num_answer: int) -> None:
        if self.bias_ids is not None and self.bias_ids.tolist() == [4]:
            raise ValueError("broken")
        apply(self, x_V, num_answer)

    monkeypatch.setattr(Rules, "apply", failing)
    logits = torch.zeros(2, 70)
    logits[:, 7] = 3
    for found in sample_both(samplers, logits, np.array([0, 1]), np.array([1, 1])):
        assert found.failures == {1: "sampling failed: ValueError: broken"}
        assert int(found.tokens_S[0]) == 7


def test_logits_processors_see_raw_logits_and_all_tokens_of_their_row() -> None:
    samplers = pair(70)
    seen = []

    def factory(args: dict[str, int]) -> Any:
        def change(prompt_ids: Any, output_ids: Any, logits: torch.Tensor) -> torch.Tensor:
            assert (logits.dtype, logits.shape) == (torch.float32, (70,))
            seen.append((list(prompt_ids), list(output_ids), int(logits.argmax())))
            logits[args["token"]] += 100 if output_ids else float("nan")
            return logits

        return change

    for sampler in samplers:
        sampler.factories._factories["f"] = factory
    asked = {"seed": 1, "temperature": 0.0, "logit_bias": {9: 5.0}, "allowed_ids": [9, 20, 21]}
    add(
        samplers,
        3,
        np.array([1, 2, 4], np.int32),
        2,
        processors=(("f", '{"token":20}'), ("f", '{"token":3}')),
        **asked,
    )
    add(samplers, 5, np.array([1, 2], np.int32), 2, **asked)
    add(samplers, 6, np.array([1, 2], np.int32), 2, processors=(("f", '{"token":1}'),), **asked)
    logits = torch.zeros(4, 70)
    logits[:3, 8] = 4.0
    logits[3] = torch.nan
    for found in sample_both(samplers, logits, np.array([5, 3, 6, 6]), np.array([2, 3, 2, 2])):
        assert found.tokens_S[:2].tolist() == [9, 20]
        assert found.status_S.tolist()[3] == Status.NOT_FINITE
        assert found.failures.keys() == {2}
        assert "'f' failed: ValueError: expected torch.float32 [70]" in found.failures[2]
    assert seen == [([1, 2], [4], 8), ([1, 2], [4], 20), ([1, 2], [], 8)] * 2
    seen.clear()
    add(samplers, 3, np.array([1, 2, 4], np.int32), 2, **asked)  # the slot's next request has none
    for found in sample_both(samplers, logits[:1], np.array([3]), np.array([3])):
        assert (found.tokens_S.tolist(), seen) == ([9], [])
