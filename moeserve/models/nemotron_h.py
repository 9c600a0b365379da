"""Nemotron-H and Nemotron 3 (Nano 30B-A3B): Mamba-2, and some attention without position encoding.
MLPs and experts have no gates. In checkpoints, each mixer and each feed-forward block is a layer by
itself. Multi-token prediction is not supported.

Sources: arXiv 2504.03624, 2512.20848.
"""

import math
from dataclasses import replace

from moeserve.blocks.feed_forward import Dense, MoE, SharedExpert
from moeserve.blocks.mamba2 import Mamba2
from moeserve.blocks.mixer import Mixer
from moeserve.blocks.weights import ExpertNames, Names
from moeserve.loader.fields import Fields
from moeserve.models import family, granite_moe
from moeserve.models.spec import LayerSpec
from moeserve.ops.rules import RELU2

KIND_OF_LETTER = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
KINDS = granite_moe.KINDS | {"moe": "moe", "mlp": "mlp"}


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(attention_bias=False, mlp_bias=False, use_bias=False, use_conv_bias=True)
    config.choice("mlp_hidden_act", ("relu2",))
    config.choice("mamba_hidden_act", ("silu",))
    config.unsupported(
        "moe_latent_size", "experts that are narrower than the model are not supported"
    )
    config.unsupported("sliding_window", "this architecture has no sliding window; set it to null")
    mixers: dict[str, Mixer] = {
        "linear_attention": _mamba(config),
        "full_attention": family.without_rope(family.attention(config)),
    }
    blocks = {
        "mlp": Dense(
            size=config.integer("intermediate_size", 1, family.MAX_WIDTH),
            activation=RELU2,
            name="mlp",
        )
    }
    key, kinds = _kinds(config)
    layers: list[LayerSpec] = []
    for i, kind in enumerate(kinds):
        if kind in mixers:
            layers.append(LayerSpec(mixer=mixers[kind], feed_forward=None, stored_as=(i, i)))
        elif layers and layers[-1].feed_forward is None:
            block = blocks[kind] if kind == "mlp" else _experts(config)
            layers[-1] = replace(layers[-1], feed_forward=block, stored_as=(i - 1, i))
        else:
            raise config.error(key, f"layer {i} ({kind}) must follow an attention or Mamba layer")
    return {"layers": tuple(layers), "norm_eps": config.number("layer_norm_epsilon", 0, 1.0)}


def _kinds(config: Fields) -> tuple[str, list[str]]:
    """Return the key that lists the checkpoint's layers, and the kind of each."""
    key = "layers_block_type"
    kinds = config.raw("layers_block_type")
    if kinds is None and isinstance(config.raw("hybrid_override_pattern"), str):
        key = "hybrid_override_pattern"
        kinds = [KIND_OF_LETTER.get(str(kind), "") for kind in config.raw(key)]
    known = isinstance(kinds, list) and all(
        isinstance(kind, str) and kind in KINDS for kind in kinds
    )
    if not known or not 1 <= len(kinds) <= family.MAX_LAYERS:
        raise config.error(
            key, f"it must list one of {', '.join(KIND_OF_LETTER.values())} for each layer"
        )
    return key, [KINDS[kind] for kind in kinds]


def _experts(config: Fields) -> MoE:
    size = config.integer("moe_shared_expert_intermediate_size", 1, family.MAX_WIDTH)
    shared = SharedExpert(size=size, activation=RELU2, name="mlp.shared_experts")
    return family.moe(
        config, router=family.deepseek_router(config), shared=shared, activation=RELU2
    )


def _mamba(config: Fields) -> Mamba2:
    heads = config.integer("mamba_num_heads", 1, family.MAX_HEADS)
    groups = config.integer("n_groups", 1, heads)
    if heads % groups:
        raise config.error("n_groups", f"it must divide mamba_num_heads ({heads})")
    return Mamba2(
        num_heads=heads,
        num_groups=groups,
        state_dim=config.integer("ssm_state_size", 1, family.MAX_WIDTH),
        head_dim=config.integer("mamba_head_dim", 1, family.MAX_WIDTH),
        conv=config.integer("conv_kernel", 2, family.MAX_CONV),
        time_limit=(config.number("time_step_min", 0, 1e6), math.inf),
        decay_tensor=family.decay_tensor(config),
    )


MAMBA_WEIGHTS = (
    "in_proj.weight",
    "conv1d.weight",
    "conv1d.bias",
    "A_log",
    "dt_bias",
    "D",
    "norm.weight",
    "out_proj.weight",
)
MLP_WEIGHTS = ("up_proj.weight", "down_proj.weight")
TENSOR_NAMES = {
    "input_layernorm.weight": ("norm.weight",),
    "post_attention_layernorm.weight": ("norm.weight",),
    **{f"mamba.{name}": (f"mixer.{name}",) for name in MAMBA_WEIGHTS},
    **{f"self_attn.{x}_proj.weight": (f"mixer.{x}_proj.weight",) for x in "qkvo"},
    **{
        f"mlp.{x}": (f"mixer.{x}",)
        for x in (*MLP_WEIGHTS, "gate.weight", "gate.e_score_correction_bias")
    },
    **{f"mlp.shared_experts.{x}": (f"mixer.shared_experts.{x}",) for x in MLP_WEIGHTS},
}
FAMILY = family.Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=131072,
        hidden=4096,
        intermediate=21504,
        layers=4,
        heads=32,
        kv_heads=8,
        positions=4096,
        experts=8,
        top_k=2,
        expert_size=7688,
    )
    | {
        "conv_kernel": 4,
        "eos_token_id": 2,
        "head_dim": 128,
        "hybrid_override_pattern": "ME*-",
        "layer_norm_epsilon": 1e-5,
        "layers_block_type": None,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 128,
        "mlp_hidden_act": "relu2",
        "moe_shared_expert_intermediate_size": 7688,
        "n_groups": 8,
        "ssm_state_size": 128,
        "time_step_min": 0.001,
    },
    names=Names(
        model="backbone.",
        embed="embeddings.weight",
        norm="norm_f.weight",
        spelled=TENSOR_NAMES,
        experts=(
            ExpertNames(
                up="mixer.experts.{}.up_proj.weight", down="mixer.experts.{}.down_proj.weight"
            ),
            ExpertNames(up="mixer.experts.up_proj", down="mixer.experts.down_proj"),
        ),
        foreign=("mtp.",),
    ),
    aliases={"layer_types": "layers_block_type"},
)
