"""When the Triton kernels are used, and the reasons if they cannot be. Results: tests/kernels."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from moeserve.errors import ConfigError
from moeserve.ops.pick import pick_ops
from moeserve.ops.quantized import Quantized
from moeserve.ops.triton_ops import pack_exact, pack_fast
from tests.kernels.device import DEVICE
from tests.specs import make_spec

needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there the kernels are not interpreted"
)


@needs_no_gpu
def test_interpreted_kernels_are_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_ops("cpu", torch.float32, "triton").triton
    with pytest.raises(
        ConfigError, match="computes bfloat16 products wrongly; choose kernels: auto"
    ):
        pick_ops("cpu", torch.bfloat16, "triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="need a GPU"):
        pick_ops("cpu", torch.float32, "triton")


def test_on_cuda_triton_serves_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is picked before anything is on the device."""
    fast, exact = (
        pick_ops(
            "cuda",
            torch.bfloat16,
            obstacle=make_spec(head_dim=128, vocab_size=8, hidden_size=8).obstacle,
            exact=exact,
        )
        for exact in (False, True)
    )
    assert (fast.triton, exact.triton) == (True, True)
    assert (fast.exact, exact.exact) == (False, True)
    assert exact.pack_linear is pack_exact
    assert not pick_ops("cuda", torch.bfloat16, "torch").triton
    odd = make_spec(head_dim=60, vocab_size=8, hidden_size=8).obstacle
    assert not pick_ops("cuda", torch.bfloat16, obstacle=odd).triton
    with pytest.raises(
        ConfigError, match="does not support heads of width 60; choose kernels: auto"
    ):
        pick_ops("cuda", torch.bfloat16, "triton", obstacle=odd)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not pick_ops("cuda", torch.bfloat16).exact
    with pytest.raises(
        ConfigError,
        match=r"determinism=batch needs the Triton kernels on cuda: triton is not installed",
    ):
        pick_ops("cuda", torch.bfloat16, exact=True)


def test_a_part_of_a_larger_weight_is_copied() -> None:
    """Otherwise the whole weight would stay in memory."""
    large = torch.randn(8, 16)
    part = pack_exact(large[:4], None)
    assert part._weight_NK.untyped_storage().nbytes() == 4 * 16 * 4  # type: ignore[attr-defined]
    torch.testing.assert_close(
        part(torch.ones(3, 16)), large[:4].sum(1).expand(3, -1), rtol=1e-5, atol=1e-5
    )


def test_a_quantized_weight_is_a_product_of_one_slot() -> None:
    """The product is right for any number of strided rows, with both kernel tables."""
    quantized = Quantized(
        "int8", 0, torch.float32, torch.ones(1, 64, dtype=torch.int8), torch.full((1, 1), 0.25)
    ).each(lambda part: part.to(DEVICE))
    x = torch.ones(40, 128, device=DEVICE)[:, :64]
    for pack in (pack_exact, pack_fast):
        product = pack(quantized, torch.full((1,), 5.0, device=DEVICE))
        for rows in (0, 1, 17, 40):
            assert product(x[:rows]).tolist() == [[21.0]] * rows
