"""Timing on a GPU, and the record of a section's cases.

Times are medians of CUDA graphs with many calls over rotating data; candidates take turns. On a CPU
(a smoke run under TRITON_INTERPRET=1) everything is called once and nothing is timed.
"""

from __future__ import annotations

import faulthandler
import math
import statistics
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tools.gpu.process import write_json

Run = Callable[[], Any]
T = TypeVar("T")

COLD_BYTES = 300_000_000  # size of all copies of the data: several times any GPU's L2 cache
FLUSH_BYTES = 256 * 2**20
MOST_COPIES = 32
GRAPH_US = 1000.0  # a graph runs about so long, so that its launch does not matter
MOST_REPEATS = 64
MOST_TEXT = 2000


@dataclass(slots=True)
class Bench:
    """Where and until when a section runs, and the record of what it found."""

    device: torch.device
    smoke: bool
    part: tuple[int, int] = (0, 1)  # (i, n): every n-th case, starting with the i-th
    compiles: bool = False  # only call everything once
    rounds: int = 7
    deadline_s: float = math.inf
    case_s: float = 90.0  # a case that takes longer hangs
    known: frozenset[str] = frozenset()  # cases to skip: an earlier run has done them
    result: Path | None = None  # the file to which `found` is written after each step
    # Values by key, and names of cases: done, failed, left out for lack of time, wrong.
    found: dict[str, Any] = field(
        default_factory=lambda: {"done": [], "failed": {}, "left_out": [], "wrong": []}
    )
    _flush: Tensor | None = None

    @property
    def times(self) -> bool:
        return not self.smoke and not self.compiles

    @property
    def dtype(self) -> torch.dtype:
        """bf16; fp32 in a smoke run, because the interpreter multiplies bf16 wrongly."""
        return torch.float32 if self.smoke else torch.bfloat16

    def each(self, key: str, wanted: Iterable[T], measure: Callable[[T], Any]) -> None:
        """Append measure(case) to found[key] for each case, until the time is up.

        A case that fails does not affect the others, unless it leaves the device unusable: then the
        process ends.
        """
        for case in self.mine(wanted):
            name = f"{key} {case}"
            if name in self.known:
                continue
            if time.monotonic() > self.deadline_s:
                self.found["left_out"].append(name)
                continue
            self.begin(name)
            try:
                self.found.setdefault(key, []).append(measure(case))
            except Exception:
                self.synchronize()
                self.end(traceback.format_exc()[-MOST_TEXT:])
            else:
                self.end()

    def mine(self, wanted: Iterable[T]) -> Iterator[T]:
        return islice(wanted, self.part[0], None, self.part[1])

    def begin(self, name: str) -> None:
        """Start a case, and end the process if it takes longer than `case_s`.

        A kernel may never return, so only the end of the process stops it. Its stacks go to stderr.
        """
        self.found["running"] = name
        self.save()
        faulthandler.dump_traceback_later(self.case_s, exit=True)

    def end(self, problem: str = "") -> None:
        faulthandler.cancel_dump_traceback_later()
        name = self.found.pop("running")
        if problem:
            self.found["failed"][name] = problem
        else:
            self.found["done"].append(name)
        self.save()

    def save(self) -> None:
        if self.result is not None:
            write_json(self.result, self.found)

    def synchronize(self) -> None:
        """Raise if the device has an error that does not go away."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def random(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return new normal numbers at each call."""
        x = torch.randn(shape, device=self.device, dtype=self.dtype)
        return x.mul_(scale).to(dtype or self.dtype)

    def copies(self, num_bytes: int) -> int:
        """Return how many copies of the data keep each call's data out of the L2 cache."""
        return (
            1
            if not self.times
            else max(1, min(MOST_COPIES, math.ceil(COLD_BYTES / max(1, num_bytes))))
        )

    def time(
        self, candidates: Mapping[str, Sequence[Run]], may_fail: Collection[str] = ()
    ) -> dict[str, list[float]]:
        """Return microseconds per call in each round, by candidate.

        A candidate is the same call over several copies of the data. If one of `may_fail` fails, it
        is omitted with a note.
        """
        if not self.times:
            for runs in candidates.values():
                runs[0]()
            return {name: [] for name in candidates}
        graphs = {}
        for name, runs in candidates.items():
            try:
                graphs[name] = self._graph(runs)
            except Exception as error:
                if name not in may_fail:
                    raise
                self.found.setdefault("notes", []).append(
                    f"{name}: {type(error).__name__}: {error}"[:300]
                )
        found: dict[str, list[float]] = {name: [] for name in graphs}
        for number in range(self.rounds + 1):
            for name, (graph, calls) in graphs.items():
                elapsed_us = self._elapsed_us(graph.replay) / calls
                if number:  # round 0 is the warm-up
                    found[name].append(elapsed_us)
        return found

    def _graph(self, runs: Sequence[Run]) -> tuple[torch.cuda.CUDAGraph, int]:
        for run in runs:
            run()  # compiles
        torch.cuda.synchronize()
        once_us = self._elapsed_us(lambda: [run() for run in runs])
        repeats = max(1, min(MOST_REPEATS, round(GRAPH_US / max(1.0, once_us))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                for run in runs:
                    run()
        return graph, repeats * len(runs)

    def _elapsed_us(self, run: Run) -> float:
        """Time a call that starts with a cold L2 cache."""
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        self._flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000.0


def figures(samples_us: Sequence[float], num_bytes: int = 0, flops: int = 0) -> dict[str, Any]:
    """Return median and range, and bytes and operations per second at the median.

    They are None if nothing was timed.
    """
    us = statistics.median(samples_us) if samples_us else None
    found: dict[str, Any] = {
        "us": us,
        "us_min": min(samples_us, default=None),
        "us_max": max(samples_us, default=None),
    }
    if num_bytes:
        found |= {"bytes": num_bytes, "tb_s": num_bytes / us / 1e6 if us else None}
    if flops:
        found |= {"flops": flops, "tflop_s": flops / us / 1e6 if us else None}
    return found


def error_of(found: Tensor, reference: Tensor) -> float:
    """|found - reference| / |reference| over all elements, in fp64; NaN and infinity never pass."""
    reference = reference.double()
    norm = float(reference.norm())
    return float((found.double() - reference).norm()) / (norm or 1.0)
