"""GET /metrics for Prometheus: the front end's counters, named like vLLM's where the meaning is the
same.

Labels: `engine` is an engine's data-parallel rank. With `--metrics-names vllm` what vLLM has too
begins with vllm: and carries its label `engine`, so that dashboards and routers made for vLLM read
it; sums over several engines say "all".
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from moeserve.cluster.view import ExpertsView, FleetView
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.stats import FrontStats, Histogram
from moeserve.server.context import Context

PREFIX = "moeserve:"
VLLM_PREFIX = "vllm:"
VLLM_NAMES = (  # their beginnings
    "num_requests_running", "num_requests_waiting", "num_preemptions", "kv_cache_usage_", "prompt_tokens",
    "generation_tokens", "prefix_cache_", "time_to_first_token_", "inter_token_latency_", "e2e_request_latency_",
    "request_", "iteration_tokens_", "spec_decode_",
)  # fmt: skip
EXPERT_CACHE = (  # of `FrontStats.expert_cache`, and the factor to the metric's unit
    ("expert_cache_hits", "experts that steps found in memory, or on their way (expert_memory)", 1),
    ("expert_cache_misses", "experts that steps had to have read from disk", 1),
    ("expert_cache_stall_seconds", "time for which steps waited for experts", 1e-6),
    ("expert_cache_read_bytes", "bytes of experts read, wrong guesses included", 1),
)
MAX_SERIES = 4096  # layers x experts; beyond it, rows per expert are in /v1/experts only

Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
Gauge = GaugeMetricFamily
Counter = CounterMetricFamily


def exposition(context: Context) -> tuple[bytes, str]:
    """Returns all metrics in Prometheus's text format, and its media type."""
    return generate_latest(_Collector(context)), CONTENT_TYPE_LATEST


class _Collector(Collector):
    """Reads the numbers of one scrape where they already are, so that counting costs nothing extra."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics of this scrape; see prometheus_client."""
        context = self._context
        yield _family(
            Gauge,
            "engine_ready",
            "1 while requests are taken",
            [],
            [([], context.state == "ready")],
        )
        answers = list(context.responses.items())
        yield _family(
            Counter, "http_responses", "answers by route and status", ["route", "status"], answers
        )
        if context.front is not None:
            metrics = _front_metrics(context.front)
            several = context.front.fleet is not None
            vllm = context.config.metrics_names == "vllm"
            yield from (
                (_as_vllms(metric, "all" if several else "0") for metric in metrics)
                if vllm
                else metrics
            )


def _as_vllms(metric: Metric, engine: str) -> Metric:
    """Returns a metric under vLLM's name and with its labels, if vLLM has it."""
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
    labels: Sequence[str],
    rows: Iterable[tuple[Sequence[object], float]],
) -> Metric:
    """Returns a metric; each row has the values of its labels and its number."""
    family = kind(PREFIX + suffix, help, labels=labels)
    for values, number in rows:
        family.add_metric([str(value) for value in values], float(number))
    return family


def _front_metrics(front: FrontEnd) -> Iterator[Metric]:
    stats = front.stats
    name = front.model_name
    view = front.watch.view(front.state, front.ready)
    last = stats.last
    total = stats.total
    usable = max(last.num_blocks - 1, 1) if last else 1  # one block is the null block
    used = usable - last.num_free_blocks if last else 0
    singles: list[tuple[Family, str, str, float]] = [
        (
            Gauge,
            "num_requests_running",
            "sequences in the engine's batch",
            last.num_running if last else 0,
        ),
        (
            Gauge,
            "num_requests_waiting",
            "sequences waiting in the engine",
            last.num_waiting if last else 0,
        ),
        (Gauge, "num_requests_active", "sequences that a client is waiting for", stats.num_active),
        (
            Gauge,
            "overlap_efficiency",
            "1 - exposed / all communication; 1: all is hidden",
            total.overlap_efficiency,
        ),
        (
            Gauge,
            "kv_cache_usage_perc",
            "share of KV blocks in use; 1 is all",
            min(max(used / usable, 0.0), 1.0),
        ),
        (
            Counter,
            "prompt_tokens",
            "prompt tokens taken up, cached ones included",
            stats.prompt_tokens,
        ),
        (Counter, "generation_tokens", "tokens given out", stats.generation_tokens),
        (
            Counter,
            "prefix_cache_queries",
            "prompt tokens looked up in the prefix cache",
            stats.prompt_tokens,
        ),
        (
            Counter,
            "prefix_cache_hits",
            "prompt tokens found in the prefix cache",
            stats.cached_prompt_tokens,
        ),
        (Counter, "num_preemptions", "sequences sent back to wait for blocks", stats.preemptions),
        (
            Counter,
            "comm_seconds",
            "time of rows between ranks, summed over transfers",
            total.comm_s,
        ),
        (
            Counter,
            "exposed_comm_seconds",
            "the part for which the model stood still",
            total.exposed_comm_s,
        ),
        (
            Counter,
            "requests_rejected",
            "requests refused because the queue was full",
            stats.rejected,
        ),
    ]
    if (shown := view.experts) is not None:
        singles += [
            (
                Gauge,
                "expert_balance",
                "mean over fullest rank, for the recent load; 1 is even",
                shown.balance,
            ),
            (Gauge, "expert_placement_version", "placement in force", shown.placement.version),
            (Counter, "expert_moved_bytes", "expert weights that ranks fetched", shown.moved_bytes),
        ]
    cache = EXPERT_CACHE if stats.expert_cache else ()
    singles += [
        (Counter, suffix, help, unit * number)
        for (suffix, help, unit), number in zip(cache, stats.expert_cache, strict=True)
    ]
    if last is not None and last.num_states:
        states = last.num_states - 1
        singles += [
            (Gauge, "num_states", "blocks of recurrent layers' states", states),
            (
                Gauge,
                "num_states_running",
                "those that requests in the batch hold",
                states - last.num_free_states,
            ),
            (
                Gauge,
                "num_states_cached",
                "those that the prefix cache can find",
                last.num_cached_states,
            ),
        ]
    if stats.drafts:
        singles += [
            (Counter, "spec_decode_num_drafts", "rows whose drafts were verified", stats.drafts[0]),
            (
                Counter,
                "spec_decode_num_draft_tokens",
                "drafts that were verified",
                sum(stats.drafts),
            ),
            (
                Counter,
                "spec_decode_num_accepted_tokens",
                "those that were right",
                sum(stats.accepted_drafts),
            ),
        ]
        places = [((name, place), count) for place, count in enumerate(stats.accepted_drafts)]
        labels = ["model_name", "position"]
        help = "drafts that were right, by place behind the last known token"
        yield _family(Counter, "spec_decode_num_accepted_tokens_per_pos", help, labels, places)
    for kind, suffix, help, value in singles:
        yield _family(kind, suffix, help, ["model_name"], [([name], value)])
    reasons = sorted({"stop", "length", "abort", "error"} | stats.finished.keys())
    ended = [((name, reason), stats.finished.get(reason, 0)) for reason in reasons]
    yield _family(
        Counter,
        "request_success",
        "sequences ended, by reason",
        ["model_name", "finished_reason"],
        ended,
    )
    yield from _engine_metrics(view, stats, name)
    if shown is not None:
        yield from _expert_metrics(shown, name)
    for suffix, help, histogram in (
        ("time_to_first_token_seconds", "from submission to the first token", stats.ttft_s),
        ("inter_token_latency_seconds", "between two tokens of a sequence", stats.itl_s),
        ("e2e_request_latency_seconds", "from submission to the end", stats.e2e_s),
        ("request_queue_time_seconds", "from submission to a sequence's first step", stats.queue_s),
        (
            "request_prefill_time_seconds",
            "from a sequence's first step to its first token",
            stats.prefill_s,
        ),
        (
            "request_decode_time_seconds",
            "from a sequence's first token to its last",
            stats.decode_s,
        ),
        ("request_prompt_tokens", "prompt tokens of a sequence", stats.request_prompt_tokens),
        (
            "request_generation_tokens",
            "tokens given out for a sequence",
            stats.request_generation_tokens,
        ),
        (
            "request_max_num_generation_tokens",
            "tokens of a request's longest answer",
            stats.request_longest,
        ),
        ("iteration_tokens_total", "tokens of an engine step", stats.step_tokens),
    ):
        yield _histogram(suffix, help, histogram, name)


def _engine_metrics(view: FleetView, stats: FrontStats, name: str) -> Iterator[Metric]:
    """Returns gauges of the engines that exist; counters also of those that have gone."""
    labels = ["model_name", "engine"]
    shown = [(engine, stats.engines[engine.rank].last) for engine in view.engines]
    for suffix, help, values in (
        (
            "engine_up",
            "1 while the engine serves",
            [engine.state == "serving" for engine, _ in shown],
        ),
        (
            "engine_epoch",
            "the epoch in which the engine serves; 0: in none",
            [engine.epoch for engine, _ in shown],
        ),
        (
            "engine_requests_running",
            "sequences in its batch",
            [last.num_running if last else 0 for _, last in shown],
        ),
        (
            "engine_requests_waiting",
            "sequences that it holds",
            [last.num_waiting if last else 0 for _, last in shown],
        ),
    ):
        rows = [
            ((name, engine.rank), value) for (engine, _), value in zip(shown, values, strict=True)
        ]
        yield _family(Gauge, suffix, help, labels, rows)
    for suffix, help, field in (
        ("engine_restarts", "times that the engine was lost and replaced", "restarts"),
        ("engine_steps", "steps with requests of its own", "steps"),
        ("engine_step_seconds", "time of these steps in the model", "step_s"),
        ("engine_vote_seconds", "time until all engines had agreed on these steps", "vote_s"),
        ("engine_comm_seconds", "time of rows between ranks, summed over transfers", "comm_s"),
        (
            "engine_exposed_comm_seconds",
            "the part for which the model stood still",
            "exposed_comm_s",
        ),
    ):
        counts = [
            ((name, rank), getattr(stats.engines[rank], field)) for rank in sorted(stats.engines)
        ]
        yield _family(Counter, suffix, help, labels, counts)


def _expert_metrics(experts: ExpertsView, name: str) -> Iterator[Metric]:
    outcomes = [((name, "placed"), experts.num_placed), ((name, "given_up"), experts.num_given_up)]
    labels = ["model_name", "outcome"]
    yield _family(
        Counter, "rebalance_decisions", "attempts to move experts, by outcome", labels, outcomes
    )
    counts = memoryview(experts.counts).cast("q")
    if len(counts) <= MAX_SERIES:
        num_experts = experts.placement.num_experts
        rows = [((name, *divmod(index, num_experts)), count) for index, count in enumerate(counts)]
        yield _family(
            Counter,
            "expert_rows",
            "rows sent to each expert",
            ["model_name", "layer", "expert"],
            rows,
        )


def _histogram(suffix: str, help: str, histogram: Histogram, name: str) -> Metric:
    bounds = [*[repr(float(bound)) for bound in histogram.bounds], "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    family = HistogramMetricFamily(PREFIX + suffix, help, labels=["model_name"])
    family.add_metric([name], buckets, histogram.total)
    return family
