"""Cost of an idle server: CPU time of its processes over 20 s, as a share of one core.

    python -m benchmarks.idle

Target: at most 1 % of one core for all processes together. Prints and saves the shares by process.
"""

from __future__ import annotations

import time

from benchmarks.common import Server, cpu_seconds, parser, running_server, save, summary


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="demo", help="model directory [demo]")
    flags.add_argument("--seconds", type=float, default=20.0, help="seconds per sample [20]")
    flags.add_argument("--repeat", type=int, default=3, help="number of samples [3]")
    args = flags.parse_args()
    with running_server(args.model) as server:
        server.wait("/readyz")
        server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True})
        time.sleep(3.0)  # until the work of startup and of the request is over
        samples = [shares(server, args.seconds) for _ in range(args.repeat)]
    roles = {role: summary([sample[role] for sample in samples]) for role in samples[0]}
    total = summary([sum(sample.values()) for sample in samples])
    save(
        "idle",
        args,
        {"seconds": args.seconds, "core_share_total": total, "core_share_by_process": roles},
    )


def shares(server: Server, seconds: float) -> dict[str, float]:
    """Return CPU seconds per second for each process, kernel time included."""
    tree = server.tree()
    before = cpu_seconds(tree)
    begun_s = time.perf_counter()
    time.sleep(seconds)
    after = cpu_seconds(tree)
    passed_s = time.perf_counter() - begun_s
    return {role: (after[role] - before[role]) / passed_s for role in tree}


if __name__ == "__main__":
    main()
