"""The selective scan of Mamba over paged states: the reference in plain torch.

Shapes: T tokens (including padding), C channels, N state size of a channel. With the time step dt_t
of token t, each channel has

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t        y_t = sum over n of C_t[n] h_t[n] + skip x_t

with A [N] of the channel, and B_t and C_t [N] of the token. Tiles are those of ops/recurrence.py.
The cache has, for each tile, the state before it, and for each of its tokens x, dt and B. A token's
result is that of a scan over its tile, one token after the other, whichever tokens are in the same
step. All in fp32; sums over n in ascending order.

Source: Mamba (arXiv 2312.00752).
"""

import torch
from torch import Tensor

from moeserve.ops.elementwise import exp
from moeserve.ops.recurrence import Caches, TilePlan
from moeserve.ops.rules import TILE


def selective_scan(
    x_TC: Tensor,
    dt_TC: Tensor,
    a_NC: Tensor,
    b_TN: Tensor,
    c_TN: Tensor,
    skip_C: Tensor,
    caches: Caches,
    plan: TilePlan,
) -> Tensor:
    """Return y [T, C]. All tensors are fp32. Padding rows of the result are 0.

    caches: states before tiles [blocks, tiles, N, C]; of a tile's tokens x and dt [blocks, block
    size, 1, C] and B [.., 1, N].
    """
    states, *row_caches = caches
    out_TC = torch.zeros_like(x_TC)
    state_NC = torch.zeros_like(a_NC)
    for tile in plan.tiles:
        places = [cache[tile.block, tile.slots, 0] for cache in row_caches]
        if tile.first_index:
            rows = [place[: tile.first_index] for place in places]
            state_NC = _states(states[tile.block, tile.index_in_block], rows, a_NC)[-1]
        else:
            if tile.previous is None:
                state_NC = torch.zeros_like(a_NC)
            elif not tile.follows_previous:
                block, number = tile.previous
                rows = [
                    cache[block, number * TILE : number * TILE + TILE, 0] for cache in row_caches
                ]
                state_NC = _states(states[block, number], rows, a_NC)[-1]
            if tile.block:
                states[tile.block, tile.index_in_block] = state_NC
        tokens = slice(tile.tokens.start, tile.tokens.stop)
        rows = [x_TC[tokens], dt_TC[tokens], b_TN[tokens]]
        states_tNC = _states(state_NC, rows, a_NC)
        y_tC = skip_C * x_TC[tokens]
        for n in range(len(a_NC)):
            y_tC = y_tC + c_TN[tokens, n : n + 1] * states_tNC[:, n]
        out_TC[tokens] = y_tC
        state_NC = states_tNC[-1]
        if tile.block:
            for cached, values in zip(places, rows, strict=True):
                cached[tile.first_index : tile.first_index + len(values)] = values
    return out_TC


def _states(state_NC: Tensor, rows: list[Tensor], a_NC: Tensor) -> Tensor:
    """Return the states [t, N, C] after each token. rows: x, dt and B of the tokens."""
    x_tC, dt_tC, b_tN = rows
    decays_tNC = exp((dt_tC[:, None] * a_NC).flatten(0, 1)).view(-1, *a_NC.shape)
    states_tNC = b_tN[:, :, None] * dt_tC[:, None] * x_tC[:, None]
    for decay_NC, new_NC in zip(decays_tNC, states_tNC, strict=True):
        state_NC = new_NC.add_(decay_NC * state_NC)
    return states_tNC
