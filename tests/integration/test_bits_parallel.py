"""The tokens and logprob bits of one rank, for any dp, tp, backend, micro-batches and placement.

Every family and dtype runs once, with settings that rotate so that all pairs of values occur. All
combinations together take an hour: `pytest --full shapes tests/integration/test_bits_parallel.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from moeserve import LLM
from moeserve.messages import UpdatePlacement
from moeserve.moe.placement.placement import Placement
from moeserve.ops.native import native
from moeserve.sampling import TokenSampling
from tests.families import FEW
from tests.integration.parallel_engines import Answer, Engines
from tests.integration.test_bits import PARAMS, PROMPT, alone, bits, memory_of, prompt_of
from tests.quantized_checkpoints import FORMS, write_quantized

BACKENDS = ["torch"] + ["shm"] * (native() is not None)
DTYPES = ["float32", "bfloat16"]
DENSE = ["llama", "qwen3"]
MOE = [family for family in FEW if family not in DENSE]
HYBRIDS = [
    "qwen3_next",
    "granite_moe_hybrid",
    "kimi_linear",
    "deepseek_v32",
    "deepseek_v4",
    "jamba",
    "bailing_moe_v2_5",
    "lfm2_moe",
    "nemotron_h",
    "qwen3_5_moe",
    "glm_moe_dsa",
    "bailing_moe_linear_v2",
    "bailing_hybrid",
    "glm5_next",
    "hy_v4",
    "qwen4_exp_text",
]
NUM_TOKENS = 8
SAMPLINGS = [
    TokenSampling(seed=0, max_tokens=NUM_TOKENS, temperature=0.0, logprobs=20),
    TokenSampling(
        seed=3,
        max_tokens=NUM_TOKENS,
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        logprobs=20,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
    ),
]
NUM_BLOCKS = 26  # too few for both prompts and a crowd that grows
NUM_STATES = 8 * 2 + 1  # as few as eight requests need


@dataclass(frozen=True)
class Shape:
    """Settings that must not matter."""

    dp: int = 1
    tp: int = 1
    backend: str = "auto"
    dbo: str = "off"
    ep: str = "on"
    chunk: int = 64
    redundant: int = 0
    depth: int = 2
    quantization: str = "none"
    kv: str = "auto"

    def __str__(self) -> str:
        ubatches = 2 if self.dbo == "on" else 1
        experts = (
            f"{self.backend}-{ubatches}_lanes-{self.redundant}_more"
            if self.ep == "on"
            else "all_experts"
        )
        steps = f"chunk_{self.chunk}-depth_{self.depth}"
        return f"{self.dp}x{self.tp}-{experts}-{steps}-{self.quantization}-{self.kv}"


def expected(path: Path, dtype: str, quantization: str = "none", kv: str = "auto") -> list[Any]:
    """Return one rank's answers to both requests, each alone."""
    answers = alone(path, dtype, quantization=quantization, kv_cache_dtype=kv)
    return [[part[:NUM_TOKENS] for part in answer] for answer in answers]


def other_placement(engines: Engines, version: int) -> Placement:
    """Experts anywhere, those with more than one slot too."""
    now = engines.placement
    rng = np.random.default_rng(version)
    assert now is not None
    num_slots = now.experts_LS.shape[1]
    more_LX = rng.integers(0, now.num_experts, (now.num_layers, num_slots - now.num_experts))
    each_LE = np.tile(np.arange(now.num_experts), (now.num_layers, 1))
    experts_LS = rng.permuted(np.concatenate((each_LE, more_LX), axis=1), axis=1).astype(np.int32)
    return Placement(version, now.num_ranks, now.num_experts, experts_LS)


def crowd(engines: Engines, rank: int, num_requests: int) -> None:
    """Short prompts with answers that need another block soon."""
    rng = np.random.default_rng(rank)
    for _ in range(num_requests):
        sampling = TokenSampling(
            seed=int(rng.integers(99)), max_tokens=int(rng.integers(8, 12)), temperature=0.7
        )
        engines.submit(rank, rng.integers(3, 256, int(rng.integers(11, 16))).tolist(), sampling)


def ask(engines: Engines, rank: int) -> list[Answer]:
    return [engines.submit(rank, PROMPT, sampling) for sampling in SAMPLINGS]


async def play(path: Path, dtype: str, shape: Shape) -> None:
    """Run the requests in three situations and compare.

    The first is in a crowd, where the newest request is preempted while other engines are idle; the
    second while experts move; the third after all ranks rejoin elsewhere.
    """
    settings = {
        "dtype": dtype,
        "all2all": shape.backend,
        "dbo": shape.dbo,
        "ep": shape.ep,
        "redundant_experts": shape.redundant,
        "prefill_chunk": shape.chunk,
        "depth": shape.depth,
        "quantization": shape.quantization,
        "max_num_batched_tokens": 128,
        "kv_cache_dtype": shape.kv,
        **memory_of(NUM_BLOCKS, NUM_STATES, path, dtype, shape.kv, shape.tp),
    }
    async with Engines(path, shape.dp, shape.tp, **settings) as engines:
        last = shape.dp - 1
        crowd(engines, 0, 5)
        answers = ask(engines, 0)
        await engines.answered()
        assert sum(record.num_preempted for record in engines.records) > 0, (
            "the test tries less than it says"
        )
        crowd(engines, 0, 1)
        answers += ask(engines, last)
        if engines.deals and shape.backend != "local":
            await engines.place(other_placement(engines, 1))
            answers += ask(engines, 0)
            await engines.join(other_placement(engines, 2).to_table())
        await engines.answered()
        ubatches = {record.ubatches for record in engines.records}
    assert ubatches >= {2} if shape.dbo == "on" else ubatches == {1}
    assert {answer.finish for answer in answers} == {"length"}
    for first in range(0, len(answers), 2):
        wanted = expected(path, dtype, shape.quantization, shape.kv)
        assert [answer.bits for answer in answers[first : first + 2]] == wanted, (
            f"round {first // 2}"
        )


def rotating() -> list[tuple[str, str, Shape]]:
    """Return shapes in which each group size has each backend, and each family each dtype.

    Eight ranks use only the quickest backend.
    """
    sizes = [*itertools.product([(1, 2), (2, 1), (4, 1), (2, 2)], BACKENDS), ((4, 2), BACKENDS[-1])]
    cases = []
    for i, ((dp, tp), backend) in enumerate(sizes):
        dbo = "on" if (i + i // len(BACKENDS)) % 2 else "off"
        shape = Shape(
            dp,
            tp,
            backend,
            dbo,
            chunk=(64, 150, 31)[i % 3],
            redundant=(0, 3)[i // 2 % 2],
            depth=1 + i % 2,
            kv=("auto", "int8")[(i + 1) // 2 % 2],
        )
        cases.append((MOE[i % len(MOE)], DTYPES[i // len(MOE) % 2], shape))
    cases.append((MOE[0], "float32", Shape(backend="local", dbo="on")))
    return [*cases, (MOE[1], "bfloat16", Shape(tp=2, ep="off", chunk=40))]


def hybrids() -> list[tuple[str, str, Shape]]:
    """Models with recurrent layers and with index selectors; over two engines or two ranks of one,
    and over both.
    """
    cases = []
    for i, family in enumerate(HYBRIDS):
        dp, tp = [(2, 2), (2, 1), (1, 2)][i % 3]
        shape = Shape(
            dp,
            tp,
            BACKENDS[i % len(BACKENDS)],
            ("on", "off")[i // 3 % 2],
            chunk=(64, 150, 31)[i // 2 % 3],
            redundant=(3, 0)[i // 3 % 2],
            depth=2 - i % 2,
        )
        cases.append((family, DTYPES[i % 2], shape))
    return cases


@pytest.mark.parametrize(("family", "dtype", "shape"), rotating(), ids=str)
async def test_ranks_change_no_bit(
    family: str, dtype: str, shape: Shape, make_checkpoint: Any
) -> None:
    await play(make_checkpoint(family).path, dtype, shape)


@pytest.mark.full("ranks", keep="each")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", DENSE)
async def test_ranks_change_no_bit_of_dense_models(
    family: str, dtype: str, make_checkpoint: Any
) -> None:
    await play(make_checkpoint(family).path, dtype, Shape(tp=2))


@pytest.mark.full("ranks", keep=2)
@pytest.mark.parametrize(("family", "dtype", "shape"), hybrids(), ids=str)
async def test_ranks_change_no_bit_of_states_and_selections(
    family: str, dtype: str, shape: Shape, make_checkpoint: Any
) -> None:
    await play(make_checkpoint(family).path, dtype, shape)


@pytest.mark.skipif(native() is None, reason="needs the native kernels")
@pytest.mark.parametrize(
    ("family", "dtype", "shape"),
    [
        ("qwen3_moe", "float32", Shape(2, 1, "shm", "on", quantization="int4", redundant=3)),
        ("qwen2_moe", "bfloat16", Shape(2, 2, "torch", quantization="int8", chunk=31)),
    ],
    ids=str,
)
async def test_ranks_change_no_bit_of_quantized_weights(
    family: str, dtype: str, shape: Shape, make_checkpoint: Any
) -> None:
    await play(make_checkpoint(family).path, dtype, shape)


@pytest.mark.skipif(native() is None, reason="needs the native kernels")
@pytest.mark.parametrize("form", ["int4 with zero points", "fp8 in blocks"])
async def test_ranks_change_no_bit_of_a_quantized_checkpoint(
    form: str, make_checkpoint: Any, tmp_path: Path
) -> None:
    quantized, _ = write_quantized(make_checkpoint("qwen3_moe").path, tmp_path, FORMS[form])
    await play(quantized, "bfloat16", Shape(2, 2, "shm", redundant=3))


@pytest.mark.parametrize("dp", [3, 6])
async def test_ranks_that_experts_cannot_be_sharded_over_evenly(
    dp: int, make_checkpoint: Any
) -> None:
    """There are four experts: some ranks get replicas, because they would have none otherwise."""
    path = make_checkpoint("mixtral", num_local_experts=4).path
    await play(path, "bfloat16", Shape(dp, backend=BACKENDS[-1], redundant=1))


@pytest.mark.parametrize(
    ("family", "backend", "dbo", "tp", "kv"),
    [
        ("qwen3_moe", "torch", "off", 1, "auto"),
        ("qwen3_moe", "torch", "on", 1, "int8"),
        ("qwen3_moe", BACKENDS[-1], "on", 2, "auto"),
        ("granite_moe_hybrid", BACKENDS[-1], "off", 1, "auto"),
    ],
)
async def test_losses_at_any_moment(
    family: str, backend: str, dbo: str, tp: int, kv: str, make_checkpoint: Any
) -> None:
    """One rank drops its connections in the middle of whatever runs, also of moving experts; blocks
    that were evicted come back from host memory."""
    path = make_checkpoint(family).path
    rng = np.random.default_rng(0)
    memory = memory_of(NUM_BLOCKS, NUM_STATES, path, "float32", kv, tp)
    settings = {
        "all2all": backend,
        "dbo": dbo,
        **memory,
        "host_store_bytes": 2 * memory["kv_cache_bytes"],
    }
    settings |= {"kv_cache_dtype": kv}
    async with Engines(
        path, 2, tp, dtype="float32", max_num_batched_tokens=64, **settings
    ) as engines:
        answers = []
        for number in range(6):
            crowd(engines, number % 2, 4)
            answers += ask(engines, number // 2 % 2)
            await asyncio.sleep(rng.uniform(0, 0.15))
            if number % 3 == 2:
                for engine in engines.engines:
                    engine.inbox.put(
                        UpdatePlacement(other_placement(engines, number).to_table()), force=True
                    )
                await asyncio.sleep(rng.uniform(0, 0.02))
            engines.engines[rng.integers(2)].model.leave()
            crowd(engines, 0, 1)  # all may be done by now, and only a step meets what is gone
            await engines.until_left()
            await engines.join()
        await engines.answered()
    for first in range(0, len(answers), 2):
        wanted = expected(path, "float32", kv=kv)
        assert [answer.bits for answer in answers[first : first + 2]] == wanted, (
            f"round {first // 2}"
        )


ALL = [
    Shape(dp, tp, backend, dbo, redundant=redundant)
    for dp, tp, backend, (dbo, redundant) in itertools.product(
        (1, 2, 4), (1, 2), BACKENDS, (("off", 3), ("on", 0))
    )
    if dp * tp > 1
]


@pytest.mark.full("shapes")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("families", [MOE, HYBRIDS], ids=["attention", "hybrids"])
@pytest.mark.parametrize("shape", ALL, ids=str)
async def test_everything_with_everything(
    shape: Shape, families: list[str], make_checkpoint: Any
) -> None:
    for family, dtype in itertools.product(families, DTYPES):
        await play(make_checkpoint(family).path, dtype, shape)


@pytest.mark.full("ranks", keep=2)
@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 2, "all2all": "auto", "dbo": "on"},
        {"tp": 2, "all2all": "torch", "redundant_experts": 2},
        {"dp": 2, "ep": "off"},
    ],
    ids=str,
)
def test_processes_change_no_bit(settings: dict[str, Any], make_checkpoint: Any) -> None:
    """Requests go through the package's public interface."""
    path = make_checkpoint("qwen3_moe").path
    common = {"dtype": "bfloat16", "skip_tokenizer_init": True, "threads": 1, "max_model_len": 256}
    params = [msgspec.structs.replace(one, max_tokens=NUM_TOKENS) for one in PARAMS]
    with LLM(str(path), kv_cache_bytes=1 << 22, **common, **settings) as llm:
        outputs = llm.generate([prompt_of(PROMPT)] * 4, params * 2)
    assert [bits(output) for output in outputs] == expected(path, "bfloat16") * 2
