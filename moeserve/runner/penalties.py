"""Repetition, frequency and presence penalties, computed from the device's own token table.

No state is kept per request: history is read where the sampler wrote it, so a penalty is right one step ahead of
the host, after a preemption and after a replay, at a cost linear in the history. r rows, L longest history.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_penalties(
    x_rV: Tensor,
    history_rL: Tensor,
    known_r: Tensor,
    num_prompt_r: Tensor,
    repetition_r: Tensor,
    frequency_r: Tensor,
    presence_r: Tensor,
) -> None:
    """Changes logits x_rV in place.

    history_rL: int64 token ids of which row i has known_r[i] (the rest is arbitrary), the first num_prompt_r[i] of
    them prompt. Repetition divides positive and multiplies negative logits of every token in the history; frequency
    is subtracted once per occurrence in the answer, presence once if there is any (as OpenAI defines them).
    """
    index_L = torch.arange(history_rL.shape[1], device=x_rV.device)
    known_rL = index_L < known_r.unsqueeze(1)
    # Unknown entries repeat the first token: writing the same value twice changes nothing.
    ids_rL = torch.where(known_rL, history_rL, history_rL[:, :1])
    counts_rV = torch.zeros(x_rV.shape, dtype=torch.int32, device=x_rV.device)
    in_answer_rL = known_rL & (index_L >= num_prompt_r.unsqueeze(1))
    counts_rV.scatter_add_(1, ids_rL, in_answer_rL.int())
    counts_rL = counts_rV.gather(1, ids_rL)
    x_rL = x_rV.gather(1, ids_rL)
    repetition_r1 = repetition_r.unsqueeze(1)
    x_rL = torch.where(x_rL > 0, x_rL / repetition_r1, x_rL * repetition_r1)
    x_rL -= frequency_r.unsqueeze(1) * counts_rL
    x_rL -= presence_r.unsqueeze(1) * (counts_rL > 0)
    x_rV.scatter_(1, ids_rL, x_rL)
