"""The Qwen3-MoE architecture in plain torch, for training the demo model on one CPU core."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Groups = list[tuple[int, int]]


@dataclass(frozen=True)
class Shape:
    vocab: int = 2560
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 8
    top_k: int = 2
    expert_hidden: int = 320
    max_positions: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-6


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


def matrix(*size: int, scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*size) * scale * size[-1] ** -0.5)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rotary(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angle = torch.outer(torch.arange(length, dtype=torch.float32), shape.rope_theta**-half)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention: for short rows on one core 3 x as fast as torch's own."""
    length = q.shape[-2]
    mask = torch.full((length, length), float("-inf"), dtype=q.dtype).triu(1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + mask
    mixed: Tensor = scores.softmax(dim=-1) @ v
    return mixed


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.heads * shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        self.q_proj = matrix(queries, shape.hidden)
        self.k_proj = matrix(keys, shape.hidden)
        self.v_proj = matrix(keys, shape.hidden)
        self.o_proj = matrix(shape.hidden, queries, scale=0.1)
        self.q_norm = Norm(shape.head_dim, shape.eps)
        self.k_norm = Norm(shape.head_dim, shape.eps)

    def project(self, x_td: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, all [T, heads, head_dim]."""
        d = self.shape.head_dim
        q = self.q_norm(linear(x_td, self.q_proj).view(-1, self.shape.heads, d))
        k = self.k_norm(linear(x_td, self.k_proj).view(-1, self.shape.kv_heads, d))
        v = linear(x_td, self.v_proj).view(-1, self.shape.kv_heads, d)
        repeat = self.shape.heads // self.shape.kv_heads
        k = rotate(k, cos, sin).repeat_interleave(repeat, 1)
        return rotate(q, cos, sin), k, v.repeat_interleave(repeat, 1)

    def forward(self, x_td: Tensor, cos: Tensor, sin: Tensor, groups: Groups) -> Tensor:
        """`groups` lists (rows, length): the tokens are rows of equal length, group after group."""
        d = self.shape.head_dim
        qkv = self.project(x_td, cos, sin)
        parts = []
        at = 0
        for rows, length in groups:
            cut = [
                t[at : at + rows * length].view(rows, length, -1, d).transpose(1, 2) for t in qkv
            ]
            y = causal_attention(*cut)
            parts.append(y.transpose(1, 2).reshape(rows * length, -1))
            at += rows * length
        return linear(torch.cat(parts), self.o_proj)


class Experts(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Parameter(torch.randn(shape.experts, shape.hidden) * 0.02)
        self.gate_up = matrix(shape.experts, 2 * shape.expert_hidden, shape.hidden)
        self.down = matrix(shape.experts, shape.hidden, shape.expert_hidden, scale=0.1)

    def forward(self, x_td: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the load-balancing loss (1.0 if all experts are used evenly)."""
        e = self.shape.experts
        k = self.shape.top_k
        scores_te = F.linear(x_td.float(), self.router).softmax(dim=-1)
        top_tk, ids_tk = scores_te.topk(k, dim=-1)
        weights_tk = top_tk / top_tk.sum(dim=-1, keepdim=True)
        flat = ids_tk.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=e)
        rows = order // k
        inputs = torch.split(x_td.index_select(0, rows), counts.tolist())
        outputs = []
        gate_up = self.gate_up.to(x_td.dtype)
        down = self.down.to(x_td.dtype)
        for x, w_in, w_out in zip(inputs, gate_up.unbind(0), down.unbind(0), strict=True):
            gate, up = F.linear(x, w_in).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, w_out))
        y = torch.cat(outputs) * weights_tk.flatten()[order].unsqueeze(-1).to(x_td.dtype)
        out = torch.zeros_like(x_td).index_add(0, rows, y)
        share = counts.float() / flat.numel()
        return out, e * (share * scores_te.mean(dim=0)).sum()


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_norm = Norm(shape.hidden, shape.eps)
        self.post_norm = Norm(shape.hidden, shape.eps)
        self.attention = Attention(shape)
        self.experts = Experts(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.input_norm(x), cos, sin, groups)
        y, balance = self.experts(self.post_norm(x))
        return x + y, balance


class ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy over a tied head, in chunks of rows whose logits fit in the cache."""

    @staticmethod
    def forward(ctx: Any, x_td: Tensor, embed: Tensor, labels_t: Tensor, rows: int = 256) -> Tensor:
        head = embed.to(x_td.dtype)
        grad_x = torch.empty_like(x_td)
        grad_head = torch.zeros_like(embed)
        total = torch.zeros(())
        chunks = (torch.split(t, rows) for t in (x_td, labels_t, grad_x))
        for x, labels, out in zip(*chunks, strict=True):
            log_p = F.linear(x, head).float().log_softmax(dim=-1)
            total += F.nll_loss(log_p, labels, reduction="sum")
            grad = log_p.exp_()
            grad[torch.arange(len(labels)), labels] -= 1.0
            low = grad.div_(len(x_td)).to(x.dtype)
            torch.mm(low, head, out=out)
            grad_head += low.T @ x
        ctx.save_for_backward(grad_x, grad_head)
        return total / len(x_td)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_head = ctx.saved_tensors
        return grad_x * grad, grad_head * grad, None, None


class DemoModel(nn.Module):
    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.embed = nn.Parameter(torch.randn(shape.vocab, shape.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.stack = [layer for layer in self.layers if isinstance(layer, Layer)]
        self.norm = Norm(shape.hidden, shape.eps)
        cos, sin = rotary(shape, shape.max_positions)
        self.cos = cos.to(dtype)
        self.sin = sin.to(dtype)

    def hidden(self, ids: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        """Return the final hidden states of the flat tokens `ids`, and the mean balancing loss."""
        positions = torch.cat([torch.arange(length).repeat(rows) for rows, length in groups])
        cos = self.cos[positions].unsqueeze(1)
        sin = self.sin[positions].unsqueeze(1)
        x = F.embedding(ids, self.embed).to(self.dtype)
        balance = torch.zeros(())
        for layer in self.stack:
            x, aux = layer(x, cos, sin, groups)
            balance = balance + aux / self.shape.layers
        return self.norm(x), balance

    def loss(self, ids: Tensor, labels: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        """Return the mean cross entropy over non-negative labels, and the balancing loss."""
        x, balance = self.hidden(ids, groups)
        keep = (labels >= 0).nonzero().squeeze(1)
        loss: Tensor = ChunkedLoss.apply(x.index_select(0, keep), self.embed, labels[keep])  # type: ignore[no-untyped-call]
        return loss, balance


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized; it learns matrices in far fewer steps than Adam.

    Each parameter is one matrix or a stack of matrices [..., rows, columns].
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                kept = state["momentum"].mul_(group["momentum"]).add_(p.grad)
                update = orthogonal(p.grad.add_(kept, alpha=group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.add_(update, alpha=-group["lr"] * scale)


def orthogonal(grad: Tensor, steps: int = 5) -> Tensor:
    """Return roughly the nearest semi-orthogonal matrices, by quintic Newton-Schulz."""
    a = 3.4445
    b = -4.7750
    c = 2.0315
    x = grad.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.reshape(-1, *x.shape[-2:])
    for _ in range(steps):
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, poly, x, beta=a)
    return (x.mT if tall else x).reshape(grad.shape)
