"""Resolves a model's name: the built-in model, a path, or a copy in the Hugging Face cache."""

import os
import re
from importlib.resources import files
from pathlib import Path

from moeserve.config import DEMO
from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import weight_files
from moeserve.loader.files import (
    CONFIG,
    PARAMS,
    begins_as_gguf,
    config_name,
    has_gguf_name,
    is_gguf,
    model_file,
)
from moeserve.loader.gguf_file import first_file, models_in

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)((?:/[\w.-]+)*)")  # org/name, and a path in it


def resolve_model_dir(name: str) -> Path:
    """Return the model directory or GGUF file with this name.

    | name | result |
    |---|---|
    | demo | the built-in model |
    | a directory | itself, or the only GGUF model in it |
    | a GGUF file | itself; the first file of a split model |
    | org/name | the model's copy in the Hugging Face cache |
    | org/name/path | a directory or a GGUF file in that copy |

    Downloads nothing. Raises CheckpointError if there is no such model.
    """
    if name == DEMO:
        demo = Path(str(files("moeserve") / "assets" / "demo"))
        if not (demo / CONFIG).is_file():
            raise CheckpointError(
                f"the built-in model is missing from {demo}; reinstall moeserve or pass a directory"
            )
        return demo
    try:
        path = Path(name).expanduser()
        is_dir = path.is_dir()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, an unknown ~user
        raise CheckpointError(
            f"{name[:200]!r} is not a directory: {getattr(error, 'strerror', error)}"
        ) from None
    if is_dir and name:
        return _only_gguf(path.resolve())
    if exists and name:
        return _gguf(path)
    hub_id = _HUB_ID.fullmatch(name)
    if hub_id is None or ".." in hub_id[2].split("/"):
        raise CheckpointError(
            f"there is no directory {name!r}; pass a Hugging Face model directory, a GGUF file, "
            f"or {DEMO!r} for the built-in model"
        )
    repo = hub_id[1]
    inner = hub_id[2].lstrip("/")
    cache = _hub_cache()
    if snapshot := _hub_snapshot(cache, repo, inner):
        return snapshot
    raise CheckpointError(
        f"there is no directory {name!r}, and {cache} has no complete copy of a model of that "
        f"name. moeserve downloads nothing: run `hf download {repo}` first, then pass the "
        "directory that it prints"
    )


def _gguf(path: Path) -> Path:
    """Return the first file of the GGUF model with this file."""
    if not has_gguf_name(path) and not begins_as_gguf(path):
        raise CheckpointError(
            f"{path} is a file, but not GGUF; pass the directory with it and its config.json, or "
            "a GGUF file"
        )
    path = path.parent.resolve() / path.name
    try:
        model_file(path.parent, path.name)
    except CheckpointError:  # a link to another directory; the user named it, so it may be followed
        path = path.resolve()
    return first_file(path)


def _only_gguf(folder: Path) -> Path:
    """Return the only GGUF model in a directory; `folder` if it has a config or no GGUF file."""
    models = [] if any((folder / name).exists() for name in (CONFIG, PARAMS)) else models_in(folder)
    if len(models) > 1:
        raise CheckpointError(
            f"{folder} has several models ({', '.join(path.name for path in models)}); "
            "pass one of them"
        )
    return models[0] if models else folder


def _hub_cache() -> Path:
    """Return huggingface_hub's cache directory, according to its environment variables."""
    try:
        if cache := os.environ.get("HF_HUB_CACHE"):
            return Path(cache).expanduser()
        if home := os.environ.get("HF_HOME"):
            return Path(home).expanduser() / "hub"
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(cache).expanduser() / "huggingface" / "hub"
    except RuntimeError:  # this user has no home directory
        raise CheckpointError(
            "the Hugging Face cache cannot be found, because this user has no home directory; "
            "set HF_HOME, or pass a model's directory"
        ) from None


def _hub_snapshot(cache: Path, name: str, inner: str) -> Path | None:
    """Return the path `inner` in the snapshot of `main`, or None if there is no complete model.

    Raises CheckpointError if there are several models.
    """
    repo = cache / ("models--" + name.replace("/", "--"))
    try:
        revision = (repo / "refs" / "main").read_text().strip()
        folder = (repo / "snapshots" / revision).resolve() / inner
        if folder.is_file():
            return _gguf(folder)
        if not folder.is_dir():
            return None
    except (OSError, UnicodeDecodeError, CheckpointError):
        return None
    snapshot = _only_gguf(folder)
    if snapshot == folder and not any((folder / each).exists() for each in (CONFIG, PARAMS)):
        _choose_folder(f"{name}/{inner}".rstrip("/"), folder)
    try:
        if not is_gguf(snapshot):
            model_file(snapshot, config_name(snapshot))
            weight_files(snapshot)
    except (OSError, CheckpointError):
        return None
    return snapshot


def _choose_folder(name: str, folder: Path) -> None:
    """Raise CheckpointError with the subdirectories that have GGUF models, if any."""
    inner = sorted(path.name for path in folder.glob("*") if path.is_dir() and models_in(path))
    if inner:
        raise CheckpointError(
            f"{name} has its models in subdirectories; pass one of "
            + ", ".join(f"{name}/{each}" for each in inner)
        )
