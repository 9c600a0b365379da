"""Granite 3 MoE, with and without a shared expert."""

from dataclasses import replace

from moeserve.loader.gguf_architecture import SHARED_SIZE, GGUFArchitecture, Variants

MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}
_GRANITE_MOE = GGUFArchitecture(
    "GraniteMoeForCausalLM",
    keys=MULTIPLIERS,
    defaults={
        "attention_multiplier": None,  # 1 / sqrt(head_dim)
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
    },
    required=("logit_scale",),
    interleaved_rope=True,
)
ARCHITECTURES: dict[str, Variants] = {
    "granitemoe": {
        SHARED_SIZE: replace(
            _GRANITE_MOE,
            architecture="GraniteMoeSharedForCausalLM",
            keys=MULTIPLIERS | {SHARED_SIZE: "shared_intermediate_size"},
            shared="shared_mlp",
        ),
        "": _GRANITE_MOE,
    },
}
