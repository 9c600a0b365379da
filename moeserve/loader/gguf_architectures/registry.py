"""The table of GGUF architectures that can be read."""

from moeserve.loader.gguf_architecture import Variants
from moeserve.loader.gguf_architectures import (
    afmoe,
    bailing,
    cohere,
    deepseek,
    ernie,
    exaone,
    gemma,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    jamba,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    mellum,
    mimo,
    minimax,
    mistral,
    nemotron,
    olmoe,
    phi,
    qwen,
    qwen_next,
    step,
)

ARCHITECTURES: dict[str, Variants] = {
    name: variants
    for module in (
        afmoe,
        bailing,
        cohere,
        deepseek,
        ernie,
        exaone,
        gemma,
        glm,
        gpt_oss,
        granite,
        hunyuan,
        jamba,
        kimi_linear,
        lfm2,
        llama,
        llama4,
        mellum,
        mimo,
        minimax,
        mistral,
        nemotron,
        olmoe,
        phi,
        qwen,
        qwen_next,
        step,
    )
    for name, variants in module.ARCHITECTURES.items()
}
