"""Repetition, frequency and presence penalties, computed from the token table.

A row of the workspace counts how often each token occurs in a request. It is zero before and after,
because applying a penalty resets the count.

P rows with penalties, V vocabulary, L longest history, W rows of the workspace.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # tokens of history per program
IN_PROMPT = tl.constexpr(1 << 30)  # flag of a count: the token is in the prompt


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """The rows with penalties, on the device."""

    row_P: Tensor  # int32: row of the logits
    slot_P: Tensor  # int32: slot of the token table
    known_P: Tensor  # int32: number of tokens of the request
    num_prompt_P: Tensor  # int32: number of these that are its prompt
    repetition_P: Tensor  # float32, like the next two
    frequency_P: Tensor
    presence_P: Tensor


@triton.jit
def history_block(
    table_ptr,
    slot_ptr,
    known_ptr,
    counts_ptr,
    work,
    first,
    table_stride,
    width,
    BLOCK: tl.constexpr,
):
    """Load a block of one row's history: (positions, tokens, mask, addresses of their counts)."""
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_known = place < tl.load(known_ptr + first + work)
    slot = tl.load(slot_ptr + first + work).to(tl.int64)
    token = tl.load(table_ptr + slot * table_stride + place, mask=is_known, other=0)
    return place, token, is_known, counts_ptr + work * width + token


@triton.jit(do_not_specialize=["first"])
def count_kernel(
    table_ptr,
    slot_ptr,
    known_ptr,
    num_prompt_ptr,
    counts_ptr,
    first,
    table_stride,
    width,
    BLOCK: tl.constexpr,
):
    """One program counts BLOCK tokens of one row's history."""
    work = tl.program_id(0).to(tl.int64)
    place, _, is_known, counted = history_block(
        table_ptr, slot_ptr, known_ptr, counts_ptr, work, first, table_stride, width, BLOCK
    )
    in_prompt = place < tl.load(num_prompt_ptr + first + work)
    tl.atomic_or(counted, IN_PROMPT, mask=is_known & in_prompt, sem="relaxed")
    tl.atomic_add(counted, 1, mask=is_known & ~in_prompt, sem="relaxed")


@triton.jit(do_not_specialize=["first"])
def penalty_kernel(
    logits_ptr, table_ptr, row_ptr, slot_ptr, known_ptr, repetition_ptr, frequency_ptr,
    presence_ptr, counts_ptr,
    first, stride, table_stride, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program applies the penalties of BLOCK tokens of one row's history.

    It resets each count atomically; the occurrence that sees a count changes the token's logit.
    """
    work = tl.program_id(0).to(tl.int64)
    _, token, is_known, counted = history_block(
        table_ptr, slot_ptr, known_ptr, counts_ptr, work, first, table_stride, width, BLOCK
    )
    count = tl.atomic_xchg(counted, tl.zeros((BLOCK,), tl.int32), mask=is_known, sem="relaxed")
    is_mine = is_known & (count != 0)
    count = count & (IN_PROMPT - 1)
    logit_ptr = logits_ptr + tl.load(row_ptr + first + work).to(tl.int64) * stride + token
    x = tl.load(logit_ptr, mask=is_mine, other=0.0).to(tl.float32)
    repetition = tl.load(repetition_ptr + first + work)
    x = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    x -= tl.load(frequency_ptr + first + work) * count.to(tl.float32)
    x -= tl.where(count > 0, tl.load(presence_ptr + first + work), 0.0)
    tl.store(logit_ptr, x.to(logits_ptr.dtype.element_ty), mask=is_mine)


def new_counts(rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Allocate the workspace for `rows` rows at a time."""
    return torch.zeros((rows, vocab_size), dtype=torch.int32, device=device)


def penalise(
    logits_SV: Tensor, table: Tensor, rows: PenaltyRows, longest: int, counts_WV: Tensor
) -> None:
    """Apply penalties to logits in place.

    The repetition penalty divides positive and multiplies negative logits of every token in the
    history. The frequency penalty is subtracted once per occurrence in the output, the presence
    penalty once if there is any.

    table: int32 [slots, width], the tokens of each slot's request.
    longest: the most tokens of a request.
    counts_WV: from `new_counts`; W rows are processed at a time.

    Example: logits [4, 4, -4, 4], prompt [0, 2], output [1, 1], repetition 2, frequency 0.5,
    presence 0.25 -> [2, 0.75, -8, 4]
    """
    width = logits_SV.shape[1]
    assert counts_WV.shape[1] == width, (counts_WV.shape, logits_SV.shape)
    assert longest <= table.shape[1], (longest, table.shape)
    assert logits_SV.stride(1) == table.stride(1) == 1, (logits_SV.stride(), table.stride())
    for first in range(0, len(rows.row_P) if longest else 0, len(counts_WV)):
        grid = min(len(counts_WV), len(rows.row_P) - first), triton.cdiv(longest, BLOCK)
        count_kernel[grid](
            table, rows.slot_P, rows.known_P, rows.num_prompt_P, counts_WV, first, table.stride(0),
            width,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        penalty_kernel[grid](
            logits_SV, table, rows.row_P, rows.slot_P, rows.known_P,
            rows.repetition_P, rows.frequency_P, rows.presence_P, counts_WV,
            first, logits_SV.stride(0), table.stride(0), width, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
