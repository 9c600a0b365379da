"""Rounding errors of recurrences do not accumulate over 32k tokens of one request.

The reference computes the same sums in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moeserve.ops import native_recurrence, recurrence, selective_scan
from moeserve.ops.probe import host_step

from .isas import needs_native
from .test_recurrence import IMPLEMENTATIONS, Shape, cached, caches_of, values

# FORGOTTEN: mean log decay, so that a state sums up 1,000 tokens
TOKENS = 32_768
SPAN = 1_024
FORGOTTEN = 1 / 1_000
SHAPES = {
    "gated delta": Shape(1, 1, 16, 8, 1, True),
    "decays by channel": Shape(1, 1, 16, 8, 16, True),
    "no delta rule": Shape(1, 1, 16, 8, 1, False),
}
REFERENCE, *NATIVE = IMPLEMENTATIONS
SCANS = [selective_scan, pytest.param(native_recurrence, marks=needs_native)]


def check(found: Tensor, expected: np.ndarray) -> None:
    """The error of the last tokens is no larger than that of the 2nd thousand, as shares of what
    they should be.
    """
    exact = torch.from_numpy(expected).view(TOKENS // SPAN, -1)
    error = (found.double().view(exact.shape) - exact).norm(dim=1) / exact.norm(dim=1)
    assert error[1] < 2e-6
    assert error[-1] <= 2 * error[1], error


def plan_of(kernels: Any) -> Any:
    """All tokens in one step; nothing is cached, as in a prefill's first blocks."""
    return kernels.plan_tiles(
        *host_step(torch.zeros((1, TOKENS // 16), dtype=torch.int64), 16, [0], [0, TOKENS])
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "kernels", [pytest.param(REFERENCE, marks=pytest.mark.full("kernels")), *NATIVE]
)
def test_gated_recurrences(kernels: Any, shape: Shape) -> None:
    """The delta rule writes little of each token, or it would forget by itself. Channels of one
    head remember between 100 and 30,000 tokens."""
    q = values(TOKENS, 1, shape.d, seed=1)
    v = values(TOKENS, 1, shape.v, seed=2)
    k = F.normalize(values(TOKENS, 1, shape.d, seed=3), dim=2)
    rates = torch.logspace(-4.5, -2, shape.d) if shape.decays > 1 else FORGOTTEN
    decay = -values(TOKENS, 1, shape.decays, seed=4).square() * rates
    beta = (values(TOKENS, 1, seed=5) - 4).sigmoid() if shape.delta else None
    found = kernels.recurrence(q, k, v, decay, beta, caches_of(shape, 1), plan_of(kernels))
    exact = [x.double().flatten(1).numpy() for x in (q, k, v, decay)]
    state = np.zeros((shape.d, shape.v))
    expected = np.empty((TOKENS, shape.v))
    betas = np.ones(TOKENS) if beta is None else beta.double()[:, 0].numpy()
    for t, (q_d, k_d, v_v, log_decay) in enumerate(zip(*exact, strict=True)):
        state *= np.exp(log_decay)[:, None]
        state += k_d[:, None] * (betas[t] * (v_v - (k_d @ state if shape.delta else 0)))
        expected[t] = q_d @ state
    check(found, expected)


@pytest.mark.parametrize("kernels", SCANS)
def test_selective_scans(kernels: Any) -> None:
    channels = 32
    size = 4
    x = values(TOKENS, channels, seed=1)
    dt = values(TOKENS, channels, seed=2).square()
    b = values(TOKENS, size, seed=3)
    c = values(TOKENS, size, seed=4)
    a = -FORGOTTEN * torch.logspace(0, 1, size * channels).view(size, channels)
    skip = values(channels, seed=5)
    rows = [cached(1, 16, rows=(1, width), tiles=(1,))[0] for width in (channels, channels, size)]
    caches = (torch.zeros(1, 1, size, channels), *rows)
    plans = recurrence if kernels is selective_scan else kernels
    found = kernels.selective_scan(x, dt, a, b, c, skip, caches, plan_of(plans))
    a, *exact = (part.double().numpy() for part in (a, x, dt, b, c))
    state = np.zeros((size, channels))
    expected = np.empty((TOKENS, channels))
    for t, (x_C, dt_C, b_N, c_N) in enumerate(zip(*exact, strict=True)):
        state *= np.exp(dt_C * a)
        state += b_N[:, None] * (dt_C * x_C)
        expected[t] = c_N @ state
    check(found - skip * x, expected)
