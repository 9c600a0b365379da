"""Measured times of kernels on GPUs, in place of their roofline: tables as aiconfigurator-core
publishes them (parquet files of systems/data/SYSTEM/KIND/ENGINE/VERSION; those of vLLM, whose
kernels of experts are Triton's as ours).

Not used: experts on several ranks, whose kernels there go through the rows of absent experts, as
ours do not; and 8-bit products, which take at least 58 us there, whatever their size, as none does
in a server's graphs.
"""

import importlib.util
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeserve.errors import ConfigError
from moeserve.plan.hardware import Device

PACKAGE = "aiconfigurator"  # what --tables calls the installed package
HINT = "pip install 'moeserve[tables]', or name a folder with systems/data of aiconfigurator-core"
EXPERTS = ("moe_dtype", "hidden_size", "inter_size", "num_experts", "topk", "num_tokens")
PRODUCTS = ("n", "k", "m")
HEADS = ("num_heads", "num_key_value_heads", "head_dim")
Key = tuple[
    str, int, int, int, int
]  # 8-bit or 16-bit weights, width, an expert's width, experts, top k
HeadKey = tuple[int, int, int]  # heads, KV heads, their width


class Times:
    """Seconds over tokens, or another size, by straight lines between measured points on
    logarithmic axes. Below the first point it is the first, beyond the last it grows as the size
    does."""

    def __init__(self, seconds: dict[int, float]) -> None:
        points = sorted(seconds.items())
        self._log_sizes: NDArray[np.float64] = np.log([size for size, _ in points])
        self._log_s: NDArray[np.float64] = np.log([took_s for _, took_s in points])
        self._most = float(points[-1][0])

    def seconds(self, size: float) -> float:
        """Return the time of a kernel."""
        at = np.log(max(1.0, size))
        return float(np.exp(np.interp(at, self._log_sizes, self._log_s))) * max(
            1.0, size / self._most
        )


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Attention of one layer to all positions: `decoding` over those that are read, for each
    measured number of rows, and `reading` a prompt over pairs of a query and a position before it.
    """

    decoding: dict[int, Times]
    reading: Times

    def seconds(self, rows: int, prompts: int, reads: float, pairs: float) -> float:
        """Return the time of a step with so many tokens of prompts beside a token of each row; see
        `Shape`.
        """
        near = min(self.decoding, key=lambda number: abs(math.log(number / rows)))
        decoding_s = self.decoding[near].seconds(reads - prompts) if reads - prompts > rows else 0.0
        return decoding_s + (self.reading.seconds(pairs - reads) if prompts else 0.0)


@dataclass(frozen=True, slots=True)
class KernelTables:
    """The measurements of one device. products: of (outputs, inputs) 16-bit weights, seconds by
    rows.
    """

    experts: dict[Key, Times]
    products: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    attention: dict[HeadKey, AttentionTimes] = field(default_factory=dict)

    def dense(self, shapes: Sequence[tuple[float, float]]) -> Times | None:
        """Return the times over rows of products of (outputs, inputs), one after the other; None
        if none are measured. Between measured sizes, logarithms are linear; beyond them, time grows
        as both do."""
        sizes = sorted({n for n, _ in self.products})
        curves = []
        for shape, number in Counter(shapes if sizes else ()).items():
            beyond = float(number)
            sides = []
            for size in shape:
                beyond *= max(1.0, size / sizes[-1])
                at = float(np.interp(math.log(size), np.log(sizes), range(len(sizes))))
                low = min(int(at), len(sizes) - 2)
                sides.append(((sizes[low], 1 - (at - low)), (sizes[low + 1], at - low)))
            corners = [
                (self.products.get((n, k), {}), a * b)
                for (n, a), (k, b) in product(*sides)
                if a * b
            ]
            rows = set.intersection(*(set(points) for points, _ in corners))
            curves.append(
                {
                    m: beyond
                    * math.exp(sum(part * math.log(points[m]) for points, part in corners))
                    for m in rows
                }
            )
        common = set.intersection(*map(set, curves)) if curves else ()
        return (
            Times({rows: sum(curve[rows] for curve in curves) for rows in common})
            if common
            else None
        )


def read_tables(source: str, device: Device) -> KernelTables:
    """Read the newest measurements of a device. source: "aiconfigurator" for the installed
    package, or a folder. Raises ConfigError if there are none of experts; other kinds may be
    missing."""
    folder = Path(source)
    if source == PACKAGE:
        found = importlib.util.find_spec("aiconfigurator_core")
        if found is None or not found.submodule_search_locations:
            raise ConfigError(f"--tables {source}: the package is not installed; {HINT}")
        folder = Path(found.submodule_search_locations[0], "systems/data")
    if not folder.is_dir():
        raise ConfigError(f"--tables {source}: there is no folder {folder}; {HINT}")
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"--tables {source}: reading it needs pyarrow; pip install 'moeserve[tables]'"
        ) from None
    name = device.name.lower()

    def points(path: str, names: Sequence[str], **only: Any) -> Iterator[tuple[list[Any], float]]:
        """Yield the values of these columns, and the seconds."""
        files = [f for system in (f"{name}_sxm", name) for f in folder.glob(f"{system}/{path}")]
        if not files:
            return
        newest = max(
            files,
            key=lambda file: [int(n) if n.isdigit() else 0 for n in file.parent.name.split(".")],
        )
        wanted = [(key, "=", value) for key, value in only.items()] or None
        columns = parquet.read_table(
            newest, columns=[*names, "latency"], filters=wanted
        ).to_pydict()
        for *key, took_ms in zip(*(columns[n] for n in (*names, "latency")), strict=True):
            yield key, took_ms / 1e3

    alone = {"moe_tp_size": 1, "moe_ep_size": 1}
    experts = _fastest(
        points("moe/vllm/*/moe_perf.parquet", EXPERTS, **alone, distribution="balanced")
    )
    if not experts:
        raise ConfigError(
            f"--tables {source}: {folder} has no {name}_sxm/moe/vllm/*/moe_perf.parquet; {HINT}"
        )
    wide = {"kv_cache_dtype": "bfloat16", "window_size": 0}
    decoding = points(
        "attention/vllm/*/generation_attention_perf.parquet", (*HEADS, "batch_size", "step"), **wide
    )
    reading = points(
        "attention/vllm/*/context_attention_perf.parquet", (*HEADS, "isl"), batch_size=1, **wide
    )
    at_once = _fastest(((*key, n, n * (step + 1)), s) for (*key, n, step), s in decoding)
    prompts = _fastest(((*key, n * (n - 1) // 2), s) for (*key, n), s in reading if n > 1)
    by_heads: dict[HeadKey, dict[int, Times]] = defaultdict(dict)
    for (*heads, number), row in at_once.items():
        by_heads[tuple(heads)][number] = Times(row)
    return KernelTables(
        {key: Times(row) for key, row in experts.items()},
        _fastest(points("gemm/vllm/*/gemm_perf.parquet", PRODUCTS, gemm_dtype="bfloat16")),
        {
            key: AttentionTimes(found, Times(prompts[key]))
            for key, found in by_heads.items()
            if key in prompts
        },
    )


def _fastest(points: Any) -> dict[Any, dict[int, float]]:
    """Return seconds by the last value of each key, and those by the values before it: of the
    fastest kernel, as an engine would choose."""
    found: dict[Any, dict[int, float]] = defaultdict(dict)
    for (*key, size), took_s in points:
        row = found[tuple(key)]
        row[size] = min(took_s, row.get(size, np.inf))
    return found
