"""The demo model's MTP head in plain torch: one dense Qwen3 layer.

Shapes: T tokens in rows of L, R rows of equal length; J steps; N tokens with a loss; D model width;
H heads of width d; V vocabulary.

Sources: DeepSeek-V3 (arXiv 2412.19437) for the head, and EAGLE-3 (arXiv 2503.01840) for training
several steps in a row. The layout is that of Qwen3-Next.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model import Attention, DemoModel, Groups, Norm, Shape, linear, matrix, rotary

WIDTH = 512


class MTPHead(nn.Module):
    """Drafts token p + 2 from token p's hidden state and the embedding of p + 1.

    The hidden state is the model's, after its last norm. When the head drafts further, its result
    takes the place of the hidden state. Embedding and LM head are the model's.
    """

    def __init__(self, shape: Shape, width: int = WIDTH) -> None:
        super().__init__()
        self.shape = shape
        size = shape.hidden
        self.norm_embedding = Norm(size, shape.eps)
        self.norm_hidden = Norm(size, shape.eps)
        self.fc = matrix(size, 2 * size)
        self.input_norm = Norm(size, shape.eps)
        self.post_norm = Norm(size, shape.eps)
        self.attention = Attention(shape)
        self.gate = matrix(width, size)
        self.up = matrix(width, size)
        self.down = matrix(size, width, scale=0.1)
        self.norm = Norm(size, shape.eps)
        self.cos, self.sin = rotary(shape, shape.max_positions)

    def forward(
        self, ids_rl: Tensor, hidden_rld: Tensor, embed_vd: Tensor, steps: int
    ) -> list[Tensor]:
        """Return the hidden states [R, L, D] of each step.

        Step j of token p has read the tokens up to p + 1 + j. It attends to the first step's keys
        and values of earlier tokens, as it will when those are accepted, and to those of earlier
        steps of its own token. Positions less than j + 2 before the end of a row are meaningless.
        """
        rows, length = ids_rl.shape
        mask_ll = torch.full((length, length), float("-inf")).triu(1)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for step in range(steps):
            next_rld = F.embedding(ids_rl.roll(-1 - step, 1), embed_vd)
            x_rld = linear(
                torch.cat([self.norm_embedding(next_rld), self.norm_hidden(hidden_rld)], -1),
                self.fc,
            )
            at = torch.arange(step, step + length).repeat(rows)
            cos = self.cos[at].unsqueeze(1)
            sin = self.sin[at].unsqueeze(1)
            qkv = self.attention.project(self.input_norm(x_rld).flatten(0, 1), cos, sin)
            q, k, v = (t.view(rows, length, self.shape.heads, -1).transpose(1, 2) for t in qkv)
            keys.append(k)
            values.append(v)
            y = attend(q * self.shape.head_dim**-0.5, keys, values, mask_ll)
            x_rld = x_rld + linear(y.transpose(1, 2).flatten(2), self.attention.o_proj)
            y = self.post_norm(x_rld)
            x_rld = x_rld + linear(F.silu(linear(y, self.gate)) * linear(y, self.up), self.down)
            hidden_rld = self.norm(x_rld)
            found.append(hidden_rld)
        return found


def attend(q_rhld: Tensor, keys: list[Tensor], values: list[Tensor], mask_ll: Tensor) -> Tensor:
    """Attend over two sets of keys.

    Of the first keys, all up to the query's token are seen; of the others, only those of that
    token.
    """
    scores = [
        q_rhld @ keys[0].mT + mask_ll,
        *((q_rhld * k).sum(-1, keepdim=True) for k in keys[1:]),
    ]
    first, *others = torch.split(
        torch.cat(scores, -1).softmax(-1), [len(mask_ll), *[1] * (len(keys) - 1)], -1
    )
    y: Tensor = first @ values[0]
    for weight, v in zip(others, values[1:], strict=True):
        y = y + weight * v
    return y


class Distillation(torch.autograd.Function):
    """Mean KL divergence of each step from the model.

    It is computed in chunks of tokens whose logits fit in the cache.
    """

    @staticmethod
    def forward(
        ctx: Any,
        guess_jnd: Tensor,
        hidden_nd: Tensor,
        embed_vd: Tensor,
        temperature: float,
        rows: int = 256,
    ) -> Tensor:
        losses = torch.zeros(len(guess_jnd))
        grads = []
        for guess, hidden in zip(
            torch.split(guess_jnd, rows, 1), torch.split(hidden_nd, rows), strict=True
        ):
            log_p = (F.linear(hidden, embed_vd) / temperature).log_softmax(-1)
            p = log_p.exp()
            log_q = (F.linear(guess, embed_vd) / temperature).log_softmax(-1)
            losses += (p * (log_p - log_q)).sum((1, 2)) / len(hidden_nd)
            grads.append((log_q.exp_().sub_(p) @ embed_vd) / (temperature * len(hidden_nd)))
        ctx.save_for_backward(torch.cat(grads, 1))
        return losses

    @staticmethod
    def backward(ctx: Any, grad_j: Tensor) -> tuple[Tensor | None, ...]:
        (grad_jnd,) = ctx.saved_tensors
        return grad_jnd * grad_j[:, None, None], None, None, None, None


def guesses(
    model: DemoModel, head: MTPHead, ids_t: Tensor, labels_t: Tensor, groups: Groups, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the drafts of all tokens that have a label.

    The result is drafts [J, N, D], the model's hidden states [N, D], and the labels.
    """
    with torch.no_grad():
        hidden_td = model.hidden(ids_t, groups)[0]
    found = []
    kept = []
    at = 0
    for rows, length in groups:
        here = slice(at, at + rows * length)
        ids_rl = ids_t[here].view(rows, length)
        hidden_rld = hidden_td[here].view(rows, length, -1)
        column = torch.arange(length).repeat(rows)
        keep = ((labels_t[here] >= 0) & (column >= steps)).nonzero().squeeze(1)
        made = head(ids_rl, hidden_rld, model.embed.detach(), steps)
        found.append(torch.stack([x.flatten(0, 1)[keep - 1 - j] for j, x in enumerate(made)]))
        kept.append(at + keep)
        at += rows * length
    keep = torch.cat(kept)
    return torch.cat(found, 1), hidden_td[keep], labels_t[keep]


def matches(
    guess_jnd: Tensor,
    hidden_nd: Tensor,
    labels_n: Tensor,
    embed_vd: Tensor,
    temperature: float,
    noise: torch.Generator,
) -> Tensor:
    """Return whether each draft [J, N] is the token's label, if sampled with the model's noise.

    The labels must have been sampled from the model at this temperature. The noise is then drawn
    from its posterior (Gumbel noise given its argmax; Maddison et al., arXiv 1411.0030).
    """
    log_p = (F.linear(hidden_nd, embed_vd) / temperature).log_softmax(-1)
    gumbel = -torch.empty_like(log_p).exponential_(generator=noise).log()
    top = -torch.empty(len(log_p), 1).exponential_(generator=noise).log()
    given = -torch.logaddexp(-top, -(log_p + gumbel))
    given.scatter_(1, labels_n[:, None], top)
    log_q = (F.linear(guess_jnd, embed_vd) / temperature).log_softmax(-1)
    return (log_q + (given - log_p)).argmax(-1) == labels_n


def tokens_a_step(matches_jn: Tensor, drafts: int) -> float:
    """Return the mean tokens per step with `drafts` drafts.

    These are the model's own token and the drafts before the first wrong one.
    """
    found = matches_jn.tolist()
    count = matches_jn.shape[1]
    at = steps = 0
    while at < count:
        kept = next((j for j in range(drafts) if at + j >= count or not found[j][at + j]), drafts)
        at += kept + 1
        steps += 1
    return count / steps
