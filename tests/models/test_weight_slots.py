"""Weights that are written into a model compute as if it had been loaded with them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.load_plan import is_packed
from moeserve.loader.row_table import RowTable
from moeserve.loader.weights import Params
from moeserve.models.load_plan import load_plan
from moeserve.ops.native import native
from moeserve.ops.quantized import Quantized
from tests.gguf_files import KINDS, matrices, write_gguf

from .conftest import FAMILIES, Driver
from .test_gguf import WIDE

PROMPT = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1)).tolist()
module: Any = native()
needs_native = pytest.mark.skipif(
    module is None or not module.serving_isa(), reason="needs the native kernels"
)
KERNELS = ["torch", pytest.param("native", marks=needs_native)]


def other(value: Any) -> Any:
    """Return the same rows, or experts, in another order."""
    if isinstance(value, Quantized):
        return value.each(lambda part: part.roll(1, 0))
    if isinstance(value, RowTable):
        value = value.read(torch.arange(value.count))
    if value.dtype == torch.int64:  # the constants of a hash
        return value
    return value.roll(1, 0).clone()


def params_of(path: Path, driver: Driver, **options: Any) -> dict[str, Any]:
    checkpoint = open_checkpoint(path, driver.spec.stored)
    if path.is_file():
        checkpoint = replace(checkpoint, activations=options.pop("activations", "auto"))
    plan = load_plan(driver.spec, checkpoint.names)
    with Params(checkpoint, plan, driver.model.ops.dtype, **options) as params:
        return dict(params)


def change_all(params: dict[str, Any]) -> None:
    params.update({name: other(value) for name, value in params.items()})


def logits(driver: Driver, key: str) -> Tensor:
    return driver.prefill(key, PROMPT, 31)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_of_a_family(name: str, kernels: Any, make_checkpoint: Any) -> None:
    path = make_checkpoint(name).path
    driver = Driver(path, kernels=kernels)
    first = logits(driver, "a")
    params = params_of(path, driver)
    slots = driver.model.weight_slots
    assert params.keys() - {"embed"} <= set(slots)
    slots.write({key: other(value) for key, value in params.items()})
    expected = logits(Driver(path, kernels=kernels, change=change_all), "a")
    assert torch.equal(logits(driver, "b"), expected)
    assert not torch.equal(first, expected)
    slots.write(params)
    assert torch.equal(logits(driver, "c"), first)


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_parameter_at_a_time(kernels: Any, make_checkpoint: Any) -> None:
    """The others stay."""
    path = make_checkpoint("qwen3_moe").path
    driver = Driver(path, kernels=kernels)
    params = params_of(path, driver)
    for i, name in enumerate(name for name in params if "layers.1." not in name):
        partners = {
            n for slot in driver.model.weight_slots[name] for n in slot.names if n in params
        }

        def change(others: dict[str, Any], partners: set[str] = partners) -> None:
            others.update({name: other(others[name]) for name in partners})

        driver.model.weight_slots.write({name: other(params[name]) for name in partners})
        expected = logits(Driver(path, kernels=kernels, change=change), "a")
        assert torch.equal(logits(driver, f"{i}"), expected), name
        driver.model.weight_slots.write({name: params[name] for name in partners})


@needs_native
@pytest.mark.parametrize("kinds", [(kind,) for kind in KINDS])
@pytest.mark.parametrize("activations", ["auto", "float"])
def test_every_type_of_ggml(
    kinds: tuple[str, ...], activations: Any, make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint("qwen3_moe", **WIDE).path
    file = write_gguf("qwen3_moe", path, tmp_path / "model.gguf", matrices(*kinds))
    driver = Driver(file, activations=activations)
    params = params_of(file, driver, activations=activations)
    if activations == "auto":  # types with minima are widened for rows of floats
        assert any(isinstance(value, Quantized) for value in params.values())
    driver.model.weight_slots.write({key: other(value) for key, value in params.items()})
    expected = logits(Driver(file, activations=activations, change=change_all), "a")
    assert torch.equal(logits(driver, "a"), expected)


@needs_native
@pytest.mark.parametrize("asked", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_rounded_while_they_are_read(
    asked: Any, dtype: torch.dtype, make_checkpoint: Any
) -> None:
    path = make_checkpoint("qwen3_moe").path
    driver = Driver(path, dtype, asked=asked)
    params = params_of(path, driver, quantize_to=asked)
    driver.model.weight_slots.write({key: other(value) for key, value in params.items()})
    expected = logits(Driver(path, dtype, asked=asked, change=change_all), "a")
    assert torch.equal(logits(driver, "a"), expected)


@needs_native
def test_slots_hold_no_second_copy(make_checkpoint: Any) -> None:
    """The native kernels pack every product: what was loaded for them is gone after the build."""
    loaded: dict[str, Any] = {}

    def watch(params: dict[str, Any]) -> None:
        products = {name: value for name, value in params.items() if is_packed(name)}
        loaded.update({name: weakref.ref(value) for name, value in products.items()})

    driver = Driver(make_checkpoint("mixtral").path, change=watch)
    gc.collect()
    assert len(loaded) > 8
    assert [name for name, value in loaded.items() if value() is not None] == []
    assert loaded.keys() <= set(driver.model.weight_slots)


def test_parameters_of_one_slot_come_together(make_checkpoint: Any) -> None:
    path = make_checkpoint("qwen2_moe").path
    driver = Driver(path)
    params = params_of(path, driver)
    with pytest.raises(AssertionError, match=r"layers.0.qkv_bias.* must be written together"):
        driver.model.weight_slots.write({"layers.0.qkv": params["layers.0.qkv"]})
    with pytest.raises(KeyError, match=r"layers.9.qkv"):
        driver.model.weight_slots.write({"layers.9.qkv": params["layers.0.qkv"]})
