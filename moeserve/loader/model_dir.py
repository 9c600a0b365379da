"""Finds the directory that a model's name means: the built-in one, a path, or a copy in the Hugging
Face cache.
"""

import os
import re
from importlib.resources import files
from pathlib import Path

from moeserve.config import DEMO
from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import weight_files
from moeserve.loader.files import CONFIG, GGUF, PARAMS, config_name, is_gguf, model_file
from moeserve.loader.gguf_file import first_file, models_in

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_model_dir(name: str) -> Path:
    """Returns the directory of `name`: `demo`, a directory, or `org/name` when the local Hugging
    Face cache has it.

    A GGUF file, the first of several, stands for a directory: `name` itself, or the only model in a
    directory of them.

    Nothing is ever downloaded. Raises CheckpointError.
    """
    if name == DEMO:
        demo = Path(str(files("moeserve") / "assets" / "demo"))
        if not (demo / "config.json").is_file():
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
    if exists and path.suffix == GGUF:
        real = path.resolve()  # a download's name may be a link to one without an ending
        return first_file(real if real.suffix == GGUF else path.parent.resolve() / path.name)
    if exists and name:
        raise CheckpointError(
            f"{name} is a file; pass the directory that holds it and its config.json, or a .gguf file"
        )
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"there is no directory {name!r}; pass a Hugging Face model directory or a GGUF file, or {DEMO!r} for the "
            "built-in model"
        )
    if snapshot := _hub_snapshot(name):
        return snapshot
    raise CheckpointError(
        f"there is no directory {name!r}, and {_hub_cache()} has no complete copy of a model of that name. "
        f"moeserve downloads nothing: run `hf download {name}` first, then pass the directory that it prints"
    )


def _only_gguf(folder: Path) -> Path:
    """Returns the GGUF model in a folder that has no other; the folder itself if it has one, or no
    GGUF file.
    """
    models = [] if any((folder / name).exists() for name in (CONFIG, PARAMS)) else models_in(folder)
    if len(models) > 1:
        raise CheckpointError(
            f"{folder} has several models ({', '.join(path.name for path in models)}); pass one of them"
        )
    return models[0] if models else folder


def _hub_cache() -> Path:
    """The folder of huggingface_hub's downloads, by its own environment variables."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def _hub_snapshot(name: str) -> Path | None:
    """The snapshot that `main` points to, if it is complete."""
    repo = _hub_cache() / ("models--" + name.replace("/", "--"))
    try:
        snapshot = repo / "snapshots" / (repo / "refs" / "main").read_text().strip()
        snapshot = _only_gguf(snapshot.resolve())
        if not is_gguf(snapshot):
            model_file(snapshot, config_name(snapshot))
            weight_files(snapshot)
    except (OSError, UnicodeDecodeError, CheckpointError):
        return None
    return snapshot
