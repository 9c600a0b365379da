"""DeepSeek-V3 (V3, V3.1, R1, Kimi-K2, Moonlight): latent attention, dense first layers, a shared
expert, and a sigmoid router that adds a bias per expert for the choice.

- DeepSeek-V2 (V2, V2-Lite, Coder-V2): a softmax router, which may first choose groups of experts.
- GLM-4.7-Flash: V3's blocks in a small model.
- A.X-K1: V3 with a norm of the experts' output.

Source: arXiv 2405.04434, 2412.19437, 2507.20534, github.com/zai-org/GLM-4.5,
huggingface.co/skt/A.X-K1.
"""

from dataclasses import replace

from moeserve.blocks.feed_forward import Dense, MoE
from moeserve.blocks.weights import Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.ops.rules import RouterRule


def _v2(config: Fields) -> family.SpecFields:
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


def experts_of(config: Fields) -> MoE:
    """Read the experts. V3.2 and GLM-5 have the same."""
    config.only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    return family.moe(
        config, router=family.deepseek_router(config), shared=family.shared_experts(config)
    )


def _v3(config: Fields) -> family.SpecFields:
    blocks = family.first_dense(config, experts_of(config), family.dense(config))
    return family.with_mtp(config, family.layers(config, family.latent_attention(config), blocks))


def _listed_blocks(config: Fields) -> list[Dense | MoE]:
    """Return the block of each layer, for configs that may have `mlp_layer_types`."""
    experts = family.moe(
        config, router=family.deepseek_router(config), shared=family.shared_experts(config)
    )
    return family.listed_moe(config, experts, family.dense(config))


def _glm4_moe_lite(config: Fields) -> family.SpecFields:
    return family.with_mtp(
        config, family.layers(config, family.latent_attention(config), _listed_blocks(config))
    )


def _axk1(config: Fields) -> family.SpecFields:
    layers = family.layers(config, family.latent_attention(config), _listed_blocks(config))
    return {
        "layers": tuple(
            replace(layer, mlp_post_norm=isinstance(layer.feed_forward, MoE)) for layer in layers
        )
    }


V2 = family.Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    fields=_v2,
    defaults=family.sizes(
        vocab=102400,
        hidden=4096,
        intermediate=11008,
        layers=32,
        heads=32,
        kv_heads=None,
        positions=2048,
        experts=64,
        expert_size=1407,
    )
    | family.LATENT_DEFAULTS
    | {
        "eos_token_id": 2,
        "first_k_dense_replace": 0,
        "n_group": None,
        "n_shared_experts": 2,
        "topk_group": None,
        "topk_method": "greedy",
    },
)
FAMILY = family.Family(  # V3
    architecture="DeepseekV3ForCausalLM",
    model_type=("deepseek_v3", "kimi_k2"),
    fields=_v3,
    defaults=family.sizes(
        vocab=129280,
        hidden=7168,
        intermediate=18432,
        layers=61,
        heads=128,
        kv_heads=128,
        positions=4096,
        experts=256,
        top_k=8,
        expert_size=2048,
    )
    | family.LATENT_DEFAULTS
    | {
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "num_nextn_predict_layers": 1,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
)
KIMI_K25 = FAMILY.inside(
    architecture="KimiK25ForConditionalGeneration",
    model_type="kimi_k25",
    model="language_model.model.",
    head="language_model.lm_head.weight",
    foreign=("vision_tower.", "mm_projector."),
)
GLM4_MOE_LITE = family.Family(
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    fields=_glm4_moe_lite,
    defaults=family.sizes(
        vocab=154880,
        hidden=2048,
        intermediate=10240,
        layers=47,
        heads=20,
        kv_heads=20,
        positions=202752,
        experts=64,
        top_k=4,
        expert_size=1536,
    )
    | family.LATENT_DEFAULTS
    | {
        "eos_token_id": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "v_head_dim": 256,
    },
)
AXK1 = family.Family(
    architecture="AXK1ForCausalLM",
    model_type="axk1",
    fields=_axk1,
    defaults=family.sizes(
        vocab=163840,
        hidden=7168,
        intermediate=18432,
        layers=61,
        heads=64,
        kv_heads=64,
        positions=32768,
        experts=192,
        top_k=8,
        expert_size=2048,
    )
    | family.LATENT_DEFAULTS
    | {"eos_token_id": 163691, "n_group": 8, "routed_scaling_factor": 2.5, "topk_group": 4},
    names=Names(spelled={"mlp_post_norm.weight": ("post_mlp_layernorm.weight",)}),
)
