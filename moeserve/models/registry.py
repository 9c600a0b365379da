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
    "BailingHybridForCausalLM": "bailing_hybrid:FAMILY",
    "BailingMoeV3ForCausalLM": "bailing_hybrid:V3",
    "BeamForCausalLM": "beam:FAMILY",
    "Cohere2MoeForCausalLM": "cohere2_moe:FAMILY",
    "DbrxForCausalLM": "dbrx:FAMILY",
    "DeepseekV2ForCausalLM": "deepseek_v3:V2",
    "DeepseekV3ForCausalLM": "deepseek_v3:FAMILY",
    "KimiK25ForConditionalGeneration": "deepseek_v3:KIMI_K25",
    "Glm4MoeLiteForCausalLM": "deepseek_v3:GLM4_MOE_LITE",
    "AXK1ForCausalLM": "deepseek_v3:AXK1",
    "DeepseekV32ForCausalLM": "deepseek_v32:V32",
    "DeepseekV4ForCausalLM": "deepseek_v4:FAMILY",
    "GlmMoeDsaForCausalLM": "deepseek_v32:GLM_5",
    "Dots1ForCausalLM": "dots1:FAMILY",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe:FAMILY",
    "Ernie4_5_VLMoeForConditionalGeneration": "ernie4_5_moe:VISION",
    "ExaoneMoeForCausalLM": "exaone_moe:FAMILY",
    "FlintForCausalLM": "flint:FAMILY",
    "Gemma4ForCausalLM": "gemma4:FAMILY",
    "Gemma4ForConditionalGeneration": "gemma4:MULTIMODAL",
    "Glm4MoeForCausalLM": "glm4_moe:FAMILY",
    "Glm5NextForCausalLM": "glm5_next:FAMILY",
    "Glm5NextForConditionalGeneration": "glm5_next:MULTIMODAL",
    "Glm4vMoeForConditionalGeneration": "glm4_moe:VISION",
    "GptOssForCausalLM": "gpt_oss:FAMILY",
    "GraniteMoeForCausalLM": "granite_moe:FAMILY",
    "GraniteMoeSharedForCausalLM": "granite_moe:SHARED",
    "GraniteMoeSWAForCausalLM": "granite_moe:SWA",
    "GraniteMoeHybridForCausalLM": "granite_moe:HYBRID",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe:FAMILY",
    "HYV3ForCausalLM": "hy_v3:FAMILY",
    "HYV4ForCausalLM": "hy_v4:FAMILY",
    "HYV4VLForConditionalGeneration": "hy_v4:MULTIMODAL",
    "InklingForCausalLM": "inkling:FAMILY",
    "InklingForConditionalGeneration": "inkling:MULTIMODAL",
    "Inkling2ForCausalLM": "inkling2:FAMILY",
    "Inkling2ForConditionalGeneration": "inkling2:MULTIMODAL",
    "JambaForCausalLM": "jamba:FAMILY",
    "JetMoeForCausalLM": "jetmoe:FAMILY",
    "KimiLinearForCausalLM": "kimi_linear:FAMILY",
    "Kolibri1ForCausalLM": "kolibri1:FAMILY",
    "LagunaForCausalLM": "laguna:FAMILY",
    "LaraMiniForCausalLM": "lara_mini:FAMILY",
    "Lfm2MoeForCausalLM": "lfm2_moe:FAMILY",
    "LLaDA2MoeModelLM": "block_diffusion:LLADA2",
    "LlamaForCausalLM": "llama:LLAMA",
    "LongcatFlashForCausalLM": "longcat_flash:FAMILY",
    "MistralForCausalLM": "llama:MISTRAL",
    "Llama4ForCausalLM": "llama4:FAMILY",
    "Llama4ForConditionalGeneration": "llama4:MULTIMODAL",
    "MellumForCausalLM": "mellum:FAMILY",
    "MiMoV2FlashForCausalLM": "mimo_v2_flash:FAMILY",
    "MiniMaxForCausalLM": "minimax_01:FAMILY",
    "MiniMaxText01ForCausalLM": "minimax_01:TEXT_01",
    "MiniMaxM1ForCausalLM": "minimax_01:M1",
    "MiniMaxM2ForCausalLM": "minimax_m2:FAMILY",
    "MiniMaxM3VLForCausalLM": "minimax_m3:FAMILY",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3:MULTIMODAL",
    "Mistral4ForCausalLM": "mistral4:FAMILY",
    "Mistral3ForConditionalGeneration": "mistral4:MULTIMODAL",
    "MistralLarge3ForCausalLM": "mistral4:LARGE_3",
    "MistralLarge4ForConditionalGeneration": "mistral_large4:FAMILY",
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
    "Qwen4ExpForCausalLM": "qwen4_exp:TEXT",
    "Qwen4ExpForConditionalGeneration": "qwen4_exp:FAMILY",
    "SDARMoeForCausalLM": "block_diffusion:SDAR_MOE",
    "SarvamMLAForCausalLM": "sarvam:MLA",
    "SarvamMoEForCausalLM": "sarvam:MOE",
    "SolarOpenForCausalLM": "solar_open:FAMILY",
    "ZayaForCausalLM": "zaya:FAMILY",
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
