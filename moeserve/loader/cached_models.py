"""The models in the Hugging Face cache that can be served: list and remove them."""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from moeserve.errors import CheckpointError
from moeserve.hub.cache import CachedRepo, cache_dir, cached_repos, complete_sizes
from moeserve.hub.locks import try_lock
from moeserve.hub.names import MAIN, HubName
from moeserve.hub.select import gguf_models, select
from moeserve.loader.files import CONFIG, PARAMS
from moeserve.loader.model_dir import cached_model


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A complete model in the cache."""

    name: HubName
    commit: str
    size: int  # bytes
    used_at_s: float  # when its files were last read, in seconds since 1970


def cached_models() -> list[CachedModel]:
    """Return the models in the cache that can be served, the one that was used last first."""
    found: list[CachedModel] = []
    for cached in cached_repos():
        listed: set[Path] = set()
        for revision, snapshot in sorted(cached.snapshots(), key=lambda pair: pair[0] != MAIN):
            if snapshot not in listed:
                listed.add(snapshot)
                found += _models_in(cached, revision, snapshot)
    return sorted(found, key=lambda model: -model.used_at_s)


def _models_in(cached: CachedRepo, revision: str, snapshot: Path) -> Iterator[CachedModel]:
    """Yield the models in a snapshot. What cannot be served is left out."""
    sizes = complete_sizes(snapshot)
    for name in _names_in(HubName(cached.repo, revision=revision), sizes):
        with suppress(CheckpointError, OSError):  # OSError: another process removes the files
            if cached_model(name) is None:
                continue
            files = _files_of(sizes, name)
            used_at_s = max((snapshot / file).stat().st_atime for file in files)
            size = sum(sizes[file] for file in files)
            yield CachedModel(name, snapshot.name, size=size, used_at_s=used_at_s)


def _names_in(name: HubName, sizes: dict[str, int]) -> Iterator[HubName]:
    """Yield the names of what may be models: folders with safetensors, and GGUF models."""
    folders = {os.path.dirname(file) for file in sizes if file.endswith(".safetensors")}
    for folder in sorted(folders):
        if any(os.path.join(folder, config) in sizes for config in (CONFIG, PARAMS)):
            yield replace(name, path=folder)
    models = gguf_models(sizes)
    num_with_label = Counter(model.label.upper() for model in models)
    for model in models:
        if num_with_label[model.label.upper()] == 1:
            yield replace(name, quant=model.label)
        else:
            yield replace(name, path=model.files[0])


def _files_of(sizes: dict[str, int], name: HubName) -> list[str]:
    """Return the files of a model of a snapshot."""
    selection = select(sizes, name)
    if selection.gguf is not None:
        return [*selection.gguf.files, *selection.encoders]
    weights = [
        file
        for file in sizes
        if file.endswith(".safetensors") and os.path.dirname(file) == selection.folder
    ]
    return [*selection.texts, *weights]


def remove(name: HubName) -> int:
    """Remove a model from the cache. Return the bytes that this frees.

    A quantization, path or revision removes only that; a bare name all that the cache has of the
    repository, incomplete downloads included. Raises CheckpointError.
    """
    cached = CachedRepo.named(name.repo)
    if not cached.folder.is_dir():
        raise CheckpointError(
            f"{cache_dir()} has no copy of {name.repo}; `moeserve list` shows the models there"
        )
    before = _disk_bytes(cached.folder)
    cannot = CheckpointError.instead_of(OSError, f"{cached.folder} cannot be removed")
    with cannot, try_lock(cached.lock_file) as is_free:
        if not is_free:
            raise CheckpointError(f"{name.repo} is being downloaded by another process")
        if name == HubName(name.repo):
            _remove_repo(cached)
        else:
            _remove_part(cached, name)
    return before - _disk_bytes(cached.folder)


def _remove_part(cached: CachedRepo, name: HubName) -> None:
    """Remove a revision or one of its models, and the contents that nothing else needs."""
    snapshot = cached.snapshot(name.revision)
    if snapshot is None:
        raise CheckpointError(f"{cached.folder} has no revision {name.revision!r}")
    if name.quant or name.path:
        for file in _unshared_files(complete_sizes(snapshot), name):
            (snapshot / file).unlink()
    else:
        refs = [revision for revision, folder in cached.snapshots() if folder == snapshot]
        if name.revision in refs and len(refs) > 1:  # other branches or tags are this commit, too
            cached.ref(name.revision).unlink()
            return
        shutil.rmtree(snapshot)
        for revision in refs:
            cached.ref(revision).unlink(missing_ok=True)
    used = {
        os.path.realpath(path)
        for path in (cached.folder / "snapshots").rglob("*")
        if path.is_file()
    }
    if not used:
        _remove_repo(cached)
        return
    for blob in cached.blobs.iterdir():
        if os.path.realpath(blob) not in used and not blob.name.endswith(".incomplete"):
            blob.unlink()


def _unshared_files(sizes: dict[str, int], name: HubName) -> list[str]:
    """Return the files of a model, without those that other models of the snapshot have, too."""
    own = _files_of(sizes, name)
    rest = {file: size for file, size in sizes.items() if file not in own}
    encoders = select(sizes, name).encoders
    return [file for file in own if file not in encoders or not gguf_models(rest)]


def _remove_repo(cached: CachedRepo) -> None:
    """Remove all that the cache has of a repository."""
    has_shared_blobs = cached.blobs.is_dir() and any(map(Path.is_symlink, cached.blobs.iterdir()))
    if has_shared_blobs:  # contents that huggingface_hub keeps once for several repositories
        from huggingface_hub import scan_cache_dir

        commits = [path.name for path in cached.folder.joinpath("snapshots").iterdir()]
        scan_cache_dir(cache_dir()).delete_revisions(*commits).execute()
    shutil.rmtree(cached.folder, ignore_errors=has_shared_blobs)


def _disk_bytes(folder: Path) -> int:
    """Return the bytes of the files below a folder; links do not count."""
    return sum(_own_bytes(Path(base, name) for name in names) for base, _, names in os.walk(folder))


def _own_bytes(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with suppress(FileNotFoundError):  # a download that was complete meanwhile has renamed it
            total += 0 if path.is_symlink() else path.lstat().st_size
    return total
