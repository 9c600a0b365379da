"""GET /metrics for Prometheus: the front end's counters under vLLM's names where the meaning is the same."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from moeserve.cluster.view import ExpertsView, FleetView
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.stats import FrontStats, Histogram
from moeserve.server.context import Context, HttpCall

PREFIX = "moeserve:"
MAX_SERIES = 4096  # layers x experts; beyond it, rows per expert are in /v1/experts only


async def metrics(call: HttpCall) -> web.StreamResponse:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(call.context))
    headers = call.headers() | {"Content-Type": CONTENT_TYPE_LATEST}
    return web.Response(body=generate_latest(registry), headers=headers)


class _Collector:
    """Made for one scrape: reads the numbers where they already are, so that counting costs nothing extra."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        yield _up("engine_ready", "1 while requests are taken", float(self._context.state == "ready"))
        yield from self._responses()
        if self._context.front is not None:
            yield from _front_metrics(self._context.front)

    def _responses(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            PREFIX + "http_responses", "answers by route and status", labels=["route", "status"]
        )
        for (route, status), count in self._context.responses.items():
            family.add_metric([route, str(status)], count)
        yield family


def _front_metrics(front: FrontEnd) -> Iterator[Metric]:
    stats, name = front.stats, front.model_name
    view, total = front.watch.view(front.state, front.ready), stats.total
    yield from _gauges(stats, name)
    yield from _engine_metrics(view, stats, name)
    if view.experts is not None:
        yield from _expert_metrics(view.experts, name)
    for suffix, help, value in (
        ("prompt_tokens", "prompt tokens taken up, cached ones included", stats.prompt_tokens),
        ("generation_tokens", "tokens given out", stats.generation_tokens),
        ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", stats.prompt_tokens),
        ("prefix_cache_hits", "prompt tokens found in the prefix cache", stats.cached_prompt_tokens),
        ("num_preemptions", "sequences sent back to wait for blocks", stats.preemptions),
        ("comm_seconds", "rows on their way between ranks, summed over transfers", total.comm_s),
        ("exposed_comm_seconds", "the part of it for which the model stood still", total.exposed_comm_s),
        ("requests_rejected", "requests refused because the queue was full", stats.rejected),
    ):
        family = CounterMetricFamily(PREFIX + suffix, help, labels=["model_name"])
        family.add_metric([name], value)
        yield family
    ended = CounterMetricFamily(
        PREFIX + "request_success", "sequences ended, by reason", labels=["model_name", "finished_reason"]
    )
    for reason in sorted({"stop", "length", "abort", "error"} | stats.finished.keys()):
        ended.add_metric([name, reason], stats.finished.get(reason, 0))
    yield ended
    for suffix, help, histogram in (
        ("time_to_first_token_seconds", "from submission to the first token", stats.ttft_s),
        ("inter_token_latency_seconds", "between two tokens of a sequence", stats.itl_s),
        ("e2e_request_latency_seconds", "from submission to the end", stats.e2e_s),
        ("request_prompt_tokens", "prompt tokens of a sequence", stats.request_prompt_tokens),
        ("request_generation_tokens", "tokens given out for a sequence", stats.request_generation_tokens),
        ("iteration_tokens_total", "tokens of an engine step", stats.step_tokens),
    ):
        yield _histogram(suffix, help, histogram, name)


def _gauges(stats: FrontStats, name: str) -> Iterator[Metric]:
    last = stats.last
    usable = max(last.num_blocks - 1, 1) if last else 1  # one block is the null block
    used = usable - last.num_free_blocks if last else 0
    for suffix, help, value in (
        ("num_requests_running", "sequences in the engine's batch", last.num_running if last else 0),
        ("num_requests_waiting", "sequences waiting in the engine", last.num_waiting if last else 0),
        ("num_requests_active", "sequences that a client is waiting for", stats.num_active),
        (
            "overlap_efficiency",
            "1 - exposed / all communication; 1 is all of it hidden",
            stats.total.overlap_efficiency,
        ),
        ("kv_cache_usage_perc", "share of KV blocks in use; 1 is all", min(max(used / usable, 0.0), 1.0)),
    ):
        family = GaugeMetricFamily(PREFIX + suffix, help, labels=["model_name"])
        family.add_metric([name], value)
        yield family


def _engine_metrics(view: FleetView, stats: FrontStats, name: str) -> Iterator[Metric]:
    """Gauges of the engines that there are; counters also of those that there were."""
    shown = [(engine, stats.engines[engine.rank].last) for engine in view.engines]
    for suffix, help, values in (
        ("engine_up", "1 while the engine serves", [float(engine.state == "serving") for engine, _ in shown]),
        ("engine_epoch", "the meeting in which it serves; 0: in none", [engine.epoch for engine, _ in shown]),
        ("engine_requests_running", "sequences in its batch", [last.num_running if last else 0 for _, last in shown]),
        ("engine_requests_waiting", "sequences that it holds", [last.num_waiting if last else 0 for _, last in shown]),
    ):
        gauge = GaugeMetricFamily(PREFIX + suffix, help, labels=["model_name", "engine"])
        for (engine, _), value in zip(shown, values, strict=True):
            gauge.add_metric([name, str(engine.rank)], value)
        yield gauge
    for suffix, help, field in (
        ("engine_restarts", "times that it was lost and replaced", "restarts"),
        ("engine_steps", "steps with requests of its own", "steps"),
        ("engine_step_seconds", "their time in the model", "step_s"),
        ("engine_vote_seconds", "until all engines had agreed on them", "vote_s"),
        ("engine_comm_seconds", "rows on their way between ranks, summed over transfers", "comm_s"),
        ("engine_exposed_comm_seconds", "the part of it for which its model stood still", "exposed_comm_s"),
    ):
        counter = CounterMetricFamily(PREFIX + suffix, help, labels=["model_name", "engine"])
        for rank in sorted(stats.engines):
            counter.add_metric([name, str(rank)], getattr(stats.engines[rank], field))
        yield counter


def _expert_metrics(experts: ExpertsView, name: str) -> Iterator[Metric]:
    balance = GaugeMetricFamily(
        PREFIX + "expert_balance", "mean over fullest rank, for the load of late; 1 is even", labels=["model_name"]
    )
    balance.add_metric([name], experts.balance)
    yield balance
    version = GaugeMetricFamily(PREFIX + "expert_placement_version", "placement in force", labels=["model_name"])
    version.add_metric([name], experts.placement.version)
    yield version
    moved = CounterMetricFamily(
        PREFIX + "expert_moved_bytes", "expert weights that ranks fetched", labels=["model_name"]
    )
    moved.add_metric([name], experts.moved_bytes)
    yield moved
    decisions = CounterMetricFamily(
        PREFIX + "rebalance_decisions", "attempts to move experts, by outcome", labels=["model_name", "outcome"]
    )
    decisions.add_metric([name, "placed"], experts.num_placed)
    decisions.add_metric([name, "given_up"], experts.num_given_up)
    yield decisions
    counts = memoryview(experts.counts).cast("q")
    if len(counts) > MAX_SERIES:
        return
    rows = CounterMetricFamily(
        PREFIX + "expert_rows", "rows sent to each expert", labels=["model_name", "layer", "expert"]
    )
    num_experts = experts.placement.num_experts
    for index, count in enumerate(counts):
        rows.add_metric([name, str(index // num_experts), str(index % num_experts)], count)
    yield rows


def _up(suffix: str, help: str, value: float) -> Metric:
    family = GaugeMetricFamily(PREFIX + suffix, help)
    family.add_metric([], value)
    return family


def _histogram(suffix: str, help: str, histogram: Histogram, name: str) -> Metric:
    buckets, seen = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        seen += count
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), seen))
    family = HistogramMetricFamily(PREFIX + suffix, help, labels=["model_name"])
    family.add_metric([name], buckets, histogram.total)
    return family
