"""Files and batches on local disk.

    FOLDER/lock
    FOLDER/OWNER/ID.json          the record of a file or a batch
    FOLDER/OWNER/ID.data          the bytes of a file
    FOLDER/OWNER/NAME.part        an upload or a record that is being written
    FOLDER/OWNER/ID.json.damaged  a record that could not be read at a start

Each owner sees only their own files. No name from a user becomes a path: owners are digests, and
ids are made here and looked up.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from moeserve.actor.tasks import spawn
from moeserve.errors import ConfigError, Conflict, NotFound, PayloadTooLarge, RequestError
from moeserve.server.errors import shorten
from moeserve.server.file_objects import Batch, FileObject, result_ids

log = logging.getLogger(__name__)

MAX_RECORDS = 10_000  # files and batches, of all owners together
NUM_IO_THREADS = 4  # threads that read and write the bytes of files

Record = FileObject | Batch
Kind = TypeVar("Kind", FileObject, Batch)
T = TypeVar("T")


class QuotaExceeded(PayloadTooLarge):
    """All files together would exceed `files_bytes`."""

    def __init__(self, num_left: int) -> None:
        what = (
            f"there is space for {num_left:,} more bytes of files (files_bytes); delete some files"
        )
        super().__init__(what, param="file")


class StorageFailed(RequestError, http_status=507, type="server_error", code="storage_failed"):
    """Reading or writing the disk failed. The request may be retried later."""


class ByteQuota:
    """Counts the bytes of all files against the limit.

    A writer counts bytes here before it writes them, so concurrent writers cannot exceed the limit
    together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: dict[Path, int] = {}
        self._num_used = 0  # the sum of all sizes

    @property
    def num_left(self) -> int:
        """Bytes that may still be added."""
        return max(0, self._max_bytes - self._num_used)

    def grow(self, path: Path, num_bytes: int) -> None:
        """Count bytes that are about to be added to a file.

        Raise QuotaExceeded if there is no space for them.
        """
        if num_bytes > self.num_left:
            raise QuotaExceeded(self.num_left)
        self.set_size(path, self._sizes.get(path, 0) + num_bytes)

    def set_size(self, path: Path, num_bytes: int) -> None:
        """Count the present bytes of a file, even above the limit. 0: the file does not exist."""
        self._num_used += num_bytes - self._sizes.pop(path, 0)
        if num_bytes:
            self._sizes[path] = num_bytes

    def move(self, source: Path, target: Path) -> None:
        """Count a file under its new path."""
        self.set_size(target, self._sizes.get(source, 0))
        self.set_size(source, 0)


class FileStore:
    """The files and batches of all owners. One process at a time uses the folder.

    Records are also in memory, so looking them up never waits for the disk. Threads do all other
    work on the disk. A change that has begun is finished even if its caller is cancelled, so disk
    and memory stay consistent.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Read the folder; blocks. Raise ConfigError for a folder that cannot be used."""
        self.quota = ByteQuota(max_bytes)
        self._folder = folder
        self._records: dict[str, dict[str, Record]] = {}  # owner -> id -> record, oldest first
        self._num_pending = 0  # uploads and records that will be added to _records
        self._changes: set[asyncio.Task[Any]] = set()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with ExitStack() as undo:
                lock = undo.enter_context((folder / "lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._load()
                self._unlock = undo.pop_all().close
        except BlockingIOError:
            what = f"files_dir: another running server uses {folder}; give each its own folder"
            raise ConfigError(what) from None
        except OSError as error:
            raise ConfigError(f"files_dir: cannot use {folder}: {error}") from error
        # A single thread writes changes to the disk in the order in which they were made.
        self._change_thread = ThreadPoolExecutor(1, "file-changes")
        self._io_threads = ThreadPoolExecutor(NUM_IO_THREADS, "file-bytes")

    def _load(self) -> None:
        """Read all records. A damaged one is renamed, and does not affect others."""
        for path in self._folder.glob("*/*.json"):
            try:
                record = _read_record(path)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                log.error("files_dir: %s is damaged and set aside: %s", path, error)
                with suppress(OSError):
                    path.rename(path.with_name(f"{path.name}.damaged"))
            else:
                self._records.setdefault(path.parent.name, {})[record.id] = record
        for owner in self._records:
            self._sort(owner)
        for path in self._folder.glob("*/*.part"):
            path.unlink()
        self._remove_leftovers()
        for path in self._folder.glob("*/*"):
            self.quota.set_size(path, path.stat().st_size)

    def _remove_leftovers(self) -> None:
        """Remove the bytes of files that were incomplete when a server ended.

        Keep the results of unfinished batches, which have no record yet, and the bytes of damaged
        records, so that somebody can repair them.
        """
        for folder in {path.parent for path in self._folder.glob("*/*.data")}:
            damaged_ids = {
                path.name.removesuffix(".damaged").removesuffix(".json")
                for path in folder.glob("*.damaged")
            }
            records = self._records.get(folder.name, {})
            open_batches = [
                record.id
                for record in records.values()
                if isinstance(record, Batch) and not record.ended
            ]
            damaged_batches = [id for id in damaged_ids if id.startswith("batch_")]
            ids_to_keep = {*damaged_ids}
            for batch_id in open_batches + damaged_batches:
                ids_to_keep |= set(result_ids(batch_id).values())
            for path in folder.glob("file-*.data"):
                if path.stem not in records and path.stem not in ids_to_keep:
                    log.info("files_dir: %s was left unfinished and is removed", path)
                    path.unlink()

    def _sort(self, owner: str) -> None:
        records = self._records[owner].values()
        oldest_first = sorted(records, key=lambda record: record.created_at)
        self._records[owner] = {record.id: record for record in oldest_first}

    # ---- records

    def owners(self) -> Iterator[str]:
        """Yield the owners that have files or batches. All methods name owners by `owner_key`."""
        yield from self._records

    def find(self, owner: str, id: str, kind: type[Kind], param: str = "id") -> Kind:
        """Return a record. Raise NotFound, also for a record of another owner."""
        record = self._records.get(owner, {}).get(id)
        if not isinstance(record, kind):
            what = "file" if kind is FileObject else "batch"
            raise NotFound(f"there is no {what} {shorten(id)!r}", param=param)
        return record

    def all(self, owner: str, kind: type[Kind]) -> list[Kind]:
        """Return the owner's records, newest first."""
        return [
            record
            for record in reversed(self._records.get(owner, {}).values())
            if isinstance(record, kind)
        ]

    async def add(self, owner: str, record: Record) -> None:
        """Store a new record. Raise PayloadTooLarge if there are too many."""
        self._check_count()
        self._num_pending += 1
        try:
            await self.save(owner, record)
        finally:
            self._num_pending -= 1

    async def save(self, owner: str, record: Record) -> None:
        """Write a record, completely or not at all. If it raises StorageFailed, a new record is not
        stored.
        """
        await self.run_to_end(self._save(owner, record), f"save {record.id}")

    async def delete(self, owner: str, id: str) -> None:
        """Delete a file. Raise NotFound, and Conflict while a batch reads it."""
        file = self.find(owner, id, FileObject)
        for batch in self.all(owner, Batch):
            if batch.input_file_id == file.id and not batch.ended:
                raise Conflict(f"{batch.id} reads {file.id}; cancel that batch first")
        await self.run_to_end(self._forget(owner, file), f"delete {file.id}")

    async def prune(self, owner: str, keep: int) -> None:
        """Delete ended batches, except the newest `keep` batches."""
        for batch in self.all(owner, Batch)[keep:]:
            if batch.ended:
                await self.run_to_end(self._forget(owner, batch), f"forget {batch.id}")

    def _check_count(self) -> None:
        if sum(map(len, self._records.values())) + self._num_pending >= MAX_RECORDS:
            what = f"the server already has {MAX_RECORDS:,} files and batches; delete some"
            raise PayloadTooLarge(what)

    async def _save(self, owner: str, record: Record) -> None:
        path = self._record_path(owner, record.id)
        data = msgspec.json.encode(record)
        records = self._records.setdefault(owner, {})
        is_new = record.id not in records
        records[record.id] = record  # before the first await, so that it counts and can be found
        try:
            await self.run_in_order(_write_whole, path, data)
        except BaseException:
            if is_new:  # a known record stays, and its owner saves it again
                records.pop(record.id, None)
            raise
        self.quota.set_size(path, len(data))

    async def _forget(self, owner: str, record: Record) -> None:
        if self._records[owner].pop(record.id, None) is None:
            return  # already deleted by another call
        paths = [self._record_path(owner, record.id), self.path(owner, record.id)]
        try:
            await self.run_in_order(_remove, paths)
        except BaseException:
            self._records[owner][record.id] = record
            self._sort(owner)
            raise
        for path in paths:
            self.quota.set_size(path, 0)

    def _record_path(self, owner: str, id: str) -> Path:
        return self._folder / owner / f"{id}.json"

    # ---- bytes

    def path(self, owner: str, id: str) -> Path:
        """Return the path of a file's bytes. The id must be one that this store has made."""
        return self._folder / owner / f"{id}.data"

    @asynccontextmanager
    async def upload(self, owner: str) -> AsyncIterator["Upload"]:
        """Yield a new file to write. Its bytes are removed at the end unless it was kept.

        Raise PayloadTooLarge if there are too many files.
        """
        self._check_count()
        self._num_pending += 1
        upload = Upload(self, owner, self._folder / owner / f"{uuid.uuid4().hex}.part")
        try:
            yield upload
        finally:
            self._num_pending -= 1
            await self.run_to_end(upload.close(), "remove an upload")

    async def keep(self, upload: "Upload", filename: str, purpose: str) -> FileObject:
        """Make a file of the bytes of an upload."""
        return await self.run_to_end(self._keep(upload, filename, purpose), "keep an upload")

    async def publish(self, owner: str, id: str, filename: str, purpose: str) -> FileObject | None:
        """Make a file of the bytes at the path of `id`. Return None if there are none."""
        work = self._publish(owner, id, filename, purpose)
        return await self.run_to_end(work, f"publish {id}")

    async def _keep(self, upload: "Upload", filename: str, purpose: str) -> FileObject:
        id = f"file-{uuid.uuid4().hex}"
        path = self.path(upload.owner, id)
        size = await self.run_io(upload.sync)
        await self.run_in_order(os.replace, upload.path, path)
        self.quota.move(upload.path, path)
        try:
            return await self._record(
                upload.owner, id, size=size, filename=filename, purpose=purpose
            )
        except BaseException:
            await self.run_in_order(_remove, [path])
            self.quota.set_size(path, 0)
            raise

    async def _publish(self, owner: str, id: str, filename: str, purpose: str) -> FileObject | None:
        path = self.path(owner, id)
        size = await self.run_io(_sync, path)
        self.quota.set_size(path, size)
        if size == 0:
            await self.run_in_order(_remove, [path])
            return None
        return await self._record(owner, id, size=size, filename=filename, purpose=purpose)

    async def _record(
        self, owner: str, id: str, *, size: int, filename: str, purpose: str
    ) -> FileObject:
        """Store the record of a file whose bytes are on the disk."""
        now = int(time.time())
        record = FileObject(id=id, bytes=size, created_at=now, filename=filename, purpose=purpose)
        await self._save(owner, record)
        return record

    # ---- threads

    async def run_in_order(self, work: Callable[..., T], *args: Any) -> T:
        """Call `work(*args)` in the thread of all changes, after the earlier ones.

        Raise StorageFailed.
        """
        return await _in_thread(self._change_thread, work, args)

    async def run_io(self, work: Callable[..., T], *args: Any) -> T:
        """Call `work(*args)`, which reads or writes the bytes of one file, in an I/O thread.

        Raise StorageFailed.
        """
        return await _in_thread(self._io_threads, work, args)

    async def run_to_end(self, change: Coroutine[Any, Any, T], what: str) -> T:
        """Await a change in a separate task, which continues if the caller is cancelled.

        what: a description of the change for the log.
        """
        task = spawn(change, name=what, on_error=_log_failure)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Finish all changes in progress, and let another process use the folder."""
        while self._changes:
            await asyncio.gather(*self._changes, return_exceptions=True)
        self._change_thread.shutdown(wait=False)
        self._io_threads.shutdown(wait=False)
        self._unlock()


class Upload:
    """The bytes of a new file while they arrive."""

    def __init__(self, store: FileStore, owner: str, path: Path) -> None:
        self.owner = owner
        self.path = path
        self._store = store
        self._file: BinaryIO | None = None
        self._closed = False
        self._lock = threading.Lock()  # a thread may still write while another one closes the file

    async def write(self, chunk: bytes) -> None:
        """Add bytes. Raise QuotaExceeded if the files may have no more, and StorageFailed."""
        self._store.quota.grow(self.path, len(chunk))
        await self._store.run_io(self._write, chunk)

    async def keep(self, filename: str, purpose: str) -> FileObject:
        """Make a file of the bytes. Raise StorageFailed."""
        return await self._store.keep(self, filename, purpose)

    def sync(self) -> int:
        """Flush the bytes to the disk (fsync) and return their number. Blocks."""
        self._write(b"")  # creates the file if there were no bytes
        with self._lock:
            assert self._file is not None
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._file.tell()

    async def close(self) -> None:
        """Close the file, and remove it. `keep` has given a kept file another path."""
        await self._store.run_io(self._remove)
        self._store.quota.set_size(self.path, 0)

    def _write(self, chunk: bytes) -> None:
        with self._lock:
            if self._closed:
                return
            if self._file is None:
                self.path.parent.mkdir(mode=0o700, exist_ok=True)
                self._file = self.path.open("wb")
            self._file.write(chunk)

    def _remove(self) -> None:
        with self._lock:
            self._closed = True
            self.path.unlink(missing_ok=True)
            if self._file is not None:
                with suppress(OSError):  # bytes in the buffer of a full disk
                    self._file.close()


def owner_key(owner: str) -> str:
    """Return the name of an owner's folder: a digest, since owners may be named in any way."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32]


async def _in_thread(threads: ThreadPoolExecutor, work: Callable[..., T], args: Any) -> T:
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, work, *args)
    except OSError as error:
        why = error.strerror or type(error).__name__
        what = f"the server's disk for files (files_dir) failed: {why}; retry when it is repaired"
        raise StorageFailed(what) from error


def _log_failure(what: str, error: Exception) -> None:
    log.error("files_dir: could not %s: %s", what, error.__cause__ or error)


def _read_record(path: Path) -> Record:
    kind: type[Record] = Batch if path.name.startswith("batch_") else FileObject
    record = msgspec.json.decode(path.read_bytes(), type=kind)
    if record.id != path.stem:
        raise ValueError(f"its id is {shorten(record.id)!r}, which is not its name")
    if kind is FileObject and not path.with_suffix(".data").is_file():
        raise ValueError("the bytes of the file are missing")
    return record


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: a crash leaves the old content or the new one."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _sync(path: Path) -> int:
    """Flush a file's bytes to the disk (fsync) and return their number; 0 if it does not exist."""
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0


def _remove(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
