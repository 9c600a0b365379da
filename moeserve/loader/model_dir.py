"""Finds the directory of a model, and opens files in it only where they really belong to it."""

from __future__ import annotations

import os
import re
import stat
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from moeserve.config import DEMO
from moeserve.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MAX_JSON_BYTES = 64 * 2**20


def resolve_model_dir(name: str) -> Path:
    """The directory that `name` means: `demo`, a directory, or `org/name` when the local Hugging Face cache has it.

    Nothing is ever downloaded. Raises CheckpointError.
    """
    if name == DEMO:
        return _demo_dir()
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise CheckpointError(f"{name} is a file; pass the directory that holds it and its config.json")
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"there is no directory {name!r}; pass a Hugging Face model directory, or {DEMO!r} for the built-in model"
        )
    if snapshot := _hub_snapshot(name):
        return snapshot
    raise CheckpointError(
        f"there is no directory {name!r}, and {_hub_cache()} has no complete copy of a model of that name. "
        f"moeserve downloads nothing: run `hf download {name}` first, then pass the directory that it prints"
    )


def _demo_dir() -> Path:
    path = Path(str(files("moeserve") / "assets" / "demo"))
    if not (path / "config.json").is_file():
        raise CheckpointError(f"the built-in model is missing from {path}; reinstall moeserve or pass a directory")
    return path


def _hub_cache() -> Path:
    """Where huggingface_hub keeps its downloads, by its own environment variables."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def _hub_snapshot(name: str) -> Path | None:
    """The complete snapshot that `main` points to, else the newest complete one."""
    repo = _hub_cache() / ("models--" + name.replace("/", "--"))
    try:
        snapshots = sorted((repo / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        main = (repo / "refs" / "main").read_text().strip() if (repo / "refs" / "main").is_file() else ""
    except OSError:
        return None
    snapshots.sort(key=lambda path: path.name != main)
    return next((path.resolve() for path in snapshots if _is_complete(path)), None)


def _is_complete(snapshot: Path) -> bool:
    from moeserve.loader.checkpoint import weight_files  # it needs this file's `model_file`

    try:
        model_file(snapshot, "config.json")
        weight_files(snapshot)
    except CheckpointError:
        return False
    return True


def model_file(model_dir: Path, name: str) -> Path:
    """The path of the regular file `name` directly in `model_dir`.

    A link may lead to a file of the same directory or, as in the Hugging Face cache, from `snapshots/<revision>`
    to `blobs`. Any other link is refused: a downloaded directory must not make us read other files of this machine.
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
    except (OSError, RuntimeError) as error:
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
    """The JSON object in the file `name`; at most 64 MiB, plain JSON (no NaN). Raises CheckpointError."""
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
