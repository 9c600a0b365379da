"""Model specs for benchmarks without a config.json: equal layers with grouped-query attention and
experts.
"""

from __future__ import annotations

import msgspec

from moeserve.blocks.attention import Attention
from moeserve.blocks.feed_forward import MoE
from moeserve.blocks.rope import RopeSpec
from moeserve.models.spec import LayerSpec, ModelSpec
from moeserve.ops.rules import RouterRule


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of such a model."""

    hidden: int
    layers: int
    heads: int
    experts: int
    top_k: int
    expert_size: int
    architecture: str = "MixtralForCausalLM"
    head_dim: int = 128
    vocab: int = 4096

    def spec(self) -> ModelSpec:
        """Return the spec, in fp32."""
        mixer = Attention(
            num_heads=self.heads,
            num_kv_heads=max(1, self.heads // 4),
            head_dim=self.head_dim,
            rope=RopeSpec(),
        )
        experts = MoE(
            num_experts=self.experts,
            top_k=self.top_k,
            size=self.expert_size,
            router=RouterRule(renormalize=True),
        )
        return ModelSpec(
            architecture=self.architecture,
            dtype="float32",
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            max_position=4096,
            norm_eps=1e-5,
            layers=(LayerSpec(mixer=mixer, feed_forward=experts),) * self.layers,
        )
