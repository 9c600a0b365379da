"""Native parts of moeserve (csrc/). Addresses are Tensor.data_ptr(); calls that copy or wait release the GIL."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

class Element:
    float32: Element
    bfloat16: Element
    float16: Element

class Isa:
    baseline: Isa
    avx2: Isa
    avx512: Isa
    @property
    def supported(self) -> bool: ...

class Type:
    float32: Type
    bfloat16: Type
    float16: Type
    int8: Type
    int4: Type
    fp8: Type

def best_isa() -> Isa: ...
def weighted_sum(
    rows: Sequence[int], weights: int, tokens: int, top_k: int, dim: int, element: Element, out: int, isa: Isa
) -> None: ...
def rms_norm(type: Type, rows: int, width: int, x: int, stride: int, weight: int, eps: float, out: int, /) -> None: ...
def add_rms_norm(
    type: Type,
    rows: int,
    width: int,
    x: int,
    stride: int,
    residual: int,
    residual_stride: int,
    weight: int,
    eps: float,
    out: int,
    total: int,
    /,
) -> None: ...
def silu_mul(type: Type, rows: int, width: int, x: int, stride: int, out: int, /) -> None: ...
def sigmoid_gate(type: Type, rows: int, x: int, stride: int, out: int, /) -> None: ...
def qk_norm_rope_cache(
    type: Type,
    rows: int,
    real: int,
    heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int,
    qkv: int,
    stride: int,
    normed: int,
    norms: int,
    norm_last: bool,
    norm_values: bool,
    eps: float,
    clip: float,
    cos: int,
    sin: int,
    scale: float,
    slot_mapping: int,
    k: int,
    v: int,
    kv_type: Type,
    q: int,
    /,
) -> None: ...
def latent_rope_cache(
    type: Type,
    rows: int,
    real: int,
    heads: int,
    nope: int,
    rope: int,
    rank: int,
    q: int,
    q_stride: int,
    kv: int,
    kv_stride: int,
    norm: int,
    eps: float,
    cos: int,
    sin: int,
    scale: float,
    slot_mapping: int,
    cache: int,
    q_nope: int,
    latent_q: int,
    /,
) -> None: ...
def route(
    type: Type,
    rows: int,
    experts: int,
    top_k: int,
    logits: int,
    stride: int,
    selected: bool,
    renormalize: bool,
    ids: int,
    weights: int,
    /,
) -> None: ...
def group_pairs(ids: int, num_pairs: int, counts: NDArray[np.int64], order: int, place: int, /) -> int: ...
def copy_rows(
    from_: int, from_rows: int, index: int, divisor: int, count: int, row_bytes: int, out: int, /
) -> None: ...
def sum_pairs(
    element: Element, tokens: int, top_k: int, dim: int, y: int, place: int, weights: int, out: int, /
) -> None: ...
def argmax(rows: int, width: int, x: int, stride: int, peak: int, column: int, /) -> None: ...
def race(
    rows: int, width: int, x: int, stride: int, low: int, high: int, token_hash: int, blocks: int, column: int, /
) -> None: ...

class Region(Buffer):
    def __init__(self, bytes: int) -> None: ...
    @property
    def fd(self) -> int: ...

class AttentionPlan:
    def __init__(
        self,
        tables: int,
        table_width: int,
        block_size: int,
        window: int | None,
        section: int | None,
        starts: NDArray[np.int32],
        offsets: NDArray[np.int32],
        heads: int,
        kv_heads: int,
        dim: int,
        v_dim: int,
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_pieces(self) -> int: ...
    def run(
        self,
        q: int,
        q_stride: int,
        q_type: Type,
        k: int,
        k_bytes: int,
        v: int,
        v_bytes: int,
        kv_type: Type,
        out: int,
        num_rows: int,
        soft_cap: float,
        sinks: int,
    ) -> None: ...
    def reference(
        self,
        request: int,
        token: int,
        position: int,
        q: int,
        q_stride: int,
        k: int,
        k_bytes: int,
        v: int,
        v_bytes: int,
        kv_type: Type,
        out: int,
        soft_cap: float,
        sinks: int,
    ) -> None: ...

class Matrix:
    def __init__(self, packing: Packing, weights: int, bias: int) -> None: ...
    @property
    def columns(self) -> int: ...

class AttentionBlock:
    def __init__(
        self,
        type: Type,
        qkv: Matrix,
        out: Matrix | None,
        heads: int,
        kv_heads: int,
        dim: int,
        v_dim: int,
        norms: int,
        norm_last: bool,
        norm_values: bool,
        eps: float,
        clip: float,
        scale: float,
        sinks: int,
        soft_cap: float,
    ) -> None: ...
    def run(
        self,
        plan: AttentionPlan,
        x: int,
        stride: int,
        rows: int,
        cos: int,
        sin: int,
        slot_mapping: int,
        k: int,
        v: int,
        kv_type: Type,
        y: int,
        /,
    ) -> None: ...

class ExpertsBlock:
    def __init__(self, type: Type, router: Matrix, top_k: int, selected: bool, renormalize: bool) -> None: ...
    def run(
        self,
        gate_up: Packing,
        down: Packing,
        weights: int,
        expert_bytes: int,
        counts: NDArray[np.int64],
        x: int,
        rows: int,
        y: int,
        /,
    ) -> None: ...

class Channel:
    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        ubatch: int,
        sockets: Sequence[int],
        own: Region,
        regions: Sequence[int],
    ) -> None: ...
    def leave(self) -> None: ...

class Shape:
    def __init__(
        self, *, experts_per_rank: int, max_tokens: int, top_k: int, x_row_bytes: int, y_row_bytes: int
    ) -> None: ...

class Exchange:
    TURNS: Final[int]
    def __init__(self, channel: Channel, shape: Shape) -> None: ...
    @staticmethod
    def region_bytes(num_ranks: int, shape: Shape) -> int: ...
    @property
    def y_capacity(self) -> int: ...
    def y_offset(self, turn: int) -> int: ...
    def arrived_ns(self, turn: int) -> int: ...
    def dispatch(self, ids: int, tokens: int, top_k: int, x: int) -> int: ...
    def await_rows(
        self, turn: int, timeout_s: float, counts_and_ends: NDArray[np.int64], out: int, room: int
    ) -> int: ...
    def take_rows(self, turn: int, out: int) -> None: ...
    def combine(self, turn: int) -> None: ...
    def await_sums(self, turn: int, timeout_s: float, weights: int, element: Element, dim: int, out: int) -> None: ...
    def leave(self) -> None: ...

class Gather:
    def __init__(self, channel: Channel, part_bytes: int) -> None: ...
    @staticmethod
    def region_bytes(part_bytes: int) -> int: ...
    def columns(self, x: int, rows: int, row_bytes: int, out: int, timeout_s: float) -> None: ...
    def rows(self, x: int, counts: Sequence[int], row_bytes: int, out: int, timeout_s: float) -> None: ...
    def leave(self) -> None: ...

class Packing:
    def __init__(self, type: Type, depth: int, columns: int, group: int = 0, zero_points: bool = False) -> None: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def bytes(self) -> int: ...

def pack(
    packing: Packing,
    weights: int,
    stride: int,
    scales: int,
    zero_points: int,
    to: int,
    step: int,
    all_threads: bool,
) -> None: ...
def linear(type: Type, packing: Packing, weights: int, bias: int, x: int, x_stride: int, rows: int, y: int) -> None: ...
def head_products(
    type: Type,
    packing: Packing,
    weights: int,
    heads: int,
    x: int,
    x_stride: int,
    x_step: int,
    rows: int,
    y: int,
    y_stride: int,
    y_step: int,
) -> None: ...
def experts(
    type: Type,
    gate_up: Packing,
    down: Packing,
    weights: int,
    expert_bytes: int,
    counts: NDArray[np.int64],
    x: int,
    x_stride: int,
    y: int,
    y_stride: int,
) -> None: ...
def advise_huge_pages(address: int, bytes: int) -> None: ...
def checksum(address: int, bytes: int) -> int: ...
def product_reference(x: int, rows: int, depth: int, w: int, columns: int, y: int) -> None: ...
