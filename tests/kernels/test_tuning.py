"""The search for launch parameters: on made-up times, and the real kernels with any time at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from moeserve.kernels import configs, tuning
from moeserve.kernels.configs import Config, add_folder, nearest, path_of, save, tuned_config
from moeserve.kernels.fp8 import BLOCK
from moeserve.kernels.paged_attention import AttentionShape
from moeserve.kernels.tuning import Job, search
from tests.kernels.device import DEVICE
from tests.kernels.interpreted import ordered_dots


@pytest.fixture(autouse=True)
def _no_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(configs, "_folders", [configs.FOLDER])
    configs.table.cache_clear()
    yield
    configs.table.cache_clear()


class Card:
    """A kernel whose time is a function of its parameters."""

    def __init__(self, time: Callable[[Config], float]) -> None:
        self.time = time  # type: ignore[var-annotated]
        self.last = {}  # type: ignore[var-annotated]
        self.timed = 0  # type: ignore[var-annotated]

    def run(self, config: Config) -> Tensor:
        if config["stages"] > 4:
            raise OutOfResources(300_000, 232_448, "shared memory")
        self.last = dict(config)
        return torch.tensor([1.0, 2.0 if config["warps"] == 16 else 3.0])

    def timer(self, call: Callable[[], object]) -> float:
        self.timed += 1
        call()
        return self.time(self.last)


CHOICES = {"stages": (2, 3, 4, 5), "block": (16, 32, 64), "warps": (4, 8, 16)}


def test_search_finds_the_best_and_drops_other_bits_and_what_does_not_fit() -> None:
    """The best number of stages depends on the block, which is found after them: it takes a second
    pass. 16 warps would be fastest, and so would 5 stages."""
    card = Card(
        lambda c: (
            abs(c["block"] - 64)
            + abs(c["stages"] - (4 if c["block"] == 64 else 2))
            + 8 / c["warps"]
        )
    )
    found = search(
        Job("x", "s", 1, {"block": 16, "warps": 4, "stages": 2, "fixed": 7}, CHOICES, card.run),
        card.timer,
    )
    assert found.config == {"block": 64, "warps": 8, "stages": 4, "fixed": 7}
    assert (found.default_ms, found.best_ms) == (50.0, 1.0)
    assert {config["warps"] for config in found.wrong_configs} == {16}
    assert card.timed < found.num_tried <= 30


def test_search_keeps_the_defaults_where_nothing_is_faster() -> None:
    card = Card(lambda c: 1.0)
    default = {"block": 32, "warps": 8, "stages": 3}
    assert search(Job("x", "s", 1, default, CHOICES, card.run), card.timer).config == default


@pytest.mark.parametrize(("theirs_ms", "wins"), [(0.5, True), (1.5, False), (None, False)])
def test_kernels_of_others_are_chosen_by_their_time_alone(
    theirs_ms: float | None, wins: bool
) -> None:
    """Their bits may differ, and it is no error that they cannot run here."""

    def time(config: Config) -> float:
        if config.get("theirs") and theirs_ms is None:
            raise RuntimeError("not on this card")
        return float(theirs_ms or 0) if config.get("theirs") else 1.0

    card = Card(time)
    default = {"block": 32, "warps": 8, "stages": 3}
    found = search(Job("x", "s", 1, default, CHOICES, card.run, rival={"theirs": 1}), card.timer)
    assert found.config == {**default, **({"theirs": 1} if wins else {})}
    assert found.best_ms == (0.5 if wins else 1.0)


def least_of(choices: tuning.Choices) -> dict[str, tuple[int, ...]]:
    """Two values of two parameters: enough for the interpreter."""
    return {name: tuple(values[:2]) for name, values in list(choices.items())[:2]}


def test_the_kernels_give_the_same_bits_for_all_their_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inputs are fp32 powers of two, whose sums are exact.

    So the order in which the interpreter's BLAS adds does not matter.
    """
    for name in ("GROUPED", "FP8", "LINEAR", "ATTENTION"):
        monkeypatch.setattr(tuning, name, least_of(getattr(tuning, name)))
    monkeypatch.setattr(tuning, "TOKENS", (3,))
    monkeypatch.setattr(tuning, "CONTEXT_LENGTH", 48)
    monkeypatch.setattr(tuning, "PREFILL_TOKENS", 20)
    monkeypatch.setattr(tuning, "DECODE_ROWS", 2)

    def ones(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.randint(0, 2, shape, device=device).to(dtype)

    monkeypatch.setattr(tuning, "random", ones)
    jobs = [
        *tuning.linear_jobs(40, 32, torch.float32, DEVICE),
        *tuning.attention_jobs(AttentionShape(4, 2, 16, 16, 16, torch.float32), DEVICE),
        *tuning.attention_jobs(AttentionShape(2, 1, 272, 256, 16, torch.float32), DEVICE),
        *tuning.grouped_jobs(4, 16, 32, 2, torch.float32, DEVICE),
        *(
            next(tuning.grouped_jobs(2, 128, 128, 1, torch.float32, DEVICE, kind))
            for kind in ("fp8", "int8", "int4")
        ),
    ]
    assert [(job.family, job.shape, job.size) for job in jobs] == [
        ("linear", "N40 K32 float32", 3),
        ("paged_attention", "G2 D16 float32 float32", 16),
        ("paged_attention", "G2 D272-256 float32 float32", 16),
        ("grouped_gemm", "E4 I16 D32 float32", 6),
        ("grouped_fp8", "E2 I128 D128", 3),
        ("grouped_weight_only", "E2 I128 D128 int8 G128 float32", 3),
        ("grouped_weight_only", "E2 I128 D128 int4 G128 float32", 3),
    ]
    for module in (tuning.linear, tuning.paged_attention):
        monkeypatch.setattr(module, "launch_of", None)  # candidates are what runs
    for job in jobs:
        assert set(job.choices) <= set(job.default)
        with ordered_dots():
            found = search(job, lambda call: 1.0)
        assert (found.wrong_configs, found.best_ms, found.config) == ([], 1.0, job.default)
        assert found.num_tried >= 2


def test_no_parameter_is_the_depth_of_a_step() -> None:
    """Bits depend on that depth."""
    assert not any(
        "block_k" in name
        for choices in (tuning.GROUPED, tuning.LINEAR, tuning.ATTENTION)
        for name in choices
    )


def test_a_program_of_fp8_has_one_block_of_scales() -> None:
    """Others are refused by an assertion, which would end a search."""
    assert all(
        BLOCK % size == 0 for name in ("up_block_n", "down_block_n") for size in tuning.FP8[name]
    )


def test_tables_are_kept_and_read_again_before_the_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    mine = tmp_path / "mine"
    save("linear", "Some GPU", "N1", {1: {"warps": 2}, 64: {"warps": 1}}, shipped)
    monkeypatch.setattr(configs, "_folders", [shipped])
    default: Mapping[str, int] = {"warps": 4, "stages": 3}
    assert tuned_config("linear", "Some GPU", "N1", 50, default) == {"warps": 1, "stages": 3}
    add_folder(mine)
    add_folder(mine)
    assert configs._folders == [mine, shipped]
    assert (
        save("linear", "Some GPU", "N1", {8: {"warps": 8}}, mine) == mine / "linear-some-gpu.json"
    )
    save("linear", "Some GPU", "N1", {16: {"warps": 16}}, mine)
    save("linear", "Some GPU", "N2", {2: {"warps": 5}}, mine)
    assert tuned_config("linear", "Some GPU", "N1", 3, default)["warps"] == 8
    assert tuned_config("linear", "Some GPU", "N1", 4000, default)["warps"] == 16
    assert tuned_config("linear", "Some GPU", "N2", 4000, default)["warps"] == 5
    assert tuned_config("linear", "Other GPU", "N1", 3, default) == default
    save("linear", "Some GPU", "N1", {8: {"warps": 9}}, mine)
    assert tuned_config("linear", "Some GPU", "N1", 8, default)["warps"] == 9
    assert [file.name for file in mine.iterdir()] == [path_of("linear", "Some GPU", mine).name]


def test_nearest() -> None:
    sizes = {16: {"a": 1}, 64: {"a": 2}}
    assert [nearest(sizes, size) for size in (0, 20, 32, 10**9)] == [
        {"a": 1},
        {"a": 1},
        {"a": 2},
        {"a": 2},
    ]
    assert nearest({}, 3) is None
