"""DeepSeek-V4 (Flash and Pro): attention to the last tokens and to compressed entries, whose
number of tokens differs between layers, and hyper-connections of several residual streams. The
first layers choose experts by the token id.

Source: transformers' deepseek_v4; names of tensors: huggingface.co/deepseek-ai/DeepSeek-V4-Flash.
"""

from dataclasses import replace
from typing import Any

from moeserve.blocks.compressed_attention import (
    CompressedAttention,
    EntryIndexer,
    SharedKeyAttention,
)
from moeserve.blocks.feed_forward import MoE
from moeserve.blocks.hyper_connection import HyperCollapse, HyperConnection
from moeserve.blocks.mixer import TILED
from moeserve.blocks.rope import RopeSpec
from moeserve.blocks.weights import FUSED, MTPNames, Names, per_expert
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.rope_config import read_rope
from moeserve.models.spec import LayerSpec
from moeserve.ops.rules import TILE, Activation, RouterRule

_WINDOW = "sliding_attention"
_SPARSE = "compressed_sparse_attention"
_HEAVY = "heavily_compressed_attention"
_KIND_OF_RATIO = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}
_ROTATED_SHARE = 64 / 512
_MAX_RATE = 2**16
_MAX_THETA = 1e12
_RATES = {_SPARSE: ("compress_rate_csa", 4), _HEAVY: ("compress_rate_hca", 128)}


def _kinds(config: Fields) -> list[str]:
    """Read the kind of each layer's attention.

    Published configs have `compress_ratios`, with further entries for MTP layers.
    """
    count = family.num_layers(config)
    ratios = config.raw("compress_ratios")
    if config.raw("layer_types") is not None or ratios is None:
        alternating = [_SPARSE if i % 2 else _HEAVY for i in range(count - 2)]
        default = [_HEAVY, _HEAVY, *alternating][:count]
        return family.layer_types(config, tuple(_KIND_OF_RATIO.values()), default)
    if (
        not isinstance(ratios, list)
        or len(ratios) < count
        or any(type(ratio) is not int or ratio not in _KIND_OF_RATIO for ratio in ratios)
    ):
        raise config.error(
            "compress_ratios", f"it must list 0, 4 or 128 for each of {count} layers"
        )
    return [_KIND_OF_RATIO[ratio] for ratio in ratios[:count]]


def _rate(config: Fields, kind: str) -> int:
    """Read how many tokens a layer's entries have."""
    key, default = _RATES[kind]
    rate = config.optional_integer(key, 1, _MAX_RATE)
    if rate is None:
        key = "compress_rates"
        rate = config.section(key).get(kind, default)
    if type(rate) is not int or not 1 <= rate <= _MAX_RATE or (TILE % rate and rate % TILE):
        raise config.error(
            key,
            f"the number of tokens of {kind} must divide {TILE}, or be a multiple of it up to "
            f"{_MAX_RATE}",
        )
    return rate


def _rope(config: Fields, size: int, name: str) -> RopeSpec:
    """Read the rotary embedding `main` (layers without entries) or `compress`.

    Published configs have one, whose scaling applies to `compress` with another base and without
    YaRN's factor of scores.
    """
    parameters = config.section("rope_parameters") or config.section("rope_scaling")
    if all(isinstance(parameters.get(each), dict) for each in ("main", "compress")):
        section = parameters[name]
        _check_share(config, section, size)
    else:
        theta = "compress_rope_theta" if name == "compress" else "rope_theta"
        section = {"rope_theta": config.number(theta, 1.0, _MAX_THETA)}
        if name == "compress":
            section = {**parameters, **section}
            if "yarn" in (section.get("rope_type"), section.get("type")):
                section = {"attention_factor": 1.0, **section}
    values = {**config.values, "rope_parameters": section, "rope_scaling": None}
    return read_rope(replace(config, values=values), size, partial=None, interleaved=True)


def _check_share(config: Fields, section: dict[str, Any], size: int) -> None:
    """Check that an object of `rope_parameters` rotates `size` elements of a head."""
    rope = Fields(config.path, section, {"partial_rotary_factor": None}, prefix="rope_parameters.")
    share = rope.optional_number("partial_rotary_factor", 0, 1.0)
    head_dim = config.integer("head_dim", 2, family.MAX_HEADS)
    if share is not None and int(head_dim * share) != size:
        raise rope.error(
            "partial_rotary_factor",
            f"{size} of {head_dim} elements rotate elsewhere; make them equal",
        )


def _rope_dim(config: Fields) -> int:
    """Read how many elements of a head are rotated."""
    head_dim = config.integer("head_dim", 2, family.MAX_HEADS)
    share = config.optional_number("partial_rotary_factor", 0, 1.0)
    key = "qk_rope_head_dim" if share is None else "partial_rotary_factor"
    size = int(head_dim * (share or _ROTATED_SHARE))
    if share is None:
        size = config.optional_integer(key, 2, head_dim) or size
    if size < 2 or size % 2:
        raise config.error(key, f"{size} of {head_dim} elements would rotate")
    return size


def _mixer(
    config: Fields, kind: str, make: type[CompressedAttention] = CompressedAttention
) -> CompressedAttention:
    config.only(attention_bias=False, num_key_value_heads=1)
    rope_dim = _rope_dim(config)
    num_heads = config.integer("num_attention_heads", 1, family.MAX_HEADS)
    groups = config.integer("o_groups", 1, num_heads)
    if num_heads % groups:
        raise config.error("o_groups", f"it must divide num_attention_heads ({num_heads})")
    indexer = None
    if kind == _SPARSE:
        indexer = EntryIndexer(
            num_heads=config.integer("index_n_heads", 1, family.MAX_HEADS),
            dim=config.integer("index_head_dim", rope_dim, family.MAX_HEADS),
            top_k=config.integer("index_topk", 1, family.MAX_POSITION),
        )
    return make(
        rope=_rope(config, rope_dim, "main" if kind == _WINDOW else "compress"),
        rule=TILED if kind == _WINDOW else FULL,
        num_heads=num_heads,
        head_dim=config.integer("head_dim", 2, family.MAX_HEADS),
        rope_dim=rope_dim,
        window=config.integer("sliding_window", 2, family.MAX_POSITION),
        q_rank=config.integer("q_lora_rank", 1, family.MAX_WIDTH),
        groups=groups,
        group_rank=config.integer("o_lora_rank", 1, family.MAX_WIDTH),
        every=0 if kind == _WINDOW else _rate(config, kind),
        overlap=kind == _SPARSE,
        indexer=indexer,
    )


def _experts(config: Fields) -> MoE:
    config.only(scoring_func="sqrtsoftplus", norm_topk_prob=True, mlp_bias=False)
    config.integer("n_shared_experts", 1, 1)
    activation = Activation(limit=config.number("swiglu_limit", 0, family.MAX_MULTIPLIER))
    shared = family.shared_experts(config)
    assert shared is not None
    router = RouterRule(
        score="sqrt_softplus",
        bias=True,
        renormalize=True,
        epsilon=1e-20,
        scale=config.number("routed_scaling_factor", 0, family.MAX_MULTIPLIER),
        fp32=True,
    )
    return family.moe(
        config, router=router, shared=replace(shared, activation=activation), activation=activation
    )


def _blocks(config: Fields) -> list[MoE]:
    """Return the experts of each layer. Those of the first layers are chosen by the token id."""
    count = family.num_layers(config)
    experts = _experts(config)
    by_id = replace(
        experts,
        router=replace(experts.router, bias=False),
        hashed=config.integer("vocab_size", 1, 2**31),
    )
    kinds = config.raw("mlp_layer_types")
    if kinds is None:
        num_hashed = config.integer("num_hash_layers", 0, family.MAX_LAYERS)
        return [by_id if i < num_hashed else experts for i in range(count)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != count
        or any(kind not in ("hash_moe", "moe") for kind in kinds)
    ):
        raise config.error(
            "mlp_layer_types", f"it must list hash_moe or moe for each of {count} layers"
        )
    return [by_id if kind == "hash_moe" else experts for kind in kinds]


def _connections(config: Fields) -> dict[str, Any]:
    """Return the fields of LayerSpec for hyper-connections."""
    connection = HyperConnection(
        name="attn_hc.",
        streams=config.integer("hc_mult", 2, family.MAX_HEADS),
        norm_eps=config.number("rms_norm_eps", 0, 1.0),
        eps=config.number("hc_eps", 0, 1.0),
        rounds=config.integer("hc_sinkhorn_iters", 1, 1000),
    )
    return {
        "attn_connection": connection,
        "mlp_connection": replace(connection, name="ffn_hc."),
    }


def _spec_fields(config: Fields) -> family.SpecFields:
    mixers = [_mixer(config, kind) for kind in _kinds(config)]
    connections = _connections(config)
    one: HyperConnection = connections["attn_connection"]
    mtp = None
    if family.mtp_layers(config):
        mixer = _mixer(config, _WINDOW, SharedKeyAttention)
        mixer = replace(mixer, rule=KVRule(window=mixer.window))
        mtp = LayerSpec(mixer=mixer, feed_forward=_experts(config), **connections)
    return {
        "mtp": mtp,
        "layers": family.layers(config, mixers, _blocks(config), **connections),
        "num_streams": one.streams,
        "collapse": HyperCollapse(streams=one.streams, norm_eps=one.norm_eps, eps=one.eps),
    }


def _published() -> dict[str, tuple[str, ...]]:
    """Return the published names of a layer's tensors, by those that blocks use."""
    compressor = {
        "kv_proj.weight": "wkv.weight",
        "gate_proj.weight": "wgate.weight",
        "position_bias": "ape",
        "kv_norm.weight": "norm.weight",
    }
    index = {
        "q_b_proj.weight": "wq_b.weight",
        "scorer.weights_proj.weight": "weights_proj.weight",
        **{name: f"compressor.{published}" for name, published in compressor.items()},
    }
    attention = {
        "q_a_proj.weight": "wq_a.weight",
        "q_a_norm.weight": "q_norm.weight",
        "q_b_proj.weight": "wq_b.weight",
        "kv_proj.weight": "wkv.weight",
        "o_a_proj.weight": "wo_a.weight",
        "o_b_proj.weight": "wo_b.weight",
        "sinks": "attn_sink",
        **{f"compressor.{name}": f"compressor.{other}" for name, other in compressor.items()},
        **{f"compressor.indexer.{name}": f"indexer.{other}" for name, other in index.items()},
    }
    shared = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return {
        "input_layernorm.weight": ("attn_norm.weight",),
        "post_attention_layernorm.weight": ("ffn_norm.weight",),
        **{f"self_attn.{name}": (f"attn.{other}",) for name, other in attention.items()},
        # transformers writes the second name
        "self_attn.kv_norm.weight": ("attn.kv_norm.weight", "attn.norm.weight"),
        **{
            f"{block}_hc.{part}": (f"hc_{block}_{part}",)
            for block in ("attn", "ffn")
            for part in ("fn", "base", "scale")
        },
        **{f"hc_head.hc_{part}": (f"hc_head_{part}",) for part in ("fn", "base", "scale")},
        "mlp.gate.weight": ("ffn.gate.weight",),
        "mlp.gate.e_score_correction_bias": ("ffn.gate.bias",),
        "mlp.gate.tid2eid": ("ffn.gate.tid2eid",),
        **{
            f"mlp.shared_experts.{name}.weight": (f"ffn.shared_experts.{other}.weight",)
            for name, other in shared.items()
        },
    }


_SAVED = Names(  # by transformers
    head="head.weight",
    spelled=_published(),
    experts=(per_expert("ffn.experts", "w1", "w3", "w2"), FUSED),
    foreign=("mtp.",),
    mtp=MTPNames(
        layer="mtp.0.",
        begin="mtp.0.",
        merge_parts=("e_proj", "h_proj"),
        norm="norm",
        per_stream=True,
    ),
)
FAMILY = family.Family(
    architecture="DeepseekV4ForCausalLM",
    model_type="deepseek_v4",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=129280,
        hidden=4096,
        intermediate=2048,
        layers=43,
        heads=64,
        kv_heads=1,
        positions=1048576,
        experts=256,
        top_k=6,
        expert_size=2048,
    )
    | {
        "compress_rate_csa": None,
        "compress_rate_hca": None,
        "compress_rates": None,
        "compress_ratios": None,
        "compress_rope_theta": 160000.0,
        "eos_token_id": 1,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,
        "num_hash_layers": 3,
        "num_nextn_predict_layers": 1,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "partial_rotary_factor": None,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": None,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
    },
    names=replace(
        _SAVED,
        model="",
        embed="embed.weight",
        others=(
            _SAVED,
            replace(_SAVED, head="lm_head.weight"),
        ),
    ),
)
