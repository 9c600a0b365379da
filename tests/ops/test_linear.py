"""Matrix products: right, and each row's bits its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moeserve.config import config_of
from moeserve.errors import ConfigError
from moeserve.ops import attention
from moeserve.ops.linear import PlainLinear, padded_rows
from moeserve.ops.pick import pick_ops
from moeserve.ops.probe import probe_attention, probe_linear
from moeserve.ops.table import Choice
from tests.ops.choices import CHOICES, ops_of
from tests.specs import make_spec


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_example() -> None:
    weight = torch.tensor([[3.0, 4.0]])
    bias = torch.tensor([5.0])
    for linear in (PlainLinear(weight, bias), PlainLinear(weight, bias, pad=8)):
        assert linear(torch.tensor([[1.0, 2.0]])).tolist() == [[16.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernels", CHOICES)
def test_rows_keep_their_bits(dtype: torch.dtype, kernels: Choice, threads: int) -> None:
    """Covers more shapes, row counts and offsets than the probe at startup, and strided views."""
    ops = ops_of(dtype, kernels)
    generator = torch.Generator().manual_seed(1)
    for k, n in ((1024, 72), (96, 1000), (320, 256)):
        linear = ops.pack_linear(torch.randn(n, k, generator=generator).to(dtype), None)
        x = torch.randn(90, k, generator=generator).to(dtype)
        whole = linear(x)
        for rows in (1, 2, 3, 5, 7, 10, 15, 16, 17, 31, 48, 64):
            for first in (0, 11):
                assert torch.equal(linear(x[first : first + rows]), whole[first : first + rows]), (
                    k,
                    n,
                    rows,
                )
        wide = torch.randn(90, 2 * k, generator=generator).to(dtype)
        wide[:, k:] = x
        assert torch.equal(linear(wide[:, k:]), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernels", CHOICES)
def test_columns_keep_their_bits(dtype: torch.dtype, kernels: Choice, threads: int) -> None:
    """Tensor parallelism relies on it.

    A slice of the columns, down to one, has the bits of the whole product, though its size may need
    another kernel or padding.
    """
    ops = ops_of(dtype, kernels)
    generator = torch.Generator().manual_seed(3)
    for k, n in ((32, 64), (96, 301), (200, 48), (520, 256), (1024, 96), (2048, 40)):
        weight = torch.randn(n, k, generator=generator).to(dtype)
        bias = torch.randn(n, generator=generator).to(dtype)
        x = torch.randn(33, k, generator=generator).to(dtype)
        whole = ops.pack_linear(weight, bias)
        for size in (2, 3, 4, 8, 16, n):
            each = -(-n // size)
            for start in {0, (size // 2) * each, max(0, n - each)}:
                part = slice(start, start + each)
                share = ops.pack_linear(weight[part].contiguous(), bias[part].contiguous())
                for rows in (1, 2, 16, 33):
                    assert torch.equal(share(x[:rows]), whole(x[:rows])[:, part]), (
                        k,
                        n,
                        size,
                        start,
                        rows,
                    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lone_row_keeps_its_bits_however_long_the_sum(dtype: torch.dtype) -> None:
    """Libraries split long sums for a single row; in bfloat16 few outputs show it, so many are
    looked at.
    """
    ops = ops_of(dtype, "torch")
    generator = torch.Generator().manual_seed(2)
    for k, n in ((1280, 256), (2048, 256), (4096, 128)):
        linear = ops.pack_linear(torch.randn(n, k, generator=generator).to(dtype), None)
        x = torch.randn(250, k, generator=generator).to(dtype)
        whole = linear(x)
        assert torch.equal(torch.cat([linear(row) for row in x.split(1)]), whole), (k, n)
        assert torch.equal(torch.cat([linear(rows) for rows in x.split(2)]), whole), (k, n)


def test_tiny_bfloat16_weights_keep_their_rows_bits() -> None:
    """Routers of small models: torch computes products below a size with another kernel."""
    ops = ops_of(torch.bfloat16, "torch")
    generator = torch.Generator().manual_seed(3)
    for n, k in ((8, 256), (4, 64), (64, 64), (16, 300)):
        linear = ops.pack_linear(torch.randn(n, k, generator=generator).bfloat16(), None)
        x = torch.randn(6000, k, generator=generator).bfloat16()
        whole = linear(x)
        for rows in (1, 2, 3, 5):
            assert torch.equal(torch.cat([linear(part) for part in x.split(rows)]), whole), (
                n,
                k,
                rows,
            )


def test_probe_notices_a_product_that_depends_on_the_row_count() -> None:
    def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> object:
        def linear(x: torch.Tensor, context: object) -> torch.Tensor:
            y = x @ weight.T
            return y if len(x) > 3 else y * (1 + 1e-6)

        return linear

    assert not probe_linear(pack, torch.float32)  # type: ignore[arg-type]


def test_probe_of_attention_says_when_bits_differ(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert probe_attention(torch.float32)
    pick_ops("cpu", torch.float32, "torch")
    assert "depend" not in caplog.text
    partial = attention.attention_partial

    def uneven(q: torch.Tensor, *args: Any) -> attention.Partial:
        part = partial(q, *args)
        return part._replace(values=part.values * (1 + 1e-6 * (q.shape[1] > 8)))

    monkeypatch.setattr(attention, "attention_partial", uneven)
    assert not probe_attention(torch.float32)
    pick_ops("cpu", torch.float32, "torch")
    assert "bits of attention in torch.float32 depend on the number of rows" in caplog.text


def test_falls_back_to_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import moeserve.ops.pick as pick

    monkeypatch.setattr(pick, "native", lambda: None)
    monkeypatch.setattr(
        pick, "probe_linear", lambda pack, dtype: pack(torch.ones(1, 1), None).pad == 16
    )
    ops = pick_ops("cpu", torch.float32)
    assert "torch (there are no native kernels for this machine), rows in 16s" in ops.description
    assert [ops.pad_rows(n) for n in (0, 1, 16, 17)] == [16, 16, 16, 32]


def test_padded_row_counts() -> None:
    assert [padded_rows(n, 1) for n in (0, 1, 16, 17, 1000)] == [1, 1, 16, 32, 1024]
    assert padded_rows(3, 8) == 8
    for pad in (1, 8, 32):
        sizes = [padded_rows(n, pad) for n in range(1, 8193)]
        assert all(
            n <= size <= max(n + n // 16 + 1, n + 15, n + pad - 1)
            for n, size in enumerate(sizes, 1)
        )
        assert all(size % pad == 0 for size in sizes)
        assert sizes == sorted(sizes)
        assert len(set(sizes)) < 120


def test_warns_when_nothing_is_invariant(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import moeserve.ops.pick as pick

    monkeypatch.setattr(pick, "native", lambda: None)
    monkeypatch.setattr(pick, "probe_linear", lambda pack, dtype: False)
    assert "not batch-invariant" in pick_ops("cpu", torch.float32).description
    assert "may depend on other requests in the batch" in caplog.text


def test_refuses_other_dtypes() -> None:
    with pytest.raises(ConfigError, match="float64"):
        pick_ops("cpu", torch.float64)
    with pytest.raises(ConfigError, match="use kernels: torch instead"):
        config_of("demo", kernels="onednn")


def test_native_kernels_that_compute_wrongly_do_not_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import moeserve.ops.pick as pick

    if not ops_of(torch.float32, "native").native:
        pytest.skip("no native kernels here")
    monkeypatch.setattr(pick, "probe_native", lambda dtype: "norms differ from torch's by up to 3")
    assert not pick_ops("cpu", torch.float32).native
    assert "norms differ from torch's by up to 3; please report this processor" in caplog.text
    with pytest.raises(ConfigError, match="no native kernels compute correctly on this machine"):
        pick_ops("cpu", torch.float32, "native")


def test_kernels_are_chosen_for_cpus_only() -> None:
    assert pick_ops("meta", torch.float32).pad_rows(5) == 5
    with pytest.raises(
        ConfigError, match="kernels: native is for CPUs; choose kernels: auto on meta"
    ):
        pick_ops("meta", torch.float32, "native")


def test_heads_that_native_attention_does_not_know() -> None:
    spec = make_spec(head_dim=12, vocab_size=8, hidden_size=8)
    assert not pick_ops("cpu", torch.float32, obstacle=spec.obstacle).native
    with pytest.raises(
        ConfigError,
        match="Native attention does not support heads of width 12; choose kernels: auto",
    ):
        pick_ops("cpu", torch.float32, "native", obstacle=spec.obstacle)


def test_the_probe_sees_wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from moeserve.ops import native_layer, native_rows, probe

    ops_of(torch.float32, "native")
    assert not probe.probe_native(torch.float32)
    for module, name, what in (
        (native_rows, "rms_norm", "norms"),
        (native_layer, "attention", "attention"),
    ):
        function = getattr(module, name)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *args, _function=function: _function(*args) * 1.01)
            assert what in probe.probe_native(torch.float32)
