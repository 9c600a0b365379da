"""GLM-4.5 to 4.7."""

from moeserve.loader.gguf_architecture import SIGMOID, GGUFArchitecture, Variants

ARCHITECTURES: dict[str, Variants] = {
    "glm4moe": {"": GGUFArchitecture("Glm4MoeForCausalLM", gating=SIGMOID)},
}
