"""What a decoder layer consists of. T tokens, rounded up to T' rows for the kernels; D model width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from moeserve.layers.attention import Attention
from moeserve.moe.lane import Lane

FeedForward = Callable[[Tensor, int, Lane], Tensor]  # x_T'D, number of real rows, lane -> T'D


@dataclass(frozen=True, slots=True)
class Layer:
    """`group` is the KV group whose block table its cache follows."""

    attn_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    feed_forward: FeedForward
    group: int
