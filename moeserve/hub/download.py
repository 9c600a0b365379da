"""Download a model: list its files, choose, check the space, and fetch what is missing.

Config and tokenizer come first, so that a model that cannot be served is refused before its weights
are downloaded. The weights appear in the snapshot when all of them are complete, and the name of
the revision after that. So a snapshot that can be found is complete.
"""

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from moeserve.actor.control_groups import memory_limit
from moeserve.actor.tasks import in_thread
from moeserve.errors import CheckpointError
from moeserve.hub import listing
from moeserve.hub.cache import CachedRepo
from moeserve.hub.listing import RemoteFile, Repository
from moeserve.hub.locks import try_lock
from moeserve.hub.names import HubName, endpoint
from moeserve.hub.progress import DownloadMeter, Report
from moeserve.hub.select import FileSelection, indexed, select
from moeserve.hub.transfer import Source, fetch, part_of, session
from moeserve.hub.units import size_text

MAX_TRANSFERS = 4  # at once
SPARE_BYTES = 2**28  # of disk space, which others may need meanwhile
LOCK_INTERVAL_S = 0.5
MAX_INDEX_BYTES = 2**26

Check = Callable[[Path], None]


class Downloaded(NamedTuple):
    """A model that was downloaded."""

    commit: str
    folder: Path  # with its files


async def download(
    name: HubName, report: Report, *, check: Check, configs_only: bool = False
) -> Downloaded:
    """Download the files of a model that are missing in the cache.

    Raises CheckpointError, also if the hub cannot be asked.

    Args:
        report: Called with the progress.
        check: Called with the model's folder once its config is there. Raises CheckpointError to
            refuse the model. Not called for GGUF files.
        configs_only: Leave out the weights. Raises CheckpointError for a GGUF model.
    """
    if listing.is_offline():
        raise listing.offline(name)
    meter = DownloadMeter(str(name), report)
    meter.show()
    repository = await listing.list_files(name)
    selection = select(repository.sizes, name, memory_limit)
    if selection.note:
        meter.note(selection.note)
    cached = CachedRepo.named(name.repo)
    key = await in_thread("token", listing.token)
    source = Source(endpoint(), name.repo, repository.commit, key)
    try:
        async with _lock(cached, meter), session() as client:
            task = Download(client, source, repository, cached, meter)
            await task.run(selection, check, configs_only=configs_only)
            if not configs_only:
                _name_revision(cached, name.revision, repository.commit)
    except OSError as error:
        raise _not_written(cached, error) from None
    return Downloaded(repository.commit, task.snapshot / selection.folder)


class Download:
    """The download of one model."""

    def __init__(
        self,
        client: aiohttp.ClientSession,
        source: Source,
        repository: Repository,
        cached: CachedRepo,
        meter: DownloadMeter,
    ) -> None:
        self.snapshot = cached.folder / "snapshots" / repository.commit
        self._client = client
        self._source = source
        self._repository = repository
        self._cached = cached
        self._meter = meter

    async def run(self, selection: FileSelection, check: Check, *, configs_only: bool) -> None:
        """Download the files of a selection that are missing."""
        gguf = selection.gguf
        if gguf is not None and configs_only:
            raise CheckpointError(
                f"{self._meter.model} is a GGUF model, whose config is in the file of "
                f"{size_text(gguf.size)}; run `moeserve pull {self._meter.model}` first, or pass "
                "the name of the original model"
            )
        if gguf is not None:
            await self._fetch([*selection.encoders, *gguf.files])
            return
        await self._fetch(selection.texts)
        folder = self.snapshot / selection.folder
        await in_thread("check", lambda: check(folder))
        if not configs_only:
            await self._fetch(self._weights(selection))

    def _weights(self, selection: FileSelection) -> tuple[str, ...]:
        if not selection.index:
            return selection.weights
        if self._file(selection.index).size > MAX_INDEX_BYTES:
            raise CheckpointError(
                f"{self._source.repo}: {selection.index} has more than "
                f"{size_text(MAX_INDEX_BYTES)}, which no index has; the repository is damaged"
            )
        text = (self.snapshot / selection.index).read_bytes()
        damages = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
        what = f"{self._source.repo}: {selection.index} is no JSON"
        with CheckpointError.instead_of(damages, what, "; the repository is damaged"):
            index = msgspec.json.decode(text)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        return indexed(weight_map, selection.folder)

    async def _fetch(self, paths: Iterable[str]) -> None:
        """Download files, and link to them in the snapshot when all are there."""
        files = [self._file(path) for path in paths]
        missing = [file for file in files if not (self.snapshot / file.path).exists()]
        self._count(files, missing)
        blobs = self._cached.blobs
        blobs.mkdir(parents=True, exist_ok=True)
        to_transfer = {file.digest: file for file in missing if not (blobs / file.digest).exists()}
        self._check_space(to_transfer.values())
        slots = asyncio.Semaphore(MAX_TRANSFERS)

        async def transfer(file: RemoteFile) -> None:
            async with slots:
                await fetch(self._client, self._source, file, blobs, self._meter)

        try:
            async with asyncio.TaskGroup() as group:
                for file in to_transfer.values():
                    group.create_task(transfer(file))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        last = {file.digest: file.path for file in missing}
        for file in missing:
            is_shared = last[file.digest] != file.path
            _link(blobs / file.digest, self.snapshot / file.path, is_shared=is_shared)
        self._meter.show()

    def _file(self, path: str) -> RemoteFile:
        file = self._repository.files.get(path)
        if file is None:
            raise CheckpointError(
                f"{self._source.repo} has no file {path!r}, which its index names; the repository "
                "is damaged"
            )
        return file

    def _count(self, files: list[RemoteFile], missing: list[RemoteFile]) -> None:
        """Add files to the total, and what is here of them to the bytes that are here."""
        contents = {file.digest: file for file in files}.values()  # each is downloaded once
        self._meter.total_bytes += sum(file.size for file in contents)
        absent = {file.digest for file in missing}
        for file in contents:
            is_here = file.digest not in absent or (self._cached.blobs / file.digest).exists()
            self._meter.found(file.size if is_here else _kept_bytes(self._cached.blobs, file))
        self._meter.show()  # at once: the first bytes may be late

    def _check_space(self, files: Iterable[RemoteFile]) -> None:
        """Raise CheckpointError if the disk has too little space for files."""
        blobs = self._cached.blobs
        needed = sum(file.size - _kept_bytes(blobs, file) for file in files)
        free = shutil.disk_usage(blobs).free
        if needed and needed + SPARE_BYTES > free:
            raise CheckpointError(
                f"{self._meter.model} needs {size_text(needed)} of disk space, and "
                f"{self._cached.folder.parent} has {size_text(free)} free, of which "
                f"{size_text(SPARE_BYTES)} are spared; remove models with `moeserve rm`, set "
                "HF_HUB_CACHE to another disk, or pass a smaller quantization"
            )


def _kept_bytes(blobs: Path, file: RemoteFile) -> int:
    """Return the bytes of a file that an earlier attempt has left."""
    try:
        return min(file.size, part_of(blobs, file).stat().st_size)
    except OSError:
        return 0


def _link(blob: Path, path: Path, *, is_shared: bool) -> None:
    """Make a file of a snapshot a link to its content, or move the content there.

    is_shared: Another file needs the content, too, so it is copied and not moved.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a link to a file that is gone
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:  # a file system without links
        if is_shared:
            shutil.copyfile(blob, path)
        else:
            os.replace(blob, path)


def _name_revision(cached: CachedRepo, revision: str, commit: str) -> None:
    """Write which commit a branch or tag is."""
    if revision == commit:
        return
    path = cached.ref(revision)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(commit)
    os.replace(new, path)


@asynccontextmanager
async def _lock(cached: CachedRepo, meter: DownloadMeter) -> AsyncIterator[None]:
    """Wait until no other process changes this repository, and lock it."""
    while True:
        with try_lock(cached.lock_file) as is_free:
            if is_free:
                yield
                return
        meter.note("another process downloads it")
        await asyncio.sleep(LOCK_INTERVAL_S)


def _not_written(cached: CachedRepo, error: OSError) -> CheckpointError:
    """Return the error about a cache that cannot be written."""
    cache = cached.folder.parent
    remedy = "set HF_HUB_CACHE to a folder that can be written"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = (
            "what was downloaded is kept; make room, with `moeserve rm` or otherwise, and start "
            "again, or set HF_HUB_CACHE to another disk"
        )
    return CheckpointError(f"{cache} cannot be written: {error.strerror or error}; {remedy}")
