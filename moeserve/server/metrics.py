"""GET /metrics for Prometheus.

Metrics with the meaning of a vLLM metric have its name. The label `engine` is an engine's
data-parallel rank.

With `--metrics-names vllm`, the metrics that vLLM has too begin with vllm: and have its label
`engine`, for dashboards and routers made for vLLM. Sums over several engines have engine="all".
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from moeserve.cluster.view import EngineView, ExpertsView, FleetView
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.stats import FrontStats, Histogram
from moeserve.server.context import Context

PREFIX = "moeserve:"
VLLM_PREFIX = "vllm:"
VLLM_NAMES = (  # the beginnings of vLLM's names
    "num_requests_running",
    "num_requests_waiting",
    "num_preemptions",
    "kv_cache_usage_",
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_",
    "time_to_first_token_",
    "inter_token_latency_",
    "e2e_request_latency_",
    "request_",
    "iteration_tokens_",
    "spec_decode_",
)
MAX_SERIES = 4096  # layers x experts; above it, loads per expert are only in /v1/experts

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
Gauge = GaugeMetricFamily
Counter = CounterMetricFamily


@dataclass(frozen=True)
class _Scrape:
    """The numbers of one scrape, from which the tables below read."""

    front: FrontEnd
    stats: FrontStats
    view: FleetView

    def last_step_value(self, field: str) -> int:
        """Return a field of the newest step's record; 0 if there is no step."""
        return getattr(self.stats.last, field) if self.stats.last is not None else 0

    @property
    def num_states(self) -> int:
        return self.last_step_value("num_states") - 1  # without the null block

    @property
    def cache_usage(self) -> float:
        """The share of KV blocks in use."""
        if self.stats.last is None:
            return 0.0
        usable = max(self.last_step_value("num_blocks") - 1, 1)  # without the null block
        used = usable - self.last_step_value("num_free_blocks")
        return min(max(used / usable, 0.0), 1.0)


Value = Callable[[_Scrape], float]


class _Single(NamedTuple):
    """A metric with one number."""

    kind: Family
    name: str
    help: str
    value: Value


def _from_stats(path: str) -> Value:
    get = attrgetter(path)
    return lambda scrape: get(scrape.stats)


def _from_last_step(field: str) -> Value:
    return lambda scrape: scrape.last_step_value(field)


def _from_scrape(path: str) -> Value:
    return attrgetter(path)


BASE_METRICS = (
    _Single(
        Gauge,
        "num_requests_running",
        "sequences in the engine's batch",
        _from_last_step("num_running"),
    ),
    _Single(
        Gauge,
        "num_requests_waiting",
        "sequences waiting in the engine",
        _from_last_step("num_waiting"),
    ),
    _Single(
        Gauge,
        "num_requests_active",
        "sequences that clients are waiting for",
        _from_stats("num_active"),
    ),
    _Single(
        Gauge,
        "overlap_efficiency",
        "1 - exposed / total communication time; 1: all is overlapped",
        _from_stats("total.overlap_efficiency"),
    ),
    _Single(
        Gauge,
        "kv_cache_usage_perc",
        "fraction of KV blocks in use",
        _from_scrape("cache_usage"),
    ),
    _Single(
        Counter,
        "prompt_tokens",
        "prompt tokens of started sequences, including cached tokens",
        _from_stats("prompt_tokens"),
    ),
    _Single(
        Counter,
        "generation_tokens",
        "generated tokens",
        _from_stats("generation_tokens"),
    ),
    _Single(
        Counter,
        "prefix_cache_queries",
        "prompt tokens looked up in the prefix cache",
        _from_stats("prompt_tokens"),
    ),
    _Single(
        Counter,
        "prefix_cache_hits",
        "prompt tokens found in the prefix cache",
        _from_stats("cached_prompt_tokens"),
    ),
    _Single(
        Counter,
        "num_preemptions",
        "preemptions of sequences for lack of KV blocks",
        _from_stats("preemptions"),
    ),
    _Single(
        Counter,
        "comm_seconds",
        "time of transfers between ranks, summed over transfers",
        _from_stats("total.comm_s"),
    ),
    _Single(
        Counter,
        "exposed_comm_seconds",
        "the part of comm_seconds in which the model waited",
        _from_stats("total.exposed_comm_s"),
    ),
    _Single(
        Counter,
        "requests_rejected",
        "requests refused because the queue was full",
        _from_stats("rejected"),
    ),
)
EXPERT_METRICS = (
    _Single(
        Gauge,
        "expert_balance",
        "mean over maximum load of ranks, recently; 1 is even",
        _from_scrape("view.experts.balance"),
    ),
    _Single(
        Gauge,
        "expert_placement_version",
        "version of the active placement",
        _from_scrape("view.experts.placement.version"),
    ),
    _Single(
        Counter,
        "expert_moved_bytes",
        "bytes of expert weights that ranks loaded to move experts",
        _from_scrape("view.experts.moved_bytes"),
    ),
)
STATE_METRICS = (
    _Single(
        Gauge,
        "num_states",
        "blocks of recurrent layers' states",
        _from_scrape("num_states"),
    ),
    _Single(
        Gauge,
        "num_states_running",
        "state blocks of running requests",
        lambda scrape: scrape.num_states - scrape.last_step_value("num_free_states"),
    ),
    _Single(
        Gauge,
        "num_states_cached",
        "state blocks that the prefix cache can find",
        _from_last_step("num_cached_states"),
    ),
)
DRAFT_METRICS = (
    _Single(
        Counter,
        "spec_decode_num_drafts",
        "sequences whose drafts were verified, in all steps",
        lambda scrape: scrape.stats.drafts[0],
    ),
    _Single(
        Counter,
        "spec_decode_num_draft_tokens",
        "draft tokens that were verified",
        lambda scrape: sum(scrape.stats.drafts),
    ),
    _Single(
        Counter,
        "spec_decode_num_accepted_tokens",
        "draft tokens that were accepted",
        lambda scrape: sum(scrape.stats.accepted_drafts),
    ),
)
# For each number in `FrontStats.expert_cache`: name, help, and the factor to the metric's unit.
EXPERT_CACHE_METRICS = (
    ("expert_cache_hits", "experts that were in memory or being read when needed", 1),
    ("expert_cache_misses", "experts that had to be read from disk when needed", 1),
    ("expert_cache_stall_seconds", "time in which steps waited for experts", 1e-6),
    ("expert_cache_read_bytes", "bytes of experts read, including unused prefetches", 1),
)
# name, help, and the field of `FrontStats`.
HISTOGRAMS = (
    ("time_to_first_token_seconds", "from submission to the first token", "ttft_s"),
    ("inter_token_latency_seconds", "between two tokens of a sequence", "itl_s"),
    ("e2e_request_latency_seconds", "from submission to the end", "e2e_s"),
    ("request_queue_time_seconds", "from submission to a sequence's first step", "queue_s"),
    ("request_prefill_time_seconds", "from the first step to the first token", "prefill_s"),
    ("request_decode_time_seconds", "from the first token to the last", "decode_s"),
    ("request_prompt_tokens", "prompt tokens of a sequence", "request_prompt_tokens"),
    ("request_generation_tokens", "tokens of a sequence", "request_generation_tokens"),
    (
        "request_max_num_generation_tokens",
        "tokens of a request's longest answer",
        "request_longest",
    ),
    ("iteration_tokens_total", "tokens of an engine step", "step_tokens"),
)
# Counters of all engines, including removed ones: name, help, and the field of `EngineStats`.
ENGINE_COUNTERS = (
    ("engine_restarts", "times that the engine was lost and replaced", "restarts"),
    ("engine_steps", "steps in which the engine had requests", "steps"),
    ("engine_step_seconds", "time of these steps in the model", "step_s"),
    ("engine_vote_seconds", "time of the votes on these steps", "vote_s"),
    ("engine_comm_seconds", "time of transfers between ranks, summed over transfers", "comm_s"),
    (
        "engine_exposed_comm_seconds",
        "the part of engine_comm_seconds in which the model waited",
        "exposed_comm_s",
    ),
)
# Gauges of the present engines: name, help, and the value, by an engine and its newest step.
ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineView, Any], float]], ...] = (
    (
        "engine_up",
        "1 while the engine serves",
        lambda engine, last: engine.state == "serving",
    ),
    (
        "engine_epoch",
        "epoch of the engine's group; 0: in no group",
        lambda engine, last: engine.epoch,
    ),
    (
        "engine_requests_running",
        "sequences in the engine's batch",
        lambda engine, last: last.num_running if last else 0,
    ),
    (
        "engine_requests_waiting",
        "sequences waiting in the engine",
        lambda engine, last: last.num_waiting if last else 0,
    ),
)


def exposition(context: Context) -> tuple[bytes, str]:
    """Return all metrics in Prometheus's text format, and its media type."""
    return generate_latest(_Collector(context)), CONTENT_TYPE_LATEST


class _Collector(Collector):
    """Collects the metrics of a scrape from existing statistics, so they cost nothing otherwise."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        context = self._context
        is_ready = context.state == "ready"
        yield _family(
            Gauge, "engine_ready", "1 while requests are served", labels=[], rows=[([], is_ready)]
        )
        yield _family(
            Counter,
            "http_responses",
            "responses by route and status",
            labels=["route", "status"],
            rows=list(context.responses.items()),
        )
        if context.front is None:
            return
        metrics = _front_metrics(context.front)
        if context.config.metrics_names == "vllm":
            engine = "0" if context.front.fleet is None else "all"
            metrics = map(partial(_with_vllm_name, engine=engine), metrics)
        yield from metrics


def _with_vllm_name(metric: Metric, engine: str) -> Metric:
    """Return a metric under vLLM's name and with its labels, if vLLM has it."""
    if metric.name.removeprefix(PREFIX).startswith(VLLM_NAMES):
        metric.name = metric.name.replace(PREFIX, VLLM_PREFIX, 1)
        metric.samples = [
            sample._replace(
                name=sample.name.replace(PREFIX, VLLM_PREFIX, 1),
                labels=sample.labels | {"engine": engine},
            )
            for sample in metric.samples
        ]
    return metric


def _family(
    kind: Family,
    suffix: str,
    help: str,
    *,
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[object], float]],
) -> Metric:
    """Return a metric. Each row has the values of the labels, and the number."""
    family = kind(PREFIX + suffix, help, labels=labels)
    for values, number in rows:
        family.add_metric([str(value) for value in values], float(number))
    return family


def _front_metrics(front: FrontEnd) -> Iterator[Metric]:
    stats = front.stats
    name = front.model_name
    scrape = _Scrape(front, stats, front.monitor.view(front.state, front.ready))
    singles: tuple[_Single, ...] = BASE_METRICS
    if scrape.view.experts is not None:
        singles += EXPERT_METRICS
    if scrape.last_step_value("num_states"):
        singles += STATE_METRICS
    if stats.drafts:
        singles += DRAFT_METRICS
    for single in singles:
        rows = [([name], single.value(scrape))]
        yield _family(single.kind, single.name, single.help, labels=["model_name"], rows=rows)
    if stats.expert_cache:
        for (suffix, help, unit), number in zip(
            EXPERT_CACHE_METRICS, stats.expert_cache, strict=True
        ):
            rows = [([name], unit * number)]
            yield _family(Counter, suffix, help, labels=["model_name"], rows=rows)
    if stats.drafts:
        yield _accepted_by_position(stats, name)
    yield _ended_by_reason(stats, name)
    yield from _engine_metrics(scrape.view, stats, name)
    if scrape.view.experts is not None:
        yield from _expert_metrics(scrape.view.experts, name)
    for suffix, help, field in HISTOGRAMS:
        yield _histogram(suffix, help, getattr(stats, field), name)


def _accepted_by_position(stats: FrontStats, name: str) -> Metric:
    return _family(
        Counter,
        "spec_decode_num_accepted_tokens_per_pos",
        "draft tokens that were accepted, by position after the last known token",
        labels=["model_name", "position"],
        rows=[((name, position), count) for position, count in enumerate(stats.accepted_drafts)],
    )


def _ended_by_reason(stats: FrontStats, name: str) -> Metric:
    reasons = sorted({"stop", "length", "abort", "error"} | stats.finished.keys())
    return _family(
        Counter,
        "request_success",
        "sequences ended, by reason",
        labels=["model_name", "finished_reason"],
        rows=[((name, reason), stats.finished.get(reason, 0)) for reason in reasons],
    )


def _engine_metrics(view: FleetView, stats: FrontStats, name: str) -> Iterator[Metric]:
    labels = ["model_name", "engine"]
    for suffix, help, value in ENGINE_GAUGES:
        gauges = [
            ((name, engine.rank), value(engine, stats.engines[engine.rank].last))
            for engine in view.engines
        ]
        yield _family(Gauge, suffix, help, labels=labels, rows=gauges)
    for suffix, help, field in ENGINE_COUNTERS:
        counts = [
            ((name, rank), getattr(stats.engines[rank], field)) for rank in sorted(stats.engines)
        ]
        yield _family(Counter, suffix, help, labels=labels, rows=counts)


def _expert_metrics(experts: ExpertsView, name: str) -> Iterator[Metric]:
    yield _family(
        Counter,
        "rebalance_decisions",
        "attempts to move experts, by outcome",
        labels=["model_name", "outcome"],
        rows=[((name, "placed"), experts.num_placed), ((name, "given_up"), experts.num_given_up)],
    )
    counts = memoryview(experts.counts).cast("q")
    if len(counts) <= MAX_SERIES:
        num_experts = experts.placement.num_experts
        yield _family(
            Counter,
            "expert_rows",
            "tokens sent to each expert",
            labels=["model_name", "layer", "expert"],
            rows=[
                ((name, *divmod(index, num_experts)), count) for index, count in enumerate(counts)
            ],
        )


def _histogram(suffix: str, help: str, histogram: Histogram, name: str) -> Metric:
    bounds = [*[repr(float(bound)) for bound in histogram.bounds], "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    family = HistogramMetricFamily(PREFIX + suffix, help, labels=["model_name"])
    family.add_metric([name], buckets, histogram.total)
    return family
