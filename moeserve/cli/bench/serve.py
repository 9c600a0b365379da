"""`moeserve bench serve`: loads a running OpenAI-compatible server, ours or a peer's, and reports how it bore it."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import secrets
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from moeserve.cli.bench.datasets import Sample, add_dataset_flags, build_samples
from moeserve.cli.bench.load import Outcome, Target, arrival_times, run_load, send
from moeserve.cli.bench.metrics import DETAILS, METRICS, parse_goodput, summarize, table
from moeserve.cli.bench.tokens import LocalTokens, NumberTokens, ServerTokens, Tokens
from moeserve.cli.connect import model_name
from moeserve.client import AsyncClient
from moeserve.errors import ConfigError

BACKENDS = ("openai", "openai-chat", "vllm")  # vllm is another name of openai
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [--base-url URL] [flags]"
    _server_flags(parser)
    _load_flags(parser)
    add_dataset_flags(parser)
    group = parser.add_argument_group("sampling (default: the server's)")
    for name in SAMPLING:
        kind = int if name == "top_k" else float
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X")
    group.add_argument("--logprobs", type=int, metavar="N", help="ask for this many logprobs per token")
    group.add_argument("--ignore-eos", action="store_true", help="always generate the full length (random: always on)")
    group.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="more fields of each request")
    _result_flags(parser)


def _server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", default="openai", choices=BACKENDS, help="completions or chat [openai]")
    group.add_argument("--base-url", metavar="URL", help="such as http://127.0.0.1:8000 (default: --host and --port)")
    group.add_argument("--host", default="127.0.0.1", metavar="TEXT", help="[127.0.0.1]")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="[8000]")
    group.add_argument("--endpoint", metavar="PATH", help="(default: the backend's)")
    group.add_argument("--model", metavar="NAME", help="model in the requests (default: the server's first)")
    group.add_argument("--served-model-name", metavar="NAME", help="the same, if --model names something else")
    group.add_argument("--api-key", metavar="KEY", help="key for the server")
    group.add_argument("--header", nargs="*", default=[], metavar="K=V", help="more HTTP headers")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0.0, metavar="S", help="wait for the server [0]"
    )
    group.add_argument("--request-id-prefix", metavar="TEXT", help="X-Request-Id of each request begins with this")


def _load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--request-rate", type=float, default=math.inf, metavar="R", help="requests per second [inf]")
    group.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; lower: burstier [1]")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="requests in flight at once")
    group.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests that do not count [0]")


def _result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="M:MS", help="count requests within ttft: tpot: e2el:"
    )
    group.add_argument("--percentile-metrics", default=",".join(METRICS), metavar="M,M", help="[ttft,tpot,itl,e2el]")
    group.add_argument("--metric-percentiles", default="99", metavar="P,P", help="[99]")
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--append-result", action="store_true", help="append a line to it instead")
    group.add_argument("--save-detailed", action="store_true", help="with every request's times, text and error")
    group.add_argument("--result-dir", type=Path, default=Path(), metavar="DIR", help="where [.]")
    group.add_argument("--result-filename", metavar="NAME", help="(default: label-rate-concurrency-model-date.json)")
    group.add_argument("--label", metavar="TEXT", help="first part of the file's name (default: the backend)")
    group.add_argument("--metadata", nargs="*", default=[], metavar="K=V", help="more keys for the JSON file")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    metrics = _check(args)
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        result = runner.run(_bench(args, metrics))
    print(table(result, metrics))
    for error in [e for e in result["errors"] if e][:10]:
        print(f"failed: {error}", file=sys.stderr)
    if not args.save_detailed:
        for name in DETAILS:
            del result[name]
    if args.save_result or args.append_result:
        print(f"saved in {_save(args, result)}", file=sys.stderr)
    return 0 if result["completed"] else 1


def _check(args: argparse.Namespace) -> list[str]:
    metrics: list[str] = args.percentile_metrics.split(",")
    if unknown := set(metrics) - set(METRICS):
        raise ConfigError(f"--percentile-metrics knows {', '.join(METRICS)}; got {', '.join(sorted(unknown))}")
    if not args.request_rate > 0 or not args.burstiness > 0:
        raise ConfigError("--request-rate and --burstiness must be above 0")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}")
    if not isinstance(args.extra_body, dict):
        raise ConfigError("--extra-body must be a JSON object")
    parse_goodput(args.goodput)
    _percentiles(args)
    _pairs(args.header, "--header")
    _pairs(args.metadata, "--metadata")
    return metrics


async def _bench(args: argparse.Namespace, metrics: list[str]) -> dict[str, Any]:
    root = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/").removesuffix("/v1")
    try:
        client = AsyncClient(f"{root}/v1", args.api_key, max_retries=0, timeout_s=6 * 3600)
    except ValueError as error:
        raise ConfigError(f"--base-url: {error}") from None
    async with client:
        if args.ready_check_timeout_sec > 0:
            await client.wait_ready(args.ready_check_timeout_sec)
        model = await model_name(client, args.served_model_name or args.model)
        target = _target(args, root, model)
        samples = await build_samples(args, _tokens(args, client, model), text_only=target.chat)
        outcomes, duration_s = await _measure(args, client, target, samples)
    head = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": None if args.tokenizer is None else str(args.tokenizer),
        "num_prompts": len(samples),
        **_pairs(args.metadata, "--metadata"),
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    goodput_ms = parse_goodput(args.goodput)
    return head | summarize(
        outcomes, duration_s, metrics=metrics, percentiles=_percentiles(args), goodput_ms=goodput_ms
    )


async def _measure(
    args: argparse.Namespace, client: AsyncClient, target: Target, samples: list[Sample]
) -> tuple[list[Outcome], float]:
    from tqdm import tqdm

    if args.num_warmups > 0:
        warm = [await send(client, target, samples[0], -1 - i) for i in range(args.num_warmups)]
        if not any(o.success for o in warm):
            raise ConfigError(f"every warm-up request failed: {warm[0].error}")
    times_s = arrival_times(len(samples), args.request_rate, args.burstiness, random.Random(args.seed))
    with tqdm(total=len(samples), disable=args.disable_tqdm, unit="req", dynamic_ncols=True) as bar:
        return await run_load(
            client, target, samples, times_s, max_concurrency=args.max_concurrency, on_done=bar.update
        )


def _target(args: argparse.Namespace, root: str, model: str) -> Target:
    chat = args.backend == "openai-chat"
    fields = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if args.ignore_eos or args.dataset_name == "random":
        fields["ignore_eos"] = True
    if args.logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": args.logprobs} if chat else {"logprobs": args.logprobs}
    return Target(
        url=root + (args.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")),
        chat=chat,
        model=model,
        fields={**fields, **args.extra_body},
        headers=_pairs(args.header, "--header"),
        request_id_prefix=args.request_id_prefix or f"bench-{secrets.token_hex(4)}-",
    )


def _tokens(args: argparse.Namespace, client: AsyncClient, model: str) -> Tokens:
    if args.tokenizer is not None:
        return LocalTokens(args.tokenizer)
    if args.random_vocab_size is not None:
        return NumberTokens(args.random_vocab_size)
    return ServerTokens(client, model)


def _save(args: argparse.Namespace, result: dict[str, Any]) -> Path:
    limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency is not None else ""
    model = str(result["model_id"]).rsplit("/", 1)[-1]
    name = f"{args.label or args.backend}-{args.request_rate}qps{limit}-{model}-{result['date']}.json"
    path: Path = args.result_dir / (args.result_filename or name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
        if args.append_result and file.tell():
            file.write("\n")
        json.dump(result, file)
    return path


def _percentiles(args: argparse.Namespace) -> list[float]:
    try:
        found = [float(p) for p in args.metric_percentiles.split(",")]
        if all(0 <= p <= 100 for p in found):
            return found
    except ValueError:
        pass
    raise ConfigError(f"--metric-percentiles takes numbers from 0 to 100, got {args.metric_percentiles!r}")


def _pairs(words: list[str], flag: str) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{flag} takes KEY=VALUE, got {word!r}")
        found[name.strip()] = value.strip()
    return found
