"""Packed weights on disk: what comes back is what was packed, and of a file that is not whole
nothing comes back.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from moeserve.comm.world import World
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.experts import ExpertFiles
from moeserve.loader.packed_cache import CachedParams, PackedCache, folder_of, key_of
from moeserve.loader.weights import Params, Reader
from moeserve.models.build import build_decoder
from moeserve.models.hf_config import read_model_spec
from moeserve.models.load_plan import expert_load_plan, load_plan
from moeserve.moe.all2all.torch_a2a import TorchAll2All
from moeserve.ops.native import native
from moeserve.ops.native_layer import Allocate, allocate_new
from moeserve.ops.pick import pick_ops
from tests.comm.board import Board, BoardTensor
from tests.moe.contract.backends import facts_of
from tests.quantized_checkpoints import FORMS, write_quantized

module: Any = native()
pytestmark = pytest.mark.skipif(
    module is None or not module.supported_isas(), reason="needs the native kernels"
)
ONE = World()
KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None: ...


def start(
    folder: Path, key: str = KEY, seed: int = 0, alive: Callable[[], None] = lambda: None
) -> tuple[PackedCache, dict[str, Tensor]]:
    """A start of a model with two products and parameters of odd sizes; what it has, in the order
    of its build.
    """
    make = torch.Generator().manual_seed(seed)
    cache = PackedCache(str(folder), key, alive)
    have = {}
    sizes = {
        "layers.0.qkv": 4096,
        "norm": 7,
        "layers.0.w2": 64 * 50,
        "empty_bias": 0,
        "decay": 3,
        "embed": 33,
    }
    for name, size in sizes.items():
        values = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=make)
        if "layers" not in name:
            dtype = torch.float32 if name == "decay" else torch.bfloat16
            have[name] = cache.tensors.setdefault(name, values.repeat(3, 1).to(dtype))
            continue
        cache.weight_being_packed = name
        have[name], is_there = cache.allocate(size)
        assert is_there == cache.has_file
        if not is_there:
            have[name].copy_(values)
    return cache, have


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one file."""
    start(tmp_path)[0].finish()
    return tmp_path


def file_in(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(ours.values(), theirs.values(), strict=True)
    )


def test_the_next_start_finds_what_the_first_one_had(tmp_path: Path) -> None:
    first, made = start(tmp_path / "a" / "new folder")
    assert not first.has_file
    assert first.mapped_bytes == 0
    first.finish()
    file = file_in(tmp_path / "a" / "new folder")
    assert file.stat().st_mode & 0o777 == 0o600
    second, found = start(tmp_path / "a" / "new folder")
    assert second.has_file
    assert second.mapped_bytes == sum(tensor.nbytes for tensor in made.values())
    assert same(found, made)
    assert all(found[name].data_ptr() % 64 == 0 for name in found if "layers" in name)
    written = file.stat().st_ino
    second.finish()
    assert file.stat().st_ino == written


def test_it_is_a_file_that_others_can_read(folder: Path) -> None:
    from safetensors import safe_open

    _, have = start(folder)
    with safe_open(file_in(folder), "pt") as file:
        assert set(file.keys()) == {*have, KEY}
        assert all(torch.equal(file.get_tensor(name), have[name]) for name in have)


def test_what_is_written_to_the_mapping_stays_in_the_process(folder: Path) -> None:
    before = file_in(folder).read_bytes()
    _, have = start(folder)
    have["layers.0.w2"].fill_(1)
    assert file_in(folder).read_bytes() == before
    assert start(folder)[1]["layers.0.w2"].ne(1).any()


def test_a_mapping_outlives_the_files_name(folder: Path) -> None:
    _, have = start(folder)
    kept = {name: tensor.clone() for name, tensor in have.items()}
    file_in(folder).unlink()
    again, _ = start(folder, seed=1)
    assert not again.has_file
    again.finish()
    assert same(have, kept)
    assert not same(start(folder)[1], kept)


def damages(size: int, first: int) -> Iterator[tuple[str, Callable[[bytearray], bytes]]]:
    """first: where the tensors begin."""
    for length in (
        0,
        1,
        7,
        8,
        9,
        first // 2,
        first - 1,
        first,
        first + 1,
        size // 2,
        size - 9,
        size - 8,
        size - 1,
    ):
        yield f"cut to {length} bytes", lambda data, length=length: bytes(data[:length])
    yield "longer", lambda data: bytes(data) + b"\0"
    yield "foreign", lambda data: b"GGUF" + bytes(data[4:])
    yield "zeros", lambda data: bytes(len(data))
    yield (
        "two bytes swapped",
        lambda data: bytes(data[:-10] + data[-9:-8] + data[-10:-9] + data[-8:]),
    )
    for bit in [*range(72), *range(0, size * 8, 997)]:
        yield f"bit {bit} flipped", lambda data, bit=bit: flipped(data, bit)


def flipped(data: bytearray, bit: int) -> bytes:
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def test_a_damaged_file_is_named_once_and_replaced(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, (_, expected) = file_in(folder), start(folder)
    whole = file.read_bytes()
    for what, change in damages(len(whole), 8 + int.from_bytes(whole[:8], "little")):
        damaged = change(bytearray(whole))
        if damaged == whole:
            continue
        file.unlink()
        file.write_bytes(damaged)
        caplog.clear()
        cache, have = start(folder)
        assert not cache.has_file, what
        assert same(have, expected)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "cannot be used and will be replaced" in record.getMessage()
        assert file.name in record.getMessage()
        cache.finish()
        assert file_in(folder).read_bytes() == whole


def test_a_file_of_another_key_is_not_taken(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not start(folder, "other")[0].has_file
    assert not caplog.records
    file_in(folder).rename(folder / "other.packed")
    assert not start(folder, "other")[0].has_file
    assert "not have the weights that its name stands for" in caplog.text


@pytest.mark.parametrize(
    "what", ["folder in its place", "folder is a file", "no such place", "a dead link"]
)
def test_where_nothing_can_be_kept_the_start_goes_on(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path
    if what == "folder in its place":
        (tmp_path / f"{KEY}.packed" / "full").mkdir(parents=True)
    elif what == "folder is a file":
        folder = tmp_path / "file"
        folder.touch()
    elif what == "no such place":
        folder = Path("/proc/here")
    else:
        folder = tmp_path / "link"
        folder.symlink_to("nowhere/at/all")
    cache, have = start(folder)
    assert not cache.has_file
    cache.finish()
    assert same(have, start(tmp_path / "other")[1])
    assert "packed weights cannot be cached: " in caplog.text
    assert not list(tmp_path.rglob("new-*"))


@pytest.mark.parametrize("mode", [0o602, 0o620, 0o666])
def test_a_file_that_others_can_write_is_not_used(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, made = start(tmp_path)
    first.finish()
    file_in(tmp_path).chmod(mode)
    second, found = start(tmp_path)
    assert not second.has_file
    assert same(found, made)
    assert "only this user" in caplog.text
    second.finish()
    assert start(tmp_path)[0].has_file


def test_a_pipe_in_its_place_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / f"{KEY}.packed", 0o600)
    cache, _ = start(tmp_path)
    assert "only this user" in caplog.text
    cache.finish()
    assert start(tmp_path)[0].has_file


def test_a_file_has_no_name_until_it_is_whole(tmp_path: Path) -> None:
    """So a process that is killed while writing leaves nothing."""
    seen: list[list[Path]] = []
    cache, _ = start(tmp_path, alive=lambda: seen.append(list(tmp_path.iterdir())))
    cache.finish()
    assert len(seen) > 2
    assert not any(seen)


def test_written_behind_a_start_as_it_was_then(tmp_path: Path) -> None:
    """An expert that moves meanwhile is not stored as the checkpoint's."""
    gate = threading.Event()
    sizes = []

    def pace() -> Callable[[int], None]:
        gate.wait()
        return sizes.append

    for changed in (True, False):
        gate.clear()
        cache, have = start(tmp_path)
        thread = cache.finish(pace)
        assert thread is not None
        assert not list(tmp_path.iterdir())
        if changed:
            have["layers.0.w2"].add_(1)
        gate.set()
        thread.join()
        assert start(tmp_path)[0].has_file is not changed
        assert sum(sizes) == file_in(tmp_path).stat().st_size
        file_in(tmp_path).unlink()
        sizes.clear()


def test_the_least_recently_used_file_makes_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").write_bytes(bytes(400_000))

    def names() -> set[str]:
        return {file.name[0] for file in tmp_path.glob("*.packed")}

    def one(key: str, limit_bytes: int, sharers: int = 1) -> None:
        for i, old in enumerate(
            sorted(tmp_path.glob("*.packed"), key=lambda file: file.stat().st_mtime_ns)
        ):
            os.utime(old, ns=(0, i))  # in their order, all long ago
        cache = PackedCache(str(tmp_path), key, limit_bytes=limit_bytes, num_sharers=sharers)
        if not cache.has_file:
            cache.tensors = {"norm": torch.zeros(100_000, dtype=torch.uint8)}
        cache.finish()

    one("0", 200_000)
    (size,) = (file.stat().st_size for file in tmp_path.glob("*.packed"))
    one("1", 3 * size)
    one("2", 3 * size)
    assert names() == {"0", "1", "2"}
    one("0", 3 * size)  # mapped
    one("3", 3 * size)
    assert names() == {"0", "2", "3"}
    one("4", 3 * size, sharers=2)
    one("5", size // 2)
    assert "packed weights cannot be cached" in caplog.text
    assert names() == {"0", "3", "4"}


def test_some_of_the_disk_stays_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for free, kept in ((99_999, False), (200_000, True)):
        disk = shutil._ntuple_diskusage(1_000_000, 1_000_000 - free, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, disk=disk: disk)
        start(tmp_path)[0].finish()
        assert bool(list(tmp_path.iterdir())) == kept
        assert ("may hold 0 bytes" in caplog.text) != kept
        caplog.clear()


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/else/where")
    assert folder_of(None) == "/else/where/moeserve/packed"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert folder_of(None) == "/home/me/.cache/moeserve/packed"
    assert folder_of("~/packed") == "/home/me/packed"


@pytest.mark.parametrize("asked", [None, "~/packed"])
def test_without_a_home_nothing_is_cached(
    asked: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder named ~ in the working directory would fill with weights."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", Mock(side_effect=RuntimeError("no home")))
    assert folder_of(asked) is None
    assert f"{asked or '~/.cache/moeserve/packed'} needs a home directory" in caplog.text
    assert "set HOME" in caplog.text


def test_home_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cache, _ = start(Path(folder_of("~/packed") or ""))
    cache.finish()
    assert file_in(tmp_path / "packed").exists()


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, _ = start(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        cache.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "packed weights cannot be cached: " in caplog.text
    assert not list(tmp_path.iterdir())


def test_many_may_write_at_once_and_map_meanwhile(tmp_path: Path) -> None:
    _, expected = start(tmp_path)
    wrong: list[str] = []

    def live() -> None:
        for _ in range(20):
            cache, have = start(tmp_path)
            if not same(have, expected):
                wrong.append("other values")
            cache.has_file = False  # writes again
            cache.finish()

    threads = [threading.Thread(target=live) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert start(tmp_path)[0].has_file
    assert len(list(tmp_path.iterdir())) == 1


def built(
    path: Path, folder: Path | None, dtype: torch.dtype, world: World, asked: Any = None
) -> tuple[list[Tensor], bool]:
    """Return the packed products of one rank, in order, and whether they were found.

    With folder None there is no cache.
    """
    spec = read_model_spec(path)
    checkpoint = open_checkpoint(path, spec.stored)
    plan = load_plan(spec, checkpoint.names, world)
    files = ExpertFiles(
        checkpoint,
        lambda layer, expert: expert_load_plan(spec, checkpoint.names, layer, [expert]),
        dtype,
    )
    ops = pick_ops("cpu", dtype, "native")
    allocate = allocate_new
    cache = None
    make = Params
    if folder:
        cache = PackedCache(str(folder), key_of(files.identity(), plan, world, dtype, asked))
        allocate = cache.allocate
        make = partial(CachedParams, cache)
    packed: list[Tensor] = []

    def recording(num_bytes: int, allocate: Allocate = allocate) -> tuple[Tensor, bool]:
        memory, is_there = allocate(num_bytes)
        packed.append(memory)
        return memory, is_there

    tp = BoardTensor(world.tp_rank, Board(world.tp_size))
    shape = {"hidden_size": spec.hidden_size, "top_k": spec.experts_per_token, "max_tokens": 16}
    backends = [TorchAll2All(facts_of(dtype, world.num_expert_ranks, **shape))]
    with make(checkpoint, plan, dtype, quantize_to=asked) as params, torch.inference_mode():
        build_decoder(
            spec, params, ops.packing_into(recording), world=world, tp=tp, backends=backends
        )
    files.close()
    if cache:
        cache.finish()
    return packed, bool(cache and cache.has_file)


def check(
    path: Path, folder: Path, dtype: torch.dtype, size: int, tp: int, asked: Any = None
) -> None:
    for rank in range(size):
        world = World(rank, size, tp)
        expected, _ = built(path, None, dtype, world, asked)
        for attempt in range(2):
            ours, found = built(path, folder, dtype, world, asked)
            assert found == (attempt == 1)
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert len(list(folder.iterdir())) == size


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse(self: Reader, *args: Any) -> int:
        raise AssertionError("a weight was read")

    return lambda: monkeypatch.setattr(Reader, "read", refuse)


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "granite_moe", "llama"])
def test_each_rank_finds_its_share(
    name: str, dtype: torch.dtype, make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint(name, intermediate_size=90, vocab_size=301).path
    check(path, tmp_path / "tp", dtype, 4, 4)
    check(
        path, tmp_path / "dp", dtype, 1 if name == "llama" else 2, 1
    )  # two ranks with the same share a file


@pytest.mark.parametrize(("name", "asked"), [("qwen2_moe", "int8"), ("qwen3_moe", "int4")])
def test_weights_that_are_quantized_on_load(
    name: str, asked: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    check(make_checkpoint(name).path, tmp_path / "cache", torch.bfloat16, 4, 2, asked)


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_are_stored_quantized(form: str, make_checkpoint: Any, tmp_path: Path) -> None:
    path, _ = write_quantized(make_checkpoint("qwen3_moe").path, tmp_path, FORMS[form])
    check(path, tmp_path / "cache", torch.bfloat16, 2, 2)


def test_nothing_is_read_when_all_is_there(
    make_checkpoint: Any, tmp_path: Path, no_reads: Callable[[], None]
) -> None:
    path = make_checkpoint("granite_moe", tie_word_embeddings=True).path
    built(path, tmp_path, torch.bfloat16, World())
    no_reads()
    assert built(path, tmp_path, torch.bfloat16, World())[1]


@pytest.mark.parametrize("name", ["minimax_m2", "glm4_moe_lite", "qwen3_next", "lfm2_moe"])
def test_a_start_that_maps_needs_no_symbolic_shapes(
    name: str, make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To import them takes a second, as sympy comes with them. Some torch functions on "meta" do.

    These families reorder weights before they are packed.
    """
    path = make_checkpoint(name).path
    built(path, tmp_path, torch.bfloat16, World())
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    assert built(path, tmp_path, torch.bfloat16, World())[1]


def test_whatever_decides_the_bytes_is_in_the_key(make_checkpoint: Any, tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe").path
    path = tmp_path / "model"
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    spec = read_model_spec(path)

    def key(
        world: World = ONE, dtype: torch.dtype = torch.bfloat16, asked: str | None = None
    ) -> str:
        checkpoint = open_checkpoint(path, spec.stored)
        plan = load_plan(spec, checkpoint.names, world)
        files = ExpertFiles(checkpoint, lambda layer, expert: plan, dtype)
        files.close()
        return key_of(files.identity(), plan, world, dtype, asked)

    keys = [key(), key(dtype=torch.float16), key(asked="int8"), key(asked="int4")]
    keys += [key(World(rank, 4, tp)) for tp in (1, 2, 4) for rank in range(4)]
    assert key() == keys[0]
    weights = path / "model.safetensors"
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    keys.append(key())
    with weights.open("r+b") as file:  # another training with the same time
        file.seek(-(status.st_size // 2), os.SEEK_END)
        file.write(b"\1" * (status.st_size // 2))
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    keys.append(key())
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace("1e-06", "1e-05"))
    keys.append(key())
    plan = load_plan(spec, open_checkpoint(path, spec.stored).names)
    keys += [
        key_of("", plan, World(rank, tp, tp), torch.half, None) for tp in (3, 5) for rank in (0, 2)
    ]
    assert len(set(keys)) == len(keys)
