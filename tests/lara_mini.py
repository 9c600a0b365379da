"""A token-by-token reference of what Lara Mini has and Flint lacks: gated delta nets and a softmax
router. It replaces parts of a Flint model of transformers, whose attention sinks get no weight.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DELTA_LAYERS = (0, 2)  # numbers of the layers that are gated delta nets
SIZES = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


class GatedDeltaReference(nn.Module):
    """One layer with the tensor names of published checkpoints.

    G: heads of queries and keys. H: heads of values. d and v: their widths. K: convolution.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.G, self.H, self.d, self.v, self.K = SIZES.values()
        self.parts = [self.G * self.d, self.G * self.d, self.H * self.v]
        width = config.hidden_size
        convolved = sum(self.parts)
        self.in_proj = nn.Linear(width, convolved + self.H * (self.v + 2), bias=False)
        self.conv1d = nn.Conv1d(convolved, convolved, self.K, groups=convolved, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.H))
        self.dt_bias = nn.Parameter(torch.zeros(self.H))
        self.out_norm = nn.RMSNorm(self.v, config.rms_norm_eps)
        self.out_proj = nn.Linear(self.H * self.v, width, bias=False)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """Return the output for one sequence from its beginning."""
        (x_TD,) = hidden_states
        sizes = [sum(self.parts), self.H * self.v, self.H, self.H]
        mixed, gates, beta, rates = torch.split(self.in_proj(x_TD), sizes, -1)
        mixed = F.silu(self.conv1d(F.pad(mixed.T, (self.K - 1, 0)))).T
        q, k, v_THv = (
            part.reshape(-1, *shape)
            for part, shape in zip(
                torch.split(mixed, self.parts, -1),
                ((self.G, self.d), (self.G, self.d), (self.H, self.v)),
                strict=True,
            )
        )
        repeats = self.H // self.G
        q_THd = unit(q).repeat_interleave(repeats, 1) * self.d**-0.5
        k_THd = unit(k).repeat_interleave(repeats, 1)
        decays_TH = (-self.A_log.exp() * F.softplus(rates + self.dt_bias)).exp()
        state = torch.zeros(self.H, self.d, self.v)
        results = []
        for q_Hd, k_Hd, v_Hv, decay_H, beta_H in zip(
            q_THd, k_THd, v_THv, decays_TH, beta.sigmoid(), strict=True
        ):
            state = state * decay_H[:, None, None]
            seen_Hv = (k_Hd[:, :, None] * state).sum(1)
            new_Hv = beta_H[:, None] * (v_Hv - seen_Hv)
            state = state + k_Hd[:, :, None] * new_Hv[:, None]
            results.append((q_Hd[:, :, None] * state).sum(1))
        normed = self.out_norm(torch.stack(results)) * F.silu(gates.view(-1, self.H, self.v))
        out: Tensor = self.out_proj(normed.flatten(1))
        return out[None], None


def unit(x: Tensor) -> Tensor:
    """Return x / |x| of each head."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def softmax_router(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logits, weights, experts), as Flint's router does, with softmax scores."""
    logits = F.linear(hidden_states.reshape(-1, self.hidden_dim).float(), self.weight.float())
    weights, experts = logits.softmax(-1).topk(self.top_k, dim=-1)
    return logits, weights / weights.sum(-1, keepdim=True), experts


def make_lara_mini(model: Any) -> None:
    """Change a Flint model into Lara Mini."""
    for i, layer in enumerate(model.model.layers):
        if i in DELTA_LAYERS:
            layer.self_attn = GatedDeltaReference(model.config).eval()
        layer.mlp.gate.forward = MethodType(softmax_router, layer.mlp.gate)


def without_sinks(model: Any) -> None:
    """Give attention sinks no weight."""
    for name, tensor in model.named_parameters():
        if name.endswith("sinks"):
            tensor.data.fill_(-torch.inf)
