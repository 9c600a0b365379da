"""The disk cache of packed weights, i.e. weights in the layout that the native kernels read. A
later start maps a file instead of reading and packing again.

A file has the packed weights of one rank. Its name is a key derived from everything that decides
its bytes (`key_of`). It is a safetensors file with:

- the packed weights,
- the parameters that no kernel packs,
- checksums, in a tensor named like the key. Every start verifies every byte.

Any number of processes may write, map and delete files at once, or be killed: a file is written
without a name, readable by its user only, and gets its name when it is complete. Files are mapped
privately (copy on write), so an expert that a new placement moves to this rank does not change the
file. What is not guarded against: the owner writing into a mapped file (wrong weights) or
truncating it (SIGBUS), and another machine deleting it from a shared disk.

With `expert_memory`, experts stay in the file and are read from it while the model serves. A start
then holds at most one layer's experts in memory. The first start leaves HEADER_BYTES free for the
header and writes each layer as soon as it is packed; later starts verify layer by layer.

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
from contextlib import nullcontext, suppress
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
from moeserve.ops.native_layer import HUGE, LAYOUT, Allocate, allocate_new
from moeserve.version import __version__

log = logging.getLogger(__name__)
_native: Any = native()
_NAMES = {
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# Bytes between calls of fsync. One call at the end could take longer than a start may go without a
# heartbeat.
SYNC_BYTES = 1 << 30
# By default, models with fewer bytes are not cached: packing them takes hardly any time.
MIN_MODEL_BYTES = 256 << 20
DEFAULT_LIMIT_BYTES = 64 << 30  # of the directory
MIN_FREE_BYTES = 8 << 30  # bytes of the disk to leave free, or a tenth of a small disk
HEADER_BYTES = 1 << 20  # size of the header if it is written after the experts (`expert_memory`)


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


def folder_limit(folder: Path, limit_bytes: int | None) -> int:
    """Return how many bytes the directory may hold: by the setting packed_cache_bytes, by its
    default, and by free disk space. The directory need not exist.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk = shutil.disk_usage(existing)
    available_bytes = disk.free + sum(status.st_size for _, status in _files(folder))
    if limit_bytes is None:
        limit_bytes = min(DEFAULT_LIMIT_BYTES, available_bytes // 2)
    return min(limit_bytes, available_bytes - min(MIN_FREE_BYTES, disk.total // 10))


def key_of(
    identity: str, plan: LoadPlan, world: World, dtype: torch.dtype, formats: str | None
) -> str:
    """Return the key of a rank's packed weights, a hash of everything that decides their bytes.

    identity: the identity of the checkpoint's files (`ExpertFiles.identity`).
    formats: the settings and formats of quantized weights, as text.
    """
    parts = (
        identity,
        plan.params,
        plan.pieces,
        world.tp_rank,
        world.tp_size,
        dtype,
        formats,
        LAYOUT,
        __version__,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


class PackedCache:
    """One rank's file in the packed cache, while the model is loaded.

    If a valid file exists (`has_file`), `tensors` are mapped from it. Otherwise they are collected
    while the model is packed, and `finish` writes them. Start the threads of the native kernels
    before you create this object, because they compute the checksums.
    """

    def __init__(
        self,
        folder: str,
        key: str,
        report_progress: Callable[[], None] = lambda: None,
        *,
        limit_bytes: int | None = None,
        num_sharers: int = 1,
        num_bytes_on_disk: int = 0,
        allocate: Allocate = allocate_new,
    ) -> None:
        """Map a valid file if there is one.

        Args:
            folder: the directory of the cache.
            key: see `key_of`.
            report_progress: called regularly while bytes are read or written, as a heartbeat.
            limit_bytes: limit of the directory. By default, half of the bytes that it holds and the
                disk has free together, at most DEFAULT_LIMIT_BYTES.
            num_sharers: ranks that each write a file of this size into the directory.
            num_bytes_on_disk: with `expert_memory` about the bytes of all weights, otherwise 0.
            allocate: allocates memory for new packed weights.
        """
        self.path = Path(folder, f"{key}.packed")
        self._key = key
        # The name of the weight that is being packed. CachedParams sets it; `allocate` and
        # `write_experts` use it as the key of `tensors`.
        self.weight_being_packed = ""
        self._report_progress = report_progress
        self._limit_bytes = limit_bytes
        self._num_sharers = num_sharers
        self._num_bytes_on_disk = num_bytes_on_disk
        self._allocate_memory = allocate
        self.tensors: dict[str, Tensor] = {}
        # Checksums of the experts already written to the new file.
        self._written_checksums: dict[str, int] = {}
        # The file, open while it is written, and with `expert_memory`.
        self.file: BinaryIO | None = None
        self._mapped_at = 0  # address of the mapping
        self._staging: Tensor | None = None  # one layer's experts before they are written
        experts_on_disk = num_bytes_on_disk > 0
        try:
            if os.path.lexists(self.path):
                descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                with open(descriptor, "rb") as file:
                    self.tensors, self._mapped_at = _map_and_verify(
                        file, key, report_progress, drop_experts=experts_on_disk
                    )
                    self.file = os.fdopen(os.dup(file.fileno()), "rb") if experts_on_disk else None
                os.utime(self.path)
        except (OSError, CheckpointError) as error:
            # Without the remedy after the semicolon, which is for checkpoints.
            reason = str(error).partition(";")[0]
            log.warning(
                "packed weights in %s cannot be used and will be replaced: %s", self.path, reason
            )
        self.has_file = bool(self.tensors)
        names_in_memory = (
            name for name in self.tensors if not (experts_on_disk and is_expert(name))
        )
        self.mapped_bytes = sum(self.tensors[name].nbytes for name in names_in_memory)

    def allocate(self, num_bytes: int) -> tuple[Tensor, bool]:
        """Return memory for `weight_being_packed`, and whether it has the packed weight already.

        This method is an `Allocate` (ops/native_layer.py).
        """
        name = self.weight_being_packed
        assert self.has_file == (name in self.tensors), name
        if not self.has_file and self._num_bytes_on_disk and is_expert(name):
            if self._staging is None or self._staging.nbytes < num_bytes:
                self._staging = None  # free the old memory before allocating the new
                self._staging, _ = allocate_new(num_bytes)
            self.tensors[name] = self._staging[:num_bytes]
        elif not self.has_file:
            self.tensors[name], _ = self._allocate_memory(num_bytes)
        memory = self.tensors[name]
        assert memory.nbytes == num_bytes, (name, memory.nbytes, num_bytes)
        return memory, self.has_file

    def write_experts(self, memory: Tensor) -> int:
        """Write a layer's packed experts to the new file, and return their offset in it.

        If there was a valid file, it has the experts already, and only their offset is returned.
        memory: from `allocate`. It may be reused afterwards. Raises ConfigError if the experts
        cannot be written.
        """
        if self.has_file:
            return memory.data_ptr() - self._mapped_at
        name = self.weight_being_packed
        try:
            if self.file is None:
                self._free_disk_space(self._num_bytes_on_disk)
                self.file = _new_file(self.path.parent)
                self.file.seek(HEADER_BYTES)
            offset = self.file.tell()
            self._written_checksums[name] = _native.checksum(memory.data_ptr(), memory.nbytes)
            _write(self.file, [memory.view(-1)], lambda num_bytes: self._report_progress())
            os.posix_fadvise(self.file.fileno(), offset, memory.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"expert_memory keeps experts in {self.path.parent}, but they cannot be written: "
                f"{error}; free disk space (see docs/cpu.md), or set packed_cache to "
                "another directory"
            ) from None
        self.tensors[name] = memory.view(-1).to("meta")
        return offset

    def finish(
        self, make_throttle: Callable[[], Callable[[int], None]] | None = None
    ) -> threading.Thread | None:
        """Release the tensors, and write a new file. Only warns if it cannot be written.

        Checksums are computed before the file is written. So if a weight changes during the write,
        the next start finds the file invalid.

        make_throttle: if given, write in a background thread, which is returned, while the model
            serves. The thread calls `make_throttle` once, and the function that this returns after
            each write, with the number of bytes, to slow the writing down. If the process ends
            before the thread, there is no file. With `expert_memory`, the file is always written at
            once: little is left to write, and the experts written so far would be lost otherwise.
        """
        tensors = self.tensors
        self.tensors = {}
        self._staging = None
        if self.has_file:
            self.close()
            log.info("packed weights mapped from %s", self.path)
            return None
        parts = _contents(tensors, self._key, self._report_progress, self._written_checksums)
        if make_throttle is None or self._written_checksums:
            self._write_and_link(parts, lambda num_bytes: self._report_progress())
            return None
        thread = threading.Thread(
            target=lambda: self._write_and_link(parts, make_throttle()),
            name="packed cache",
            daemon=True,
        )
        thread.start()
        return thread

    def close(self) -> None:
        """Close the file if it is open. Readers of experts have their own descriptor."""
        if self.file:
            self.file.close()

    def _write_and_link(self, parts: list[Tensor], after_write: Callable[[int], None]) -> None:
        """Write the file and give it its name. Only warns if that fails."""
        try:
            if self.file is None:
                self._free_disk_space(sum(len(part) for part in parts))
                self.file = _new_file(self.path.parent)
            with self.file as file:
                file.seek(0)
                _write(file, parts, after_write)
                _link(file, self.path)
            log.info("packed weights written to %s", self.path)
        except OSError as error:
            log.warning(
                "packed weights cannot be cached: %s; free disk space, set packed_cache to another "
                'directory, or set it to "off"',
                error,
            )

    def _free_disk_space(self, num_bytes: int) -> None:
        """Delete the least recently used files until `num_bytes` fit.

        Raises OSError, and deletes nothing, if the files of all sharers cannot fit at all.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = [
            (status.st_mtime_ns, status.st_size, file) for file, status in _files(self.path.parent)
        ]
        held_bytes = sum(size for _, size, _ in files)
        limit_bytes = folder_limit(self.path.parent, self._limit_bytes)
        if num_bytes * self._num_sharers > limit_bytes:
            raise OSError(
                f"{self.path.parent} may hold {max(0, limit_bytes):,} bytes (by packed_cache_bytes "
                f"and free disk space), but {self._num_sharers} rank(s) of this model need "
                f"{num_bytes:,} each"
            )
        for _, size, file in sorted(files):
            if held_bytes + num_bytes <= limit_bytes:
                return
            file.unlink(missing_ok=True)  # processes that have mapped it keep the content
            held_bytes -= size
            log.info("deleted the least recently used packed weights: %s", file)


class CachedParams(Params):
    """Params that come from a packed cache.

    If the cache has a file, nothing is read from the checkpoint, and parameters that a kernel packs
    are on "meta".
    """

    def __init__(self, cache: PackedCache, *args: Any, **options: Any) -> None:
        if cache.has_file:
            options["device"] = "meta"
        super().__init__(*args, **options)
        self._cache = cache

    def __getitem__(self, name: str) -> Any:
        if is_packed(name):
            self._cache.weight_being_packed = name
        return super().__getitem__(name)

    def _read(self, param: Param) -> Any:
        cached = self._cache.tensors
        if param.on_disk:
            return super()._read(param)
        if param.name in cached and not is_packed(param.name):
            return cached[param.name]
        # Outside of a device's context, torch functions take less time.
        with self._device if self._cache.has_file else nullcontext():
            value: Any = super()._read(param)
        if not is_packed(param.name):
            cached[param.name] = value
        return value


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for file in folder.glob("*.packed"):
        with suppress(FileNotFoundError):  # deleted by another process
            yield file, file.stat(follow_symlinks=False)


def _map_and_verify(
    file: BinaryIO, key: str, report_progress: Callable[[], None], *, drop_experts: bool
) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of a file, and the address of its first byte.

    drop_experts: drop experts from memory after their verification.

    Raises CheckpointError or OSError.
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
    checksums = [_checksum(head, report_progress)]
    expected = parts.pop(key)
    for name, part in parts.items():
        checksums.append(_checksum(part, report_progress))
        if drop_experts and is_expert(name):
            begin = entries[name].offset // mmap.PAGESIZE * mmap.PAGESIZE
            end = entries[name].offset + len(part)
            mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
            os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
    if not torch.equal(expected, _bytes_of(checksums)):
        raise CheckpointError("its checksums do not match its content, so it is damaged")
    tensors = {
        name: part.view(_DTYPES[entries[name].dtype]).view(entries[name].shape)
        for name, part in parts.items()
    }
    return tensors, memory.data_ptr()


def _checksum(part: Tensor, report_progress: Callable[[], None]) -> int:
    checksum: int = _native.checksum(part.data_ptr(), len(part))
    report_progress()
    return checksum


def _bytes_of(checksums: list[int]) -> Tensor:
    return torch.tensor(checksums, dtype=torch.uint64).view(torch.uint8)


def _contents(
    tensors: dict[str, Tensor],
    key: str,
    report_progress: Callable[[], None],
    written_checksums: dict[str, int],
) -> list[Tensor]:
    """Return the parts of a new file in order, header first. The checksums are computed here.

    written_checksums: checksums of the tensors that are in the file already, and on "meta" here.
    """
    # Eight bytes for the header's checksum, and eight for each tensor's.
    checksums = torch.empty(8 + 8 * len(tensors), dtype=torch.uint8)
    end = 0
    header = {}
    parts: dict[str, Tensor] = {}
    # Order: tensors that are in the file already; packed ones, whose sizes keep the next ones
    # aligned to 64 bytes; the others, those with the largest elements first.
    order = sorted(
        {**tensors, key: checksums}.items(),
        key=lambda item: (
            item[0] not in written_checksums,
            not is_packed(item[0]),
            -item[1].itemsize,
        ),
    )
    for name, tensor in order:
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name]["data_offsets"] = end, end + tensor.nbytes
        end += tensor.nbytes
        parts[name] = tensor.view(-1).view(torch.uint8)
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % (HEADER_BYTES if written_checksums else 4096))
    assert not written_checksums or 8 + len(text) == HEADER_BYTES, len(text)
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    all_checksums = [_checksum(head, report_progress)]
    for name, part in parts.items():
        if name == key:
            continue
        if name in written_checksums:
            all_checksums.append(written_checksums[name])
        else:
            all_checksums.append(_checksum(part, report_progress))
    checksums.copy_(_bytes_of(all_checksums))
    return [head, *parts.values()]


def _new_file(folder: Path) -> BinaryIO:
    """Create a file without a name, which disappears if the process ends."""
    return open(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600), "r+b", buffering=0)


def _write(file: BinaryIO, parts: list[Tensor], after_write: Callable[[int], None]) -> None:
    """Write parts at the current position; skip those on "meta", which are in the file already.

    after_write: called with the number of bytes after each write.
    """
    synced_to = file.tell()
    for part in parts:
        if part.is_meta:
            file.seek(part.nbytes, os.SEEK_CUR)
            continue
        unwritten = part.numpy().data
        while unwritten:
            # Up to the next huge page: some file systems keep a file in huge pages only if each
            # write ends at such a page.
            count = file.write(unwritten[: HUGE - file.tell() % HUGE])
            unwritten = unwritten[count:]
            after_write(count)
        if file.tell() - synced_to > SYNC_BYTES:
            os.fsync(file)
            synced_to = file.tell()
    os.fsync(file)


def _link(file: BinaryIO, path: Path) -> None:
    """Give a complete file its name, replacing another file of that name atomically."""
    temporary = path.with_name(f"new-{secrets.token_hex(8)}")
    descriptor = file.fileno()
    # src_dir_fd is not used for an absolute path, but without it Python calls link(2), which does
    # not follow the symbolic link in /proc.
    os.link(f"/proc/self/fd/{descriptor}", temporary, src_dir_fd=descriptor, follow_symlinks=True)
    try:
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
