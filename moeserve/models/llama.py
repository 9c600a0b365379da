"""Llama (2, 3, 3.1 and models of the same architecture), and Mistral (7B, Nemo, Large 2), which has
a sliding window in some releases. Both are dense.

Source: arXiv 2302.13971, 2407.21783, 2310.06825.
"""

from moeserve.loader.fields import Fields
from moeserve.models import family


def _llama(config: Fields) -> family.SpecFields:
    mixer = family.attention(config, rule=family.no_window(config), **family.attention_bias(config))
    return {
        "layers": family.layers(
            config, mixer, family.dense(config, bias=config.boolean("mlp_bias"))
        )
    }


def _mistral(config: Fields) -> family.SpecFields:
    mixer = family.attention(config, rule=family.same_window(config, family.sliding_window(config)))
    return {"layers": family.layers(config, mixer, family.dense(config))}


LLAMA = family.Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    fields=_llama,
    defaults=family.sizes(
        vocab=32000,
        hidden=4096,
        intermediate=11008,
        layers=32,
        heads=32,
        kv_heads=None,
        positions=2048,
    )
    | {"eos_token_id": 2},
)
MISTRAL = family.Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    fields=_mistral,
    defaults=family.sizes(
        vocab=32000,
        hidden=4096,
        intermediate=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        positions=131072,
    )
    | {"eos_token_id": 2, "sliding_window": 4096},
)
