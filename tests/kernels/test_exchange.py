"""The kernels that move rows between ranks, interpreted over regions in one process; and compiled
for sm_90.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.kernels import exchange as module
from moeserve.kernels.align import align
from moeserve.kernels.exchange import (
    ABORT,
    CALLS,
    FAILED,
    RANK_STATES,
    barrier,
    collect,
    gather,
    publish,
)
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import (
    align_reference,
    collect_reference,
    gather_reference,
    publish_reference,
)

IDS_AT = 4096
PLACES_AT = 8192
X_AT = 16384
Y_AT = 65536
BYTES = 1 << 19
Clock = Callable[[], int]


@dataclass
class Ranks:
    """A region of each rank and what else it needs; parts as tensors."""

    size: int

    def __post_init__(self) -> None:
        self.regions = [
            torch.zeros(BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(self.size)
        ]
        self.bases = torch.tensor([region.data_ptr() for region in self.regions], device=DEVICE)
        self.states = [torch.tensor([6, 0], device=DEVICE) for _ in range(self.size)]
        self.control = torch.zeros(
            RANK_STATES + self.size, dtype=torch.int32, pin_memory=DEVICE.type == "cuda"
        )

    def part(
        self, rank: int, at: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int32
    ) -> Tensor:
        return self.regions[rank][at:].view(dtype)[: math.prod(shape)].view(shape)

    def flags(self, rank: int) -> Tensor:
        return self.part(rank, 0, (self.size,), torch.int64)

    def meet(self, rank: int, timeout_s: float = 1.0) -> None:
        barrier(self.bases, self.states[rank], rank, self.control, timeout_s, 5)


def ints(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has none: a second passes with every look."""
    if DEVICE.type == "cpu":
        ticks = itertools.count(0, 10**9)
        monkeypatch.setattr(module, "globaltimer", lambda: next(ticks))


def test_publish_example() -> None:
    ranks = Ranks(2)
    x = ints([1, 2, 3, 4])
    publish(ranks.bases, ranks.states[0], 0, x, ints([1, 2]), 2, 2, X_AT, IDS_AT, 3)
    assert ranks.part(0, IDS_AT, (2, 2, 2))[0].tolist() == [[1, 2], [-1, -1]]
    assert ranks.part(1, IDS_AT, (2, 2, 2))[0].tolist() == [[-1, 0], [-1, -1]]
    assert torch.equal(ranks.part(0, X_AT, (1, 4)), x)


def test_gather_example() -> None:
    ranks = Ranks(2)
    out = torch.full((4, 4), -7, dtype=torch.int32, device=DEVICE)
    for rank in range(2):
        ranks.part(rank, X_AT, (1, 4)).fill_(rank)
    order = ints([3, 0, -99, -99]).flatten()
    ends = ints([2]).flatten()
    gather(ranks.bases, ranks.states[0], order, ends, 1, 2, X_AT, PLACES_AT, out, 2)
    assert out[:, 0].tolist() == [1, 0, -7, -7]
    assert ranks.part(1, PLACES_AT, (2,)).tolist() == [0, 0]
    assert ranks.part(0, PLACES_AT, (2,)).tolist() == [1, 0]


def test_collect_example() -> None:
    ranks = Ranks(2)
    out = torch.empty(1, 1, device=DEVICE)
    ranks.part(0, Y_AT, (1, 1), torch.float32).fill_(4)
    ranks.part(1, Y_AT, (2, 1), torch.float32).copy_(torch.tensor([[5.0], [6.0]]))
    ranks.part(0, PLACES_AT, (2,)).copy_(ints([1, 0])[0])
    weights = torch.tensor([[0.5, 2.0]], device=DEVICE)
    for ids, expected in (([2, 0], 11), ([-1, 0], 8), ([2, 4], 3)):
        collect(ranks.bases, ranks.states[0], 0, weights, ints(ids), 2, PLACES_AT, Y_AT, out, 1)
        assert out.tolist() == [[expected]]


@pytest.mark.full("kernels", keep="each")
@pytest.mark.parametrize(
    ("tokens", "top_k", "words"), [((5, 0, 8), 2, 300), ((1, 1, 1), 1, 4), ((7, 8, 3), 3, 68)]
)
@pytest.mark.parametrize("programs", [1, 3])
def test_there_and_back(
    tokens: tuple[int, ...], top_k: int, words: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check all steps of all ranks against their references.

    Each program has several tiles and pieces.
    """
    monkeypatch.setattr(module, "TILE", 256)
    monkeypatch.setattr(module, "PAIRS", 8)
    monkeypatch.setattr(module, "SUMS", 128)
    random = np.random.default_rng(words)
    ranks = Ranks(3)
    most = 8
    experts = 2
    room = most * top_k
    ids = [
        torch.from_numpy(random.integers(-1, 7, (n, top_k)).astype(np.int32)).to(DEVICE)
        for n in tokens
    ]
    x = [
        torch.from_numpy(random.integers(-9, 9, (n, words)).astype(np.int32)).to(DEVICE)
        for n in tokens
    ]
    for r in range(3):
        publish(
            ranks.bases, ranks.states[r], r, x[r], ids[r], most, experts, X_AT, IDS_AT, programs
        )
    sent = [publish_reference(each, most, experts, 3) for each in ids]
    x_RMW = torch.stack([torch.nn.functional.pad(each, (0, 0, 0, most - len(each))) for each in x])
    places = []
    y_RPD = torch.full((3, 3 * room, words), math.nan, device=DEVICE)
    for r in range(3):
        inbox = ranks.part(r, IDS_AT, (3 * most, top_k))
        assert torch.equal(inbox, torch.cat([each[r] for each in sent]))
        found = align(inbox, experts, 16)
        wanted = align_reference(torch.where(inbox < experts, inbox, -1), experts, 16)
        out = torch.full((3 * room, words), -7, dtype=torch.int32, device=DEVICE)
        assert found.order_N is not None
        assert wanted.order_N is not None
        gather(
            ranks.bases,
            ranks.states[r],
            found.order_N,
            found.ends_e,
            most,
            top_k,
            X_AT,
            PLACES_AT,
            out,
            programs,
        )
        rows, places_RN = gather_reference(x_RMW, wanted.order_N, top_k)
        assert torch.equal(out[: len(rows)], rows)
        assert (out[len(rows) :] == -7).all()
        places.append(places_RN)
        y_RPD[r, : len(rows)] = torch.randn(
            len(rows), words, generator=torch.Generator().manual_seed(r)
        ).to(DEVICE)
        y_RPD[r, : len(rows), 0] = -0.0
        ranks.part(r, Y_AT, (3 * room, words), torch.float32).copy_(y_RPD[r])
    for r in range(3):
        mine = torch.stack([each[r] for each in places]).amax(0).view(most, top_k)[: tokens[r]]
        weights = torch.rand(tokens[r], top_k, generator=torch.Generator().manual_seed(r)).to(
            DEVICE
        )
        weights[ids[r] < 0] = math.nan
        out_TD = torch.full((tokens[r], words + 3), math.nan, device=DEVICE)
        collect(
            ranks.bases,
            ranks.states[r],
            r,
            weights,
            ids[r],
            experts,
            PLACES_AT,
            Y_AT,
            out_TD[:, :words],
            programs,
        )
        wanted_TD = collect_reference(y_RPD, mine, weights, ids[r], experts)
        assert torch.equal(
            out_TD[:, :words].contiguous().view(torch.int32), wanted_TD.view(torch.int32)
        )
        assert out_TD[:, words:].isnan().all()


def test_who_is_last_waits_for_nobody() -> None:
    """The example: one of the others has gone on to the next meeting already."""
    ranks = Ranks(3)
    ranks.flags(0).copy_(torch.tensor([6, 7, 8]) * CALLS + torch.tensor([9, 5, 9]))
    ranks.meet(0)
    assert ranks.states[0].tolist() == [7, 0]
    assert [ranks.flags(r)[0].item() for r in range(3)] == [7 * CALLS + 5] * 3
    assert not ranks.control.any()


@pytest.mark.parametrize("why", ["told", "deadline", "another call"])
def test_giving_up(why: str) -> None:
    """It names the ranks that were late or in another call.

    After that nothing is signaled or moved.
    """
    ranks = Ranks(3)
    strange = why == "another call"
    ranks.flags(1).copy_(
        torch.tensor([7, 6, 7 if strange else 6]) * CALLS + torch.tensor([5, 5, 6])
    )
    ranks.control[ABORT] = why == "told"
    ranks.meet(1, timeout_s=0.0 if why == "deadline" else 1e6)
    assert ranks.states[1].tolist() == [7, 1]
    assert ranks.control.tolist() == [why == "told", 1, 0, 0, 2 if strange else 1]
    assert (FAILED, RANK_STATES) == (1, 2)
    before = [region.clone() for region in ranks.regions]
    ranks.meet(1)
    row = torch.ones(1, 4, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(3, 4, device=DEVICE)
    publish(ranks.bases, ranks.states[1], 1, row, ints([0]), 1, 1, X_AT, IDS_AT, 1)
    order = ints([0, 1, 2]).flatten()
    ends = ints([3]).flatten()
    gather(
        ranks.bases, ranks.states[1], order, ends, 1, 1, X_AT, PLACES_AT, out.view(torch.int32), 1
    )
    collect(
        ranks.bases,
        ranks.states[1],
        1,
        row[:, :1].float(),
        ints([1]),
        1,
        PLACES_AT,
        Y_AT,
        out[:1],
        1,
    )
    assert ranks.states[1].tolist() == [7, 1]
    assert not out.any()
    assert all(map(torch.equal, before, ranks.regions))


@pytest.mark.full("aot")
def test_exchange_compiles_for_hopper() -> None:
    """Nothing is spilled, and rows move 16 bytes at a time although addresses come from a table.

    Flags are released to and acquired from the whole system, and the host's word is read anew each
    time.
    """
    regions = {"bases_ptr": "*i64", "state_ptr": "*i64"}
    ids = {"ids_ptr": "*i32", "rank": "i32", "tokens": "i32", "num_local": "i32"}
    sizes = dict.fromkeys(("most_tokens", "top_k", "num_local", "x_offset", "words"), "i32")
    waits = {
        **regions,
        "control_ptr": "*i32",
        "rank": "i32",
        "num_ranks": "i32",
        "call": "i32",
        "timeout_ns": "i64",
    }
    sends = {**regions, **ids, **sizes, "x_ptr": "*i32", "num_ranks": "i32", "ids_offset": "i32"}
    pulls = {
        **regions,
        **sizes,
        "order_ptr": "*i32",
        "ends_ptr": "*i32",
        "out_ptr": "*i32",
        "places_offset": "i32",
    }
    sums = {
        **regions, **ids, "weights_ptr": "*fp32", "out_ptr": "*bf16",
        **dict.fromkeys(("known", "places_offset", "y_offset", "out_stride", "width"), "i32"),
    }  # fmt: skip
    at = ("x_offset", "ids_offset", "places_offset", "y_offset", "words", "out_stride", "width")
    rows = {"ROWS": 4, "BLOCK": 2048}
    met, *moved = compile_all(
        [
            Case(
                "exchange:meet_kernel",
                waits,
                {"RANKS": 32, "CALLS": 1024, "POLLS": 64},
                num_warps=1,
            ),
            Case("exchange:publish_kernel", sends, {"PAIRS": 1024, **rows}, at, num_warps=16),
            Case("exchange:gather_kernel", pulls, rows, at, num_warps=16),
            Case("exchange:collect_kernel", sums, {"K": 8, "ROWS": 1, "BLOCK": 1024}, at),
            Case("exchange:collect_kernel", sums, {"K": 22, "ROWS": 1, "BLOCK": 1024}, at),
        ]
    )
    atomics = [access for access in met.accesses if access.startswith("atom")]
    assert atomics == ["atom.global.sys.acquire.add.u64", "atom.global.sys.release.exch.b64"]
    assert "ld.volatile.global.b32" in met.accesses
    for report in (met, *moved):
        assert report.stack_bytes == 0
        assert report.registers <= 128
    for report in moved:
        assert {"ld.global.v4.b32", "st.global.v4.b32"} <= set(report.accesses)
