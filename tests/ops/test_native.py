"""The native core against torch, on every instruction set of this machine, and by itself under
sanitizers.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.moe.all2all.layout import group_rows, weighted_sum
from moeserve.moe.routing import Routing
from moeserve.ops import native as native_module
from moeserve.ops.native import native
from moeserve.ops.pick import pick_ops

ROOT = Path(__file__).resolve().parents[2]
needs_native = pytest.mark.skipif(native() is None, reason="the native module was not built")


def found(y_ND: Tensor, weights_TK: Tensor, isa: str) -> Tensor:
    """The native sum where pair n's row is y[n]."""
    module: Any = native()
    if not getattr(module.Isa, isa).supported:
        pytest.skip(f"this CPU has no {isa}")
    tokens, top_k = weights_TK.shape
    out = torch.full((tokens, y_ND.shape[1]), torch.nan, dtype=y_ND.dtype)
    rows = [y_ND.data_ptr() + n * y_ND.shape[1] * y_ND.element_size() for n in range(len(y_ND))]
    element = getattr(module.Element, str(y_ND.dtype).removeprefix("torch."))
    module.weighted_sum(
        rows,
        weights_TK.data_ptr(),
        tokens,
        top_k,
        y_ND.shape[1],
        element,
        out.data_ptr(),
        getattr(module.Isa, isa),
    )
    return out


def expected(y_ND: Tensor, weights_TK: Tensor) -> Tensor:
    ids = torch.zeros(weights_TK.shape, dtype=torch.int32)
    out = torch.empty(len(weights_TK), y_ND.shape[1], dtype=y_ND.dtype)
    return weighted_sum(y_ND, group_rows(ids, 1), Routing(ids, weights_TK), out)


@needs_native
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 8, 37, 256])
def test_weighted_sum_has_the_bits_of_torch(dim: int, dtype: torch.dtype, isa: str) -> None:
    generator = torch.Generator().manual_seed(dim)
    for top_k in (1, 2, 8):
        weights = torch.rand(40, top_k, generator=generator) * 2 - 0.5
        y = torch.randn(40 * top_k, dim, generator=generator)
        for scale in (1.0, 1e-6, 3e-39, 1e4):  # fp16: denormals and overflow; bf16: denormals
            scaled = (y * scale).to(dtype)
            assert torch.equal(found(scaled, weights, isa), expected(scaled, weights))


@needs_native
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_survives(dtype: torch.dtype, isa: str) -> None:
    every = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
        .to(torch.int16)
        .view(dtype)
        .view(64, 1024)
    )
    for weight in (
        1.0,
        0.5,
        1.0009765625,
        65504.0,
    ):  # 0.5 and 1 + 2^-10 make ties of denormals and normals
        weights = torch.full((64, 1), weight)
        got = found(every, weights, isa)
        want = expected(every, weights)
        assert torch.equal(got.isnan(), want.isnan())
        same = ~want.isnan()
        assert torch.equal(got.view(torch.int16)[same], want.view(torch.int16)[same])


@needs_native
def test_weighted_sum_counts_its_rows() -> None:
    module: Any = native()
    with pytest.raises(ValueError, match="one row per"):
        module.weighted_sum([0], 0, 2, 2, 1, module.Element.float32, 0, module.Isa.baseline)


def test_without_the_module_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"no module {name}")

    monkeypatch.setattr(native_module, "import_module", fail)
    native.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert native() is None
            assert native() is None
    finally:
        native.cache_clear()
    assert [
        record.getMessage() for record in caplog.records if "compiler" in record.getMessage()
    ] == [
        "the native extension is not available (no module moeserve._native), so slower code is "
        "used; reinstall moeserve with a C++20 compiler"
    ]


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cpu_without_kernels_falls_back_and_one_line_says_so(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native(), "supported_isas", list)
    with caplog.at_level(logging.INFO):
        ops = pick_ops("cpu", dtype)
    assert not ops.native
    x = torch.ones(2, 3, dtype=dtype)
    assert torch.equal(
        ops.pack_linear(torch.ones(4, 3, dtype=dtype), None)(x), torch.full((2, 4), 3, dtype=dtype)
    )
    said = [
        record
        for record in caplog.records
        if "no native kernels for this machine" in record.getMessage()
    ]
    assert len(said) == 1


@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs AVX2")
def test_torchs_limit_of_instructions_holds_here_too() -> None:
    code = (
        "from moeserve.ops.native import native; "
        "print(*native().supported_isas(), native().serving_isa())"
    )
    told = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=told, capture_output=True, text=True, check=True
    )
    assert found.stdout == "avx2 avx2\n"


@pytest.mark.full("sanitizers")
@pytest.mark.timeout(240)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_core_under_sanitizers(tmp_path: Path) -> None:
    binary = tmp_path / "core_test"
    sources = [
        str(ROOT / "tests/ops/core_test.cpp"),
        *map(str, sorted(ROOT.glob("csrc/core/*.cpp"))),
    ]
    flags = ["-std=c++20", "-O1", "-g", "-ffp-contract=off", "-Wno-psabi", f"-I{ROOT / 'csrc'}"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["g++", *flags, *sanitize, *sources, "-o", str(binary)], check=True, timeout=180)
    done = subprocess.run([str(binary)], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
