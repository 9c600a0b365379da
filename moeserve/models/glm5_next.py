"""GLM-5.3: Kimi delta attention with bounded decays; every fourth layer has latent attention, whose
indexer selects groups of tokens, without position encoding. Blocks are connected with four residual
streams by hyper-connections, and the last norm reads the mean of the streams.

Source: huggingface.co/zai-org/GLM-5.3-Flash.
"""

from dataclasses import replace
from typing import Any

from moeserve.blocks.hyper_connection import HyperConnection, MeanCollapse
from moeserve.blocks.kda import KimiDelta
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.blocks.mixer import Mixer
from moeserve.blocks.pooled_indexer import PooledIndexer
from moeserve.blocks.weights import Names
from moeserve.loader.fields import Fields
from moeserve.models import deepseek_v3, family
from moeserve.models.deepseek_v32 import indexer_types
from moeserve.ops.rules import TILE, Activation

LINEAR = "linear_attention"
INDEXED = ("indexed_attention", "full_attention")  # synonyms
MAX_ROUNDS = 1000


def _delta(config: Fields) -> KimiDelta:
    """Read Kimi delta attention, from `linear_attn_config` if there is one."""
    names = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
        "gate_lower_bound": "linear_lower_bound",
    }
    linear = Fields(
        config.path,
        config.section("linear_attn_config"),
        {key: config.raw(name) for key, name in names.items()},
        prefix="linear_attn_config.",
    )
    bound = linear.optional_number("gate_lower_bound", -family.MAX_DECAY, 0)
    if bound is None and linear.values and linear.values.get("safe_gate", True):
        bound = -5.0
    return KimiDelta(
        num_heads=linear.integer("num_heads", 1, family.MAX_HEADS),
        head_dim=linear.integer("head_dim", 1, family.MAX_HEADS),
        conv=linear.integer("short_conv_kernel_size", 2, family.MAX_CONV),
        decay_tensor=family.decay_tensor(config),
        lower_bound=bound,
        flat_decay=True,
    )


def _latent(config: Fields) -> LatentAttention:
    """Read latent attention with an indexer of its own."""
    config.only(index_kpool_always_select_tail=True, qk_rope_head_dim=0)
    heads = config.raw("num_attention_heads")
    if config.raw("num_key_value_heads") not in (None, heads):
        raise config.error("num_key_value_heads", f"it must be num_attention_heads ({heads})")
    if not config.raw("q_lora_rank"):
        raise config.error("q_lora_rank", "an indexer is not supported without it")
    group = config.integer("index_kpool", 1, TILE)
    dim = config.integer("index_head_dim", 1, family.MAX_HEADS)
    if TILE % group or dim % group:
        raise config.error("index_kpool", f"it must divide {TILE} and index_head_dim ({dim})")
    top_k = config.integer("index_topk", group, family.MAX_POSITION)
    if top_k % group:
        raise config.error("index_topk", f"index_kpool ({group}) must divide it")
    indexer = PooledIndexer(
        num_heads=config.integer("index_n_heads", 1, family.MAX_HEADS),
        dim=dim,
        top_k=top_k + group - 1,
        group=group,
    )
    eps = config.number("rms_norm_eps", 0, 1.0)
    return family.latent_attention(config, rotates=False, indexer=indexer, eps=eps)


def _mixers(config: Fields, full: LatentAttention) -> list[Mixer]:
    """Return the mixer of each layer. full: latent attention with an indexer of its own."""
    default = [LINEAR if i % 4 != 3 else INDEXED[0] for i in range(family.num_layers(config))]
    types = family.layer_types(config, known=(LINEAR, *INDEXED), default=default)
    first = next((i for i, kind in enumerate(types) if kind != LINEAR), 0)
    assert full.indexer is not None
    shared = replace(full, indexer=replace(full.indexer, shared=True))
    latent = {"full": full, "shared": shared}
    delta = _delta(config)
    return [
        delta if kind == LINEAR else latent[indexer]
        for kind, indexer in zip(types, indexer_types(config, first), strict=True)
    ]


def _spec_fields(config: Fields) -> family.SpecFields:
    activation = Activation(limit=config.number("swiglu_limit", 0, family.MAX_MULTIPLIER))
    full = _latent(config)
    experts = deepseek_v3.experts_of(config)
    shared = experts.shared and replace(experts.shared, activation=activation)
    experts = replace(experts, shared=shared, activation=activation)
    dense = replace(family.dense(config), activation=activation)
    first_dense = min(3, family.num_layers(config))
    blocks = family.listed_moe(config, experts, dense, num_first_dense=first_dense)
    streams = config.integer("hc_mult", 2, family.MAX_STREAMS)
    attn, mlp = (
        HyperConnection(
            name=name,
            streams=streams,
            norm_eps=config.number("rms_norm_eps", 0, 1.0),
            eps=config.number("hc_eps", 0, 1.0),
            rounds=config.integer("hc_sinkhorn_iters", 1, MAX_ROUNDS),
        )
        for name in ("attn_hc.", "ffn_hc.")
    )
    mixers = _mixers(config, full)
    layers = family.layers(config, mixers, blocks, attn_connection=attn, mlp_connection=mlp)
    # The MTP layer has one residual stream, and an indexer of its own.
    one_stream: dict[str, Any] = {"attn_connection": None, "mlp_connection": None}
    return family.with_mtp(config, layers, mixer=full, feed_forward=experts, **one_stream) | {
        "num_streams": streams,
        "collapse": MeanCollapse(streams=streams),
    }


FAMILY = family.Family(
    architecture="Glm5NextForCausalLM",
    model_type=("glm5_next_text", "glm5_next"),
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=154880,
        hidden=4096,
        intermediate=12288,
        layers=45,
        heads=64,
        kv_heads=64,
        positions=1048576,
        experts=288,
        top_k=8,
        expert_size=2048,
    )
    | family.LATENT_DEFAULTS
    | {
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "index_head_dim": 128,
        "index_kpool": 16,
        "index_n_heads": 32,
        "index_skip_topk_offset": 2,
        "index_topk": 2048,
        "index_topk_freq": 1,
        "index_topk_pattern": None,
        "indexer_types": None,
        "linear_attn_config": None,
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_lower_bound": -5.0,
        "linear_num_heads": 64,
        "num_nextn_predict_layers": 1,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 10.0,
        "v_head_dim": 256,
    },
    names=Names(
        spelled={
            f"{ours}_hc.{part}": (f"hc_{ours}_{part}",)
            for ours in ("attn", "ffn")
            for part in ("fn", "base", "scale")
        }
    ),
)
_MULTIMODAL_MODEL = "model.language_model."
MULTIMODAL = FAMILY.inside(
    architecture="Glm5NextForConditionalGeneration",
    model_type="glm5_next",
    model=_MULTIMODAL_MODEL,
    foreign=("model.visual.",),
    mtp=replace(
        FAMILY.names.mtp,
        layer=_MULTIMODAL_MODEL + "layers.{}.",
        begin=_MULTIMODAL_MODEL + "layers.{}.",
    ),
)
