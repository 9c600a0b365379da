"""Connecting over Unix sockets, and the tensor-parallel gathers: ranks as threads, and as processes
that die.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moeserve.comm import shm
from moeserve.comm.shm import ShmTensor
from moeserve.errors import ConfigError, PeerLost
from moeserve.ops.native import native
from tests.comm.ranks import members_of, together
from tests.warm import Program

ROOT = Path(__file__).resolve().parents[2]
needs_native = pytest.mark.skipif(native() is None, reason="the native module was not built")


def descriptors() -> set[tuple[str, str]]:
    """This process's files by number. What earlier tests left may close at any time: compare what
    is new.
    """
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add((path.name, os.readlink(path)))
    return found


@contextmanager
def engine(
    size: int, folder: Path, *, channels: int = 1, deadline_s: float = 10.0
) -> Iterator[list[ShmTensor]]:
    tensors = [ShmTensor(rank, size, channels) for rank in range(size)]
    members = members_of(size, str(folder), tp_size=size, deadline_s=deadline_s)
    together([lambda t=t, m=m: t.join(m) for t, m in zip(tensors, members, strict=True)])
    try:
        yield tensors
    finally:
        for tensor in tensors:
            tensor.leave()


def part(rank: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(
        rows, columns, generator=torch.Generator().manual_seed(100 * rank + rows)
    ).to(dtype)


@needs_native
@pytest.mark.parametrize("part_bytes", [64, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_gathers_are_torch_cat(
    size: int, part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "GATHER_PART_BYTES", part_bytes)  # 64: several rounds
    cases = [(0, 3), (1, 1), (5, 3), (31, 8), (4, 0)]

    def run(tensor: ShmTensor) -> list[Tensor]:
        found = []
        for rows, columns in cases:
            for dtype in (torch.float32, torch.bfloat16):
                found.append(tensor.gather_columns(part(tensor.rank, rows, columns, dtype), 0))
                counts = [rows * r % 7 for r in range(size)]
                found.append(
                    tensor.gather_rows(
                        part(tensor.rank, counts[tensor.rank], columns, dtype), counts, 0
                    )
                )
        return found

    with engine(size, tmp_path) as tensors:
        outputs = together([lambda t=t: run(t) for t in tensors])
    want = []
    for rows, columns in cases:
        for dtype in (torch.float32, torch.bfloat16):
            want.append(torch.cat([part(r, rows, columns, dtype) for r in range(size)], 1))
            want.append(torch.cat([part(r, rows * r % 7, columns, dtype) for r in range(size)]))
    for output in outputs:
        assert all(torch.equal(a, b) for a, b in zip(output, want, strict=True))


@needs_native
def test_channels_do_not_mix_and_strides_do_not_matter(tmp_path: Path) -> None:
    def run(tensor: ShmTensor, channel: int) -> None:
        for n in range(50):
            x = torch.full((n % 5 + 1, 8), float(10 * channel + tensor.rank))[:, ::2]
            found = tensor.gather_columns(x, channel)
            assert torch.equal(
                found, torch.cat([torch.full_like(x, 10 * channel + r) for r in range(2)], 1)
            )

    with engine(2, tmp_path, channels=2) as tensors:
        together([lambda t=t, c=c: run(t, c) for t in tensors for c in range(2)])


def test_a_rank_warms_up_alone() -> None:
    tensor = ShmTensor(1, 3)
    x = torch.ones(2, 4)
    assert tensor.gather_columns(x, 0).shape == (2, 12)
    assert tensor.gather_rows(x, [5, 2, 1], 0).shape == (8, 4)


@needs_native
def test_a_row_larger_than_a_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "GATHER_PART_BYTES", 8)
    with (
        engine(2, tmp_path) as (tensor, _),
        pytest.raises(ValueError, match="row of 12 bytes is larger than the 8"),
    ):
        tensor.gather_columns(torch.ones(1, 3), 0)


@needs_native
def test_shapes_that_differ_are_told(tmp_path: Path) -> None:
    with (
        engine(2, tmp_path) as tensors,
        pytest.raises(PeerLost, match=r"did gather of .* rows x .* where rank"),
    ):
        together([lambda t=t: t.gather_columns(torch.ones(2 + t.rank, 3), 0) for t in tensors])


@needs_native
def test_missing_ranks_are_named(tmp_path: Path) -> None:
    members = members_of(4, str(tmp_path), tp_size=4, deadline_s=2.0)
    lost: dict[int, PeerLost] = {}

    def join(rank: int) -> None:
        with pytest.raises(PeerLost) as error:
            ShmTensor(rank, 4).join(members[rank])
        lost[rank] = error.value

    together([lambda r=r: join(r) for r in (0, 2)])
    assert lost[0].missing == lost[2].missing == (1, 3)
    assert "in 2 s: 1, 3" in str(lost[0])
    assert not list(tmp_path.iterdir())


def connected(path: Path) -> socket.socket:
    """Wait until the address has a listener, and connect."""
    for _ in range(1000):
        stranger = socket.socket(socket.AF_UNIX)
        try:
            stranger.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            stranger.close()
            time.sleep(0.005)
        else:
            return stranger
    raise AssertionError(f"nobody listens at {path}")


@needs_native
def test_strangers_do_not_get_in(tmp_path: Path) -> None:
    members = members_of(2, str(tmp_path), tp_size=2)
    tensors = [ShmTensor(rank, 2) for rank in range(2)]
    refused: list[PeerLost] = []

    def strange() -> None:
        for message in (b"", b"abc", b"\xff" * 40, os.urandom(500)):
            with connected(tmp_path / "tensor-0.sock") as stranger:
                stranger.sendall(message)
        for wrong in (replace(members[1], token="guessed"), replace(members[1], epoch=7)):
            with pytest.raises(PeerLost) as error:
                ShmTensor(1, 2).join(wrong)
            refused.append(error.value)
        tensors[1].join(members[1])

    together([lambda: tensors[0].join(members[0]), strange])
    assert [error.missing for error in refused] == [(0,), (0,)]
    assert "refused" in str(refused[0])
    found = together([lambda t=t: t.gather_columns(torch.full((1, 1), t.rank), 0) for t in tensors])
    assert found[0].tolist() == [[0, 1]]
    for tensor in tensors:
        tensor.leave()


@needs_native
@pytest.mark.parametrize("rank", [0, 1])
def test_leaving_ends_a_join(rank: int, tmp_path: Path) -> None:
    tensor = ShmTensor(rank, 2)
    has_ended = threading.Event()

    def leave() -> None:
        while not has_ended.wait(0.1):  # as a runner does, because the join may not have begun
            tensor.leave()

    threading.Thread(target=leave, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(PeerLost, match="left its group while"):
        tensor.join(members_of(2, str(tmp_path), tp_size=2)[rank])
    has_ended.set()
    assert time.monotonic() - started < 15


@needs_native
def test_leaving_wakes_waiters_and_frees_everything(tmp_path: Path) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:moeserve")

    gc.collect()
    before = descriptors(), mappings()
    with engine(3, tmp_path) as tensors:
        assert mappings() == before[1] + 9
        threading.Timer(0.05, tensors[2].leave).start()

        def wait(tensor: ShmTensor, message: str) -> None:
            with pytest.raises(PeerLost, match=message) as lost:
                tensor.gather_columns(torch.ones(1, 1), 0)
            assert lost.value.missing == ()

        together([lambda: wait(tensors[0], "rank 2 left"), lambda: wait(tensors[1], "rank 2 left")])
        tensors[0].leave()
        wait(tensors[0], "left its engine's group")
    gc.collect()
    assert descriptors() - before[0] == set()
    assert mappings() == before[1]
    assert not list(tmp_path.iterdir())


PEER = (
    "import sys; from tests.comm.shm_rank import main; main(sys.argv[1], int(sys.argv[2]),"
    " int(sys.argv[3]))"
)


def gather_for_ever(tensor: ShmTensor) -> None:
    while True:
        tensor.gather_columns(torch.ones(2, 3), 0)


@needs_native
@pytest.mark.parametrize(
    ("sent", "message", "deadline_s"),
    [(signal.SIGKILL, "gone", 30.0), (signal.SIGSTOP, "silent", 1.0)],
)
def test_a_process_that_dies_or_stops(
    sent: signal.Signals, message: str, deadline_s: float, tmp_path: Path
) -> None:
    peer = Program(PEER, str(tmp_path), "1", "2")
    tensor = ShmTensor(0, 2)
    try:
        tensor.join(replace(members_of(2, str(tmp_path), tp_size=2)[0], deadline_s=30))
        tensor._deadline_s = deadline_s
        began = time.monotonic()
        threading.Timer(0.2, os.kill, (peer.pid, sent)).start()
        with pytest.raises(PeerLost, match=f"rank 1 of this rank's group: {message}") as lost:
            gather_for_ever(tensor)
        assert time.monotonic() - began < 15
        assert lost.value.missing == (1,)
    finally:
        tensor.leave()
        peer.__exit__(None, None, None)


@needs_native
def test_the_other_end_of_a_process_hears_a_goodbye(tmp_path: Path) -> None:
    with Program(PEER, str(tmp_path), "1", "2") as peer:
        tensor = ShmTensor(0, 2)
        tensor.join(members_of(2, str(tmp_path), tp_size=2)[0])
        tensor.gather_columns(torch.ones(2, 3), 0)
        tensor.leave()
        assert peer.stdout.read().strip() == "rank 0 left the group"
        assert peer.wait(10) == 0


@needs_native
def test_memory_that_is_too_small_is_refused_and_nothing_stays_open() -> None:
    module = shm.native_module()
    before = descriptors()
    small = module.Region(4096)
    own = module.Region(8192)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(RuntimeError, match=r"has 4096 bytes .* expected 8192"):
        module.Channel(0, [0, 1], 0, [-1, ours.detach()], own, [-1, os.dup(small.fd)])
    del small, own
    assert descriptors() - before == set()


def test_without_native_code_the_message_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shm, "native", lambda: None)
    with pytest.raises(ConfigError, match="--all2all torch"):
        ShmTensor(0, 2).join(members_of(2, str(tmp_path), tp_size=2)[0])
