"""Runners that start from packed weights on disk: the bits of those that do not, wherever experts
go later.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from moeserve import LLM, SamplingParams
from moeserve.comm.world import World
from moeserve.config import config_of
from moeserve.errors import ConfigError
from moeserve.loader.weights import Reader
from moeserve.messages import PlacementTable
from moeserve.models.hf_config import read_model_spec
from moeserve.moe.placement.placement import Placement
from moeserve.ops.native import native
from moeserve.runner import cpu, load
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.limits import MemoryFacts
from tests.quantized_checkpoints import FORMS, write_quantized
from tests.runner.engines import Group, alone
from tests.runner.harness import Request, greedy, written

pytestmark = pytest.mark.skipif(native() is None, reason="needs the native kernels")
PROMPT = np.random.default_rng(3).integers(0, 256, 40).tolist()


def refuse(self: Reader, *args: Any) -> int:
    raise AssertionError("a weight was read")


def run(path: Path, **settings: Any) -> Request:
    driver = alone(path, **settings)
    written()
    request = driver.add(Request(list(PROMPT), greedy()))
    driver.generate(request, 5, chunk=16)
    return request


def same(ours: Request, theirs: Request) -> None:
    assert ours.output == theirs.output
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))


CASES = ["qwen3_moe", "gemma4", "llama", "int8", "int4", *(f"stored {form}" for form in FORMS)]


@pytest.mark.full("models", keep=7)
@pytest.mark.parametrize(
    "case",
    [
        *CASES, "deepseek_v3", "glm_moe_dsa", "qwen2_moe", "mixtral", "olmoe", "granite_moe",
        "granite_moe_hybrid", "nemotron_h",
    ],
)  # fmt: skip
def test_a_second_start_reads_nothing_and_computes_the_same(
    case: str, make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = case if case in ("int8", "int4") else "none"
    name = {"int4": "qwen3_moe", "int8": "qwen2_moe"}.get(
        asked, "qwen2_moe" if case.startswith("stored") else case
    )
    if "fp4" in case:
        name = "qwen3_moe"  # all of whose layers have multiples of 32 inputs
    path = make_checkpoint(name, tie_word_embeddings=name == "granite_moe").path
    if case.startswith("stored"):
        path, _ = write_quantized(path, tmp_path, FORMS[case.removeprefix("stored ")])
    expected = run(path, quantization=asked)
    settings = {"quantization": asked, "packed_cache": str(tmp_path / "cache")}
    same(run(path, **settings), expected)
    monkeypatch.setattr(Reader, "read", refuse)
    same(run(path, **settings), expected)


async def test_experts_move_after_a_start_from_a_file(make_checkpoint: Any, tmp_path: Path) -> None:
    """They move to other ranks' mapped memory, which is private to the process.

    So the next start finds what the first one had.
    """
    path = make_checkpoint("qwen3_moe").path
    expected = run(path)
    folder = tmp_path / "cache"
    before: dict[str, bytes] = {}
    for attempt in range(3):
        joins = tmp_path / str(attempt)
        joins.mkdir()
        group = await Group(path, 2, joins, packed_cache=str(folder), redundant_experts=2).prepare()
        written()
        assert [bool(engine.model.mapped_bytes) for engine in group.engines] == [attempt > 0] * 2
        await group.join()
        request = group.engines[0].driver.add(Request(list(PROMPT), greedy()))
        for _ in range(3):
            await group.run([(request, 16)], [])
        first = group.engines[0].model.placement
        assert first is not None
        table = first.to_table()
        await group.leave()
        await group.join(reversed_table(table))
        while len(request.output) < 5:
            await group.run([(request, 16)], [])
        await group.leave()
        group.close()
        same(request, expected)
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        assert len(files) == 2
        assert before in ({}, files)
        before = files


def reversed_table(table: PlacementTable) -> PlacementTable:
    """Every slot gets another expert."""
    experts = np.frombuffer(table.experts, np.int32).reshape(
        -1, table.num_ranks * table.experts_per_rank
    )[:, ::-1]
    return msgspec.structs.replace(table, version=table.version + 1, experts=experts.tobytes())


def test_mapped_weights_leave_less_memory_for_kv_blocks(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cpu, "host_memory", lambda: MemoryFacts(limit=1 << 40, used=0, free=1 << 32)
    )
    path = make_checkpoint("llama").path
    config = config_of(path, packed_cache=str(tmp_path))
    budgets = []
    mapped = []
    for _ in range(2):
        runner = CPUModelRunner(config, read_model_spec(path), path)
        budgets.append(runner.load(lambda phase, percent: None))
        written()
        mapped.append(runner.mapped_bytes)
    assert mapped[0] == 0 < mapped[1]
    assert abs(budgets[0] - budgets[1] - 0.9 * mapped[1]) < 2


def test_an_engine_that_comes_when_experts_have_moved_leaves_no_file(
    make_checkpoint: Any, tmp_path: Path
) -> None:
    path = make_checkpoint("qwen3_moe").path
    world = World(1, 2, ranks_on_host=2)
    config = config_of(path, packed_cache=str(tmp_path))
    spec = read_model_spec(path)
    first = Placement.initial(2, 8, 2)
    for version, num_files in ((1, 0), (0, 1)):
        placement = Placement(version, 2, 8, first.experts_LS)
        CPUModelRunner(config, spec, path, world, placement, grouped=True).load(
            lambda phase, percent: None
        )
        written()
        assert len(list(tmp_path.iterdir())) == num_files


def test_through_the_front_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer() -> list[int]:
        with LLM("demo", threads=1, max_model_len=64, packed_cache=str(tmp_path)) as llm:
            (out,) = llm.generate(
                ["Once upon"], SamplingParams(temperature=0.9, seed=4, max_tokens=16)
            )
            written()
            return list(out.outputs[0].token_ids)

    first = answer()
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(Reader, "read", refuse)
    assert answer() == first


def test_other_kernels_refuse(make_checkpoint: Any, tmp_path: Path) -> None:
    path = make_checkpoint("llama").path
    config = config_of(path, kernels="torch", packed_cache=str(tmp_path))
    runner = CPUModelRunner(config, read_model_spec(path), path)
    with pytest.raises(
        ConfigError, match=r"packed_cache needs the native kernels .*; omit packed_cache, or"
    ):
        runner.load(lambda phase, percent: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("least", [0, 1 << 30])
def test_without_a_word_large_models_are_kept_in_the_users_folder(
    least: int, make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(load, "MIN_MODEL_BYTES", least)
    path = make_checkpoint("llama").path
    for settings in ({"packed_cache": "off"}, {"load_format": "dummy"}, {"kernels": "torch"}, {}):
        run(path, **settings)
        assert len(list(tmp_path.rglob("*.packed"))) == (not settings and not least)
