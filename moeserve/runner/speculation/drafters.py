"""Load draft models: the model's MTP head, an EAGLE-3 head, or a smaller model with the same
vocabulary.

Every tensor-parallel rank loads the whole EAGLE-3 head or smaller model, in the dtype of the target
and as stored in its files: `--quantization` does not apply to it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moeserve.comm.world import World
from moeserve.config import Config
from moeserve.errors import CheckpointError, ConfigError
from moeserve.loader.checkpoint import Checkpoint, open_checkpoint
from moeserve.loader.documents import read_json
from moeserve.loader.fields import Fields
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.models.build import build_decoder
from moeserve.models.decoder import Decoder
from moeserve.models.eagle3 import build_eagle3, plan_eagle3, read_eagle3, read_target_ids
from moeserve.models.hf_config import read_model_spec
from moeserve.models.load_plan import load_plan
from moeserve.models.mtp import build_mtp, mtp_load_plan, with_mtp
from moeserve.models.spec import ModelSpec, model_size
from moeserve.ops.quantized import QuantizeTo
from moeserve.ops.table import Ops
from moeserve.runner.limits import MemoryFacts
from moeserve.runner.load import Shard, draft_params
from moeserve.runner.speculation.base import Drafter
from moeserve.runner.weight_sizes import weight_bytes
from moeserve.speculation import SpeculationSpec

TOKENIZER = "tokenizer.json"
FLOATS = ("F32", "BF16", "F16")


def with_drafter(spec: ModelSpec, model_dir: Path, speculation: SpeculationSpec) -> ModelSpec:
    """Return the spec of the target with the layers of its draft model (kinds mtp, model, eagle).

    Raises ConfigError or CheckpointError if the draft model does not fit the target.
    """
    if speculation.kind == "mtp":
        return with_mtp(spec)
    if speculation.kind not in ("model", "eagle"):
        return spec
    path = resolve_model_dir(speculation.path)
    if speculation.kind == "eagle":
        eagle = read_eagle3(path, spec)
        return replace(
            spec.with_drafter(eagle.model.layers),
            replicate_drafter=True,
            aux_hidden_layers=eagle.aux_layers,
        )
    draft = read_model_spec(path)
    if any(rule.tile for rule in draft.kv_rules):
        raise ConfigError(
            f"{path}: {draft.architecture} has recurrent layers, whose states cannot be restored "
            "when a draft is rejected; use a draft model with attention in all layers"
        )
    if draft.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"{path}: the draft model's vocab_size is {draft.vocab_size}, but the served model's "
            f"is {spec.vocab_size}; use a draft model with the same tokenizer"
        )
    _check_tokenizers(path, model_dir)
    return replace(spec.with_drafter(draft.layers), replicate_drafter=True)


def load_drafter(
    spec: ModelSpec,
    model_dir: Path,
    speculation: SpeculationSpec,
    model: Decoder,
    config: Config,
    quantize_to: QuantizeTo | None,
    shard: Shard,
    memory: MemoryFacts,
) -> Drafter:
    """Load the draft model of a spec from `with_drafter`. Its caches are set later.

    Other arguments and errors are as for `load_model`.
    """
    longest = config.model.max_model_len or spec.max_position
    if speculation.kind == "mtp":
        with draft_params(
            spec=spec,
            model_dir=model_dir,
            model=model,
            config=config,
            quantize_to=quantize_to,
            memory=memory,
            plan_of=lambda names: mtp_load_plan(spec, names, shard.world),
        ) as (params, ops):
            head = build_mtp(
                spec,
                params,
                ops,
                model,
                world=shard.world,
                tp=shard.tp,
                max_tokens=shard.max_tokens,
                max_position=longest,
            )
        combine = getattr(head, "combine", None)  # of models with several residual streams
        return Drafter(head, (), spec.draft_rules, takes_hidden=True, combine=combine)
    path = resolve_model_dir(speculation.path)
    if speculation.kind == "model":
        draft = read_model_spec(path)
        with draft_params(
            spec=draft,
            model_dir=path,
            model=model,
            config=config,
            quantize_to=None,
            memory=memory,
            plan_of=lambda names: load_plan(draft, names),
        ) as (params, ops):
            small_model = build_decoder(
                draft, params, ops, max_tokens=shard.max_tokens, max_position=longest
            )
        return Drafter(small_model, (), spec.draft_rules, takes_hidden=False)
    eagle = read_eagle3(path, spec)
    is_dummy = config.model.load_format == "dummy"
    # The target's token id of each of the head's draft ids.
    ids_d = torch.arange(eagle.model.vocab_size) if is_dummy else read_target_ids(eagle, path)
    with draft_params(
        spec=eagle.model,
        model_dir=path,
        model=model,
        config=config,
        quantize_to=None,
        memory=memory,
        plan_of=lambda names: plan_eagle3(eagle, names),
    ) as (params, ops):
        eagle_head = build_eagle3(eagle, params, ops, model.embed_VD, ids_d, longest)
    return Drafter(eagle_head, (), spec.draft_rules, takes_hidden=True, combine=eagle_head.combine)


def drafter_bytes(
    spec: ModelSpec,
    speculation: SpeculationSpec,
    target: Checkpoint,
    ops: Ops,
    config: Config,
    quantize_to: QuantizeTo | None,
) -> int:
    """Return about the bytes of the draft model's weights. Arguments are as for `load_drafter`.

    target: describes the weights of the served model.
    """
    if speculation.kind == "mtp":
        plan = mtp_load_plan(spec, target.names, World())
        return weight_bytes(target, plan, ops, quantize_to)
    path = resolve_model_dir(speculation.path)
    if config.model.load_format == "dummy":
        draft = read_eagle3(path, spec).model if speculation.kind == "eagle" else None
        return model_size(draft or read_model_spec(path)).total * ops.dtype.itemsize
    return sum(
        max(tensor.num_bytes, math.prod(tensor.shape) * ops.dtype.itemsize)
        if tensor.dtype in FLOATS
        else tensor.num_bytes
        for tensor in open_checkpoint(path, ()).tensors.values()
    )


def _check_tokenizers(draft_dir: Path, model_dir: Path) -> None:
    """Raise ConfigError if both have a tokenizer.json and their tokens differ."""
    paths = [directory / TOKENIZER for directory in (draft_dir, model_dir)]
    if not all(path.is_file() for path in paths) or len({path.read_bytes() for path in paths}) == 1:
        return
    draft_ids, target_ids = (_vocabulary(directory) for directory in (draft_dir, model_dir))
    different = draft_ids.items() ^ target_ids.items()
    if different:
        token, number = min(different, key=lambda item: (item[1], item[0]))
        where = paths[1]
        other = draft_ids
        if (token, number) in draft_ids.items():
            where = paths[0]
            other = target_ids
        raise ConfigError(
            f"{where}: token {number} is {token!r}, which is {other.get(token, 'no token')} for "
            "the other model: the tokenizers of draft model and served model differ; use a draft "
            "model of the same family"
        )


def _vocabulary(directory: Path) -> Mapping[str, int]:
    """Return the id of each token in tokenizer.json."""
    config = Fields(directory / TOKENIZER, read_json(directory, TOKENIZER), {"added_tokens": []})
    vocabulary: Any = config.section("model").get("vocab")
    try:
        if isinstance(vocabulary, list):  # Unigram: pairs of a token and its score
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return dict(vocabulary) | {
            token["content"]: token["id"] for token in config.raw("added_tokens") or ()
        }
    except (TypeError, ValueError, KeyError):
        raise CheckpointError(
            f"{config.path}: its vocabulary cannot be read; download it again"
        ) from None
