"""Decodes the blocks of ggml's types with grids (IQ3, IQ2 and IQ1), as ggml-quants.c does.

These types store numbers of 4 or 8 weights as a place in a fixed table, the type's grid, which has
magnitudes. The signs of 8 weights are a byte, or 7 bits, from which the eighth sign follows: the
number of minus signs is even. assets/gguf_grids.npz has the grids (tools/make_gguf_grids.py).

Shapes: n rows, B blocks of 256 weights per row.
"""

from collections.abc import Callable
from functools import cache
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from moeserve.loader.gguf_blocks import Blocks, fields, half, words
from moeserve.loader.stored_format import IQ1_CODES, IQ2_CODES, IQ3_S_CODES, IQ3_XXS_CODES


@cache
def grid(name: str) -> Tensor:
    """Return a grid: the codes of each entry's weights, uint8 [entries, 4 or 8]."""
    with (files("moeserve") / "assets/gguf_grids.npz").open("rb") as file:
        return torch.from_numpy(np.load(file)[name])


@cache
def _signs(sign_bit: int) -> Tensor:
    """Return the part of codes that 8 signs give, uint8 [256 sign bytes, 8 weights]."""
    return (fields(torch.arange(256), 1, 8) * sign_bit).to(torch.uint8)


@cache
def _even_signs() -> Tensor:
    """Return the sign byte of each 7-bit number, int64 [128]."""
    codes = torch.arange(128)
    parity = fields(codes, 1, 7).sum(-1) & 1
    return codes | (parity << 7)


def _entries(table: Tensor, places: Tensor) -> Tensor:
    """Look up rows of a table: [...] -> [..., width]. Whole rows are copied as one integer."""
    as_integers = table.view({4: torch.int32, 8: torch.int64}[table.shape[-1]]).squeeze(-1)
    return as_integers[places].unsqueeze(-1).view(torch.uint8)


def _blocks(
    codes: Tensor, multiples: Tensor, unit: Tensor, table: tuple[int, ...], signs: Tensor | None
) -> Blocks:
    """Return decoded blocks.

    codes: uint8 [n, B, entries, 4 or 8]; multiples: of `unit` [n, B, 1], the scales [n, B, groups];
    signs: sign bytes, int64 [n, B, 32], or None if codes include them.
    """
    groups = multiples.shape[-1]
    values = codes.flatten(-2)
    if signs is not None:
        sign_bit = len(table) // 2
        values = values | _entries(_signs(sign_bit), signs).flatten(-2)
    return Blocks(
        torch.unflatten(values, -1, (groups, -1)).view(torch.int8),
        unit * multiples,
        supers=(unit,),
        codes=table,
    )


def _odd(multiples: Tensor) -> Tensor:
    """Return the scales that stored integers stand for, as multiples of the unit."""
    return 2 * multiples + 1


def _nibble_scales(raw: Tensor) -> Tensor:
    return _odd(fields(raw, 4, 2).flatten(-2))


def _iq2_xxs(raw: Tensor) -> Blocks:
    """32 weights have 4 grid bytes, then a word with 4 signs of 7 bits and the scale on top."""
    places = torch.unflatten(raw[..., 2:], -1, (8, 8))[..., :4].flatten(-2).long()
    tops = words(raw[..., 2:], torch.int32)[..., 1::2]
    signs = _even_signs()[fields(tops, 7, 4).flatten(-2)]
    codes = _entries(grid("iq2_xxs"), places)
    return _blocks(codes, _odd(tops >> 28), half(raw, 0) / 8, IQ2_CODES, signs)


def _iq2_xs(raw: Tensor) -> Blocks:
    """8 weights have a word of 9 grid bits and 7 sign bits; 32 scales of 4 bits come last."""
    pairs = words(raw[..., 2:66], torch.int16)
    signs = _even_signs()[pairs >> 9]
    codes = _entries(grid("iq2_xs"), pairs & 511)
    return _blocks(codes, _nibble_scales(raw[..., 66:]), half(raw, 0) / 8, IQ2_CODES, signs)


def _iq2_s(raw: Tensor) -> Blocks:
    """8 weights have 10 grid bits, of which the upper 2 lie apart, and a byte of signs."""
    high = fields(raw[..., 66:74], 2, 4).flatten(-2).long()
    codes = _entries(grid("iq2_s"), raw[..., 2:34].long() | high << 8)
    signs = raw[..., 34:66].long()
    return _blocks(codes, _nibble_scales(raw[..., 74:]), half(raw, 0) / 8, IQ2_CODES, signs)


def _iq3_xxs(raw: Tensor) -> Blocks:
    """4 weights have a grid byte; a word per 32 weights is as in IQ2_XXS."""
    tops = words(raw[..., 66:], torch.int32)
    signs = _even_signs()[fields(tops, 7, 4).flatten(-2)]
    codes = _entries(grid("iq3_xxs"), raw[..., 2:66].long())
    return _blocks(codes, _odd(tops >> 28), half(raw, 0) / 4, IQ3_XXS_CODES, signs)


def _iq3_s(raw: Tensor) -> Blocks:
    """4 weights have 9 grid bits, of which the upper one lies apart; 8 weights a byte of signs."""
    high = fields(raw[..., 66:74], 1, 8).flatten(-2).long()
    codes = _entries(grid("iq3_s"), raw[..., 2:66].long() | high << 8)
    signs = raw[..., 74:106].long()
    return _blocks(codes, _nibble_scales(raw[..., 106:]), half(raw, 0), IQ3_S_CODES, signs)


def _iq1_codes(places: Tensor, negative: Tensor) -> Tensor:
    """Return codes: the ternary numbers of a grid, shifted by an eighth up or down."""
    return _entries(grid("iq1_s"), places) | (negative.unsqueeze(-1) << 2).to(torch.uint8)


def _iq1_s(raw: Tensor) -> Blocks:
    """8 weights have 11 grid bits; the upper 3 lie in a word per 32 weights, with their scale.

    The word's top bit is the sign of the eighth by which all 32 are shifted.
    """
    tops = words(raw[..., 34:50], torch.int16)
    high = fields(tops, 3, 4).flatten(-2)
    negative = (tops >> 15).repeat_interleave(4, -1)
    codes = _iq1_codes(raw[..., 2:34].long() | high << 8, negative)
    return _blocks(codes, _odd((tops >> 12) & 7), half(raw, 0) / 8, IQ1_CODES, None)


def _iq1_m(raw: Tensor) -> Blocks:
    """As IQ1_S, with a sign of the shift for 8 weights, and a scale of 3 bits for 16.

    The super-scale is a half that lies in the upper nibbles of the four words of scales.
    """
    tops = fields(raw[..., 32:48], 4, 2).flatten(-2).long()
    codes = _iq1_codes(raw[..., :32].long() | (tops & 7) << 8, tops >> 3)
    scale_words = words(raw[..., 48:56], torch.int16)
    upper = scale_words >> 12
    bits = (upper << torch.arange(0, 16, 4)).sum(-1, keepdim=True)
    unit = bits.to(torch.int16).view(torch.float16).float()
    multiples = _odd(fields(scale_words, 3, 4).flatten(-2))
    return _blocks(codes, multiples, unit / 8, IQ1_CODES, None)


GRID_DECODERS: dict[str, Callable[[Tensor], Blocks]] = {
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
