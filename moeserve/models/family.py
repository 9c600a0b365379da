"""The parts of which the files of model families are made.

`Family` describes one architecture: how its config.json becomes a ModelSpec, and how its
checkpoints name tensors. The functions read keys of config.json that several families share.

A module with one main architecture calls it FAMILY (see registry.py). `Family.fields` is a function
that reads a config (`Fields`) and returns `SpecFields`. It is called `_spec_fields`, or like the
architecture.
"""

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
MAX_CONV = 16  # width of a convolution's kernel
MAX_MULTIPLIER = 1e6
MAX_DECAY = 100.0  # the largest magnitude of a bound of log decays
MAX_STREAMS = 16  # residual streams

SpecFields = dict[str, Any]  # keyword arguments of ModelSpec

# The router of DeepSeek-V3.
SIGMOID_ROUTER = RouterRule(score="sigmoid", bias=True, renormalize=True, epsilon=1e-20, fp32=True)
QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture."""

    architecture: str  # a class name in `architectures` of config.json
    model_type: str | tuple[str, ...]  # one or several values of `model_type` in config.json
    # Reads config.json, and returns the fields of ModelSpec that families read in different ways;
    # `layers` is required.
    fields: Callable[[Fields], SpecFields]
    # The values of keys that config.json omits. They are the defaults of the family's configuration
    # class in transformers 5. hf_config.py has those that most families share.
    defaults: dict[str, Any]
    names: Names = field(default_factory=Names)  # names of the checkpoint's tensors
    aliases: dict[str, str] = field(default_factory=dict)  # another spelling -> key that is read
    text: str = ""  # the key of the text model's config, if the model is multimodal
    text_optional: bool = False  # without that key, the text model's keys are those of config.json
    # transformers computes the model with this class of another family, and names this class in the
    # checkpoints that it saves; "": with a class of its own.
    saved_as: str = ""
    hidden_act: str = "silu"  # the only supported activation

    @property
    def model_types(self) -> tuple[str, ...]:
        """`model_type` as a tuple."""
        return (self.model_type,) if isinstance(self.model_type, str) else self.model_type

    def inside(
        self, architecture: str, model_type: str | tuple[str, ...], **names: Any
    ) -> "Family":
        """Return a multimodal architecture whose text model is this one.

        names: fields of `Names` that differ.
        """
        return replace(
            self,
            architecture=architecture,
            model_type=model_type,
            text="text_config",
            names=replace(self.names, **names),
        )


def num_layers(config: Fields) -> int:
    """Read the number of decoder layers."""
    return config.integer("num_hidden_layers", 1, MAX_LAYERS)


def layers(
    config: Fields,
    mixers: Mixer | Sequence[Mixer],
    blocks: Dense | MoE | Sequence[Dense | MoE],
    **options: Any,
) -> tuple[LayerSpec, ...]:
    """Return the decoder layers.

    mixers, blocks: one mixer and one feed-forward block per layer, or a single one for all layers.
    options: other fields of LayerSpec.
    """
    if not isinstance(mixers, Sequence):
        mixers = [mixers] * num_layers(config)
    if not isinstance(blocks, Sequence):
        blocks = [blocks] * num_layers(config)
    return tuple(
        LayerSpec(mixer=mixer, feed_forward=block, **options)
        for mixer, block in zip(mixers, blocks, strict=True)
    )


def attention(
    config: Fields,
    *,
    layer_type: str | None = None,
    rope: dict[str, Any] | None = None,
    **options: Any,
) -> Attention:
    """Read multi-head or grouped-query attention.

    layer_type: the layer type in `rope_parameters`, if they differ. rope: arguments of `read_rope`.
    options: other fields of Attention.
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
            f"{config.path}: head_dim is {head_dim}; it must be even for the rotary embedding"
        )
    return Attention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=read_rope(config, head_dim, layer_type, **(rope or {})),
        **options,
    )


def without_rope(attention: Attention) -> Attention:
    """Return attention without position encoding, for rows in the same order."""
    rope = attention.rope
    return replace(attention, rope=None, paired=rope is not None and rope.interleaved)


def attention_bias(config: Fields) -> dict[str, Any]:
    """Read `attention_bias`, for projections of queries, keys, values and outputs alike."""
    bias = config.boolean("attention_bias")
    return {"qkv_bias": bias, "out_bias": bias}


# Defaults of latent attention (DeepSeek-V3's).
LATENT_DEFAULTS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "v_head_dim": 128,
}


def latent_attention(config: Fields, *, rotates: bool = True, **options: Any) -> LatentAttention:
    """Read multi-head latent attention (MLA), as in DeepSeek.

    rotates: whether it has a rotary embedding. options: other fields of LatentAttention. With YaRN,
    attention scores are multiplied by the square of its temperature.
    """
    nope_dim = config.integer("qk_nope_head_dim", 2, MAX_HEADS)
    rope_dim = config.integer("qk_rope_head_dim", 2 if rotates else 0, MAX_HEADS)
    if rope_dim % 2:
        raise config.error("qk_rope_head_dim", "it must be even for the rotary embedding")
    scaling = rope_fields(config)
    mscale = 1.0
    if rotates and scaling.raw("rope_type") != "default" and scaling.raw("mscale_all_dim"):
        mscale = temperature(
            scaling.number("factor", 1.0, 1e6), scaling.number("mscale_all_dim", 0, 100.0)
        )
    rope = None
    if rotates:
        interleaved = config.boolean("rope_interleave")
        rope = read_rope(config, rope_dim, partial=None, interleaved=interleaved)
    return LatentAttention(
        num_heads=config.integer("num_attention_heads", 1, MAX_HEADS),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim", 1, MAX_HEADS),
        rank=config.integer("kv_lora_rank", 1, MAX_WIDTH),
        q_rank=config.optional_integer("q_lora_rank", 1, MAX_WIDTH),
        rope=rope,
        bias=config.boolean("attention_bias"),
        scale=(nope_dim + rope_dim) ** -0.5 * mscale**2,
        **options,
    )


def dense(config: Fields, key: str = "intermediate_size", *, bias: bool = False) -> Dense:
    """Read a dense MLP. key: the key of its inner width."""
    return Dense(size=config.integer(key, 1, MAX_WIDTH), bias=bias)


def moe(config: Fields, size_key: str = "moe_intermediate_size", **options: Any) -> MoE:
    """Read the routed experts. size_key: the key of an expert's inner width.

    options: other fields of MoE; `router` is required.
    """
    spellings = ("num_experts", "num_local_experts", "n_routed_experts")
    keys = [key for key in spellings if key in config.values]
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
    """Read the router of DeepSeek-V3, which most families with sigmoid scores use."""
    return replace(
        SIGMOID_ROUTER,
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
    """Read the shared experts, as a single MLP of their total width; None if there are none.

    key: the key of their number. name: of their tensors. size_key: the key of one expert's width.
    """
    count = config.optional_integer(key, 0, MAX_EXPERTS)
    size = config.integer(size_key, 1, MAX_WIDTH)
    return SharedExpert(size=count * size, name=name, bias=bias) if count else None


def first_dense(
    config: Fields, experts: MoE, mlp: Dense, key: str = "first_k_dense_replace"
) -> list[Dense | MoE]:
    """Return the block of each layer, where the first layers are dense and all others have experts.

    key: the key of the number of dense layers.
    """
    count = num_layers(config)
    num_dense = config.integer(key, 0, count)
    return [mlp] * num_dense + [experts] * (count - num_dense)


def listed_moe(
    config: Fields, experts: MoE, mlp: Dense, num_first_dense: int | None = None
) -> list[Dense | MoE]:
    """Return the block of each layer, as listed in `mlp_layer_types`.

    num_first_dense: the number of dense layers at the beginning if config.json omits that key;
        None: the number that `first_dense` reads.
    """
    kinds = config.raw("mlp_layer_types")
    count = num_layers(config)
    if kinds is None:
        if num_first_dense is None:
            return first_dense(config, experts, mlp)
        return [mlp] * num_first_dense + [experts] * (count - num_first_dense)
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
    """Read the number of layers for multi-token prediction, which follow the model's own."""
    return config.optional_integer(key, 0, MAX_LAYERS) or 0


def with_mtp(config: Fields, layers: tuple[LayerSpec, ...], **changes: Any) -> SpecFields:
    """Return the fields for decoder layers and layers for multi-token prediction (MTP).

    An MTP layer is like the last decoder layer, with `changes`.
    """
    count = mtp_layers(config)
    return {
        "layers": layers,
        "num_mtp_layers": count,
        "mtp": replace(layers[-1], **changes) if count else None,
    }


def some_layers_moe(config: Fields, experts: MoE) -> list[Dense | MoE]:
    """Return the block of each layer, as Qwen lists them: every `decoder_sparse_step`-th layer has
    experts, except those in `mlp_only_layers`.
    """
    count = num_layers(config)
    step = config.integer("decoder_sparse_step", 1, MAX_LAYERS)
    dense_layers = set(config.integers("mlp_only_layers", 0, count - 1))
    mlp = dense(config)
    return [experts if i not in dense_layers and (i + 1) % step == 0 else mlp for i in range(count)]


def same_window(config: Fields, window: int | None) -> KVRule:
    """Return the rule for a model whose layers all have the same window (None: full attention).

    Raises CheckpointError if `layer_types` lists other kinds of layers.
    """
    types = config.values.get("layer_types")
    if types is not None and types != ["full_attention"] * num_layers(config):
        raise config.error(
            "layer_types", "this architecture has one kind of attention; remove this key"
        )
    return KVRule(window=window)


def sliding_window(config: Fields) -> int | None:
    """Read `sliding_window`; None for null."""
    return config.optional_integer("sliding_window", 1, MAX_POSITION)


def no_window(config: Fields) -> KVRule:
    """Return the rule of full attention. Raises CheckpointError if config.json has a window."""
    config.unsupported("sliding_window", "this architecture has no sliding window; set it to null")
    return same_window(config, None)


def window_per_layer(
    config: Fields, mixer: Attention, slides: Callable[[int, int], bool]
) -> list[Attention]:
    """Return the mixer of each layer, as Qwen lists sliding windows.

    Which layers have one is listed in `layer_types`. Without that key, it is those for which
    `slides(layer, max_window_layers)` is true.
    """
    window = switched_window(config)
    count = num_layers(config)
    if config.raw("layer_types") is None:
        max_window_layers = config.integer("max_window_layers", 0, 2**31)
        is_sliding = [window is not None and slides(i, max_window_layers) for i in range(count)]
    else:
        is_sliding = [kind == "sliding_attention" for kind in layer_types(config)]
    if any(is_sliding) and window is None:
        raise config.error(
            "layer_types", "sliding layers need use_sliding_window true and a sliding_window"
        )
    return [
        replace(mixer, rule=KVRule(window=window if slides_here else None))
        for slides_here in is_sliding
    ]


def layer_types(
    config: Fields,
    known: Sequence[str] = ("full_attention", "sliding_attention"),
    default: Sequence[str] | None = None,
) -> list[str]:
    """Read the type of each layer.

    known: the supported types. default: the types if config.json omits `layer_types`.
    """
    types = config.raw("layer_types")
    count = num_layers(config)
    if types is None and default is not None:
        return list(default)
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
    """Return the layer types of a model in which every `every`-th layer has full attention, and the
    others have a sliding window.
    """
    return [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(num_layers(config))
    ]


def switched_window(config: Fields) -> int | None:
    """Read `sliding_window`; None if `use_sliding_window` is false."""
    return sliding_window(config) if config.boolean("use_sliding_window") else None


def norm_shift(config: Fields) -> float:
    """Return what is added to the weights of norms, in families that store them minus 1.

    GGUF files have added it: `norm_shift_added` comes from loader/gguf_architectures.
    """
    return 0.0 if config.values.get("norm_shift_added") is True else 1.0


def decay_tensor(config: Fields) -> str:
    """Return the name of the tensor with the factors of decays; see `RecurrentMixer`.

    `decays_exponentiated` comes from GGUF files (loader/gguf_architectures).
    """
    return "A" if config.values.get("decays_exponentiated") is True else "A_log"


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
    """Return the defaults of the keys that every family has, and of the usual keys of experts.

    They are those of the configuration class in transformers, not the sizes of a published model.

    kv_heads: None: as many as heads. experts, top_k, expert_size: None: config.json must have the
    key, if the family reads it.
    """
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
