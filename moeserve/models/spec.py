"""The description of a model as a list of layers, and properties that follow from it.

models/hf_config.py reads config.json into a ModelSpec. From the spec, models/load_plan.py plans the
loading of weights, and models/build.py builds the model. Does not import torch.
"""

from dataclasses import dataclass, replace

from moeserve.blocks.feed_forward import Dense, MoE
from moeserve.blocks.mixer import TILED, Mixer
from moeserve.blocks.residual import ResidualConnection
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.errors import ConfigError
from moeserve.loader.stored_format import StoredFormat

_INT4_GROUP = 64  # weights that share a scale, if they are quantized to int4 on loading


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: a mixer (attention or a recurrence) and a feed-forward block.

    The outputs of both blocks are added to the residual stream.
    """

    mixer: Mixer
    feed_forward: Dense | MoE | None  # None: the next layer's mixer follows (Nemotron-H)
    pre_norm: bool = True  # inputs of both blocks are normed (False: FlexOlmo)
    attn_post_norm: bool = False  # the mixer's output is normed before it is added (AFMoE)
    mlp_post_norm: bool = False  # the same for the feed-forward block's output
    parallel: bool = False  # both blocks read the same normed input (Command A+)
    scaled: bool = False  # the residual stream is multiplied by a factor afterwards (Gemma 4)
    # Factors of epsilon of the norms of both blocks' inputs (Beam)
    eps_factors: tuple[float, float] = (1.0, 1.0)
    # How both blocks are connected with the residual streams, if the model has several
    attn_connection: ResidualConnection | None = None
    mlp_connection: ResidualConnection | None = None
    # The layer numbers of mixer and feed-forward block in a checkpoint that numbers each block.
    stored_as: tuple[int, int] | None = None

    @property
    def norms(self) -> list[tuple[str, str]]:
        """The norms of the residual stream and of outputs, as (our name, the checkpoint's name)."""
        has_mlp_norm = self.pre_norm and not self.parallel and self.feed_forward is not None
        norms = (
            (self.pre_norm, "attn_norm", "input_layernorm"),
            (self.attn_post_norm, "attn_post_norm", "attn_post_norm"),
            (has_mlp_norm, "mlp_norm", "post_attention_layernorm"),
            (self.mlp_post_norm, "mlp_post_norm", "mlp_post_norm"),
        )
        return [(param, tensor) for is_used, param, tensor in norms if is_used]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """The kind of norm of the residual stream and of outputs."""

    centred: bool = False  # layer norms instead of RMS norms
    last_eps_factor: float = 1.0  # factor of epsilon of the final norm (Beam)
    bias: bool = False  # norms have biases (Phi)
    shift: float = 0.0  # added to the weights of every norm, also of heads (Step)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDiffusion:
    """How a model decodes blocks of tokens that begin as masks (docs/diffusion.md)."""

    block: int  # tokens per block, counted from position 0
    mask_id: int  # the token that stands for one that is not decoded yet
    threshold: float = 0.95  # a token replaces its mask if its probability is greater


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The description of a decoder, read from config.json."""

    architecture: str  # the class name in config.json, e.g. Qwen3MoeForCausalLM
    dtype: str  # the checkpoint's: float32, bfloat16 or float16
    vocab_size: int
    hidden_size: int
    max_position: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    num_streams: int = 1  # residual streams, which begin as copies of the embedding
    # Reduces several residual streams before the final norm
    collapse: ResidualConnection | None = None
    has_final_norm: bool = True  # False: `collapse` norms its result
    tie_embeddings: bool = False
    num_mtp_layers: int = 0  # layers for multi-token prediction, numbered after the others
    mtp: LayerSpec | None = None  # the first MTP layer; see models/mtp.py
    # The drafter's layers for speculative decoding, which have KV caches beside the model's.
    draft_layers: tuple[LayerSpec, ...] = ()
    replicate_drafter: bool = False  # each tensor-parallel rank has the whole drafter
    # Layers whose input (the residual stream) `forward` also returns. The number `num_layers` means
    # the residual stream after the last layer.
    aux_hidden_layers: tuple[int, ...] = ()
    head_bias: bool = False  # the LM head has a bias
    norm: NormSpec = NormSpec()
    logits_cap: float = 0.0  # logits become cap * tanh(logits / cap); 0: no cap
    embedding_scale: float = 1.0  # multiplies embeddings
    embedding_norm: bool = False  # embeddings are normed (Inkling)
    # Rows of the checkpoint's embedding table, if some follow those of the vocabulary
    embedding_rows: int | None = None
    residual_scale: float = 1.0  # multiplies the output of each block
    logits_divisor: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    diffusion: BlockDiffusion | None = None  # None: tokens are decoded one after another
    num_earlier_ids: int = 0  # ids of earlier tokens that a step has for each token (n-grams)
    stored: tuple[StoredFormat, ...] = ()  # formats of the checkpoint's quantized weights

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.layers)

    @property
    def cached_layers(self) -> tuple[LayerSpec, ...]:
        """The decoder layers, followed by the drafter's."""
        return self.layers + self.draft_layers

    def with_drafter(self, layers: tuple[LayerSpec, ...]) -> "ModelSpec":
        """Return the spec of this model with a drafter that consists of `layers`.

        Raises ConfigError if the model has no layer with full attention: the drafter's cache uses
        the blocks of such layers.
        """
        if FULL not in self.kv_rules:
            raise ConfigError(
                f"speculate: {self.architecture} has no layer with full attention, whose cache "
                "blocks a drafter could use; use ngram:4 or suffix:8"
            )
        return replace(self, draft_layers=layers)

    @property
    def sharded_layers(self) -> tuple[LayerSpec, ...]:
        """The layers, drafter included, whose heads are divided among tensor-parallel ranks."""
        return self.layers if self.replicate_drafter else self.cached_layers

    @property
    def connections(self) -> tuple[ResidualConnection, ...]:
        """The connections of all blocks, drafter included, and the model's `collapse`."""
        of_layers = (
            connection
            for layer in self.cached_layers
            for connection in (layer.attn_connection, layer.mlp_connection)
        )
        return tuple(c for c in (*of_layers, self.collapse) if c is not None)

    @property
    def kv_rules(self) -> tuple[KVRule, ...]:
        """How long cache entries are needed: the rule of each decoder layer's cache, followed by
        those of the `state_layers`.
        """
        rules = tuple(layer.mixer.rule for layer in self.layers)
        return rules + (TILED,) * len(self.state_layers)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The indices of the decoder layers with a state in addition to their cache."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer.tiled_state(1))

    @property
    def cache_parts(self) -> tuple[tuple[int, bool], ...]:
        """The caches that KV groups number, as (index in `cached_layers`, whether it is a state).

        They are in the order of `kv_rules`, followed by the drafter's.
        """
        layers = [(i, False) for i in range(self.num_layers)]
        states = [(i, True) for i in self.state_layers]
        drafter = [(i, False) for i in range(self.num_layers, len(self.cached_layers))]
        return (*layers, *states, *drafter)

    @property
    def draft_rules(self) -> tuple[KVRule, ...]:
        """The different rules of the drafter's layers, one for each of its KV groups."""
        return tuple(dict.fromkeys(layer.mixer.rule for layer in self.draft_layers))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The indices of the layers with experts."""
        return tuple(
            i for i, layer in enumerate(self.layers) if isinstance(layer.feed_forward, MoE)
        )

    @property
    def moe(self) -> MoE | None:
        """The experts of the first layer that has any; None without experts.

        Other layers have the same number, router and size of experts.
        """
        return next(
            (layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoE)),
            None,
        )

    @property
    def num_experts(self) -> int:
        """The number of routed experts of a layer; 0 without experts."""
        return self.moe.num_experts if self.moe else 0

    @property
    def experts_per_token(self) -> int:
        """The number of experts that a token uses in a layer; 0 without experts."""
        return self.moe.top_k if self.moe else 0

    @property
    def expert_size(self) -> int:
        """The inner width of an expert; 0 without experts."""
        return self.moe.size if self.moe else 0

    @property
    def expert_weights(self) -> int:
        """The number of elements of an expert's matrices; 0 without experts."""
        if self.moe is None:
            return 0
        num_matrices = self.moe.activation.parts + 1  # gate (if any) and up; down
        return num_matrices * self.hidden_size * self.moe.size

    @property
    def possible_tp(self) -> list[int]:
        """The supported numbers of tensor-parallel ranks."""
        first, *others = dict.fromkeys(layer.mixer for layer in self.sharded_layers)
        return [tp for tp in first.possible_tp if all(tp in mixer.possible_tp for mixer in others)]

    def check_tp(self, tp: int) -> None:
        """Raise ConfigError, with the supported numbers, if tp ranks cannot divide the heads."""
        if tp not in (possible := self.possible_tp):
            heads = " and ".join(
                dict.fromkeys(layer.mixer.sharing for layer in self.sharded_layers)
            )
            raise ConfigError(
                f"tp={tp} cannot divide {heads} evenly; choose tp from "
                f"{', '.join(map(str, possible))}"
            )

    def obstacle(self, kernels: str) -> str:
        """Return why kernels do not support a layer; "" if they support all layers.

        kernels: "native", "triton" or "fa3".
        """
        return next(
            (why for layer in self.cached_layers if (why := layer.mixer.obstacle(kernels))), ""
        )

    def products(self) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of all weight matrices of all layers, except routed experts."""
        blocks = [block for layer in self.layers for block in (layer.mixer, layer.feed_forward)]
        return [
            product
            for block in (*blocks, *self.connections)
            if block
            for product in block.products(self.hidden_size)
        ]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of parameters."""

    total: int
    active: int  # used for one token, without the embedding table


def model_size(spec: ModelSpec) -> ModelSize:
    """Count the parameters of a model, without norms and biases (less than 0.1 %).

    Qwen3-30B-A3B (D 2048, 48 layers, E 128, K 8, I 768) -> about 30.5e9 and 3.0e9
    """
    head = spec.vocab_size * spec.hidden_size
    dense = sum(outputs * inputs for outputs, inputs in spec.products()) + head
    one_expert_per_layer = len(spec.moe_layers) * spec.expert_weights
    embedding = 0 if spec.tie_embeddings else head
    return ModelSize(
        total=dense + spec.num_experts * one_expert_per_layer + embedding,
        active=dense + spec.experts_per_token * one_expert_per_layer,
    )


def bytes_per_weight(spec: ModelSpec, quantization: str | None, itemsize: int) -> float:
    """Return the bytes per weight of linear layers, scales included.

    If a checkpoint has several formats, the smallest counts, because experts have this format, and
    experts are nearly all of the weights.

    quantization: "int4" or "int8" for weights that are quantized on loading.
    itemsize: the bytes of an unquantized weight.
    """
    if spec.stored:
        return min(stored_format.bytes_per_weight for stored_format in spec.stored)
    if quantization == "int4":
        return StoredFormat(kind="int4", group=_INT4_GROUP).bytes_per_weight
    return 1.0 if quantization == "int8" else itemsize
