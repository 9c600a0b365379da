"""The EAGLE-3 head, a drafter of one or a few layers that reads the target model's hidden states.

1. `fc` combines the residual streams at the inputs of three of the target's layers into one hidden
   state.
2. The first layer's queries, keys and values are computed from two normed inputs: this hidden state
   and the embedding of the next token. Apart from that, the layers are Llama's.
3. The output of the last layer is the hidden state for the next draft token.

Logits are over the draft vocabulary, a part of the target's.

Source: arXiv 2503.01840. The checkpoint formats of SpecForge, speculators and vLLM are supported.

T: tokens. D: model width. A: columns of all auxiliary hidden states. d: draft vocabulary.
V: target's vocabulary.
"""

from collections.abc import Collection, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.blocks.norm import Norm
from moeserve.blocks.weights import Names, WeightPlan
from moeserve.comm.world import World
from moeserve.errors import CheckpointError, ConfigError
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.documents import read_json
from moeserve.loader.fields import Fields
from moeserve.loader.files import CONFIG
from moeserve.loader.load_plan import LoadPlan
from moeserve.models import family, llama
from moeserve.models.build import build_decoder
from moeserve.models.decoder import Decoder
from moeserve.models.hf_config import read_model_spec
from moeserve.models.load_plan import plan_layer
from moeserve.models.spec import ModelSpec
from moeserve.moe.placement.placement import Placement
from moeserve.ops.inputs import EmbedPatch, RowContext
from moeserve.ops.linear import LinearMethod
from moeserve.ops.table import Ops

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


def _spec_fields(config: Fields) -> family.SpecFields:
    config.only(model_type="llama")
    mixer = family.attention(config, rule=family.no_window(config), **family.attention_bias(config))
    mixers = [replace(mixer, inputs=2), *[mixer] * (family.num_layers(config) - 1)]
    return {
        "layers": family.layers(
            config, mixers, family.dense(config, bias=config.boolean("mlp_bias"))
        )
    }


_FLAT = replace(llama.LLAMA, fields=_spec_fields)
# The format of the package speculators.
_NESTED = replace(_FLAT, model_type=("llama", "speculator_model"), text="transformer_layer_config")
FAMILIES = {
    "LlamaForCausalLMEagle3": _FLAT,
    "Eagle3LlamaForCausalLM": _FLAT,
    "Eagle3Speculator": _NESTED,
    "Eagle3DraftModel": _NESTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """The description of an EAGLE-3 head."""

    model: ModelSpec  # the head itself; its vocabulary is the draft vocabulary
    aux_layers: tuple[int, ...]  # `ModelSpec.aux_hidden_layers` of the target
    target_vocab: int
    target_size: int  # the target's model width
    norm_aux: bool  # a norm precedes `fc`
    norm_first: bool  # the residual stream starts as the normed hidden state


def read_eagle3(model_dir: Path, target: ModelSpec) -> Eagle3Spec:
    """Return the spec of the head in `model_dir`.

    Raises CheckpointError for a bad checkpoint, and ConfigError if it was made for another target.
    """
    model = read_model_spec(model_dir, FAMILIES)
    no_values = dict.fromkeys(
        ("draft_vocab_size", "target_hidden_size", "eagle_config", AUX_LAYERS)
    )
    values = read_json(model_dir, CONFIG)
    is_nested = FAMILIES[model.architecture].text in values  # the format of speculators
    config = Fields(
        model_dir / CONFIG,
        values,
        {**no_values, "norm_before_fc": False, "norm_before_residual": is_nested},
    )
    config.only(fc_norm=False, norm_output=False, tie_word_embeddings=False)
    defaults = {AUX_LAYERS: None, "norm_before_fc": config.boolean("norm_before_fc")}
    eagle = Fields(config.path, config.section("eagle_config"), defaults, "eagle_config.")
    eagle.only(use_aux_hidden_state=True)
    width = config.optional_integer("target_hidden_size", 1, family.MAX_WIDTH) or model.hidden_size
    for name, head_size, target_size in (
        ("vocab_size", model.vocab_size, target.vocab_size),
        ("hidden size of the target", width, target.hidden_size),
    ):
        if head_size != target_size:
            raise ConfigError(
                f"{config.path}: {name} is {head_size}, and the served model's is {target_size}: "
                "this EAGLE-3 head was trained for another model; choose one for the served model"
            )
    if any(layer.stored_as for layer in target.layers):
        raise ConfigError(f"EAGLE-3 does not support {target.architecture}; use another proposer")
    count = target.num_layers
    # In the format of vLLM, a number is that of the layer whose input is read. In the format of
    # SpecForge and SGLang, it is that of the layer whose output is read.
    aux_layers = config.integers(AUX_LAYERS, 0, count) or tuple(
        layer + 1 for layer in eagle.integers(AUX_LAYERS, 0, count - 1)
    )
    aux_layers = tuple(sorted(set(aux_layers or (2, count // 2, count - 3))))
    if aux_layers[0] < 0 or aux_layers[-1] > count:
        raise ConfigError(
            f"{config.path} has no {AUX_LAYERS}, and the default layers, "
            f"{', '.join(map(str, aux_layers))}, are not all in the "
            f"served model, which has {count}; choose a head that was trained for it"
        )
    vocab_size = (
        config.optional_integer("draft_vocab_size", 1, model.vocab_size) or model.vocab_size
    )
    return Eagle3Spec(
        model=replace(model, vocab_size=vocab_size, aux_hidden_layers=(model.num_layers,)),
        aux_layers=aux_layers,
        target_vocab=target.vocab_size,
        target_size=width,
        norm_aux=eagle.boolean("norm_before_fc"),
        norm_first=config.boolean("norm_before_residual"),
    )


def plan_eagle3(spec: Eagle3Spec, present: Collection[str]) -> LoadPlan:
    """Return the plan for loading the head. Every rank holds all of it.

    The parameters are fc, input_norm, hidden_norm, norm, lm_head, embed (if the checkpoint has its
    own), and those of the layers.
    """
    model = spec.model
    width = spec.model.hidden_size
    plan = WeightPlan(width, Names(model=""), present, World(), Placement.initial(0, 1, 1))
    columns = len(spec.aux_layers) * spec.target_size
    plan.add("fc", (width, columns), "fc.weight")
    if spec.norm_aux:
        plan.add("input_norm", (columns,), "input_norm.weight")
    plan.add("norm", (width,), "norm.weight")
    plan.add("lm_head", (model.vocab_size, width), "lm_head.weight")
    if "embed_tokens.weight" in present or width != spec.target_size:
        plan.add("embed", (spec.target_vocab, width), "embed_tokens.weight")
    for index, layer in enumerate(model.layers):
        param_prefix = f"layers.{index}."
        tensor_prefix = param_prefix
        if index == 0:
            if tensor_prefix + "hidden_norm.weight" not in present:
                tensor_prefix = "midlayer."
            plan.add("hidden_norm", (width,), tensor_prefix + "hidden_norm.weight")
        plan_layer(plan, model, layer, param_prefix, tensor_prefix, tensor_prefix)
    return plan.finish(["d2t", "t2d"])


def read_target_ids(spec: Eagle3Spec, model_dir: Path) -> Tensor | None:
    """Return the target's token id of each draft token, int64 [d]; None if they are the same.

    Raises CheckpointError if they are missing or invalid.
    """
    size = spec.model.vocab_size
    vocab_size = spec.target_vocab
    info = open_checkpoint(model_dir).tensors.get("d2t")
    if info is None and size == vocab_size:
        return None
    if info is None or info.dtype != "I64" or info.shape != (size,):
        problem = f"it is {info.dtype} {list(info.shape)}" if info else "it is missing"
        raise CheckpointError(
            f"{model_dir}: d2t must have an integer (I64) for each of the {size} tokens of the "
            f"draft vocabulary, and {problem}; download the head again"
        )
    # d2t has differences: target id - draft id.
    ids = np.arange(size) + np.fromfile(info.path, "<i8", size, offset=info.offset)
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < size:
        raise CheckpointError(
            f"{model_dir}: d2t does not map to {size} different tokens of the vocabulary of "
            f"{vocab_size}; download the head again"
        )
    return torch.from_numpy(ids)


@dataclass(eq=False, repr=False, kw_only=True)
class Eagle3(Decoder):
    """An EAGLE-3 head that is ready to run.

    It reads the last D columns of `step.embeds`. After `combine`, those are all columns. After
    `forward`, they are the auxiliary hidden states, with which the next token is drafted.
    """

    fc: LinearMethod
    input_norm: Norm | None
    hidden_norm: Norm
    norm_first: bool
    ids_d: Tensor | None  # the target's token id of each draft token
    target_vocab: int

    def combine(self, aux_TA: Tensor) -> Tensor:
        """Combine the target's auxiliary hidden states [T, A] into hidden states [T, D]."""
        tokens = len(aux_TA)
        extra = self.ops.pad_rows(tokens) - tokens
        padded = torch.nn.functional.pad(aux_TA, (0, 0, 0, extra)) if extra else aux_TA.contiguous()
        normed = padded if self.input_norm is None else self.input_norm(padded)
        return self.fc(normed, RowContext(tokens))[:tokens]

    def _embed(
        self, ids_T: Tensor, target_hidden: EmbedPatch | None, context: RowContext
    ) -> tuple[Tensor, Tensor]:
        token_norm = self.layers[0].attn_norm
        assert target_hidden is not None
        assert token_norm is not None
        # Copied, because the layers' sums may be written to the residual stream in place.
        hidden_TD = target_hidden.hidden_TD[:, -self.spec.hidden_size :].clone(
            memory_format=torch.contiguous_format
        )
        normed = self.hidden_norm(hidden_TD)
        both = torch.cat((token_norm(self.ops.embedding(ids_T, self.embed_VD)), normed), 1)
        residual = normed if self.norm_first else hidden_TD
        return both, residual

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Return logits, fp32 [S, V]; -inf for tokens outside the draft vocabulary."""
        logits_Sd = super().logits(hidden_SD[:, : self.spec.hidden_size].contiguous())
        if self.ids_d is None:
            return logits_Sd
        logits_SV = logits_Sd.new_full((len(logits_Sd), self.target_vocab), float("-inf"))
        return logits_SV.index_copy_(1, self.ids_d, logits_Sd)


def build_eagle3(
    spec: Eagle3Spec,
    params: MutableMapping[str, Any],
    ops: Ops,
    embed_VD: Tensor,
    ids_d: Tensor | None,
    max_position: int,
) -> Eagle3:
    """Build the head. `params` is emptied.

    embed_VD: the target's embeddings, for a head without its own. ids_d: see `read_target_ids`.
    """
    model = spec.model

    def norm(name: str) -> Norm:
        return Norm(ops, model.norm_eps, params.pop(name).float())

    make = partial(
        Eagle3,
        fc=ops.pack_linear(params.pop("fc"), None),
        input_norm=norm("input_norm") if spec.norm_aux else None,
        hidden_norm=norm("hidden_norm"),
        norm_first=spec.norm_first,
        ids_d=None if ids_d is None else ids_d.to(ops.device),
        target_vocab=spec.target_vocab,
    )
    if "embed" not in params:
        params["embed"] = embed_VD
    head = build_decoder(model, params, ops, max_position=max_position, make=make)
    assert isinstance(head, Eagle3)
    return head
