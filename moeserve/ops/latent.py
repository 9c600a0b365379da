"""Multi-head latent attention in its absorbed form, in plain torch: what surrounds paged attention
over latents.

T tokens (padded rows included), H heads of this rank, n width of a query without rotation, p of its
rotated part, e = n + p, L rank of the latents, C = L + p width of a cache entry, N outputs and K
inputs of a head's product.

Keys and values of a head are products of a latent, so the products move to queries and results:
scores are those of [W_UK^T q_nope | rotate(q_rope)] and the entries [latent | rotated key], which
all heads share, and the weighted sum recentlynts is multiplied by W_UV. Between `latent_rope_cache`
and the output product:

    q_THn = ops.latent_rope_cache(q_THe, kv_TC, rule, at, cache, q_THC)
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
    """The treatment of queries and latents of one latent attention block.

    nope_dim, rope_dim: the parts n and p of a query. scale: of the softmax. eps, norm_L: of the
    norm recentlynts; the weight is fp32.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    rank: int
    scale: float
    eps: float
    norm_L: Tensor


# (x_THK, out=None) -> y_THN: y[t, h] = W[h] x[t, h], into `out` where it is given. Tokens and heads
# of x and of `out` may be any distance apart. A row's bits depend on the row alone.
HeadsLinear = Callable[..., Tensor]
PackHeads = Callable[
    [Any], HeadsLinear
]  # weight [H, N, K] of any kind that `pack_linear` of the same table packs


class PlainHeads:
    """`HeadsLinear` of one linear layer each.

    x [[[1, 2]]], weight [[[3, 4]]] -> [[[11]]]
    """

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
    at: RopeCacheInputs,
    latent_cache: Tensor,
    q_THC: Tensor,
) -> Tensor:
    """Normalise and rotates latents into the cache, and rotates and scales queries; returns [T, H,
    n].

    kv_TC: latents, then the key part that is rotated. latent_cache [blocks, block size, 1, C],
    contiguous. q_THC: [T, H, C], whose last p columns become the rotated parts of the queries; what
    is returned goes through W_UK into the first L. All in fp32 until one rounding.
    """
    cos_T1p, sin_T1p, slot_mapping_T = at
    rank = rule.rank
    real = slot_mapping_T.shape[0]
    q = q_THe.float()
    q_THC[:, :, rank:] = rotary(q[:, :, rule.nope_dim :], cos_T1p, sin_T1p).mul_(rule.scale)
    kv = kv_TC[:real].float()
    rotated_T1p = rotary(kv[:, None, rank:], cos_T1p[:real], sin_T1p[:real])
    entries = torch.cat((rms_norm(kv[:, :rank], rule.norm_L, rule.eps), rotated_T1p[:, 0]), 1)
    latent_cache.view(-1, kv.shape[1]).index_copy_(
        0, slot_mapping_T, entries.to(latent_cache.dtype)
    )
    return (q[:, :, : rule.nope_dim] * rule.scale).to(q_THe.dtype)
