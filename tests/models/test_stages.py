"""Stages of a decoder, and the context that all its linear layers get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.models.decoder import Decoder
from moeserve.models.hf_config import read_model_spec
from moeserve.ops.inputs import LayerCache, RowContext, StepInputs
from moeserve.ops.linear import LinearMethod
from moeserve.ops.pick import pick_ops

from . import conftest
from .conftest import Driver

IDS = torch.randint(0, 256, (37,), generator=torch.Generator().manual_seed(3)).tolist()


def in_stages(model: Decoder, count: int) -> Any:
    """The forward pass of `count` stages, each with nothing but its part of the caches."""

    def forward(step: StepInputs, caches: list[LayerCache], ubatch: Any) -> Tensor:
        stream, inputs = model.begin(step, ubatch)
        for stage in model.stages(count):
            own = [caches[i] for i in stage.layers]
            stream = stage(stream, own, inputs)
        return stream.x[: len(step.ids_T)]

    return forward


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4", "nemotron_h"])
def test_stages_in_a_row_are_the_forward_pass(make_checkpoint: Any, family: str) -> None:
    path = make_checkpoint(family).path
    expected = Driver(path).prefill("a", IDS, 17)
    num_layers = len(read_model_spec(path).layers)
    for count in range(1, num_layers + 1):
        driver = Driver(path)
        stages = driver.model.stages(count)
        assert [i for stage in stages for i in stage.layers] == list(range(num_layers))
        sizes = [len(stage.layers) for stage in stages]
        assert max(sizes) - min(sizes) <= 1
        driver.model.forward = in_stages(driver.model, count)  # type: ignore[method-assign]
        assert torch.equal(driver.prefill("a", IDS, 17), expected), count


def test_more_stages_than_layers_are_refused(make_checkpoint: Any) -> None:
    driver = Driver(make_checkpoint("qwen3_moe").path)
    with pytest.raises(AssertionError):
        driver.model.stages(len(driver.model.layers) + 1)


class Recording:
    """A linear layer that notes the context and the number of its rows."""

    def __init__(self, method: LinearMethod, calls: list[tuple[RowContext, int]]) -> None:
        self._method = method
        self._calls = calls

    def __call__(self, x_MK: Tensor, context: RowContext) -> Tensor:
        assert isinstance(context, RowContext)
        self._calls.append((context, len(x_MK)))
        return self._method(x_MK, context)


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", "deepseek_v3", "qwen3_next", "kimi_linear", "jamba", "nemotron_h", "lfm2_moe"],
)
def test_every_linear_layer_learns_which_rows_are_tokens(
    make_checkpoint: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(family).path
    plain = replace(
        pick_ops("cpu", torch.float32, "torch"), pad_rows=lambda rows: -(-rows // 8) * 8
    )
    monkeypatch.setattr(conftest, "_ops", lambda *_: plain)
    expected = Driver(path).step([("a", IDS[:5])])[0]
    calls: list[tuple[RowContext, int]] = []

    def pack(weight: Any, bias: Tensor | None) -> Recording:
        return Recording(plain.pack_linear(weight, bias), calls)

    monkeypatch.setattr(conftest, "_ops", lambda *_: replace(plain, pack_linear=pack))
    driver = Driver(path)
    assert torch.equal(driver.step([("a", IDS[:5])])[0], expected)
    whole = [context for context, rows in calls if rows == 8]
    assert whole
    assert {context.num_tokens for context in whole} <= {1, 2, 3, 4, 5}  # an expert has some of 5
    in_layers = [context for context, rows in calls if context.num_tokens == 5]
    assert len(in_layers) >= 2 * len(driver.spec.layers)
    assert all(context.num_tokens <= rows for context, rows in calls)


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "deepseek_v3", "qwen3_next", "nemotron_h", "llama"]
)
def test_layers_with_wrapped_methods_are_not_fused(
    make_checkpoint: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused blocks read packed weights, so they would omit what a wrapper adds."""
    path = make_checkpoint(family).path
    native = pick_ops("cpu", torch.float32, "native", exact=True)
    monkeypatch.setattr(conftest, "_ops", lambda *_: native)
    expected = Driver(path, kernels="native").step([("a", IDS[:5])])[0]
    calls: list[tuple[RowContext, int]] = []

    def pack(weight: Any, bias: Tensor | None) -> Recording:
        return Recording(native.pack_linear(weight, bias), calls)

    monkeypatch.setattr(conftest, "_ops", lambda *_: replace(native, pack_linear=pack))
    driver = Driver(path, kernels="native")
    # Recurrent layers compute activations of separate calls with torch, so their bits differ.
    torch.testing.assert_close(driver.step([("a", IDS[:5])])[0], expected, rtol=1e-5, atol=1e-5)
    assert len(calls) >= 2 * len(driver.spec.layers)
