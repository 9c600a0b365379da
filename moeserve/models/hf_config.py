"""Reads config.json of a Hugging Face checkpoint into a ModelSpec, without torch and without transformers.

A key that config.json leaves out has the value that the family's configuration class in transformers 5 gives it. The
spellings of transformers 4 and 5 are read. A key that would change the model's numbers, and that moeserve does not
compute, is refused: a wrong answer is worse than none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import first_dtype
from moeserve.loader.files import Fields, read_json
from moeserve.loader.generation_config import read_eos_ids
from moeserve.loader.quantisation import read_stored_formats
from moeserve.models.family import MAX_POSITION, MAX_WIDTH
from moeserve.models.registry import FAMILIES
from moeserve.models.rope_config import longest_context, read_rope
from moeserve.models.spec import ModelSpec

_FILE = "config.json"
_DTYPES = ("float32", "bfloat16", "float16")
_MAX_VOCAB = 4 * 2**20

_COMMON_DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "eos_token_id": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}


def read_model_spec(model_dir: Path) -> ModelSpec:
    """Returns the spec of the model in `model_dir`. Raises CheckpointError naming file, key, value and remedy."""
    values = read_json(model_dir, _FILE)
    path = model_dir / _FILE
    architecture = _architecture(path, values)
    family = FAMILIES[architecture]
    config = Fields(path, values, {**_COMMON_DEFAULTS, **family.defaults})
    config.unsupported(
        "auto_map", "it asks to run the checkpoint's own Python code, which moeserve never does; remove this key "
        "if the files are those of an ordinary model of this architecture",
    )  # fmt: skip
    config.unsupported("per_layer_config", "models whose layers differ in size are not supported")
    config.choice("hidden_act", ("silu",))
    vocab_size = config.integer("vocab_size", 1, _MAX_VOCAB)
    fields = family.fields(config)
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    max_position = config.integer("max_position_embeddings", 1, MAX_POSITION)
    return ModelSpec(
        architecture=architecture,
        dtype=_dtype(config, model_dir),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position=longest_context(read_rope(config), max_position),
        norm_eps=config.number("rms_norm_eps", 0, 1.0),
        tie_embeddings=config.boolean("tie_word_embeddings"),
        eos_token_ids=read_eos_ids(model_dir, config, vocab_size),
        stored=read_stored_formats(config),
        **fields,
    )


def _architecture(path: Path, values: dict[str, Any]) -> str:
    """Returns the first supported class in `architectures`; without that key, the class of `model_type`."""
    supported = ", ".join(FAMILIES)
    config = Fields(path, values, {"architectures": None, "model_type": None})
    model_type, names = config.raw("model_type"), config.raw("architectures")
    if names is None and model_type is None:
        raise CheckpointError(f"{path}: architectures is missing; supported: {supported}")
    if names is None:
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
        if not names:
            raise config.error("model_type", f"supported architectures: {supported}")
    found = [name for name in names if isinstance(name, str) and name in FAMILIES] if isinstance(names, list) else []
    if not found:
        raise config.error("architectures", f"supported: {supported}")
    if model_type not in (None, FAMILIES[found[0]].model_type):
        raise config.error("model_type", f"{found[0]} has {FAMILIES[found[0]].model_type!r}; fix one of the two")
    return found[0]


def _dtype(config: Fields, model_dir: Path) -> str:
    """Returns the checkpoint's dtype; where config.json is silent, the first weight's (as transformers does)."""
    key = "dtype" if config.values.get("dtype") is not None else "torch_dtype"
    if config.values.get(key) is not None:
        return config.choice(key, _DTYPES)
    return first_dtype(model_dir) or "float32"
