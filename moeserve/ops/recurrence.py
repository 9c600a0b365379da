"""Causal convolutions and gated linear recurrences over paged states: the reference in plain torch.

Shapes: T tokens (including padding), C channels, K kernel size of a convolution, G heads of queries
and keys, H heads of values (H / G adjacent ones per head of queries), d and v their widths, D width
of decays: 1 (one per head) or d.

A recurrence has a state per head, S [d, v]. With the decay a_t = exp(log decay) of token t:

    S_t = diag(a_t) S_{t-1} + k_t u_t^T        o_t = S_t^T q_t
    u_t = v_t, or, with beta (the delta rule), beta_t (v_t - (diag(a_t) S_{t-1})^T k_t)

Positions are divided into tiles of TILE tokens. The cache has, for each tile, the state before it,
S_0, and for each of its tokens k, u, and the sum s of log decays since the start of the tile. So
one expression gives the results of a token, whichever tokens are in the same step, and even if a
step runs again:

    u_t = beta_t (v_t - S_0^T (k_t exp(s_t)) - sum over r < t of ((k_t exp(s_t - s_r)) . k_r) u_r)
    o_t =               S_0^T (q_t exp(s_t)) + sum over r <= t of ((q_t exp(s_t - s_r)) . k_r) u_r
    next S_0 = diag(exp(s_n)) S_0 + sum over r of (k_r exp(s_n - s_r)) u_r^T    n: the last token

with sums over r in ascending order, all in fp32. The first token of a tile computes its S_0 from
the tile before and writes it to its own block. Nothing else is written twice, so a step may run
again. Tiles with the null block are not cached: their state goes to the next tile in the same call
only.

Sources: Gated DeltaNet (arXiv 2412.06464), Mamba-2 (2405.21060), Kimi Linear (2510.26692),
Lightning Attention-2 (2401.04658).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.ops import elementwise
from moeserve.ops.inputs import GroupInputs, StepInputs
from moeserve.ops.rules import TILE

Caches = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """The tokens of a step in one tile of one request."""

    tokens: range  # their rows in the step
    first_index: int  # of the first of them in the tile
    block: int  # the block with the tile's cache
    index_in_block: int  # of the tile
    # (block, index in the block) of the previous tile; None: this is the first one of a request
    previous: tuple[int, int] | None
    follows_previous: bool  # in the plan, so the state of the previous tile is at hand

    @property
    def slots(self) -> slice:
        """The slots of the tile in its block."""
        start = self.index_in_block * TILE
        return slice(start, start + TILE)


@dataclass(frozen=True, slots=True)
class TilePlan:
    """The tiles of a step's tokens, request by request, in ascending order."""

    tiles: tuple[Tile, ...]
    num_tokens: int


def plan_tiles(group: GroupInputs, step: StepInputs) -> TilePlan:
    """Divide the tokens of a step into tiles. group: the KV group of the recurrent layers."""
    assert group.block_size % TILE == 0, group.block_size
    tiles: list[Tile] = []
    blocks = group.blocks_RN.tolist()
    per_block = group.block_size // TILE
    for row, start in enumerate(step.starts_R.tolist()):
        token = int(step.offsets_R1[row])
        end = int(step.offsets_R1[row + 1])
        position = start
        follows_previous = False
        while token < end:
            tile, first_index = divmod(position, TILE)
            count = min(TILE - first_index, end - token)
            block = blocks[row][tile // per_block]
            index_in_block = tile % per_block
            previous = None
            if tile:
                previous = blocks[row][(tile - 1) // per_block], (tile - 1) % per_block
            tokens = range(token, token + count)
            tiles.append(
                Tile(
                    tokens=tokens,
                    first_index=first_index,
                    block=block,
                    index_in_block=index_in_block,
                    previous=previous,
                    follows_previous=follows_previous,
                )
            )
            token += count
            position += count
            follows_previous = True
    return TilePlan(tuple(tiles), int(step.offsets_R1[-1]))


def causal_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    silu: bool,
    caches: Caches,
    plan: TilePlan,
) -> Tensor:
    """Return y[t, c] = sum over j of weight[c, j] x[t - K + 1 + j, c] + bias[c], fp32, or its SiLU.

    Inputs before the first token of a request are 0. Padding rows of the result are 0.

    weight_CK, bias_C: fp32.
    caches: inputs of a tile's tokens [blocks, block size, 1, C], and of the K - 1 tokens before the
        tile [blocks, tiles, K - 1, C].
    """
    rows, borders = caches
    num_before = weight_CK.shape[1] - 1
    out_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    inputs_nC = x_TC.new_empty((0, x_TC.shape[1]), dtype=torch.float32)
    for tile in plan.tiles:
        cached = rows[tile.block, tile.slots, 0]
        if tile.first_index:
            inputs_nC = torch.cat(
                (borders[tile.block, tile.index_in_block], cached[: tile.first_index])
            )
        else:
            if tile.previous is None:
                before = torch.zeros_like(borders[0, 0])
            elif tile.follows_previous:
                before = inputs_nC[-num_before:].clone()
            else:
                block, place = tile.previous
                before = rows[
                    block, (place + 1) * TILE - num_before : (place + 1) * TILE, 0
                ].clone()
            if tile.block:
                borders[tile.block, tile.index_in_block] = before
            inputs_nC = before
        new = x_TC[tile.tokens.start : tile.tokens.stop].float()
        if tile.block:
            cached[tile.first_index : tile.first_index + len(new)] = new
        inputs_nC = torch.cat((inputs_nC, new))
        for i, token in enumerate(tile.tokens, tile.first_index):
            y_C = torch.zeros_like(new[0])
            for j in range(num_before + 1):
                y_C = y_C + weight_CK[:, j] * inputs_nC[i + j]
            out_TC[token] = y_C if bias_C is None else y_C + bias_C
    return elementwise.silu(out_TC) if silu else out_TC


def recurrence(
    q_TGd: Tensor,
    k_TGd: Tensor,
    v_THv: Tensor,
    log_decay_THD: Tensor,
    beta_TH: Tensor | None,
    caches: Caches,
    plan: TilePlan,
) -> Tensor:
    """Return o [T, H, v] of the recurrence in the module's docstring. All tensors are fp32.

    Padding rows of the result are 0. caches: S_0 [blocks, tiles, H, d * v]; of a tile's tokens
    k [blocks, block size, G, d], u [.., H, v], s [.., H, D].
    """
    states, *row_caches = caches
    heads = v_THv.shape[1]
    widths = (q_TGd.shape[2], v_THv.shape[2])
    out_THv = torch.zeros_like(v_THv)
    state_Hdv = v_THv.new_zeros((heads, *widths))
    rows = _TokenRows()
    for tile in plan.tiles:
        cached_rows = [cache[tile.block, tile.slots] for cache in row_caches]
        if tile.first_index:
            state_Hdv = states[tile.block, tile.index_in_block].view(heads, *widths)
            rows = _TokenRows.of(cached_rows, tile.first_index)
        else:
            if tile.previous is None:
                state_Hdv = torch.zeros_like(state_Hdv)
            elif tile.follows_previous:
                state_Hdv = _next_state(state_Hdv, rows)
            else:
                block, place = tile.previous
                previous_rows = [
                    cache[block, place * TILE : place * TILE + TILE] for cache in row_caches
                ]
                state_Hdv = _next_state(
                    states[block, place].view(heads, *widths), _TokenRows.of(previous_rows, TILE)
                )
            if tile.block:
                states[tile.block, tile.index_in_block] = state_Hdv.flatten(1)
            rows = _TokenRows()
        for i, token in enumerate(tile.tokens, tile.first_index):
            beta_H = None if beta_TH is None else beta_TH[token]
            out_THv[token] = _compute_token(
                q_TGd[token],
                k_TGd[token],
                v_THv[token],
                log_decay_THD[token],
                beta_H,
                state_Hdv,
                rows,
            )
            if tile.block:
                for cache, value in zip(cached_rows, rows.last, strict=True):
                    cache[i] = value
    return out_THv


class _TokenRows:
    """The lists of k [G, d], u [H, v] and s [H, D] of a tile's tokens so far."""

    def __init__(self) -> None:
        self.k: list[Tensor] = []
        self.u: list[Tensor] = []
        self.s: list[Tensor] = []

    @classmethod
    def of(cls, cached_rows: list[Tensor], count: int) -> "_TokenRows":
        rows = cls()
        rows.k, rows.u, rows.s = (list(cached[:count].clone()) for cached in cached_rows)
        return rows

    @property
    def last(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.k[-1], self.u[-1], self.s[-1]


def _compute_token(
    q_Gd: Tensor,
    k_Gd: Tensor,
    v_Hv: Tensor,
    decay_HD: Tensor,
    beta_H: Tensor | None,
    state_Hdv: Tensor,
    rows: _TokenRows,
) -> Tensor:
    """Return o [H, v] of a tile's next token, and append the token to `rows`.

    Tokens are computed one by one, so that bits do not depend on other tokens of the step.
    """
    repeats = v_Hv.shape[0] // k_Gd.shape[0]
    s_HD = rows.s[-1] + decay_HD if rows.s else decay_HD.clone()
    q_Hd = q_Gd.repeat_interleave(repeats, 0)
    k_Hd = k_Gd.repeat_interleave(repeats, 0)
    decays = elementwise.exp(torch.stack([s_HD, *(s_HD - earlier for earlier in rows.s)]))
    u_Hv = v_Hv
    o_Hv = ((q_Hd * decays[0])[:, :, None] * state_Hdv).sum(1)
    if beta_H is not None:
        u_Hv = u_Hv - ((k_Hd * decays[0])[:, :, None] * state_Hdv).sum(1)
    for i, (earlier_Gd, earlier_u) in enumerate(zip(rows.k, rows.u, strict=True), 1):
        weights_Hd = decays[i] * earlier_Gd.repeat_interleave(repeats, 0)
        if beta_H is not None:
            u_Hv = u_Hv - (k_Hd * weights_Hd).sum(1, keepdim=True) * earlier_u
        o_Hv = o_Hv + (q_Hd * weights_Hd).sum(1, keepdim=True) * earlier_u
    if beta_H is not None:
        u_Hv = u_Hv * beta_H[:, None]
    rows.k.append(k_Gd.clone())
    rows.u.append(u_Hv.clone())
    rows.s.append(s_HD)
    return o_Hv + (q_Hd * k_Hd).sum(1, keepdim=True) * u_Hv


def _next_state(state_Hdv: Tensor, rows: _TokenRows) -> Tensor:
    """Return the state after all tokens of a full tile."""
    s_end_HD = rows.s[-1]
    decays = elementwise.exp(torch.stack([s_end_HD, *(s_end_HD - s_HD for s_HD in rows.s)]))
    state_Hdv = state_Hdv * decays[0, :, :, None]
    for i, (k_Gd, u_Hv) in enumerate(zip(rows.k, rows.u, strict=True), 1):
        k_Hd = k_Gd.repeat_interleave(u_Hv.shape[0] // k_Gd.shape[0], 0) * decays[i]
        state_Hdv = state_Hdv + k_Hd[:, :, None] * u_Hv[:, None]
    return state_Hdv


PlanTiles = Callable[[GroupInputs, StepInputs], Any]
