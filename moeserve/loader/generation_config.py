"""Reads generation_config.json: a model's sampling defaults and its end tokens."""

import logging
from pathlib import Path
from typing import Any

from moeserve.errors import CheckpointError, InvalidRequest
from moeserve.loader.documents import read_optional_json
from moeserve.loader.fields import Fields
from moeserve.sampling import SamplingParams

log = logging.getLogger(__name__)

_FILE = "generation_config.json"
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_EOS_IDS = 256
_LEAST_TOP_P = 1e-6


def generation_defaults(model_dir: Path) -> dict[str, Any]:
    """Return the sampling defaults in generation_config.json, {} without the file.

    As in vLLM, only temperature, top_p, top_k, min_p and repetition_penalty are used, not
    do_sample. Values may exceed the limits of the HTTP API. As in transformers, top_p 0 selects the
    most likely token. Raises CheckpointError for an invalid value.
    """
    values = read_optional_json(model_dir, _FILE)
    defaults = {key: values[key] for key in _SAMPLING_KEYS if values.get(key) is not None}
    if type(defaults.get("top_p")) in (int, float) and defaults["top_p"] == 0:
        defaults["top_p"] = _LEAST_TOP_P
    try:
        SamplingParams(**defaults).check(vocab_size=1)
    except InvalidRequest as error:
        raise CheckpointError(
            f"{model_dir / _FILE}: {error.message}; correct or remove it, or set "
            "`model: {generation_config: none}` in --config"
        ) from None
    return defaults


def read_eos_ids(model_dir: Path, config: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of end tokens, from generation_config.json or else from config.json."""
    generation = Fields(
        model_dir / _FILE, read_optional_json(model_dir, _FILE), {"eos_token_id": None}
    )
    source = config if generation.raw("eos_token_id") is None else generation
    value = source.raw("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if len(ids) > _MAX_EOS_IDS or not all(type(token) is int for token in ids):
        raise source.error("eos_token_id", "it must be one token id, a list of them, or null")
    if unknown := [token for token in ids if not 0 <= token < vocab_size]:
        # Many small or converted checkpoints keep an id of another vocabulary. It is harmless,
        # because it can never be sampled.
        log.warning(
            "%s: eos_token_id has %s, outside of the vocabulary of %d tokens",
            source.path,
            unknown,
            vocab_size,
        )
    return tuple(token for token in dict.fromkeys(ids) if 0 <= token < vocab_size)
