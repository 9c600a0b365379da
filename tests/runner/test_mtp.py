"""Drafts of heads for multi-token prediction against a plain loop over whole sequences."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.comm.tensor import TensorParallel
from moeserve.comm.world import World
from moeserve.config import config_of
from moeserve.engine.blocks import groups_of
from moeserve.engine.plan import BlockMove, StepPlan, StepResult
from moeserve.errors import CheckpointError, ConfigError
from moeserve.models.hf_config import read_model_spec
from moeserve.models.mtp import with_mtp
from moeserve.ops.native_rows import AVAILABLE
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.kv_cache import KVCache, block_bytes
from moeserve.runner.kv_transport import HostTransport
from moeserve.runner.load import Progress
from moeserve.runner.speculation.base import Drafter, Verified
from moeserve.runner.speculation.drafters import load_drafter
from moeserve.runner.speculation.model_proposer import ModelProposer
from moeserve.runner.speculation.native_head import native_head
from moeserve.runner.tables import host_upload
from moeserve.speculation import SpeculationSpec
from tests.comm.board import Board, BoardTensor
from tests.comm.ranks import together
from tests.models.conftest import peak_bytes
from tests.mtp import LAYER, Head, write_mtp_checkpoint
from tests.specs import make_spec

from .harness import Driver, Request, greedy
from .test_speculation import serve, submits_of

ONE = World()
K = 3
DRAFTED = 1 + K  # tokens of a row with drafts
PROMPT = torch.randint(0, 250, (75,), generator=torch.Generator().manual_seed(1)).tolist()


class DraftingRunner(CPUModelRunner):
    """Drafts with a head after every step, and keeps the last step's hidden states.

    With `native` it drafts in one call, of which nothing can be kept.
    """

    native = False

    def load_model(self, progress: Progress) -> None:
        super().load_model(progress)
        parts = self.model, self.config, self.quantize_to, self.shard(), self.properties.memory()
        self.head = load_drafter(
            self.spec, self.model_dir, SpeculationSpec.parse(f"mtp:{K}"), *parts
        ).model
        self.hidden: list[Tensor] = []

    def initialize_kv_cache(self) -> None:
        super().initialize_kv_cache()
        drafter = Drafter(
            self.head,
            self.kv.draft_layers,
            self.spec.draft_rules,
            takes_hidden=True,
            combine=getattr(self.head, "combine", None),
        )
        parts = self.groups, self.tables, self.sampler
        one_call = (
            native_head(self.head, drafter.caches, drafter.rules, *parts) if self.native else None
        )
        assert not self.native or one_call is not None
        self.proposer = ModelProposer(K, drafter, *parts, self.upload, one_call)
        forward = self.head.forward

        def kept(*args: Any) -> Tensor:
            self.hidden.append(forward(*args))
            return self.hidden[-1]

        self.head.forward = kept  # type: ignore[method-assign]

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.hidden.clear()
        return super().launch(plan)

    def drafts(self, request: Request) -> list[int]:
        return self.proposer.drafts(np.full(K, request.slot), np.arange(K)).tolist()


class DraftingDriver(Driver):
    """Rows of `drafting` requests end with K drafts."""

    drafting: Sequence[Request] = ()

    def plan(self, chunks: Sequence[tuple[Request, int]]) -> StepPlan:
        self.drafting = [request for request, chunk in chunks if chunk == DRAFTED]
        for request in self.drafting:
            request.num_known += K
        plan = replace(super().plan(chunks), propose=True)
        if not self.drafting:
            return plan
        return replace(
            plan, num_drafts_R=np.array([K * (chunk == DRAFTED) for _, chunk in chunks], np.int32)
        )

    def update_from_output(
        self, chunks: Sequence[tuple[Request, int]], plan: StepPlan, result: StepResult
    ) -> None:
        tokens = iter(result.tokens_N.tolist())
        counts = iter(np.ones(len(chunks), int) if result.counts_S is None else result.counts_S)
        for (request, _), samples in zip(chunks, plan.samples_R, strict=True):
            if samples:
                request.output += islice(tokens, next(counts))
                request.num_known = len(request.prompt + request.output)
                request.num_computed = request.num_known - 1


def runner_of(
    path: Path,
    world: World = ONE,
    ranks: TensorParallel | None = None,
    kind: type[DraftingRunner] = DraftingRunner,
    **settings: Any,
) -> DraftingRunner:
    values = {
        "max_num_seqs": 4,
        "kv_cache_bytes": 1 << 22,
        "threads": 1,
        "max_num_batched_tokens": 256,
    }
    config = config_of(path, **(values | settings))
    runner = kind(config, with_mtp(read_model_spec(path)), path, world)
    if ranks is not None:
        runner.tp = ranks
    runner.prepare()
    return runner


class NativeRunner(DraftingRunner):
    native = True


def driver_of(path: Path, *args: Any, **settings: Any) -> DraftingDriver:
    return DraftingDriver(runner_of(path, *args, **settings))


def naive(
    head: Head, tokens: Sequence[int], choose: Callable[[Tensor, int], int]
) -> tuple[Tensor, list[int]]:
    """Return the head's hidden states at all tokens but the last, and K drafts after it.

    choose(logits, position) picks a draft.
    """
    inputs = head.inputs(tokens[1:], head.target_hidden(tokens[:-1]))
    first = head.hidden(inputs)
    drafts = list[int]()
    hidden = first
    for position in range(len(tokens), len(tokens) + K):
        drafts.append(choose(head.logits(hidden[-1:]), position))
        inputs = torch.cat((inputs, head.inputs(drafts[-1:], hidden[-1:])))
        hidden = head.hidden(inputs)
    return first, drafts


@pytest.fixture(scope="module")
def make_head(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Head]:
    made: dict[str, Head] = {}

    def make(name: str) -> Head:
        if name not in made:
            made[name] = write_mtp_checkpoint(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


def check_drafts(head: Head, driver: DraftingDriver, request: Request) -> Tensor:
    """Compares a request's drafts with the plain loop's; returns the head's hidden states."""

    def choose(logits: Tensor, position: int) -> int:
        return int(
            driver.runner.sampler.draft(logits, np.array([request.slot]), np.array([position]))
        )

    hidden, drafts = naive(head, request.prompt + request.output, choose)
    assert driver.runner.drafts(request) == drafts
    assert len(set(drafts)) > 1
    return hidden


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", LAYER)
def test_hidden_states_and_drafts_are_those_of_a_plain_loop(
    name: str, temperature: float, make_head: Callable[[str], Head]
) -> None:
    head = make_head(name)
    driver = driver_of(head.path)
    request, other = (
        driver.add(Request(p, greedy(temperature=temperature, seed=3)))
        for p in (PROMPT, PROMPT[:9])
    )
    hidden: list[Tensor] = []
    for chunk in (31, 1, 43, 1, 1):
        result = driver.run([(other, 1), (request, chunk)])
        hidden.append(driver.runner.hidden[0][1 : 1 + chunk])
        if result.expert_tokens_LE is not None:
            assert len(result.expert_tokens_LE) == len(
                driver.runner.spec.moe_layers
            )  # without the head's
    expected = check_drafts(head, driver, request)
    error = (torch.cat(hidden) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-4, error


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize("settings", [{}, {"graphs": "full"}, {"block_size": 64}], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "mimo_v2_flash"])
def test_right_and_wrong_drafts_leave_what_later_drafts_need(
    name: str, settings: dict[str, Any], make_head: Callable[[str], Head]
) -> None:
    """Steps with every number of right drafts; blocks end at all places of a row."""
    head = make_head(name)
    plain = driver_of(head.path)
    expected = plain.generate(plain.add(Request(PROMPT, greedy(temperature=0.8, seed=3))), 40)
    driver = driver_of(head.path, **settings)
    request = driver.add(Request(PROMPT, greedy(temperature=0.8, seed=3)))
    driver.run([(request, 50)])
    driver.run([(request, 50)])
    for right in (0, 1, 2, 3, 3, 1, 0, 3, 3, 2):
        known = len(request.output)
        drafts = expected[known : known + K]
        drafts[right:] = [(token + 1) % 256 for token in drafts[right:]]
        with torch.inference_mode():
            driver.runner.proposer._adopt_collected()
            driver.runner.proposer._drafts_SK[request.slot] = torch.tensor(drafts)
        driver.run([(request, DRAFTED)])
        assert len(request.output) == known + 1 + right
        check_drafts(head, driver, request)
    assert request.output == expected[: len(request.output)]


@pytest.mark.skipif(not AVAILABLE, reason="no native code")
@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize(
    "settings",
    [{}, {"graphs": "full"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}, {"threads": 2}],
    ids=str,
)
def test_one_native_call_guesses_the_same(settings: Any, make_head: Callable[[str], Head]) -> None:
    """It does so after chunks of prompts, right and wrong drafts and steps without drafts.

    It works up to the end of the context. A request with a filter is not drafted by the call, nor
    are the others of its step.
    """
    kinds = (NativeRunner, {"kernels": "native"}), (DraftingRunner, {})
    one, other = (
        driver_of(make_head("qwen3_moe").path, kind=kind, max_model_len=100, **(settings | more))
        for kind, more in kinds
    )
    sampling = greedy(temperature=0.8, seed=3), greedy(), greedy(temperature=0.5, seed=1, top_k=5)
    pairs = [
        [driver.add(Request(PROMPT[: 75 - i], how)) for driver in (one, other)]
        for i, how in enumerate(sampling)
    ]
    chunks = [
        (50, 1, 0),
        (25, 73, 0),
        *[(DRAFTED, DRAFTED, 0)] * 5,
        (0, DRAFTED, 73),
        (1, 1, 1),
        (DRAFTED, 1, 0),
    ]
    for chunk in chunks:
        for i, driver in enumerate((one, other)):
            driver.run(
                [(pair[i], count) for pair, count in zip(pairs, chunk, strict=True) if count]
            )
        for (mine, theirs), count in zip(pairs, chunk, strict=True):
            if count and mine.output:
                assert mine.output == theirs.output
                assert one.runner.drafts(mine) == other.runner.drafts(theirs)
    assert not one.runner.hidden  # the last step was the call's


def test_drafts_at_the_end_of_the_context(make_head: Callable[[str], Head]) -> None:
    """There are no blocks and no table entries left for them."""
    head = make_head("qwen3_moe")
    driver = driver_of(head.path, max_model_len=80)
    request = driver.add(Request(PROMPT, greedy()))
    for length in range(76, 81):
        driver.run([(request, 75)])
        assert len(request.prompt + request.output) == length
        if length < 78:
            check_drafts(head, driver, request)


def test_penalties_and_rules_hold_for_drafts(make_head: Callable[[str], Head]) -> None:
    head = make_head("qwen3_moe")
    driver = driver_of(head.path)
    allowed = greedy(allowed_ids=(7, 8, 9, 10), bad_seqs=((7, 8),), presence_penalty=1000.0)
    request = driver.add(Request(PROMPT, allowed))
    driver.run([(request, 75)])
    assert sorted(request.output + driver.runner.drafts(request)) == [7, 8, 9, 10]


def test_a_plan_that_asks_for_no_drafts_keeps_the_cache(make_head: Callable[[str], Head]) -> None:
    head = make_head("qwen3_moe")
    driver = driver_of(head.path)
    request = driver.add(Request(PROMPT, greedy()))
    for _ in range(3):
        plan = replace(driver.plan([(request, 30)]), propose=False)
        result = driver.runner.execute(plan)
        assert len(driver.runner.hidden) == 1
        assert result.num_drafts_S is None or not result.num_drafts_S.any()
        driver.update_from_output([(request, 30)], plan, result)
    driver.run([(request, 1)])
    check_drafts(head, driver, request)


def test_a_plan_that_is_launched_again_has_the_same_drafts(
    make_head: Callable[[str], Head],
) -> None:
    head = make_head("qwen3_moe")
    driver = driver_of(head.path)
    request = driver.add(Request(PROMPT, greedy()))
    driver.run([(request, 75)])
    before = driver.runner.drafts(request)
    plan = driver.plan([(request, DRAFTED)])
    first = driver.runner.launch(plan)  # whose result is lost
    assert driver.runner.drafts(request) == before
    assert driver.runner.execute(plan).tokens_N.tolist() == first().tokens_N.tolist()


def test_an_idle_runner_keeps_nothing_of_a_step(make_head: Callable[[str], Head]) -> None:
    driver = driver_of(make_head("qwen3_moe").path)
    read = []
    launch = driver.runner.proposer.launch

    def seen(step: Verified) -> None:
        read.append(weakref.ref(step.hidden_TD))
        launch(step)

    driver.runner.proposer.launch = seen  # type: ignore[method-assign]
    driver.run([(driver.add(Request(PROMPT, greedy())), 75)])
    assert [ref() for ref in read] == [None]


@pytest.mark.full("models", keep=1)
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        "qwen3_next",
        "deepseek_v32",
        "mimo_v2_flash",
        "qwen4_exp_text",
        "glm5_next",
        "deepseek_v4",
    ],
)
def test_drafts_change_no_token(name: str, make_head: Callable[[str], Head]) -> None:
    """Under the scheduler, with prefix cache, preemption and requests that start over."""
    head = make_head(name)
    settings = {
        "max_num_seqs": 5,
        "kv_cache_bytes": 1 << 23,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
    }
    submits = submits_of(256, 14)
    runner = runner_of(head.path, **settings)
    answers, verified, right = serve(runner, submits)
    assert verified == 0
    runner.limits = replace(runner.limits, num_drafts=K)
    drafted, verified, right = serve(runner, submits)
    assert drafted == answers
    # The small Qwen3.8 ends its answers earlier: the id that ends n-grams ends an answer, too.
    assert verified > (150 if name == "qwen4_exp_text" else 300)
    assert right > 0


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize(
    "name", ["deepseek_v3", "qwen3_next", "mimo_v2_flash", "qwen4_exp_text", "deepseek_v4"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_parallel_ranks_guess_alike(
    name: str, dtype: str, make_head: Callable[[str], Head]
) -> None:
    head = make_head(name)
    board = Board(2)

    def guess(driver: DraftingDriver) -> list[int]:
        requests = [
            driver.add(Request(PROMPT[:n], greedy(temperature=0.5, seed=n))) for n in (40, 23)
        ]
        for chunk in (17, 23, DRAFTED, DRAFTED):
            driver.run([(request, chunk) for request in requests])
        return [
            token
            for request in requests
            for token in request.output + driver.runner.drafts(request)
        ]

    def rank(number: int) -> list[int]:
        world = World(number, 2, 2, ep=False)
        return guess(driver_of(head.path, world, BoardTensor(number, board), dtype=dtype, tp=2))

    alone = guess(driver_of(head.path, dtype=dtype))
    assert together([lambda: rank(0), lambda: rank(1)]) == [alone, alone]


def test_caches_of_the_head_are_in_the_blocks_with_full_attention() -> None:
    spec = make_spec(num_layers=3, windows=[8, None, 8], vocab_size=9, hidden_size=4)
    drafting = replace(spec, draft_layers=(spec.layers[0], spec.layers[1]))
    groups = groups_of(drafting.kv_rules, 4, len(drafting.draft_layers))
    assert [group.layers for group in groups] == [(0, 2), (1, 3, 4)]
    sizes = [
        block_bytes(g, s, torch.float32)
        for s, g in ((spec, groups_of(spec.kv_rules, 4)), (drafting, groups))
    ]
    assert sizes[1] == sizes[0] * 2  # two places more, which no layer of the model shares
    kv = KVCache(groups, drafting, 3, torch.float32, torch.device("cpu"))
    transport = HostTransport({0: 2}, torch.device("cpu"), host_upload)
    transport.register(kv.pools)
    assert (len(kv.layers), len(kv.draft_layers)) == (3, 2)
    kv.draft_layers[1][0][2] = 5.0
    transport.save([BlockMove(2, 0)])
    kv.draft_layers[1][0].zero_()
    transport.load([BlockMove(1, 0)]).finish()
    assert (kv.draft_layers[1][0][1] == 5.0).all()


def test_memory_stays_below_the_bound(make_head: Callable[[str], Head]) -> None:
    driver = driver_of(make_head("deepseek_v3").path)
    request = driver.add(Request(PROMPT * 3, greedy()))
    plan = driver.plan([(request, 225)])
    bound = driver.runner.profile_run()
    assert peak_bytes(lambda: driver.runner.execute(plan)) <= bound


@pytest.mark.full("models")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mimo_v2_flash"])
def test_interpreted_triton_kernels(name: str, make_head: Callable[[str], Head]) -> None:
    driver = driver_of(make_head(name).path, kernels="triton")
    request = driver.add(Request(PROMPT[:5], greedy(temperature=0.5, seed=1)))
    driver.run([(request, 3)])
    driver.run([(request, 2)])
    check_drafts(make_head(name), driver, request)


@pytest.mark.parametrize(
    "settings", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_a_head_of_narrow_weights_or_entries_guesses(
    settings: Any, make_head: Callable[[str], Head]
) -> None:
    driver = driver_of(make_head("glm4_moe").path, **settings)
    request = driver.add(Request(PROMPT, greedy()))
    driver.run([(request, 75)])
    assert len(set(driver.runner.drafts(request))) > 1


def test_a_checkpoint_without_a_head_is_refused(
    make_head: Callable[[str], Head], make_checkpoint: Any
) -> None:
    with pytest.raises(ConfigError, match="has no head for multi-token prediction"):
        driver_of(make_checkpoint("qwen3_moe").path)
    with pytest.raises(CheckpointError, match=r"model.layers.3.enorm.weight.*shape"):
        driver_of(make_checkpoint("deepseek_v3").path)
    spec = replace(make_spec(windows=[8, 8], vocab_size=9, hidden_size=4))
    with pytest.raises(ConfigError, match="layer with full attention"):
        with_mtp(replace(spec, mtp=spec.layers[0]))
