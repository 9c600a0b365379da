"""Copies of models in the Hugging Face cache: where their files are, and which are complete.

CACHE/models--owner--name/refs/main                 a commit
CACHE/models--owner--name/snapshots/COMMIT/FILE     a link to a file in blobs
CACHE/models--owner--name/blobs/DIGEST
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moeserve.errors import CheckpointError
from moeserve.hub.names import HubName
from moeserve.hub.select import gguf_models

_FOLDER = re.compile(r"models--([^/]+?)--([^/]+)")


def cache_dir() -> Path:
    """Return huggingface_hub's cache directory, according to its environment variables."""
    try:
        if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
            return _expanded(cache)
        if home := os.environ.get("HF_HOME"):
            return _expanded(home) / "hub"
        return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"
    except RuntimeError:  # this user has no home directory
        raise CheckpointError(
            "the Hugging Face cache cannot be found, because this user has no home directory; "
            "set HF_HOME, or pass a model's directory"
        ) from None


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """The folder of a repository in the cache. It may not exist."""

    folder: Path
    repo: str  # owner/name

    @classmethod
    def named(cls, repo: str) -> "CachedRepo":
        """Return the folder of a repository."""
        return cls(cache_dir() / ("models--" + repo.replace("/", "--")), repo)

    @property
    def blobs(self) -> Path:
        """The folder of the files' contents."""
        return self.folder / "blobs"

    @property
    def lock_file(self) -> Path:
        """The file that is locked while the repository is changed."""
        return self.folder.parent / ".locks" / self.folder.name / "moeserve.lock"

    def ref(self, revision: str) -> Path:
        """Return the file with the commit of a branch or tag."""
        return self.folder / "refs" / revision

    def snapshot(self, revision: str) -> Path | None:
        """Return the folder of a revision, None if there is none."""
        snapshots = self.folder / "snapshots"
        try:
            commit = self.ref(revision).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            commit = revision
        # A commit is a name of a folder here, so it must not lead elsewhere.
        is_name = Path(commit).name == commit and commit not in ("", ".", "..")
        folder = snapshots / commit
        return folder if is_name and folder.is_dir() else None

    def snapshots(self) -> Iterator[tuple[str, Path]]:
        """Yield each revision that can be named, and its folder: branches, tags, then commits."""
        found = set()
        refs = self.folder / "refs"
        for path in sorted(refs.rglob("*")):
            revision = str(path.relative_to(refs))
            folder = self.snapshot(revision) if path.is_file() else None
            if folder is not None:
                found.add(folder)
                yield revision, folder
        for folder in sorted((self.folder / "snapshots").glob("*")):
            if folder.is_dir() and folder not in found:
                yield folder.name, folder


def cached_repos() -> list[CachedRepo]:
    """Return the repositories of models in the cache."""
    found = []
    for folder in sorted(cache_dir().glob("models--*--*")):
        name = _FOLDER.fullmatch(folder.name)
        if name and folder.is_dir():
            found.append(CachedRepo(folder, f"{name[1]}/{name[2]}"))
    return found


def sizes_in(snapshot: Path) -> dict[str, int]:
    """Return the bytes of each file of a snapshot, by path. Files without content are left out."""
    sizes = {}
    for folder, _, names in os.walk(snapshot):
        for name in names:
            path = Path(folder, name)
            try:
                sizes[str(path.relative_to(snapshot))] = path.stat().st_size
            except OSError:  # a link to a file that is not there
                continue
    return sizes


def complete_sizes(snapshot: Path) -> dict[str, int]:
    """Return `sizes_in` without GGUF models of which some files are missing."""
    sizes = sizes_in(snapshot)
    for model in gguf_models(sizes):
        if model.num_missing:
            for file in model.files:
                del sizes[file]
    return sizes


def not_cached(name: HubName) -> str:
    """Return the beginning of an error about a model without a copy in the cache."""
    return f"there is no directory {str(name)!r}, and {cache_dir()} has no complete copy of a model"
