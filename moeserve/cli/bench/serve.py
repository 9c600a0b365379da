"""`moeserve bench serve`: benchmarks a running OpenAI-compatible server, moeserve or another."""

import argparse
import json
import math
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import uvloop

from moeserve.cli.bench.datasets import ServerTokenizer, add_dataset_flags, build_samples
from moeserve.cli.bench.load import Outcome, Target, arrival_times, run_load, send
from moeserve.cli.bench.metrics import METRICS, format_table, request_details, summarize
from moeserve.cli.connect import add_server_flags, client_from, model_name
from moeserve.errors import ConfigError

BACKENDS = ("openai", "openai-chat", "vllm")  # vllm is an alias of openai
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
REQUEST_TIMEOUT_S = 6 * 3600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags, named as in `vllm bench serve`."""
    parser.usage = "%(prog)s [--base-url URL] [flags]"
    add_server_flags(parser)
    _add_backend_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("load"))
    add_dataset_flags(parser)
    _add_sampling_flags(parser.add_argument_group("sampling (default: the server's)"))
    _add_result_flags(parser.add_argument_group("results"))


def _add_backend_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        default="openai",
        choices=BACKENDS,
        help="openai, vllm: /v1/completions; openai-chat: /v1/chat/completions [openai]",
    )
    group.add_argument("--host", metavar="HOST", help="host, instead of --base-url [127.0.0.1]")
    group.add_argument("--port", type=int, metavar="N", help="port, instead of --base-url [8000]")
    group.add_argument(
        "--endpoint", metavar="PATH", help="path of the endpoint (default: the backend's)"
    )
    group.add_argument(
        "--model", metavar="NAME", help="model name in requests (default: the server's first)"
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="model name in requests, overrides --model"
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        metavar="S",
        help="wait up to S seconds for the server to be ready [0]",
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests per second; inf: all at once [inf]",
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="shape of arrivals; 1: Poisson process, below 1: burstier [1]",
    )
    group.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="maximum number of concurrent requests (default: no limit)",
    )
    group.add_argument(
        "--num-warmups",
        type=int,
        default=0,
        metavar="N",
        help="requests before the measurement [0]",
    )


def _add_sampling_flags(group: argparse._ArgumentGroup) -> None:
    for name in SAMPLING:
        kind = int if name == "top_k" else float
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X")
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="generate the full output length (always on for random prompts)",
    )
    group.add_argument(
        "--extra-body",
        type=json.loads,
        default={},
        metavar="JSON",
        help="additional fields of each request",
    )


def _add_result_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics",
        default=",".join(METRICS),
        metavar="M,M",
        help="metrics to report [ttft,tpot,itl,e2el]",
    )
    group.add_argument(
        "--metric-percentiles", default="99", metavar="P,P", help="percentiles to report [99]"
    )
    group.add_argument(
        "--save-result", action="store_true", help="write the results to a JSON file"
    )
    group.add_argument(
        "--save-detailed",
        action="store_true",
        help="include every request's times, text and error in that file",
    )
    group.add_argument(
        "--result-dir", type=Path, default=Path(), metavar="DIR", help="folder of that file [.]"
    )
    group.add_argument(
        "--result-filename",
        metavar="NAME",
        help="name of that file (default: backend-rate-concurrency-model-date.json)",
    )
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its table. Returns 1 if no request succeeded."""
    metrics, percentiles = _read_metrics(args)
    _check_load(args)
    if args.host or args.port:
        args.base_url = f"http://{args.host or '127.0.0.1'}:{args.port or 8000}"
    description, outcomes, duration_s = uvloop.run(_bench(args))
    result = description | summarize(outcomes, duration_s, metrics, percentiles)
    print(format_table(result, metrics))
    errors = [outcome.error for outcome in outcomes if outcome.error]
    for error in errors[:10]:
        print(f"failed: {error}", file=sys.stderr)
    if args.save_result:
        saved = result | (request_details(outcomes) if args.save_detailed else {})
        print(f"saved in {_save(args, saved)}", file=sys.stderr)
    return 0 if result["completed"] else 1


def _read_metrics(args: argparse.Namespace) -> tuple[list[str], list[float]]:
    """Return the requested metrics and percentiles. Raises ConfigError for an invalid one."""
    metrics: list[str] = args.percentile_metrics.split(",")
    if unknown := set(metrics) - set(METRICS):
        raise ConfigError(
            f"--percentile-metrics: unknown {', '.join(sorted(unknown))}; known: "
            f"{', '.join(METRICS)}"
        )
    percentiles = []
    with suppress(ValueError):
        percentiles = [float(p) for p in args.metric_percentiles.split(",")]
    if not percentiles or not all(0 <= p <= 100 for p in percentiles):
        raise ConfigError(
            f"--metric-percentiles takes numbers from 0 to 100, got {args.metric_percentiles!r}"
        )
    return metrics, percentiles


def _check_load(args: argparse.Namespace) -> None:
    """Raise ConfigError for an invalid flag of the load."""
    if not args.request_rate > 0 or not args.burstiness > 0:
        raise ConfigError("--request-rate and --burstiness must be above 0")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}")
    if not isinstance(args.extra_body, dict):
        raise ConfigError("--extra-body must be a JSON object")


async def _bench(args: argparse.Namespace) -> tuple[dict[str, Any], list[Outcome], float]:
    """Return a description of the load, the outcomes, and the duration in seconds."""
    from tqdm import tqdm

    async with client_from(args, max_retries=0, timeout_s=REQUEST_TIMEOUT_S) as client:
        if args.ready_check_timeout_sec > 0:
            await client.wait_ready(args.ready_check_timeout_sec)
        model = await model_name(client, args.served_model_name or args.model)
        target = _target(args, client.transport.root_url, model)
        tokenizer = ServerTokenizer(client, model, args.random_vocab_size)
        samples = await build_samples(args, tokenizer, text_only=target.chat)
        warm_ups = [await send(client, target, samples[0]) for _ in range(args.num_warmups)]
        if warm_ups and not any(outcome.success for outcome in warm_ups):
            raise ConfigError(f"every warm-up request failed: {warm_ups[0].error}")
        times_s = arrival_times(len(samples), args.request_rate, args.burstiness, args.seed)
        with tqdm(
            total=len(samples), disable=args.disable_tqdm, unit="req", dynamic_ncols=True
        ) as bar:
            outcomes, duration_s = await run_load(
                client, target, samples, times_s, args.max_concurrency, bar.update
            )
    description = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "model_id": model,
        "num_prompts": len(samples),
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    return description, outcomes, duration_s


def _target(args: argparse.Namespace, root_url: str, model: str) -> Target:
    chat = args.backend == "openai-chat"
    fields = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if args.ignore_eos or args.dataset_name == "random":
        fields["ignore_eos"] = True
    default_endpoint = "/v1/chat/completions" if chat else "/v1/completions"
    url = root_url + (args.endpoint or default_endpoint)
    return Target(url=url, chat=chat, fields={"model": model, **fields, **args.extra_body})


def _save(args: argparse.Namespace, result: dict[str, Any]) -> Path:
    limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    model = str(result["model_id"]).rsplit("/", 1)[-1]
    name = f"{args.backend}-{args.request_rate}qps{limit}-{model}-{result['date']}.json"
    path: Path = args.result_dir / (args.result_filename or name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result), "utf-8")
    return path
