"""JetMoE (8B): experts of attention, and experts whose sum has a bias.

Source: arXiv 2404.07413, huggingface.co/jetmoe/jetmoe-8b.
"""

from moeserve.blocks.mixture_of_attention import MixtureOfAttention
from moeserve.blocks.weights import ExpertNames, Names
from moeserve.loader.fields import Fields
from moeserve.models import family
from moeserve.models.rope_config import read_rope
from moeserve.models.spec import NormSpec
from moeserve.ops.rules import RouterRule

_EPS = 1e-6  # epsilon of the norms of layers; that of the last norm is in the config


def _spec_fields(config: Fields) -> family.SpecFields:
    family.no_window(config)
    experts = family.moe(
        config,
        size_key="intermediate_size",
        router=RouterRule(score="softmax_selected"),
        out_bias=True,
    )
    head_dim = config.integer("kv_channels", 2, family.MAX_HEADS)
    mixer = MixtureOfAttention(
        num_kv_heads=config.integer("num_key_value_heads", 1, family.MAX_HEADS),
        head_dim=head_dim,
        num_experts=experts.num_experts,
        top_k=experts.top_k,
        rope=read_rope(config, head_dim),
    )
    last_eps = config.number("rms_norm_eps", 0, 1.0)
    return {
        "layers": family.layers(config, mixer, experts),
        "norm": NormSpec(last_eps_factor=last_eps / _EPS),
        "norm_eps": _EPS,
    }


FAMILY = family.Family(
    architecture="JetMoeForCausalLM",
    model_type="jetmoe",
    fields=_spec_fields,
    defaults=family.sizes(
        vocab=32000,
        hidden=2048,
        intermediate=5632,
        layers=12,
        heads=32,
        kv_heads=16,
        positions=4096,
        experts=8,
        top_k=2,
    )
    | {"eos_token_id": 2, "kv_channels": 128, "tie_word_embeddings": True},
    names=Names(
        spelled={"mlp.gate.weight": ("mlp.router.layer.weight",)},
        experts=(ExpertNames(gate_up="mlp.input_linear.weight", down="mlp.output_linear.weight"),),
    ),
    aliases={"activation_function": "hidden_act"},
)
