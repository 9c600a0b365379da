"""Sampling: interpreted against the runner's definitions, and compiled for sm_90."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels import cut as cut_file
from moeserve.kernels import sampling as sampling_file
from moeserve.kernels.cut import cut
from moeserve.kernels.sampling import EARLIEST, HOPELESS, LATEST, SamplingTensors, log_time, sample
from moeserve.runner.sampling.noise import Gumbel, padded
from moeserve.runner.sampling.reference import keep_min_p, keep_top_k, keep_top_p, top_p_cutoff
from moeserve.runner.sampling.rows import row_keys
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tools.gpu.references import cut_reference

FINE, NOT_FINITE, NOTHING_ALLOWED = range(3)
INF = float("inf")


@triton.jit
def log_time_kernel(out_ptr, low_ptr, high_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    low = tl.load(low_ptr + row).to(tl.uint32, bitcast=True)
    high = tl.load(high_ptr + row).to(tl.uint32, bitcast=True)
    ids = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * BLOCK + ids, log_time(ids, low, high))


def keys(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    words = torch.from_numpy(
        row_keys(rng.integers(0, 2**64, count, np.uint64), rng.integers(0, 9999, count))
    )
    return words[0].clone().to(DEVICE), words[1].clone().to(DEVICE)


def test_noise_is_the_runners() -> None:
    low, high = keys(9)
    out = torch.full((9, 4096), torch.nan, device=DEVICE)
    log_time_kernel[(9,)](out, low, high, BLOCK=4096)
    expected = -Gumbel(4096, torch.device("cpu"))(low.cpu(), high.cpu())
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert EARLIEST < out.min() < out.max() < LATEST


def sampling_rows(count: int, vocab: int, seed: int = 0, **given: list[float]) -> SamplingTensors:
    """Rows of every kind, in every mixture, but for what is given."""
    rng = np.random.default_rng(seed)

    def column(
        name: str, otherwise: float, values: np.ndarray, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        mixed = np.where(rng.random(count) < 0.5, values, otherwise)
        return torch.tensor(given.get(name, mixed.tolist()), dtype=dtype).to(DEVICE)

    low, high = keys(count, seed)
    return SamplingTensors(
        column("temperature", 1.0, rng.choice([0.0, 0.3, 1.7], count)),
        column("log_min_p", -INF, np.log(rng.uniform(1e-4, 0.3, count))),
        column("top_k", vocab, rng.choice([1, 2, 7, 20, max(1, vocab - 1)], count), torch.int32),
        column("top_p", 1.0, rng.choice([0.05, 0.5, 0.9, 0.9999], count)),
        low,
        high,
    )


def random_logits(count: int, vocab: int, seed: int = 0) -> Tensor:
    """Peaked and flat rows, rows full of ties, and some impossible tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocab, generator=generator) * (
        1 + torch.arange(count) % 5
    ).unsqueeze(1)
    logits[::3] = (logits[::3] * 2).round() / 2
    logits[torch.rand(count, vocab, generator=generator) < 0.05] = -INF
    return logits.to(DEVICE)


def drawn_by_definition(logits: Tensor, rows: SamplingTensors) -> tuple[Tensor, Tensor]:
    """(what may be drawn, tokens) as the runner defines them."""
    vocab = logits.shape[1]
    x = torch.nn.functional.pad(logits.cpu(), (0, padded(vocab) - vocab), value=-INF)
    temperature, log_min_p, top_k, top_p, low, high = (
        getattr(rows, field.name).cpu() for field in dataclasses.fields(rows)
    )
    greedy = x.max(dim=1).indices
    x = (x - x.amax(dim=1, keepdim=True)) / temperature.where(temperature > 0, 1.0).unsqueeze(1)
    keep_min_p(x, log_min_p)
    keep_top_k(x, top_k.long(), vocab)
    keep_top_p(x, top_p, top_p_cutoff)
    tokens = (x + Gumbel(vocab, torch.device("cpu"))(low, high)).argmax(dim=1)
    return x[:, :vocab], torch.where(temperature > 0, tokens, greedy)


def test_example() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, -INF, -INF]], device=DEVICE)
    tokens, status = sample(logits, sampling_rows(2, 3, temperature=[0, 0]))
    assert (tokens.tolist(), status.tolist()) == ([1, 0], [0, 0])


@pytest.mark.parametrize("vocab", [1, 70, 4999])
def test_tokens_are_the_runners(vocab: int) -> None:
    count = 10
    rows = sampling_rows(count, vocab, vocab)
    logits = random_logits(count, vocab, vocab)
    logits[:, 0] = 0.0
    wide = torch.full((count, vocab + 5), torch.nan, device=DEVICE)
    tokens, status = sample(wide[:, :vocab].copy_(logits), rows)
    assert tokens.dtype is torch.int32
    assert status.tolist() == [FINE] * count
    assert tokens.tolist() == drawn_by_definition(logits, rows)[1].tolist()


def test_a_row_draws_the_same_alone_and_whatever_the_flags_allow() -> None:
    count = 5
    vocab = 2500
    logits = random_logits(count, vocab)
    rows = sampling_rows(count, vocab)
    tokens = sample(logits, rows)[0].tolist()
    for i in range(count):
        one = SamplingTensors(
            *(getattr(rows, field.name)[i : i + 1] for field in dataclasses.fields(rows))
        )
        draws = bool(one.temperature_S > 0)
        cuts = bool((one.top_k_S < vocab) | (one.top_p_S < 1))
        assert sample(logits[i : i + 1], one, draws=draws, cuts=cuts)[0].tolist() == [tokens[i]]


@pytest.mark.parametrize(
    ("log_min_p", "drawn"), [(-INF, {0, 1, 2, 3}), (-0.5, {0, 1, 2}), (-0.499, {0})]
)
def test_min_p_keeps_what_lies_on_it(log_min_p: float, drawn: set[int]) -> None:
    count = 16
    logits = torch.tensor([[5.0, 4.5, 4.5, 4.2]] * count, device=DEVICE)
    off = {"temperature": [1.0] * count, "top_k": [4] * count, "top_p": [1.0] * count}
    tokens, _ = sample(logits, sampling_rows(count, 4, log_min_p=[log_min_p] * count, **off))
    assert set(tokens.tolist()) == drawn


def test_top_p_of_flat_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search may skip almost nothing here."""
    count = 3
    vocab = 4000
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 1.5
    rows = sampling_rows(
        count,
        vocab,
        temperature=[1.0] * 3,
        log_min_p=[-INF] * 3,
        top_k=[vocab] * 3,
        top_p=[0.9, 0.99, 0.999],
    )
    cuts: list[Tensor] = []
    monkeypatch.setattr(sampling_file, "cut", lambda *given: (cut(*given), cuts.append(given[-1])))
    assert sample(logits, rows)[0].tolist() == drawn_by_definition(logits, rows)[1].tolist()
    distances = logits.amax(dim=1, keepdim=True) - logits
    expected = cut_reference(distances, torch.full_like(cuts[0], INF), rows.top_k_S, rows.top_p_S)
    torch.testing.assert_close(cuts[0], expected, rtol=1e-4, atol=0)


@pytest.mark.full("kernels", keep=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype: torch.dtype) -> None:
    logits = random_logits(4, 900).to(dtype)
    rows = sampling_rows(4, 900)
    assert sample(logits, rows)[0].tolist() == sample(logits.float(), rows)[0].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_status(temperature: float) -> None:
    logits = torch.zeros(7, 1300, device=DEVICE)
    logits[0, 1299] = torch.nan
    logits[1, 3] = INF
    logits[2] = -INF
    logits[3] = -INF
    logits[4, 1:] = -INF
    logits[5, 7] = 1e38
    logits[6, 9] = 1.0
    rows = sampling_rows(7, 1300, temperature=[temperature] * 7, top_k=[1] * 7)
    assert sample(logits, rows)[1].tolist() == [1, 1, 1, 1, 0, 0, 0]
    raw_peaks = torch.tensor([0, 0, -INF, 5, 5, 1e38, torch.nan], device=DEVICE)
    tokens, status = sample(logits, rows, raw_peaks)
    assert status.tolist() == [
        NOT_FINITE,
        NOT_FINITE,
        NOT_FINITE,
        NOTHING_ALLOWED,
        FINE,
        FINE,
        NOT_FINITE,
    ]
    assert tokens.tolist() == [0, 0, 0, 0, 0, 7, 0]


def test_no_rows() -> None:
    rows = sampling_rows(0, 9)
    assert [x.shape for x in sample(torch.zeros(0, 9, device=DEVICE), rows)] == [(0,), (0,)]


def cut_of(
    logits: Tensor, top_k: list[int], top_p: list[float], farthest: list[float], near: list[float]
) -> Tensor:
    ks = torch.tensor(top_k, dtype=torch.int32, device=DEVICE)
    ps = torch.tensor(top_p, device=DEVICE)
    kept = torch.tensor(farthest, device=DEVICE)
    one = torch.ones(len(top_k), device=DEVICE)
    cut(logits, logits.amax(dim=1), one, ks, ps, torch.tensor(near, device=DEVICE), kept)
    return kept


def test_cut_example() -> None:
    logits = -torch.tensor([[0.0, 1.0, 1.0, 3.0]] * 3, device=DEVICE)
    assert cut_of(logits, [2, 4, 4], [1.0, 0.5, 1.0], [INF] * 3, [INF, INF, -1.0]).tolist() == [
        1.0,
        0.0,
        INF,
    ]


@pytest.mark.full("kernels", keep=1)
@pytest.mark.parametrize("room", [64, 16_384])
def test_cut_is_that_of_sorting(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more candidates than fit, and with fewer; distances from 1e-30 to 1e30."""
    monkeypatch.setattr(cut_file, "ROOM", room)
    count = 12
    vocab = 2100
    generator = torch.Generator().manual_seed(3)
    logits = -(10.0 ** (60 * torch.rand(count, vocab, generator=generator) - 30))
    logits[::2] = random_logits(6, vocab)
    logits = (logits - logits.amax(dim=1, keepdim=True)).to(DEVICE)
    top_k = [1, 2, vocab, 300, vocab, 20, 2099, 5, vocab, vocab, 1000, 64]
    top_p = [1.0, 0.3, 0.6, 0.9, 0.999, 0.5, 0.95, 0.01, 0.9, 0.7, 0.2, 1.0]
    farthest = [INF, 3.0, INF, 2.5, 1.0, 0.0, INF, INF, 4.0, INF, 8.0, 1e-29]
    actual = cut_of(logits, top_k, top_p, farthest, [INF] * count)
    distances = (logits.amax(dim=1, keepdim=True) - logits).cpu()
    expected = cut_reference(distances, *(torch.tensor(x) for x in (farthest, top_k, top_p)))
    torch.testing.assert_close(
        (distances <= actual.cpu().unsqueeze(1)).sum(dim=1),
        (distances <= expected.unsqueeze(1)).sum(dim=1),
    )


@pytest.mark.full("aot")
def test_compiles_for_hopper() -> None:
    def signature(floats: str, integers: str, logits: str = "fp32", **more: str) -> dict[str, str]:
        return (
            {f"{name}_ptr": "*fp32" for name in floats.split()}
            | {f"{name}_ptr": "*i32" for name in integers.split()}
            | {"logits_ptr": f"*{logits}", "stride": "i32", "width": "i32"}
            | more
        )

    even = ("stride", "width")
    tiles = signature("peaks", "ids", num_tiles="i32")
    row = signature(
        "tile_peaks raw_peaks temperature log_min_p top_p peaks farthest near", "ids top_k tokens"
    )
    row |= {"status_ptr": "*u8", "num_tiles": "i32"}
    row = {name: kind for name, kind in row.items() if name not in ("logits_ptr", "stride")}
    raw = {name: kind for name, kind in row.items() if name != "raw_peaks_ptr"}
    gather = signature("peaks temperature farthest near candidates", "count", weight_ptr="*i64")
    search = signature(
        "peaks temperature top_p near candidates farthest", "top_k count", weight_ptr="*i64"
    )
    race = signature("peaks temperature farthest times", "low high ids", num_parts="i32")
    winner = {
        "times_ptr": "*fp32",
        "ids_ptr": "*i32",
        "farthest_ptr": "*fp32",
        "tokens_ptr": "*i32",
    }
    cases = [
        Case("sampling:tile_peaks_kernel", tiles, {"TILE": 512, "TILES": 4}, even),
        Case("sampling:row_kernel", row, {"BLOCK": 512}, ("width",)),
        Case("sampling:row_kernel", raw, {"BLOCK": 512, "raw_peaks_ptr": None}, ("width",)),
        Case("cut:gather_kernel", gather, {"ROOM": 16384, "BLOCK": 2048}, even),
        Case("cut:cut_kernel", search, {"ROOM": 16384, "BLOCK": 4096}, even, num_warps=16),
        Case("sampling:race_kernel", race, {"HOPELESS": HOPELESS, "BLOCK": 2048}, even),
        Case("sampling:winner_kernel", winner | {"num_parts": "i32"}, {"BLOCK": 128}),
    ]
    reports = compile_all(cases)
    assert [report.stack_bytes for report in reports] == [0] * len(cases)
    # Registers of a program fit in the file of one multiprocessor.
    assert (
        max(
            report.registers * case.num_warps // 4
            for case, report in zip(cases, reports, strict=True)
        )
        <= 512
    )
