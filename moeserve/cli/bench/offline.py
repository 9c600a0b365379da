"""`moeserve bench latency` and `throughput`: benchmarks of `LLM`, without a server. The JSON keys
are those of `vllm bench`.
"""

import argparse
import json
import random
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from moeserve.cli.settings import add_flags, resolve
from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from moeserve import LLM, SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


class IntFlag(NamedTuple):
    """A flag with an integer."""

    name: str
    default: int
    minimum: int
    help: str


class Benchmark(ABC):
    """One offline benchmark."""

    # Named as in `vllm bench`.
    int_flags: ClassVar[list[IntFlag]] = [
        IntFlag("input_len", default=32, minimum=1, help="prompt tokens"),
        IntFlag("output_len", default=128, minimum=1, help="output tokens"),
    ]

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the benchmark, and those of `moeserve serve`, which --help does not
        list.
        """
        parser.usage = "%(prog)s [--model MODEL] [flags] [flags of `moeserve serve`]"
        parser.add_argument(
            "--model", metavar="MODEL", help="Hugging Face model directory (default: demo)"
        )
        seed = IntFlag("seed", default=0, minimum=0, help="seed of the prompts")
        for flag in [*cls.int_flags, seed]:
            parser.add_argument(
                f"--{flag.name.replace('_', '-')}",
                type=int,
                default=flag.default,
                metavar="N",
                help=f"{flag.help} [{flag.default}]",
            )
        parser.add_argument(
            "--output-json", type=Path, metavar="FILE", help="also write the result to this file"
        )
        add_flags(parser, shown=False, model=False)

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Measure an LLM that takes and returns token ids, and print the result as JSON."""
        for flag in cls.int_flags:
            value = getattr(args, flag.name)
            if value < flag.minimum:
                raise ConfigError(
                    f"--{flag.name.replace('_', '-')} must be at least {flag.minimum}, got {value}"
                )
        config = resolve(args).config
        config = replace(config, model=replace(config.model, skip_tokenizer_init=True))
        from moeserve import LLM, SamplingParams

        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=args.output_len)
        with LLM(config=config) as llm:
            result = cls.measure(args, llm, params)
        text = json.dumps(
            {**result, "input_len": args.input_len, "output_len": args.output_len}, indent=2
        )
        print(text)
        if args.output_json is not None:
            args.output_json.write_text(text + "\n", "utf-8")
        return 0

    @staticmethod
    @abstractmethod
    def measure(args: argparse.Namespace, llm: "LLM", params: "SamplingParams") -> dict[str, Any]:
        """Return the result."""


class Latency(Benchmark):
    """Measures the seconds of single batches, one after another."""

    int_flags: ClassVar = [
        *Benchmark.int_flags,
        IntFlag("batch_size", default=8, minimum=1, help="prompts per batch"),
        IntFlag("num_iters_warmup", default=3, minimum=0, help="batches before the measurement"),
        IntFlag("num_iters", default=10, minimum=1, help="measured batches"),
    ]

    @staticmethod
    def measure(args: argparse.Namespace, llm: "LLM", params: "SamplingParams") -> dict[str, Any]:
        """Return the mean, each latency and the percentiles."""
        import numpy as np

        latencies: list[float] = []
        for i in range(args.num_iters_warmup + args.num_iters):
            # A new seed each time, so that the prefix cache finds nothing.
            prompts = random_prompts(llm, args.batch_size, args.input_len, args.seed + i)
            begin_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            latencies.append(time.perf_counter() - begin_s)
        del latencies[: args.num_iters_warmup]
        return {
            "avg_latency": float(np.mean(latencies)),
            "latencies": latencies,
            "percentiles": {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES},
            "batch_size": args.batch_size,
        }


class Throughput(Benchmark):
    """Measures requests and tokens per second of many prompts at once."""

    int_flags: ClassVar = [
        *Benchmark.int_flags,
        IntFlag("num_prompts", default=100, minimum=1, help="measured prompts"),
        IntFlag("num_warmups", default=2, minimum=0, help="prompts before the measurement"),
    ]

    @staticmethod
    def measure(args: argparse.Namespace, llm: "LLM", params: "SamplingParams") -> dict[str, Any]:
        """Return the time of all prompts, and the rates."""
        prompts = random_prompts(
            llm, args.num_warmups + args.num_prompts, args.input_len, args.seed
        )
        if args.num_warmups:
            llm.generate(prompts[: args.num_warmups], params, use_tqdm=False)
        begin_s = time.perf_counter()
        outputs = llm.generate(prompts[args.num_warmups :], params)
        elapsed_s = time.perf_counter() - begin_s
        num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        num_tokens = args.num_prompts * args.input_len + num_output_tokens
        return {
            "elapsed_time": elapsed_s,
            "num_requests": args.num_prompts,
            "total_num_tokens": num_tokens,
            "requests_per_second": args.num_prompts / elapsed_s,
            "tokens_per_second": num_tokens / elapsed_s,
            "output_tokens_per_second": num_output_tokens / elapsed_s,
        }


def random_prompts(llm: "LLM", count: int, length: int, seed: int) -> list[Any]:
    """Return `count` prompts of `length` token ids, drawn from the whole vocabulary."""
    assert llm.ready is not None
    rng = random.Random(seed)
    ids = range(llm.ready.vocab_size)
    return [{"prompt_token_ids": rng.choices(ids, k=length)} for _ in range(count)]
