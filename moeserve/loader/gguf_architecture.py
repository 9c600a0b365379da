"""The description of a GGUF architecture (`general.architecture`): the Hugging Face model that it
stands for, and how its metadata keys and tensor names differ from those of other architectures.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from moeserve.loader.fields import Fields

# Values of expert_gating_func, the router's scoring function
SOFTMAX = 1
SIGMOID = 2
SOFTMAX_OF_SELECTED = 3  # softmax over the logits of the selected experts only
SHARED_SIZE = "expert_shared_feed_forward_length"
# An array with the layers that have a sliding window, or a number: one of so many has none
SLIDING_PATTERN = "attention.sliding_window_pattern"
SLIDING_THETA = "rope.freq_base_swa"
ROPE_FACTORS = "rope_freqs.weight"  # the scale factor of each rotary wavelength
ROPE_FACTORS_SHORT = "rope_factors_short.weight"  # LongRoPE's factors
ROPE_FACTORS_LONG = "rope_factors_long.weight"

Shape = tuple[int, ...]


def no_config(metadata: Fields, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Return {}: an architecture without further keys."""
    return {}


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """A GGUF architecture, or a variant of it."""

    architecture: str  # in config.json
    keys: Mapping[str, str] = field(default_factory=dict)  # GGUF key -> config.json key
    defaults: Mapping[str, Any] = field(default_factory=dict)  # config.json key -> value if absent
    required: tuple[str, ...] = ()  # GGUF keys whose values no tensor's shape can verify
    gating: int = SOFTMAX  # the router's scoring function
    shared: str = "mlp.shared_experts"  # the module of shared experts
    # The converter reordered the rows of q and k: the two rows of a rotary pair are adjacent.
    interleaved_rope: bool = False
    rope_keys: Mapping[str, str] = field(default_factory=dict)  # GGUF key -> key of rope_parameters
    rope_defaults: Mapping[str, Any] = field(default_factory=dict)  # their values if absent
    # Layers with a window have a rotary embedding with its own base, and without scaling.
    sliding_rope: bool = False
    # The key of the epsilon of norms
    norm_key: str = "attention.layer_norm_rms_epsilon"
    # GGUF keys with a value for each layer, which `config` reads. Other functions read the first.
    per_layer: Collection[str] = ()
    # Reads further metadata. Returns keys of config.json, which replace others. Its arguments are
    # the architecture's metadata, without the prefix "ARCHITECTURE.", and the shapes of all tensors
    # by their GGUF names. The metadata also have the values of ROPE_FACTORS, or None, and those of
    # the other tensors of factors.
    config: Callable[[Fields, Mapping[str, Shape]], dict[str, Any]] = no_config
    other_keys: Collection[str] = ()  # GGUF keys that `config` reads, or that have no effect
    model: str = "model."  # the prefix of the decoder's tensors in a Hugging Face checkpoint
    # Names in addition to those of all architectures (gguf_tensors.py), without layer and ending:
    # GGUF name -> Hugging Face name
    names: Mapping[str, str] = field(default_factory=dict)  # within a layer
    global_names: Mapping[str, str] = field(default_factory=dict)  # outside of layers
    # MTP layers, if their names differ from those of decoder layers: the prefix of their tensors,
    # and GGUF name within the layer ("nextn.eh_proj") -> Hugging Face name. `{}`: 0 for the first.
    mtp_layer: str = ""
    mtp_names: Mapping[str, str] = field(default_factory=dict)
    # The same with endings, if the endings differ: "ssm_a" -> "linear_attn.A_log"
    exact_names: Mapping[str, str] = field(default_factory=dict)
    # GGUF name within a layer -> the tensor's shape in the Hugging Face checkpoint, if the
    # converter dropped dimensions of size 1
    shapes: Mapping[str, Callable[[Shape], Shape]] = field(default_factory=dict)


# Condition -> variant of a GGUF architecture. The first condition that holds decides: a metadata
# key that is present and not 0, or "sigmoid" (the router's scores); "" always holds.
Variants = Mapping[str, GGUFArchitecture]
