"""Penalties and logprobs: interpreted against the runner's, and compiled for sm_90."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moeserve.kernels.logprobs import logprobs
from moeserve.kernels.penalties import PenaltyRows, new_counts, penalise
from moeserve.runner.sampling.logprobs import logprob_rows
from moeserve.runner.sampling.reference import apply_penalties
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import logprobs_reference

INF = float("inf")


def penalty_rows(known: list[int], **columns: list[float]) -> PenaltyRows:
    def of(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor(columns[name], dtype=dtype, device=DEVICE)

    return PenaltyRows(
        of("row", torch.int32),
        of("slot", torch.int32),
        torch.tensor(known, dtype=torch.int32, device=DEVICE),
        of("num_prompt", torch.int32),
        *(of(name, torch.float32) for name in ("repetition", "frequency", "presence")),
    )


def test_penalty_example() -> None:
    logits = torch.tensor([[4.0, 4.0, -4.0, 4.0]], device=DEVICE)
    table = torch.tensor([[9, 9, 9, 9, 9], [0, 2, 1, 1, 3]], dtype=torch.int32, device=DEVICE)
    rows = penalty_rows(
        [4], row=[0], slot=[1], num_prompt=[2], repetition=[2.0], frequency=[0.5], presence=[0.25]
    )
    penalise(logits, table, rows, 4, new_counts(1, 4, DEVICE))
    assert logits.tolist() == [[2.0, 0.75, -8.0, 4.0]]


@pytest.mark.parametrize("work_rows", [2, 8])
def test_penalties_are_the_runners(work_rows: int) -> None:
    rng = np.random.default_rng(work_rows)
    vocab = 300
    slots = 6
    width = 2300
    table = torch.from_numpy(rng.integers(0, vocab, (slots, width)).astype(np.int32)).to(DEVICE)
    table[:, 1000:1900] = 7  # said again and again, by several programs
    logits = torch.full((8, vocab + 4), torch.nan, device=DEVICE)[:, :vocab]
    logits.copy_(torch.randn(8, vocab, generator=torch.Generator().manual_seed(work_rows)) * 9)
    logits[:, 5] = -INF
    known = [2300, 1, 40, 1500, 0]
    num_prompt = [100, 1, 0, 1100, 0]
    row = [6, 0, 3, 7, 1]
    slot = [5, 2, 0, 4, 1]
    strengths = {name: rng.uniform(-0.9, 1.9, 5).tolist() for name in ("frequency", "presence")}
    strengths["repetition"] = rng.uniform(0.5, 1.9, 5).tolist()
    rows = penalty_rows(known, row=row, slot=slot, num_prompt=num_prompt, **strengths)
    expected = logits.clone()
    counts = new_counts(work_rows, vocab, DEVICE)
    changed = expected[row[:4]]  # the definition knows no empty history
    numbers = [torch.tensor(x[:4], device=DEVICE) for x in (known, num_prompt)]
    floats = [
        torch.tensor(strengths[name][:4], device=DEVICE)
        for name in ("repetition", "frequency", "presence")
    ]
    apply_penalties(changed, table[slot[:4]].long(), *numbers, *floats)
    expected[row[:4]] = changed
    penalise(logits, table, rows, 2300, counts)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-5)
    assert not counts.any()


def test_logprobs_example() -> None:
    logits = torch.tensor([[0, 0.6931472, 0.6931472, 0]], device=DEVICE)
    ids, values, rank = logprobs(logits, torch.tensor([3], device=DEVICE), 2)
    assert (ids.tolist(), rank.tolist()) == ([[3, 1, 2]], [4])
    torch.testing.assert_close(
        values.cpu(), torch.tensor([[-1.7918, -1.0986, -1.0986]]), atol=1e-4, rtol=0
    )


@pytest.mark.full("kernels", keep="each")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "n"), [(1, 1), (3, 5), (130, 2), (2048, 0), (5003, 20), (300, 40)]
)
def test_logprobs_are_the_runners(vocab: int, n: int, dtype: torch.dtype) -> None:
    count = 6
    generator = torch.Generator().manual_seed(vocab)
    wide = torch.full((count, vocab + 3), torch.nan)
    wide[:, :vocab] = torch.randn(count, vocab, generator=generator) * 4
    wide[1::2] = wide[1::2].round()  # ties
    wide[2, 1:vocab] = -INF
    wide[3, :vocab] = -1e30
    logits = wide.to(DEVICE, dtype)[:, :vocab]
    chosen = torch.randint(0, vocab, (count,), generator=generator).to(DEVICE)
    chosen[2] = 0
    ids, values, rank = logprobs(logits, chosen.int(), n)
    by_runner = logprob_rows(logits, chosen, n)
    by_definition = logprobs_reference(logits, chosen, n)
    for expected in ((by_runner.ids_PN, by_runner.values_PN, by_runner.rank_P), by_definition):
        assert ids.tolist() == expected[0].tolist()
        assert rank.tolist() == expected[2].tolist()
        torch.testing.assert_close(values, expected[1], rtol=1e-5, atol=1e-5)


def test_logprobs_of_no_rows() -> None:
    shapes = [
        x.shape
        for x in logprobs(torch.zeros(0, 9, device=DEVICE), torch.zeros(0, device=DEVICE).int(), 3)
    ]
    assert shapes == [(0, 4), (0, 4), (0,)]


@pytest.mark.full("aot")
def test_compiles_for_hopper() -> None:
    def signature(floats: str, integers: str, numbers: str, **more: str) -> dict[str, str]:
        pointers = {f"{name}_ptr": "*fp32" for name in floats.split()} | {
            f"{n}_ptr": "*i32" for n in integers.split()
        }
        return pointers | dict.fromkeys(numbers.split(), "i32") | more

    even = ("stride", "width", "table_stride")
    parts = "stride width num_tiles num_parts"
    tiles = signature("logits tile_peaks peaks sums", "chosen ranks", parts)
    rows = signature(
        "logits tile_peaks peaks sums values",
        "chosen ranks",
        parts + " n",
        ids_ptr="*i64",
        rank_ptr="*i64",
    )
    count = signature("", "table slot known num_prompt counts", "first table_stride width")
    penalty = signature(
        "logits repetition frequency presence",
        "table row slot known counts",
        "first stride table_stride width",
    )
    blocks = {"TILE": 128, "TILE_BLOCK": 2048, "PART_BLOCK": 128, "PLACES": 32}
    cases = [
        Case("logprobs:tiles_kernel", tiles, {"TILE": 128, "TILES": 16}, even, num_warps=8),
        Case("logprobs:rows_kernel", rows, blocks, even, num_warps=8),
        Case("penalties:count_kernel", count, {"BLOCK": 1024}, even),
        Case("penalties:penalty_kernel", penalty, {"BLOCK": 1024}, even),
    ]
    reports = compile_all(cases)
    assert [report.stack_bytes for report in reports] == [0] * len(cases)
    assert max(report.registers for report in reports) <= 128
