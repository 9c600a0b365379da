"""Loading: whatever the plan, the dtypes and the number of threads, parameters are what
safetensors' reader gives.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeserve.errors import CheckpointError
from moeserve.loader import weights
from moeserve.loader.checkpoint import Checkpoint, open_checkpoint
from moeserve.loader.load_plan import LoadPlan, Param, Piece, blocks_of
from tests.loader.eager import load

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def copy_all(tensors: dict[str, Tensor], **shapes: tuple[int, ...]) -> LoadPlan:
    """The plan that copies every tensor; `shapes` overrides what it expects of some."""
    want = {name: tuple(tensor.shape) for name, tensor in tensors.items()} | shapes
    return LoadPlan(
        tuple(Param(name, shape) for name, shape in want.items()),
        tuple(Piece(name, shape, name) for name, shape in want.items()),
    )


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("read_bytes", [1, 50, 2**23])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes_chunks_and_threads_agree_with_the_reference_reader(
    threads: int,
    read_bytes: int,
    dtype: torch.dtype,
    small_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "MAX_READ_BYTES", read_bytes)
    expected = load_file(small_file)
    params = load(open_checkpoint(small_file.parent), copy_all(expected), dtype, threads=threads)
    assert list(params) == list(expected)
    for name, tensor in expected.items():
        assert params[name].dtype == dtype
        assert params[name].is_contiguous()
        assert torch.equal(params[name], tensor.to(dtype))


def test_converts_for_a_caller_in_inference_mode(small_file: Path) -> None:
    expected = load_file(small_file)
    with torch.inference_mode():
        params = load(
            open_checkpoint(small_file.parent), copy_all(expected), torch.float16, threads=2
        )
    for name, tensor in expected.items():
        assert torch.equal(params[name], tensor.to(torch.float16))


def test_many_shards_load_in_parallel(tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensors = {f"layer.{i}": torch.randn(64, 33).bfloat16() for i in range(60)}
    for part in range(3):
        names = list(tensors)[part * 20 : part * 20 + 20]
        save_file(
            {name: tensors[name] for name in names},
            tmp_path / f"model-0000{part + 1}-of-00003.safetensors",
        )
    params = load(open_checkpoint(tmp_path), copy_all(tensors), torch.bfloat16, threads=8)
    assert all(torch.equal(params[name], tensor) for name, tensor in tensors.items())


def test_memory_is_used_again_once_nothing_is_left_of_what_was_packed(tmp_path: Path) -> None:
    """Weights that are packed, of unlike sizes and one that is empty; a view of one is kept while
    others are read.
    """
    rows = {"0.qkv": 40, "0.w13": 96, "0.norm": 1, "1.qkv": 40, "1.w13": 93, "2.qkv": 0}
    tensors = {name: torch.randn(count, 9).bfloat16() for name, count in rows.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with weights.Params(open_checkpoint(tmp_path), copy_all(tensors), torch.bfloat16) as params:
        addresses = {}
        for name, tensor in tensors.items():
            weight = params.pop(name)
            assert torch.equal(weight, tensor)
            assert weight.data_ptr() % weights.ALIGNMENT_BYTES == 0 or not weight.numel()
            addresses[name] = weight.data_ptr()
            del weight
        assert addresses["1.qkv"] == addresses["0.qkv"]
        assert addresses["1.w13"] == addresses["0.w13"]
    with weights.Params(open_checkpoint(tmp_path), copy_all(tensors), torch.bfloat16) as params:
        part = params.pop("0.qkv")[1:2, ::2].mT
        norm = params.pop("0.norm")
        other = params.pop("1.qkv")
    assert torch.equal(part, tensors["0.qkv"][1:2, ::2].mT)
    assert torch.equal(norm, tensors["0.norm"])
    assert torch.equal(other, tensors["1.qkv"])


def test_experts_one_by_one_and_fused_fill_the_same_parameter(tmp_path: Path) -> None:
    """Gate and up of three experts, [I, D] each, and the fused [E, 2I, D] that some checkpoints
    have.
    """
    gates = torch.randn(3, 4, 5)
    ups = torch.randn(3, 4, 5)
    fused = torch.cat((gates, ups), dim=1)
    single = {
        f"e{e}.{n}": t[e].clone() for e in range(3) for n, t in (("gate", gates), ("up", ups))
    }
    save_file({**single, "fused": fused}, tmp_path / "model.safetensors")
    pieces = [
        Piece(f"e{e}.{name}", (4, 5), "one by one", at=(e, rows))
        for e in range(3)
        for name, rows in (("gate", slice(0, 4)), ("up", slice(4, 8)))
    ]
    pieces.append(Piece("fused", (3, 8, 5), "fused"))
    pieces.append(Piece("fused", (3, 8, 5), "last expert", take=(2,)))
    plan = LoadPlan(
        (Param("one by one", (3, 8, 5)), Param("fused", (3, 8, 5)), Param("last expert", (8, 5))),
        tuple(pieces),
    )
    params = load(open_checkpoint(tmp_path), plan, torch.float32)
    assert torch.equal(params["one by one"], torch.cat((gates, ups), dim=1))
    assert torch.equal(params["fused"], params["one by one"])
    assert torch.equal(params["last expert"], params["fused"][2])


@st.composite
def indices(draw: st.DrawFn, size: int) -> int | slice:
    """An index of one dimension: one row, or some by any step forwards."""
    if draw(st.booleans()):
        return draw(st.integers(-size, size - 1))
    bounds = st.none() | st.integers(-size - 1, size + 1)
    return slice(draw(bounds), draw(bounds), draw(st.none() | st.integers(1, 3)))


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Tensor, Piece, Tensor]:
    """A tensor, a piece that takes a part of it, and the parameter it must give."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    source = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    source = source.to(draw(st.sampled_from(DTYPES)))
    take = tuple(draw(indices(size)) for size in shape[: draw(st.integers(0, len(shape)))])
    taken = source[take]
    transposed = taken.ndim > 1 and draw(st.booleans())
    return (
        source,
        Piece("w", shape, "p", take=take, transposed=transposed),
        taken.mT if transposed else taken,
    )


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    case=pieces(),
    dtype=st.sampled_from(DTYPES),
    read_bytes=st.integers(1, 200),
    stacked=st.booleans(),
)
def test_any_piece_gives_what_indexing_gives(
    case: tuple[Tensor, Piece, Tensor],
    dtype: torch.dtype,
    read_bytes: int,
    stacked: bool,
    tmp_path: Path,
) -> None:
    source, piece, taken = case
    save_file({"w": source}, tmp_path / "model.safetensors")
    shape = tuple(taken.shape)
    pieces_ = [piece]
    expected = taken
    if stacked:  # twice into one parameter
        shape = (2, *shape)
        expected = torch.stack((taken, taken))
        pieces_ = [replace(piece, at=(row,)) for row in range(2)]
    before = weights.MAX_READ_BYTES
    weights.MAX_READ_BYTES = read_bytes
    try:
        params = load(
            open_checkpoint(tmp_path),
            LoadPlan((Param("p", shape),), tuple(pieces_)),
            dtype,
            threads=2,
        )
    finally:
        weights.MAX_READ_BYTES = before
    assert torch.equal(params["p"], expected.to(dtype))


def test_fused_experts_by_columns_and_by_turns(tmp_path: Path) -> None:
    """[E, D, 2I] with gate before up, and with gate and up by turns (gpt-oss), are [E, 2I, D]; one
    expert, too.
    """
    gate, up = torch.randn(2, 4, 6, 3).unbind(0)
    tensors = {
        "halves": torch.cat((gate, up), -1),
        "turns": torch.stack((gate, up), -1).flatten(-2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    everything = slice(None)
    shape = (4, 6, 6)
    pieces = [Piece("halves", (4, 6, 6), "halves", transposed=True)]
    for i in range(2):
        rows = slice(3 * i, 3 * i + 3)
        turns = slice(i, None, 2)
        take = (everything, everything, turns)
        pieces += [
            Piece("turns", shape, "turns", at=(everything, rows), take=take, transposed=True)
        ]
        pieces += [
            Piece("turns", shape, "one", at=(rows,), take=(2, everything, turns), transposed=True)
        ]
    plan = LoadPlan(
        (Param("halves", shape), Param("turns", shape), Param("one", shape[1:])), tuple(pieces)
    )
    params = load(open_checkpoint(tmp_path), plan, torch.float32)
    assert torch.equal(params["halves"], torch.cat((gate, up), -1).mT)
    assert torch.equal(params["turns"], params["halves"])
    assert torch.equal(params["one"], params["halves"][2])


def test_blocks_of_example() -> None:
    first, last = blocks_of((6, 4), (slice(0, 6, 2), 1), 16)
    assert (first.first, first.shape, first.at) == (0, (3, 4), (slice(0, 2),))
    assert (last.first, last.shape, last.at) == (16, (1, 4), (slice(2, 3),))


def test_progress_counts_every_byte_once(small_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_READ_BYTES", 64)
    tensors = load_file(small_file)
    seen: list[tuple[int, int]] = []
    load(
        open_checkpoint(small_file.parent),
        copy_all(tensors),
        torch.float32,
        progress=lambda *at: seen.append(at),
    )
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert seen[-1] == (total, total)
    assert all(earlier[0] <= later[0] for earlier, later in itertools.pairwise(seen))
    assert {at[1] for at in seen} == {total}


# What does not fit is refused before anything is allocated


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[Checkpoint, LoadPlan], str]:
    """Loads, expects a refusal in under a second with no parameter allocated, and returns the
    message.
    """

    def refuse(checkpoint: Checkpoint, plan: LoadPlan) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(
                torch, "empty", lambda *a, **k: pytest.fail("allocated before the plan was checked")
            )
            began = time.process_time()
            with pytest.raises(CheckpointError) as caught:
                load(checkpoint, plan, torch.bfloat16)
            assert time.process_time() - began < 10
        return str(caught.value)

    return refuse


Refused = Callable[[Checkpoint, LoadPlan], str]


def test_missing_and_surplus_tensors_are_named(small_file: Path, refused: Refused) -> None:
    tensors = load_file(small_file)
    plan = copy_all(
        {**{k: v for k, v in tensors.items() if k != "a.f32"}, "gone": torch.zeros(2, 3)}
    )
    message = refused(open_checkpoint(small_file.parent), plan)
    assert "tensor 'gone' [2, 3] is missing" in message
    assert "tensor 'a.f32' in model.safetensors is not part of this model" in message
    assert "Use the config.json that came with the weights" in message


def test_ignored_tensors_are_not_surplus(small_file: Path) -> None:
    tensors = load_file(small_file)
    some = copy_all({name: tensor for name, tensor in tensors.items() if name != "a.f32"})
    plan = LoadPlan(some.params, some.pieces, ignore=frozenset({"a.f32", "never there"}))
    assert "a.f32" not in load(open_checkpoint(small_file.parent), plan, torch.float32)


def test_wrong_shape_names_both_shapes(small_file: Path, refused: Refused) -> None:
    plan = copy_all(load_file(small_file), **{"a.f32": (7, 5)})
    message = refused(open_checkpoint(small_file.parent), plan)
    assert (
        "tensor 'a.f32' in model.safetensors has shape [5, 7], config.json implies [7, 5]"
        in message
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float8_e4m3fn, torch.bool])
def test_other_dtypes_are_refused_by_name(
    dtype: torch.dtype, tmp_path: Path, refused: Refused
) -> None:
    tensors = {"w": torch.zeros(4).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    message = refused(open_checkpoint(tmp_path), copy_all(tensors))
    assert "tensor 'w' in model.safetensors is" in message
    assert "supported: F32, BF16, F16" in message


def test_a_wholly_foreign_checkpoint_of_20000_tensors_is_refused_in_short(
    tmp_path: Path, refused: Refused
) -> None:
    save_file({f"other.{i}": torch.zeros(1) for i in range(20_000)}, tmp_path / "model.safetensors")
    began = time.process_time()
    checkpoint = open_checkpoint(tmp_path)
    message = refused(checkpoint, copy_all({f"w.{i}": torch.zeros(1) for i in range(20_000)}))
    assert time.process_time() - began < 10
    assert "and 39995 more" in message
    assert len(message) < 2000


def test_a_plan_that_leaves_a_gap_is_our_own_bug(small_file: Path) -> None:
    plan = LoadPlan((Param("p", (6, 7)),), (Piece("a.f32", (5, 7), "p", at=(slice(0, 5),)),))
    with pytest.raises(AssertionError, match="do not cover"):
        load(open_checkpoint(small_file.parent), plan, torch.float32)


# What goes wrong while reading


def open_files() -> int:
    gc.collect()  # files of earlier tests
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("harm", ["cut", "removed"])
def test_a_file_that_changes_after_its_header_was_read(harm: str, small_file: Path) -> None:
    tensors = load_file(small_file)
    checkpoint = open_checkpoint(small_file.parent)
    before = open_files()
    if harm == "cut":
        os.truncate(small_file, 1000)
    else:
        small_file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        load(checkpoint, copy_all(tensors), torch.float32)
    assert harm == "removed" or "ended inside tensor" in str(caught.value)
    assert open_files() == before


def test_an_error_in_the_progress_callback_ends_the_load(
    small_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_READ_BYTES", 1)
    before = open_files()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(
            open_checkpoint(small_file.parent),
            copy_all(load_file(small_file)),
            torch.float32,
            progress=stop,
        )
    assert open_files() == before


@pytest.mark.parametrize("value", [1e6, -7e4, float("inf")])
def test_values_too_large_for_float16_are_refused(value: float, tmp_path: Path) -> None:
    save_file({"w": torch.tensor([1.0, value])}, tmp_path / "model.safetensors")
    plan = copy_all({"w": torch.zeros(2)})
    with pytest.raises(
        CheckpointError, match=r"'w' has values that float16 cannot hold .* --dtype bfloat16"
    ):
        load(open_checkpoint(tmp_path), plan, torch.float16)
    assert load(open_checkpoint(tmp_path), plan, torch.bfloat16)["w"][0] == 1
