"""EAGLE-3 heads against plain torch, the target's streams against transformers', and heads that do
not fit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moeserve.engine.kv_rule import FULL
from moeserve.engine.plan import StepDecision
from moeserve.errors import ConfigError
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.weights import Params
from moeserve.models.eagle3 import Eagle3, build_eagle3, plan_eagle3, read_eagle3, read_target_ids
from moeserve.models.hf_config import read_model_spec
from moeserve.ops.inputs import EmbedPatch
from moeserve.runner.ubatches import UBatchRunner
from tests.eagle3_checkpoint import HEAD, Reference, write_eagle3

from .conftest import Driver

IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3))
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def target(make_checkpoint: Any) -> Any:
    return make_checkpoint("qwen3_moe")


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_taps_are_the_streams_that_enter_layers(target: Any, kernels: Any, halves: bool) -> None:
    plain = Driver(target.path, kernels=kernels).prefill("a", IDS.tolist(), 17)
    driver = Driver(
        target.path,
        kernels=kernels,
        spec=replace(read_model_spec(target.path), aux_hidden_layers=(0, 1, 2)),
    )
    logits = driver.model.logits
    forward = driver.model.forward
    if halves:  # two micro-batches
        decision = StepDecision(step=0, ubatches=2, most_tokens=(5, 12))
        runner = UBatchRunner(2)
        whole = SimpleNamespace(forward=forward, serve=driver.model.serve)
        driver.model.forward = lambda step, kv, _: runner.forward(whole, step, 5, decision, kv)  # type: ignore[assignment,arg-type,method-assign]
    driver.model.logits = lambda x: torch.cat((logits(x[:, :64].contiguous()), x[:, 64:]), 1)  # type: ignore[method-assign]
    ours, *aux_layers = driver.prefill("a", IDS.tolist(), 17).split((256, 64, 64, 64), 1)
    assert torch.equal(ours, plain)
    with torch.no_grad():
        theirs = target.reference(IDS[None], output_hidden_states=True).hidden_states
        torch.testing.assert_close(aux_layers[0], theirs[0][0], **TOLERANCE)
        torch.testing.assert_close(aux_layers[1], theirs[1][0], **TOLERANCE)
        torch.testing.assert_close(
            target.reference.model.norm(aux_layers[2]), theirs[2][0], **TOLERANCE
        )
    if halves:
        runner.close()


def load(path: Path, driver: Driver) -> Eagle3:
    """The head in `path` for the driver's model."""
    spec = read_eagle3(path, driver.spec)
    checkpoint = open_checkpoint(path)
    with Params(checkpoint, plan_eagle3(spec, checkpoint.names), driver.model.ops.dtype) as params:
        ids = read_target_ids(spec, path)
        return build_eagle3(spec, params, driver.model.ops, driver.model.embed_VD, ids, 512)


def attach(head: Eagle3, driver: Driver) -> list[Tensor]:
    """Make the driver step the head; return the list that holds the next step's hidden states."""
    hidden: list[Tensor] = []
    driver.rules = [FULL]
    driver.kv = [
        tuple(
            torch.full((512, 16, tensor.heads, tensor.width), torch.nan)
            for tensor in layer.mixer.cache(1)
        )
        for layer in head.spec.layers
    ]

    class Fed:
        """Feeds the head hidden states beside tokens.

        The next hidden states follow its logits.
        """

        def forward(self, step: Any, caches: Any, ubatch: Any) -> Tensor:
            return head.forward(replace(step, embeds=EmbedPatch(hidden.pop(0))), caches, ubatch)

        def logits(self, both: Tensor) -> Tensor:
            return torch.cat((head.logits(both), both[:, head.spec.hidden_size :]), 1)

    driver.model = Fed()  # type: ignore[assignment]
    return hidden


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "num_hidden_layers": 2, "draft_vocab_size": ...},
        {"norm_before_fc": True, "nested": True, "draft_vocab_size": 255},
        {"hidden_size": 48, "target_hidden_size": 64, "architectures": ["Eagle3LlamaForCausalLM"]},
    ],
)
def test_heads_against_plain_torch(
    target: Any, tmp_path: Path, changes: dict[str, Any], kernels: Any
) -> None:
    """Two passes: the target's hidden states in chunks, then the head's own, for one token at a
    time.
    """
    tensors = write_eagle3(tmp_path, **changes)
    driver = Driver(target.path, kernels=kernels)
    embed = driver.model.embed_VD
    if "hidden_size" in changes:
        embed = tensors["embed_tokens.weight"] = torch.randn(256, 48)
        save_file(tensors, tmp_path / "model.safetensors")
    head = load(tmp_path, driver)
    reference = Reference(tensors, embed, changes)
    aux_layers = torch.randn(len(IDS), 128, generator=torch.Generator().manual_seed(9))
    theirs_hidden = reference.combine(aux_layers)
    hidden = attach(head, driver)
    parts = [
        driver_step(driver, hidden, head.combine(aux_layers[i:j]), IDS[i:j])
        for i, j in ((0, 23), (23, 30), (30, 31))
    ]
    logits, stream = (torch.cat(x) for x in zip(*parts, strict=True))
    for i in range(31, 36):
        wanted, wanted_stream = reference.forward(IDS[:i], theirs_hidden[:i])
        torch.testing.assert_close(logits, wanted, **TOLERANCE)
        torch.testing.assert_close(stream, wanted_stream, **TOLERANCE)
        theirs_hidden[i] = wanted_stream[-1]
        one, own = driver_step(driver, hidden, stream[-1:], IDS[i : i + 1])
        logits = torch.cat((logits, one))
        stream = torch.cat((stream, own))


def driver_step(
    driver: Driver, hidden: list[Tensor], given: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    hidden.append(given)
    both = driver.step([("a", ids.tolist())])[0]
    return both[:, :256], both[:, 256:]


@pytest.mark.parametrize(
    ("changes", "aux_layers"),
    [
        ({}, (1, 2)),
        ({"eagle_config": ..., "eagle_aux_hidden_state_layer_ids": [2, 0, 1, 1]}, (0, 1, 2)),
    ],
)
def test_layers_are_counted_as_their_makers_do(
    target: Any, tmp_path: Path, changes: dict[str, Any], aux_layers: tuple[int, ...]
) -> None:
    write_eagle3(tmp_path, **changes)
    spec = read_model_spec(target.path)
    assert read_eagle3(tmp_path, spec).aux_layers == aux_layers
    write_eagle3(tmp_path, eagle_config=...)
    assert read_eagle3(tmp_path, replace(spec, layers=spec.layers * 24)).aux_layers == (2, 24, 45)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 255}, "vocab_size is 255, and the served model's is 256"),
        (
            {"target_hidden_size": 32},
            "hidden size of the target is 32, and the served model's is 64",
        ),
        (
            {"eagle_config": ...},
            "default layers, -1, 1, 2, are not all in the served model, which has 2",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 5]}},
            "eagle_config.eagle_aux_hidden_state_layer_i",
        ),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state is False; only True",
        ),
        ({"norm_before_fc": 1}, "norm_before_fc is 1; it must be true or false"),
        ({"fc_norm": True}, "fc_norm is True; only False"),
        ({"model_type": "qwen3"}, "LlamaForCausalLMEagle3 has 'llama'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True; only False"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "supported: Eagle3DraftModel, Eagle3Llama, Eagle3Spec",
        ),
        ({"draft_vocab_size": 257}, "draft_vocab_size is 257; it must be an integer from 1 to 256"),
        ({"sliding_window": 40}, "sliding_window"),
    ],
)
def test_configs_that_do_not_fit(
    target: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_eagle3(tmp_path)
    config = {key: value for key, value in {**HEAD, **changes}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        read_eagle3(tmp_path, read_model_spec(target.path))


def _without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without("fc.weight"), r"'fc.weight' \[64, 128\] is missing"),
        (
            _without("midlayer.hidden_norm.weight"),
            r"'midlayer.hidden_norm.weight' \[64\] is missing",
        ),
        (_without("lm_head.weight"), r"'lm_head.weight' \[100, 64\] is missing"),
        (
            _without("d2t"),
            (
                "d2t must have an integer .* of the 100 tokens of the draft vocabulary, and it is "
                "missing"
            ),
        ),
        (lambda t: t.update(d2t=t["d2t"].float()), r"and it is F32 \[100\]"),
        (lambda t: t.update(d2t=t["d2t"][:99].clone()), r"and it is I64 \[99\]"),
        (lambda t: t["d2t"].__setitem__(0, 256), "d2t does not map to 100 different tokens"),
        (lambda t: t["d2t"].__setitem__(1, -1), "d2t does not map to 100 different tokens"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].clone()}), r"implies \[64, 128\]"),
        (
            lambda t: t.update({"midlayer.x": torch.ones(1)}),
            "'midlayer.x' in model.safetensors is not part of this model",
        ),
    ],
)
def test_weights_that_do_not_fit(target: Any, tmp_path: Path, damage: Any, message: str) -> None:
    tensors = write_eagle3(tmp_path)
    if message.startswith("d2t does") and damage is not None:
        tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, Driver(target.path))
