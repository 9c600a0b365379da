"""`moeserve simulate`: runs a request trace through the real scheduler in simulated time."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moeserve.cli.settings import add_flags, resolve
from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from moeserve.config import Config, Limits
    from moeserve.engine.blocks import KVGroup
    from moeserve.models.spec import ModelSpec
    from moeserve.plan.roofline import StepCost
    from moeserve.plan.simulator import Simulation
    from moeserve.plan.trace import RequestTrace


class _Setup(NamedTuple):
    """The engines of a simulation, from a device's data or from a calibration."""

    limits: Limits
    groups: tuple[KVGroup, ...]
    cost: StepCost
    client_delay_s: float  # from the engine to the client and back, added to latencies


def add_load_flags(parser: argparse.ArgumentParser, *, num_requests: int) -> None:
    """Add the flags of synthetic requests."""
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--rates", metavar="N/s", help="requests per second (Poisson process); inf: all at once"
    )
    group.add_argument(
        "--input", type=int, default=1024, metavar="N", help="prompt tokens per request [1024]"
    )
    group.add_argument(
        "--output", type=int, default=128, metavar="N", help="output tokens per request [128]"
    )
    group.add_argument(
        "--spread",
        type=float,
        default=0.0,
        metavar="R",
        help="draw lengths from length*(1-R) to length*(1+R) [0]",
    )
    group.add_argument(
        "--num-requests",
        type=int,
        default=num_requests,
        metavar="N",
        help=f"number of requests [{num_requests}]",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of arrival times and lengths [0]"
    )


def add_tables_flag(parser: argparse.ArgumentParser) -> None:
    """Add --tables."""
    parser.add_argument(
        "--tables",
        metavar="DIR|aiconfigurator",
        help="use measured kernel times (docs/planning.md)",
    )


def add_link_flag(parser: argparse.ArgumentParser) -> None:
    """Add --link."""
    parser.add_argument(
        "--link", default="ib400", metavar="NAME", help="network between machines [ib400]"
    )


def add_zipf_flag(parser: argparse.ArgumentParser) -> None:
    """Add --zipf."""
    parser.add_argument(
        "--zipf",
        type=float,
        default=0.0,
        metavar="S",
        help="Zipf exponent of the experts' popularity; 0: uniform [0]",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of requests, devices and calibration, and those of `moeserve serve`, which
    --help does not list.
    """
    parser.usage = (
        "%(prog)s MODEL (--gpus 8xH200 | --calibration FILE | --measure FILE) [flags of `moeserve "
        "serve`]"
    )
    parser.add_argument(
        "--gpus",
        metavar="2x8xH100",
        help="machines x devices per machine x device (docs/planning.md lists devices)",
    )
    add_link_flag(parser)
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="use measured step times from this file, not a device's data",
    )
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="FILE",
        help="measure this machine, and write the calibration to this file",
    )
    add_zipf_flag(parser)
    add_tables_flag(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="read the requests from a ShareGPT or Mooncake file, or an access log",
    )
    add_load_flags(parser, num_requests=1000)
    add_flags(parser, shown=False)


def run(args: argparse.Namespace) -> int:
    """Measure this machine, or simulate and print the metrics that clients would see."""
    config = resolve(args).config
    if sum(bool(given) for given in (args.gpus, args.calibration, args.measure)) != 1:
        raise ConfigError("simulate needs one of --gpus, --calibration and --measure")
    if args.tables and not args.gpus:
        raise ConfigError(
            "--tables has kernel times of a GPU and needs --gpus; a calibration has its own times"
        )
    if args.measure:
        return _measure(config, args.measure)
    setup = _calibrated(args.calibration, config) if args.calibration else _modelled(args, config)
    from moeserve.plan.report import format_metrics, summarise

    trace = read_load(args)
    # The garbage collector would take a seventh of the time to look for cycles among millions of
    # requests, which have none.
    gc.freeze()
    began_at_s = time.perf_counter()
    simulation = simulate(setup.limits, setup.groups, setup.cost, trace, config)
    took_s = time.perf_counter() - began_at_s
    result = summarise(simulation.clients, simulation.steps, setup.client_delay_s) | {
        "wall_s": round(took_s, 3)
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    print(format_metrics(result))
    print(f"simulated in {took_s:.1f} s, {len(trace.arrivals) / took_s:,.0f} requests/s")
    return 0


def read_load(args: argparse.Namespace) -> RequestTrace:
    """Return the requests that the flags describe. Raises ConfigError."""
    from moeserve.cli.bench.load import arrival_times
    from moeserve.plan.trace import read_trace, synthetic

    for name, minimum in (("input", 1), ("output", 1), ("num_requests", 1), ("seed", 0)):
        if getattr(args, name) < minimum:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be at least {minimum}, got {getattr(args, name)}"
            )
    if not 0 <= args.spread < 1:
        raise ConfigError(f"--spread must be from 0 to below 1, got {args.spread}")
    if not 0 <= args.zipf < math.inf:
        raise ConfigError(f"--zipf must be a number of at least 0, got {args.zipf}")
    rate = read_rate(args.rates) if args.rates else None
    if getattr(args, "trace", None):
        return read_trace(args.trace, rate)
    if rate is None:
        raise ConfigError("give the requests per second, such as --rates 20/s, or a --trace")
    times_s = arrival_times(args.num_requests, rate, 1.0, args.seed)
    return synthetic(times_s, args.input, args.output, args.spread, args.seed)


def read_rate(text: str) -> float:
    """Parse requests per second: 20/s, 0.5, 600/min, inf. Raises ConfigError."""
    number, _, unit = text.strip().partition("/")
    try:
        rate = float(number) / {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}[unit]
    except (ValueError, KeyError):
        rate = math.nan
    if not rate > 0:
        raise ConfigError(f"--rates {text!r} is not like 20/s, 600/min or inf")
    return rate


def forms_one_group(config: Config) -> bool:
    """Return whether the engines run in lockstep, because the experts are sharded over them."""
    return config.parallel.ep == "on"


def simulate(
    limits: Limits, groups: tuple[KVGroup, ...], cost: StepCost, trace: RequestTrace, config: Config
) -> Simulation:
    """Run a trace on all engines.

    Tries `plan/counted.py` first, which computes each step's sums without a scheduler. If the
    configuration does not allow it (`is_countable`), or a request would be preempted, the run uses
    the real schedulers.
    """
    from moeserve.plan.counted import Uncountable, is_countable
    from moeserve.plan.simulator import Simulation

    limits = replace(
        limits,
        # Without shared prefixes the prefix cache finds nothing, and steps can be counted.
        enable_prefix_caching=limits.enable_prefix_caching and trace.shares_prefixes,
        # Shorter tables; the longest request still has room for one more token.
        max_model_len=min(limits.max_model_len, trace.longest + 1),
    )
    make_simulation = partial(
        Simulation, limits, groups, cost, config.parallel.dp, is_one_group=forms_one_group(config)
    )
    if is_countable(limits, groups, cost.windows, trace.longest):
        with suppress(Uncountable):
            return make_simulation(counted=True).run(trace)
    return make_simulation().run(trace)


def _modelled(args: argparse.Namespace, config: Config) -> _Setup:
    from moeserve.cluster.check_parallel import check_parallel
    from moeserve.plan.hardware import read_gpus
    from moeserve.plan.memory import rank_memory
    from moeserve.plan.roofline import Roofline
    from moeserve.plan.tables import read_tables

    cluster = read_gpus(args.gpus, args.link)
    parallel = config.parallel
    if parallel.num_ranks > cluster.num_devices:
        raise ConfigError(
            f"--dp {parallel.dp} --tp {parallel.tp} needs {parallel.num_ranks} devices, one per "
            f"rank; --gpus {args.gpus} has {cluster.num_devices} devices"
        )
    spec = read_spec(config.model.model)
    check_parallel(config, spec)
    memory = rank_memory(spec, config, cluster.device)
    tables = read_tables(args.tables, cluster.device) if args.tables else None
    cost = Roofline(spec, config, cluster.device, cluster.link, cluster.per_node, args.zipf, tables)
    if tables and not cost.measured:
        raise ConfigError(
            f"--tables {args.tables} have no kernels of this model on {cluster.device.name}"
        )
    return _Setup(memory.limits, memory.groups, cost, client_delay_s=0.0)


def _calibrated(path: Path, config: Config) -> _Setup:
    from moeserve.engine.blocks import groups_of
    from moeserve.plan.calibration import MeasuredCost, limits_of, read_calibration

    calibration = read_calibration(path)
    spec = read_spec(config.model.model)
    parallel = config.parallel
    measured = (calibration.model, calibration.dp, calibration.tp)
    if measured != (spec.architecture, parallel.dp, parallel.tp):
        raise ConfigError(
            f"--calibration {path} is of {calibration.model} with --dp {calibration.dp}"
            f" --tp {calibration.tp}, and this is {spec.architecture} with --dp {parallel.dp}"
            f" --tp {parallel.tp}; measure again"
        )
    limits = limits_of(calibration)
    return _Setup(
        limits=limits,
        groups=groups_of(spec.kv_rules, limits.block_size),
        cost=MeasuredCost(calibration),
        client_delay_s=calibration.delay_s,
    )


def read_spec(model: str) -> ModelSpec:
    """Return the spec of a model, of which only the config is read: a folder, its config.json, or
    a name on a hub.
    """
    from moeserve.models.fetch import fetch_config
    from moeserve.models.hf_config import read_model_spec

    path = Path(model)
    if path.name == "config.json" and path.is_file():
        return read_model_spec(path.parent)
    return read_model_spec(fetch_config(model))


def _measure(config: Config, path: Path) -> int:
    from moeserve.plan.calibration import write_calibration
    from moeserve.plan.measure import measure

    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--measure {path}: must be a file in a folder that exists")
    calibration = asyncio.run(measure(config))
    write_calibration(path, calibration)
    error = 100 * calibration.error
    print(f"{calibration.num_samples} steps, median error of the fit {error:.1f} %")
    for name, seconds in calibration.terms.items():
        print(f"  {name:<20}{1e6 * seconds:>12.4f} us")
    print(f"  round trip to the client {1e3 * calibration.delay_s:.2f} ms")
    print(f"written: {path}")
    return 0
