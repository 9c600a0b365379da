"""Hashes of n-grams of token ids, which are rows of an embedding table.

The n-grams of a token end with it and have 2, 3, ... tokens. They do not reach beyond the last
token `end_id` (the end of a text) before the token, nor beyond the beginning of the request:
missing tokens count as `end_id`. For each length of n-grams there are several heads, with a part of
the table each:

    row = (XOR over j < length of id_{t-j} * multiplier_j) mod size_head + offset_head

Ids, multipliers and hashes are int64.

Source: transformers' Qwen4ExpTextNGramEmbedding (Qwen3.8-Flash-Next).

Shapes: T tokens, N earlier tokens of the longest n-gram, H heads of all lengths, h = H / N heads of
a length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class NgramHash:
    """The constants of the hashes, int64. Heads are sorted by the length of their n-grams."""

    multipliers: Tensor  # [N + 1]
    sizes_H: Tensor
    offsets_H: Tensor
    end_id: int

    def __call__(self, ids_T: Tensor, earlier_ids_TN: Tensor) -> Tensor:
        """Return the rows of each token's n-grams, int64 [T, H].

        earlier_ids_TN: see `StepInputs`.
        """
        ends_TN = (earlier_ids_TN == self.end_id) | (earlier_ids_TN < 0)
        is_cut_TN = ends_TN.cummax(1).values if earlier_ids_TN.numel() else ends_TN
        window_TN = earlier_ids_TN.masked_fill(is_cut_TN, self.end_id)
        num_lengths = window_TN.shape[1]
        mixed_T = ids_T * self.multipliers[0]
        rows = []
        for j, (sizes_h, offsets_h) in enumerate(
            zip(self.sizes_H.chunk(num_lengths), self.offsets_H.chunk(num_lengths), strict=True)
        ):
            mixed_T = torch.bitwise_xor(mixed_T, window_TN[:, j] * self.multipliers[j + 1])
            rows.append(torch.remainder(mixed_T[:, None], sizes_h) + offsets_h)
        return torch.cat(rows, 1)
