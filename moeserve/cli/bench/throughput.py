"""`moeserve bench throughput`: many prompts at once, offline. JSON keys are those of `vllm bench throughput`."""

from __future__ import annotations

import argparse
import time

from moeserve.cli.bench.offline import add_llm_flags, open_llm, random_prompts, report
from moeserve.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, named as in `vllm bench throughput`."""
    add_llm_flags(parser)
    parser.add_argument("--num-prompts", type=int, default=100, metavar="N", help="prompts [100]")
    parser.add_argument("--num-warmups", type=int, default=2, metavar="N", help="prompts that do not count [2]")


def run(args: argparse.Namespace) -> int:
    """Generates all prompts at once and prints requests and tokens per second."""
    if args.num_prompts < 1 or args.num_warmups < 0:
        raise ConfigError("--num-prompts must be at least 1, --num-warmups at least 0")
    llm, params = open_llm(args)
    with llm:
        prompts = random_prompts(llm, args.num_warmups + args.num_prompts, args.input_len, args.seed)
        if args.num_warmups:
            llm.generate(prompts[: args.num_warmups], params, use_tqdm=False)
        begin_s = time.perf_counter()
        outputs = llm.generate(prompts[args.num_warmups :], params)
        elapsed_s = time.perf_counter() - begin_s
    num_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_in = args.num_prompts * args.input_len
    result = {
        "elapsed_time": elapsed_s,
        "num_requests": args.num_prompts,
        "total_num_tokens": num_in + num_out,
        "requests_per_second": args.num_prompts / elapsed_s,
        "tokens_per_second": (num_in + num_out) / elapsed_s,
        "output_tokens_per_second": num_out / elapsed_s,
    }
    return report(args, result)
