"""The disk cache of packed weights. A later start maps a file instead of reading and packing again.

A file has the packed weights of one rank. Its name is a key derived from everything that decides
its bytes (`key_of`). It is a safetensors file with:

- the packed weights,
- the parameters that no kernel packs,
- checksums, in a tensor named like the key. Every start verifies every byte.

Any number of processes may write, map and delete files at once, or be killed: a file is written
without a name, readable by its user only, and gets its name when it is complete. Files are mapped
privately (copy on write), so an expert that moves to this rank does not change the file. What is
not guarded against: the owner writing into a mapped file (wrong weights) or truncating it (SIGBUS),
and another machine deleting it from a shared disk.

With `expert_memory`, experts stay in the file and are read from it while the model serves. A start
then holds at most one layer's experts in memory. The first start reserves room for the header and
writes each layer as soon as it is packed; later starts verify layer by layer.

The size of the directory is bounded. Least recently used files are deleted first; every start that
maps a file updates its modification time.
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
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# Bytes between calls of fsync. One call at the end could take longer than a start may go without a
# heartbeat.
SYNC_BYTES = 1 << 30
# By default, models with fewer bytes are not cached: packing them takes hardly any time.
LEAST = 256 << 20
MOST = 64 << 30  # default limit of the directory in bytes
SPARED = 8 << 30  # bytes of the disk to leave free, or a tenth of a small disk
HEADER = 1 << 20  # size of the header if it is written after the experts (`expert_memory`)


def folder_of(setting: str | None) -> str | None:
    """Return the directory of the packed cache: `setting`, or one in the user's cache directory.

    Returns None and logs a warning if the path begins with `~` and the user has no home directory.
    """
    folder = Path(
        setting or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "moeserve/packed")
    )
    try:
        return str(folder.expanduser())
    except RuntimeError:
        log.warning(
            "packed weights are not cached: %s needs a home directory, and this user has none; set "
            "HOME, or set packed_cache to another directory",
            folder,
        )
        return None


def key_of(
    identity: str, plan: LoadPlan, world: World, dtype: torch.dtype, forms: str | None
) -> str:
    """Return the key of a rank's packed weights, a hash of everything that decides their bytes.

    identity: of the checkpoint's files (`ExpertFiles.identity`).
    forms: the settings and formats of quantized weights, as text.
    """
    parts = (
        identity,
        plan.params,
        plan.pieces,
        world.tp_rank,
        world.tp_size,
        dtype,
        forms,
        LAYOUT,
        __version__,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


class PackedCache:
    """One rank's file in the packed cache, while the model is loaded.

    If a valid file exists (`found`), `tensors` are mapped from it. Otherwise they are collected
    while the model is packed, and `finish` writes them. Create it after the native kernels have
    their threads, which compute the checksums.

    alive: called regularly while bytes are read or written, as a heartbeat.
    most: limit of the directory in bytes (default: half of its size plus the disk's free space, at
        most MOST).
    sharers: ranks that each write a file of this size into the directory.
    on_disk: with `expert_memory` about the bytes of all weights, otherwise 0.
    room: allocates memory for new packed weights.
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
        # The parameter last taken from `CachedParams`: packed bytes are kept under its name.
        self.product = ""
        self._alive = alive
        self._most = most
        self._sharers = sharers
        self._on_disk = on_disk
        self._new_room = room
        self.tensors: dict[str, Tensor] = {}
        self._sums: dict[str, int] = {}  # checksums of experts that are already in `file`
        self.file: BinaryIO | None = None  # open with `expert_memory` only
        self._begin = 0  # address of the mapping
        self._staging: Tensor | None = None  # one layer's experts before they are written
        try:
            if os.path.lexists(self.path):
                with open(
                    os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb"
                ) as file:
                    self.tensors, self._begin = _mapped(file, key, alive, bool(on_disk))
                    self.file = os.fdopen(os.dup(file.fileno()), "rb") if on_disk else None
                os.utime(self.path)
        except (OSError, CheckpointError) as error:
            reason = str(error).partition(";")[0]
            log.warning(
                "packed weights in %s cannot be used and will be replaced: %s", self.path, reason
            )
        self.found = bool(self.tensors)
        in_memory = (name for name in self.tensors if not (on_disk and is_expert(name)))
        self.mapped_bytes = sum(self.tensors[name].nbytes for name in in_memory)

    def room(self, num_bytes: int) -> tuple[Tensor, bool]:
        """Return memory for the packed `product`, and whether it is filled already (a `Room`)."""
        assert self.found == (self.product in self.tensors), self.product
        if not self.found and self._on_disk and is_expert(self.product):
            if self._staging is None or self._staging.nbytes < num_bytes:
                self._staging = None  # free the old memory before allocating the new
                self._staging, _ = new_room(num_bytes)
            self.tensors[self.product] = self._staging[:num_bytes]
        elif not self.found:
            self.tensors[self.product], _ = self._new_room(num_bytes)
        memory = self.tensors[self.product]
        assert memory.nbytes == num_bytes, (self.product, memory.nbytes, num_bytes)
        return memory, self.found

    def to_disk(self, memory: Tensor) -> int:
        """Return the offset in `file` of a layer's experts, which are in `memory` from `room`.

        A new file gets them written first, and their memory may be reused afterwards. Raises
        ConfigError if they cannot be written.
        """
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
                f"expert_memory keeps experts in {self.path.parent}, but they cannot be written: "
                f"{error}; free disk space (see docs/cpu.md), or set packed_cache to "
                "another directory"
            ) from None
        self.tensors[self.product] = memory.view(-1).to("meta")
        return offset

    def finish(
        self, pace: Callable[[], Callable[[int], None]] | None = None
    ) -> threading.Thread | None:
        """Release the tensors, and write a new file. Only warns if it cannot be written.

        pace: write in a background thread, which is returned, while the model serves. It is called
            in the thread and returns a function that throttles the writes, called with the bytes of
            each piece. Checksums are computed before, so weights that change meanwhile invalidate
            the file. If the process ends first, there is no file. With `expert_memory` the file is
            written at once, because only little is left to write, and without it the experts that
            are written already would be lost.
        """
        tensors = self.tensors
        self.tensors = {}
        self._staging = None
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
        """Close the file if it is open. Readers of experts have their own descriptor."""
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
                "packed weights cannot be cached: %s; free disk space, set packed_cache to another "
                'directory, or set it to "off"',
                error,
            )

    def _make_room(self, num_bytes: int) -> None:
        """Delete the least recently used files until `num_bytes` fit.

        Raises OSError, and deletes nothing, if the files of all sharers cannot fit at all.
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
                f"{self.path.parent} may hold {max(0, room):,} bytes (by packed_cache_bytes and "
                f"free disk space), but {self._sharers} rank(s) of this model need {num_bytes:,} "
                "each"
            )
        for _, size, file in sorted(files):
            if held + num_bytes <= room:
                return
            file.unlink(missing_ok=True)  # processes that have mapped it keep the content
            held -= size
            log.info("deleted the least recently used packed weights: %s", file)


class CachedParams(Params):
    """Params that come from a packed cache if it has a file.

    Then nothing is read from the checkpoint, and parameters to pack are on "meta".
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
    """Map and verify a file. Returns its tensors, and the address of its first byte.

    on_disk: drop experts from memory after their verification. Raises CheckpointError or OSError.
    """
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise CheckpointError("it is not a regular file that only this user can write")
    entries = read_header(Path(f"/proc/self/fd/{file.fileno()}"))
    if key not in entries or any(entry.dtype not in _DTYPES for entry in entries.values()):
        raise CheckpointError("it does not have the weights that its name stands for")
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
        raise CheckpointError("its checksums do not match its content, so it is damaged")
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
    """Return the bytes of a new file, header first, checksums computed.

    on_disk: checksums of the tensors that are in the file already, and on "meta" here.
    """
    sums = torch.empty(8 + 8 * len(tensors), dtype=torch.uint8)
    end = 0
    header = {}
    parts: dict[str, Tensor] = {}
    # Order: tensors that are in the file already; packed ones, whose sizes keep the next ones
    # aligned to 64 bytes; the others, those with the largest elements first.
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
    """Create a file without a name, which disappears if the process ends."""
    return open(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600), "r+b", buffering=0)


def _write(file: BinaryIO, parts: list[Tensor], work: Callable[[int], None]) -> None:
    """Write parts at the current position; skip those on "meta", which are in the file already.

    work: called with the number of bytes after each write.
    """
    synced = file.tell()
    for part in parts:
        if part.is_meta:
            file.seek(part.nbytes, os.SEEK_CUR)
            continue
        left = part.numpy().data
        while left:
            # Up to the next huge page: some file systems keep a file in huge pages only if it is
            # written so.
            count = file.write(left[: HUGE - file.tell() % HUGE])
            left = left[count:]
            work(count)
        if file.tell() - synced > SYNC_BYTES:
            os.fsync(file)
            synced = file.tell()
    os.fsync(file)


def _link(file: BinaryIO, path: Path) -> None:
    """Give a complete file its name, replacing another file of that name atomically."""
    name = path.with_name(f"new-{secrets.token_hex(8)}")
    descriptor = file.fileno()
    # src_dir_fd is not used for an absolute path, but without it Python calls link(2), which does
    # not follow the symbolic link in /proc.
    os.link(f"/proc/self/fd/{descriptor}", name, src_dir_fd=descriptor, follow_symlinks=True)
    try:
        name.replace(path)
    finally:
        with suppress(FileNotFoundError):
            name.unlink()
