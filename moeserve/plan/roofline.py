"""A roofline model of step times.

A kernel takes the longer one of reading its bytes and computing its operations, plus a part of the
shorter one. For all-to-alls and gathers, the bytes of the sent activations are counted. A kernel
launch takes a constant time, and the host's time grows with the number of rows.

The rates of devices, and the shares of them that kernels reach, are in hardware.py. Names that end
in _s are durations in seconds.
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
from moeserve.plan.tables import AttentionTimes, HeadKey, KernelTables, Times

MIN_DBO_SAVING = 0.03  # share of a step's time that two micro-batches must save (runner/dbo.py)
SYNC_S = 30e-6  # duration of the step vote
FAR_LATENCY_S = 100e-6  # latency of a high-throughput all-to-all across machines
LOAD_TOKENS = 10_000.0  # tokens of the expert load that the placement is solved for
FP8_ELEMENT_BYTES = 1.03  # 1 byte, and an fp32 scale for every 128 elements
STATE_BYTES = 8.0  # per element of a recurrent state: an fp32 number is read and written


class Shape(NamedTuple):
    """The size of one engine's step."""

    num_tokens: int
    num_rows: int  # requests
    num_samples: int  # rows that sample a token
    # One number for each of `StepCost.windows`:
    num_reads: tuple[float, ...]  # KV positions that the rows read
    num_pairs: tuple[float, ...]  # (query, position) pairs of attention


NO_WORK = Shape(num_tokens=0, num_rows=0, num_samples=0, num_reads=(), num_pairs=())
Windows = tuple[int | None, ...]  # attention windows of a model, see `CacheRead.window`


class StepCost(Protocol):
    """A model of step times, for the simulator."""

    windows: Windows  # for which every `Shape` must have counts

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Return the time of a step that engines with these shapes run in lockstep."""

    def host_seconds(self, shape: Shape) -> float:
        """Return the host's time between a result and the next plan."""


def shape_of(plan: StepPlan, windows: Windows) -> Shape:
    """Return the shape of a plan.

    Example: rows with 1 token at position 9 and 4 tokens at position 0 -> num_tokens 5,
    num_reads 10 + 4, num_pairs 10 + (1 + 2 + 3 + 4)
    """
    # A row's queries are at the positions from start to end - 1. A query reads the positions up to
    # its own, so on average as many as the middle query. R: one number per row (engine/plan.py).
    counts_R = plan.counts_R.astype(np.float64)
    ends_R = plan.starts_R + counts_R
    middles_R = ends_R - (counts_R - 1) / 2
    num_reads = []
    num_pairs = []
    for window in windows:
        reads_R = ends_R
        mean_pairs_R = middles_R
        if window is not None:
            reads_R = np.minimum(ends_R, counts_R + window)
            mean_pairs_R = np.minimum(middles_R, window)
        num_reads.append(float(reads_R.sum()))
        num_pairs.append(float(counts_R @ mean_pairs_R))
    return Shape(
        num_tokens=int(counts_R.sum()),
        num_rows=len(counts_R),
        num_samples=int(np.count_nonzero(plan.samples_R)),
        num_reads=tuple(num_reads),
        num_pairs=tuple(num_pairs),
    )


class AttentionCost(NamedTuple):
    """The cost of one layer's attention on one rank. Layers with equal costs are counted."""

    window: int | None
    bytes_per_position: int
    operations: int  # per (query, position) pair
    heads: HeadKey | None  # key in the kernel tables; None if they have no such attention


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Attention layers that cost the same."""

    window_index: int  # in `Roofline.windows`
    num_layers: int
    bytes_per_position: float  # of the KV cache
    operations: float  # per (query, position) pair
    times: AttentionTimes | None  # measured times of one layer, if there are any


class ExpertShares:
    """The distribution of a step's tokens over experts and ranks.

    The popularity of experts follows Zipf's law with exponent `zipf`; 0 is uniform.

    E: experts. L: layers, here one. T: sampled numbers of tokens, between which results are
    interpolated.
    """

    def __init__(
        self, num_experts: int, top_k: int, num_ranks: int, num_redundant: int, zipf: float
    ) -> None:
        popularity_E = np.arange(1, num_experts + 1) ** -zipf
        # The share of tokens that choose an expert
        chosen_E = np.minimum(1.0, top_k * popularity_E / popularity_E.sum())
        load_LE = chosen_E[None] * LOAD_TOKENS
        placement = Placement.initial(1, num_experts, num_ranks, num_redundant)
        if zipf and num_ranks > 1:
            placement = solve(load_LE, placement, 1)
        # The load of the busiest rank, relative to the mean. `balance` is the inverse.
        self.imbalance = 1 / float(balance(rank_loads(load_LE, placement))[0])
        # Tokens are spread evenly over the replicas of an expert. A replica is used by at least one
        # of T tokens with the probability 1 - (1 - its share) ** T.
        num_replicas_E = np.maximum(placement.counts()[0], 1)
        self._num_tokens_T = np.concatenate(([0.0], np.geomspace(1, 1e7, 200)))
        used_TE = 1 - (1 - chosen_E / num_replicas_E) ** self._num_tokens_T[:, None]
        self._num_used_T = (used_TE * num_replicas_E).sum(1) / num_ranks

    def num_used(self, num_tokens: float) -> float:
        """Return the expected number of a rank's experts that the tokens of all ranks use."""
        return float(np.interp(num_tokens, self._num_tokens_T, self._num_used_T))


def _attention_costs(spec: ModelSpec, tp: int, kv_itemsize: int) -> Counter[AttentionCost]:
    """Return the number of layers with each cost."""
    num_layers: Counter[AttentionCost] = Counter()
    for layer in spec.layers:
        heads = layer.mixer.head_shape(tp)
        for read in layer.mixer.reads(tp):
            # The tables have full attention with equal sizes of keys and values, and a 16-bit cache
            key: HeadKey | None = None
            if (
                heads is not None
                and heads.dim == heads.v_dim
                and kv_itemsize == 2
                and read.window is None
            ):
                key = (heads.num_heads, heads.num_kv_heads, heads.dim)
            cost = AttentionCost(
                window=read.window,
                bytes_per_position=read.elements * kv_itemsize,
                operations=read.operations,
                heads=key,
            )
            num_layers[cost] += 1
    return num_layers


def _state_bytes(spec: ModelSpec, tp: int) -> float:
    """Return the bytes of recurrent states that a step reads and writes for each row.

    Recurrent layers are those whose cache has tiles (`RecurrentMixer`), and those with a state
    beside their cache. They also read the cached tokens of the last tile, which are few beside the
    state.
    """
    num_bytes = 0.0
    for layer in spec.layers:
        mixer = layer.mixer
        tensors = mixer.tiled_state(tp) if mixer.rule.tile is None else mixer.cache(tp)
        states = [tensor for tensor in tensors if tensor.per_tile]
        num_bytes += STATE_BYTES * sum(state.heads * state.width for state in states)
    return num_bytes


def _is_8bit(num_bytes: float, num_weights: int) -> bool:
    """Return whether weights take 1 byte rather than 2, on average (4-bit weights take less)."""
    return num_bytes < 1.5 * num_weights


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
        """Create the model of step times.

        Args:
            link: the network between machines.
            per_node: devices of a machine.
            zipf: see `ExpertShares`.
            tables: measured times of kernels.
        """
        parallel = config.parallel
        self.spec = spec
        self.device = device
        self.link = link
        self.dbo = parallel.dbo != "off"  # whether steps may use dual-batch overlap
        self.tp = parallel.tp
        self.num_ranks = parallel.num_ranks
        # The number of ranks over which the experts are sharded, in all and on one machine.
        self.ep = self.num_ranks if parallel.ep == "on" and spec.moe else 1
        self.ep_per_node = min(per_node, self.ep)
        self.weights: RankWeights = rank_weights(spec, config)
        self.itemsize = 4 if spec.dtype == "float32" else 2
        self.dense_8bit = bool(spec.stored) and _is_8bit(
            self.weights.dense_bytes, self.weights.dense_params
        )
        self.expert_8bit = any(stored.kind == "fp8" for stored in spec.stored) and _is_8bit(
            self.weights.expert_bytes, self.weights.expert_params
        )
        self._set_rates(device)
        self._set_bytes(config)
        self._set_tables(tables or KernelTables({}))
        self.expert_shares: ExpertShares | None = None
        if spec.moe is not None:
            self.expert_shares = ExpertShares(
                num_experts=spec.num_experts,
                top_k=spec.experts_per_token,
                num_ranks=self.ep,
                num_redundant=parallel.redundant_experts if self.ep > 1 else 0,
                zipf=zipf,
            )

    def _set_rates(self, device: Device) -> None:
        """Set the bandwidth and the operations per second that kernels reach."""
        self.read_bytes_per_s = device.read_share * device.bytes_per_s
        self.head_flops = device.dense_share * device.flops
        self.dense_flops = device.dense_share * (
            device.flops_8bit if self.dense_8bit else device.flops
        )
        self.expert_flops = (
            device.expert_8bit_share * device.flops_8bit
            if self.expert_8bit
            else device.expert_share * device.flops
        )
        self.attention_flops = device.attention_share * device.flops

    def _set_bytes(self, config: Config) -> None:
        """Set the bytes per token, per row of an expert, and per request."""
        spec = self.spec
        # A GEMM reads its inputs and writes its outputs. One elementwise kernel before it reads and
        # writes the inputs: in all 3 times the inputs.
        elements = sum(3 * inputs + outputs for outputs, inputs in spec.products()) / self.tp
        self.activation_bytes = elements * self.itemsize  # per token
        # Elements of a row, with D for the hidden size and I for the expert size: dispatch reads
        # and writes D, the first GEMM reads D and writes 2 I, the activation function reads 2 I and
        # writes I, the second GEMM reads I and writes D, and combine reads D.
        expert_elements = 5 * spec.hidden_size + 6 * spec.expert_size
        self.expert_activation_bytes = expert_elements * self.itemsize  # per row of an expert
        # Bytes of a token's activation that an all-to-all sends
        self.dispatch_bytes = spec.hidden_size * (
            FP8_ELEMENT_BYTES if self.expert_8bit else self.itemsize
        )
        self.combine_bytes = spec.hidden_size * self.itemsize
        self.state_bytes = _state_bytes(spec, self.tp)  # per request
        self.kv_itemsize = 1 if config.cache.kv_cache_dtype == "int8" else self.itemsize

    def _set_tables(self, tables: KernelTables) -> None:
        """Set the attention layers, and the times that the tables have."""
        spec = self.spec
        weights = self.weights
        costs = _attention_costs(spec, self.tp, self.kv_itemsize)
        self.windows: Windows = tuple(dict.fromkeys(cost.window for cost in costs)) or (None,)
        self.attention_layers = [
            AttentionLayers(
                window_index=self.windows.index(cost.window),
                num_layers=num_layers,
                bytes_per_position=cost.bytes_per_position,
                operations=cost.operations,
                times=None if cost.heads is None else tables.attention.get(cost.heads),
            )
            for cost, num_layers in costs.items()
        ]
        is_16bit = self.itemsize == 2
        expert_dtype = ""  # in the tables; "" if they do not have it
        if self.expert_8bit:
            expert_dtype = "fp8_block"
        elif is_16bit and weights.expert_bytes / max(1, weights.expert_params) == 2:
            expert_dtype = "bfloat16"
        expert_key = (
            expert_dtype,
            spec.hidden_size,
            spec.expert_size,
            spec.num_experts,
            spec.experts_per_token,
        )
        self.expert_times = tables.experts.get(expert_key) if self.ep == 1 else None
        dense_shapes: list[tuple[float, float]] = []
        if is_16bit and not _is_8bit(weights.dense_bytes, weights.dense_params):
            dense_shapes = [(outputs / self.tp, inputs) for outputs, inputs in spec.products()]
        self.dense_times = tables.dense(dense_shapes)
        vocab_size = weights.head_params / spec.hidden_size  # of one rank
        self.head_times = tables.dense([(vocab_size, spec.hidden_size)] if is_16bit else [])
        is_measured = {
            "experts": self.expert_times is not None,
            "dense layers": self.dense_times is not None,
            "LM head": self.head_times is not None,
            "attention": any(layers.times is not None for layers in self.attention_layers),
        }
        self.measured = [name for name, measured in is_measured.items() if measured]

    def seconds(self, shapes: Sequence[Shape]) -> float:
        """Return the time of a step: the sum of its terms."""
        return sum(self.terms(shapes).values())

    def host_seconds(self, shape: Shape) -> float:
        """Return the host's time, which grows with the number of rows."""
        return self.device.host_s + self.device.host_row_s * shape.num_rows

    def terms(self, shapes: Sequence[Shape]) -> dict[str, float]:
        """Return the seconds of each part of a step.

        With dual-batch overlap, the step uses two micro-batches if that is faster.
        """
        whole = self._time_computation(shapes, num_ubatches=1)
        whole["all2all"] = self._time_all2all(shapes, num_ubatches=1)
        if not self.dbo or self.ep == 1 or max(shape.num_tokens for shape in shapes) < 2:
            return whole
        halves = self._time_computation(shapes, num_ubatches=2)
        all2all_s = self._time_all2all(shapes, num_ubatches=2)
        # The all-to-all of one half overlaps with the computation of the other. The first and the
        # last all-to-all do not overlap. Each MoE layer has two, dispatch and combine.
        compute_s = sum(halves.values()) - halves["launch"]
        exposed_s = min(compute_s, all2all_s) / max(1, 2 * self.weights.num_moe_layers)
        halves["all2all"] = max(0.0, all2all_s - compute_s) + exposed_s
        is_faster = sum(halves.values()) < (1 - MIN_DBO_SAVING) * sum(whole.values())
        return halves if is_faster else whole

    def _time_computation(self, shapes: Sequence[Shape], num_ubatches: int) -> dict[str, float]:
        """Return the seconds of each part of a step except the all-to-all."""
        weights = self.weights
        num_tokens = max(shape.num_tokens for shape in shapes)
        num_rows = max(shape.num_rows for shape in shapes)
        num_samples = max(shape.num_samples for shape in shapes)
        num_busy = min(num_ubatches, num_tokens)  # micro-batches that have tokens
        dense_s = num_busy * self._time_gemms(
            self.dense_times,
            num_bytes=weights.dense_bytes,
            num_weights=weights.dense_params,
            num_rows=num_tokens / max(1, num_busy),
            flops=self.dense_flops,
        )
        attention_s = self._time_attention([shape for shape in shapes if shape.num_tokens])
        attention_s += num_rows * self.state_bytes / self.read_bytes_per_s
        expert_rows = self._expert_rows(shapes, num_ubatches)
        experts_s = self._time_experts(shapes, num_ubatches, expert_rows)
        head_s = 0.0
        if num_samples:
            head_s = self._time_gemms(
                self.head_times,
                num_bytes=weights.head_bytes,
                num_weights=weights.head_params,
                num_rows=num_samples,
                flops=self.head_flops,
            )
        activation_bytes = num_tokens * self.activation_bytes
        if self.expert_times is None:  # measured times include the copies
            num_calls = num_ubatches * weights.num_moe_layers
            activation_bytes += expert_rows * num_calls * self.expert_activation_bytes
        launch_s = num_ubatches * len(self.spec.layers) * self.device.launch_s
        launch_s += SYNC_S if self.num_ranks > self.tp else 0.0
        kernels = {
            "dense layers": dense_s,
            "attention": attention_s,
            "experts": experts_s,
            "LM head": head_s,
            "between products": activation_bytes / self.read_bytes_per_s,
            "tp gathers": self._time_gathers(num_tokens, num_ubatches),
        }
        terms = {name: float(seconds) / self.device.in_situ for name, seconds in kernels.items()}
        terms["launch"] = launch_s  # not of kernels, so `in_situ` does not apply
        return terms

    def _tokens_for_experts(self, shapes: Sequence[Shape], num_ubatches: int) -> float:
        """Return the tokens of a micro-batch whose experts may be on a rank.

        With EP, these are the tokens of all engines. Otherwise each engine computes its own.
        """
        num_tokens = [shape.num_tokens for shape in shapes]
        return (sum(num_tokens) if self.ep > 1 else max(num_tokens)) / num_ubatches

    def _expert_rows(self, shapes: Sequence[Shape], num_ubatches: int) -> float:
        """Return the rows that the experts of the busiest rank get in a layer of a micro-batch."""
        if self.expert_shares is None:
            return 0.0
        num_rows = self._tokens_for_experts(shapes, num_ubatches) * self.spec.experts_per_token
        return num_rows / self.ep * self.expert_shares.imbalance

    def _time_experts(self, shapes: Sequence[Shape], num_ubatches: int, num_rows: float) -> float:
        """Return the seconds of the experts. num_rows: from `_expert_rows`."""
        if self.expert_shares is None:
            return 0.0
        weights = self.weights
        if self.expert_times is not None:
            num_tokens = max(shape.num_tokens for shape in shapes)
            layer_s = self.expert_times.seconds(num_tokens / num_ubatches)
        else:
            num_tokens_seen = self._tokens_for_experts(shapes, num_ubatches)
            num_used = self.expert_shares.num_used(num_tokens_seen)
            layer_s = self._time_roofline(
                num_bytes=num_used * weights.expert_bytes,
                operations=2 * num_rows * weights.expert_params,  # a multiply and an add
                flops=self.expert_flops,
            )
        return float(num_ubatches * weights.num_moe_layers * layer_s)

    def _time_gathers(self, num_tokens: int, num_ubatches: int) -> float:
        """Return the seconds of the tensor-parallel gathers: two per layer."""
        if self.tp == 1:
            return 0.0
        peer = self.device.peer
        # A rank receives the other ranks' parts of the activations.
        num_bytes = num_tokens * self.spec.hidden_size * self.itemsize * (self.tp - 1) / self.tp
        # A gather is assumed to have half the latency of an all-to-all message.
        gather_s = num_ubatches * peer.latency_s / 2 + num_bytes / peer.gather_bytes_per_s
        return 2 * len(self.spec.layers) * gather_s

    def _time_gemms(
        self,
        times: Times | None,
        *,
        num_bytes: float,
        num_weights: float,
        num_rows: float,
        flops: float,
    ) -> float:
        """Return the seconds of GEMMs, measured or estimated."""
        if times is not None:
            return times.seconds(num_rows)
        operations = 2 * num_weights * num_rows  # a multiply and an add
        return float(self._time_roofline(num_bytes, operations, flops))

    def _time_roofline(self, num_bytes: Any, operations: Any, flops: float) -> Any:
        """Return the seconds of a kernel, or of an array of kernels.

        The longer one of reading and computing hides a part of the shorter one: the share
        `Device.overlap`.
        """
        reading_s = num_bytes / self.read_bytes_per_s
        computing_s = operations / flops
        longer_s = np.maximum(reading_s, computing_s)
        shorter_s = np.minimum(reading_s, computing_s)
        return longer_s + (1 - self.device.overlap) * shorter_s

    def _time_attention(self, shapes: Sequence[Shape]) -> float:
        """Return the seconds of the slowest engine's attention."""
        if not shapes:
            return 0.0
        if any(layers.times is not None for layers in self.attention_layers):
            # Measured times are not vectorized. Compute them only for the engines with the most
            # reads and the most pairs.
            most_reads = max(shapes, key=lambda shape: shape.num_reads)
            most_pairs = max(shapes, key=lambda shape: shape.num_pairs)
            shapes = [most_reads, most_pairs]
        # One row for each window, one column for each engine
        all_reads = np.array([shape.num_reads for shape in shapes]).T
        all_pairs = np.array([shape.num_pairs for shape in shapes]).T
        total_s = np.zeros(len(shapes))
        for layers in self.attention_layers:
            reads = all_reads[layers.window_index]
            pairs = all_pairs[layers.window_index]
            if layers.times is None:
                layer_s = self._time_roofline(
                    num_bytes=reads * layers.bytes_per_position,
                    operations=pairs * layers.operations,
                    flops=self.attention_flops,
                )
            else:
                layer_s = np.array(
                    [
                        layers.times.seconds(
                            num_rows=shape.num_rows,
                            num_prompt=shape.num_tokens - shape.num_rows,
                            num_reads=num_reads,
                            num_pairs=num_pairs,
                        )
                        for shape, num_reads, num_pairs in zip(shapes, reads, pairs, strict=True)
                    ]
                )
            total_s += layers.num_layers * layer_s
        return float(total_s.max())

    def _time_all2all(self, shapes: Sequence[Shape], num_ubatches: int) -> float:
        """Return the seconds of dispatch and combine in all layers.

        Activations are sent to the rank of each expert (low latency), or once to each machine that
        has some of the experts (high throughput), whichever is faster.
        """
        if self.ep == 1:
            return 0.0
        num_tokens = max(shape.num_tokens for shape in shapes) / self.tp
        top_k = self.spec.experts_per_token
        peer = self.device.peer  # to the ranks of the same machine
        link = self.link  # to other machines
        num_nodes = -(-self.ep // self.ep_per_node)
        far_share = 1 - self.ep_per_node / self.ep  # of the ranks, on other machines
        # The expected number of other machines that a token is sent to. Each of its experts is on
        # any of the machines with equal probability: none of them is on a given machine with the
        # probability (1 - 1 / num_nodes) ** top_k.
        other_nodes = 0.0
        if num_nodes > 1:
            other_nodes = num_nodes * (1 - (1 - 1 / num_nodes) ** top_k) * far_share
        total_s = 0.0
        latency_s = max(peer.latency_s, link.latency_s) if far_share else peer.latency_s
        # Low latency: seconds per byte that is sent to an expert.
        s_per_sent_byte = far_share / link.bytes_per_s + (1 - far_share) / peer.bytes_per_s
        # High throughput: seconds per byte of a token. `link` carries a copy for each machine,
        # `peer` a copy for each expert, and both send at the same time.
        s_per_token_byte = max(other_nodes / link.bytes_per_s, top_k / peer.bytes_per_s)
        for row_bytes in (self.dispatch_bytes, self.combine_bytes):
            sent_bytes = num_tokens * top_k * row_bytes
            low_latency_s = num_ubatches * latency_s + sent_bytes * s_per_sent_byte
            token_bytes = num_tokens * row_bytes
            high_throughput_s = num_ubatches * FAR_LATENCY_S + token_bytes * s_per_token_byte
            total_s += min(low_latency_s, high_throughput_s) if far_share else low_latency_s
        return self.weights.num_moe_layers * total_s / self.device.in_situ
