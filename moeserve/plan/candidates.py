"""The parallel layouts (dp, tp, ep, step tokens) of a cluster, and the load that each can serve.

`moeserve simulate` ranks all layouts with the closed-form estimate here, then simulates the best.

In the estimate, an engine decodes the same number of rows in every step, and prefills prompts in
chunks beside them. A step of the group either has a chunk on some engine or has none. The share of
steps with chunks depends on how long both kinds of steps take, and these times depend on the number
of rows. So all of them are found by fixed-point iteration.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeserve.cluster.check_parallel import check_parallel
from moeserve.config import Config, ParallelConfig
from moeserve.errors import ConfigError
from moeserve.models.spec import ModelSpec
from moeserve.plan.hardware import Cluster
from moeserve.plan.memory import RankMemory, rank_memory
from moeserve.plan.roofline import Roofline, Shape
from moeserve.plan.tables import KernelTables

STEP_TOKENS = (2048, 8192)  # values of --max-num-batched-tokens to try
# KV capacity needed per token held on average, so that requests are not preempted.
CAPACITY_FACTOR = 1.1
NUM_ROUNDS = 60  # of the fixed-point iteration
DAMPING = 0.5  # each round moves the step time by this share of the difference


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
    prefill_share: float  # of steps
    bottleneck: str  # the limit that is nearest to being reached
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
        flags = [f"--dp {parallel.dp}", f"--tp {parallel.tp}"]
        if parallel.ep == "off":
            flags.append("--ep off")
        if parallel.redundant_experts:
            flags.append(f"--redundant-experts {parallel.redundant_experts}")
        flags.append(f"--max-num-batched-tokens {scheduler.max_num_batched_tokens}")
        return " ".join(flags)

    def estimate(self, load: Workload) -> Estimate | None:
        """Return the steady state under this load, or None if the layout cannot keep up with it."""
        assert self.cost is not None
        assert self.memory is not None
        dp = self.config.parallel.dp
        limits = self.memory.limits
        rate = load.rate / dp  # requests per second of one engine
        context = load.input + load.output / 2  # mean tokens of a running request
        kv_rows = limits.num_blocks * limits.block_size / (context * CAPACITY_FACTOR)
        max_rows = min(limits.max_num_seqs, kv_rows)
        decode = {"": 0.0}  # seconds of each part of a step without prefill
        prefill = {"": 0.0}  # the same for a step with prefill
        step_s = 1e-3  # start of the iteration
        rows = 0.0
        prefill_share = 0.0
        for _ in range(NUM_ROUNDS):
            rows = rate * load.output * step_s
            chunk = min(load.input, limits.prefill_chunk, limits.max_num_batched_tokens - rows)
            if rows > max_rows or chunk < 1:
                return None
            num_chunks = rate * load.input / chunk * step_s  # per engine and step
            if num_chunks > 1:
                return None
            rows_or_one = max(1.0, rows)
            decode_shape = self._shape(rows_or_one, context)
            prefill_shape = self._shape(rows_or_one, context, chunk, load.input)
            # Chunks arrive at random (Poisson): the share of steps in which any engine has one, and
            # the number of engines that have one in such a step.
            prefill_share = 1 - math.exp(-dp * num_chunks)
            num_prefilling = 1
            if prefill_share:
                num_prefilling = min(dp, max(1, round(dp * num_chunks / prefill_share)))
            decode = self.cost.terms([decode_shape] * dp)
            prefill = self.cost.terms(
                [prefill_shape] * num_prefilling + [decode_shape] * (dp - num_prefilling)
            )
            host_s = self.cost.host_seconds(decode_shape)
            # The host works while the devices compute, so a step takes the longer time of both.
            decode_s = max(host_s, sum(decode.values()))
            prefill_s = max(host_s, sum(prefill.values()))
            mean_s = (1 - prefill_share) * decode_s + prefill_share * prefill_s
            step_s += DAMPING * (mean_s - step_s)
        num_prompt_steps = math.ceil(load.input / chunk)
        # Prompts that wait before a new one, as in a queue with random arrivals (M/M/1).
        num_waiting = num_chunks / max(1e-6, 1 - num_chunks)
        # On average, a new request waits for half of the running step and for the one queued after.
        ttft_s = 1.5 * step_s + (num_prompt_steps + num_waiting) * prefill_s
        used_shares = {  # of each limit
            "max_num_seqs": rows / limits.max_num_seqs,
            "KV blocks": rows / kv_rows,
            "reading prompts": num_chunks,
            "ttft goal": ttft_s / load.ttft_s,
            "itl goal": step_s / load.itl_s,
        }
        return Estimate(
            ttft_s=ttft_s,
            itl_s=step_s,
            rows=rows,
            prefill_share=prefill_share,
            bottleneck=max(used_shares, key=lambda name: used_shares[name]),
            decode=decode,
            prefill=prefill,
        )

    def _shape(self, rows: float, context: float, chunk: float = 0.0, prompt: float = 0.0) -> Shape:
        """Return the shape of a step that decodes `rows` rows and may prefill one chunk.

        context: tokens of a decoding row.
        chunk: tokens of the prefill chunk, which is taken to be in the middle of its prompt.
        prompt: tokens of that prompt.
        """
        assert self.cost is not None
        num_reads = []
        num_pairs = []
        for window in self.cost.windows:
            max_reads = math.inf if window is None else window
            decode_reads = rows * min(context, max_reads)
            # Positions that the middle query of the chunk reads. The last query reads half a chunk
            # more.
            middle_reads = min(max(chunk, prompt) / 2, max_reads) if chunk else 0.0
            num_reads.append(decode_reads + middle_reads + chunk / 2)
            num_pairs.append(decode_reads + chunk * middle_reads)
        num_rows = round(rows + 1) if chunk else round(rows)
        return Shape(
            num_tokens=round(rows + chunk),
            num_rows=num_rows,
            num_samples=num_rows,
            num_reads=tuple(num_reads),
            num_pairs=tuple(num_pairs),
        )

    def capacity(self, load: Workload) -> float:
        """Return the highest rate within the goals, with a precision of 1 %; 0 if there is none."""
        low = 0.0  # a rate within the goals
        high = 1.0  # a rate that exceeds them, after the first loop
        while high < 1e6 and self._meets_goals(replace(load, rate=high)):
            low = high
            high = 2 * high
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            if self._meets_goals(replace(load, rate=middle)):
                low = middle
            else:
                high = middle
            if high < 1e-3:
                return 0.0
        return low

    def _meets_goals(self, load: Workload) -> bool:
        estimate = self.estimate(load)
        if estimate is None:
            return False
        return estimate.ttft_s <= load.ttft_s and estimate.itl_s <= load.itl_s


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
    given = config.scheduler.max_num_batched_tokens
    for parallel in _layouts(spec, config.parallel, cluster, zipf):
        for step_tokens in (given,) if given else STEP_TOKENS:
            scheduler = replace(config.scheduler, max_num_batched_tokens=step_tokens)
            layout = replace(config, parallel=parallel, scheduler=scheduler)
            yield _candidate(spec, layout, cluster, zipf, tables)


def _layouts(
    spec: ModelSpec, parallel: ParallelConfig, cluster: Cluster, zipf: float
) -> Iterator[ParallelConfig]:
    """Yield every dp, tp, ep and number of redundant experts that use all devices."""
    for tp in spec.possible_tp:
        if cluster.per_node % tp:
            continue
        dp = cluster.num_devices // tp
        for ep in ("on", "off") if spec.moe and dp > 1 else ("on",):
            num_redundant = [0]
            # Redundant experts are of use only if some experts are more popular than others.
            if spec.moe and ep == "on" and zipf and 1 < dp * tp <= spec.num_experts:
                num_redundant.append(dp * tp)  # one more expert on every rank
            for redundant in num_redundant:
                yield replace(parallel, dp=dp, tp=tp, ep=ep, redundant_experts=redundant)


def _candidate(
    spec: ModelSpec, config: Config, cluster: Cluster, zipf: float, tables: KernelTables | None
) -> Candidate:
    parallel = config.parallel
    # With --ep off, engines do not run in lockstep and need no rendezvous.
    nodes = cluster.nodes if parallel.ep == "on" else 1
    if nodes > 1:
        # `check_parallel` needs values of these settings, and `config` does not keep them.
        parallel = replace(parallel, nnodes=nodes, rendezvous="HOST:29500", cluster_key_file="KEY")
    try:
        check_parallel(replace(config, parallel=parallel), spec)
        memory = rank_memory(spec, config, cluster.device)
    except ConfigError as error:
        return Candidate(config, refused=str(error))
    cost = Roofline(spec, config, cluster.device, cluster.link, cluster.per_node, zipf, tables)
    return Candidate(config, memory=memory, cost=cost)
