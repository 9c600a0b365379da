"""The model families by architecture. Packages add theirs by entry points of "moeserve.models"."""

from typing import Any

from moeserve.models.family import Family
from moeserve.plugins import Registry

# architecture in config.json -> "module:variable" in this package
_BUILT_IN = {
    "AfmoeForCausalLM": "afmoe:FAMILY",
    "BailingMoeV2ForCausalLM": "bailing_moe:LING_2",
    "BailingMoeV2_5ForCausalLM": "bailing_moe:LING_2_5",
    "BailingMoeLinearV2ForCausalLM": "bailing_moe:LING_LINEAR_2",
    "Cohere2MoeForCausalLM": "cohere2_moe:FAMILY",
    "DeepseekV2ForCausalLM": "deepseek_v3:V2",
    "DeepseekV3ForCausalLM": "deepseek_v3:FAMILY",
    "KimiK25ForConditionalGeneration": "deepseek_v3:KIMI_K25",
    "Glm4MoeLiteForCausalLM": "deepseek_v3:GLM4_MOE_LITE",
    "AXK1ForCausalLM": "deepseek_v3:AXK1",
    "DeepseekV32ForCausalLM": "deepseek_v32:V32",
    "GlmMoeDsaForCausalLM": "deepseek_v32:GLM_5",
    "Dots1ForCausalLM": "dots1:FAMILY",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe:FAMILY",
    "ExaoneMoeForCausalLM": "exaone_moe:FAMILY",
    "Gemma4ForCausalLM": "gemma4:FAMILY",
    "Gemma4ForConditionalGeneration": "gemma4:MULTIMODAL",
    "Glm4MoeForCausalLM": "glm4_moe:FAMILY",
    "GptOssForCausalLM": "gpt_oss:FAMILY",
    "GraniteMoeForCausalLM": "granite_moe:FAMILY",
    "GraniteMoeSharedForCausalLM": "granite_moe:SHARED",
    "GraniteMoeHybridForCausalLM": "granite_moe:HYBRID",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe:FAMILY",
    "HYV3ForCausalLM": "hy_v3:FAMILY",
    "JambaForCausalLM": "jamba:FAMILY",
    "KimiLinearForCausalLM": "kimi_linear:FAMILY",
    "Lfm2MoeForCausalLM": "lfm2_moe:FAMILY",
    "LlamaForCausalLM": "llama:LLAMA",
    "MistralForCausalLM": "llama:MISTRAL",
    "Llama4ForCausalLM": "llama4:FAMILY",
    "Llama4ForConditionalGeneration": "llama4:MULTIMODAL",
    "MellumForCausalLM": "mellum:FAMILY",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash:FAMILY",
    "MiniMaxM2ForCausalLM": "minimax_m2:FAMILY",
    "Mistral4ForCausalLM": "mistral4:FAMILY",
    "Mistral3ForConditionalGeneration": "mistral4:MULTIMODAL",
    "MistralLarge3ForCausalLM": "mistral4:LARGE_3",
    "MixtralForCausalLM": "mixtral:FAMILY",
    "NemotronHForCausalLM": "nemotron_h:FAMILY",
    "OlmoeForCausalLM": "olmoe:OLMOE",
    "FlexOlmoForCausalLM": "olmoe:FLEX_OLMO",
    "PhimoeForCausalLM": "phimoe:FAMILY",
    "PhiMoEForCausalLM": "phimoe:PHI_MOE",
    "Qwen2ForCausalLM": "qwen2:QWEN2",
    "Qwen3ForCausalLM": "qwen2:QWEN3",
    "Qwen2MoeForCausalLM": "qwen2:QWEN2_MOE",
    "Qwen3MoeForCausalLM": "qwen3_moe:QWEN3_MOE",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_moe:QWEN3_VL_MOE",
    "Qwen3NextForCausalLM": "qwen3_next:NEXT",
    "Qwen3_5MoeForCausalLM": "qwen3_next:QWEN3_5_TEXT",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_next:QWEN3_5",
    "SolarOpenForCausalLM": "solar_open:FAMILY",
    "Step3p5ForCausalLM": "step3p5:FAMILY",
    "Step3p7ForConditionalGeneration": "step3p5:STEP_3_7",
}


def _misfit(architecture: str, part: Any) -> str:
    if not isinstance(part, Family):
        return f"it is a {type(part).__name__}, and must be a moeserve.models.family.Family"
    if part.architecture != architecture:
        return f"its architecture is {part.architecture!r}, and must be the entry point's name"
    return ""


FAMILIES: Registry[Family] = Registry(
    "moeserve.models",
    {name: f"moeserve.models.{target}" for name, target in _BUILT_IN.items()},
    misfit=_misfit,
)
