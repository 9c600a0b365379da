"""All model families, by architecture."""

from importlib import import_module

from moeserve.models.family import Family

# the files beside this one; each has a FAMILY, or several architectures as FAMILIES
_FILES = """
    afmoe bailing_moe cohere2_moe deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe gemma4 glm4_moe
    gpt_oss granite_moe hunyuan_v1_moe hy_v3 jamba kimi_linear lfm2_moe llama llama4 mellum mimo_v2_flash minimax_m2
    mistral4 mixtral nemotron_h olmoe phimoe qwen2 qwen3_moe qwen3_next solar_open step3p5
"""


_MODULES = [import_module(f"moeserve.models.{file}") for file in _FILES.split()]
_FAMILIES = [
    family
    for module in _MODULES
    for family in getattr(module, "FAMILIES", None) or (module.FAMILY,)
]
FAMILIES: dict[str, Family] = {family.architecture: family for family in _FAMILIES}
