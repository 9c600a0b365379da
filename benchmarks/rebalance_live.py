"""Inter-token latency while experts move between engines, beside the same streams without moves.

    python -m benchmarks.rebalance_live [--model DIR]

Streams run on two engines. Periods without moves alternate with periods in which random placements
are applied one after the other, so that nearly every expert is read and moved each time. Both kinds
of periods share the same streams, because the speed of a shared machine changes.

Target: p99 of the inter-token latency at most 1.3 times that without moves.

Prints and saves both latencies and the moves; moved bytes are summed over all layers and ranks.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common import parser, save, summary
from moeserve.cluster import rebalancing
from moeserve.cluster.fleet import Fleet
from moeserve.config import config_of
from moeserve.errors import Conflict
from moeserve.frontend import open as opening
from moeserve.frontend.front_end import FrontEnd
from moeserve.moe.placement.placement import Placement
from moeserve.moe.placement.rebalance import Rebalancer
from moeserve.sampling import SamplingParams

WARM_S = 2.0


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="demo")
    flags.add_argument("--dp", type=int, default=2)
    flags.add_argument("--streams", type=int, default=16)
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--seconds", type=float, default=6.0, help="seconds of each period [6]")
    flags.add_argument(
        "--pause", type=float, default=0.0, help="seconds between one placement and the next [0]"
    )
    args = flags.parse_args()
    config = config_of(
        args.model,
        dp=args.dp,
        threads=1,
        max_model_len=1024,
        kv_cache_bytes=2**28,
        rebalance="off",
        skip_tokenizer_init=True,
        max_num_seqs=args.streams,
    )

    rebalancing.Rebalancer = Restless  # type: ignore[attr-defined]

    async def run() -> dict[str, Any]:
        async with opening.open_front_end(config, child=True) as front:
            await front.wait_ready()
            return await measure(front, args.streams, args.rounds, args.seconds, args.pause)

    save("rebalance-live", args, {"model": args.model, "dp": args.dp, **asyncio.run(run())})


class Restless(Rebalancer):
    """Proposes a random placement, whatever the load is."""

    rng = np.random.default_rng(0)

    def propose(self, now_s: float, force: bool = False) -> Placement | None:
        if self.pending is not None:
            return None
        self._newest_version += 1
        experts_LS = self.rng.permuted(self.current.experts_LS, axis=1)
        self.pending = replace(self.current, version=self._newest_version, experts_LS=experts_LS)
        self._proposed_at_s = now_s
        return self.pending


class Gaps:
    """Endless streams, and the inter-token latencies of all of them in milliseconds."""

    def __init__(self, front: FrontEnd, num_streams: int) -> None:
        self.seen: list[float] = []
        self._tasks = [asyncio.create_task(self._read(front, i)) for i in range(num_streams)]

    async def _read(self, front: FrontEnd, i: int) -> None:
        for number in range(1 << 30):
            params = SamplingParams(max_tokens=900, temperature=0.8, seed=i, ignore_eos=True)
            last_s = 0.0
            async with await front.generate([5 + i, 6, 7 + number % 100, 8], params) as deltas:
                async for _ in deltas:
                    now_s = time.monotonic()
                    if last_s:
                        self.seen.append((now_s - last_s) * 1e3)
                    last_s = now_s

    def take(self) -> list[float]:
        for task in self._tasks:
            if task.done():
                task.result()
        taken = self.seen
        self.seen = []
        return taken

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def measure(
    front: FrontEnd, num_streams: int, num_rounds: int, seconds: float, pause_s: float
) -> dict[str, Any]:
    fleet = front.fleet
    assert fleet is not None
    gaps = Gaps(front, num_streams)
    still: list[list[float]] = []
    moving: list[list[float]] = []
    moves: list[float] = []
    await asyncio.sleep(WARM_S)
    await move(fleet, WARM_S, pause_s)
    for _ in range(num_rounds):
        gaps.take()
        await asyncio.sleep(seconds)
        still.append(gaps.take())
        moves += await move(fleet, seconds, pause_s)
        moving.append(gaps.take())
    await gaps.stop()
    view = fleet.view.experts
    assert view is not None
    p99 = [[float(np.percentile(part, 99)) for part in kind] for kind in (still, moving)]
    pooled = [float(np.percentile(np.concatenate(kind), 99)) for kind in (still, moving)]
    return {
        "streams": num_streams,
        "p99_ratio": pooled[1] / pooled[0],
        "p99_ratio_by_round": summary([b / a for a, b in zip(*p99, strict=True)]),
        "p99_still_ms": {"pooled": pooled[0], **summary(p99[0])},
        "p99_moving_ms": {"pooled": pooled[1], **summary(p99[1])},
        "p50_still_ms": float(np.median(np.concatenate(still))),
        "p50_moving_ms": float(np.median(np.concatenate(moving))),
        "moves": len(moves),
        "move_s": summary(moves),
        "moved_bytes": view.moved_bytes,
    }


async def move(fleet: Fleet, seconds: float, pause_s: float) -> list[float]:
    """Apply random placements for `seconds`, one after the other; return the duration of each."""
    took: list[float] = []
    until_s = time.monotonic() + seconds
    while not took or time.monotonic() < until_s:
        try:
            decision = await fleet.scaling.rebalance()
        except Conflict as error:
            raise SystemExit(f"experts could not be moved: {error}") from error
        if decision is None or decision.error:
            raise SystemExit(f"experts did not move: {decision}")
        took.append(decision.took_s)
        await asyncio.sleep(pause_s)
    return took


if __name__ == "__main__":
    main()
