"""Gumbel noise as a hash of (seed, position, token id), for use inside kernels.

If each token arrives after an exponentially distributed time divided by its weight, the first one is a draw by weight
(Maddison et al., 2014, "A* Sampling"); Gumbel noise is the negated logarithm of such a time. Here are logarithms.
"""

from __future__ import annotations

import triton
import triton.language as tl

EARLIEST, LATEST = -22.2, 2.8  # bounds of log_time
HOPELESS = LATEST - EARLIEST  # a token that far behind the likeliest never arrives before it

SCALE = tl.constexpr(2.0**-31 * (1 - 2.0**-23))  # maps 31 bits into (0, 1), see below
SMALL = tl.constexpr(1 / 16)


@triton.jit
def mixed(ids):
    """Returns a hash of token ids, uint32: murmur3's finaliser after a product with 2^32 / golden ratio."""
    x = (ids + 1).to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def log_time(ids, low, high):
    """Returns the log of tokens' times if all had weight 1. low, high: uint32, a row's key (seed and position).

    The hash's 31 bits become a number from 2^-32, where float32 is densest and winners are, to just below 1.
    """
    x = (mixed(ids) ^ low) * 0x85EBCA6B
    x = (x ^ (x >> 16) ^ high) * 0xC2B2AE35
    x = (x ^ (x >> 15)) * 0x7FEB352D
    u = ((x >> 1).to(tl.int32).to(tl.float32) + 0.5) * SCALE
    # -log(1 - u): near 0 by its series, since 1 - u has lost u's digits there.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return tl.log(tl.where(u < SMALL, series, -tl.log(1 - u)))
