"""Reads config.json of a Hugging Face checkpoint into a ModelSpec, without torch and without
transformers.

A key that config.json leaves out has the value that the family's configuration class in
transformers 5 gives it. The spellings of transformers 4 and 5 are read. A key that would change the
model's numbers, and that moeserve does not compute, is refused: a wrong answer is worse than none.

Mistral-Large-3 has params.json in place of config.json, in keys of its own
(github.com/mistralai/mistral-inference).
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import first_dtype
from moeserve.loader.documents import read_json
from moeserve.loader.fields import Fields
from moeserve.loader.files import PARAMS, config_name
from moeserve.loader.generation_config import read_eos_ids
from moeserve.loader.quantisation import WEIGHT_FORMATS, read_stored_formats
from moeserve.models.family import MAX_POSITION, MAX_WIDTH, Family
from moeserve.models.registry import FAMILIES
from moeserve.models.rope_config import longest_context
from moeserve.models.spec import ModelSpec

log = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")
_SAME_ACT = {"silu": ("swish",)}  # other names of activations in transformers' ACT2FN
_MAX_VOCAB = 4 * 2**20
# of a multimodal config.json, beside the text model's own
_OUTER = ("dtype", "eos_token_id", "quantization_config", "tie_word_embeddings", "torch_dtype")

# of keys for which a family has no value of its own
_COMMON_DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": None,
    "first_k_dense_replace": 1,
    "head_dim": None,
    "hidden_act": "silu",
    "layer_types": None,
    "mlp_bias": False,
    "mlp_layer_types": None,
    "mlp_only_layers": None,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "routed_scaling_factor": 1.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "topk_group": 1,
}
# keys of params.json and what they are in config.json
_LENGTH = "original_max_position_embeddings"
_PARAMS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_PARAMS_MOE = {
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
}
_PARAMS_YARN = {"alpha": "beta_slow", "beta": "beta_fast", "factor": "factor", _LENGTH: _LENGTH}


def read_model_spec(model_dir: Path, families: Mapping[str, Family] = FAMILIES) -> ModelSpec:
    """Return the spec of the model in `model_dir`, which is of one of `families`.

    Raises CheckpointError naming file, key, value and remedy; ConfigError for a broken plugin.
    """
    for registry in (FAMILIES, WEIGHT_FORMATS):
        registry.load_plugins()
    path, values = _read(model_dir)
    architecture = _architecture(path, values, families)
    family = families[architecture]
    if values.get("auto_map"):
        log.info(
            "%s: auto_map is ignored; %s is built in, and code of a checkpoint never runs",
            path,
            architecture,
        )
    config = Fields(
        path, _text_values(path, values, family), {**_COMMON_DEFAULTS, **family.defaults}
    )
    if "per_layer_config" not in family.defaults:
        config.unsupported(
            "per_layer_config", "models whose layers differ in size are not supported"
        )
    config.choice("hidden_act", (family.hidden_act, *_SAME_ACT.get(family.hidden_act, ())))
    vocab_size = config.integer("vocab_size", 1, _MAX_VOCAB)
    fields = family.fields(config)
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    max_position = config.integer("max_position_embeddings", 1, MAX_POSITION)
    ropes = {layer.mixer.rope for layer in fields["layers"]}
    return ModelSpec(
        architecture=architecture,
        dtype=_dtype(config, model_dir),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position=max(
            (longest_context(rope, max_position) for rope in ropes if rope), default=max_position
        ),
        norm_eps=fields.pop("norm_eps", None) or config.number("rms_norm_eps", 0, 1.0),
        tie_embeddings=config.boolean("tie_word_embeddings"),
        eos_token_ids=read_eos_ids(model_dir, config, vocab_size),
        stored=read_stored_formats(config),
        **fields,
    )


def _read(model_dir: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file that describes the model, and what it says in the keys of config.json."""
    name = config_name(model_dir)
    path = model_dir / name
    values = read_json(model_dir, name)
    return path, _of_params(path, values) if name == PARAMS else values


def _text_values(path: Path, values: dict[str, Any], family: Family) -> dict[str, Any]:
    """Returns the keys of the text model, each in the spelling that is read."""
    if family.text:
        outer = {key: values[key] for key in _OUTER if values.get(key) is not None}
        values = outer | Fields(path, values, {}).section(family.text)
        values |= {key: outer[key] for key in ("tie_word_embeddings",) if key in outer}
    for alias, key in family.aliases.items():
        if values.get(alias) is not None and values.get(key) is None:
            values = values | {key: values[alias]}
    return values


def _architecture(path: Path, values: dict[str, Any], families: Mapping[str, Family]) -> str:
    """Returns the first supported class in `architectures`; without that key, the class of
    `model_type`.
    """
    supported = ", ".join(
        sorted({re.sub("For(CausalLM|ConditionalGeneration)$", "", name) for name in families})
    )
    config = Fields(path, values, {"architectures": None, "model_type": None})
    model_type = config.raw("model_type")
    names = config.raw("architectures")
    if names is None and model_type is None:
        raise CheckpointError(f"{path}: architectures is missing; supported: {supported}")
    if names is None:
        names = [name for name, family in families.items() if model_type in family.model_types]
        if not names:
            raise config.error("model_type", f"supported architectures: {supported}")
    found = (
        [name for name in names if isinstance(name, str) and name in families]
        if isinstance(names, list)
        else []
    )
    if not found:
        raise config.error("architectures", f"supported: {supported}")
    known = families[found[0]].model_types
    if model_type not in (None, *known):
        raise config.error(
            "model_type", f"{found[0]} has {' or '.join(map(repr, known))}; fix one of the two"
        )
    return found[0]


def _dtype(config: Fields, model_dir: Path) -> str:
    """Return the checkpoint's dtype: config.json's, or as in transformers the first weight's."""
    key = "dtype" if config.values.get("dtype") is not None else "torch_dtype"
    if config.values.get(key) not in (None, "auto"):
        return config.choice(key, _DTYPES)
    return first_dtype(model_dir) or "float32"


def _of_params(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Returns what params.json says in the keys of config.json. Raises CheckpointError for a model
    of another kind.
    """
    params = Fields(
        path, values, {"moe": None, "yarn": None, "llama_4_scaling": None, "rope_theta": 10_000.0}
    )
    moe, yarn, scaling = (
        Fields(path, params.section(key), {}, f"{key}.")
        for key in ("moe", "yarn", "llama_4_scaling")
    )
    moe.only(route_every_n=1)
    yarn.only(apply_scale=False)
    for key in ("qk_nope_head_dim", "q_lora_rank"):
        params.raw(key)  # nothing else is published in this format alone
    params.unsupported("quantization", "Mistral's own fp8 is not read; use the release in bfloat16")
    scaling.only(original_max_position_embeddings=yarn.raw(_LENGTH))
    config = {
        _PARAMS.get(key, key): value
        for key, value in values.items()
        if key not in ("moe", "yarn", "llama_4_scaling")
    }
    config |= {name: moe.raw(key) for key, name in _PARAMS_MOE.items()}
    config["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": params.raw("rope_theta"),
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": scaling.values.get("beta"),
        **{name: yarn.raw(key) for key, name in _PARAMS_YARN.items()},
    }
    return config | {"architectures": ["MistralLarge3ForCausalLM"], "eos_token_id": 2}
