"""A token-by-token reference of lightning attention, which transformers lacks (Ling 2.6).

It replaces the attention of layers in a transformers model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

GROUP = 3  # layers per group, of which the last one keeps its attention
NORM_GROUPS = 2  # groups of the norm over results


class LightningReference(nn.Module):
    """One layer with the tensor names of published checkpoints."""

    def __init__(self, config: Any, layer: int, dim: int) -> None:
        super().__init__()
        heads = config.num_attention_heads
        width = config.hidden_size
        self.heads = heads
        self.dim = dim
        self.eps = config.rms_norm_eps
        self.query_key_value = nn.Linear(width, 3 * heads * dim, bias=False)
        self.g_proj = nn.Linear(width, heads * dim, bias=False)
        self.dense = nn.Linear(heads * dim, width, bias=False)
        self.query_layernorm = nn.RMSNorm(dim, self.eps)
        self.key_layernorm = nn.RMSNorm(dim, self.eps)
        self.g_norm = nn.RMSNorm(heads * dim)  # only its weight is used
        # ALiBi slopes for a number of heads that is a power of two.
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])
        self.decays = slopes * -(1 - (layer - 1) / (config.num_hidden_layers - 1) + 1e-5)
        rotated = dim // 2
        self.freqs = config.rope_parameters["rope_theta"] ** -(
            torch.arange(0, rotated, 2) / rotated
        )

    def rotate(self, x_THd: Tensor) -> Tensor:
        """Rotate the first half of each head."""
        angles = (torch.arange(len(x_THd))[:, None] * self.freqs)[:, None]
        first, second, still = torch.split(x_THd, [self.dim // 4, self.dim // 4, self.dim // 2], -1)
        cos = angles.cos()
        sin = angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, still), -1)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """Return the output for one sequence from its beginning."""
        (x_TD,) = hidden_states
        q, k, v = (
            part.reshape(-1, self.heads, self.dim)
            for part in self.query_key_value(x_TD).chunk(3, -1)
        )
        q = self.rotate(self.query_layernorm(q)) * self.dim**-0.5
        k = self.rotate(self.key_layernorm(k))
        state = torch.zeros(self.heads, self.dim, self.dim)
        results = []
        for q_Hd, k_Hd, v_Hd in zip(q, k, v, strict=True):
            state = self.decays.exp()[:, None, None] * state + k_Hd[:, :, None] * v_Hd[:, None]
            results.append((q_Hd[:, :, None] * state).sum(1))
        grouped = torch.stack(results).view(len(x_TD), NORM_GROUPS, -1)
        normed = (
            torch.rms_norm(grouped, grouped.shape[2:], None, self.eps).flatten(1)
            * self.g_norm.weight
        )
        out: Tensor = self.dense(normed * self.g_proj(x_TD).sigmoid())
        return out[None], None


def add_lightning(model: Any, dim: int) -> None:
    """Replace the attention of most layers by lightning attention.

    The last layer of each group, and layers after the last whole group, keep theirs.
    """
    layers = model.model.layers
    for i, layer in enumerate(layers):
        if (i + 1) % GROUP and i < len(layers) // GROUP * GROUP:
            layer.self_attn = LightningReference(model.config, i, dim).eval()
