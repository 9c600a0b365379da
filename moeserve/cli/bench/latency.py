"""`moeserve bench latency`: the time of one batch, offline. JSON keys are those of `vllm bench latency`."""

from __future__ import annotations

import argparse
import time

from moeserve.cli.bench.offline import add_llm_flags, open_llm, random_prompts, report
from moeserve.errors import ConfigError

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, named as in `vllm bench latency`."""
    add_llm_flags(parser)
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts per batch [8]")
    parser.add_argument("--num-iters-warmup", type=int, default=3, metavar="N", help="batches that do not count [3]")
    parser.add_argument("--num-iters", type=int, default=10, metavar="N", help="batches that count [10]")


def run(args: argparse.Namespace) -> int:
    """Generates the batches one after another and prints their latencies in seconds."""
    if args.num_iters < 1 or args.batch_size < 1 or args.num_iters_warmup < 0:
        raise ConfigError("--num-iters and --batch-size must be at least 1, --num-iters-warmup at least 0")
    import numpy as np

    latencies: list[float] = []
    llm, params = open_llm(args)
    with llm:
        for i in range(args.num_iters_warmup + args.num_iters):
            # A new seed each time: a prefix cache must not answer for the model.
            prompts = random_prompts(llm, args.batch_size, args.input_len, args.seed + i)
            begin_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            latencies.append(time.perf_counter() - begin_s)
    del latencies[: args.num_iters_warmup]
    result = {
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES},
        "batch_size": args.batch_size,
    }
    return report(args, result)
