"""Causal convolutions and gated linear recurrences (gated delta rule) over paged states.

moeserve/ops/recurrence.py is the specification. A sequence is divided into tiles of tokens. The
cache has the state at the beginning of each tile (its border), and the inputs of the tile's tokens,
from which the state at any later token is computed. Tiles are not planned on the host: programs
compute a token's position, and so its tile, from offsets and first positions on the device. So
both kernels can be recorded in CUDA graphs.

Sizes: T tokens (padding included), R rows (requests), N blocks per row, C channels, K inputs of a
convolution, G heads of queries and keys, H heads of values, d and v their widths, D number of
decays per head: 1 or d.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # state elements per program, which take 32 registers per thread
LEAST = 16  # smallest dimension of an operand of `tl.dot`
CHANNELS = 1024  # per program of the convolution
WARPS = 4


@dataclass(frozen=True, slots=True)
class TileMetadata:
    """The rows of one step, for all recurrent layers of one KV group.

    Row i owns tokens offsets_R1[i] .. offsets_R1[i+1]-1, which begin at position starts_R[i].
    """

    blocks_RN: Tensor  # block tables, padded with 0
    starts_R: Tensor  # int32
    offsets_R1: Tensor  # int32
    block_size: int  # tokens; a multiple of `tile`
    tile: int  # tokens

    def __post_init__(self) -> None:
        assert self.block_size % self.tile == 0, self
        assert self.blocks_RN.stride(1) == 1, self.blocks_RN.stride()
        assert self.offsets_R1.shape == (len(self.starts_R) + 1,), (
            self.offsets_R1.shape,
            self.starts_R.shape,
        )

    def check(self, caches: tuple[Tensor, ...], *shapes: tuple[int, ...]) -> None:
        """Assert that each cache is fp32 and has this shape after the block dimension."""
        for cache, shape in zip(caches, shapes, strict=True):
            assert cache.shape[1:] == shape, (cache.shape, shape)
            assert (cache.dtype, cache.is_contiguous()) == (torch.float32, True), (
                cache.dtype,
                cache.stride(),
            )


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def causal_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, rows_ptr, borders_ptr, out_ptr, blocks_ptr, starts_ptr,
    offsets_ptr,
    num_rows, x_stride, table_stride, C: tl.constexpr, K: tl.constexpr, SILU: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_C channels of one token.

    The inputs are new tokens of the step, or cached ones before it.
    """
    TILES: tl.constexpr = BLOCK_SIZE // TILE
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < C
    rows = tl.arange(0, BLOCK_R)
    has_ended = (rows < num_rows) & (
        tl.load(offsets_ptr + 1 + rows, mask=rows < num_rows, other=0) <= token
    )
    row = tl.sum(has_ended.to(tl.int32), 0).to(tl.int64)
    y = tl.zeros((BLOCK_C,), tl.float32)
    if row < num_rows:
        start = tl.load(starts_ptr + row)
        position = start + (token - tl.load(offsets_ptr + row)).to(tl.int32)
        tile = position // TILE
        cached_tile = tl.maximum(start - 1, 0) // TILE  # the tile of the last token that is cached
        table_ptr = blocks_ptr + row * table_stride
        block = tl.load(table_ptr + tile // TILES).to(tl.int64)
        cached_block = tl.load(table_ptr + cached_tile // TILES).to(tl.int64)
        own_border_ptrs = borders_ptr + (block * TILES + tile % TILES) * (K - 1) * C + columns
        border_ptrs = (
            borders_ptr + (cached_block * TILES + cached_tile % TILES) * (K - 1) * C + columns
        )
        kept = columns < tl.where(block > 0, C, 0)
        first = columns < tl.where((position % TILE == 0) & (block > 0), C, 0)
        for j in tl.static_range(K):
            back = K - 1 - j
            input_position = position - back
            in_tile = input_position - cached_tile * TILE
            is_new = input_position >= start
            in_rows = (input_position < start) & (in_tile >= 0)
            in_border = (input_position < start) & (in_tile < 0) & (input_position >= 0)
            new_ptrs = x_ptr + (token - back) * x_stride + columns
            row_ptrs = (
                rows_ptr + (cached_block * BLOCK_SIZE + input_position % BLOCK_SIZE) * C + columns
            )
            new = tl.load(new_ptrs, mask=columns < tl.where(is_new, C, 0), other=0.0)
            row_x = tl.load(row_ptrs, mask=columns < tl.where(in_rows, C, 0), other=0.0)
            border_x = tl.load(
                border_ptrs + (in_tile + K - 1) * C,
                mask=columns < tl.where(in_border, C, 0),
                other=0.0,
            )
            x = tl.where(is_new, new.to(tl.float32), tl.where(in_rows, row_x, border_x))
            y += tl.load(weight_ptr + columns * K + j, mask=inside, other=0.0) * x
            if j < K - 1:
                tl.store(own_border_ptrs + j * C, x, mask=first)
            else:
                own_row_ptrs = rows_ptr + (block * BLOCK_SIZE + position % BLOCK_SIZE) * C + columns
                tl.store(own_row_ptrs, x, mask=kept)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + columns, mask=inside, other=0.0)
        if SILU:
            y = y / (1 + tl.exp(-y))
    tl.store(out_ptr + token * C + columns, y, mask=inside)


def causal_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    silu: bool,
    caches: tuple[Tensor, ...],
    plan: TileMetadata,
) -> Tensor:
    """Return y[t, c] = sum over j of weight[c, j] x[t - K + 1 + j, c] + bias[c] in fp32.

    silu: apply SiLU to the result. Inputs before a request's first token are 0. Padding tokens
    become 0. Rows of x may be strided.

    caches: fp32, updated in place: the inputs of the tokens [blocks, block size, 1, C], and the
        inputs of the K - 1 tokens before each tile [blocks, tiles, K - 1, C].

    Example: x [1, 2, 3], weight [10, 1], bias 5 -> [6, 17, 28]
    """
    tokens, channels = x_TC.shape
    num_inputs = weight_CK.shape[1]
    size = plan.block_size
    plan.check(caches, (size, 1, channels), (size // plan.tile, num_inputs - 1, channels))
    assert num_inputs <= plan.tile, (num_inputs, plan.tile)
    assert x_TC.stride(1) == 1, x_TC.stride()
    assert weight_CK.is_contiguous(), weight_CK.stride()
    out_TC = x_TC.new_empty((tokens, channels), dtype=torch.float32)
    block_c = min(CHANNELS, triton.next_power_of_2(channels))
    if tokens:
        causal_conv_kernel[(tokens, triton.cdiv(channels, block_c))](
            x_TC, weight_CK, bias_C, *caches, out_TC, plan.blocks_RN, plan.starts_R,
            plan.offsets_R1,
            len(plan.starts_R), x_TC.stride(0), plan.blocks_RN.stride(0),
            C=channels, K=num_inputs, SILU=silu, BLOCK_SIZE=size, TILE=plan.tile,
            BLOCK_R=max(256, triton.next_power_of_2(len(plan.starts_R))), BLOCK_C=block_c,
            num_warps=WARPS,
        )  # fmt: skip
    return out_TC


@triton.jit
def _cached_rows(
    k_ptrs,
    s_ptrs,
    u_ptrs,
    there,
    d,
    decays,
    values,
    D: tl.constexpr,
    DECAYS: tl.constexpr,
    V: tl.constexpr,
):
    """Load k [TILE, d], s [TILE, D] and u^T [v, TILE] of a tile's tokens; missing ones are zero."""
    k = tl.load(k_ptrs[:, None] + d, mask=there[:, None] & (d < D), other=0.0)
    s = tl.load(s_ptrs[:, None] + decays, mask=there[:, None] & (decays < DECAYS), other=0.0)
    u = tl.load(
        u_ptrs[None, :] + values[:, None], mask=there[None, :] & (values < V)[:, None], other=0.0
    )
    return k, s, u


@triton.jit
def _read(x_t, border_decay, weights, state, u):
    """Return what a query or key reads from the border's state and the tile's earlier tokens."""
    return tl.sum(state * (x_t * border_decay), 1) + tl.sum(
        u * tl.sum(x_t * weights, 1)[None, :], 1
    )


@triton.jit
def _state_at_border(k, s, u, log_decay_sum, state):
    """Return the state S^T [v, d] after all tokens of a tile."""
    return tl.dot(
        u,
        k * tl.exp(log_decay_sum - s),
        state * tl.exp(log_decay_sum),
        input_precision="ieee",
    )


@triton.jit
def _store_shared_rows(
    k_rows_ptr, s_rows_ptr, slot, head, k_t, s_t, d, decays,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """Store the rows of a token that several programs have: s of its head, k of its key head."""
    tl.store(s_rows_ptr + (slot * HEADS + head) * DECAYS + decays, s_t, mask=decays < DECAYS)
    if head % (HEADS // KEY_HEADS) == 0:
        key_head = head // (HEADS // KEY_HEADS)
        tl.store(k_rows_ptr + (slot * KEY_HEADS + key_head) * D + d, k_t, mask=d < D)


@triton.jit(do_not_specialize=["table_stride"])
def recurrence_kernel(
    q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, states_ptr, k_rows_ptr, u_rows_ptr, s_rows_ptr,
    out_ptr, blocks_ptr, starts_ptr, offsets_ptr, q_stride, k_stride, v_stride, decay_stride,
    beta_stride, table_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    DECAYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_V values of one head of one row, token by token.

    The state S^T [v, d] at the border, and k [TILE, d], u^T [v, TILE] and s [TILE, D] of the
    present tile's tokens stay in registers. s: the sum of log decays from the border to a token.
    """
    TILES: tl.constexpr = BLOCK_SIZE // TILE
    PARTS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    key_head = head // (HEADS // KEY_HEADS)
    row = tl.program_id(1).to(tl.int64)
    start = tl.load(starts_ptr + row)
    first_token = tl.load(offsets_ptr + row).to(tl.int64)
    end = start + (tl.load(offsets_ptr + row + 1) - first_token).to(tl.int32)
    table_ptr = blocks_ptr + row * table_stride
    d = tl.arange(0, BLOCK_D)[None, :]
    decays = tl.arange(0, BLOCK_S)[None, :]
    rows = tl.arange(0, TILE)
    values = part * BLOCK_V + tl.arange(0, BLOCK_V)
    # The tile of the last cached token: the tile of the first new token, or the one before it.
    cached_tile = tl.maximum(start - 1, 0) // TILE
    inside_v = values < V
    state_offsets = head * D * V + d * V + values[:, None]
    count = tl.where(start < end, start - cached_tile * TILE, 0)
    block = tl.load(table_ptr + cached_tile // TILES).to(tl.int64)
    slots = block * BLOCK_SIZE + cached_tile % TILES * TILE + rows
    k, s, u = _cached_rows(
        k_rows_ptr + (slots * KEY_HEADS + key_head) * D,
        s_rows_ptr + (slots * HEADS + head) * DECAYS,
        u_rows_ptr + (slots * HEADS + head) * V, rows < count, d, decays, values, D, DECAYS, V,
    )  # fmt: skip
    # The sum s of the last token before the present one
    log_decay_sum = tl.sum(tl.where((rows == count - 1)[:, None], s, 0.0), 0)[None, :]
    cached_state_ptrs = (
        states_ptr + (block * TILES + cached_tile % TILES) * (HEADS * D * V) + state_offsets
    )
    state = tl.load(
        cached_state_ptrs, mask=inside_v[:, None] & (d < tl.where(count > 0, D, 0)), other=0.0
    )

    for tile in range(start // TILE, (end + TILE - 1) // TILE):
        border = tile * TILE
        block = tl.load(table_ptr + tile // TILES).to(tl.int64)
        if border >= start:
            state = _state_at_border(k, s, u, log_decay_sum, state)
            if block > 0:
                border_state_ptrs = (
                    states_ptr + (block * TILES + tile % TILES) * (HEADS * D * V) + state_offsets
                )
                tl.store(border_state_ptrs, state, mask=inside_v[:, None] & (d < D))
            k = tl.zeros_like(k)
            s = tl.zeros_like(s)
            u = tl.zeros_like(u)
            log_decay_sum = tl.zeros_like(log_decay_sum)
        for position in range(tl.maximum(border, start), tl.minimum(border + TILE, end)):
            token = first_token + (position - start)
            q_t = tl.load(q_ptr + token * q_stride + key_head * D + d, mask=d < D, other=0.0)
            k_t = tl.load(k_ptr + token * k_stride + key_head * D + d, mask=d < D, other=0.0)
            u_t = tl.load(v_ptr + token * v_stride + head * V + values, mask=inside_v, other=0.0)
            decay_ptrs = decay_ptr + token * decay_stride + head * DECAYS + decays
            log_decay_sum += tl.load(decay_ptrs, mask=decays < DECAYS, other=0.0)
            border_decay = tl.exp(log_decay_sum)
            # Zero for later tokens of the tile, whose k is zero
            weights = tl.exp(log_decay_sum - s) * k
            if beta_ptr is not None:
                u_t = tl.load(beta_ptr + token * beta_stride + head) * (
                    u_t - _read(k_t, border_decay, weights, state, u)
                )
            o_t = _read(q_t, border_decay, weights, state, u) + tl.sum(q_t * k_t) * u_t
            tl.store(out_ptr + (token * HEADS + head) * V + values, o_t, mask=inside_v)
            is_current = rows == position - border
            k = tl.where(is_current[:, None], k_t, k)
            s = tl.where(is_current[:, None], log_decay_sum, s)
            u = tl.where(is_current[None, :], u_t[:, None], u)
            if block > 0:
                slot = block * BLOCK_SIZE + position % BLOCK_SIZE
                tl.store(u_rows_ptr + (slot * HEADS + head) * V + values, u_t, mask=inside_v)
                if part == 0:
                    _store_shared_rows(
                        k_rows_ptr, s_rows_ptr, slot, head, k_t, log_decay_sum, d, decays,
                        KEY_HEADS, HEADS, D, DECAYS,
                    )  # fmt: skip


def block_sizes(dim: int, v_dim: int, decays: int) -> dict[str, int]:
    """Return the padded block sizes of a program's part of the state.

    They depend only on the model, because the result's bits depend on them.

    128, 128, 1 -> BLOCK_V 32, BLOCK_D 128
    """
    block_d = max(LEAST, triton.next_power_of_2(dim))
    block_v = max(LEAST, min(triton.next_power_of_2(v_dim), ELEMENTS // block_d))
    return {"BLOCK_D": block_d, "BLOCK_V": block_v, "BLOCK_S": 1 if decays == 1 else block_d}


def recurrence(
    q_TGd: Tensor,
    k_TGd: Tensor,
    v_THv: Tensor,
    log_decay_THD: Tensor,
    beta_TH: Tensor | None,
    caches: tuple[Tensor, ...],
    plan: TileMetadata,
) -> Tensor:
    """Return o [T, H, v] of the gated delta rule, or of the gated recurrence if beta_TH is None.

    All tensors are fp32. Tokens may be strided. Padding tokens become 0.

    caches: updated in place: the states at borders [blocks, tiles, H, d * v], and for each token
        k [blocks, block size, G, d], u [.., H, v] and the sum of log decays since the border
        [.., H, D].

    Example: d 1, v 1, q and k 1, v [3, 5], log decay ln 0.5, no beta -> [3, 0.5 * 3 + 5] = [3, 6.5]
    """
    _, keys, dim = q_TGd.shape
    tokens, heads, v_dim = v_THv.shape
    decays = log_decay_THD.shape[2]
    assert heads % keys == 0, (heads, keys)
    assert decays in (1, dim), (decays, dim)
    assert k_TGd.shape == q_TGd.shape, (k_TGd.shape, q_TGd.shape)
    size = plan.block_size
    plan.check(
        caches,
        (size // plan.tile, heads, dim * v_dim),
        (size, keys, dim),
        (size, heads, v_dim),
        (size, heads, decays),
    )
    for x, width in ((q_TGd, dim), (k_TGd, dim), (v_THv, v_dim), (log_decay_THD, decays)):
        assert x.stride()[1:] == (width, 1), (x.shape, x.stride())
        assert x.dtype == torch.float32, x.dtype
    assert beta_TH is None or beta_TH.stride(1) == 1, beta_TH
    out_THv = v_THv.new_zeros((tokens, heads, v_dim))
    blocks = block_sizes(dim, v_dim, decays)
    if tokens:
        recurrence_kernel[(heads * triton.cdiv(v_dim, blocks["BLOCK_V"]), len(plan.starts_R))](
            q_TGd, k_TGd, v_THv, log_decay_THD, beta_TH, *caches, out_THv,
            plan.blocks_RN, plan.starts_R, plan.offsets_R1,
            q_TGd.stride(0), k_TGd.stride(0), v_THv.stride(0), log_decay_THD.stride(0),
            0 if beta_TH is None else beta_TH.stride(0), plan.blocks_RN.stride(0),
            KEY_HEADS=keys, HEADS=heads, D=dim, V=v_dim, DECAYS=decays, BLOCK_SIZE=size,
            TILE=plan.tile,
            **blocks, num_warps=WARPS,
        )  # fmt: skip
    return out_THv
