"""The parallel layouts (dp, tp, ep, step tokens) of a cluster, and the load that each can serve.

`moeserve simulate` ranks all layouts with the closed-form estimate here, then simulates the best.

In the estimate, an engine decodes B rows in every step and prefills prompts in chunks beside them.
A step of the group either has a chunk on some engine or has none. The share of steps with chunks
depends on how long both kinds take, and the times depend on the number of rows, so all of them are
found by fixed-point iteration.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeserve.cluster.check_parallel import check_parallel
from moeserve.config import Config
from moeserve.errors import ConfigError
from moeserve.models.spec import ModelSpec
from moeserve.plan.hardware import Cluster
from moeserve.plan.memory import RankMemory, rank_memory
from moeserve.plan.roofline import Roofline, Shape
from moeserve.plan.tables import KernelTables

STEP_TOKENS = (2048, 8192)  # values of --max-num-batched-tokens to try
CROWDED = 1.1  # KV capacity needed per average token held, so that requests are not preempted
ROUNDS = 60  # of the iteration


@dataclass(frozen=True, slots=True)
class Workload:
    """The load of the whole cluster, and its latency goals."""

    rate: float  # requests per second
    input: float  # prompt tokens per request
    output: float  # generated tokens per request
    ttft_s: float = math.inf  # goals, inf for none
    itl_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Estimate:
    """The steady state of a layout under a load."""

    ttft_s: float
    itl_s: float
    rows: float  # running requests per engine
    prefills: float  # share of steps that prefill
    binds: str  # the bottleneck: the limit that is nearest to being reached
    decode: dict[str, float]  # seconds of each part of a step without prefill
    prefill: dict[str, float]  # the same for a step with prefill


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout."""

    config: Config
    refused: str = ""  # why the engine would not start; then `memory` and `cost` are None
    memory: RankMemory | None = None
    cost: Roofline | None = None

    @property
    def name(self) -> str:
        """The layout as flags of `moeserve serve`."""
        parallel = self.config.parallel
        scheduler = self.config.scheduler
        words = [f"--dp {parallel.dp}", f"--tp {parallel.tp}"]
        words += ["--ep off"] if parallel.ep == "off" else []
        words += (
            [f"--redundant-experts {parallel.redundant_experts}"]
            if parallel.redundant_experts
            else []
        )
        return " ".join([*words, f"--max-num-batched-tokens {scheduler.max_num_batched_tokens}"])

    def estimate(self, load: Workload) -> Estimate | None:
        """Return the steady state under this load, or None if the layout cannot keep up with it."""
        assert self.cost is not None
        assert self.memory is not None
        dp = self.config.parallel.dp
        limits = self.memory.limits
        rate = load.rate / dp
        held = load.input + load.output / 2
        kv_rows = limits.num_blocks * limits.block_size / (held * CROWDED)
        most_rows = min(limits.max_num_seqs, kv_rows)
        decode = prefill = {"": 0.0}
        step_s = 1e-3
        rows = 0.0
        share = 0.0
        for _ in range(ROUNDS):
            rows = rate * load.output * step_s
            chunk = min(load.input, limits.prefill_chunk, limits.max_num_batched_tokens - rows)
            if rows > most_rows or chunk < 1:
                return None
            chunks = rate * load.input / chunk * step_s  # per engine and step
            if chunks > 1:
                return None
            whole = max(1.0, rows)
            plain = Shape(round(whole), round(whole), round(whole), *self._sums(whole, held, 0.0))
            reading = Shape(
                round(whole + chunk),
                round(whole + 1),
                round(whole + 1),
                *self._sums(whole, held, chunk, load.input),
            )
            share = 1 - math.exp(-dp * chunks)
            num_reading = min(dp, max(1, round(dp * chunks / share))) if share else 1
            decode = self.cost.terms([plain] * dp)
            prefill = self.cost.terms([reading] * num_reading + [plain] * (dp - num_reading))
            host_s = self.cost.host_seconds(plain)
            times = [max(host_s, sum(terms.values())) for terms in (decode, prefill)]
            step_s += 0.5 * ((1 - share) * times[0] + share * times[1] - step_s)
        steps = math.ceil(load.input / chunk)
        queue = chunks / max(1e-6, 1 - chunks)  # waiting prompts in a queue with random arrivals
        ttft_s = 1.5 * step_s + (steps + queue) * times[1]
        used = {
            "max_num_seqs": rows / limits.max_num_seqs,
            "KV blocks": rows / kv_rows,
            "reading prompts": chunks,
            "ttft goal": ttft_s / load.ttft_s,
            "itl goal": step_s / load.itl_s,
        }
        return Estimate(
            ttft_s=ttft_s,
            itl_s=step_s,
            rows=rows,
            prefills=share,
            binds=max(used, key=lambda key: used[key]),
            decode=decode,
            prefill=prefill,
        )

    def _sums(
        self, rows: float, held: float, chunk: float, prompt: float = 0.0
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return `reads` and `pairs` of a `Shape`.

        held: context length of a decoding row.
        chunk: tokens of the prefill chunk, which is taken to be in the middle of its prompt.
        """
        assert self.cost is not None
        reads = []
        pairs = []
        for span in self.cost.spans:
            most = math.inf if span is None else span
            seen = rows * min(held, most)
            middle = min(max(chunk, prompt) / 2, most) if chunk else 0.0
            reads.append(seen + middle + chunk / 2)
            pairs.append(seen + chunk * middle)
        return tuple(reads), tuple(pairs)

    def capacity(self, load: Workload) -> float:
        """Return the highest rate within the goals, with a precision of 1 %; 0 if there is none."""
        low = 0.0
        high = 1.0
        while high < 1e6 and self._good(replace(load, rate=high)):
            low = high
            high = 2 * high
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self._good(replace(load, rate=middle)) else (low, middle)
            if high < 1e-3:
                return 0.0
        return low

    def _good(self, load: Workload) -> bool:
        found = self.estimate(load)
        return found is not None and found.ttft_s <= load.ttft_s and found.itl_s <= load.itl_s


def candidates(
    spec: ModelSpec,
    config: Config,
    cluster: Cluster,
    zipf: float = 0.0,
    tables: KernelTables | None = None,
) -> Iterator[Candidate]:
    """Yield every layout that uses all devices of the cluster, including refused ones.

    A --max-num-batched-tokens in `config` is kept.

    zipf: exponent of the experts' popularity, see `ExpertShares`.
    """
    for tp in (n for n in spec.possible_tp if n <= cluster.per_node and cluster.per_node % n == 0):
        dp = cluster.num_devices // tp
        for ep in ("on", "off") if spec.moe and dp > 1 else ("on",):
            sharded = spec.moe is not None and ep == "on" and dp * tp > 1
            for redundant in (
                (0, dp * tp) if sharded and zipf and dp * tp <= spec.num_experts else (0,)
            ):
                given = config.scheduler.max_num_batched_tokens
                for tokens in (given,) if given else STEP_TOKENS:
                    parallel = replace(
                        config.parallel, dp=dp, tp=tp, ep=ep, redundant_experts=redundant
                    )
                    scheduler = replace(config.scheduler, max_num_batched_tokens=tokens)
                    yield _candidate(
                        spec,
                        replace(config, parallel=parallel, scheduler=scheduler),
                        cluster,
                        zipf,
                        tables,
                    )


def _candidate(
    spec: ModelSpec, config: Config, cluster: Cluster, zipf: float, tables: KernelTables | None
) -> Candidate:
    parallel = config.parallel
    # With --ep off, engines do not step together and need no rendezvous.
    nodes = cluster.nodes if parallel.ep == "on" else 1
    if nodes > 1:
        parallel = replace(parallel, nnodes=nodes, rendezvous="HOST:29500", cluster_key_file="KEY")
    try:
        check_parallel(replace(config, parallel=parallel), spec)
        memory = rank_memory(spec, config, cluster.device)
    except ConfigError as error:
        return Candidate(config, refused=str(error))
    cost = Roofline(spec, config, cluster.device, cluster.link, cluster.per_node, zipf, tables)
    return Candidate(config, memory=memory, cost=cost)
