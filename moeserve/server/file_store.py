"""Files on local disk: FOLDER/OWNER/ID.json says what ID.data is. Owners see their own files only.

No name of a user becomes a path: owners are digests, ids are of our making and are looked up, never
joined unseen.
"""

import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from moeserve.errors import ConfigError, Conflict, NotFound, PayloadTooLarge
from moeserve.server.errors import shorten
from moeserve.server.file_objects import Batch, FileObject

MAX_RECORDS = 10_000  # files and batches, of all owners together
Record = FileObject | Batch
T = TypeVar("T", FileObject, Batch)


class FileStore:
    """All owners' files and batches. One process has the folder at a time; what it had is found
    again by the next.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises ConfigError for a folder that cannot be used."""
        self.max_bytes = max_bytes
        self._folder = folder
        self._records: dict[
            str, dict[str, Record]
        ] = {}  # owner's digest -> id -> record, oldest first
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with ExitStack() as undo:
                lock = undo.enter_context((folder / "lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._load()
                self.close = undo.pop_all().close  # lets another process have the folder
        except BlockingIOError:
            raise ConfigError(f"files_dir: {folder} belongs to another server that runs") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"files_dir: cannot use {folder}: {error}") from error

    def _load(self) -> None:
        for path in self._folder.glob("*/*.json"):
            kind = Batch if path.name.startswith("batch_") else FileObject
            record: Any = msgspec.json.decode(path.read_bytes(), type=kind)
            self._records.setdefault(path.parent.name, {})[record.id] = record
        for owner, records in self._records.items():
            self._records[owner] = dict(
                sorted(records.items(), key=lambda item: item[1].created_at)
            )
        for path in self._folder.glob("*/*.part"):  # uploads and records that were not finished
            path.unlink()

    def room(self) -> int:
        """Returns how many bytes may still be added."""
        return self.max_bytes - sum(path.stat().st_size for path in self._folder.glob("*/*.*"))

    def owners(self) -> Iterator[str]:
        """Yields the owners that have something, as `owner_key` names them."""
        yield from self._records

    def find(self, owner: str, id: str, kind: type[T], param: str = "id") -> T:
        """Returns a record. Raises NotFound, also for what belongs to others."""
        found = self._records.get(owner, {}).get(id)
        if not isinstance(found, kind):
            what = "file" if kind is FileObject else "batch"
            raise NotFound(f"there is no {what} {shorten(id)!r}", param=param)
        return found

    def all(self, owner: str, kind: type[T]) -> list[T]:
        """Returns the owner's records, newest first."""
        return [
            record
            for record in reversed(self._records.get(owner, {}).values())
            if isinstance(record, kind)
        ]

    def path(self, owner: str, id: str) -> Path:
        """Returns where the bytes of a file are, whose id is known to be one of ours."""
        return self._folder / owner / f"{id}.data"

    def admit(self) -> None:
        """Raises PayloadTooLarge if there may be no more files or batches."""
        if sum(map(len, self._records.values())) >= MAX_RECORDS:
            raise PayloadTooLarge(
                f"the server keeps {MAX_RECORDS:,} files and batches already; delete some"
            )

    def new_part(self, owner: str) -> Path:
        """Returns a path for the bytes of a file that is on its way. Raises what `admit` raises."""
        self.admit()
        (self._folder / owner).mkdir(mode=0o700, exist_ok=True)
        return self._folder / owner / f"{uuid.uuid4().hex}.part"

    def add(self, owner: str, part: Path, filename: str, purpose: str) -> FileObject:
        """Makes a file of the bytes at `part`."""
        id = f"file-{uuid.uuid4().hex}"
        part.rename(self.path(owner, id))
        return self.publish(owner, id, filename, purpose)

    def publish(self, owner: str, id: str, filename: str, purpose: str) -> FileObject:
        """Makes a file of the bytes that lie at the path of `id` already."""
        size = self.path(owner, id).stat().st_size
        record = FileObject(
            id=id, bytes=size, created_at=int(time.time()), filename=filename, purpose=purpose
        )
        self.save(owner, record)
        return record

    def save(self, owner: str, record: Record) -> None:
        """Writes a record, whole or not at all."""
        (self._folder / owner).mkdir(mode=0o700, exist_ok=True)
        self._records.setdefault(owner, {})[record.id] = record
        part = self._folder / owner / f"{record.id}.json.part"
        part.write_bytes(msgspec.json.encode(record))
        os.replace(part, self._folder / owner / f"{record.id}.json")

    def delete(self, owner: str, id: str) -> None:
        """Deletes a file. Raises NotFound, and Conflict while a batch reads it."""
        file = self.find(owner, id, FileObject)
        if any(
            batch.input_file_id == file.id and not batch.ended for batch in self.all(owner, Batch)
        ):
            raise Conflict(f"a batch reads {file.id}; cancel it first")
        self._forget(owner, file)

    def prune(self, owner: str, keep: int) -> None:
        """Forgets the oldest batches that have ended, beyond the newest `keep`. Their files stay."""
        for batch in self.all(owner, Batch)[keep:]:
            if batch.ended:
                self._forget(owner, batch)

    def _forget(self, owner: str, record: Record) -> None:
        del self._records[owner][record.id]
        (self._folder / owner / f"{record.id}.json").unlink(missing_ok=True)
        self.path(owner, record.id).unlink(missing_ok=True)


def owner_key(owner: str) -> str:
    """Returns the name of an owner's folder: a digest, since owners may be named in any way."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32]
