"""Inkling 2: attention with learned biases by distance and clipped heads, short convolutions, and
blocks that attend to the residual streams of earlier blocks of layers.

Source: huggingface.co/thinkingmachines/Inkling-2-Small-MXFP8.
"""

from dataclasses import replace

from moeserve.blocks.block_residual import BlockResidual
from moeserve.blocks.clipped_attention import ClippedAttention
from moeserve.blocks.feed_forward import MoE
from moeserve.blocks.output_conv import OutputConv
from moeserve.blocks.weights import ExpertNames, Names
from moeserve.loader.fields import Fields
from moeserve.models import family, inkling
from moeserve.models.spec import LayerSpec
from moeserve.ops.rules import Activation

_CAP = 1e6
_INPUT_NORMS = ("input_layernorm.weight",)
_DYNAMIC_NORMS = tuple(f"{x}_input_layernorm.weight" for x in "qkv")
_MLP_NORMS = ("post_attention_layernorm.weight",)


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(scoring_func="sigmoid")
    types = inkling.layer_types(config)
    mixers = {kind: _attention(config, kind) for kind in dict.fromkeys(types)}
    every = config.integer("n_layers_per_attn_res_block", 1, family.MAX_LAYERS)
    experts = _experts(config)
    vocab = config.integer("vocab_size", 1, 2**22)
    return {
        "layers": tuple(
            layer
            for i, kind in enumerate(types)
            for layer in _layers(mixers[kind], experts, i, every)
        ),
        "collapse": BlockResidual(
            query="attn_res.output_query", streams=(len(types) - 1) // every + 2
        ),
        "embedding_norm": True,
        "embedding_rows": vocab,
        "logits_cap": config.number("final_logit_softcapping", 0, _CAP),
        "vocab_size": config.integer("unpadded_vocab_size", 1, vocab),
    }


def _attention(config: Fields, kind: str) -> ClippedAttention:
    """Read the attention of layers of one type."""
    base = inkling.attention(config, kind)
    return ClippedAttention(
        num_heads=base.num_heads,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        rope=None,
        rule=base.rule,
        query_scale=base.query_scale,
        gate="element",
        width=base.width,
        conv=base.conv,
        relative_dim=base.relative_dim,
        extent=base.extent,
        clip_norm=config.number("qk_l2_clip_threshold", 0, _CAP),
        relative_clip=config.number("rel_l2_clip_threshold", 0, _CAP),
        dynamic=kind == inkling.FULL_TYPE,
    )


def _experts(config: Fields) -> MoE:
    router = replace(
        family.SIGMOID_ROUTER, scale=config.number("route_scale", 0, family.MAX_MULTIPLIER)
    )
    activation = Activation(
        gate_cap=config.number("mlp_gate_softcap", 0, _CAP),
        up_cap=config.number("mlp_up_softcap", 0, _CAP),
    )
    return family.moe(config, router=router, activation=activation)


def _layers(
    mixer: ClippedAttention, experts: MoE, index: int, every: int
) -> tuple[LayerSpec, LayerSpec]:
    """Return a layer, and the convolution of its experts' output as another one.

    every: the layers after which a residual stream is kept.
    """
    keeps = index % every == 0
    streams = index // every + 2  # after attention
    read = BlockResidual(
        query=f"attn_res.attn_queries.{index - 1}" if index else "",
        norms=_DYNAMIC_NORMS if mixer.dynamic else _INPUT_NORMS,
        outputs=3 if mixer.dynamic else 1,
        keeps=keeps,
        streams=streams - 1 if keeps else streams,
    )
    mlp = BlockResidual(
        query=f"attn_res.mlp_queries.{index}", norms=_MLP_NORMS, holds=True, streams=streams
    )
    conv = OutputConv(
        channels=mixer.width,
        conv=mixer.conv,
        name="mlp_sconv.conv1d.weight",
        factor=(mixer.conv + 1) ** -0.5,
    )
    first = LayerSpec(
        mixer=mixer,
        feed_forward=experts,
        pre_norm=False,
        attn_connection=read,
        mlp_connection=mlp,
        stored_as=(index, index),
    )
    second = LayerSpec(
        mixer=conv,
        feed_forward=None,
        pre_norm=False,
        attn_connection=BlockResidual(takes=True, streams=streams),
        stored_as=(index, index),
    )
    return first, second


FAMILY = family.Family(
    architecture="Inkling2ForCausalLM",
    model_type="inkling2_text",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=201024,
        hidden=4608,
        intermediate=2304,
        layers=48,
        heads=48,
        kv_heads=8,
        positions=1048576,
        experts=384,
        top_k=8,
        expert_size=2304,
    )
    | {
        "conv_kernel_size": 4,
        "d_rel": 16,
        "eos_token_id": 200006,
        "final_logit_softcapping": 30.0,
        "head_dim": 128,
        "local_layer_ids": None,
        "log_scaling_alpha": 0.1,
        "log_scaling_n_floor": 128_000,
        "mlp_gate_softcap": 4.0,
        "mlp_up_softcap": 25.0,
        "n_layers_per_attn_res_block": 6,
        "qk_l2_clip_threshold": 22.627416997969522,
        "rel_extent": 1024,
        "rel_l2_clip_threshold": 8.0,
        "route_scale": 8.0,
        "scoring_func": "sigmoid",
        "sliding_window_size": 1024,
        "swa_head_dim": 128,
        "swa_num_attention_heads": 48,
        "swa_num_key_value_heads": 8,
        "unpadded_vocab_size": 200_058,
    },
    names=Names(
        model="model.llm.",
        head="model.llm.unembed.weight",
        embed="embed.weight",
        experts=(
            ExpertNames(
                gate_up="mlp.experts.w13_weight", down="mlp.experts.w2_weight", by_turns=True
            ),
        ),
        spelled={
            **{name: (published,) for name, published in inkling.PUBLISHED.items()},
            "self_attn.gate_proj.weight": ("attn.gate_attn.weight",),
            "self_attn.sink_proj.weight": ("attn.attn_sink_proj.weight",),
            "self_attn.q_l2_clip.scale": ("attn.q_l2_clip.scale",),
            "self_attn.rel_l2_clip.scale": ("attn.rel_l2_clip.scale",),
            **{f"{x}_input_layernorm.weight": (f"{x}_input_norm.weight",) for x in "qkv"},
            **{
                f"self_attn.{x}_sconv.{name}": (f"attn.{x}_sconv.{published}",)
                for x in "kv"
                for name, published in (
                    ("static_weight", "static_w"),
                    ("weight_proj.weight", "weight_proj"),
                )
            },
        },
        foreign=("model.mtp.", "model.visual."),
        transposed=("rel_logits_proj.proj", "sconv.static_w"),
    ),
    aliases=inkling.FAMILY.aliases
    | {"intermediate_size": "moe_intermediate_size", "routed_scaling_factor": "route_scale"},
)
MULTIMODAL = FAMILY.inside(architecture="Inkling2ForConditionalGeneration", model_type="inkling2")
