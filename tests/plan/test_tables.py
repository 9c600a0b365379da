"""Measured expert kernels in place of their roofline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moeserve.config import config_of
from moeserve.errors import ConfigError
from moeserve.plan.hardware import DEVICES, LINKS
from moeserve.plan.roofline import Roofline, Shape
from moeserve.plan.tables import (
    EXPERT_COLUMNS,
    GEMM_COLUMNS,
    HEAD_COLUMNS,
    AttentionTimes,
    KernelTables,
    Times,
    read_tables,
)
from tests.plan.test_roofline import QWEN3_30B

KEY = ("bfloat16", 2048, 768, 128, 8)


def cost(tables: KernelTables | None, **settings: int) -> Roofline:
    return Roofline(
        QWEN3_30B, config_of("model", **settings), DEVICES["h200"], LINKS["ib400"], 8, tables=tables
    )


def test_times_lie_on_straight_lines_of_logarithms() -> None:
    times = Times({4: 1e-3, 1: 1e-3, 16: 4e-3})
    assert times.seconds(2) == times.seconds(0.1) == pytest.approx(1e-3)
    assert times.seconds(8) == pytest.approx(
        2e-3
    )  # half-way between 4 and 16, and between 1 and 4 ms
    assert times.seconds(64) == pytest.approx(16e-3)


def test_measured_experts_replace_the_roofline_of_this_shape_alone() -> None:
    times = Times({1: 7e-3, 1000: 7e-3})
    shape = Shape(100, 100, 100, (1e4,), (1e4,))
    plain, measured, other = (
        cost(t).terms([shape])
        for t in (None, KernelTables({KEY: times}), KernelTables({(*KEY[:4], 4): times}))
    )
    assert measured["experts"] == pytest.approx(48 * 7e-3 / DEVICES["h200"].in_situ)
    assert (
        measured["between products"] < plain["between products"]
    )  # measured kernels copy their rows themselves
    same = ("dense layers", "attention", "LM head", "launch")
    assert {name: measured[name] for name in same} == {name: plain[name] for name in same}
    assert other == plain


def test_products_lie_between_measured_sizes_and_grow_beyond_them() -> None:
    grid = {(n, k): {1: n * k * 1e-9, 64: 2 * n * k * 1e-9} for n in (64, 1024) for k in (64, 1024)}
    tables = KernelTables({}, grid)
    for shapes, weights in (
        ([(64, 1024)], 64 * 1024), ([(256, 128)], 256 * 128),
        ([(4096, 64), (64, 64)], 4096 * 64 + 64 * 64),
    ):  # fmt: skip
        times = tables.dense(shapes)
        assert times is not None
        assert times.seconds(1) == pytest.approx(weights * 1e-9)
        assert times.seconds(8) == pytest.approx(weights * 1e-9 * 2**0.5)
    assert tables.dense([]) is KernelTables({}).dense([(64, 64)]) is None


def test_measured_products_and_attention_replace_the_roofline_of_theirs() -> None:
    """The attention is of two kinds.

    128 rows attend to 1,000 positions each, and 100 rows run beside a prompt of 100 tokens.
    """
    grid = {(n, k): {1: 1e-6, 8192: 1e-6} for n in (64, 65536) for k in (64, 65536)}
    heads = AttentionTimes(
        {1: Times({1: 9.0}), 128: Times({1: 1e-9, 10**6: 1e-3})}, Times({1: 1e-6, 10**6: 1.0})
    )
    priced = cost(KernelTables({}, grid, {(32, 4, 128): heads}))
    assert priced.measured == ["dense layers", "LM head", "attention"]
    in_situ = DEVICES["h200"].in_situ
    terms = priced.terms(
        [Shape(128, 128, 128, (128e3,), (128e3,)), Shape(1, 1, 1, (10.0,), (10.0,))]
    )
    products = len(QWEN3_30B.products())
    assert terms["dense layers"] == pytest.approx(products * 1e-6 / in_situ)
    assert terms["LM head"] == pytest.approx(151936 / 65536 * 1e-6 / in_situ)
    assert terms["attention"] == pytest.approx(48 * 128e-6 / in_situ)
    prompt = Shape(200, 101, 101, (100e3 + 100,), (100e3 + 5050,))
    assert priced.terms([prompt])["attention"] == pytest.approx(
        48 * (100e-6 + 4951e-6) / in_situ, rel=0.01
    )


def test_experts_on_several_ranks_keep_the_roofline() -> None:
    """Kernels were measured there with the rows of absent experts."""
    assert cost(KernelTables({KEY: Times({1: 1.0})}), dp=8).measured == []
    assert cost(KernelTables({KEY: Times({1: 1.0})}), dp=1).measured == ["experts"]


def test_a_missing_package_and_folder_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"pyarrow is not installed; pip install 'moeserve\[tables\]'"
    ):
        read_tables(str(tmp_path), DEVICES["h200"])
    with pytest.raises(ConfigError, match=r"--tables /nowhere: there is no folder /nowhere; "):
        read_tables("/nowhere", DEVICES["h200"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"aiconfigurator: the package is not installed"):
        read_tables("aiconfigurator", DEVICES["h200"])


def test_the_newest_file_of_the_device_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(path: str, names: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
        file = tmp_path / "h200_sxm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        columns = zip((*names, "latency"), zip(*rows, strict=True), strict=True)
        parquet.write_table(pyarrow.table({name: list(values) for name, values in columns}), file)

    experts = (*EXPERT_COLUMNS, "moe_tp_size", "moe_ep_size", "distribution")
    write("moe/vllm/0.9.0/moe_perf.parquet", experts, [(*KEY, 64, 1, 1, "balanced", 99.0)])
    write(
        "moe/vllm/0.24.0/moe_perf.parquet",
        experts,
        [
            (*KEY, 64, 1, 1, "balanced", 0.5),
            (*KEY, 64, 1, 1, "balanced", 0.25),  # two kernels
            (*KEY, 64, 2, 1, "balanced", 0.1),
            (*KEY, 64, 1, 8, "balanced", 0.1),
            (*KEY, 64, 1, 1, "power_law_1.2", 0.1),
        ],
    )
    found = read_tables(str(tmp_path), DEVICES["h200"])
    assert list(found.experts) == [KEY]
    assert found.experts[KEY].seconds(64) == pytest.approx(0.25e-3)
    assert (found.gemms, found.attention) == ({}, {})
    write("gemm/vllm/0.24.0/gemm_perf.parquet", (*GEMM_COLUMNS, "gemm_dtype"), [
        (64, 128, 8, "bfloat16", 0.5), (64, 128, 9, "bfloat16", 1.0), (64, 128, 8, "fp8", 0.1),
    ])  # fmt: skip
    attention = "attention/vllm/0.24.0/{}_attention_perf.parquet"
    kind = ("kv_cache_dtype", "window_size")
    write(attention.format("generation"), (*HEAD_COLUMNS, *kind, "batch_size", "step"), [
        (32, 4, 128, "bfloat16", 0, 8, 99, 0.5), (32, 4, 128, "fp8", 0, 8, 99, 0.1),
        (32, 4, 128, "bfloat16", 8, 8, 99, 0.1),
    ])  # fmt: skip
    write(attention.format("context"), (*HEAD_COLUMNS, *kind, "batch_size", "isl"), [
        (32, 4, 128, "bfloat16", 0, 1, 100, 0.75), (32, 4, 128, "bfloat16", 0, 2, 100, 0.1)
    ])  # fmt: skip
    found = read_tables(str(tmp_path), DEVICES["h200"])
    assert found.gemms == {(64, 128): {8: 0.5e-3, 9: 1e-3}}
    heads = found.attention[32, 4, 128]
    assert heads.decode[8].seconds(800) == pytest.approx(0.5e-3)
    assert heads.prefill.seconds(4950) == pytest.approx(0.75e-3)
    with pytest.raises(ConfigError, match="has no b200_sxm"):
        read_tables(str(tmp_path), DEVICES["b200"])
