"""The GGUF architectures that can be read, one module for each group of families."""

from moeserve.loader.gguf_architecture import Variants
from moeserve.loader.gguf_architectures import (
    deepseek,
    glm,
    gpt_oss,
    granite,
    llama,
    minimax,
    olmoe,
    qwen,
)

ARCHITECTURES: dict[str, Variants] = {
    name: variants
    for module in (deepseek, glm, gpt_oss, granite, llama, minimax, olmoe, qwen)
    for name, variants in module.ARCHITECTURES.items()
}
