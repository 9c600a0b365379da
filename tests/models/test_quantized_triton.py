"""Models with quantized weights on Triton kernels: logits are those of what the weights mean, in
any company.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("there the kernels are not interpreted", allow_module_level=True)

from moeserve.ops import triton_weights
from moeserve.ops.triton_weights import PLAIN
from tests.kernels.interpreted import ordered_dots, rounding_to_nearest
from tests.quantized_checkpoints import FORMS, write_quantized
from tools.gpu.references import quantize_reference, widen

from .conftest import Driver

PROMPT = torch.randint(0, 256, (12,), generator=torch.Generator().manual_seed(1)).tolist()
SHARED = {
    "num_hidden_layers": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
BLOCKS = {
    "num_hidden_layers": 1,
    "moe_intermediate_size": 128,
    "hidden_size": 128,
}  # whole blocks of 128 x 128


@pytest.fixture(autouse=True)
def _e4m3_as_on_a_gpu() -> Iterator[None]:
    with rounding_to_nearest():
        yield


def far(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize(
    "form",
    [
        "int4 with zero points",
        "int8",
        "fp8",
        "fp8 in blocks",
        "fp4, mxfp4",
        "fp4, nvfp4 of ModelOpt",
        "int8, gptq",
    ],
)
def test_a_stored_format_means_what_it_says(
    form: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    """Includes biases, a shared expert and all linear layers.

    Partial e4m3 blocks leave rows unrounded.
    """
    quantized, meaning = write_quantized(
        make_checkpoint("qwen2_moe", **SHARED).path, tmp_path, FORMS[form], plain="nothing"
    )
    found = Driver(quantized, kernels="triton").prefill("a", PROMPT[:5])
    assert far(found, Driver(meaning).prefill("a", PROMPT[:5])) <= 2e-5


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_quantized_on_load(asked: Any, make_checkpoint: Any) -> None:
    """The same as by other kernels, and not what it was."""
    path = make_checkpoint("qwen2_moe", **SHARED).path
    found = Driver(path, kernels="triton", asked=asked).prefill("a", PROMPT[:5])
    plain = Driver(path).prefill("a", PROMPT[:5])
    try:
        expected = Driver(path, kernels="native", asked=asked).prefill("a", PROMPT[:5])
    except Exception as error:
        pytest.skip(str(error))
    assert far(found, expected) <= 2e-5
    assert far(found, plain) > 1e-3


def test_experts_multiply_e4m3_in_blocks(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They equal plain products of dequantized values, except for sums that fall on a tie."""
    path = make_checkpoint("qwen3_moe", **BLOCKS).path
    quantized, meaning = write_quantized(path, tmp_path, FORMS["fp8 in blocks"])

    def rounded(x: Tensor) -> Tensor:
        return widen(*quantize_reference(x)).float()

    found = Driver(quantized, kernels="triton").prefill("a", PROMPT[:6])
    plain = Driver(meaning, kernels="triton").prefill("a", PROMPT[:6])
    gate_up = PLAIN.gate_up
    by_meaning = replace(
        PLAIN, rows=lambda x, to: rounded(x), gate_up=lambda *args: rounded(gate_up(*args))
    )
    monkeypatch.setattr(triton_weights, "PLAIN", by_meaning)
    expected = Driver(meaning, kernels="triton").prefill("a", PROMPT[:6])
    assert far(found, expected) <= 5e-3
    assert far(plain, expected) > 1e-2


@pytest.mark.full("models", keep=1)
@pytest.mark.parametrize(
    ("form", "sizes"), [("fp8 in blocks", BLOCKS), ("int4", {"moe_intermediate_size": 64})]
)
def test_bits_depend_on_no_company(
    form: str, sizes: dict[str, int], make_checkpoint: Any, tmp_path: Path
) -> None:
    """All layers are quantized; a prompt runs whole, in chunks, and beside others."""
    path = make_checkpoint("qwen3_moe", **{"num_hidden_layers": 1, **sizes}).path
    quantized, _ = write_quantized(path, tmp_path, FORMS[form], plain="nothing")
    with ordered_dots():
        lone, driver = (Driver(quantized, kernels="triton") for _ in range(2))
        expected = torch.cat([lone.prefill("needle", PROMPT), lone.step([("needle", [3])])[0]])
        steps = [driver.step([("other", PROMPT[3:] + PROMPT), ("needle", PROMPT[:8])])[1]]
        steps += [driver.step([("needle", PROMPT[8:]), ("other", [1]), ("third", [2, 3])])[0]]
        steps += [driver.step([("third", [4]), ("needle", [3]), ("other", [5])])[1]]
    assert torch.equal(torch.cat(steps), expected)
