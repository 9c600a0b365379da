"""Gumbel noise for sampling, as a hash of (seed, position, token id), without a generator.

So a request draws the same tokens in any batch, after a preemption, and on any rank.

The noise of different tokens is independent. Therefore argmax(logits / temperature + noise) is a
draw from softmax(logits / temperature) (Maddison et al., 2014, "A* Sampling"). The hash mixes token
and key in three multiply-xorshift rounds on 32-bit words.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LANES = 64  # rows are padded to a multiple of this
_MAX_SERIAL = 32_768  # torch runs elementwise kernels of up to this many elements in one thread
_MASK31 = 2**31 - 1
# Maps the hash's 31 bits into (0, 1): from 2^-32 for the likely winners, where float32 is densest,
# to just below 1.
_SCALE = 2.0**-31 * (1 - 2.0**-23)
# Odd factors with well mixed bits: two of murmur3, and one of Wellons' search for hash constants.
_FACTORS = (-2048144789, -1028477387, 2146121005)


def padded(vocab_size: int) -> int:
    """Return the vocabulary size, rounded up to a multiple of LANES: 65 -> 128."""
    return -(-vocab_size // LANES) * LANES


class Gumbel:
    """Gumbel noise, float32 in -2.8 .. 22.2. Row i, column j is the noise of token j for the key of
    row i.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        ids = torch.arange(padded(vocab_size), dtype=torch.int32, device=device)
        self.token_hash = _mix(ids.add_(1).mul_(-1640531535))  # 2^32 / golden ratio, odd
        self._scratch = torch.empty((3, 0), dtype=torch.int32, device=device)

    def __call__(self, low_S: Tensor, high_S: Tensor, blocks_SB: Tensor | None = None) -> Tensor:
        """Return the noise [S, padded vocabulary], which is valid until the next call.

        low_S, high_S: int32, from `row_keys`.
        blocks_SB: if only some blocks of LANES tokens are needed, their numbers in each row.
        """
        rows = len(low_S)
        token_hash = self.token_hash.unsqueeze(0)
        if blocks_SB is not None:
            token_hash = (
                self.token_hash.view(-1, LANES).index_select(0, blocks_SB.view(-1)).view(rows, -1)
            )
        count = rows * token_hash.shape[1]
        if self._scratch.shape[1] < count:
            self._scratch = self._scratch.new_empty((3, count))
        x_SV, shifted_SV, noise_SV = (scratch[:count].view(rows, -1) for scratch in self._scratch)
        torch.bitwise_xor(token_hash, low_S.unsqueeze(1), out=x_SV)
        _shift_xor(x_SV.mul_(_FACTORS[0]), 16, shifted_SV)
        x_SV.bitwise_xor_(high_S.unsqueeze(1))
        _shift_xor(x_SV.mul_(_FACTORS[1]), 15, shifted_SV)
        x_SV.mul_(_FACTORS[2]).bitwise_right_shift_(1).bitwise_and_(_MASK31)
        uniform_SV = noise_SV.view(torch.float32).copy_(x_SV).add_(0.5).mul_(-_SCALE)
        exponential_SV = each_(torch.log1p_, uniform_SV).neg_()
        return each_(torch.log_, exponential_SV).neg_()


def each_(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an in-place elementwise op so that an element's bits depend on its value alone.

    torch vectorizes such ops over the flat tensor, and uses scalar code at the end of each thread's
    share. Depending on the build, the log and exp of scalar code may differ in the last bit. Pieces
    that are shared evenly by the threads, in multiples of LANES, do not need scalar code.

    x: contiguous, with a size that is a multiple of LANES.
    """
    if not x.is_cpu:
        return op(x)
    flat = x.view(-1)
    assert len(flat) % LANES == 0, x.shape
    piece_size = _MAX_SERIAL << (torch.get_num_threads().bit_length() - 1)
    start = 0
    while start < len(flat):
        while piece_size > _MAX_SERIAL and piece_size > len(flat) - start:
            piece_size //= 2
        op(flat[start : start + piece_size])
        start += piece_size
    return x


def is_invariant(vocab_size: int = 50_000) -> bool:
    """Return whether rows of noise have the same bits alone and in a batch, with the current number
    of threads.

    Checked at the start, because all samplers on CPUs rely on it. Takes a millisecond.
    """
    rows = 4
    gumbel = Gumbel(vocab_size, torch.device("cpu"))
    low, high = torch.arange(2 * rows, dtype=torch.int32).view(2, rows)
    together = gumbel(low, high).clone()
    return all(
        torch.equal(gumbel(low[i : i + 1], high[i : i + 1])[0], together[i]) for i in range(rows)
    )


def _mix(x: Tensor) -> Tensor:
    """Apply murmur3's 32-bit finalizer to int32, in place (products wrap around)."""
    shifted = torch.empty_like(x)
    _shift_xor(x, 16, shifted).mul_(_FACTORS[0])
    _shift_xor(x, 13, shifted).mul_(_FACTORS[1])
    return _shift_xor(x, 16, shifted)


def _shift_xor(x: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """Compute x ^= x >>> shift on int32."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
