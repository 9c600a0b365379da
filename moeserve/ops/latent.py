"""The steps of absorbed multi-head latent attention (MLA) around paged attention, in plain torch.

Shapes: T tokens (including padding), H heads of this rank, n width of a query without rope, p width
of its part with rope, e = n + p, L rank of the latents, C = L + p width of a cache entry, N outputs
and K inputs of a head's product.

The keys and values of a head are products of a latent with W_UK and W_UV. The absorbed form moves
these products to queries and results: queries are [W_UK^T q_nope | rope(q_rope)], keys are the
cache entries [latent | rope(key)], which all heads share, and the weighted sums of latents are
multiplied by W_UV:

    q_THn = ops.latent_rope_cache(q_THe, kv_TC, rule, rope_cache, cache, q_THC)
    up(q_THn, out=q_THC[..., :L])                     # up = ops.pack_heads(W_UK [H, L, n])
    o_THL = ops.attention(q_THC, cache, cache[..., :L], plan).unflatten(1, (H, L))
    v_THv = down(o_THL)                               # down = ops.pack_heads(W_UV [H, v, L])

Source: DeepSeek-V2 (2024), section 2.1 and appendix C.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moeserve.ops.elementwise import rms_norm, rotary
from moeserve.ops.inputs import RopeCacheInputs, RowContext
from moeserve.ops.linear import PackLinear


@dataclass(frozen=True, slots=True)
class LatentRule:
    """The steps between projections and attention of an MLA layer."""

    num_heads: int
    nope_dim: int  # n
    rope_dim: int  # p
    rank: int  # L
    scale: float  # of the softmax
    eps: float  # of the norm of latents
    norm_L: Tensor  # its weights, fp32


# (x_THK, out=None) -> y_THN: y[t, h] = W[h] x[t, h], written to `out` if given. x and `out` may
# have any strides between tokens and between heads. A row's bits depend on the row alone.
HeadsLinear = Callable[..., Tensor]
# Packs a weight [H, N, K] of any kind that the table's `pack_linear` packs.
PackHeads = Callable[[Any], HeadsLinear]


class PlainHeads:
    """A `HeadsLinear` of one linear layer per head: x [[[1, 2]]], weight [[[3, 4]]] -> [[[11]]]."""

    __slots__ = ("_linears", "_width")

    def __init__(self, weight_HNK: Any, pack_linear: PackLinear) -> None:
        self._linears = [pack_linear(weight_HNK[head], None) for head in range(weight_HNK.shape[0])]
        self._width = weight_HNK.shape[1]

    @property
    def parts(self) -> list[Any]:
        """The packed weight of each head."""
        return self._linears

    def __call__(self, x_THK: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the products [T, H, N]; see `HeadsLinear`."""
        if out is None:
            out = x_THK.new_empty(*x_THK.shape[:2], self._width)
        context = RowContext(len(x_THK))
        for head, x_TK in enumerate(x_THK.transpose(0, 1).contiguous()):
            out[:, head] = self._linears[head](x_TK, context)
        return out


def latent_rope_cache(
    q_THe: Tensor,
    kv_TC: Tensor,
    rule: LatentRule,
    rope_cache: RopeCacheInputs,
    latent_cache: Tensor,
    q_THC: Tensor,
) -> Tensor:
    """Write normed latents and rotated keys to the cache, and rotate and scale queries.

    Returns the part of queries without rope, [T, H, n], whose product with W_UK the caller writes
    to the first L columns of q_THC. All steps are fp32, with one rounding at the end.

    kv_TC: latents, then keys for rope.
    latent_cache: [blocks, block size, 1, C], contiguous.
    q_THC: output; its last p columns become the part of queries with rope.
    """
    cos_T1p, sin_T1p, slot_mapping_T = rope_cache
    rank = rule.rank
    num_tokens = slot_mapping_T.shape[0]  # without padding
    q = q_THe.float()
    q_THC[:, :, rank:] = rotary(q[:, :, rule.nope_dim :], cos_T1p, sin_T1p).mul_(rule.scale)
    kv = kv_TC[:num_tokens].float()
    rotated_T1p = rotary(kv[:, None, rank:], cos_T1p[:num_tokens], sin_T1p[:num_tokens])
    entries = torch.cat((rms_norm(kv[:, :rank], rule.norm_L, rule.eps), rotated_T1p[:, 0]), 1)
    latent_cache.view(-1, kv.shape[1]).index_copy_(
        0, slot_mapping_T, entries.to(latent_cache.dtype)
    )
    return (q[:, :, : rule.nope_dim] * rule.scale).to(q_THe.dtype)
