"""Measured times of GPU kernels, which replace the roofline: the tables of aiconfigurator-core.

They are parquet files in systems/data/SYSTEM/KIND/ENGINE/VERSION. The tables of vLLM are used,
because its MoE kernels are written in Triton like ours.

Two kinds of tables are not used:

- Experts on several ranks: the kernels measured there process the rows of absent experts as well.
- 8-bit GEMMs: the measured times are at least 58 us at any size, while kernels in CUDA graphs take
  less.
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

PACKAGE = "aiconfigurator"  # the value of --tables for the installed package
HINT = "pip install 'moeserve[tables]', or name a folder with systems/data of aiconfigurator-core"
EXPERTS = ("moe_dtype", "hidden_size", "inter_size", "num_experts", "topk", "num_tokens")
PRODUCTS = ("n", "k", "m")
HEADS = ("num_heads", "num_key_value_heads", "head_dim")
Key = tuple[str, int, int, int, int]  # the columns EXPERTS without num_tokens
HeadKey = tuple[int, int, int]  # the columns HEADS


class Times:
    """Seconds as a function of tokens or another size.

    Measured points are interpolated linearly on logarithmic axes. Sizes below the first point take
    as long as the first one; after the last point, the time is proportional to the size.
    """

    def __init__(self, seconds: dict[int, float]) -> None:
        points = sorted(seconds.items())
        self._log_sizes: NDArray[np.float64] = np.log([size for size, _ in points])
        self._log_s: NDArray[np.float64] = np.log([took_s for _, took_s in points])
        self._most = float(points[-1][0])

    def seconds(self, size: float) -> float:
        """Return the time of a kernel of this size."""
        at = np.log(max(1.0, size))
        return float(np.exp(np.interp(at, self._log_sizes, self._log_s))) * max(
            1.0, size / self._most
        )


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Measured times of one layer's full attention."""

    decoding: dict[int, Times]  # by number of rows: seconds over KV positions read
    reading: Times  # prefill: seconds over pairs of a query and an earlier position

    def seconds(self, rows: int, prompts: int, reads: float, pairs: float) -> float:
        """Return the time of a step.

        rows, reads, pairs: see `Shape`.
        prompts: number of tokens beyond one per row.
        """
        near = min(self.decoding, key=lambda number: abs(math.log(number / rows)))
        decoding_s = self.decoding[near].seconds(reads - prompts) if reads - prompts > rows else 0.0
        return decoding_s + (self.reading.seconds(pairs - reads) if prompts else 0.0)


@dataclass(frozen=True, slots=True)
class KernelTables:
    """The measurements of one device."""

    experts: dict[Key, Times]
    # GEMMs with 16-bit weights of (outputs, inputs): seconds by number of rows.
    products: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    attention: dict[HeadKey, AttentionTimes] = field(default_factory=dict)

    def dense(self, shapes: Sequence[tuple[float, float]]) -> Times | None:
        """Return the total time of GEMMs with weights of these (outputs, inputs), by rows.

        Return None if none are measured. Sizes are interpolated linearly on logarithmic axes;
        after the largest one, the time is proportional to outputs and inputs.
        """
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
    """Read the newest measurements of a device.

    Raises ConfigError if there are no tables for experts. Other kinds may be missing.

    source: "aiconfigurator" for the installed package, or a folder.
    """
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
            f"--tables {source}: pyarrow is not installed; pip install 'moeserve[tables]'"
        ) from None
    name = device.name.lower()

    def points(path: str, names: Sequence[str], **only: Any) -> Iterator[tuple[list[Any], float]]:
        """Yield (values of the columns `names`, seconds) for each row with the values in `only`."""
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
    """Group points (key, size) -> seconds into {key: {size: seconds}}.

    If several kernels were measured, the fastest one counts, as an engine would choose it.
    """
    found: dict[Any, dict[int, float]] = defaultdict(dict)
    for (*key, size), took_s in points:
        row = found[tuple(key)]
        row[size] = min(took_s, row.get(size, np.inf))
    return found
