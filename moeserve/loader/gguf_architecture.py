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
    # Reads further metadata. Returns keys of config.json, which replace others. Its arguments are
    # the architecture's metadata, without the prefix "ARCHITECTURE.", and the shapes of all tensors
    # by their GGUF names.
    config: Callable[[Fields, Mapping[str, Shape]], dict[str, Any]] = no_config
    other_keys: Collection[str] = ()  # GGUF keys that `config` reads, or that have no effect
    model: str = "model."  # the prefix of the decoder's tensors in a Hugging Face checkpoint
    # Names in addition to those of all architectures (gguf_tensors.py), without layer and ending:
    # GGUF name -> Hugging Face name
    names: Mapping[str, str] = field(default_factory=dict)  # within a layer
    global_names: Mapping[str, str] = field(default_factory=dict)  # outside of layers
    # The MTP layer, if its names differ from those of decoder layers: the prefix of its tensors,
    # and GGUF name within the layer ("nextn.eh_proj") -> Hugging Face name
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
