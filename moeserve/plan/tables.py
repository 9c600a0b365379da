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
EXPERT_COLUMNS = ("moe_dtype", "hidden_size", "inter_size", "num_experts", "topk", "num_tokens")
GEMM_COLUMNS = ("n", "k", "m")
HEAD_COLUMNS = ("num_heads", "num_key_value_heads", "head_dim")
ExpertKey = tuple[str, int, int, int, int]  # EXPERT_COLUMNS without num_tokens
HeadKey = tuple[int, int, int]  # HEAD_COLUMNS


class Times:
    """Seconds as a function of tokens or another size.

    Measured points are interpolated linearly on logarithmic axes. Sizes below the first point take
    as long as the first one; after the last point, the time is proportional to the size.
    """

    def __init__(self, seconds: dict[int, float]) -> None:
        points = sorted(seconds.items())
        self._log_sizes: NDArray[np.float64] = np.log([size for size, _ in points])
        self._log_s: NDArray[np.float64] = np.log([took_s for _, took_s in points])
        self._max_size = float(points[-1][0])

    def seconds(self, size: float) -> float:
        """Return the time of a kernel of this size."""
        log_size = np.log(max(1.0, size))
        took_s = float(np.exp(np.interp(log_size, self._log_sizes, self._log_s)))
        return took_s * max(1.0, size / self._max_size)


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Measured times of one layer's full attention."""

    # By number of rows: seconds over the KV positions that these rows read
    decode: dict[int, Times]
    prefill: Times  # seconds over the pairs of a query and an earlier position

    def seconds(self, num_rows: int, num_prompt: int, num_reads: float, num_pairs: float) -> float:
        """Return the time of a step: as if it decoded all rows, and then prefilled the prompts.

        num_rows, num_reads, num_pairs: see `Shape`.
        num_prompt: number of tokens beyond one per row.
        """
        decode_s = 0.0
        decode_reads = num_reads - num_prompt
        if decode_reads > num_rows:  # otherwise the rows have no context
            nearest = min(self.decode, key=lambda number: abs(math.log(number / num_rows)))
            decode_s = self.decode[nearest].seconds(decode_reads)
        prefill_s = self.prefill.seconds(num_pairs - num_reads) if num_prompt else 0.0
        return decode_s + prefill_s


@dataclass(frozen=True, slots=True)
class KernelTables:
    """The measurements of one device."""

    experts: dict[ExpertKey, Times]
    # GEMMs with 16-bit weights of (outputs, inputs): seconds by number of rows.
    gemms: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    attention: dict[HeadKey, AttentionTimes] = field(default_factory=dict)

    def dense(self, shapes: Sequence[tuple[float, float]]) -> Times | None:
        """Return the total time of GEMMs with weights of these (outputs, inputs), by rows.

        Return None if none are measured. Sizes are interpolated linearly on logarithmic axes;
        after the largest one, the time is proportional to outputs and inputs.
        """
        if not self.gemms:
            return None
        # For each shape: seconds by number of rows
        curves = [self._gemm_curve(shape, number) for shape, number in Counter(shapes).items()]
        common_rows = set.intersection(*map(set, curves)) if curves else set()
        if not common_rows:
            return None
        return Times({rows: sum(curve[rows] for curve in curves) for rows in common_rows})

    def _gemm_curve(self, shape: tuple[float, float], number: int) -> dict[int, float]:
        """Return the seconds of `number` GEMMs of a shape (outputs, inputs), by rows."""
        sizes = sorted({outputs for outputs, _ in self.gemms})
        factor = float(number)  # times the excess over the largest size
        sides = []  # for outputs and inputs: two measured sizes, each with its weight
        for size in shape:
            factor *= max(1.0, size / sizes[-1])
            # The position of the size in `sizes`, with a fraction between two of them.
            position = float(np.interp(math.log(size), np.log(sizes), range(len(sizes))))
            low = min(int(position), len(sizes) - 2)
            high_weight = position - low
            sides.append(((sizes[low], 1 - high_weight), (sizes[low + 1], high_weight)))
        # The measured shapes that surround this one, each with its weight
        corners = [
            (self.gemms.get((outputs, inputs), {}), out_weight * in_weight)
            for (outputs, out_weight), (inputs, in_weight) in product(*sides)
            if out_weight * in_weight
        ]
        curve = {}
        for rows in set.intersection(*(set(points) for points, _ in corners)):
            log_s = sum(weight * math.log(points[rows]) for points, weight in corners)
            curve[rows] = factor * math.exp(log_s)
        return curve


def read_tables(source: str, device: Device) -> KernelTables:
    """Read the newest measurements of a device.

    Raises ConfigError if there are no tables for experts. Other kinds may be missing.

    source: "aiconfigurator" for the installed package, or a folder.
    """
    folder = Path(source)
    if source == PACKAGE:
        module_spec = importlib.util.find_spec("aiconfigurator_core")
        if module_spec is None or not module_spec.submodule_search_locations:
            raise ConfigError(f"--tables {source}: the package is not installed; {HINT}")
        folder = Path(module_spec.submodule_search_locations[0], "systems/data")
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
        files = [
            file for system in (f"{name}_sxm", name) for file in folder.glob(f"{system}/{path}")
        ]
        if not files:
            return
        newest = max(
            files,
            key=lambda file: [
                int(part) if part.isdigit() else 0 for part in file.parent.name.split(".")
            ],
        )
        wanted = [(key, "=", value) for key, value in only.items()] or None
        columns = parquet.read_table(
            newest, columns=[*names, "latency"], filters=wanted
        ).to_pydict()
        for *key, took_ms in zip(*(columns[column] for column in (*names, "latency")), strict=True):
            yield key, took_ms / 1e3

    one_rank = {"moe_tp_size": 1, "moe_ep_size": 1}
    experts = _fastest(
        points("moe/vllm/*/moe_perf.parquet", EXPERT_COLUMNS, **one_rank, distribution="balanced")
    )
    if not experts:
        raise ConfigError(
            f"--tables {source}: {folder} has no {name}_sxm/moe/vllm/*/moe_perf.parquet; {HINT}"
        )
    full_16bit = {"kv_cache_dtype": "bfloat16", "window_size": 0}
    decode = points(
        "attention/vllm/*/generation_attention_perf.parquet",
        (*HEAD_COLUMNS, "batch_size", "step"),
        **full_16bit,
    )
    prefill = points(
        "attention/vllm/*/context_attention_perf.parquet",
        (*HEAD_COLUMNS, "isl"),
        batch_size=1,
        **full_16bit,
    )
    # By heads and rows: seconds over the KV positions that all rows read
    decode_s = _fastest(
        ((*heads, rows, rows * (context + 1)), took_s) for (*heads, rows, context), took_s in decode
    )
    # By heads: seconds over the pairs of a query and an earlier position
    prefill_s = _fastest(
        ((*heads, tokens * (tokens - 1) // 2), took_s)
        for (*heads, tokens), took_s in prefill
        if tokens > 1
    )
    decode_times: dict[HeadKey, dict[int, Times]] = defaultdict(dict)
    for (*heads, rows), curve in decode_s.items():
        decode_times[tuple(heads)][rows] = Times(curve)
    return KernelTables(
        experts={key: Times(curve) for key, curve in experts.items()},
        gemms=_fastest(
            points("gemm/vllm/*/gemm_perf.parquet", GEMM_COLUMNS, gemm_dtype="bfloat16")
        ),
        attention={
            key: AttentionTimes(decode=times, prefill=Times(prefill_s[key]))
            for key, times in decode_times.items()
            if key in prefill_s
        },
    )


def _fastest(points: Any) -> dict[Any, dict[int, float]]:
    """Group points (key, size) -> seconds into {key: {size: seconds}}.

    If several kernels were measured, the fastest one counts, as an engine would choose it.
    """
    curves: dict[Any, dict[int, float]] = defaultdict(dict)
    for (*key, size), took_s in points:
        curve = curves[tuple(key)]
        curve[size] = min(took_s, curve.get(size, np.inf))
    return curves
