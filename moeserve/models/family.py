"""What a family's file is made of: `Family` says how its config.json becomes a spec and how its
checkpoints name tensors; the functions read keys that several families share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moeserve.blocks.attention import Attention
from moeserve.blocks.feed_forward import Dense, MoE, SharedExpert
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.blocks.mixer import Mixer
from moeserve.blocks.weights import Names
from moeserve.engine.kv_rule import KVRule
from moeserve.errors import CheckpointError, ConfigError
from moeserve.loader.fields import Fields
from moeserve.models.rope_config import read_rope, rope_fields, temperature
from moeserve.models.spec import LayerSpec
from moeserve.ops.rules import RouterRule

MAX_LAYERS = 1000
MAX_WIDTH = 2**20
MAX_POSITION = 2**27
MAX_EXPERTS = 4096
MAX_HEADS = 4096
MAX_CONV = 16  # inputs of a convolution
MAX_MULTIPLIER = 1e6
SpecFields = dict[str, Any]  # of ModelSpec, by name
SIGMOID = RouterRule(
    score="sigmoid", bias=True, renormalize=True, epsilon=1e-20, fp32=True
)  # of DeepSeek-V3
QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture.

    architecture, model_type (one or several): as config.json has them. fields(config): the fields
    of ModelSpec that families differ in, `layers` among them. defaults: the values where
    config.json is silent, those of the family's configuration class in transformers 5, where
    `hf_config` does not have the same for all. aliases: other spellings of keys, each with the key
    that is read. text: the key of the text model's config in a multimodal one's. hidden_act: the
    activation.
    """

    architecture: str
    model_type: str | tuple[str, ...]
    fields: Callable[[Fields], SpecFields]
    defaults: dict[str, Any]
    names: Names = field(default_factory=Names)
    aliases: dict[str, str] = field(default_factory=dict)
    text: str = ""
    hidden_act: str = "silu"

    @property
    def model_types(self) -> tuple[str, ...]:
        """The spellings of the model type."""
        return (self.model_type,) if isinstance(self.model_type, str) else self.model_type

    def inside(self, architecture: str, model_type: str, **names: Any) -> "Family":
        """Returns the multimodal architecture whose text part this one is. names: fields of `Names`
        that differ.
        """
        own = replace(self.names, **names)
        return replace(
            self, architecture=architecture, model_type=model_type, text="text_config", names=own
        )


def num_layers(config: Fields) -> int:
    """Reads the number of decoder layers."""
    return config.integer("num_hidden_layers", 1, MAX_LAYERS)


def layers(
    config: Fields,
    mixers: Mixer | Sequence[Mixer],
    blocks: Dense | MoE | Sequence[Dense | MoE],
    **options: Any,
) -> tuple[LayerSpec, ...]:
    """Returns the layers with these mixers and feed-forward blocks, in order; a single one is that
    of all layers.

    options: further fields of LayerSpec.
    """
    each = (x if isinstance(x, Sequence) else [x] * num_layers(config) for x in (mixers, blocks))
    return tuple(
        LayerSpec(mixer=mixer, feed_forward=block, **options)
        for mixer, block in zip(*each, strict=True)
    )


def attention(
    config: Fields,
    *,
    layer_type: str | None = None,
    rope: dict[str, Any] | None = None,
    **options: Any,
) -> Attention:
    """Reads heads and rotary embedding. layer_type, rope: for `read_rope`. options: further fields
    of Attention.
    """
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = config.optional_integer("num_key_value_heads", 1, num_heads) or num_heads
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads", f"it must divide num_attention_heads ({num_heads})"
        )
    head_dim = config.optional_integer("head_dim", 2, MAX_HEADS)
    if head_dim is None:
        if hidden_size % num_heads:
            raise config.error(
                "hidden_size", f"without head_dim, num_attention_heads ({num_heads}) must divide it"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise CheckpointError(
            f"{config.path}: the size of a head is {head_dim}; it must be even to be rotated"
        )
    shape: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    return Attention(
        **{"rope": read_rope(config, head_dim, layer_type, **(rope or {})), **shape, **options}
    )


def attention_bias(config: Fields) -> dict[str, Any]:
    """Reads whether qkv and out have biases."""
    bias = config.boolean("attention_bias")
    return {"qkv_bias": bias, "out_bias": bias}


LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "v_head_dim": 128,
}  # defaults of latent attention


def latent_attention(config: Fields, *, rotates: bool = True, **options: Any) -> LatentAttention:
    """Reads DeepSeek's attention. rotates: whether it has a rotary embedding. options: other fields
    of LatentAttention.

    Scores of a model with YaRN grow with what its context was stretched by.
    """
    nope, rotated = (
        config.integer(f"qk_{part}_head_dim", 2, MAX_HEADS) for part in ("nope", "rope")
    )
    if rotated % 2:
        raise config.error("qk_rope_head_dim", "it must be even to be rotated")
    scaling = rope_fields(config)
    magnitude = 1.0
    if rotates and scaling.raw("rope_type") != "default" and scaling.raw("mscale_all_dim"):
        magnitude = temperature(
            scaling.number("factor", 1.0, 1e6), scaling.number("mscale_all_dim", 0, 100.0)
        )
    return LatentAttention(
        num_heads=config.integer("num_attention_heads", 1, MAX_HEADS),
        nope_dim=nope,
        rope_dim=rotated,
        v_dim=config.integer("v_head_dim", 1, MAX_HEADS),
        rank=config.integer("kv_lora_rank", 1, MAX_WIDTH),
        q_rank=config.optional_integer("q_lora_rank", 1, MAX_WIDTH),
        rope=read_rope(config, rotated, partial=None, interleaved=config.boolean("rope_interleave"))
        if rotates
        else None,
        bias=config.boolean("attention_bias"),
        scale=(nope + rotated) ** -0.5 * magnitude**2,
        **options,
    )


def dense(config: Fields, key: str = "intermediate_size", *, bias: bool = False) -> Dense:
    """Reads a dense MLP."""
    return Dense(size=config.integer(key, 1, MAX_WIDTH), bias=bias)


def moe(config: Fields, size_key: str = "moe_intermediate_size", **options: Any) -> MoE:
    """Reads the experts. options: further fields of MoE."""
    keys = [
        key
        for key in ("num_experts", "num_local_experts", "n_routed_experts")
        if key in config.values
    ]
    for key in keys[1:]:
        if config.values[key] != config.values[keys[0]]:
            raise config.error(
                keys[0], f"but {key} is {config.values[key]!r}; remove one of the two"
            )
    num_experts = config.integer(keys[0] if keys else "num_experts", 1, MAX_EXPERTS)
    top_k = config.integer("num_experts_per_tok", 1, num_experts)
    router: RouterRule = options["router"]
    with CheckpointError.instead_of(ConfigError, config.path):
        router.check(num_experts, top_k)
    return MoE(
        num_experts=num_experts, top_k=top_k, size=config.integer(size_key, 1, MAX_WIDTH), **options
    )


def deepseek_router(config: Fields) -> RouterRule:
    """Reads the rule of DeepSeek-V3, which most families with sigmoid scores share."""
    return replace(
        SIGMOID,
        groups=config.optional_integer("n_group", 1, MAX_EXPERTS) or 1,
        kept_groups=config.optional_integer("topk_group", 1, MAX_EXPERTS) or 1,
        renormalize=config.boolean("norm_topk_prob"),
        scale=config.optional_number("routed_scaling_factor", 0, MAX_MULTIPLIER) or 1.0,
    )


def shared_experts(
    config: Fields,
    key: str = "n_shared_experts",
    name: str = "mlp.shared_experts",
    size_key: str = "moe_intermediate_size",
    *,
    bias: bool = False,
) -> SharedExpert | None:
    """Reads the experts that every token passes: one MLP, as wide as all of them together. None
    without any.
    """
    count = config.optional_integer(key, 0, MAX_EXPERTS)
    size = config.integer(size_key, 1, MAX_WIDTH)
    return SharedExpert(size=count * size, name=name, bias=bias) if count else None


def first_dense(
    config: Fields, experts: MoE, mlp: Dense, key: str = "first_k_dense_replace"
) -> list[Dense | MoE]:
    """Reads how many layers are dense before those with experts."""
    count = num_layers(config)
    first = config.integer(key, 0, count)
    return [mlp] * first + [experts] * (count - first)


def listed_moe(
    config: Fields, experts: MoE, mlp: Dense, first: int | None = None
) -> list[Dense | MoE]:
    """Reads `mlp_layer_types`. first: dense layers where config.json is silent; None: see
    `first_dense`.
    """
    kinds = config.raw("mlp_layer_types")
    count = num_layers(config)
    if kinds is None:
        return (
            first_dense(config, experts, mlp)
            if first is None
            else [mlp] * first + [experts] * (count - first)
        )
    if (
        not isinstance(kinds, list)
        or len(kinds) != count
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        raise config.error(
            "mlp_layer_types", f"it must list dense or sparse for each of {count} layers"
        )
    return [mlp if kind == "dense" else experts for kind in kinds]


def mtp_layers(config: Fields, key: str = "num_nextn_predict_layers") -> int:
    """Reads how many layers for multi-token prediction a checkpoint has behind the model's own."""
    return config.optional_integer(key, 0, MAX_LAYERS) or 0


def with_mtp(config: Fields, layers: tuple[LayerSpec, ...], **changes: Any) -> SpecFields:
    """Returns the layers and those for multi-token prediction, which are as the last one but for
    `changes`.
    """
    count = mtp_layers(config)
    return {
        "layers": layers,
        "num_mtp_layers": count,
        "mtp": replace(layers[-1], **changes) if count else None,
    }


def some_layers_moe(config: Fields, experts: MoE) -> list[Dense | MoE]:
    """Read Qwen's layers: each `decoder_sparse_step`-th one but `mlp_only_layers` has experts."""
    count = num_layers(config)
    step = config.integer("decoder_sparse_step", 1, MAX_LAYERS)
    without = set(config.integers("mlp_only_layers", 0, count - 1))
    mlp = dense(config)
    return [experts if i not in without and (i + 1) % step == 0 else mlp for i in range(count)]


def same_window(config: Fields, window: int | None) -> KVRule:
    """Gives all layers one window. Refuses a config that names other kinds of layers."""
    types = config.values.get("layer_types")
    if types is not None and types != ["full_attention"] * num_layers(config):
        raise config.error(
            "layer_types", "this architecture has one kind of attention; remove this key"
        )
    return KVRule(window)


def sliding_window(config: Fields) -> int | None:
    """Reads `sliding_window`."""
    return config.optional_integer("sliding_window", 1, MAX_POSITION)


def no_window(config: Fields) -> KVRule:
    """Refuses a sliding window."""
    config.unsupported("sliding_window", "this architecture has no sliding window; set it to null")
    return same_window(config, None)


def window_per_layer(
    config: Fields, mixer: Attention, slides: Callable[[int, int], bool]
) -> list[Attention]:
    """Reads Qwen's windows: `layer_types` names sliding layers; without it `slides(layer,
    max_window_layers)` does.
    """
    window = switched_window(config)
    count = num_layers(config)
    if config.raw("layer_types") is None:
        first_or_last = config.integer("max_window_layers", 0, 2**31)
        sliding = [window is not None and slides(i, first_or_last) for i in range(count)]
    else:
        sliding = [kind == "sliding_attention" for kind in layer_types(config)]
    if any(sliding) and window is None:
        raise config.error(
            "layer_types", "sliding layers need use_sliding_window true and a sliding_window"
        )
    return [replace(mixer, rule=KVRule(window if slides_here else None)) for slides_here in sliding]


def layer_types(
    config: Fields,
    known: Sequence[str] = ("full_attention", "sliding_attention"),
    usual: Sequence[str] | None = None,
) -> list[str]:
    """Reads the kind of each layer's attention. usual: where config.json is silent."""
    types = config.raw("layer_types")
    count = num_layers(config)
    if types is None and usual is not None:
        return list(usual)
    if (
        not isinstance(types, list)
        or len(types) != count
        or any(kind not in known for kind in types)
    ):
        raise config.error(
            "layer_types", f"it must list one of {', '.join(known)} for each of {count} layers"
        )
    return types


def alternating(config: Fields, every: int) -> list[str]:
    """Returns the kinds of layers of which each `every`-th has full attention, and the others
    slide.
    """
    return [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(num_layers(config))
    ]


def switched_window(config: Fields) -> int | None:
    """Reads `sliding_window` where `use_sliding_window` is true, else None."""
    if not config.boolean("use_sliding_window"):
        return None
    return sliding_window(config)


def sizes(
    *,
    vocab: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    positions: int,
    experts: int | None = None,
    top_k: int | None = None,
    expert_size: int | None = None,
) -> dict[str, Any]:
    """Defaults of the keys that every family has, and of those that most with experts have."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": expert_size,
    }
