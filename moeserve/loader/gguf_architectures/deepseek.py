"""DeepSeek-V2 and V3, and the models with their layers: Kimi-K2, GLM-4.7-Flash, dots.llm1."""

from moeserve.loader.gguf_architecture import SIGMOID, GGUFArchitecture, Variants

ARCHITECTURES: dict[str, Variants] = {
    "deepseek2": {
        "sigmoid": GGUFArchitecture("DeepseekV3ForCausalLM", gating=SIGMOID),
        "": GGUFArchitecture("DeepseekV2ForCausalLM"),
    },
    "dots1": {"": GGUFArchitecture("Dots1ForCausalLM", gating=SIGMOID)},
}
