"""Qwen2 and Qwen3, dense and MoE."""

from moeserve.loader.gguf_architecture import SHARED_SIZE, GGUFArchitecture, Variants

ARCHITECTURES: dict[str, Variants] = {
    "qwen2": {"": GGUFArchitecture("Qwen2ForCausalLM")},
    "qwen2moe": {
        "": GGUFArchitecture(
            "Qwen2MoeForCausalLM",
            keys={SHARED_SIZE: "shared_expert_intermediate_size"},
            shared="mlp.shared_expert",
        )
    },
    "qwen3": {"": GGUFArchitecture("Qwen3ForCausalLM")},
    "qwen3moe": {"": GGUFArchitecture("Qwen3MoeForCausalLM", defaults={"norm_topk_prob": True})},
    # The text model of Qwen3-VL and Qwen3-Omni. For text, all axes have the same position.
    "qwen3vlmoe": {
        "": GGUFArchitecture(
            "Qwen3MoeForCausalLM",
            defaults={"norm_topk_prob": True},
            other_keys=("n_deepstack_layers", "rope.dimension_sections"),
        )
    },
}
