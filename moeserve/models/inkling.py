"""Inkling: attention without rotary embedding, whose scores have learned biases by distance. Keys,
values and the outputs of blocks have short convolutions. The router also weighs shared experts.

Source: huggingface.co/thinkingmachines/Inkling.
"""

from collections.abc import Mapping
from dataclasses import replace

from moeserve.blocks.delayed_output import DelayedOutput
from moeserve.blocks.feed_forward import Dense, MoE
from moeserve.blocks.mixer import QueryScale
from moeserve.blocks.output_conv import OutputConv
from moeserve.blocks.relative_attention import RelativeAttention
from moeserve.blocks.weights import ExpertNames, Names
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.spec import LayerSpec
from moeserve.ops.rules import RouterRule

FULL_TYPE = "hybrid"
_SLIDING = "hybrid_sliding"
_STREAM = DelayedOutput()


def _text_fields(config: Fields) -> family.SpecFields:
    """Read the text model as transformers saves it: the LM head has a row per embedding."""
    if config.raw("unpadded_vocab_size") not in (None, config.raw("vocab_size")):
        raise config.error(
            "unpadded_vocab_size",
            "it must be vocab_size or null in this form; use the published checkpoint",
        )
    return _spec_fields(config)


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(
        gate_activation="sigmoid",
        inference_moe_w13_interleaved=True,
        norm_after_topk=True,
        o_bias=False,
        q_bias=False,
        shared_expert_sink=True,
        use_embed_norm=True,
        use_gate_bias=True,
        use_global_scale=True,
        use_sconv=True,
    )
    config.unsupported("final_logit_softcapping", "Inkling's logits have no cap; remove this key")
    config = _with_sizes(config)
    types = layer_types(config)
    mixers = {kind: attention(config, kind) for kind in dict.fromkeys(types)}
    blocks = _blocks(config)
    vocab = config.integer("vocab_size", 1, 2**22)
    return {
        "layers": tuple(
            layer
            for i, (kind, block) in enumerate(zip(types, blocks, strict=True))
            for layer in _layers(config, mixers[kind], block, i)
        ),
        "collapse": _STREAM,
        "embedding_norm": True,
        "embedding_rows": vocab,
        "logits_divisor": config.number("logits_mup_width_multiplier", 0, family.MAX_MULTIPLIER),
        "vocab_size": config.optional_integer("unpadded_vocab_size", 1, vocab) or vocab,
    }


def _with_sizes(config: Fields) -> Fields:
    """Return the config with the sizes of transformers. The published `intermediate_size` is that
    of experts, if there is a `dense_intermediate_size`.
    """
    dense_size = config.values.get("dense_intermediate_size")
    if dense_size is None:
        return config
    sizes = {
        "intermediate_size": dense_size,
        "moe_intermediate_size": config.raw("intermediate_size"),
    }
    return replace(config, values={**config.values, **sizes})


def layer_types(config: Fields) -> list[str]:
    """Read the type of each layer; by default every sixth has full attention."""
    count = family.num_layers(config)
    if config.raw("local_layer_ids") is None:
        sliding = {i for i in range(count) if (i + 1) % 6}
    else:
        sliding = set(config.integers("local_layer_ids", 0, count - 1))
    default = [_SLIDING if i in sliding else FULL_TYPE for i in range(count)]
    return family.layer_types(config, known=(FULL_TYPE, _SLIDING), default=default)


def attention(config: Fields, kind: str) -> RelativeAttention:
    """Read the attention of layers of one type."""
    slides = kind == _SLIDING
    prefix = "swa_" if slides else ""
    num_heads = config.integer(f"{prefix}num_attention_heads", 1, family.MAX_HEADS)
    kv_key = f"{prefix}num_key_value_heads"
    num_kv_heads = config.integer(kv_key, 1, num_heads)
    if num_heads % num_kv_heads:
        raise config.error(kv_key, f"it must divide the number of heads, {num_heads}")
    head_dim = config.integer(f"{prefix}head_dim", 2, family.MAX_HEADS)
    window = config.integer("sliding_window_size", 1, family.MAX_POSITION)
    floor = config.optional_integer("log_scaling_n_floor", 1, family.MAX_POSITION)
    query_scale = None
    if floor is not None and not slides:
        slope = config.number("log_scaling_alpha", 0, family.MAX_MULTIPLIER)
        query_scale = QueryScale(slope=slope, every=floor, first=1, form="log")
    extent = config.integer("rel_extent", 1, family.MAX_POSITION)
    return RelativeAttention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=None,
        rule=KVRule(window=window) if slides else FULL,
        qk_norm="head",
        scale=1.0 / head_dim,
        query_scale=query_scale,
        width=config.integer("hidden_size", 1, family.MAX_WIDTH),
        conv=_conv_size(config),
        relative_dim=config.integer("d_rel", 1, family.MAX_HEADS),
        extent=window if slides else extent,
    )


def _conv_size(config: Fields) -> int:
    return config.integer("conv_kernel_size", 2, family.MAX_CONV)


def _blocks(config: Fields) -> list[Dense | MoE]:
    """Read the feed-forward block of each layer. Shared experts are the last experts."""
    router = RouterRule(
        score="sigmoid",
        bias=True,
        renormalize=True,
        scale=config.number("route_scale", 0, family.MAX_MULTIPLIER),
        fp32=True,
    )
    experts = family.moe(config, router=router, router_factor=True)
    num_shared = config.integer("n_shared_experts", 1, family.MAX_EXPERTS)
    experts = replace(
        experts,
        num_experts=experts.num_experts + num_shared,
        top_k=experts.top_k + num_shared,
        num_always=num_shared,
    )
    num_dense = config.integer("dense_mlp_idx", 0, family.num_layers(config))
    return family.listed_moe(config, experts, family.dense(config), num_first_dense=num_dense)


def _layers(
    config: Fields, mixer: RelativeAttention, block: Dense | MoE, index: int
) -> tuple[LayerSpec, LayerSpec]:
    """Return a layer, and the convolution of its feed-forward block's output as another one."""
    conv = OutputConv(
        channels=mixer.width,
        conv=mixer.conv,
        name="mlp_sconv.conv1d.weight",
        scale="mlp.global_scale" if isinstance(block, Dense) else "",
    )
    stored_as = (index, index)
    return (
        LayerSpec(
            mixer=mixer,
            feed_forward=block,
            attn_connection=_STREAM,
            mlp_connection=DelayedOutput(holds=True),
            stored_as=stored_as,
        ),
        LayerSpec(
            mixer=conv,
            feed_forward=None,
            pre_norm=False,
            attn_connection=DelayedOutput(takes=True),
            stored_as=stored_as,
        ),
    )


_TEXT_EXPERTS = ExpertNames(
    gate_up="mlp.experts.gate_up_proj",
    down="mlp.experts.down_proj",
    always=ExpertNames(
        gate="mlp.shared_experts.gate_proj",
        up="mlp.shared_experts.up_proj",
        down="mlp.shared_experts.down_proj",
    ),
)
_PUBLISHED_EXPERTS = ExpertNames(
    gate_up="mlp.experts.w13_weight",
    down="mlp.experts.w2_weight",
    by_turns=True,
    always=ExpertNames(
        gate_up="mlp.shared_experts.shared_w13_weight",
        down="mlp.shared_experts.shared_w2_weight",
        by_turns=True,
    ),
)
# A layer's tensors: name in transformers -> published name.
PUBLISHED: Mapping[str, str] = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "self_attn.q_proj.weight": "attn.wq_du.weight",
    "self_attn.k_proj.weight": "attn.wk_dv.weight",
    "self_attn.v_proj.weight": "attn.wv_dv.weight",
    "self_attn.r_proj.weight": "attn.wr_du.weight",
    "self_attn.o_proj.weight": "attn.wo_ud.weight",
    "self_attn.q_norm.weight": "attn.q_norm.weight",
    "self_attn.k_norm.weight": "attn.k_norm.weight",
    "self_attn.k_sconv.conv1d.weight": "attn.k_sconv.weight",
    "self_attn.v_sconv.conv1d.weight": "attn.v_sconv.weight",
    "self_attn.rel_logits_proj.proj": "attn.rel_logits_proj.proj",
    "attn_sconv.conv1d.weight": "attn_sconv.weight",
    "mlp_sconv.conv1d.weight": "mlp_sconv.weight",
    "mlp.gate.e_score_correction_bias": "mlp.gate.bias",
    # Interleaved rows: see `by_turns`
    "mlp.gate_proj.weight": "mlp.w13_dn.weight",
    "mlp.up_proj.weight": "mlp.w13_dn.weight",
    "mlp.down_proj.weight": "mlp.w2_md.weight",
}
_TRANSPOSED = ("rel_logits_proj.proj",)
FAMILY = family.Family(
    architecture="InklingForCausalLM",
    model_type="inkling_text",
    fields=_text_fields,
    defaults=family.sizes(
        vocab=201024,
        hidden=6144,
        intermediate=24576,
        layers=66,
        heads=64,
        kv_heads=8,
        positions=131072,
        experts=256,
        top_k=6,
        expert_size=3072,
    )
    | {
        "conv_kernel_size": 4,
        "d_rel": 16,
        "dense_mlp_idx": 0,
        "eos_token_id": 2,
        "head_dim": 128,
        "local_layer_ids": None,
        "log_scaling_alpha": 0.1,
        "log_scaling_n_floor": None,
        "logits_mup_width_multiplier": 24.0,
        "n_shared_experts": 2,
        "rel_extent": 1024,
        "route_scale": 8.0,
        "sliding_window_size": 512,
        "swa_head_dim": 128,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 16,
        "unpadded_vocab_size": None,
    },
    names=Names(
        experts=(_TEXT_EXPERTS,),
        spelled={"embed_norm.weight": ("embed_tokens.embed_norm.weight",)},
        foreign=("model.mtp.",),
        transposed=_TRANSPOSED,
    ),
    aliases={
        "sconv_kernel_size": "conv_kernel_size",
        "model_max_length": "max_position_embeddings",
        "embedding_multiplier": "logits_mup_width_multiplier",
        "sliding_window": "sliding_window_size",
    },
)
MULTIMODAL = replace(FAMILY, fields=_spec_fields).inside(
    architecture="InklingForConditionalGeneration",
    model_type="inkling_mm_model",
    model="model.llm.",
    head="model.llm.unembed.weight",
    embed="embed.weight",
    experts=(_PUBLISHED_EXPERTS,),
    spelled={name: (published,) for name, published in PUBLISHED.items()},
    foreign=("model.mtp.", "model.audio.", "model.visual."),
    by_turns=("mlp.w13_dn.weight",),
)
