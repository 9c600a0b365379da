"""Tensor parallelism changes no bit: every rank of an engine has the hidden states and logits of
one rank alone.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeserve.blocks.attention import Attention, Heads
from moeserve.blocks.rope import RopeSpec
from moeserve.comm.tensor import GlooTensor, TensorParallel
from moeserve.comm.world import World
from moeserve.errors import ConfigError
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.models.hf_config import read_model_spec
from moeserve.models.load_plan import load_plan
from moeserve.models.spec import ModelSpec
from moeserve.moe.all2all.torch_a2a import TorchAll2All
from moeserve.moe.placement.placement import Placement
from moeserve.ops.native import native
from tests.comm.board import Board, BoardTensor
from tests.comm.ranks import members_of, together
from tests.loader.eager import load
from tests.moe.contract.backends import facts_of
from tests.quantized_checkpoints import FORMS, write_quantized

from .conftest import FAMILIES, FEW, Driver, carry_out

PROMPT = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1)).tolist()
native_only = pytest.mark.skipif(native() is None, reason="needs the native kernels")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None: ...


def play(driver: Driver, idle: tuple[int, int] = (0, 0)) -> list[Tensor]:
    """Hidden states and logits of a prefill, of chunks, of decode steps in company, and of a lone
    token.

    idle: steps without tokens before and after.
    """

    def serve(times: int) -> None:
        with torch.inference_mode():
            for _ in range(times):
                driver.model.serve(driver.ubatch)

    steps = [
        [("a", PROMPT)],
        [("b", PROMPT[:3])],
        [("b", PROMPT[3:40]), ("a", [7])],
        [("c", PROMPT[:1]), ("b", PROMPT[40:]), ("a", [8])],
        [("c", [5]), ("b", [6]), ("a", [9])],
        [("c", [5])],
    ]
    seen = []
    serve(idle[0])
    for step in steps:
        logits = driver.step(step)
        seen += [driver.hidden_TD, *logits]
    serve(idle[1])
    return seen


def check(
    path: Path,
    dtype: torch.dtype,
    tp_size: int,
    tp: list[TensorParallel] | None = None,
    **options: Any,
) -> None:
    expected = play(Driver(path, dtype, **options))
    board = Board(tp_size)
    tp = tp or [BoardTensor(rank, board) for rank in range(tp_size)]

    def run(rank: int) -> list[Tensor]:
        # `ep` off: every rank has all experts and sends its share of the rows to itself.
        driver = Driver(
            path, dtype, world=World(rank, tp_size, tp_size, ep=False), tp=tp[rank], **options
        )
        return play(driver)

    for found in together([functools.partial(run, rank) for rank in range(tp_size)]):
        assert len(found) == len(expected)
        assert [
            i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)
        ] == []


@pytest.mark.full("models", keep="each")
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, dtype: torch.dtype, tp_size: int, make_checkpoint: Any) -> None:
    """Four ranks on two KV heads: each KV head is on two ranks."""
    path = make_checkpoint(name).path
    if tp_size not in read_model_spec(path).possible_tp:
        pytest.skip("its heads cannot be shared so")
    check(path, dtype, tp_size)


@pytest.mark.parametrize(
    ("name", "tp_size", "overrides"),
    [
        ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
        (
            "llama",
            4,
            {"intermediate_size": 90, "vocab_size": 301, "attention_bias": True, "mlp_bias": True},
        ),
        ("qwen3_moe", 2, {"tie_word_embeddings": True, "mlp_only_layers": [0], "vocab_size": 259}),
        (
            "qwen3_moe",
            3,
            {
                "hidden_size": 200,
                "head_dim": 40,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "moe_intermediate_size": 72,
                "mlp_only_layers": [1],
            },
        ),
        ("qwen2_moe", 4, {"mlp_only_layers": [1], "num_key_value_heads": 1}),
        ("qwen3_moe", 2, {"hidden_size": 1536, "num_hidden_layers": 1, "mlp_only_layers": [0]}),
        ("olmoe", 4, {"num_attention_heads": 8, "num_key_value_heads": 2}),
        ("olmoe", 2, {"num_attention_heads": 8, "num_key_value_heads": 8}),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_ties_and_sizes_that_do_not_divide(
    name: str, tp_size: int, overrides: dict[str, Any], dtype: torch.dtype, make_checkpoint: Any
) -> None:
    check(make_checkpoint(name, **overrides).path, dtype, tp_size)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("name", ["qwen2_moe", "llama"])
def test_by_torch(name: str, dtype: torch.dtype, make_checkpoint: Any) -> None:
    check(make_checkpoint(name).path, dtype, 4, kernels="torch")


def test_over_gloo(tmp_path: Path, make_checkpoint: Any) -> None:
    tp: list[TensorParallel] = [GlooTensor(rank, 2) for rank in range(2)]
    members = members_of(2, str(tmp_path), tp_size=2)
    together([functools.partial(one.join, m) for one, m in zip(tp, members, strict=True)])
    try:
        check(make_checkpoint("olmoe").path, torch.bfloat16, 2, tp)
    finally:
        for one in tp:
            one.leave()


@pytest.mark.full("ranks", keep="each")
@pytest.mark.parametrize("redundant", [0, 3])
@pytest.mark.parametrize(("engines", "tp_size"), [(1, 4), (2, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
def test_with_experts_sharded_over_all_ranks(
    name: str,
    dtype: torch.dtype,
    engines: int,
    tp_size: int,
    redundant: int,
    tmp_path: Path,
    make_checkpoint: Any,
) -> None:
    """Engine 1 begins one step later, and each serves the other meanwhile; dispatches take 16
    tokens at most.
    """
    path = make_checkpoint(name).path
    spec = read_model_spec(path)
    expected = play(Driver(path, dtype))
    size = engines * tp_size
    placement = Placement.initial(len(spec.moe_layers), spec.num_experts, size, redundant)
    members = members_of(size, str(tmp_path), tp_size=tp_size)
    boards = [Board(tp_size) for _ in range(engines)]

    def run(rank: int) -> list[Tensor]:
        world = World(rank, size, tp_size)
        shape = {"hidden_size": spec.hidden_size, "top_k": spec.experts_per_token, "max_tokens": 16}
        backend = TorchAll2All(facts_of(dtype, size, **shape))
        tp = BoardTensor(world.tp_rank, boards[world.dp_rank])
        driver = Driver(path, dtype, world=world, tp=tp, placement=placement, backends=[backend])
        backend.join(members[rank], placement.experts_per_rank, 1)
        driver.ubatch.most_tokens = -(-len(PROMPT) // tp_size)
        try:
            return play(driver, idle=(world.dp_rank, engines - 1 - world.dp_rank))
        finally:
            backend.leave()

    for found in together([functools.partial(run, rank) for rank in range(size)]):
        assert [
            i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)
        ] == []


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("name", FEW)
def test_every_row_of_every_weight_is_on_its_ranks(
    name: str, tp_size: int, make_checkpoint: Any
) -> None:
    """Shares follow each other and leave nothing out; only KV heads with less ranks than heads are
    there twice.
    """
    path = make_checkpoint(name, intermediate_size=90, vocab_size=301).path
    spec = read_model_spec(path)
    everything = carry_out(path, spec, torch.float32)
    shares = [
        carry_out(path, spec, torch.float32, World(rank, tp_size, tp_size, ep=False))
        for rank in range(tp_size)
    ]
    split = set()
    for param, full in everything.items():
        parts = [share[param] for share in shares]
        if all(torch.equal(part, full) for part in parts):
            continue
        split.add(param.split(".")[-1])
        if "qkv" in param:
            parts = [_of_kind(parts, spec, tp_size, kind) for kind in range(3)]
        elif "gate_up" in param:
            parts = [part.chunk(2)[half] for half in range(2) for part in parts]
        assert torch.equal(torch.cat(parts), full), param
    assert (
        {"qkv", "out", "lm_head"}
        <= split
        <= {"qkv", "qkv_bias", "out", "lm_head", "gate_up", "down"}
    )
    assert ("down" in split) == (not spec.moe_layers)


def _of_kind(parts: list[Tensor], spec: ModelSpec, tp_size: int, kind: int) -> Tensor:
    """All queries, keys or values of the ranks' qkv, keys and values once each."""
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Attention)
    heads = [mixer.local_heads(World(rank, tp_size, tp_size)) for rank in range(tp_size)]
    d = mixer.head_dim
    rows = [part.split([h.count * d, h.count_kv * d, h.count_kv * d])[kind]
            for part, h in zip(parts, heads, strict=True)]  # fmt: skip
    firsts = [h.first_kv if kind else h.first for h in heads]
    return torch.cat([row for i, row in enumerate(rows) if firsts[i] not in firsts[:i]])


@pytest.mark.parametrize("name", ["olmoe", "llama"])
def test_the_loader_reads_shares(name: str, make_checkpoint: Any) -> None:
    path = make_checkpoint(name, intermediate_size=90, vocab_size=301).path
    spec = read_model_spec(path)
    checkpoint = open_checkpoint(path)
    world = World(3, 4, 4)
    loaded = load(checkpoint, load_plan(spec, checkpoint.tensors.keys(), world), torch.bfloat16)
    expected = carry_out(path, spec, torch.bfloat16, world)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[param], expected[param]) for param in expected)


TWELVE = Attention(num_heads=12, num_kv_heads=4, head_dim=8, rope=RopeSpec())


def test_which_ranks_hold_which_heads() -> None:
    assert TWELVE.possible_tp == [1, 2, 4, 12]
    held = [TWELVE.local_heads(World(rank, 12, 12)) for rank in range(12)]
    assert [h.first for h in held] == list(range(12))
    assert [h.first_kv for h in held] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert {h.count_kv for h in held} == {1}
    assert TWELVE.local_heads(World(3, 4, 2)) == Heads(first=6, count=6, first_kv=2, count_kv=2)


@pytest.mark.parametrize("tp_size", [3, 6, 8])
def test_impossible_sizes_are_refused_with_the_possible_ones(
    tp_size: int, make_checkpoint: Any
) -> None:
    spec = read_model_spec(make_checkpoint("llama").path)
    spec = replace(spec, layers=(replace(spec.layers[0], mixer=TWELVE),))
    with pytest.raises(
        ConfigError, match=rf"tp={tp_size} .*12 query heads on 4 KV heads.*from 1, 2, 4, 12"
    ):
        load_plan(spec, [], World(0, tp_size, tp_size))


@native_only
@pytest.mark.parametrize(
    ("name", "asked"), [("qwen3_moe", "int4"), ("qwen2_moe", "int8"), ("llama", "int4")]
)
@pytest.mark.parametrize("tp", [2, 4])
def test_weights_that_are_quantized_on_load(
    name: str, asked: str, tp: int, make_checkpoint: Any
) -> None:
    check(make_checkpoint(name).path, torch.bfloat16, tp, asked=asked)


@native_only
@pytest.mark.parametrize(
    "form", ["int8", "int4 with zero points", "fp8 in blocks", "fp8 in small blocks"]
)
def test_weights_that_are_stored_quantized(form: str, make_checkpoint: Any, tmp_path: Path) -> None:
    """Shares of outputs begin anywhere in blocks and in words of zero points; the last one is
    filled up.
    """
    source = make_checkpoint(
        "qwen3_moe", hidden_size=70, intermediate_size=90, mlp_only_layers=[1]
    ).path
    quantized, _ = write_quantized(source, tmp_path, FORMS[form])
    check(quantized, torch.bfloat16, 4)
