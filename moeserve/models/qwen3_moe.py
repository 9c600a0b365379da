"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): norms of each query and key head, and renormalized
softmax weights of experts.

Some layers may be dense (`mlp_only_layers`, `decoder_sparse_step`). The MTP head is Qwen3-Next's
with a dense layer; published checkpoints have none. Of Qwen3-VL-MoE, only the text model is
supported, whose checkpoints have all experts of a layer in two transposed tensors.

Source: arXiv 2505.09388, 2511.21631.
"""

from dataclasses import replace

from moeserve.blocks.weights import FUSED, QWEN_MTP, Names
from moeserve.engine.kv_rule import KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.spec import LayerSpec
from moeserve.ops.rules import RouterRule


def _spec_fields(config: Fields, rule: KVRule, *, renormalize: bool) -> family.SpecFields:
    mixer = family.attention(config, rule=rule, qk_norm="head", **family.attention_bias(config))
    experts = family.moe(config, router=RouterRule(renormalize=renormalize))
    layers = family.layers(config, mixer, family.some_layers_moe(config, experts))
    has_mtp = family.mtp_layers(config, key="mtp_num_hidden_layers")
    return {
        "layers": layers,
        "mtp": LayerSpec(mixer=mixer, feed_forward=family.dense(config)) if has_mtp else None,
    }


def _qwen3_moe(config: Fields) -> family.SpecFields:
    rule = family.same_window(config, family.switched_window(config))
    return _spec_fields(config, rule, renormalize=config.boolean("norm_topk_prob"))


QWEN3_MOE = family.Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    fields=_qwen3_moe,
    defaults=family.sizes(
        vocab=151936,
        hidden=2048,
        intermediate=6144,
        layers=24,
        heads=32,
        kv_heads=4,
        positions=32768,
        experts=128,
        top_k=8,
        expert_size=768,
    )
    | family.QWEN_WINDOWS
    | {"norm_topk_prob": False, "mtp_num_hidden_layers": 0},
    names=Names(foreign=("mtp.",), mtp=QWEN_MTP),
)
QWEN3_VL_MOE = family.Family(
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe",
    fields=lambda config: _spec_fields(config, family.no_window(config), renormalize=True),
    defaults=family.sizes(
        vocab=151936,
        hidden=2048,
        intermediate=5632,
        layers=24,
        heads=16,
        kv_heads=16,
        positions=128000,
        experts=60,
        top_k=4,
        expert_size=1408,
    )
    | {"rope_theta": 500_000.0, "mtp_num_hidden_layers": 0},
    names=Names(
        model="model.language_model.",
        experts=(replace(FUSED, transposed=True),),
        foreign=("model.visual.", "mtp."),
        mtp=QWEN_MTP,
    ),
    text="text_config",
)
