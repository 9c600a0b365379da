"""The JSON documents of a model, from its directory or from the metadata of a GGUF file."""

import os
from pathlib import Path
from typing import Any

from moeserve.loader import gguf_config
from moeserve.loader.files import decode_json, is_gguf, model_file


def read_json(model_dir: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name`. Raises CheckpointError.

    For a GGUF model, its metadata are translated to the keys of that file.
    """
    if is_gguf(model_dir):
        return gguf_config.document(model_dir, name)
    return decode_json(model_file(model_dir, name), model_dir / name)


def read_optional_json(model_dir: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name`, or {} if there is no such file."""
    if is_gguf(model_dir) or os.path.lexists(model_dir / name):
        return read_json(model_dir, name)
    return {}
