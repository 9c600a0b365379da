"""Gain of dual-batch overlap (DBO) on a slow link between two ranks, for prefill and decode.

    python -m benchmarks.dbo

Needs root and two cores, and exits with the reason otherwise.

Setup: two ranks run in two network namespaces, joined by a veth pair with a token bucket. Each has
one thread and one core, and the `torch` backend (Gloo) sends the tokens. The model has random
weights: a narrow Mixtral whose experts are as wide as the model, so that attention does a third of
the work.

Prefill: the link's rate is set so that communication takes `--ratio` of the compute time. DBO off,
on, auto, and on with encryption take turns.

Decode: the link is unlimited. Overlap does not pay there, and auto must notice.

Terms: compute time is what the slower rank's step takes with one micro-batch, less its waiting for
tokens; communication is the rest. The ideal speedup is their sum divided by the longer of the two.

Limits: of the two transfers of a layer, one hides behind the experts of the other micro-batch and
one behind its attention. The last transfer of a step hides behind nothing. Sending takes time of
the same core, and the faster the link is in proportion to the core, the more of it.

Targets:

    prefill       on: 1.3 x off and 0.85 x ideal
    decode        auto: at most 2 % slower than off
    encryption    costs at most 10 % of the gain

Prints and saves step times and ratios, and the spans of one traced step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import msgspec
import numpy as np

from benchmarks.common import parser, save
from benchmarks.dbo_link import Link, slow_link
from benchmarks.dbo_rank import MODES, Mode, Order, Phase, Setup, Step
from benchmarks.specs import Sizes
from moeserve.messages import TraceEvent

LEARNING = 8  # prefill steps in which auto learns whether overlap pays
CHUNK = 20  # decode steps of one mode in a row
LENGTHS: dict[Mode, int] = {"off": CHUNK, "auto": CHUNK, "on": 4}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--layers", type=int, default=4)
    flags.add_argument("--hidden", type=int, default=1024)
    flags.add_argument(
        "--heads",
        type=int,
        default=8,
        help="heads of width 128, with a quarter as many KV heads [%(default)s]",
    )
    flags.add_argument("--experts", type=int, default=8)
    flags.add_argument("--top-k", type=int, default=2)
    flags.add_argument("--expert-size", type=int, default=1024)
    flags.add_argument(
        "--tokens", type=int, default=1024, help="tokens of a rank's prefill step [%(default)s]"
    )
    flags.add_argument(
        "--prompt", type=int, default=256, help="tokens of each request in that step [%(default)s]"
    )
    flags.add_argument(
        "--batch", type=int, default=16, help="requests of a rank's decode step [%(default)s]"
    )
    flags.add_argument(
        "--ratio", type=float, default=0.6, help="communication time / compute time [%(default)s]"
    )
    flags.add_argument(
        "--rounds", type=int, default=12, help="prefill steps of each mode [%(default)s]"
    )
    flags.add_argument(
        "--auto-rounds", type=int, default=24, help=f"rounds of {CHUNK} decode steps [%(default)s]"
    )
    args = flags.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("this needs two cores: each rank computes on one")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # also removes the namespaces
    sizes = _sizes(args)
    with slow_link() as link, contextlib.ExitStack() as stack:
        pair = _Pair(
            stack.enter_context(
                _started(
                    Setup(rank, sizes, args.tokens, args.prompt, args.batch), link, cores[rank]
                )
            )
            for rank in (0, 1)
        )
        results = {
            "model": msgspec.to_builtins(sizes),
            "prefill": _prefill(pair, link, args.ratio, args.rounds),
            "decode": _decode(pair, link, args.auto_rounds),
        }
    save("dbo", args, results)


def _sizes(args: Any) -> Sizes:
    return Sizes(
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        experts=args.experts,
        top_k=args.top_k,
        expert_size=args.expert_size,
    )


# ---- the ranks


@contextlib.contextmanager
def _started(setup: Setup, link: Link, core: int) -> Iterator[subprocess.Popen[str]]:
    command = ["ip", "netns", "exec", link.names[setup.rank], "taskset", "-c", str(core)]
    command += [sys.executable, "-m", "benchmarks.dbo_rank", msgspec.json.encode(setup).decode()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class _Pair:
    """Both ranks. They always execute the same order."""

    def __init__(self, ranks: Iterator[subprocess.Popen[str]]) -> None:
        self._ranks = tuple(ranks)

    def run(
        self,
        phase: Phase,
        mode: Mode,
        steps: int = 1,
        *,
        trace: bool = False,
        encrypted: bool = False,
    ) -> list[tuple[Step, Step]]:
        """Return (rank 0, rank 1) for each step."""
        line = msgspec.json.encode(Order(phase, mode, steps, trace, encrypted)).decode()
        answers = []
        for rank in self._ranks:
            print(line, file=rank.stdin, flush=True)
        for rank in self._ranks:
            assert rank.stdout is not None
            answer = rank.stdout.readline()
            if not answer:
                sys.exit("a rank failed; its error is above")
            answers.append(msgspec.json.decode(answer, type=list[Step]))
        return list(zip(*answers, strict=True))


Steps = Sequence[tuple[Step, Step]]


def _took_s(step: tuple[Step, Step]) -> float:
    return max(rank.took_us for rank in step) / 1e6


def _compute_s(step: tuple[Step, Step]) -> float:
    return max(rank.took_us - rank.exposed_us for rank in step) / 1e6


# ---- the measurements


def _prefill(pair: _Pair, link: Link, ratio: float, rounds: int) -> dict[str, Any]:
    pair.run("prefill", "on")
    pair.run("prefill", "off")
    before = link.bytes_sent()
    alone = pair.run("prefill", "off", 3)
    sent = max(after - now for after, now in zip(link.bytes_sent(), before, strict=True)) / 3
    rate = int(8 * sent / (ratio * min(map(_compute_s, alone))))
    link.limit(rate)
    pair.run("prefill", "auto", LEARNING)
    found: dict[Mode, list[tuple[Step, Step]]] = {mode: [] for mode in MODES}
    encrypted: list[tuple[Step, Step]] = []
    for _ in range(rounds):
        for mode in MODES:
            found[mode] += pair.run("prefill", mode)
        encrypted += pair.run("prefill", "on", encrypted=True)
    traced = pair.run("prefill", "on", trace=True)[0]
    hidden = [overlapped_us(rank.events) for rank in traced]
    if not all(work["experts"] and work["attention"] for work in hidden):
        sys.exit(f"no transfer ran beside the other micro-batch's work: {hidden}")
    off_s = median(map(_took_s, found["off"]))
    compute_s = median(map(_compute_s, found["off"]))
    ideal = off_s / max(compute_s, off_s - compute_s)
    summaries = {mode: _summary(found[mode], found["off"]) for mode in MODES}
    sealed = _summary(encrypted, found["off"])
    return {
        "rate_mbit_s": rate / 1e6,
        "bytes_per_step": sent,
        "wire_s": 8 * sent / rate,
        "compute_s": compute_s,
        "comm_s": off_s - compute_s,
        "compute_unlimited_s": min(map(_compute_s, alone)),
        "comm_over_compute": off_s / compute_s - 1,
        "ideal_speedup": ideal,
        "off": summaries["off"],
        "on": summaries["on"],
        "auto": summaries["auto"],
        "on_share_of_ideal": summaries["on"]["speedup"] / ideal,
        "on_encrypted": sealed,
        "gain_lost_by_encryption": 1 - (sealed["speedup"] - 1) / (summaries["on"]["speedup"] - 1),
        "overlapped_us": hidden,
        "trace": [[e.name, e.track, e.start_ns, e.end_ns, e.layer] for e in traced[0].events],
    }


def _decode(pair: _Pair, link: Link, rounds: int) -> dict[str, Any]:
    link.limit(0)
    found: dict[Mode, list[tuple[Step, Step]]] = {mode: [] for mode in MODES}
    for mode in MODES:
        pair.run("decode", mode, CHUNK)
    for number in range(rounds):
        # Contexts grow, so each mode comes first as often as last.
        for mode in MODES[:: 1 if number % 2 else -1]:
            found[mode] += pair.run("decode", mode, LENGTHS[mode])
    sums = {
        mode: np.array([*map(_took_s, found[mode])]).reshape(rounds, CHUNK).sum(1)
        for mode in ("off", "auto")
    }
    # Ratios of neighboring rounds cancel out other load on the machine. Rounds are summed so that
    # steps in which auto tries two micro-batches count in full.
    return {
        **{mode: _summary(found[mode], found["off"]) for mode in MODES},
        "auto_loss_percent": 100 * float(np.median(sums["auto"] / sums["off"]) - 1),
        "auto_loss_of_sums_percent": 100 * float(sums["auto"].sum() / sums["off"].sum() - 1),
    }


def overlapped_us(events: Sequence[TraceEvent]) -> dict[str, int]:
    """Return how long one micro-batch's transfers ran beside the other's work.

    The keys are the names of that work: attention, experts.
    """
    total: dict[str, int] = {"attention": 0, "experts": 0}
    for travel in events:
        for work in events:
            if (
                travel.track.startswith("transfer")
                and work.track == f"micro-batch {1 - int(travel.track[-1])}"
            ):
                shared_ns = min(travel.end_ns, work.end_ns) - max(travel.start_ns, work.start_ns)
                total[work.name] = total.get(work.name, 0) + max(0, shared_ns) // 1000
    return total


def _summary(steps: Steps, off: Steps) -> dict[str, Any]:
    """Return the figures of one mode. `speedup` is over DBO off: the median of the rounds."""
    took_s = [*map(_took_s, steps)]
    off_s = [*map(_took_s, off)]
    both = [rank for step in steps for rank in step]
    pairs = (
        zip(off_s, took_s, strict=True)
        if len(off_s) == len(took_s)
        else [(median(off_s), median(took_s))]
    )
    return {
        "median_s": median(took_s),
        "speedup": median(one / other for one, other in pairs),
        "overlap_efficiency": 1
        - sum(rank.exposed_us for rank in both) / sum(rank.comm_us for rank in both),
        "two_ubatches": sum(rank.ubatches == 2 for rank in both) / len(both),
        "samples_s": [round(one_s, 6) for one_s in took_s],
    }


if __name__ == "__main__":
    main()
