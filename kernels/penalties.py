"""Repetition, frequency and presence penalties, counted in the token table itself.

P rows with penalties, V vocabulary, L longest history, W rows of the work space. A row of the work
space counts how often each token occurs in its request; it is zeros before and after, since
applying a penalty takes the count away.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # tokens of history of one program
IN_PROMPT = tl.constexpr(1 << 30)


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """The rows with penalties, on the device."""

    row_P: Tensor  # int32: of the logits
    slot_P: Tensor  # int32: of the token table
    known_P: Tensor  # int32: tokens of the request
    num_prompt_P: Tensor  # int32: how many of them are its prompt
    repetition_P: Tensor  # float32
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
    """Return (positions, tokens, which of them exist, their counters' addresses) of a block of one
    row's history.
    """
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
    """One program: counts BLOCK tokens of one row's history."""
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
    """One program: takes the counts of BLOCK tokens of one row's history; taking one changes the
    token's logit.
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
    """Return work space for `rows` rows at a time."""
    return torch.zeros((rows, vocab_size), dtype=torch.int32, device=device)


def penalise(
    logits_SV: Tensor, table: Tensor, rows: PenaltyRows, longest: int, counts_WV: Tensor
) -> None:
    """Apply penalties to logits in place. table: int32 [slots, width], the tokens of each slot's
    request. longest: the most tokens of a row. counts_WV: from `new_counts`; its W rows are used at
    a time.

    Repetition divides positive and multiplies negative logits of every token in the history;
    frequency is subtracted once per occurrence in the answer, presence once if there is any. logits
    [4, 4, -4, 4], prompt [0, 2], answer [1, 1], repetition 2, frequency 0.5, presence 0.25 -> [2,
    0.75, -8, 4]
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
