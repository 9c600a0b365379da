"""Opens the files of a model directory, and only those that really belong to it."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import msgspec

from moeserve.errors import CheckpointError

_MAX_JSON_BYTES = 64 * 2**20


def model_file(model_dir: Path, name: str) -> Path:
    """Returns the path of the regular file `name` directly in `model_dir`.

    A link may lead to a file of the same directory or, as in the Hugging Face cache, from `snapshots/<revision>` to
    `blobs`. Any other link is refused: a downloaded directory must not make us read other files of this machine.
    """
    home = model_dir.resolve()
    if Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(f"{model_dir}: {name!r} is not the plain name of a file in this directory")
    path = home / name
    try:
        real = path.resolve(strict=True)
        is_regular = stat.S_ISREG(real.stat().st_mode)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; download the model again, completely") from None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL byte
        raise CheckpointError(f"{path} cannot be opened: {error}") from None
    allowed = {home}
    if home.parent.name == "snapshots":
        allowed.add(home.parent.parent / "blobs")
    if real.parent not in allowed:
        raise CheckpointError(
            f"{path} is a link to {real}, outside the model's directory; replace the link by the file itself"
        )
    if not is_regular:
        raise CheckpointError(f"{path} is not a regular file")
    return path


def read_json(model_dir: Path, name: str) -> dict[str, Any]:
    """Returns the JSON object in the file `name`; at most 64 MiB, plain JSON (no NaN). Raises CheckpointError."""
    path = model_file(model_dir, name)
    try:
        if (num_bytes := path.stat().st_size) > _MAX_JSON_BYTES:
            raise CheckpointError(f"{model_dir / name} has {num_bytes} bytes; at most {_MAX_JSON_BYTES} are read")
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{model_dir / name} cannot be read: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{model_dir / name} is not valid JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{model_dir / name} must hold a JSON object, not {type(value).__name__}")
    return value
