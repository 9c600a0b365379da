"""DeepSeek-V2 (V2, V2-Lite, Coder-V2): latent attention, first layers dense, shared experts, and a softmax router that
may keep the groups with the best experts only.

Source: arXiv 2405.04434.
"""

from moeserve.loader.files import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _fields(config: Fields) -> family.SpecFields:
    config.only(scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1)
    grouped = config.choice("topk_method", ("greedy", "group_limited_greedy")) != "greedy"
    router = RouterRule(
        groups=config.integer("n_group", 1, family.MAX_EXPERTS) if grouped else 1,
        kept_groups=config.integer("topk_group", 1, family.MAX_EXPERTS) if grouped else 1,
        group_score="max",
        scale=config.number("routed_scaling_factor", 0, family.MAX_MULTIPLIER),
        fp32=True,
    )
    bias = config.boolean("mlp_bias")
    experts = family.moe(config, router=router, shared=family.shared_experts(config, bias=bias))
    blocks = family.first_dense(config, experts, family.dense(config, bias=bias))
    return {"layers": family.layers(config, family.latent_attention(config), blocks)}


FAMILY = family.Family(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    _fields,
    family.sizes(102400, 4096, 11008, 32, 32, None, 2048, experts=64, expert_size=1407)
    | family.LATENT
    | {
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "n_group": None,
        "n_shared_experts": 2,
        "topk_group": None,
        "topk_method": "greedy",
    },
)
