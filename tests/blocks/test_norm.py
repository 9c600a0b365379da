"""Norms of the stream, and the soft cap of logits, against torch; rows have the same bits in any
company.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moeserve.blocks.norm import Norm
from moeserve.ops.pick import pick_ops

WIDTHS = [16, 60, 257]


def rows(width: int, dtype: torch.dtype) -> Any:
    return torch.randn(70, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(width: int, dtype: torch.dtype, bias: bool) -> None:
    x_TD = rows(width, dtype)
    residual_TD = rows(width, dtype).flip(0)
    weight_D = torch.rand(width) + 0.5
    bias_D = torch.randn(width) if bias else None
    norm = Norm(pick_ops("cpu", dtype), 1e-5, weight_D, bias_D, centred=True)
    expected = F.layer_norm(
        x_TD.double(), (width,), weight_D.double(), bias_D.double() if bias else None
    )
    torch.testing.assert_close(
        norm(x_TD).double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
    alone = torch.cat([norm(x_TD[i : i + 1]) for i in range(len(x_TD))])
    assert torch.equal(norm(x_TD), alone)
    both, total = norm.add(x_TD.clone(), residual_TD.clone())
    assert torch.equal(total, x_TD + residual_TD)
    assert torch.equal(both, norm(total))


@pytest.mark.parametrize("width", WIDTHS)
def test_soft_cap(width: int) -> None:
    logits_SV = 100 * rows(width, torch.float32)
    ops = pick_ops("cpu", torch.float32)
    capped = ops.soft_cap(logits_SV, 30.0)
    torch.testing.assert_close(capped, 30 * (logits_SV / 30).tanh(), rtol=1e-5, atol=1e-5)
    alone = torch.cat([ops.soft_cap(logits_SV[i : i + 1], 30.0) for i in range(len(logits_SV))])
    assert torch.equal(capped, alone)
