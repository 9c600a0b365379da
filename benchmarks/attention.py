"""Speed of the native attention kernel: KV bytes/s in decode, FLOP/s in prefill, time of a plan.

    python -m benchmarks.attention [--cores 0 1] [--int8]

Targets:

    decode     at 16k tokens of context, at most 1.3 x the time to read the cache
    prefill    1 x 1,024 tokens at half of sgemm's rate or more
    plan       at most 30 us for 32 rows

The read rate is that of torch summing a large tensor with as many threads. Both rates are measured
right beside the case that they are compared with. Each layer has its own KV cache, so that nothing
is left in the processor's caches. Figures are the best of several rounds.

Prints and saves one entry for each case.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import parser, save
from moeserve.ops.inputs import HeadShape, entry_width, to_entries
from moeserve.ops.native import native
from moeserve.ops.native_layer import attention, plan_attention
from moeserve.ops.probe import host_step

BLOCK = 16
CACHE_BYTES = 256 << 20
ROUNDS = 5
DECODES = [  # requests, context, heads, KV heads, head width
    (1, 16_384, 16, 8, 64),
    (1, 16_384, 8, 8, 64),
    (1, 16_384, 16, 4, 128),
    (1, 16_384, 24, 4, 128),
    (1, 16_384, 32, 4, 128),
    (1, 16_384, 64, 4, 128),
    (8, 2_048, 16, 8, 64),
    (32, 128, 16, 8, 64),
]
LATENT = 576, 512  # widths of DeepSeek's latent keys and of the part that holds the values
DECODES += [
    (r, c, h, 1, 576)
    for h in (16, 128)
    for r, c in ((1, 1_024), (8, 1_024), (1, 16_384), (8, 16_384))
]
PREFILLS = [
    (1, 1_024, 16, 8, 64),
    (8, 512, 16, 8, 64),
    (1, 2_048, 32, 4, 128),
]  # requests, tokens, ...
PREFILLS += [(1, 1_024, 16, 1, 576), (1, 1_024, 128, 1, 576)]
Size = tuple[int, int, int, int, int]


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--cores",
        nargs="+",
        type=int,
        default=sorted(os.sched_getaffinity(0)),
        help="one thread each",
    )
    flags.add_argument("--int8", action="store_true", help="keys and values in int8")
    args = flags.parse_args()
    dtype = torch.int8 if args.int8 else torch.bfloat16
    module = native()
    if module is None or not module.supported_isas():
        raise SystemExit("no native kernels for this CPU")
    decodes, prefills = (
        [s for s in sizes if s[4] != LATENT[0] or not args.int8] for sizes in (DECODES, PREFILLS)
    )
    results = []
    for count in sorted({1, len(args.cores)}):
        cores = args.cores[:count]
        torch.set_num_threads(count)
        module.set_threads(cores)
        read = probe_read()  # torch starts its threads before this one is pinned
        os.sched_setaffinity(0, {cores[0]})
        results += [{"threads": count, **decode(size, dtype)} for size in decodes]
        results += [{"threads": count, **prefill(size, dtype)} for size in prefills]
        os.sched_setaffinity(0, set(args.cores))
        results.append(
            {"threads": count, "case": "read", "before_gb_s": read, "after_gb_s": probe_read()}
        )
    save("attention", args, {"isa": module.serving_isa(), "cases": results})


def decode(size: Size, dtype: torch.dtype) -> dict[str, Any]:
    requests, context, heads, kv_heads, dim = size
    latent = dim == LATENT[0]
    v_dim = v_width(dim)
    layer_bytes = (
        (2 - latent) * requests * context * kv_heads * entry_width(dim, dtype) * dtype.itemsize
    )
    layers = max(2, min(64, CACHE_BYTES // layer_bytes))
    caches = [make_cache(requests, context, kv_heads, dim, dtype) for _ in range(layers)]
    q = torch.randn(requests, heads, dim).bfloat16() * dim**-0.5
    step = make_step(size, 1)
    planning = best(lambda: plan_attention(*step), 50)
    plan = plan_attention(*step)
    seconds = best(lambda: [attention(q, k, v, plan) for k, v in caches]) / layers
    read = probe_read()
    peak = probe_sgemm()
    rate = layer_bytes / seconds / 1e9
    flops = 2 * requests * context * heads * (dim + v_dim) / seconds / 1e9
    return {
        "case": "decode",
        "size": size,
        "us": 1e6 * seconds,
        "kv_gb_s": rate,
        "read_gb_s": read,
        "times_floor": read / rate,
        "sgemm_share": flops / peak,
        "plan_us": 1e6 * planning,
    }


def prefill(size: Size, dtype: torch.dtype) -> dict[str, Any]:
    requests, tokens, heads, kv_heads, dim = size
    k, v = make_cache(requests, tokens, kv_heads, dim, dtype)
    q = torch.randn(requests * tokens, heads, dim).bfloat16() * dim**-0.5
    plan = plan_attention(*make_step(size, tokens))
    seconds = best(lambda: attention(q, k, v, plan))
    # Only positions that queries see are counted: half of the square.
    rate = requests * tokens * (tokens + 1) * heads * (dim + v_width(dim)) / seconds / 1e9
    peak = probe_sgemm()
    return {
        "case": "prefill",
        "size": size,
        "us": 1e6 * seconds,
        "gflop_s": rate,
        "sgemm_gflop_s": peak,
        "share": rate / peak,
    }


def v_width(dim: int) -> int:
    return LATENT[1] if dim == LATENT[0] else dim


def make_cache(
    requests: int, context: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = (requests * -(-context // BLOCK) + 1, BLOCK, kv_heads, dim)
    one = to_entries(torch.randn(shape), dtype)
    return one, one[..., : v_width(dim)] if v_width(dim) < dim else one.clone()


def make_step(size: Size, queries: int) -> tuple[Any, ...]:
    """Return the arguments of a plan for the last `queries` positions of each request.

    The requests' blocks are scattered over the cache.
    """
    requests, context, heads, kv_heads, dim = size
    blocks = -(-context // BLOCK)
    order = (torch.arange(requests * blocks) * 7919 % (requests * blocks) + 1).view(
        requests, blocks
    )
    starts = [context - queries] * requests
    offsets = range(0, (requests + 1) * queries, queries)
    return *host_step(order, BLOCK, starts, offsets), HeadShape(heads, kv_heads, dim, v_width(dim))


def probe_read() -> float:
    x = torch.ones(CACHE_BYTES // 4)
    return CACHE_BYTES / best(lambda: x.sum()) / 1e9


def probe_sgemm() -> float:
    x = torch.randn(1024, 1024)
    return 2 * 1024**3 / best(lambda: x @ x) / 1e9


def best(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds + 1):  # the first one warms up
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


if __name__ == "__main__":
    main()
