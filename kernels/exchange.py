"""All-to-all between GPUs that map each other's memory (CUDA IPC): dispatch and combine.

Every rank has a region of device memory that all other ranks map. All regions have the same layout:
flags for the barrier, and for each buffer of the double buffering

- ids: the routing choices of all ranks, which their senders wrote here;
- places: where the rows of this rank's pairs are among the receivers' rows;
- x: this rank's activations, to be read by others;
- y: the outputs of this rank's experts, to be read by others.

Ids and places are small and are pushed (written to the rank that needs them). Activations and
outputs are large and are pulled (read from the rank that has them), directly to their destination.

Arguments of the functions here:

- bases_R: the addresses of all regions in this process.
- x_offset, ids_offset, places_offset, y_offset: offsets in a region, in bytes.
- state: int64 [2] on the device, the number of the last barrier and whether a barrier failed. After
  a failure nothing is transferred any more. Only kernels change it, so CUDA graphs can be replayed.

Sizes: R ranks, T tokens of this rank, M most tokens of any rank, K experts per token, pair
t * K + k, e local experts, P rows received, D model width, W 32-bit words of a row. Rows begin at
multiples of 16 bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

POLLS = 64  # polls between two reads of `control` and the clock, which are slow
PAIRS = 1024  # ids that a program sends at a time
TILE = 8192  # words that a program copies at a time, so that 512 threads load 64 bytes each
SUMS = 1024  # outputs that a program adds at a time: 8 per thread, so that all K loads overlap
# Indices in `control`, which is pinned host memory.
ABORT = 0  # the host sets it to 1 to abort a barrier
FAILED = 1  # a barrier sets it to 1 if it fails
RANK_STATES = 2  # from this index on, the state of each rank at the failure, see `barrier`
CALLS = 1024  # a flag is (number of the barrier) * CALLS + (id of the call)


@triton.jit
def _address(base, offset, like_ptr):
    """Return an address in a region. Regions and their parts begin at multiples of 256 bytes."""
    return tl.multiple_of((base + offset).to(like_ptr.dtype), 16)


@triton.jit(do_not_specialize=["rank", "num_ranks", "call", "timeout_ns"])
def meet_kernel(
    bases_ptr, state_ptr, control_ptr, rank, num_ranks, call, timeout_ns,
    RANKS: tl.constexpr, CALLS: tl.constexpr, POLLS: tl.constexpr,
):  # fmt: skip
    """One program with a thread per rank sets this rank's flags and waits for the others."""
    if tl.load(state_ptr + 1) != 0:
        return
    ranks = tl.arange(0, RANKS)
    is_rank = ranks < num_ranks
    number = tl.load(state_ptr) + 1
    their_flags = tl.load(bases_ptr + ranks, mask=is_rank, other=0).to(state_ptr.dtype) + rank
    own_flags = tl.load(bases_ptr + rank).to(state_ptr.dtype) + ranks
    flag_value = tl.zeros((RANKS,), tl.int64) + number * CALLS + call
    # Release: a rank that acquires the flag sees what this rank's earlier kernels have written.
    tl.atomic_xchg(their_flags, flag_value, mask=is_rank, sem="release", scope="sys")
    begun = globaltimer()
    seen = tl.zeros((RANKS,), tl.int64)
    missing = num_ranks
    polls = 0
    gave_up = num_ranks < 0
    while (missing > 0) & (not gave_up):
        seen = tl.atomic_add(
            own_flags, tl.zeros((RANKS,), tl.int64), mask=is_rank, sem="acquire", scope="sys"
        )
        missing = tl.sum((is_rank & (seen // CALLS < number)).to(tl.int32), 0)
        polls += 1
        if polls % POLLS == 0:
            is_over = (tl.load(control_ptr, volatile=True) != 0) | (
                globaltimer() - begun > timeout_ns
            )
            # Threads read the clock at different times, so agree on one answer.
            gave_up = tl.max(tl.zeros((RANKS,), tl.int32) + is_over.to(tl.int32), 0) > 0
    # All threads have read the old number by now, because the sums above synchronize them.
    tl.store(state_ptr, number)
    rank_states = tl.where(
        seen // CALLS < number, 1, tl.where((seen // CALLS == number) & (seen != flag_value), 2, 0)
    )
    rank_states = tl.where(is_rank, rank_states, 0)
    if tl.sum(rank_states, 0) > 0:
        tl.store(control_ptr + 2 + ranks, rank_states, mask=is_rank)  # from RANK_STATES on
        tl.store(control_ptr + 1, 1)  # FAILED
        tl.store(state_ptr + 1, 1)


@triton.jit
def _copy(from_ptrs, to_ptrs, columns, live, words):
    """Copy a tile: the columns below `words` of the live rows."""
    mask = live[:, None] & (columns < words)[None, :]
    tl.store(
        to_ptrs[:, None] + columns[None, :],
        tl.load(from_ptrs[:, None] + columns[None, :], mask=mask),
        mask=mask,
    )


@triton.jit(do_not_specialize=["rank", "num_ranks", "tokens", "most_tokens", "top_k", "num_local"])
def publish_kernel(
    bases_ptr, state_ptr, x_ptr, ids_ptr, rank, num_ranks, tokens, most_tokens, top_k, num_local,
    x_offset, ids_offset, words,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program copies some tiles of x, and sends some pieces of ids."""
    if tl.load(state_ptr + 1) != 0:
        return
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    words = tl.multiple_of(words, 4)
    blocks = tl.cdiv(words, BLOCK)
    own = _address(tl.load(bases_ptr + rank), x_offset, x_ptr)
    for tile in range(program, tl.cdiv(tokens, ROWS) * blocks, programs):
        rows = tile // blocks * ROWS + tl.arange(0, ROWS)
        columns = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        starts = tl.multiple_of(rows.to(tl.int64) * words, 4)
        _copy(x_ptr + starts, own + starts, columns, rows < tokens, words)
    num_pairs = tokens * top_k
    room = most_tokens * top_k
    for piece in range(program, tl.cdiv(room, PAIRS) * num_ranks, programs):
        peer = piece % num_ranks
        pairs = piece // num_ranks * PAIRS + tl.arange(0, PAIRS)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1)
        their_ptrs = _address(tl.load(bases_ptr + peer), ids_offset, ids_ptr) + rank * room + pairs
        tl.store(their_ptrs, tl.where(ids < 0, -1, ids - peer * num_local), mask=pairs < room)


@triton.jit(do_not_specialize=["most_tokens", "top_k", "num_local"])
def gather_kernel(
    bases_ptr, state_ptr, order_ptr, ends_ptr, out_ptr, most_tokens, top_k, num_local, x_offset,
    places_offset, words,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program pulls some tiles of received rows, and sends their places to the rows' ranks."""
    total = tl.load(ends_ptr + num_local - 1)
    total = tl.where(tl.load(state_ptr + 1) == 0, total, 0)
    words = tl.multiple_of(words, 4)
    blocks = tl.cdiv(words, BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(total, ROWS) * blocks, tl.num_programs(0)):
        rows = tile // blocks * ROWS + tl.arange(0, ROWS)
        live = rows < total
        pairs = tl.load(order_ptr + rows, mask=live, other=0)
        source = pairs // (most_tokens * top_k)
        pairs -= source * most_tokens * top_k
        bases = tl.load(bases_ptr + source)
        if tile % blocks == 0:
            tl.store(_address(bases, places_offset, order_ptr) + pairs, rows, mask=live)
        their_ptrs = _address(bases, x_offset, out_ptr) + tl.multiple_of(
            (pairs // top_k).to(tl.int64) * words, 4
        )
        columns = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        _copy(
            their_ptrs, out_ptr + tl.multiple_of(rows.to(tl.int64) * words, 4), columns, live, words
        )


@triton.jit(do_not_specialize=["rank", "tokens", "num_local", "known"])
def collect_kernel(
    bases_ptr, state_ptr, weights_ptr, ids_ptr, out_ptr, rank, tokens, num_local, known,
    places_offset, y_offset, out_stride, width,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes some tiles of the outputs, with sums as in `align.combine_kernel`.

    known: the number of experts of all ranks.
    """
    if tl.load(state_ptr + 1) != 0:
        return
    blocks = tl.cdiv(width, BLOCK)
    places = _address(tl.load(bases_ptr + rank), places_offset, ids_ptr)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, ROWS) * blocks, tl.num_programs(0)):
        rows = (tile // blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        columns = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = (rows < tokens)[:, None] & (columns < width)[None, :]
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for k in tl.static_range(K):
            pairs = rows * K + k
            experts = tl.load(ids_ptr + pairs, mask=rows < tokens, other=-1)
            is_there = (experts >= 0) & (experts < known)
            y = _address(
                tl.load(bases_ptr + tl.where(is_there, experts // num_local, rank)),
                y_offset,
                out_ptr,
            )
            y += tl.load(places + pairs, mask=is_there, other=0).to(tl.int64) * width
            readable = is_there[:, None] & (columns < width)[None, :]
            value = tl.load(y[:, None] + columns[None, :], mask=readable, other=0.0).to(tl.float32)
            term = value * tl.load(weights_ptr + pairs, mask=is_there, other=0.0)[:, None]
            total = term if k == 0 else total + term  # not 0 + term: that would turn -0 into 0
        to_ptrs = out_ptr + rows[:, None] * out_stride + columns[None, :]
        tl.store(to_ptrs, total.to(out_ptr.dtype.element_ty), mask=inside)


def _tile(words: int) -> dict[str, int]:
    block = min(TILE // 4, triton.next_power_of_2(words))
    return {"ROWS": TILE // block, "BLOCK": block}


def barrier(
    bases_R: Tensor, state: Tensor, rank: int, control: Tensor, timeout_s: float, call: int
) -> None:
    """Run a barrier on the device: wait until the streams of all ranks have reached it.

    The barrier fails after `timeout_s`, if the host sets control[ABORT], or if ranks are in
    different calls (call % CALLS). Then control[FAILED] becomes 1, and control[RANK_STATES + r]
    becomes 1 for a rank r that has not arrived and 2 for a rank r in another call. All later calls
    do nothing.

    Example: state [6, 0], call 5, flags of the own region [7, 7, 8] * CALLS + [5, 5, 9] -> state
    [7, 0]. Rank 2 has already reached the next barrier.
    """
    num_ranks = len(bases_R)
    assert len(control) == RANK_STATES + num_ranks, (control.shape, num_ranks)
    room = max(32, triton.next_power_of_2(num_ranks))  # no two threads for one rank
    meet_kernel[(1,)](
        bases_R, state, control, rank, num_ranks, call % CALLS, int(timeout_s * 1e9),
        RANKS=room, CALLS=CALLS, POLLS=POLLS, num_warps=1,
    )  # fmt: skip


def publish(
    bases_R: Tensor, state: Tensor, rank: int, x_TW: Tensor, ids_TK: Tensor, most_tokens: int,
    num_local: int,
    x_offset: int, ids_offset: int, programs: int,
) -> None:  # fmt: skip
    """Start a dispatch: copy activations to the own region, and send the ids to all ranks.

    The ids [T, K] are written to row `rank` of the ids [R, M, K] in every region, relative to the
    first expert of that region's rank. Rows from T on are filled with -1.

    x_TW: activations as int32 words.
    num_local: experts per rank.

    Example: rank 0 of two with 2 experts each, ids [[1, 2]], M 2 -> to rank 0 [[1, 2], [-1, -1]],
    to rank 1 [[-1, 0], [-1, -1]]
    """
    tokens, words = x_TW.shape
    top_k = ids_TK.shape[1]
    assert tokens == len(ids_TK) <= most_tokens, (x_TW.shape, ids_TK.shape, most_tokens)
    assert x_TW.is_contiguous(), x_TW.stride()
    assert ids_TK.is_contiguous(), ids_TK.stride()
    assert ids_TK.dtype == x_TW.dtype == torch.int32, (ids_TK.dtype, x_TW.dtype)
    publish_kernel[(programs,)](
        bases_R, state, x_TW, ids_TK, rank, len(bases_R), tokens, most_tokens, top_k, num_local,
        x_offset, ids_offset, words,
        PAIRS=PAIRS, **_tile(words), num_warps=16,
    )  # fmt: skip


def gather(
    bases_R: Tensor, state: Tensor, order_N: Tensor, ends_e: Tensor, most_tokens: int, top_k: int,
    x_offset: int,
    places_offset: int, out_PW: Tensor, programs: int,
) -> None:  # fmt: skip
    """Finish a dispatch: pull the activation of each sorted pair to `out`.

    Rows of `out` after the last end do not change. The rank of each activation gets the places of
    its pairs in `out`.

    order_N, ends_e: from `align` over the ids [R, M, K].

    Example: two ranks, M 1, K 2, order [3, 0], one expert with end 2 -> out [row of rank 1, row of
    rank 0]; the place of rank 1's pair 1 is 0, the place of rank 0's pair 0 is 1
    """
    assert out_PW.is_contiguous(), out_PW.stride()
    assert out_PW.shape[0] >= order_N.shape[0], (out_PW.shape, order_N.shape)
    gather_kernel[(programs,)](
        bases_R, state, order_N, ends_e, out_PW, most_tokens, top_k, len(ends_e), x_offset,
        places_offset, out_PW.shape[1],
        **_tile(out_PW.shape[1]), num_warps=16,
    )  # fmt: skip


def collect(
    bases_R: Tensor, state: Tensor, rank: int, weights_TK: Tensor, ids_TK: Tensor, num_local: int,
    places_offset: int,
    y_offset: int, out_TD: Tensor, programs: int,
) -> None:  # fmt: skip
    """Combine: write the weighted sum over k = 0..K-1 of the experts' outputs to `out_TD`.

    The output of expert p is read from rank p // num_local, at the row of y that `gather` has
    reported. Products and sums are rounded to fp32 one after the other, then the result is rounded
    once. Ids without an expert add zero.

    Example: ids [[2, 0]], two ranks with 2 experts each, places [[1, 0]], y of rank 0 [[4]], of
    rank 1 [[5], [6]], weights [[0.5, 2]] -> [[0.5 * 6 + 2 * 4]] = [[11]]
    """
    tokens, top_k = ids_TK.shape
    width = out_TD.shape[1]
    assert out_TD.stride(1) == 1, out_TD.stride()
    assert weights_TK.is_contiguous(), weights_TK.stride()
    assert ids_TK.is_contiguous(), ids_TK.stride()
    assert weights_TK.dtype == torch.float32, weights_TK.dtype
    if tokens:
        block = min(SUMS, triton.next_power_of_2(width))
        collect_kernel[(programs,)](
            bases_R, state, weights_TK, ids_TK, out_TD, rank, tokens, num_local,
            len(bases_R) * num_local, places_offset,
            y_offset, out_TD.stride(0), width,
            K=top_k, ROWS=SUMS // block, BLOCK=block, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
