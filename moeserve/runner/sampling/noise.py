"""Sampling noise without a generator: Gumbel noise is a hash of (seed, position, token id).

So a request draws the same tokens in any batch, after a preemption, and on any rank. The noise of
one position is independent between tokens; argmax(logits / temperature + noise) is a draw from
softmax(logits / temperature) (Maddison et al., 2014, "A* Sampling"). The hash mixes token and key
in three multiply-xorshift rounds on 32-bit words.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LANES = 64  # a row's length is padded to a multiple of this
_SERIAL = 32_768  # torch runs an elementwise kernel of at most this many elements on one thread
_MASK31 = 2**31 - 1
# Maps the hash's 31 bits into (0, 1): 2^-32 at the winning end, where float32 is densest, below 1
# at the other.
_SCALE = 2.0**-31 * (1 - 2.0**-23)
# Odd factors with well mixed bits: murmur3's two, and one of Wellons' search for good hash
# constants.
_FACTORS = (-2048144789, -1028477387, 2146121005)


def padded(vocab_size: int) -> int:
    """Return the vocabulary size rounded up to whole vectors: 65 -> 128."""
    return -(-vocab_size // LANES) * LANES


class Gumbel:
    """Gumbel noise, float32 in -2.8 .. 22.2: row i, column j is the noise of token j for row i's
    key.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        ids = torch.arange(padded(vocab_size), dtype=torch.int32, device=device)
        self.token_hash = _mix(ids.add_(1).mul_(-1640531535))  # 2^32 / golden ratio, odd
        self._scratch = torch.empty((3, 0), dtype=torch.int32, device=device)

    def __call__(self, low_S: Tensor, high_S: Tensor, blocks_SB: Tensor | None = None) -> Tensor:
        """Return the noise [S, padded vocabulary], valid until the next call. low_S, high_S:
        int32, from `row_keys`.

        blocks_SB: each row's blocks of LANES tokens, if only those are wanted.
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
        x_SV, shifted_SV, noise_SV = (part[:count].view(rows, -1) for part in self._scratch)
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

    torch vectorises such ops over the flat tensor and ends each thread's share with scalar code,
    whose log and exp may differ in the last bit (it depends on the build). Pieces that the threads
    share evenly, in multiples of LANES, have no such ends. x: contiguous, its size a multiple of
    LANES.
    """
    if not x.is_cpu:
        return op(x)
    flat = x.view(-1)
    assert len(flat) % LANES == 0, x.shape
    piece = _SERIAL << (torch.get_num_threads().bit_length() - 1)
    start = 0
    while start < len(flat):
        while piece > _SERIAL and piece > len(flat) - start:
            piece //= 2
        op(flat[start : start + piece])
        start += piece
    return x


def is_invariant(vocab_size: int = 50_000) -> bool:
    """Return whether rows of noise have the same bits alone and among others, with the thread
    count that is set.

    Takes a millisecond; checked at start, since all samplers on the CPU rely on it.
    """
    rows = 4
    gumbel = Gumbel(vocab_size, torch.device("cpu"))
    low, high = torch.arange(2 * rows, dtype=torch.int32).view(2, rows)
    together = gumbel(low, high).clone()
    return all(
        torch.equal(gumbel(low[i : i + 1], high[i : i + 1])[0], together[i]) for i in range(rows)
    )


def _mix(x: Tensor) -> Tensor:
    """Apply murmur3's 32-bit finaliser in place on int32 (products wrap)."""
    shifted = torch.empty_like(x)
    _shift_xor(x, 16, shifted).mul_(_FACTORS[0])
    _shift_xor(x, 13, shifted).mul_(_FACTORS[1])
    return _shift_xor(x, 16, shifted)


def _shift_xor(x: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """Compute x ^= x >>> shift on int32."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
