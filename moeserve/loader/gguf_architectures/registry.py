"""The GGUF architectures that can be read, and the module of each, imported when it is needed."""

from importlib import import_module

from moeserve.loader.gguf_architecture import Variants

# general.architecture -> module in this package, whose ARCHITECTURES have the architecture
_MODULES = {
    "afmoe": "afmoe",
    "bailingmoe2": "bailing",
    "cohere2moe": "cohere",
    "deepseek2": "deepseek",
    "deepseek32": "deepseek",
    "dots1": "deepseek",
    "ernie4_5-moe": "ernie",
    "exaone-moe": "exaone",
    "gemma4": "gemma",
    "glm-dsa": "glm",
    "glm4moe": "glm",
    "gpt-oss": "gpt_oss",
    "granitehybrid": "granite",
    "granitemoe": "granite",
    "hunyuan-moe": "hunyuan",
    "hy_v3": "hunyuan",
    "jamba": "jamba",
    "kimi-linear": "kimi_linear",
    "lfm2moe": "lfm2",
    "llama": "llama",
    "llama4": "llama4",
    "mellum": "mellum",
    "mimo2": "mimo",
    "minimax-m2": "minimax",
    "mistral4": "mistral",
    "nemotron_h": "nemotron",
    "nemotron_h_moe": "nemotron",
    "olmoe": "olmoe",
    "phimoe": "phi",
    "qwen2": "qwen",
    "qwen2moe": "qwen",
    "qwen3": "qwen",
    "qwen35moe": "qwen_next",
    "qwen3moe": "qwen",
    "qwen3next": "qwen_next",
    "qwen3vlmoe": "qwen",
    "qwen4exp": "qwen4exp",
    "step35": "step",
}
ARCHITECTURES = tuple(_MODULES)


def variants_of(architecture: str) -> Variants:
    """Return the variants of one of ARCHITECTURES."""
    module = import_module(f"moeserve.loader.gguf_architectures.{_MODULES[architecture]}")
    variants: Variants = module.ARCHITECTURES[architecture]
    return variants
