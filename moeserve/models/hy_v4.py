"""Hy4: latent attention with sinks and a gate per value, whose indexers several layers share, and
independent hyper-connections: four residual streams that are not mixed with each other.

transformers' HYV4ForCausalLM rotates the pairs of the half layout, and norms latents with epsilon
1e-6. Its class for Hy4-VL and vLLM rotate adjacent pairs, and norm latents with the epsilon of all
norms; so does moeserve. "rope_interleave": false in config.json selects the half layout.

Source: huggingface.co/tencent/Hy4-preview. Reuse of selections: arXiv 2603.12201.
"""

from dataclasses import replace

from moeserve.blocks.hyper_connection import HyperCollapse, HyperConnection
from moeserve.blocks.indexer import Indexer
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.blocks.weights import MTPNames, Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.deepseek_v32 import indexer_types
from moeserve.ops.rules import Activation

# Synonyms of attention with an indexer
_INDEXED = ("indexed_attention", "deepseek_sparse_attention", "sparse_attention", "sparse")


def _mixers(config: Fields) -> list[LatentAttention]:
    config.only(gated_mla=True, gating_type="elementwise", learnable_sink=True)
    family.layer_types(config, known=_INDEXED, default=())  # other kinds are refused
    if not config.raw("q_lora_rank"):
        raise config.error("q_lora_rank", "an indexer is not supported without it")
    eps = config.number("rms_norm_eps", 0, 1.0)
    rope_dim = config.integer("qk_rope_head_dim", 2, family.MAX_HEADS)
    indexer = Indexer(
        num_heads=config.integer("index_n_heads", 1, family.MAX_HEADS),
        dim=config.integer("index_head_dim", rope_dim, family.MAX_HEADS),
        top_k=config.integer("index_topk", 1, family.MAX_POSITION),
        interleaved=config.boolean("rope_interleave"),
        rotates_last=True,
        eps=eps,
    )
    full = family.latent_attention(config, indexer=indexer, gate="element", sinks=True, eps=eps)
    shared = replace(full, indexer=replace(indexer, shared=True))
    return [full if kind == "full" else shared for kind in indexer_types(config)]


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(enable_ihc=True)
    mixers = _mixers(config)
    experts = family.moe(
        config,
        router=family.deepseek_router(config),
        shared=family.shared_experts(config),
        activation=Activation(limit=config.number("swiglu_limit", 0, family.MAX_MULTIPLIER)),
    )
    blocks = family.listed_moe(config, experts, family.dense(config), num_first_dense=1)
    streams = config.integer("hc_mult", 2, family.MAX_STREAMS)
    norm_eps = config.number("rms_norm_eps", 0, 1.0)
    eps = config.number("hc_eps", 0, 1.0)
    attn, mlp = (
        HyperConnection(
            name=name,
            streams=streams,
            norm_eps=norm_eps,
            eps=eps,
            post_factor=config.number("hc_magnitude", 0, family.MAX_MULTIPLIER),
            post_eps=eps,
            rounds=0,
        )
        for name in ("attn_hc.", "ffn_hc.")
    )
    layers = family.layers(config, mixers, blocks, attn_connection=attn, mlp_connection=mlp)
    # The MTP layer has one residual stream, and an indexer of its own.
    one_stream = {"attn_connection": None, "mlp_connection": None}
    return family.with_mtp(config, layers, mixer=mixers[0], feed_forward=experts, **one_stream) | {
        "num_streams": streams,
        "collapse": HyperCollapse(streams=streams, norm_eps=norm_eps, eps=eps),
    }


def _connection_names(ours: str, published: str) -> dict[str, tuple[str, ...]]:
    """Return the spellings of a hyper-connection's tensors: published, and by transformers."""
    return {
        f"{ours}.{part}": (f"{published}.hc_pre.hc_{part}", f"hc_pre.{published}.hc_{part}")
        for part in ("fn", "base", "scale")
    }


FAMILY = family.Family(
    architecture="HYV4ForCausalLM",
    model_type="hy_v4",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=120832,
        hidden=2816,
        intermediate=6912,
        layers=34,
        heads=32,
        kv_heads=32,
        positions=262144,
        experts=256,
        top_k=8,
        expert_size=768,
    )
    | family.LATENT_DEFAULTS
    | {
        "eos_token_id": 120025,
        "hc_eps": 1e-6,
        "hc_magnitude": 2.0,
        "hc_mult": 4,
        "index_head_dim": 128,
        "index_n_heads": 16,
        "index_skip_topk_offset": 2,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "index_topk_pattern": None,
        "indexer_types": None,
        "num_nextn_predict_layers": 1,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.827,
        "swiglu_limit": 10.0,
        "v_head_dim": 256,
    },
    names=Names(
        spelled={
            **_connection_names("attn_hc", "hc_attn_layer"),
            **_connection_names("ffn_hc", "hc_mlp_layer"),
            **{
                f"hc_head.hc_{part}": (
                    f"hc_head.hc_head_{part}",
                    f"hc_head.hc_pre.hc_head_{part}",
                    f"hc_pre.hc_head.hc_head_{part}",
                )
                for part in ("fn", "base", "scale")
            },
            "self_attn.gate_proj.weight": ("self_attn.linear_gate.weight",),
            "self_attn.sinks": ("self_attn.learnable_sink_param",),
            # transformers writes `linear_gate` for the gates of MLPs, too.
            **{
                f"{mlp}.gate_proj.weight": (
                    f"{mlp}.gate_proj.weight",
                    f"{mlp}.linear_gate.weight",
                )
                for mlp in ("mlp", "mlp.shared_experts")
            },
        },
        foreign=("model.mtp_layers.",),  # not read with the model, but with its MTP head
        mtp=MTPNames(
            layer="model.mtp_layers.0.", begin="model.mtp_layers.0.", norm="final_layernorm"
        ),
    ),
)
MULTIMODAL = replace(
    FAMILY.inside(
        architecture="HYV4VLForConditionalGeneration",
        model_type="hy_v4_vl",
        foreign=(*FAMILY.names.foreign, "vit."),
    ),
    defaults=FAMILY.defaults
    | family.sizes(
        vocab=120832,
        hidden=6144,
        intermediate=18432,
        layers=78,
        heads=64,
        kv_heads=32,
        positions=262144,
        experts=256,
        top_k=8,
        expert_size=2048,
    )
    | {"index_n_heads": 32, "q_lora_rank": 2048},
)
