"""A roofline model of step times.

For each kind of kernel it counts bytes and operations, for all-to-alls and gathers the activations
that are sent. Kernel launches and the host take constant times.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from moeserve.config import Config
from moeserve.engine.plan import StepPlan
from moeserve.models.spec import ModelSpec
from moeserve.moe.placement.placement import Placement
from moeserve.moe.placement.solve import balance, rank_loads, solve
from moeserve.plan.hardware import Device, Link
from moeserve.plan.memory import RankWeights, rank_weights
from moeserve.plan.tables import AttentionTimes, KernelTables, Times

DBO_SAVES = 0.03  # share of a step's time that two micro-batches must save (runner/dbo.py)
SYNC_S = 30e-6  # time of the step vote
FAR_LATENCY_S = 100e-6  # latency of a high-throughput all-to-all across machines
COUNTED_TOKENS = 10_000.0  # tokens of the expert load that the placement is solved for


class Shape(NamedTuple):
    """The size of one engine's step."""

    tokens: int
    rows: int  # requests
    samples: int  # rows that sample a token
    reads: tuple[float, ...]  # for each span: KV positions that the rows read
    pairs: tuple[float, ...]  # for each span: (query, position) pairs of attention


NOTHING = Shape(tokens=0, rows=0, samples=0, reads=(), pairs=())
Spans = tuple[int | None, ...]  # attention windows of a model, see `CacheRead.span`


class StepCost(Protocol):
    """A model of step times, for the simulator."""

    spans: Spans  # that every `Shape` has to count

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Return the time of a step that engines with these shapes run in lockstep."""

    def host_seconds(self, shape: Shape) -> float:
        """Return the host's time between a result and the next plan."""


def shape_of(plan: StepPlan, spans: Spans) -> Shape:
    """Return the shape of a plan.

    Example: rows with 1 token at position 9 and 4 tokens at position 0 -> tokens 5, reads 10 + 4,
    pairs 10 + (1 + 2 + 3 + 4)
    """
    counts = plan.counts_R.astype(np.float64)
    ends = plan.starts_R + counts
    middles = ends - (counts - 1) / 2
    reads = []
    pairs = []
    for span in spans:
        reads.append(float((ends if span is None else np.minimum(ends, counts + span)).sum()))
        pairs.append(float(counts @ (middles if span is None else np.minimum(middles, span))))
    rows = len(counts)
    return Shape(
        tokens=int(counts.sum()),
        rows=rows,
        samples=int(np.count_nonzero(plan.samples_R)),
        reads=tuple(reads),
        pairs=tuple(pairs),
    )


@dataclass(frozen=True, slots=True)
class Attending:
    """Attention layers that cost the same."""

    span: int  # index in `Roofline.spans`
    layers: int  # their number
    bytes_per_position: float
    operations: float  # per (query, position) pair
    times: AttentionTimes | None  # measured times, if there are any


class ExpertShares:
    """The distribution of a step's tokens over experts and ranks.

    The popularity of experts follows Zipf's law with exponent `zipf`; 0 is uniform.
    """

    def __init__(
        self, num_experts: int, top_k: int, ranks: int, redundant: int, zipf: float
    ) -> None:
        weights = np.arange(1, num_experts + 1) ** -zipf
        share = np.minimum(1.0, top_k * weights / weights.sum())
        self.ranks = ranks
        load_LE = share[None] * COUNTED_TOKENS
        placement = Placement.initial(1, num_experts, ranks, redundant)
        if zipf and ranks > 1:
            placement = solve(load_LE, placement, 1)
        self.imbalance = 1 / float(balance(rank_loads(load_LE, placement))[0])
        self._tokens = np.concatenate(([0.0], np.geomspace(1, 1e7, 200)))
        copies = np.maximum(placement.counts()[0], 1)
        hit_TE = 1 - (1 - share / copies) ** self._tokens[:, None]
        self._distinct = (hit_TE * copies).sum(1) / ranks

    def distinct(self, tokens: float) -> float:
        """Return the expected number of a rank's experts that the tokens of all ranks use."""
        return float(np.interp(tokens, self._tokens, self._distinct))


def _reads(
    spec: ModelSpec, tp: int, kv_size: int
) -> tuple[Counter[tuple[int | None, int, int, tuple[int, int, int]]], float]:
    """Return what attention reads per step, and the bytes of recurrent states.

    A read is (span, bytes, operations, heads) with its number of layers. heads is (0, 0, 0) if the
    kernel tables have no such attention.
    """
    reads: Counter[tuple[int | None, int, int, tuple[int, int, int]]] = Counter()
    state_bytes = 0.0
    for layer in spec.layers:
        heads = layer.mixer.head_shape(tp)
        for read in layer.mixer.reads(tp):
            in_tables = heads is not None and heads.dim == heads.v_dim
            in_tables = in_tables and kv_size == 2 and read.span is None
            key = (0, 0, 0)
            if heads is not None and in_tables:
                key = (heads.num_heads, heads.num_kv_heads, heads.dim)
            reads[read.span, read.elements * kv_size, read.operations, key] += 1
        if layer.mixer.rule.tile is not None:
            # Read and written; the rows of the open tile are few beside it.
            state = sum(t.heads * t.width for t in layer.mixer.cache(tp) if t.per_tile)
            state_bytes += 8.0 * state
    return reads, state_bytes


class Roofline:
    """The `StepCost` of a model on dp engines of tp devices each.

    `measured` lists the parts of a step whose times come from the kernel tables.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: Config,
        device: Device,
        link: Link,
        per_node: int,
        zipf: float = 0.0,
        tables: KernelTables | None = None,
    ) -> None:
        self.spec = spec
        self.device = device
        self.link = link
        self.dbo = config.parallel.dbo != "off"
        self.tp = config.parallel.tp
        self.ranks = config.parallel.num_ranks
        self.weights: RankWeights = rank_weights(spec, config)
        self.ep = self.ranks if config.parallel.ep == "on" and spec.moe else 1
        self.near = min(per_node, self.ep)
        self.itemsize = 4 if spec.dtype == "float32" else 2
        kv_size = 1 if config.cache.kv_cache_dtype == "int8" else self.itemsize
        reads, self.state_bytes = _reads(spec, self.tp, kv_size)
        self.spans: Spans = tuple(dict.fromkeys(span for span, *_ in reads)) or (None,)
        # A GEMM reads its inputs and writes its outputs, and one elementwise kernel before it reads
        # and writes the inputs. Experts also copy their rows on dispatch and combine.
        elements = sum(3 * inputs + outputs for outputs, inputs in spec.products()) / self.tp
        self.passes = elements * self.itemsize
        self.expert_passes = (5 * spec.hidden_size + 6 * spec.expert_size) * self.itemsize
        tables = tables or KernelTables({})
        self.attending = [
            Attending(self.spans.index(span), n, size, operations, tables.attention.get(heads))
            for (span, size, operations, heads), n in reads.items()
        ]
        dense_8bit = self.weights.dense_bytes < 1.5 * self.weights.dense and bool(spec.stored)
        expert_8bit = spec.expert_weights * 1.5 > self.weights.expert_bytes and any(
            f.kind == "fp8" for f in spec.stored
        )
        self.dense_flops = device.dense * (device.flops_8bit if dense_8bit else device.flops)
        self.expert_flops = (
            device.expert_8bit * device.flops_8bit if expert_8bit else device.expert * device.flops
        )
        # Bytes of an activation in dispatch (fp8 with scales if the experts are fp8), in combine.
        self.row_bytes = (
            spec.hidden_size * (1.03 if expert_8bit else self.itemsize),
            spec.hidden_size * self.itemsize,
        )
        size = self.weights.expert_bytes / max(1, self.weights.expert)
        dtype = (
            "fp8_block" if expert_8bit else "bfloat16" if size == 2 and self.itemsize == 2 else ""
        )
        shape = dtype, spec.hidden_size, spec.expert_size, spec.num_experts, spec.experts_per_token
        self.expert_times = tables.experts.get(shape) if self.ep == 1 else None
        wide = self.itemsize == 2 and self.weights.dense_bytes > 1.5 * self.weights.dense
        self.dense_times = tables.dense(
            [(n / self.tp, k) for n, k in spec.products()] if wide else []
        )
        rows = self.weights.head / spec.hidden_size
        self.head_times = tables.dense([(rows, spec.hidden_size)] if self.itemsize == 2 else [])
        parts = {
            "experts": self.expert_times,
            "dense layers": self.dense_times,
            "LM head": self.head_times,
        }
        self.measured = [name for name, times in parts.items() if times]
        self.measured += ["attention"] * any(kind.times for kind in self.attending)
        self.load: ExpertShares | None = None
        if spec.moe is not None:
            redundant = config.parallel.redundant_experts if self.ep > 1 else 0
            self.load = ExpertShares(
                spec.num_experts, spec.experts_per_token, self.ep, redundant, zipf
            )

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Return the time of a step: the sum of its terms."""
        return sum(self.terms(shapes).values())

    def host_seconds(self, shape: Shape) -> float:
        """Return the host's time, which grows with the number of rows."""
        return self.device.host_s + self.device.host_row_s * shape.rows

    def terms(self, shapes: Sequence[Shape]) -> dict[str, float]:
        """Return the seconds of each part of a step.

        With dual-batch overlap, the step uses two micro-batches if that is faster.
        """
        one = self._computing(shapes, 1) | {"all2all": self._all2all(shapes, 1)}
        if not self.dbo or self.ep == 1 or max(shape.tokens for shape in shapes) < 2:
            return one
        two = self._computing(shapes, 2)
        travels = self._all2all(shapes, 2)
        # The all-to-all of one half overlaps with the computation of the other. The first and the
        # last all-to-all do not overlap.
        computes = sum(two.values()) - two["launch"]
        exposed = min(computes, travels) / max(1, 2 * self.weights.moe_layers)
        two["all2all"] = max(0.0, travels - computes) + exposed
        return two if sum(two.values()) < (1 - DBO_SAVES) * sum(one.values()) else one

    def _computing(self, shapes: Sequence[Shape], parts: int) -> dict[str, float]:
        """Return the seconds of all parts but the all-to-all. parts: number of micro-batches."""
        weights = self.weights
        device = self.device
        each_tokens, each_rows, each_samples = list(zip(*shapes, strict=True))[:3]
        tokens = max(each_tokens)
        total = sum(each_tokens)
        rows = max(each_rows)
        samples = max(each_samples)
        busy = min(parts, tokens)
        part = tokens / max(1, busy)
        dense = busy * self._product(
            self.dense_times, weights.dense_bytes, weights.dense, part, self.dense_flops
        )
        attention = self._attention([shape for shape in shapes if shape.tokens])
        attention += rows * self.state_bytes / (device.reads * device.bytes_per_s)
        experts = local = 0.0
        if self.load is not None:
            # With EP, all tokens of the group are spread over its ranks. Otherwise each engine
            # computes its own tokens.
            seen, spread = (total, self.ep) if self.ep > 1 else (tokens, 1)
            local = seen / parts * self.spec.experts_per_token / spread * self.load.imbalance
            read = self.load.distinct(seen / parts) * weights.expert_bytes
            layer = (
                self._roof(read, 2 * local * weights.expert, self.expert_flops)
                if self.expert_times is None
                else self.expert_times.seconds(tokens / parts)
            )
            experts = parts * weights.moe_layers * layer
        flops = device.dense * device.flops
        head = (
            self._product(self.head_times, weights.head_bytes, weights.head, samples, flops)
            if samples
            else 0.0
        )
        gathers = 0.0
        if self.tp > 1:
            sent = tokens * self.spec.hidden_size * self.itemsize * (self.tp - 1) / self.tp
            gathers = (
                2
                * len(self.spec.layers)
                * (parts * device.peer.latency_s / 2 + sent / device.peer.gather_bytes_per_s)
            )
        passes = tokens * self.passes
        if self.expert_times is None:  # measured times include the copies
            passes += local * parts * weights.moe_layers * self.expert_passes
        launch = parts * len(self.spec.layers) * device.launch_s + (
            SYNC_S if self.ranks > self.tp else 0.0
        )
        between = passes / (device.reads * device.bytes_per_s)
        kernels = {
            "dense layers": dense,
            "attention": attention,
            "experts": experts,
            "LM head": head,
            "between products": between,
            "tp gathers": gathers,
        }
        return {name: float(value) / device.in_situ for name, value in kernels.items()} | {
            "launch": launch
        }

    def _product(
        self, times: Times | None, num_bytes: float, weights: float, rows: float, flops: float
    ) -> float:
        """Return the seconds of GEMMs of `rows` rows with `weights` weights."""
        return (
            times.seconds(rows)
            if times
            else float(self._roof(num_bytes, 2 * weights * rows, flops))
        )

    def _roof(self, num_bytes: Any, operations: Any, flops: float) -> Any:
        """Return the seconds of a kernel, or of an array of kernels."""
        reading = num_bytes / (self.device.reads * self.device.bytes_per_s)
        computing = operations / flops
        return np.maximum(reading, computing) + (1 - self.device.overlap) * np.minimum(
            reading, computing
        )

    def _attention(self, shapes: Sequence[Shape]) -> float:
        """Return the seconds of the slowest engine's attention."""
        if not shapes:
            return 0.0
        if any(kind.times for kind in self.attending):
            # Measured times are not vectorized. Compute them only for the engines with the most
            # reads and the most pairs.
            most_reads = max(shapes, key=lambda shape: shape.reads)
            most_pairs = max(shapes, key=lambda shape: shape.pairs)
            shapes = [most_reads, most_pairs]
        reads = np.array([s.reads for s in shapes]).T
        pairs = np.array([s.pairs for s in shapes]).T
        flops = self.device.attention * self.device.flops
        total = np.zeros(len(shapes))
        for kind in self.attending:
            here = reads[kind.span]
            those = pairs[kind.span]
            if kind.times is None:
                seconds = self._roof(here * kind.bytes_per_position, those * kind.operations, flops)
            else:
                sizes = zip(shapes, here, those, strict=True)
                seconds = np.array(
                    [kind.times.seconds(s.rows, s.tokens - s.rows, r, p) for s, r, p in sizes]
                )
            total += kind.layers * seconds
        return float(total.max())

    def _all2all(self, shapes: Sequence[Shape], parts: int) -> float:
        """Return the seconds of dispatch and combine in all layers.

        Activations are sent to the rank of each expert (low latency), or once to each machine that
        has some of the experts (high throughput), whichever is faster.
        """
        if self.ep == 1:
            return 0.0
        tokens = max(shape.tokens for shape in shapes) / self.tp
        k = self.spec.experts_per_token
        peer = self.device.peer
        link = self.link
        nodes = -(-self.ep // self.near)
        far = 1 - self.near / self.ep
        machines = nodes * (1 - (1 - 1 / nodes) ** k) * far if nodes > 1 else 0.0
        seconds = 0.0
        for size in self.row_bytes:  # dispatch, then combine
            direct = parts * max(peer.latency_s, link.latency_s if far else 0.0)
            direct += tokens * k * size * (far / link.bytes_per_s + (1 - far) / peer.bytes_per_s)
            staged = parts * FAR_LATENCY_S + tokens * size * max(
                machines / link.bytes_per_s, k / peer.bytes_per_s
            )
            seconds += min(direct, staged) if far else direct
        return self.weights.moe_layers * seconds / self.device.in_situ
