"""Times on a GPU: CUDA graphs of many calls over data that rotates, candidates in turn, medians;
and a section's cases.

On a CPU (a smoke run under TRITON_INTERPRET=1) everything is called once and no time is claimed.
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

COLD_BYTES = (
    300_000_000  # what copies of the data take together: several times the L2 cache of any GPU
)
FLUSH_BYTES = 256 * 2**20
MOST_COPIES = 32
GRAPH_US = 1000.0  # a graph runs about so long, so that starting it does not count
MOST_REPEATS = 64
MOST_TEXT = 2000


@dataclass(slots=True)
class Bench:
    """Where a section runs and until when, and its record: values, and the names of cases that are
    done, failed or, for lack of time, left out. result: the file that gets the record at each step.
    """

    device: torch.device
    smoke: bool
    part: tuple[int, int] = (0, 1)  # (i, n): every n-th case from the i-th on
    compiles: bool = False  # calls everything once and times nothing
    rounds: int = 7
    deadline_s: float = math.inf
    case_s: float = 90.0  # for one case, then it hangs
    known: frozenset[str] = frozenset()  # cases that are done
    result: Path | None = None
    found: dict[str, Any] = field(
        default_factory=lambda: {"done": [], "failed": {}, "left_out": [], "wrong": []}
    )
    _flush: Tensor | None = None

    @property
    def times(self) -> bool:
        return not self.smoke and not self.compiles

    @property
    def dtype(self) -> torch.dtype:
        """bf16, which the interpreter multiplies wrongly."""
        return torch.float32 if self.smoke else torch.bfloat16

    def each(self, key: str, wanted: Iterable[T], measure: Callable[[T], Any]) -> None:
        """Appends what `measure` returns of each case to found[key] until the time is up. One that
        fails leaves the others alone, unless the device is of no use after it: then so is the
        process."""
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
        """Ends the process, with its stacks on stderr, if that case takes too long: a kernel may
        never end.
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
        """Raises where an error of the device has come to stay."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def random(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, new ones at each call."""
        x = torch.randn(shape, device=self.device, dtype=self.dtype)
        return x.mul_(scale).to(dtype or self.dtype)

    def copies(self, num_bytes: int) -> int:
        """Sets of data that are enough for each call to find its own cold."""
        return (
            1
            if not self.times
            else max(1, min(MOST_COPIES, math.ceil(COLD_BYTES / max(1, num_bytes))))
        )

    def time(
        self, candidates: Mapping[str, Sequence[Run]], may_fail: Collection[str] = ()
    ) -> dict[str, list[float]]:
        """Microseconds of one call in each round. A candidate is the same call over several sets of
        data; one of `may_fail` that fails is left out."""
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
                if number:  # the first round is for warmth
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
        """With a cold L2 cache."""
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
    """Median and range, and the rates that bytes and operations make of the median. None where
    nothing was timed.
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
