"""Seconds of a step: for each kind of kernel the bytes that it reads and the operations that it
does, for messages the rows that travel, and a constant for launches and the host.

T tokens of a rank's step, E experts of a layer, k of them per token, R ranks that the experts are
sharded over.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
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

DBO_SAVES = 0.03  # of a step's time: micro-batches must save so much (runner/dbo.py)
SYNC_S = 30e-6  # of the step vote
FAR_LATENCY_S = 100e-6  # of an all2all that sends a row once to each machine, which then spreads it
COUNTED_TOKENS = 10_000.0  # for the load that experts are placed by


class Shape(NamedTuple):
    """The size of one engine's step. reads, pairs: for each span (see `CacheRead`), positions that
    its rows read, and pairs of a query and a position."""

    tokens: int
    rows: int
    samples: int
    reads: tuple[float, ...]
    pairs: tuple[float, ...]


NOTHING = Shape(0, 0, 0, (), ())
Spans = tuple[int | None, ...]


class StepCost(Protocol):
    """What a simulation asks. spans: those that shapes have to count."""

    spans: Spans

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Return the time of a step that engines with these shapes run together."""

    def host_seconds(self, shape: Shape) -> float:
        """Return the host's time between a result and the next plan."""


def shape_of(plan: StepPlan, spans: Spans) -> Shape:
    """Count a plan. Rows of 1 token at position 9 and 4 at 0: tokens 5, reads 10 + 4, pairs 10 +
    (1 + 2 + 3 + 4).
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
        int(counts.sum()), rows, int(np.count_nonzero(plan.samples_R)), tuple(reads), tuple(pairs)
    )


@dataclass(frozen=True, slots=True)
class Attending:
    """Layers whose attention costs the same. span: the index in `Roofline.spans`. times: if they
    are measured.
    """

    span: int
    layers: int
    bytes_per_position: float
    operations: float
    times: AttentionTimes | None


class ExpertShares:
    """How the tokens of a step fall on experts, whose shares follow Zipf's law with an exponent,
    and those on ranks.
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
        """Return the number of a rank's experts that the tokens of all ranks need."""
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
    """Steps of a model on dp engines of tp devices each. near, far: links within and between
    machines of per_node. measured: of the parts of a step, those whose times are in the tables."""

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
        # A product reads its inputs and writes its outputs, and one pass over them lies before it;
        # an expert's rows are copied there and back as well.
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
        """See `StepCost`."""
        return sum(self.terms(shapes).values())

    def host_seconds(self, shape: Shape) -> float:
        """See `StepCost`."""
        return self.device.host_s + self.device.host_row_s * shape.rows

    def terms(self, shapes: Sequence[Shape]) -> dict[str, float]:
        """Return the seconds of each part of a step, in one micro-batch or in two, whichever is
        shorter.
        """
        one = self._computing(shapes, 1) | {"all2all": self._all2all(shapes, 1)}
        if not self.dbo or self.ep == 1 or max(map(itemgetter(0), shapes)) < 2:
            return one
        two = self._computing(shapes, 2)
        travels = self._all2all(shapes, 2)
        # Each half's rows travel while the other half computes; the first ones and the last ones
        # travel alone.
        computes = sum(two.values()) - two["launch"]
        alone = min(computes, travels) / max(1, 2 * self.weights.moe_layers)
        two["all2all"] = max(0.0, travels - computes) + alone
        return two if sum(two.values()) < (1 - DBO_SAVES) * sum(one.values()) else one

    def _computing(self, shapes: Sequence[Shape], parts: int) -> dict[str, float]:
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
            # Each rank of an engine sends a part of its tokens; a rank alone computes all of its
            # own.
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
        if self.expert_times is None:  # measured kernels copy their rows themselves
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
        """Seconds of products of so many rows with these weights."""
        return (
            times.seconds(rows)
            if times
            else float(self._roof(num_bytes, 2 * weights * rows, flops))
        )

    def _roof(self, num_bytes: Any, operations: Any, flops: float) -> Any:
        """Seconds of one kernel, or of an array of them."""
        reading = num_bytes / (self.device.reads * self.device.bytes_per_s)
        computing = operations / flops
        return np.maximum(reading, computing) + (1 - self.device.overlap) * np.minimum(
            reading, computing
        )

    def _attention(self, shapes: Sequence[Shape]) -> float:
        """Seconds of the engine that takes longest."""
        if not shapes:
            return 0.0
        if any(
            kind.times for kind in self.attending
        ):  # one at a time: of the engines that have most to read
            shapes = [max(shapes, key=itemgetter(3)), max(shapes, key=itemgetter(4))]
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
        """Seconds of dispatch and combine in all layers: rows go to each expert's rank (low
        latency), or once to each machine that has any of them (high throughput), whichever is
        faster."""
        if self.ep == 1:
            return 0.0
        tokens = max(map(itemgetter(0), shapes)) / self.tp
        k = self.spec.experts_per_token
        peer = self.device.peer
        link = self.link
        nodes = -(-self.ep // self.near)
        far = 1 - self.near / self.ep
        machines = nodes * (1 - (1 - 1 / nodes) ** k) * far if nodes > 1 else 0.0
        seconds = 0.0
        for size in self.row_bytes:
            direct = parts * max(peer.latency_s, link.latency_s if far else 0.0)
            direct += tokens * k * size * (far / link.bytes_per_s + (1 - far) / peer.bytes_per_s)
            staged = parts * FAR_LATENCY_S + tokens * size * max(
                machines / link.bytes_per_s, k / peer.bytes_per_s
            )
            seconds += min(direct, staged) if far else direct
        return self.weights.moe_layers * seconds / self.device.in_situ
