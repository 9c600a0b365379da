"""Resolves a model's name: the built-in model, a path, or a copy in the Hugging Face cache."""

from importlib.resources import files
from pathlib import Path

from moeserve.actor.control_groups import memory_limit
from moeserve.config import DEMO
from moeserve.errors import CheckpointError
from moeserve.hub.cache import CachedRepo, complete_sizes, not_cached
from moeserve.hub.names import HubName, parse_hub_name
from moeserve.hub.select import FileSelection, SeveralModels, select
from moeserve.loader.checkpoint import weight_files
from moeserve.loader.files import (
    CONFIG,
    PARAMS,
    begins_as_gguf,
    config_name,
    has_gguf_name,
    model_file,
)
from moeserve.loader.gguf_file import first_file, models_in


class NotCached(CheckpointError):
    """The name is that of a model on a hub, which has no complete copy in the cache."""

    def __init__(self, name: HubName) -> None:
        super().__init__(f"{not_cached(name)} of that name; run `moeserve pull {name}` first")
        self.name = name


def resolve_model_dir(name: str) -> Path:
    """Return the model directory or GGUF file with this name.

    | name | result |
    |---|---|
    | demo | the built-in model |
    | a directory | itself, or the only GGUF model in it |
    | a GGUF file | itself; the first file of a split model |
    | a name on a hub (hub/names.py) | the model's copy in the Hugging Face cache |

    Downloads nothing. Raises NotCached, or CheckpointError if there is no such model.
    """
    if name == DEMO:
        demo = Path(str(files("moeserve") / "assets" / "demo"))
        if not (demo / CONFIG).is_file():
            raise CheckpointError(
                f"the built-in model is missing from {demo}; reinstall moeserve or pass a directory"
            )
        return demo
    hub_name = hub_name_of(name)
    if hub_name is not None:
        copy = cached_model(hub_name)
        if copy is None:
            raise NotCached(hub_name)
        return copy
    path = Path(name).expanduser()
    return _only_gguf(path.resolve()) if path.is_dir() else _gguf(path)


def hub_name_of(name: str) -> HubName | None:
    """Return the name of a model on a hub, or None for a path of this machine.

    Raises CheckpointError for text that is neither.
    """
    try:
        exists = bool(name) and Path(name).expanduser().exists()
    except (OSError, RuntimeError) as error:  # a name too long, an unknown ~user
        raise CheckpointError(
            f"{name[:200]!r} is not a directory: {getattr(error, 'strerror', error)}"
        ) from None
    if exists or name == DEMO:
        return None
    hub_name = parse_hub_name(name)
    if hub_name is None:
        raise CheckpointError(
            f"there is no directory {name!r}; pass a Hugging Face model directory, a GGUF file, "
            f"owner/name of a model on a hub, or {DEMO!r} for the built-in model"
        )
    return hub_name


def cached_model(name: HubName) -> Path | None:
    """Return the complete copy of a model in the cache, or None.

    Raises SeveralModels if the copy has several models, and the name does not say which.
    """
    snapshot = CachedRepo.named(name.repo).snapshot(name.revision)
    if snapshot is None:
        return None
    try:
        snapshot = snapshot.resolve()
        return _complete(snapshot, select(complete_sizes(snapshot), name, memory_limit))
    except SeveralModels:
        raise
    except (OSError, CheckpointError):
        return None


def _complete(snapshot: Path, selection: FileSelection) -> Path:
    """Return the path of a model in a snapshot. Raises CheckpointError if a file is missing."""
    if selection.gguf is not None:
        return snapshot / selection.gguf.files[0]
    folder = snapshot / selection.folder
    model_file(folder, config_name(folder))
    weight_files(folder)
    return folder


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
