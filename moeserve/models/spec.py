"""A model as a list of layers, and what follows from it: ranks that can share it, its size. No
torch here.
"""

from dataclasses import dataclass, replace

from moeserve.blocks.feed_forward import Dense, MoE
from moeserve.blocks.mixer import Mixer
from moeserve.engine.kv_rule import FULL, KVRule
from moeserve.errors import ConfigError
from moeserve.loader.stored_format import StoredFormat

_USUAL_GROUP = 64  # of int4 weights that are quantised on loading


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer: a mixer, which reads earlier tokens, and a feed-forward block, which does
    not. The output of each is added to the residual stream.
    """

    mixer: Mixer
    feed_forward: Dense | MoE | None  # None: the next layer's mixer follows (Nemotron-H)
    pre_norm: bool = True  # blocks read the stream's norm; else the stream itself (FlexOlmo)
    attn_post_norm: bool = False  # the mixer's output is normed before it is added (AFMoE)
    mlp_post_norm: bool = False  # likewise the feed-forward block's
    parallel: bool = False  # both blocks read the mixer's norm (Command A+)
    scaled: bool = False  # the stream behind the layer is multiplied by a factor (Gemma 4)
    # The numbers of mixer and feed-forward block in a checkpoint that counts each as a layer.
    stored_as: tuple[int, int] | None = None

    @property
    def norms(self) -> list[tuple[str, str]]:
        """Our name and the checkpoint's name of each norm of the stream and of outputs."""
        own = self.pre_norm and not self.parallel and self.feed_forward is not None
        there = (
            (self.pre_norm, "attn_norm", "input_layernorm"),
            (self.attn_post_norm, "attn_post_norm", "attn_post_norm"),
            (own, "mlp_norm", "post_attention_layernorm"),
            (self.mlp_post_norm, "mlp_post_norm", "mlp_post_norm"),
        )
        return [(ours, theirs) for is_there, ours, theirs in there if is_there]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """The norms of the residual stream and of outputs."""

    centred: bool = False  # layer norms instead of RMS norms
    bias: bool = False  # (Phi)
    shift: float = 0.0  # added to the weights of every norm, also of heads (Step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder in numbers: one frozen record per checkpoint, read from its config.json."""

    architecture: str  # config.json's class name, e.g. Qwen3MoeForCausalLM
    dtype: str  # the checkpoint's own: float32, bfloat16, float16
    vocab_size: int
    hidden_size: int
    max_position: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    tie_embeddings: bool = False
    num_mtp_layers: int = 0  # for multi-token prediction, behind the layers in the checkpoint
    mtp: LayerSpec | None = None  # of the first of those, see models/mtp.py
    draft_layers: tuple[
        LayerSpec, ...
    ] = ()  # of the drafter, whose caches are beside those of the layers
    draft_whole: bool = False  # each tensor-parallel rank has all of the drafter's heads
    # Layers whose input (the residual stream) `forward` returns, too; num_layers: the output.
    aux_hidden_layers: tuple[int, ...] = ()
    head_bias: bool = False
    norm: NormSpec = NormSpec()
    logits_cap: float = 0.0  # scores become cap * tanh(score / cap); 0 leaves them
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    stored: tuple[StoredFormat, ...] = ()  # of quantised weights

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.layers)

    @property
    def cached_layers(self) -> tuple[LayerSpec, ...]:
        """The layers, and behind them those of the drafter."""
        return self.layers + self.draft_layers

    def drafting(self, layers: tuple[LayerSpec, ...]) -> "ModelSpec":
        """Return the spec of the model beside a drafter with these layers. Raises ConfigError if
        there is no place for the drafter's caches."""
        if FULL not in self.kv_rules:
            raise ConfigError(
                f"speculate: {self.architecture} has no layer with full attention, beside "
                "which a drafter's cache "
                "would be; use ngram:4 or suffix:8"
            )
        return replace(self, draft_layers=layers)

    @property
    def shared_layers(self) -> tuple[LayerSpec, ...]:
        """Those of them whose heads tensor-parallel ranks share out."""
        return self.layers if self.draft_whole else self.cached_layers

    @property
    def kv_rules(self) -> tuple[KVRule, ...]:
        """How long each layer's cache entries are needed."""
        return tuple(layer.mixer.rule for layer in self.layers)

    @property
    def draft_rules(self) -> tuple[KVRule, ...]:
        """What the drafter's layers read of their cache entries: one rule for each of its KV
        groups.
        """
        return tuple(dict.fromkeys(layer.mixer.rule for layer in self.draft_layers))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The indices of the layers with experts."""
        return tuple(
            i for i, layer in enumerate(self.layers) if isinstance(layer.feed_forward, MoE)
        )

    @property
    def moe(self) -> MoE | None:
        """The experts of the first layer that has any; those of all others are alike in number,
        choice and size.
        """
        return next(
            (layer.feed_forward for layer in self.layers if isinstance(layer.feed_forward, MoE)),
            None,
        )

    @property
    def num_experts(self) -> int:
        """The experts of a layer; 0 without any."""
        return self.moe.num_experts if self.moe else 0

    @property
    def experts_per_token(self) -> int:
        """The experts that a token goes to in a layer; 0 without any."""
        return self.moe.top_k if self.moe else 0

    @property
    def expert_size(self) -> int:
        """The inner width of an expert; 0 without any."""
        return self.moe.size if self.moe else 0

    @property
    def expert_weights(self) -> int:
        """The elements of an expert's matrices; 0 without any."""
        return (self.moe.activation.parts + 1) * self.hidden_size * self.moe.size if self.moe else 0

    @property
    def possible_tp(self) -> list[int]:
        """The numbers of tensor-parallel ranks that can share every layer."""
        first, *others = dict.fromkeys(layer.mixer for layer in self.shared_layers)
        return [tp for tp in first.possible_tp if all(tp in mixer.possible_tp for mixer in others)]

    def check_tp(self, tp: int) -> None:
        """Raises ConfigError, with what would work, if tp ranks cannot share the model."""
        if tp not in (possible := self.possible_tp):
            shared = " and ".join(
                dict.fromkeys(layer.mixer.sharing for layer in self.shared_layers)
            )
            raise ConfigError(
                f"tp={tp} cannot share out {shared} evenly; choose tp from "
                f"{', '.join(map(str, possible))}"
            )

    def obstacle(self, kernels: str) -> str:
        """Return why the kernels "native", "triton" or "fa3" cannot compute this model; empty if
        they can.
        """
        return next(
            (why for layer in self.cached_layers if (why := layer.mixer.obstacle(kernels))), ""
        )

    def products(self) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of all products of all layers but routed experts."""
        blocks = (block for layer in self.layers for block in (layer.mixer, layer.feed_forward))
        return [
            product for block in blocks if block for product in block.products(self.hidden_size)
        ]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of parameters. active: those that compute one token, without the embedding table."""

    total: int
    active: int


def model_size(spec: ModelSpec) -> ModelSize:
    """Count the matrices of a model; norms and biases are a rounding error (< 0.1 %).

    Qwen3-30B-A3B (D 2048, 48 layers, E 128, K 8, I 768) -> about 30.5e9 and 3.0e9
    """
    head = spec.vocab_size * spec.hidden_size
    always = sum(outputs * inputs for outputs, inputs in spec.products()) + head
    experts = len(spec.moe_layers) * spec.expert_weights
    total = always + spec.num_experts * experts + (0 if spec.tie_embeddings else head)
    return ModelSize(total, always + spec.experts_per_token * experts)


def bytes_per_weight(spec: ModelSpec, asked: str | None, itemsize: int) -> float:
    """Return a linear layer's bytes per weight, scales included. asked: the kind it becomes on
    loading.

    Of several formats in a checkpoint the smallest counts: experts have it, which are nearly all of
    the weights.
    """
    if spec.stored:
        return min(form.bytes_per_weight for form in spec.stored)
    if asked == "int4":
        return StoredFormat(kind="int4", group=_USUAL_GROUP).bytes_per_weight
    return 1.0 if asked == "int8" else itemsize
