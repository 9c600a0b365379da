"""Quantized weights: logits and greedy tokens are those of the model that has the rounded weights
in fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.loader.load_plan import LINEAR_KINDS
from moeserve.ops.native import native
from moeserve.ops.quantized import quantization_of
from tests.quantized_checkpoints import FORMS, dequantized, write_quantized

from .conftest import FEW, Driver

PROMPT = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1)).tolist()
module: Any = native()
pytestmark = pytest.mark.skipif(
    module is None or not module.serving_isa(), reason="needs the native kernels"
)


def cases() -> list[tuple[str, str]]:
    """Every family with every kind of format, and every format."""
    kinds = ["int8", "int4 with zero points", "fp8 in blocks"]
    others = [("qwen3_moe", form) for form in FORMS if form not in kinds]
    others += [("gemma4", "fp8")]  # which has a dense MLP beside its experts
    others += [
        ("granite_moe", form) for form in FORMS if form.startswith("fp4")
    ]  # whose experts are fused
    others += [
        ("deepseek_v32", "fp8 in blocks"),
        ("glm_moe_dsa", "fp8 in blocks"),
        ("inkling2", "fp8 in groups, mxfp8 of its own"),
    ]  # as they are published
    return [(name, form) for name in FEW for form in kinds] + others


def same(got: Driver, expected: Driver) -> None:
    ours, theirs = (driver.prefill("a", PROMPT, 31) for driver in (got, expected))
    for _ in range(8):
        assert ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max() <= 2e-5
        token = int(ours[-1].argmax())
        assert token == int(theirs[-1].argmax())
        ours, theirs = (driver.step([("a", [token])])[0] for driver in (got, expected))


@pytest.mark.parametrize(("name", "form"), cases())
def test_a_stored_format_means_what_it_says(
    name: str, form: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    quantized, meaning = write_quantized(make_checkpoint(name).path, tmp_path, FORMS[form])
    same(Driver(quantized), Driver(meaning))


@pytest.mark.parametrize("asked", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "granite_moe", "llama"])
def test_quantized_on_load(name: str, asked: Any, make_checkpoint: Any) -> None:
    """The model whose linear layers were rounded before; and it is not the model that was not."""
    path = make_checkpoint(name).path
    got = Driver(path, asked=asked)
    plain = Driver(path)
    expected = Driver(path, change=lambda p: meaning_of(p, asked))
    same(got, expected)
    assert not torch.equal(got.prefill("b", PROMPT), plain.prefill("b", PROMPT))


def meaning_of(params: dict[str, Any], asked: Any) -> None:
    for name in params:
        if name.rpartition(".")[2] in LINEAR_KINDS:
            quantized, jobs = quantization_of(params[name], asked, name)
            for job in jobs:
                job()
            params[name] = dequantized(quantized)
