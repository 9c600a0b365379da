"""Measured expert kernels in place of their roofline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moeserve.config import config_of
from moeserve.errors import ConfigError
from moeserve.plan.hardware import DEVICES, LINKS
from moeserve.plan.roofline import Roofline, Shape
from moeserve.plan.tables import COLUMNS, ExpertTimes, Tables, read_tables
from tests.plan.test_roofline import QWEN3_30B

KEY = ("bfloat16", 2048, 768, 128, 8, 1)


def cost(tables: Tables | None, zipf: float = 0.0, **settings: int) -> Roofline:
    return Roofline(QWEN3_30B, config_of("model", **settings), DEVICES["h200"], LINKS["ib400"], 8, zipf, tables)


def test_times_lie_on_straight_lines_of_logarithms() -> None:
    times = ExpertTimes({4: 1e-3, 1: 1e-3, 16: 4e-3})
    assert times.seconds(2) == times.seconds(0.1) == pytest.approx(1e-3)
    assert times.seconds(8) == pytest.approx(2e-3)  # half-way between 4 and 16, and between 1 and 4 ms
    assert times.seconds(64) == pytest.approx(16e-3)


def test_measured_experts_replace_the_roofline_of_this_shape_alone() -> None:
    tables = {KEY: ExpertTimes({1: 7e-3, 1000: 7e-3})}
    shape = Shape(100, 100, 100, (1e4,), (1e4,))
    plain, measured, other = (cost(t).terms([shape]) for t in (None, tables, {(*KEY[:5], 8): tables[KEY]}))
    assert measured["experts"] == pytest.approx(48 * 7e-3 / DEVICES["h200"].in_situ)
    assert measured["between products"] < plain["between products"]  # measured kernels copy their rows themselves
    same = ("dense layers", "attention", "LM head", "launch")
    assert {name: measured[name] for name in same} == {name: plain[name] for name in same}
    assert other == plain


def test_ranks_and_imbalance_count() -> None:
    """8 ranks read their own row of the table, at the tokens of all of them; unlike experts make more of them."""
    tables = {(*KEY[:5], 8): ExpertTimes({1: 1e-6, 10**6: 1.0})}
    shape = Shape(100, 100, 100, (1e4,), (1e4,))
    even, uneven = (cost(tables, zipf, dp=8) for zipf in (0.0, 1.0))
    assert even.measured is not None
    assert even.terms([shape] * 8)["experts"] == pytest.approx(48 * 800e-6 / DEVICES["h200"].in_situ, rel=0.01)
    assert uneven.terms([shape] * 8)["experts"] > even.terms([shape] * 8)["experts"]


def test_a_missing_package_and_folder_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow; pip install 'moeserve\[tables\]'"):
        read_tables(str(tmp_path), DEVICES["h200"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"aiconfigurator: the package is not installed"):
        read_tables("aiconfigurator", DEVICES["h200"])


def test_the_newest_file_of_the_device_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(version: str, rows: list[tuple[object, ...]]) -> None:
        names = [*COLUMNS, "moe_tp_size", "distribution"]
        file = tmp_path / "h200_sxm/moe/vllm" / version / "moe_perf.parquet"
        file.parent.mkdir(parents=True)
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), file)

    write("0.9.0", [(*KEY, 64, 99.0, 1, "balanced")])
    write("0.24.0", [
        (*KEY, 64, 0.5, 1, "balanced"), (*KEY, 64, 0.25, 1, "balanced"),  # two kernels
        (*KEY, 64, 0.1, 2, "balanced"), (*KEY, 64, 0.1, 1, "power_law_1.2"),
    ])  # fmt: skip
    found = read_tables(str(tmp_path), DEVICES["h200"])
    assert list(found) == [KEY]
    assert found[KEY].seconds(64) == pytest.approx(0.25e-3)
    with pytest.raises(ConfigError, match="has no b200_sxm"):
        read_tables(str(tmp_path), DEVICES["b200"])
