"""Packed weights on disk. A start that finds its file maps it: nothing is read, packed or held a
second time.

A file has the packed weights of one rank; its name is its key, made of all that decides the bytes
(`key_of`). It is a safetensors file of the packed weights, of the parameters that no kernel packs,
and of checksums, in a tensor named by the key; a start verifies every byte. Files are written
aside, private to their user, and renamed when whole, so any number of processes may write, map and
delete them at once, or be killed. Files are mapped privately: pages that an expert moves into
become the process's own. Only their owner can do harm, by writing into a mapped file (other
weights) or cutting it short (SIGBUS), or another machine that deletes it from a shared disk.

With `expert_memory` experts stay in the file, and are read from it while the model serves. No start
holds more than one layer's: the first one writes each layer as it is packed, behind room for the
header, and others verify layer by layer.

A folder is bounded: files that no start mapped for the longest time (their time of change says
when) make room.
"""

import hashlib
import logging
import mmap
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor

from moeserve.comm.world import World
from moeserve.errors import CheckpointError, ConfigError
from moeserve.loader.load_plan import LoadPlan, Param, is_expert, is_packed
from moeserve.loader.safetensors_file import read_header
from moeserve.loader.weights import Params
from moeserve.ops.native import native
from moeserve.ops.native_layer import HUGE, LAYOUT, Room, new_room
from moeserve.version import __version__

log = logging.getLogger(__name__)
_native: Any = native()
_NAMES = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SYNC_BYTES = (
    1 << 30
)  # so much at a time goes to the disk: at the end it might take longer than a start may be silent
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
LEAST = 256 << 20  # bytes: unasked, no smaller model is kept, whose packing takes no time
MOST = 64 << 30  # bytes of all files in a folder, unless it is said
SPARED = 8 << 30  # bytes of a disk, or a tenth of it, that stay free
HEADER = 1 << 20  # bytes of a header that is written when experts are in the file already


def folder_of(asked: str | None) -> str | None:
    """Return the folder `asked` for packed weights, or the user's cache folder.

    None, with a warning, if the user has no home directory for `~`.
    """
    folder = Path(asked or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "moeserve/packed"))
    try:
        return str(folder.expanduser())
    except RuntimeError:
        log.warning(
            "packed weights are not cached: %s has no home directory to begin with; set HOME, or "
            "name another folder by packed_cache",
            folder,
        )
        return None


def key_of(
    identity: str, plan: LoadPlan, world: World, dtype: torch.dtype, asked: str | None
) -> str:
    """Returns the key of the weights that a rank packs. identity: of the checkpoint
    (`ExpertFiles.identity`).
    """
    what = (
        identity,
        plan.params,
        plan.pieces,
        world.tp_rank,
        world.tp_size,
        dtype,
        asked,
        LAYOUT,
        __version__,
    )
    return hashlib.sha256(repr(what).encode()).hexdigest()[:32]


class PackedCache:
    """One start's `tensors` by name, from their file or for it. Create it when the native kernels
    have their threads.

    alive: called now and then while bytes are read or written. most: bytes that the folder may hold
    (default: half of what it and the disk's free space have, MOST at most). sharers: ranks that
    keep as much there. on_disk: about how many bytes all weights have, if experts are to stay in
    the file, else 0. room: for what is not there yet. found: the file exists and is whole. product:
    the parameter that was taken from `CachedParams` last; packed bytes are kept under its name.
    """

    def __init__(
        self,
        folder: str,
        key: str,
        alive: Callable[[], None] = lambda: None,
        most: int | None = None,
        sharers: int = 1,
        on_disk: int = 0,
        room: Room = new_room,
    ) -> None:
        self.path = Path(folder, f"{key}.packed")
        self._key = key
        self.product = ""
        self._alive = alive
        self._most = most
        self._sharers = sharers
        self._on_disk = on_disk
        self._new_room = room
        self.tensors: dict[str, Tensor] = {}
        self._sums: dict[str, int] = {}  # of what is on the disk already
        self.file: BinaryIO | None = None  # with experts in it
        self._begin = 0  # of the mapping
        self._passing: Tensor | None = (
            None  # memory that each layer's experts pass on their way to the disk
        )
        try:
            if os.path.lexists(self.path):
                with open(
                    os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
                ) as file:
                    self.tensors, self._begin = _mapped(file, key, alive, bool(on_disk))
                    self.file = os.fdopen(os.dup(file.fileno()), "rb") if on_disk else None
                os.utime(self.path)
        except (OSError, CheckpointError) as error:
            why = str(error).partition(";")[0]
            log.warning(
                "packed weights are not used, but packed anew and replaced: %s: %s", self.path, why
            )
        self.found = bool(self.tensors)
        stay = (name for name in self.tensors if not (on_disk and is_expert(name)))
        self.mapped_bytes = sum(self.tensors[name].nbytes for name in stay)

    def room(self, num_bytes: int) -> tuple[Tensor, bool]:
        """A `Room` in the cache's memory."""
        assert self.found == (self.product in self.tensors), self.product
        if not self.found and self._on_disk and is_expert(self.product):
            if self._passing is None or self._passing.nbytes < num_bytes:
                self._passing = None  # not both at once
                self._passing, _ = new_room(num_bytes)
            self.tensors[self.product] = self._passing[:num_bytes]
        elif not self.found:
            self.tensors[self.product], _ = self._new_room(num_bytes)
        memory = self.tensors[self.product]
        assert memory.nbytes == num_bytes, (self.product, memory.nbytes, num_bytes)
        return memory, self.found

    def to_disk(self, memory: Tensor) -> int:
        """Returns where in `file` the experts are that `room` gave memory for; writes them first if
        none was found, and drops them. Raises ConfigError."""
        if self.found:
            return memory.data_ptr() - self._begin
        try:
            if self.file is None:
                self._make_room(self._on_disk)
                self.file = _new_file(self.path.parent)
                self.file.seek(HEADER)
            offset = self.file.tell()
            self._sums[self.product] = _native.checksum(memory.data_ptr(), memory.nbytes)
            _write(self.file, [memory.view(-1)], lambda num_bytes: self._alive())
            os.posix_fadvise(self.file.fileno(), offset, memory.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"expert_memory keeps experts in {self.path.parent}, where they cannot be "
                f"written: {error}; make room "
                "(docs/operations.md says how much), or let packed_cache name another folder"
            ) from None
        self.tensors[self.product] = memory.view(-1).to("meta")
        return offset

    def finish(
        self, pace: Callable[[], Callable[[int], None]] | None = None
    ) -> threading.Thread | None:
        """Drops the tensors, and writes the file if none was found; only warns if it cannot be
        written.

        pace: makes what is called with the bytes after each piece, in a thread that is returned:
        the file is then written behind the model's first steps, with checksums of now, and not at
        all if the process ends before. Not where experts are in the file: what is left is little,
        and all would be lost with it.
        """
        tensors = self.tensors
        self.tensors = {}
        self._passing = None
        if self.found:
            self.close()
            log.info("packed weights mapped from %s", self.path)
            return None
        parts = _contents(tensors, self._key, self._alive, self._sums)
        if pace is None or self._sums:
            self._keep(parts, lambda num_bytes: self._alive())
            return None
        thread = threading.Thread(
            target=lambda: self._keep(parts, pace()), name="packed cache", daemon=True
        )
        thread.start()
        return thread

    def close(self) -> None:
        """Closes the file if it is open; whoever reads experts from it has opened it again."""
        if self.file:
            self.file.close()

    def _keep(self, parts: list[Tensor], work: Callable[[int], None]) -> None:
        try:
            if self.file is None:
                self._make_room(sum(len(part) for part in parts))
                self.file = _new_file(self.path.parent)
            with self.file as file:
                file.seek(0)
                _write(file, parts, work)
                _link(file, self.path)
            log.info("packed weights written to %s", self.path)
        except OSError as error:
            log.warning(
                "packed weights cannot be kept: %s; make room, let packed_cache name another "
                'folder, or say "off"',
                error,
            )

    def _make_room(self, num_bytes: int) -> None:
        """Deletes what was not used for the longest time until a file fits; nothing if it cannot.
        Raises OSError.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = [
            (status.st_mtime_ns, status.st_size, file) for file, status in _files(self.path.parent)
        ]
        disk = shutil.disk_usage(self.path.parent)
        held = sum(size for _, size, _ in files)
        most = min(MOST, (disk.free + held) // 2) if self._most is None else self._most
        room = min(most, disk.free + held - min(SPARED, disk.total // 10))
        if num_bytes * self._sharers > room:
            raise OSError(
                f"{self.path.parent} may hold {max(0, room):,} bytes (packed_cache_bytes and "
                "the disk's free space "
                f"decide), and {self._sharers} rank(s) of this model have {num_bytes:,} each"
            )
        for _, size, file in sorted(files):
            if held + num_bytes <= room:
                return
            file.unlink(missing_ok=True)  # whoever has it mapped keeps it
            held -= size
            log.info("packed weights deleted for others, not used for longest: %s", file)


class CachedParams(Params):
    """Parameters that a cache may have: then nothing is read, and those that the cache has packed
    are on "meta".
    """

    def __init__(self, cache: PackedCache, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._cache = cache
        self._device = torch.device("meta") if cache.found else self._device

    def __getitem__(self, name: str) -> Any:
        if is_packed(name):
            self._cache.product = name
        return super().__getitem__(name)

    def _read(self, param: Param) -> Any:
        have = self._cache.tensors
        if param.name in have and not is_packed(param.name):
            return have[param.name]
        with self._device:
            value: Any = super()._read(param)
        if not is_packed(param.name):
            have[param.name] = value
        return value


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for file in folder.glob("*.packed"):
        with suppress(FileNotFoundError):  # deleted by another process
            yield file, file.stat(follow_symlinks=False)


def _mapped(
    file: BinaryIO, key: str, alive: Callable[[], None], on_disk: bool
) -> tuple[dict[str, Tensor], int]:
    """The tensors of a file, verified, and the address of its first byte. on_disk: experts leave
    memory again. Raises CheckpointError, or OSError."""
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise CheckpointError("it is no file that this user alone can write")
    entries = read_header(Path(f"/proc/self/fd/{file.fileno()}"))
    if key not in entries or any(entry.dtype not in _DTYPES for entry in entries.values()):
        raise CheckpointError("it was made for something else")
    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    _native.advise_huge_pages(memory.data_ptr(), len(memory))
    head = memory[: min(entry.offset for entry in entries.values())]
    parts = {
        name: memory[entry.offset : entry.offset + entry.num_bytes]
        for name, entry in entries.items()
    }
    sums = [_checksum(head, alive)]
    expected = parts.pop(key)
    for name, part in parts.items():
        sums.append(_checksum(part, alive))
        if on_disk and is_expert(name):
            begin = entries[name].offset // mmap.PAGESIZE * mmap.PAGESIZE
            end = entries[name].offset + len(part)
            mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
            os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
    if not torch.equal(expected, _bytes_of(sums)):
        raise CheckpointError("its checksums are of something else, so it is damaged")
    tensors = {
        name: part.view(_DTYPES[entries[name].dtype]).view(entries[name].shape)
        for name, part in parts.items()
    }
    return tensors, memory.data_ptr()


def _checksum(part: Tensor, alive: Callable[[], None]) -> int:
    found: int = _native.checksum(part.data_ptr(), len(part))
    alive()
    return found


def _bytes_of(sums: list[int]) -> Tensor:
    return torch.tensor(sums, dtype=torch.uint64).view(torch.uint8)


def _contents(
    tensors: dict[str, Tensor], key: str, alive: Callable[[], None], on_disk: dict[str, int]
) -> list[Tensor]:
    """All bytes of a file. on_disk: checksums of tensors that are there already, and on "meta"
    here.
    """
    sums = torch.empty(8 + 8 * len(tensors), dtype=torch.uint8)
    end = 0
    header = {}
    parts: dict[str, Tensor] = {}
    # What is on the disk first, then those whose sizes keep all behind them aligned to 64, then
    # those with the largest elements.
    order = sorted(
        {**tensors, key: sums}.items(),
        key=lambda item: (item[0] not in on_disk, not is_packed(item[0]), -item[1].itemsize),
    )
    for name, tensor in order:
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name]["data_offsets"] = end, end + tensor.nbytes
        end += tensor.nbytes
        parts[name] = tensor.view(-1).view(torch.uint8)
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % (HEADER if on_disk else 4096))
    assert not on_disk or 8 + len(text) == HEADER, len(text)
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    all_sums = [_checksum(head, alive)]
    for name, part in parts.items():
        if name != key:
            all_sums.append(on_disk[name] if name in on_disk else _checksum(part, alive))
    sums.copy_(_bytes_of(all_sums))
    return [head, *parts.values()]


def _new_file(folder: Path) -> BinaryIO:
    """A file without a name."""
    return open(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600), "r+b", buffering=0)


def _write(file: BinaryIO, parts: list[Tensor], work: Callable[[int], None]) -> None:
    """Writes parts from here on, but for those on "meta", which are there."""
    synced = file.tell()
    for part in parts:
        if part.is_meta:
            file.seek(part.nbytes, os.SEEK_CUR)
            continue
        left = part.numpy().data
        while left:  # up to the next large page: systems that keep files in such pages do it then
            count = file.write(left[: HUGE - file.tell() % HUGE])
            left = left[count:]
            work(count)
        if file.tell() - synced > SYNC_BYTES:
            os.fsync(file)
            synced = file.tell()
    os.fsync(file)


def _link(file: BinaryIO, path: Path) -> None:
    """Names a file that is whole."""
    name = path.with_name(f"new-{secrets.token_hex(8)}")
    descriptor = (
        file.fileno()
    )  # as src_dir_fd it means nothing, but makes `link` follow what stands for the file
    os.link(f"/proc/self/fd/{descriptor}", name, src_dir_fd=descriptor, follow_symlinks=True)
    try:
        name.replace(path)
    finally:
        with suppress(FileNotFoundError):
            name.unlink()
