"""What /metrics says of each engine (label `engine`, its data-parallel rank) and of the experts."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moeserve.cluster.view import ExpertsView, FleetView
from moeserve.frontend.stats import FrontStats

PREFIX = "moeserve:"
MOST_SERIES = 4096  # layers x experts; beyond it, rows per expert are in /v1/experts only


def engine_metrics(view: FleetView, stats: FrontStats, name: str) -> Iterator[Metric]:
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


def expert_metrics(experts: ExpertsView, name: str) -> Iterator[Metric]:
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
    if len(counts) > MOST_SERIES:
        return
    rows = CounterMetricFamily(
        PREFIX + "expert_rows", "rows sent to each expert", labels=["model_name", "layer", "expert"]
    )
    num_experts = experts.placement.num_experts
    for index, count in enumerate(counts):
        rows.add_metric([name, str(index // num_experts), str(index % num_experts)], count)
    yield rows
