"""GraniteMoE with a shared expert (granite-4.0 tiny previews' attention-only form).

Source: huggingface.co/ibm-granite.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.blocks.feed_forward import SharedExpert
from moeserve.loader.files import Fields
from moeserve.models import family, granite_moe


def _fields(config: Fields) -> family.SpecFields:
    fields = granite_moe.FAMILY.fields(config)
    if config.raw("shared_intermediate_size") == 0:
        return fields
    shared = SharedExpert(size=config.integer("shared_intermediate_size", 1, family.MAX_WIDTH), name="shared_mlp")
    layers = fields["layers"]
    return fields | {"layers": tuple(replace(x, feed_forward=replace(x.feed_forward, shared=shared)) for x in layers)}


FAMILY = replace(
    granite_moe.FAMILY,
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    fields=_fields,
    defaults=granite_moe.FAMILY.defaults | {"shared_intermediate_size": 0},
    names=replace(
        granite_moe.FAMILY.names,
        spelled={
            **granite_moe.FAMILY.names.spelled,
            "shared_mlp.gate_proj.weight": ("shared_mlp.input_linear.weight",),
            "shared_mlp.up_proj.weight": ("shared_mlp.input_linear.weight",),
            "shared_mlp.down_proj.weight": ("shared_mlp.output_linear.weight",),
        },
    ),
)
