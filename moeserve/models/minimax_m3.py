"""MiniMax-M3: in most layers, index heads select the blocks of tokens that a query attends to.
Weights of norms are stored minus 1, and activations are clamped as in gpt-oss.

Source: huggingface.co/MiniMaxAI/MiniMax-M3.
"""

import operator
from dataclasses import replace
from typing import Any

from moeserve.blocks.attention import Attention
from moeserve.blocks.block_sparse_attention import BlockSparseAttention
from moeserve.blocks.feed_forward import Dense, MoE, SharedExpert
from moeserve.blocks.weights import Names
from moeserve.engine.kv_rule import FULL
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.mixtral import EXPERTS
from moeserve.models.spec import NormSpec
from moeserve.ops.rules import Activation, RouterRule

_SPARSE = "minimax_m3_sparse"
# Key in the published section `sparse_attention_config` -> key of transformers 5.
_SPARSE_KEYS = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(
        attention_output_gate=False,
        n_shared_experts=1,
        qk_norm_type="per_head",
        scoring_func="sigmoid",
        swiglu_beta=1.0,
        use_gemma_norm=True,
        use_qk_norm=True,
        use_routing_bias=True,
    )
    config = _with_published_keys(config)
    mixer = family.attention(config, rule=FULL, rope={"partial": True}, qk_norm="head")
    types = family.layer_types(
        config,
        known=("full_attention", _SPARSE),
        default=["full_attention"] * family.num_layers(config),
    )
    sparse = _sparse(config, mixer) if _SPARSE in types else mixer
    mixers = [sparse if kind == _SPARSE else mixer for kind in types]
    layers = family.layers(config, mixers, _blocks(config))
    return {"layers": layers, "norm": NormSpec(shift=family.norm_shift(config))}


def _with_published_keys(config: Fields) -> Fields:
    """Return the config with the published keys in the spelling of transformers 5."""
    values = dict(config.values)
    rotated = config.optional_integer("rotary_dim", 2, family.MAX_HEADS)
    if rotated is not None:
        values.setdefault(
            "partial_rotary_factor", rotated / config.integer("head_dim", 2, family.MAX_HEADS)
        )
    section = config.section("sparse_attention_config")
    lists_of_layers = dict.fromkeys(("sparse_attention_freq", "sparse_disable_index_value"))
    sparse = Fields(config.path, section, lists_of_layers, "sparse_attention_config.")
    sparse.only(sparse_score_type="max", sparse_init_block=0, use_sparse_attention=True)
    values |= {key: section[name] for name, key in _SPARSE_KEYS.items() if name in section}
    sparse_layers = sparse.integers("sparse_attention_freq", 0, 1)
    without_values = sparse.integers("sparse_disable_index_value", 0, 1) or sparse_layers
    if any(map(operator.gt, sparse_layers, without_values)):
        raise sparse.error("sparse_disable_index_value", "it must be 1 for each sparse layer")
    lists = (
        ("layer_types", sparse_layers, (_SPARSE, "full_attention")),
        ("mlp_layer_types", config.integers("moe_layer_freq", 0, 1), ("sparse", "dense")),
    )
    for key, flags, (kind, other) in lists:
        if values.get(key) is None and flags:
            values[key] = [kind if flag else other for flag in flags]
    return replace(config, values=values)


def _sparse(config: Fields, mixer: Attention) -> BlockSparseAttention:
    """Return the attention of sparse layers, which is `mixer` with index heads."""
    for key, size in (("index_n_heads", mixer.num_kv_heads), ("index_head_dim", mixer.head_dim)):
        if config.raw(key) != size:
            raise config.error(key, f"only the value of KV heads, {size}, is supported")
    top_k = config.integer("index_topk_blocks", 1, family.MAX_POSITION)
    return BlockSparseAttention(
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        rope=mixer.rope,
        qk_norm=mixer.qk_norm,
        block_size=config.integer("index_block_size", 1, family.MAX_POSITION),
        top_k=top_k,
        local=config.integer("index_local_blocks", 1, top_k),
    )


def _blocks(config: Fields) -> list[Dense | MoE]:
    """Read the feed-forward block of each layer."""
    activation = Activation(
        alpha=config.number("swiglu_alpha", 0, 100.0),
        limit=config.number("swiglu_limit", 0, family.MAX_MULTIPLIER),
        up_shift=1.0,
    )
    router = RouterRule(
        score="sigmoid",
        bias=True,
        renormalize=True,
        scale=config.number("routed_scaling_factor", 0, family.MAX_MULTIPLIER),
    )
    shared = SharedExpert(
        size=config.integer("shared_intermediate_size", 1, family.MAX_WIDTH),
        activation=activation,
        name="mlp.shared_experts",
    )
    experts = family.moe(
        config,
        size_key="intermediate_size",
        router=router,
        shared=shared,
        activation=activation,
    )
    mlp = replace(family.dense(config, "dense_intermediate_size"), activation=activation)
    return family.listed_moe(config, experts, mlp, num_first_dense=0)


def _spelled() -> dict[str, tuple[str, ...]]:
    """Return the names of tensors: as published, and as transformers 5 writes the text model."""
    names: dict[str, Any] = {
        "mlp.gate.weight": ("block_sparse_moe.gate.weight",),
        "mlp.gate.e_score_correction_bias": ("block_sparse_moe.e_score_correction_bias",),
    }
    for module in ("", "shared_experts."):
        published = f"block_sparse_moe.{module}" if module else "mlp."
        for half in ("gate", "up"):
            names[f"mlp.{module}{half}_proj.weight"] = (
                f"{published}{half}_proj.weight",
                f"mlp.{module}{half}_proj.weight",
                f"mlp.{module}gate_up_proj.weight",
            )
        names[f"mlp.{module}down_proj.weight"] = (f"{published}down_proj.weight",)
    for part in ("q_proj", "k_proj", "q_norm", "k_norm"):
        names[f"self_attn.index_{part}.weight"] = (
            f"self_attn.index_{part}.weight",
            f"self_attn.indexer.{part}.weight",
        )
    return names


FAMILY = family.Family(
    architecture="MiniMaxM3VLForCausalLM",
    model_type="minimax_m3_vl_text",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=200064,
        hidden=6144,
        intermediate=3072,
        layers=60,
        heads=64,
        kv_heads=4,
        positions=524288,
        experts=128,
        top_k=4,
    )
    | {
        "dense_intermediate_size": 12288,
        "eos_token_id": 200020,
        "head_dim": 128,
        "hidden_act": "swigluoai",
        "index_block_size": 128,
        "index_head_dim": 128,
        "index_local_blocks": 1,
        "index_n_heads": 4,
        "index_topk_blocks": 16,
        "moe_layer_freq": None,
        "rope_theta": 5_000_000.0,
        "rotary_dim": 64,
        "routed_scaling_factor": 2.0,
        "shared_intermediate_size": 3072,
        "sparse_attention_config": None,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    names=Names(experts=EXPERTS, spelled=_spelled(), foreign=("mtp.", "model.mtp.")),
    hidden_act="swigluoai",
)
MULTIMODAL = FAMILY.inside(
    architecture="MiniMaxM3SparseForConditionalGeneration",
    model_type="minimax_m3_vl",
    model="language_model.model.",
    head="language_model.lm_head.weight",
    foreign=(
        "language_model.model.mtp.",
        "language_model.mtp.",
        "mtp.",
        "multi_modal_projector.",
        "patch_merge_mlp.",
        "vision_tower.",
    ),
)
