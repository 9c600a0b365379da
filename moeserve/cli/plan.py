"""`moeserve plan`: predicts which layout of a model serves a load best on given devices."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from moeserve.cli.settings import add_flags, resolve
from moeserve.cli.simulate import (
    add_link_flag,
    add_load_flags,
    add_tables_flag,
    add_zipf_flag,
    forms_one_group,
    read_load,
    read_rate,
    read_spec,
    simulate,
)
from moeserve.errors import ConfigError, DoesNotFit

if TYPE_CHECKING:
    from moeserve.config import Config
    from moeserve.models.spec import ModelSpec
    from moeserve.plan.candidates import Candidate, Workload
    from moeserve.plan.hardware import Cluster
    from moeserve.plan.trace import RequestTrace

NUM_SIMULATED = 3  # layouts that are simulated after the closed-form estimate
# Unit of a duration -> seconds
_SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class _Rated(NamedTuple):
    """A layout, and the requests per second that it can serve by the closed-form estimate."""

    capacity: float
    candidate: Candidate


class _Simulated(NamedTuple):
    """A layout that was simulated at the load."""

    goal_ratio: float  # the largest ratio of a latency to its goal; below 1: all goals are met
    candidate: Candidate
    result: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add devices, load and goals, and the flags of `moeserve serve` without help."""
    parser.usage = "%(prog)s MODEL --gpus 2x8xH100 --rates 20/s [flags of `moeserve serve`]"
    parser.add_argument(
        "--gpus",
        required=True,
        metavar="2x8xH100",
        help="machines x devices per machine x device (docs/planning.md lists devices)",
    )
    add_link_flag(parser)
    parser.add_argument(
        "--slo", default="", metavar="ttft=1s,itl=50ms", help="latency goals at p99"
    )
    add_zipf_flag(parser)
    add_tables_flag(parser)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print every refusal in full, and the sizes behind the result",
    )
    add_load_flags(parser, num_requests=2000)
    add_flags(parser, shown=False)


def run(args: argparse.Namespace) -> int:
    """Print the layouts, the best one, and its bottleneck. Raises DoesNotFit if none fits."""
    from moeserve.plan.candidates import Workload, candidates
    from moeserve.plan.hardware import read_gpus
    from moeserve.plan.tables import read_tables

    if not args.rates:
        raise ConfigError("give the requests per second, such as --rates 20/s")
    goals = read_slo(args.slo)
    load = Workload(rate=read_rate(args.rates), input=args.input, output=args.output, **goals)
    trace = read_load(args)
    if math.isinf(load.rate):
        raise ConfigError("--rates inf: a plan needs a finite rate")
    cluster = read_gpus(args.gpus, args.link)
    config = resolve(args).config
    spec = read_spec(config.model.model)
    config = _with_context(config, spec, args.input + args.output)
    _print_inputs(spec, cluster, load, config)
    tables = read_tables(args.tables, cluster.device) if args.tables else None
    layouts = list(candidates(spec, config, cluster, args.zipf, tables))
    possible = [candidate for candidate in layouts if not candidate.refused]
    if not possible:
        raise DoesNotFit(
            "no layout fits:\n"
            + "\n".join(f"  {layout.name}: {layout.refused}" for layout in layouts)
        )
    rated = [_Rated(candidate.capacity(load), candidate) for candidate in possible]
    rated.sort(key=lambda rating: -rating.capacity)
    _print_layouts(rated, load)
    _print_refused(layouts, explain=args.explain)
    best = _simulate_best(rated[:NUM_SIMULATED], load, trace)
    _print_best(best, rated, load, cluster, args.explain)
    return 0


def _print_inputs(spec: ModelSpec, cluster: Cluster, load: Workload, config: Config) -> None:
    """Print the model, the devices and the load."""
    from moeserve.models.spec import model_size

    size = model_size(spec)
    weight_formats = " and ".join(dict.fromkeys(form.kind for form in spec.stored)) or spec.dtype
    unit, unit_name = (1e9, "B") if size.total >= 1e9 else (1e6, "M")
    print(
        f"{spec.architecture}: {size.total / unit:.1f} {unit_name} parameters,"
        f" {size.active / unit:.1f} {unit_name} for a token, {weight_formats}"
    )
    link = f", {cluster.link.name} between machines" if cluster.nodes > 1 else ""
    print(f"{cluster.nodes} x {cluster.per_node} {cluster.device.name}{link}")
    print(
        f"{load.rate:g} requests/s of {load.input} + {load.output} tokens; max_model_len"
        f" {config.model.max_model_len}\n"
    )


def read_slo(text: str) -> dict[str, float]:
    """Parse goals: ttft=1s,itl=50ms -> {"ttft_s": 1.0, "itl_s": 0.05}. Raises ConfigError."""
    goals = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        digits = value.rstrip("mus")
        try:
            seconds = float(digits) * _SECONDS_PER_UNIT[value[len(digits) :]]
        except (ValueError, KeyError):
            seconds = math.nan
        if name not in ("ttft", "itl") or not seconds > 0:
            raise ConfigError(f"--slo {part!r} is not like ttft=1s or itl=50ms")
        goals[f"{name}_s"] = seconds
    return goals


def _with_context(config: Config, spec: ModelSpec, tokens: int) -> Config:
    """Return the config with max_model_len set to twice the usual request, unless it was given.

    Workspace for the model's full context may take more memory than the weights.
    """
    if config.model.max_model_len is None:
        rounded_up = -(-2 * tokens // 1024) * 1024
        max_model_len = min(spec.max_position, rounded_up)
        config = replace(config, model=replace(config.model, max_model_len=max_model_len))
    if config.model.max_model_len is not None and config.model.max_model_len <= tokens:
        raise ConfigError(
            f"requests of {tokens} tokens do not fit into {config.model.max_model_len} positions: "
            "lower --input or --output, or raise --max-model-len (the model has "
            f"{spec.max_position})"
        )
    return config


def _print_layouts(rated: list[_Rated], load: Workload) -> None:
    width = max(len(candidate.name) for _, candidate in rated)
    print(f"{'layout':<{width}}  weights   KV GB  tokens   most/s  ttft ms  itl ms  rows  limit")
    for capacity, candidate in rated:
        memory = candidate.memory
        estimate = candidate.estimate(load)
        assert memory is not None
        num_tokens = memory.limits.num_blocks * memory.limits.block_size
        columns = (
            f"{candidate.name:<{width}}{memory.weight_bytes / 1e9:>9.1f}"
            f"{memory.kv_bytes / 1e9:>8.1f}{num_tokens / 1e3:>7.0f}k{capacity:>9.1f}"
        )
        if estimate is None:
            print(f"{columns}  overloaded at this rate")
        else:
            print(
                f"{columns}{1e3 * estimate.ttft_s:>9.0f}{1e3 * estimate.itl_s:>8.1f}"
                f"{estimate.rows:>6.0f}  {estimate.bottleneck}"
            )
    print()


def _print_refused(layouts: list[Candidate], *, explain: bool) -> None:
    """Print the refused layouts by cause: their names if `explain`, otherwise their number."""
    names_by_cause: dict[str, list[str]] = {}
    for candidate in layouts:
        if candidate.refused:
            cause = candidate.refused.split(". ")[0]
            names_by_cause.setdefault(cause, []).append(candidate.name)
    for cause, names in names_by_cause.items():
        if explain:
            print(f"refused: {cause}:\n    {', '.join(names)}\n")
        else:
            print(f"refused: {len(names)}: {cause}\n")


def _simulate_best(rated: list[_Rated], load: Workload, trace: RequestTrace) -> _Simulated:
    """Simulate layouts at the load. Return the one that meets the goals with the largest margin, or
    misses them by least.
    """
    from moeserve.plan.report import summarise

    simulated: list[_Simulated] = []
    for capacity, candidate in rated:
        assert candidate.memory is not None
        assert candidate.cost is not None
        limits = candidate.memory.limits
        groups = candidate.memory.groups
        simulation = simulate(limits, groups, candidate.cost, trace, candidate.config)
        result = summarise(simulation.clients, simulation.steps)
        goal_ratio = max(
            0.0,
            result["p99_ttft_ms"] / (1e3 * load.ttft_s),
            result["p99_tpot_ms"] / (1e3 * load.itl_s),
        )
        if not math.isfinite(load.itl_s + load.ttft_s):
            # A goal is missing, so how close the load is to the capacity counts, too.
            goal_ratio = max(goal_ratio, load.rate / max(capacity, 1e-9))
        print(
            f"simulated {candidate.name}: {result['output_throughput']:,.0f} tokens/s; ms at p50"
            f" / p99: first token {result['p50_ttft_ms']:,.0f} / {result['p99_ttft_ms']:,.0f},"
            f" per token {result['p50_tpot_ms']:.1f} / {result['p99_tpot_ms']:.1f}"
        )
        simulated.append(_Simulated(goal_ratio, candidate, result))
    return min(simulated, key=lambda simulation: simulation.goal_ratio)


def _print_best(
    best: _Simulated, rated: list[_Rated], load: Workload, cluster: Cluster, explain: bool
) -> None:
    candidate = best.candidate
    result = best.result
    estimate = candidate.estimate(load)
    max_rate = next(capacity for capacity, other in rated if other is candidate)
    meets_goals = (
        result["p99_ttft_ms"] <= 1e3 * load.ttft_s and result["p99_tpot_ms"] <= 1e3 * load.itl_s
    )
    spans_machines = cluster.nodes > 1 and forms_one_group(candidate.config)
    nnodes = f" --nnodes {cluster.nodes}" if spans_machines else ""
    print(
        f"\nbest: moeserve serve MODEL {candidate.name} --max-model-len "
        f"{candidate.config.model.max_model_len}{nnodes}"
    )
    print(
        f"goals {'met' if meets_goals else 'MISSED'} in simulation; closed-form limit "
        f"{max_rate:.1f} requests/s"
    )
    if estimate is None:
        print("overloaded at this rate: use more devices, or lower --rates")
        return
    for kind, terms in (("decode only", estimate.decode), ("with prefill", estimate.prefill)):
        total = sum(terms.values())
        parts = sorted(terms.items(), key=lambda item: -item[1])
        shown = ", ".join(
            f"{name} {100 * value / total:.0f} %" for name, value in parts if value > 0.02 * total
        )
        print(f"step time, {kind}: {1e3 * total:.1f} ms: {shown}")
    print(
        f"{100 * estimate.prefill_share:.0f} % of steps have prefill; "
        f"bottleneck: {estimate.bottleneck}"
    )
    if explain:
        _print_sizes(candidate)


def _print_sizes(candidate: Candidate) -> None:
    """Print the sizes behind the result."""
    cost = candidate.cost
    memory = candidate.memory
    assert cost is not None
    assert memory is not None
    weights = cost.weights
    if cost.measured:
        print(f"measured kernels: {', '.join(cost.measured)}; the rest is from the roofline")
    print(
        f"each rank has {weights.dense_bytes / 1e9:.2f} GB of dense layers,"
        f" {weights.num_local_experts} experts of {weights.expert_bytes / 1e6:.1f} MB in each of"
        f" {weights.num_moe_layers} layers,"
        f" {(weights.head_bytes + weights.embedding_bytes) / 1e9:.2f} GB of embeddings and LM head,"
        f" {memory.workspace_bytes / 1e9:.2f} GB of work space,"
        f" {memory.bytes_per_token / 1e3:.1f} kB of KV per token"
    )
    if cost.expert_shares is not None:
        imbalance = cost.expert_shares.imbalance
        print(f"the busiest rank has {imbalance:.2f} times the mean load of experts")
