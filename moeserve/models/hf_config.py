"""Read config.json of a Hugging Face checkpoint into a ModelSpec, without torch and transformers.

- A key that config.json omits has the default of the family's config class in transformers 5.
- The spellings of transformers 4 and 5 are supported.
- A key that would change the model's results, and that is not supported, raises CheckpointError.

Mistral-Large-3 has a params.json instead, with other keys
(github.com/mistralai/mistral-inference).
"""

import logging
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import first_dtype
from moeserve.loader.documents import read_json
from moeserve.loader.fields import Fields
from moeserve.loader.files import PARAMS, config_name
from moeserve.loader.generation_config import read_eos_ids
from moeserve.loader.quantization import WEIGHT_FORMATS, read_stored_formats
from moeserve.models.family import MAX_POSITION, MAX_WIDTH, Family
from moeserve.models.registry import FAMILIES
from moeserve.models.rope_config import longest_context
from moeserve.models.spec import ModelSpec

log = logging.getLogger(__name__)

_DTYPES = ("float32", "bfloat16", "float16")
_ACT_SYNONYMS = {  # other names of activations in transformers' ACT2FN
    "silu": ("swish",),
    "swigluoai": ("silu",),  # transformers writes silu for MiniMax-M3
}
_MOST_LISTED = 8  # architectures in an error
_MAX_VOCAB = 4 * 2**20
# Keys of a multimodal config.json that also apply to its text model.
_OUTER_KEYS = ("dtype", "eos_token_id", "quantization_config", "tie_word_embeddings", "torch_dtype")

# The defaults of keys for which a family has none.
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
_ORIGINAL_LENGTH = "original_max_position_embeddings"
# Key in params.json -> key in config.json.
_PARAMS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_PARAMS_MOE = {  # the same for its section "moe"
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
}
# The same for its section "yarn".
_PARAMS_YARN = {
    "alpha": "beta_slow",
    "beta": "beta_fast",
    "factor": "factor",
    _ORIGINAL_LENGTH: _ORIGINAL_LENGTH,
}


def read_model_spec(model_dir: Path, families: Mapping[str, Family] = FAMILIES) -> ModelSpec:
    """Return the spec of the model in `model_dir`.

    families: the supported families by architecture. Raises CheckpointError with the file, key,
    value and remedy, and ConfigError for a broken plugin.
    """
    for registry in (FAMILIES, WEIGHT_FORMATS):
        registry.load_plugins()
    path, values = _read(model_dir)
    architecture = _architecture(path, values, families)
    family = families[architecture]
    if values.get("auto_map"):
        log.info(
            "%s: auto_map is ignored: %s is built in, and a checkpoint's code is never run",
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
    config.choice("hidden_act", (family.hidden_act, *_ACT_SYNONYMS.get(family.hidden_act, ())))
    vocab_size = config.integer("vocab_size", 1, _MAX_VOCAB)
    fields = family.fields(config)
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    max_position = config.integer("max_position_embeddings", 1, MAX_POSITION)
    ropes = {layer.mixer.rope for layer in fields["layers"]}
    return ModelSpec(
        architecture=architecture,
        dtype=_dtype(config, model_dir),
        vocab_size=fields.pop("vocab_size", vocab_size),
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
    """Return the path of config.json or params.json, and its values by keys of config.json."""
    name = config_name(model_dir)
    path = model_dir / name
    values = read_json(model_dir, name)
    return path, _from_params(path, values) if name == PARAMS else values


def _text_values(path: Path, values: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return the values of the text model, with aliases of keys resolved."""
    if family.text and not (family.text_optional and family.text not in values):
        outer = {key: values[key] for key in _OUTER_KEYS if values.get(key) is not None}
        values = outer | Fields(path, values, {}).section(family.text)
        if "tie_word_embeddings" in outer:  # of this key alone, the outer value has precedence
            values["tie_word_embeddings"] = outer["tie_word_embeddings"]
    for alias, key in family.aliases.items():
        if values.get(alias) is not None and values.get(key) is None:
            values = values | {key: values[alias]}
    return values


def _architecture(path: Path, values: dict[str, Any], families: Mapping[str, Family]) -> str:
    """Return the first supported class in `architectures`, or without that key, the class that
    belongs to `model_type`.
    """
    config = Fields(path, values, {"architectures": None, "model_type": None})
    model_type = config.raw("model_type")
    names = config.raw("architectures")
    if names is None and model_type is None:
        raise CheckpointError(
            f"{path}: architectures is missing; supported: {_supported(families, [])}"
        )
    if names is None:
        names = [name for name, family in families.items() if model_type in family.model_types]
        if not names:
            supported = _supported(families, [model_type])
            raise config.error("model_type", f"supported architectures: {supported}")
    if not isinstance(names, list):
        raise config.error("architectures", f"supported: {_supported(families, [])}")
    architecture = next(
        (name for name in names if isinstance(name, str) and name in families), None
    )
    if architecture is None:
        raise config.error("architectures", f"supported: {_supported(families, names)}")
    known = families[architecture].model_types
    if model_type not in (None, *known):
        for name, family in families.items():
            if family.saved_as == architecture and model_type in family.model_types:
                return name
        raise config.error(
            "model_type", f"{architecture} has {' or '.join(map(repr, known))}; fix one of the two"
        )
    return architecture


def _supported(families: Mapping[str, Family], asked: Sequence[Any]) -> str:
    """Return the supported architectures, for errors: all of them, or those with similar names."""
    short_names = sorted(
        {re.sub("For(CausalLM|ConditionalGeneration)$", "", name) for name in families}
    )
    if len(short_names) <= _MOST_LISTED:
        return ", ".join(short_names)
    text = " ".join(name for name in asked if isinstance(name, str))[:100]
    similar = get_close_matches(text, short_names, n=_MOST_LISTED, cutoff=0.0)
    return f"{len(short_names)}, listed in docs/models.md, such as {', '.join(similar)}"


def _dtype(config: Fields, model_dir: Path) -> str:
    """Return the dtype in config.json, or, as transformers does, that of the first weight."""
    key = "dtype" if config.values.get("dtype") is not None else "torch_dtype"
    if config.values.get(key) not in (None, "auto"):
        return config.choice(key, _DTYPES)
    return first_dtype(model_dir) or "float32"


def _from_params(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of params.json with the keys of config.json.

    Raises CheckpointError for models other than Mistral-Large-3.
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
    # Other models with a params.json have a config.json, too, so latent attention is required.
    for key in ("qk_nope_head_dim", "q_lora_rank"):
        params.raw(key)
    params.unsupported(
        "quantization", "Mistral's own fp8 format is not supported; use the bfloat16 release"
    )
    scaling.only(original_max_position_embeddings=yarn.raw(_ORIGINAL_LENGTH))
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
