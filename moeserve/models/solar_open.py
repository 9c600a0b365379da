"""Solar Open: Llama's attention and DeepSeek-V3's experts in every layer.

Source: arXiv 2601.07022.
"""

from moeserve.loader.fields import Fields
from moeserve.models import family


def _spec_fields(config: Fields) -> family.SpecFields:
    rule = family.no_window(config)
    bias = config.boolean("attention_bias")
    mixer = family.attention(config, rule=rule, rope={"partial": True}, qkv_bias=bias)
    experts = family.moe(
        config, router=family.deepseek_router(config), shared=family.shared_experts(config)
    )
    return {"layers": family.layers(config, mixer, experts)}


FAMILY = family.Family(
    architecture="SolarOpenForCausalLM",
    model_type="solar_open",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=196608,
        hidden=4096,
        intermediate=10240,
        layers=48,
        heads=64,
        kv_heads=8,
        positions=131072,
        experts=128,
        top_k=8,
        expert_size=1280,
    )
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
)
