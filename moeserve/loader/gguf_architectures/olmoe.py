"""OLMoE."""

from moeserve.loader.gguf_architecture import GGUFArchitecture, Variants

ARCHITECTURES: dict[str, Variants] = {
    "olmoe": {"": GGUFArchitecture("OlmoeForCausalLM", keys={"attention.clamp_kqv": "clip_qkv"})},
}
