"""Draft models and EAGLE-3 heads: drafts against plain loops over whole sequences, and drafters
that do not fit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.comm.tensor import TensorParallel
from moeserve.comm.world import World
from moeserve.config import config_of
from moeserve.errors import CheckpointError, ConfigError
from moeserve.models.hf_config import read_model_spec
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.speculation.drafters import with_drafter
from moeserve.runner.speculation.model_proposer import ModelProposer
from moeserve.speculation import SpeculationSpec
from tests.comm.board import Board, BoardTensor
from tests.comm.ranks import together
from tests.eagle3_checkpoint import Reference, write_eagle3
from tests.models.conftest import peak_bytes
from tests.mtp import write_mtp_checkpoint

from .harness import Request, greedy, written
from .test_mtp import DRAFTED, DraftingDriver, K
from .test_speculation import runner_of, serve, submits_of

ONE = World()
PROMPT = torch.randint(0, 250, (75,), generator=torch.Generator().manual_seed(1)).tolist()


class DraftingRunner(CPUModelRunner):
    """Shows its drafts."""

    def drafts(self, request: Request) -> list[int]:
        assert self.proposer is not None
        return self.proposer.drafts(np.full(K, request.slot), np.arange(K)).tolist()


def driver_of(
    path: Path,
    speculate: str,
    world: World = ONE,
    link: TensorParallel | None = None,
    **settings: Any,
) -> DraftingDriver:
    values = {
        "max_num_seqs": 4,
        "kv_cache_bytes": 1 << 22,
        "threads": 1,
        "max_num_batched_tokens": 256,
    }
    config = config_of(path, **(values | settings), speculate=speculate)
    runner = DraftingRunner(config, read_model_spec(path), path, world)
    if link is not None:
        runner.tp = link
    runner.prepare()
    return DraftingDriver(runner)


@pytest.mark.parametrize(
    ("family", "temperature", "settings"),
    [
        ("qwen3_moe", 0.0, {}),
        ("qwen3_moe", 1.0, {"dtype": "bfloat16"}),
        ("qwen3_moe", 1.0, {"kv_cache_dtype": "int8", "packed_cache": "packed"}),
        ("gpt_oss", 1.0, {"block_size": 64}),
    ],
)
def test_a_draft_model_that_is_the_target_guesses_every_token(
    family: str, temperature: float, settings: dict[str, Any], make_checkpoint: Any, tmp_path: Path
) -> None:
    """Also across blocks, and after the previous step's drafts."""
    path = make_checkpoint(family).path
    if "packed_cache" in settings:
        settings = settings | {"packed_cache": str(tmp_path)}
        driver_of(path, f"model:{path}:{K}", **settings).runner.close()
        written()
    driver = driver_of(path, f"model:{path}:{K}", **settings)
    request = driver.add(Request(PROMPT, greedy(temperature=temperature, seed=3)))
    driver.run([(request, 40)])
    driver.run([(request, 35)])
    for _ in range(12):
        guessed = driver.runner.drafts(request)
        known = len(request.output)
        driver.run([(request, DRAFTED)])
        assert request.output[known : known + K] == guessed
        assert len(request.output) == known + DRAFTED
    assert len(set(request.output)) > 5
    assert len(list(tmp_path.iterdir())) == ("packed_cache" in settings)


@pytest.fixture
def dense(make_checkpoint: Any) -> Any:
    """A small dense model with the targets' vocabulary."""
    return make_checkpoint("qwen3", hidden_size=32, num_hidden_layers=1, head_dim=16)


def logits_of(reference: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0]


def naive_model(
    reference: Any, tokens: list[int], choose: Callable[[Tensor, int], int]
) -> list[int]:
    for _ in range(K):
        tokens = [*tokens, choose(logits_of(reference, tokens)[-1:], len(tokens))]
    return tokens[-K:]


def naive_eagle(
    head: Reference,
    target: Any,
    aux_layers: tuple[int, ...],
    tokens: list[int],
    choose: Callable[[Tensor, int], int],
) -> list[int]:
    with torch.no_grad():
        streams = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        hidden = head.combine(torch.cat([streams[layer][0] for layer in aux_layers], 1))
        for _ in range(K):
            logits, stream = head.forward(torch.tensor(tokens[1:]), hidden)
            tokens = [*tokens, choose(logits[-1:], len(tokens))]
            hidden = torch.cat((hidden, stream[-1:]))
    return tokens[-K:]


def check(driver: DraftingDriver, naive: Callable[..., list[int]], temperature: float) -> None:
    """Two requests, prompts in chunks, then rows with right and wrong drafts."""
    runner = driver.runner
    a, b = (
        driver.add(Request(p, greedy(temperature=temperature, seed=3)))
        for p in (PROMPT, PROMPT[:9])
    )
    for chunk, other in (
        (31, 9),
        (1, 1),
        (43, DRAFTED),
        (DRAFTED, 1),
        (1, DRAFTED),
        (DRAFTED, DRAFTED),
    ):
        driver.run([(b, other), (a, chunk)])
        for request in (a, b):
            if request.output:

                @torch.inference_mode()
                def choose(logits: Tensor, position: int, slot: int = request.slot) -> int:
                    return int(runner.sampler.draft(logits, np.array([slot]), np.array([position])))

                assert runner.drafts(request) == naive(request.prompt + request.output, choose)


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_drafts_of_a_dense_model(
    family: str, temperature: float, make_checkpoint: Any, dense: Any
) -> None:
    driver = driver_of(make_checkpoint(family).path, f"model:{dense.path}")
    check(driver, lambda *given: naive_model(dense.reference, *given), temperature)


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize("settings", [{}, {"kernels": "torch"}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_an_eagle_head(
    temperature: float, settings: dict[str, Any], make_checkpoint: Any, tmp_path: Path
) -> None:
    target = make_checkpoint("qwen3_moe")
    tensors = write_eagle3(tmp_path, eagle_config=..., eagle_aux_hidden_state_layer_ids=[0, 1])
    head = Reference(tensors, target.reference.get_input_embeddings().weight.detach(), {})
    driver = driver_of(target.path, f"eagle:{tmp_path}", **settings)
    check(driver, lambda *given: naive_eagle(head, target.reference, (0, 1), *given), temperature)


@pytest.mark.parametrize("kind", ["model", "eagle"])
def test_tensor_parallel_ranks_have_the_whole_drafter(
    kind: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """Two ranks cannot share its three heads."""
    small = make_checkpoint(
        "qwen3", hidden_size=48, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1
    )
    write_eagle3(tmp_path, num_attention_heads=3, num_key_value_heads=1)
    target = make_checkpoint("qwen3_moe").path
    board = Board(2)
    speculate = f"{kind}:{small.path if kind == 'model' else tmp_path}:{K}"

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
        return guess(
            driver_of(
                target, speculate, World(number, 2, 2, ep=False), BoardTensor(number, board), tp=2
            )
        )

    alone = guess(driver_of(target, speculate))
    assert together([lambda: rank(0), lambda: rank(1)]) == [alone, alone]


@pytest.mark.parametrize("kind", ["model", "eagle"])
def test_memory_stays_below_the_bound(
    kind: str, make_checkpoint: Any, dense: Any, tmp_path: Path
) -> None:
    write_eagle3(tmp_path)
    driver = driver_of(
        make_checkpoint("qwen3_moe").path, f"{kind}:{dense.path if kind == 'model' else tmp_path}"
    )
    request = driver.add(Request(PROMPT * 3, greedy()))
    plan = driver.plan([(request, 225)])
    bound = driver.runner.profile_run()
    assert peak_bytes(lambda: driver.runner.execute(plan)) <= bound


@pytest.mark.full("models", keep=1)
@pytest.mark.parametrize("kind", ["eagle", "itself", "dense"])
def test_drafts_change_no_token(
    kind: str, make_checkpoint: Any, dense: Any, tmp_path: Path
) -> None:
    """All sampling parameters, preemptions, prefix hits, and stops within drafts occur."""
    target = make_checkpoint("qwen3_moe").path
    write_eagle3(tmp_path)
    paths = {
        "itself": f"model:{target}",
        "dense": f"model:{dense.path}",
        "eagle": f"eagle:{tmp_path}",
    }
    plain = runner_of(target)
    other = runner_of(target, speculate=f"{paths[kind]}:{K}")
    submits = submits_of(plain.spec.vocab_size, 9)
    expected, *none = serve(plain, submits)
    found, verified, right = serve(other, submits)
    assert none == [0, 0]
    assert found == expected
    assert verified > 0
    if kind == "itself":
        assert right > 0.95 * verified


@pytest.mark.parametrize(
    ("speculate", "num_drafts"), [("mtp:2", 2), ("auto", 3), ("auto:mtp:3", 3)]
)
def test_a_head_of_the_model_guesses_where_it_is_named(
    speculate: str, num_drafts: int, tmp_path: Path
) -> None:
    runner = driver_of(write_mtp_checkpoint("qwen3_moe", tmp_path).path, speculate).runner
    assert isinstance(runner.proposer, ModelProposer)
    assert runner.proposer.num_drafts == runner.limits.num_drafts == num_drafts
    assert runner.limits.auto_drafts == speculate.startswith("auto")


def copy_with(path: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(path, to)
    config = json.loads((path / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def test_drafters_that_do_not_fit(make_checkpoint: Any, dense: Any, tmp_path: Path) -> None:
    target = make_checkpoint("qwen3_moe").path

    def refuse(
        speculate: str, message: str, error: type[ConfigError] = ConfigError, path: Path = target
    ) -> None:
        with pytest.raises(error, match=message):
            with_drafter(read_model_spec(path), path, SpeculationSpec.parse(speculate))

    for kind in ("model", "eagle"):
        refuse(f"{kind}:{tmp_path}/none", "there is no directory", CheckpointError)
        refuse(f"{kind}:{tmp_path}", "config.json is missing", CheckpointError)
    windows = make_checkpoint("mixtral", sliding_window=40).path
    refuse(f"model:{dense.path}", "no layer with full attention", path=windows)
    refuse(
        f"model:{make_checkpoint('qwen3_next').path}",
        "recurrent layers, whose states cannot be restored",
    )
    refuse(f"eagle:{dense.path}", "supported: Eagle3DraftModel, Eagle3Llama", CheckpointError)
    wider = copy_with(dense.path, tmp_path / "wider", vocab_size=257)
    refuse(f"model:{wider}", "draft model's vocab_size is 257, but the served model's is 256")
    fewer = copy_with(dense.path, tmp_path / "fewer", num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(CheckpointError, match=r"self_attn.k_proj.weight.* has shape \[32, 32\]"):
        driver_of(target, f"model:{fewer}")


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({"vocab": {"a": 0, "b": 1}}, {"vocab": {"a": 0, "b": 1}}, ""),
        (
            {"vocab": {"a": 0}},
            {"vocab": [["a", -1.0], ["b", -2.0]]},
            "token 1 is 'b', which is no token for",
        ),
        (
            {"vocab": {"a": 0, "b": 1}},
            {"vocab": {"b": 0, "a": 1}},
            "token 0 is 'a', which is 1 for the other",
        ),
        ({"vocab": ["a"]}, {"vocab": {"a": 0}}, "its vocabulary cannot be read"),
        ({"vocab": None}, {"vocab": {"a": 0}}, "its vocabulary cannot be read"),
    ],
)
def test_tokenizers_are_compared(
    theirs: Any, ours: Any, message: str, make_checkpoint: Any, dense: Any, tmp_path: Path
) -> None:
    draft = copy_with(dense.path, tmp_path / "draft")
    target = copy_with(make_checkpoint("llama").path, tmp_path / "t")
    added = [{"id": 5, "content": "<eos>", "special": True}]
    (draft / "tokenizer.json").write_text(json.dumps({"model": theirs, "added_tokens": added}))
    (target / "tokenizer.json").write_text(
        json.dumps({"model": ours, "added_tokens": added, "version": "1.0"})
    )
    speculation = SpeculationSpec.parse(f"model:{draft}")
    if message:
        with pytest.raises(ConfigError, match=message):
            with_drafter(read_model_spec(target), target, speculation)
    else:
        assert with_drafter(read_model_spec(target), target, speculation).draft_layers
