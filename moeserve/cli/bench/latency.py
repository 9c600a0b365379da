"""`moeserve bench latency`: one batch, again and again, offline. JSON keys are those of `vllm bench latency`."""

from __future__ import annotations

import argparse
import time

from moeserve.cli.bench.offline import add_llm_flags, open_llm, random_prompts, report
from moeserve.errors import ConfigError

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_llm_flags(parser)
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts per batch [8]")
    parser.add_argument("--num-iters-warmup", type=int, default=3, metavar="N", help="batches that do not count [3]")
    parser.add_argument("--num-iters", type=int, default=10, metavar="N", help="batches that count [10]")


def run(args: argparse.Namespace) -> int:
    if args.num_iters < 1 or args.batch_size < 1 or args.num_iters_warmup < 0:
        raise ConfigError("--num-iters and --batch-size must be at least 1, --num-iters-warmup at least 0")
    import numpy as np

    from moeserve import SamplingParams

    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=args.output_len)
    latencies: list[float] = []
    with open_llm(args) as llm:
        for i in range(args.num_iters_warmup + args.num_iters):
            # A new seed each time: a prefix cache must not answer for the model.
            prompts = random_prompts(llm, args.batch_size, args.input_len, args.seed + i)
            begun_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if i >= args.num_iters_warmup:
                latencies.append(time.perf_counter() - begun_s)
    report(
        args,
        {
            "avg_latency": float(np.mean(latencies)),
            "latencies": latencies,
            "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES},
            "batch_size": args.batch_size,
            "input_len": args.input_len,
            "output_len": args.output_len,
        },
    )
    return 0
