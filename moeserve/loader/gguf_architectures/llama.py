"""Llama, Mistral and Mixtral."""

from moeserve.loader.gguf_architecture import GGUFArchitecture, Variants

ARCHITECTURES: dict[str, Variants] = {
    "llama": {
        "expert_count": GGUFArchitecture("MixtralForCausalLM", interleaved_rope=True),
        "": GGUFArchitecture("LlamaForCausalLM", interleaved_rope=True),
    },
}
