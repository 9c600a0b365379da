"""Files in a model directory: finds them, without following links out of it, and decodes JSON."""

import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec

from moeserve.errors import CheckpointError

_INFINITY = re.compile(rb"(?<=[\[,:\s])Infinity(?=[\],}\s])")
_MAX_JSON_BYTES = 64 * 2**20
CONFIG = "config.json"
PARAMS = "params.json"
GGUF = ".gguf"


def model_file(model_dir: Path, name: str) -> Path:
    """Return the path of the regular file `name` directly in `model_dir`.

    A link may lead to a file below this directory, or from a snapshot of the Hugging Face cache to
    its `blobs`. Any other link is rejected, so that a downloaded directory cannot make moeserve
    read other files of this machine. Raises CheckpointError.
    """
    home = model_dir.resolve()
    if Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(f"{model_dir}: {name!r} is not the name of a file in this directory")
    path = home / name
    try:
        real = path.resolve(strict=True)
        is_regular = stat.S_ISREG(real.stat().st_mode)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; download the model again, completely") from None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL byte
        raise CheckpointError(f"{path} cannot be opened: {error}") from None
    if not any(real.is_relative_to(root) for root in (home, *_blobs(home))):
        raise CheckpointError(
            f"{path} is a link to {real}, outside of the model's directory; replace the link by "
            "the file itself"
        )
    if not is_regular:
        raise CheckpointError(f"{path} is not a regular file")
    return path


def _blobs(home: Path) -> list[Path]:
    """Return the directories of the files to which a snapshot in the Hugging Face cache links:
    the repository's, and the one that all repositories share.

    home: a directory models--ORG--NAME/snapshots/REVISION, or one below it.
    """
    return [
        (owner / "blobs").resolve()
        for snapshots in home.parents
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--")
        for owner in snapshots.parents[:2]
    ]


def decode_json(path: Path, shown: Path) -> dict[str, Any]:
    """Return the JSON object in a file of at most 64 MiB. Raises CheckpointError.

    NaN is rejected. Infinity, which transformers 4 writes, is read as the object that transformers
    5 writes for it. shown: the path in error messages.
    """
    with CheckpointError.instead_of(OSError, f"{shown} cannot be read"):
        if (num_bytes := path.stat().st_size) > _MAX_JSON_BYTES:
            raise CheckpointError(
                f"{shown} has {num_bytes} bytes; at most {_MAX_JSON_BYTES} are read"
            )
        text = path.read_bytes()
    damages = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    with CheckpointError.instead_of(damages, f"{shown} is not valid JSON", "; download it again"):
        value = _decoded(text)
    if not isinstance(value, dict):
        raise CheckpointError(f"{shown} must hold a JSON object, not {type(value).__name__}")
    return value


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        plain = _INFINITY.sub(b'{"__float__": "Infinity"}', text)
        if plain == text:
            raise
        return msgspec.json.decode(plain)


def is_gguf(model_dir: Path) -> bool:
    """Return whether the model is a GGUF file, of any name, and not a directory."""
    return model_dir.is_file() or (has_gguf_name(model_dir) and not model_dir.is_dir())


def has_gguf_name(path: Path) -> bool:
    """Return whether a file's extension is .gguf, in any case."""
    return path.suffix.lower() == GGUF


def begins_as_gguf(path: Path) -> bool:
    """Return whether a file begins with GGUF's magic number. Ollama's files have no extension."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def config_name(model_dir: Path) -> str:
    """Return the name of the model's config: config.json, or Mistral's params.json if alone."""
    has_only_params = os.path.lexists(model_dir / PARAMS) and not os.path.lexists(
        model_dir / CONFIG
    )
    return PARAMS if has_only_params else CONFIG
