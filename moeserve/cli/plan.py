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
    read_load,
    read_rate,
    read_spec,
    simulate,
    together,
)
from moeserve.errors import ConfigError, DoesNotFit

if TYPE_CHECKING:
    from moeserve.config import Config
    from moeserve.models.spec import ModelSpec
    from moeserve.plan.candidates import Candidate, Estimate, Workload
    from moeserve.plan.hardware import Cluster
    from moeserve.plan.trace import RequestTrace

NUM_SIMULATED = 3  # layouts that are simulated after the closed-form estimate
# Unit of a duration -> seconds
_SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class _Rated(NamedTuple):
    """A layout, and the requests per second that it can serve by the closed form."""

    capacity: float
    candidate: Candidate


class _Simulated(NamedTuple):
    """A layout that was simulated at the load."""

    goal_ratio: float  # of the worst latency to its goal; below 1: all goals are met
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
    from moeserve.models.spec import model_size
    from moeserve.plan.candidates import Workload, candidates
    from moeserve.plan.hardware import read_gpus
    from moeserve.plan.tables import read_tables

    if not args.rates:
        raise ConfigError("give the requests per second, such as --rates 20/s")
    goals = read_slo(args.slo)
    load = Workload(read_rate(args.rates), args.input, args.output, **goals)
    trace = read_load(args)
    if math.isinf(load.rate):
        raise ConfigError("--rates inf: a plan needs a finite rate")
    cluster = read_gpus(args.gpus, args.link)
    config = resolve(args).config
    spec = read_spec(config.model.model)
    config = _with_context(config, spec, args.input + args.output)
    size = model_size(spec)
    kinds = " and ".join(dict.fromkeys(form.kind for form in spec.stored)) or spec.dtype
    unit, name = (1e9, "B") if size.total >= 1e9 else (1e6, "M")
    total = size.total / unit
    active = size.active / unit
    print(
        f"{spec.architecture}: {total:.1f} {name} parameters, {active:.1f} {name} for a token, "
        f"{kinds}"
    )
    print(
        f"{cluster.nodes} x {cluster.per_node} {cluster.device.name}"
        f"{f', {cluster.link.name} between machines' if cluster.nodes > 1 else ''}"
    )
    print(
        f"{load.rate:g} requests/s of {args.input} + {args.output} tokens; max_model_len "
        f"{config.model.max_model_len}\n"
    )
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
    refused: dict[str, list[str]] = {}
    for candidate in layouts:
        if candidate.refused:
            refused.setdefault(candidate.refused.split(". ")[0], []).append(candidate.name)
    for why, names in refused.items():
        print(
            f"refused: {why}:\n    {', '.join(names)}\n"
            if args.explain
            else f"refused: {len(names)}: {why}\n"
        )
    best = _confirm(rated[:NUM_SIMULATED], load, trace)
    _print_best(best, rated, load, cluster, args.explain)
    return 0


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

    Work space for the model's full context may take more memory than the weights.
    """
    if config.model.max_model_len is None:
        rounded = min(spec.max_position, -(-2 * tokens // 1024) * 1024)
        config = replace(config, model=replace(config.model, max_model_len=rounded))
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
        words = (
            f"{candidate.name:<{width}}{memory.weight_bytes / 1e9:>9.1f}"
            f"{memory.kv_bytes / 1e9:>8.1f}{num_tokens / 1e3:>7.0f}k"
        )
        words += f"{capacity:>9.1f}"
        if estimate is None:
            print(f"{words}  overloaded at this rate")
        else:
            print(
                f"{words}{1e3 * estimate.ttft_s:>9.0f}{1e3 * estimate.itl_s:>8.1f}"
                f"{estimate.rows:>6.0f}  {estimate.bottleneck}"
            )
    print()


def _confirm(
    rated: list[_Rated], load: Workload, trace: RequestTrace
) -> tuple[Candidate, Estimate | None, dict[str, Any]]:
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
            result["p99_ttft_ms"] / (1e3 * load.ttft_s),
            result["p99_tpot_ms"] / (1e3 * load.itl_s),
            0.0,
            0.0 if math.isfinite(load.itl_s + load.ttft_s) else load.rate / max(capacity, 1e-9),
        )
        print(
            f"simulated {candidate.name}: {result['output_throughput']:,.0f} tokens/s; ms at p50 "
            "/ p99: first token "
            f"{result['p50_ttft_ms']:,.0f} / {result['p99_ttft_ms']:,.0f}, per token "
            f"{result['p50_tpot_ms']:.1f} / "
            f"{result['p99_tpot_ms']:.1f}"
        )
        simulated.append(_Simulated(goal_ratio, candidate, result))
    best = min(simulated, key=lambda tried: tried.goal_ratio)
    return best.candidate, best.candidate.estimate(load), best.result


def _print_best(
    best: tuple[Candidate, Estimate | None, dict[str, Any]],
    rated: list[_Rated],
    load: Workload,
    cluster: Cluster,
    explain: bool,
) -> None:
    candidate, estimate, result = best
    max_rate = next(capacity for capacity, other in rated if other is candidate)
    meets_goals = (
        result["p99_ttft_ms"] <= 1e3 * load.ttft_s and result["p99_tpot_ms"] <= 1e3 * load.itl_s
    )
    spans_machines = cluster.nodes > 1 and together(candidate.config)
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
    if explain and candidate.cost is not None and candidate.memory is not None:
        weights = candidate.cost.weights
        memory = candidate.memory
        if candidate.cost.measured:
            print(
                f"measured kernels: {', '.join(candidate.cost.measured)}; the rest is from the "
                "roofline"
            )
        print(
            f"each rank has {weights.dense_bytes / 1e9:.2f} GB of dense layers, "
            f"{weights.num_local_experts} experts of "
            f"{weights.expert_bytes / 1e6:.1f} MB in each of {weights.num_moe_layers} layers, "
            f"{(weights.head_bytes + weights.embedding_bytes) / 1e9:.2f} GB of embeddings and "
            "LM head, "
            f"{memory.workspace_bytes / 1e9:.2f} GB of work space, "
            f"{memory.bytes_per_token / 1e3:.1f} kB of KV per token"
        )
        shares = candidate.cost.expert_shares
        if shares is not None:
            print(f"the busiest rank has {shares.imbalance:.2f} times the mean load of experts")
