"""MiniMax-01 (Text-01) and M1: layers with lightning attention, and some with softmax attention.
The residual of each block is its normed input, and residuals and outputs are scaled.

Source: arXiv 2501.08313, huggingface.co/MiniMaxAI.
"""

from dataclasses import replace

from moeserve.blocks.lightning import Lightning
from moeserve.blocks.normed_residual import NormedResidual
from moeserve.blocks.weights import Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.mixtral import EXPERTS
from moeserve.models.spec import LayerSpec
from moeserve.ops.rules import RouterRule

_LINEAR = "linear_attention"
_FULL = "full_attention"


def _spec_fields(config: Fields) -> family.SpecFields:
    if config.values.get("rotary_dim") not in (None, config.raw("head_dim")):
        raise config.error(
            "rotary_dim",
            f"{FAMILY.architecture} rotates whole heads; with {TEXT_01.architecture} in "
            "architectures, a part of each head is rotated",
        )
    return _with_rope(config, partial=False)


def _with_rope(config: Fields, *, partial: bool) -> family.SpecFields:
    """Return the fields. partial: whether heads may be rotated in part."""
    config.unsupported("sliding_window", "this architecture has no sliding window; set it to null")
    full = family.attention(config, rope={"partial": partial})
    experts = family.moe(config, size_key="intermediate_size", router=RouterRule(renormalize=True))
    count = family.num_layers(config)
    default = [_LINEAR if i % 2 else _FULL for i in range(count)]
    kinds = family.layer_types(config, known=(_FULL, _LINEAR), default=default)
    layers = tuple(
        LayerSpec(
            mixer=full if kind == _FULL else _lightning(config, i, count),
            feed_forward=experts,
            pre_norm=False,
            attn_connection=_connection(
                config, "full_attn" if kind == _FULL else "linear_attn", "input_layernorm.weight"
            ),
            mlp_connection=_connection(config, "mlp", "post_attention_layernorm.weight"),
        )
        for i, kind in enumerate(kinds)
    )
    # After the last layer, the norm is that of the model.
    return {
        "layers": layers,
        "collapse": NormedResidual(norm="norm.weight"),
        "has_final_norm": False,
    }


def _connection(config: Fields, block: str, norm: str) -> NormedResidual:
    """Read how a block is connected. block: the prefix of its keys. norm: its norm's tensor."""
    return NormedResidual(
        norm=norm,
        alpha=config.number(f"{block}_alpha_factor", 0, family.MAX_MULTIPLIER),
        beta=config.number(f"{block}_beta_factor", 0, family.MAX_MULTIPLIER),
    )


def _lightning(config: Fields, layer: int, count: int) -> Lightning:
    """Read the lightning attention of a layer. count: the number of layers."""
    heads = config.integer("num_attention_heads", 1, family.MAX_HEADS)
    if heads.bit_count() != 1:
        raise config.error(
            "num_attention_heads", "it must be a power of two for the decays of heads"
        )
    head_dim = config.optional_integer("head_dim", 2, family.MAX_HEADS)
    return Lightning(
        num_heads=heads,
        head_dim=head_dim or config.integer("hidden_size", 1, family.MAX_WIDTH) // heads,
        decay=1 - layer / (count - 1 + 1e-5) + 1e-5,
        norm_groups=1,
        norm_eps=1e-6,
        silu=True,
        by_head=True,
    )


def _text_01(config: Fields) -> family.SpecFields:
    """Read a config.json with the keys of the authors."""
    values = dict(config.values)
    kinds = config.integers("attn_type_list", 0, 1)
    if kinds:
        values["layer_types"] = [_FULL if kind else _LINEAR for kind in kinds]
    if values.get("rotary_dim") is not None:
        rotated = config.integer("rotary_dim", 2, family.MAX_HEADS)
        values["partial_rotary_factor"] = rotated / config.integer("head_dim", 2, family.MAX_HEADS)
    if not config.boolean("postnorm"):
        raise config.error("postnorm", "only true is supported: residuals are normed")
    config.only(shared_intermediate_size=0)
    return _with_rope(replace(config, values=values), partial=True)


FAMILY = family.Family(
    architecture="MiniMaxForCausalLM",
    model_type="minimax",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=32000,
        hidden=4096,
        intermediate=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        positions=131072,
        experts=8,
        top_k=2,
    )
    | {
        "eos_token_id": 2,
        "full_attn_alpha_factor": 1.0,
        "full_attn_beta_factor": 1.0,
        "linear_attn_alpha_factor": 1.0,
        "linear_attn_beta_factor": 1.0,
        "mlp_alpha_factor": 1.0,
        "mlp_beta_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    names=Names(
        experts=EXPERTS,
        spelled={
            "mlp.gate.weight": ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
            "attention.query_key_value.weight": ("self_attn.qkv_proj.weight",),
            "attention.g_proj.weight": ("self_attn.output_gate.weight",),
            "attention.g_norm.weight": ("self_attn.norm.weight",),
            "attention.dense.weight": ("self_attn.out_proj.weight",),
        },
        # Decays, which follow from the config
        ignored=(
            "rotary_emb.inv_freq",
            "self_attn.slope_rate",
            "self_attn.query_decay",
            "self_attn.key_decay",
            "self_attn.diagonal_decay",
        ),
    ),
)
TEXT_01 = replace(
    FAMILY,
    architecture="MiniMaxText01ForCausalLM",
    model_type="minimax_text_01",
    fields=_text_01,
    defaults=FAMILY.defaults | {"attn_type_list": None, "postnorm": False},
    aliases={
        f"layernorm_{theirs}_{factor}": f"{ours}_{factor}_factor"
        for theirs, ours in (
            ("full_attention", "full_attn"),
            ("linear_attention", "linear_attn"),
            ("mlp", "mlp"),
        )
        for factor in ("alpha", "beta")
    },
)
M1 = replace(TEXT_01, architecture="MiniMaxM1ForCausalLM", model_type="minimax_m1")
