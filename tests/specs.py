"""Model specs for tests without a config.json: grouped-query attention, windows and experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeserve.blocks.attention import Attention
from moeserve.blocks.feed_forward import Dense, MoE, SharedExpert
from moeserve.blocks.rope import RopeSpec
from moeserve.engine.kv_rule import KVRule
from moeserve.models.spec import LayerSpec, ModelSpec
from moeserve.ops.rules import RouterRule


def make_spec(
    *,
    num_layers: int = 2,
    windows: Sequence[int | None] | None = None,
    moe_layers: Sequence[bool] = (),
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 2,
    intermediate_size: int = 8,
    num_experts: int = 0,
    experts_per_token: int = 0,
    expert_size: int = 0,
    shared_expert_size: int = 0,
    **fields: Any,
) -> ModelSpec:
    """Return a spec; `fields` are further fields of Attention and of ModelSpec."""
    attention = {
        name: fields.pop(name) for name in Attention.__dataclass_fields__ if name in fields
    }
    mlp = Dense(size=intermediate_size)
    experts = None
    if num_experts:
        router = RouterRule(renormalize=True)
        shared = SharedExpert(size=shared_expert_size, gated=True) if shared_expert_size else None
        experts = MoE(
            num_experts=num_experts,
            top_k=experts_per_token,
            size=expert_size,
            router=router,
            shared=shared,
        )
    layers = []
    for i in range(num_layers):
        mixer = Attention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=RopeSpec(),
            rule=KVRule(windows[i] if windows else None),
            **attention,
        )
        block = experts if experts and moe_layers[i] else mlp
        layers.append(LayerSpec(mixer=mixer, feed_forward=block))
    usual = {"architecture": "Fake", "dtype": "float32", "max_position": 512, "norm_eps": 1e-6}
    return ModelSpec(layers=tuple(layers), **{**usual, **fields})
