"""EAGLE-3: a layer or a few that guess the next token's successor from the target model's hidden
states.

The streams that enter three of the target's layers become one hidden state (`fc`). It is normed and
put beside the next token's normed embedding, and the first layer's queries, keys and values are
made of both; what follows is Llama. The stream behind the last layer is the hidden state of the
next guess. Scores are of the draft vocabulary, a part of the target's.

Source: arXiv 2503.01840; checkpoints as SpecForge, speculators and vLLM write and read them. T
tokens, D model width, N columns of all auxiliary hidden states, d tokens of the draft vocabulary, V
of the target's.
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


def _fields(config: Fields) -> family.SpecFields:
    config.only(model_type="llama")
    mixer = family.attention(config, rule=family.no_window(config), **family.attention_bias(config))
    mixers = [replace(mixer, inputs=2), *[mixer] * (family.num_layers(config) - 1)]
    return {
        "layers": family.layers(
            config, mixers, family.dense(config, bias=config.boolean("mlp_bias"))
        )
    }


_FLAT = replace(llama.LLAMA, fields=_fields)
_NESTED = replace(
    _FLAT, model_type=("llama", "speculator_model"), text="transformer_layer_config"
)  # of speculators
FAMILIES = {
    "LlamaForCausalLMEagle3": _FLAT,
    "Eagle3LlamaForCausalLM": _FLAT,
    "Eagle3Speculator": _NESTED,
    "Eagle3DraftModel": _NESTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """An EAGLE-3 head in numbers."""

    model: ModelSpec  # its layers; the vocabulary is the draft vocabulary
    aux_layers: tuple[int, ...]  # `ModelSpec.aux_hidden_layers` of the target
    target_vocab: int
    target_size: int  # the target's model width
    norm_aux: bool  # a norm before `fc`
    norm_first: bool  # the residual stream begins with the normed hidden state


def read_eagle3(model_dir: Path, target: ModelSpec) -> Eagle3Spec:
    """Return the spec of the head in `model_dir`.

    Raises CheckpointError for what is wrong with it, ConfigError where it does not belong to the
    target.
    """
    model = read_model_spec(model_dir, FAMILIES)
    none = dict.fromkeys(("draft_vocab_size", "target_hidden_size", "eagle_config", AUX_LAYERS))
    values = read_json(model_dir, CONFIG)
    nested = FAMILIES[model.architecture].text in values
    config = Fields(
        model_dir / CONFIG,
        values,
        {**none, "norm_before_fc": False, "norm_before_residual": nested},
    )
    config.only(fc_norm=False, norm_output=False, tie_word_embeddings=False)
    defaults = {AUX_LAYERS: None, "norm_before_fc": config.boolean("norm_before_fc")}
    eagle = Fields(config.path, config.section("eagle_config"), defaults, "eagle_config.")
    eagle.only(use_aux_hidden_state=True)
    width = config.optional_integer("target_hidden_size", 1, family.MAX_WIDTH) or model.hidden_size
    for what, ours, theirs in (
        ("vocab_size", model.vocab_size, target.vocab_size),
        ("hidden size of the target", width, target.hidden_size),
    ):
        if ours != theirs:
            raise ConfigError(
                f"{config.path}: {what} is {ours}, and the served model's is {theirs}: "
                "this EAGLE-3 head was trained "
                "for another model; choose one for the model that is served"
            )
    if any(layer.stored_as for layer in target.layers):
        raise ConfigError(
            f"EAGLE-3 cannot read the streams inside {target.architecture}; use another proposer"
        )
    count = target.num_layers
    # SpecForge and SGLang count a layer's output, vLLM its input
    aux_layers = config.integers(AUX_LAYERS, 0, count) or tuple(
        layer + 1 for layer in eagle.integers(AUX_LAYERS, 0, count - 1)
    )
    aux_layers = tuple(sorted(set(aux_layers or (2, count // 2, count - 3))))
    if aux_layers[0] < 0 or aux_layers[-1] > count:
        raise ConfigError(
            f"{config.path} has no {AUX_LAYERS}, and the usual layers, "
            f"{', '.join(map(str, aux_layers))}, are not all in the "
            f"served model, which has {count}; choose a head that was trained for it"
        )
    drafts = config.optional_integer("draft_vocab_size", 1, model.vocab_size) or model.vocab_size
    return Eagle3Spec(
        model=replace(model, vocab_size=drafts, aux_hidden_layers=(model.num_layers,)),
        aux_layers=aux_layers,
        target_vocab=target.vocab_size,
        target_size=width,
        norm_aux=eagle.boolean("norm_before_fc"),
        norm_first=config.boolean("norm_before_residual"),
    )


def plan_eagle3(spec: Eagle3Spec, present: Collection[str]) -> LoadPlan:
    """Plan the parameters of the head, all on every rank: fc, input_norm, hidden_norm, norm,
    lm_head, those of the layers, and embed where the checkpoint has it."""
    model = spec.model
    width = spec.model.hidden_size
    plan = WeightPlan(width, Names(""), present, World(), Placement.initial(0, 1, 1))
    columns = len(spec.aux_layers) * spec.target_size
    plan.add("fc", (width, columns), "fc.weight")
    if spec.norm_aux:
        plan.add("input_norm", (columns,), "input_norm.weight")
    plan.add("norm", (width,), "norm.weight")
    plan.add("lm_head", (model.vocab_size, width), "lm_head.weight")
    if "embed_tokens.weight" in present or width != spec.target_size:
        plan.add("embed", (spec.target_vocab, width), "embed_tokens.weight")
    for index, layer in enumerate(model.layers):
        ours = theirs = f"layers.{index}."
        if index == 0:
            theirs = theirs if theirs + "hidden_norm.weight" in present else "midlayer."
            plan.add("hidden_norm", (width,), theirs + "hidden_norm.weight")
        plan_layer(plan, model, layer, ours, theirs, theirs)
    return plan.finish(["d2t", "t2d"])


def read_target_ids(spec: Eagle3Spec, model_dir: Path) -> Tensor | None:
    """Return the target's id of each token of the draft vocabulary, int64 [d]; None where they are
    the same.

    Raises CheckpointError when they are missing or not different tokens of the target's vocabulary.
    """
    size = spec.model.vocab_size
    vocab_size = spec.target_vocab
    info = open_checkpoint(model_dir).tensors.get("d2t")
    if info is None and size == vocab_size:
        return None
    if info is None or info.dtype != "I64" or info.shape != (size,):
        found = f"it is {info.dtype} {list(info.shape)}" if info else "it is missing"
        raise CheckpointError(
            f"{model_dir}: d2t must have a whole number (I64) for each of {size} "
            "tokens of the draft "
            f"vocabulary, and {found}; download the head again"
        )
    ids = np.arange(size) + np.fromfile(info.path, "<i8", size, offset=info.offset)
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < size:
        raise CheckpointError(
            f"{model_dir}: d2t does not lead to {size} different tokens of the "
            f"vocabulary of {vocab_size}; "
            "download the head again"
        )
    return torch.from_numpy(ids)


@dataclass(eq=False, repr=False, kw_only=True)
class Eagle3(Decoder):
    """An EAGLE-3 head ready to run.

    It reads the last D columns of `step.embeds`: all of what `combine` returned, and of what
    `forward` returned the part on the right, its hidden states for the next token.
    """

    fc: LinearMethod
    input_norm: Norm | None
    hidden_norm: Norm
    norm_first: bool
    ids_d: Tensor | None  # of the target
    target_vocab: int

    def combine(self, aux_TN: Tensor) -> Tensor:
        """Return the hidden states [T, D] made of the target's."""
        tokens = len(aux_TN)
        extra = self.ops.pad_rows(tokens) - tokens
        padded = torch.nn.functional.pad(aux_TN, (0, 0, 0, extra)) if extra else aux_TN.contiguous()
        normed = padded if self.input_norm is None else self.input_norm(padded)
        return self.fc(normed, RowContext(tokens))[:tokens]

    def enter(
        self, ids_T: Tensor, embeds: EmbedPatch | None, context: RowContext
    ) -> tuple[Tensor, Tensor]:
        token_norm = self.layers[0].attn_norm
        assert embeds is not None
        assert token_norm is not None
        # a copy: adding to the stream may write to its memory
        hidden_TD = embeds.hidden_TD[:, -self.spec.hidden_size :].clone(
            memory_format=torch.contiguous_format
        )
        normed = self.hidden_norm(hidden_TD)
        both = torch.cat((token_norm(self.ops.embedding(ids_T, self.embed_VD)), normed), 1)
        return both, normed if self.norm_first else hidden_TD

    def logits(self, hidden_SD: Tensor) -> Tensor:
        """Return every token's score, fp32 [S, V]: -inf outside the draft vocabulary."""
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
    """Build the head and empties `params`. embed_VD: of the target, for a head without its own.
    ids_d: see `read_target_ids`."""
    model = spec.model

    def norm(name: str) -> Norm:
        """Return the norm whose weight is `name`."""
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
