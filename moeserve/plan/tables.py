"""Measured times of expert kernels on GPUs, in place of their roofline: tables as aiconfigurator-core publishes them
(parquet files of systems/data/SYSTEM/moe/ENGINE/VERSION; those of vLLM, whose kernels are Triton's as ours)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeserve.errors import ConfigError
from moeserve.plan.hardware import Device

PACKAGE = "aiconfigurator"  # what --tables calls the installed package
HINT = "pip install 'moeserve[tables]', or name a folder with systems/data of aiconfigurator-core"
COLUMNS = ["moe_dtype", "hidden_size", "inter_size", "num_experts", "topk", "moe_ep_size", "num_tokens", "latency"]
Key = tuple[str, int, int, int, int, int]  # 8-bit or 16-bit weights, width, an expert's width, experts, top k, ranks


class ExpertTimes:
    """Seconds of a rank's share of one layer's experts over the tokens of all ranks, by straight lines between measured
    points on logarithmic axes. Below the first point it is the first, beyond the last it grows as tokens do."""

    def __init__(self, seconds: dict[int, float]) -> None:
        points = sorted(seconds.items())
        self._log_tokens: NDArray[np.float64] = np.log([tokens for tokens, _ in points])
        self._log_s: NDArray[np.float64] = np.log([took_s for _, took_s in points])
        self._most = float(points[-1][0])

    def seconds(self, tokens: float) -> float:
        """Returns the time of a layer."""
        at = np.log(max(1.0, tokens))
        return float(np.exp(np.interp(at, self._log_tokens, self._log_s))) * max(1.0, tokens / self._most)


Tables = dict[Key, ExpertTimes]


def read_tables(source: str, device: Device) -> Tables:
    """Reads the newest measurements of a device. source: "aiconfigurator" for the installed package, or a folder.
    Raises ConfigError."""
    folder = Path(source)
    if source == PACKAGE:
        found = importlib.util.find_spec("aiconfigurator_core")
        if found is None or not found.submodule_search_locations:
            raise ConfigError(f"--tables {source}: the package is not installed; {HINT}")
        folder = Path(found.submodule_search_locations[0], "systems/data")
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"--tables {source}: reading it needs pyarrow; pip install 'moeserve[tables]'") from None
    name = device.name.lower()
    files = [f for system in (f"{name}_sxm", name) for f in folder.glob(f"{system}/moe/vllm/*/moe_perf.parquet")]
    if not files:
        raise ConfigError(f"--tables {source}: {folder} has no {name}_sxm/moe/vllm/*/moe_perf.parquet; {HINT}")
    newest = max(files, key=lambda file: [int(n) if n.isdigit() else 0 for n in file.parent.name.split(".")])
    columns = parquet.read_table(
        newest, columns=COLUMNS, filters=[("moe_tp_size", "=", 1), ("distribution", "=", "balanced")]
    ).to_pydict()
    points: dict[Key, dict[int, float]] = {}
    for *key, tokens, took_ms in zip(*(columns[name] for name in COLUMNS), strict=True):
        row = points.setdefault(tuple(key), {})
        row[tokens] = min(took_ms / 1e3, row.get(tokens, np.inf))  # the faster kernel, as an engine would choose
    return {key: ExpertTimes(row) for key, row in points.items()}
