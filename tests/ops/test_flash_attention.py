"""Attention by FlashAttention-3: the adapter over a stand-in that has the package's recorded
signature and checks what its own host code checks (hopper/flash_api.cpp); and when it is chosen.
The package itself runs on Hopper alone."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from moeserve.config import CacheConfig, config_of
from moeserve.errors import ConfigError
from moeserve.kernels import configs, flash_attention, tuning
from moeserve.kernels.attention_plan import Bounds
from moeserve.kernels.flash_attention import FlashMetadata, misfit
from moeserve.kernels.paged_attention import MAX_SPACE_FLOATS, AttentionShape, shape_of
from moeserve.models.hf_config import read_model_spec
from moeserve.ops.inputs import HeadShape
from moeserve.ops.pick import pick_ops
from moeserve.ops.probe import host_step
from moeserve.ops.table import Ops
from moeserve.ops.triton_ops import with_flash_attention
from moeserve.runner.cpu import CPUModelRunner
from tests.kernels.device import DEVICE
from tests.kernels.test_paged_attention import Step, close
from tests.runner.harness import Driver, Request, greedy

# `flash_attn_with_kvcache` of hopper/flash_attn_interface.py, by commit.
OLD = {
    "a5a75274, October 2024": (
        "q, k_cache, v_cache, cache_seqlens=None, cache_batch_idx=None, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), num_splits=0, return_softmax_lse=False, "
        "gqa_parallel=None, max_seqlen_k_hint=None, descale_q=None, descale_k=None, "
        "descale_v=None"
    ),
    "5458c78e, March 2025": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, q_descale=None, "
        "k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "softcap=0.0, rotary_interleaved=True, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False"
    ),
}
NEW = (  # 3.0.0, at 0251105a, August 2026
    "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
    "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
    "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
)
H100 = configs.DeviceFacts("NVIDIA H100 80GB HBM3", 132)
FOUND: list[tuple[int, int]] = []  # rows of each call, and the most new tokens of one


def recorded(parameters: str) -> Any:
    space: dict[str, Any] = {}
    exec(f"def {flash_attention.FUNCTION}({parameters}): ...", space)
    return space[flash_attention.FUNCTION]


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, qv: Tensor | None, cache_seqlens: Tensor,
    page_table: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool,
    window_size: tuple[int, int], attention_chunk: int, softcap: float, num_splits: int,
) -> Tensor:  # fmt: skip
    """The definition, row by row. What no row owns is as it was allocated."""
    (tokens, heads, d), (pages, size, kv_heads, v_d), rows = q.shape, v_cache.shape, len(page_table)
    floats = [q, k_cache, v_cache, *([] if qv is None else [qv])]
    integers = [cache_seqlens, page_table, cu_seqlens_q]
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert {x.dtype for x in floats} == {q.dtype}
    assert {x.dtype for x in integers} == {torch.int32}
    assert {x.device for x in floats + integers} == {q.device}
    assert all(x.stride(-1) == 1 for x in floats + integers)
    assert cache_seqlens.is_contiguous()
    assert cu_seqlens_q.is_contiguous()
    assert k_cache.shape == (pages, size, kv_heads, d)
    assert (cache_seqlens.shape, cu_seqlens_q.shape, page_table.ndim) == ((rows,), (rows + 1,), 2)
    assert heads % kv_heads == 0
    assert d % 8 == v_d % 8 == 0
    assert d <= 256
    assert d == v_d or (128 < d <= 192 and 96 < v_d <= 128) or (d <= 64 and v_d <= 512)
    assert qv is None or (qv.shape == (tokens, heads, v_d) and d <= 64 and v_d >= 256)
    assert type(max_seqlen_q) is int
    assert 1 <= num_splits <= 256
    assert num_splits * tokens * heads * v_d <= max(MAX_SPACE_FLOATS, tokens * heads * v_d)
    assert causal
    assert window_size[1] in (-1, 0)
    FOUND.append((rows, max_seqlen_q))
    out = torch.full((tokens, heads, v_d), torch.nan, dtype=q.dtype, device=q.device)
    for row, length in enumerate(cache_seqlens.tolist()):
        first, end = cu_seqlens_q[row : row + 2].tolist()
        assert end - first <= max_seqlen_q
        if end == first:
            continue
        used = page_table[row, : -(-length // size)].long()
        k, v = (c[used].flatten(0, 1)[:length].float() for c in (k_cache, v_cache))
        k, v = (c.repeat_interleave(heads // kv_heads, 1) for c in (k, v))
        scores = torch.einsum("thd,lhd->htl", q[first:end].float(), k)
        if qv is not None:
            scores += torch.einsum("thd,lhd->htl", qv[first:end].float(), v.nan_to_num())
        scores *= softmax_scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        keys = torch.arange(length, device=q.device)
        queries = (torch.arange(first, end, device=q.device) + length - end)[:, None]
        hidden = keys > queries
        if window_size[0] >= 0:
            hidden |= keys < queries - window_size[0]
        if attention_chunk:
            hidden |= keys < queries // attention_chunk * attention_chunk
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[first:end] = torch.einsum(
            "htl,lhd->thd", probs, v.masked_fill(hidden.all(0)[:, None, None], 0)
        ).to(q.dtype)
    return out


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """In place of the package."""
    signature = inspect.signature(recorded(NEW))

    def called(*args: Any, **options: Any) -> Tensor:
        given = signature.bind(*args, **options).arguments
        assert set(given) == set(flash_attention.NEEDED), "the stand-in knows no options"
        return attend(**given)

    called.__signature__ = signature  # type: ignore[attr-defined]
    made = SimpleNamespace(**{flash_attention.FUNCTION: called})
    monkeypatch.setattr(
        flash_attention, "PACKAGE", "stand_in_for_flash_attn"
    )  # the name itself transformers looks for
    monkeypatch.setitem(sys.modules, flash_attention.PACKAGE, made)
    monkeypatch.setattr(configs, "_folders", [configs.FOLDER])
    FOUND.clear()
    caches = flash_attention.unsupported_reason, configs.table
    for cached in caches:
        cached.cache_clear()
    yield made
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def as_on_hopper(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the device look like a Hopper GPU."""
    monkeypatch.setattr(flash_attention, "unsupported_reason", lambda device: None)


def flash_plan(step: Step, padded: bool) -> FlashMetadata:
    ends = map(sum, zip(step.starts, step.news, strict=True))
    bounds = Bounds(len(step.news), max(1, sum(step.news)), max(step.news), max(ends))
    where = step.blocks, *step.rows(), step.shape, bounds
    return flash_attention.plan_attention(*where, tokens=len(step.q), padded=padded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim", "size", "window", "chunk", "soft_cap"),
    [
        (8, 2, 64, 64, 16, None, None, 0.0),
        (6, 2, 24, 24, 16, 40, None, 5.0),
        (2, 2, 256, 256, 32, 1, None, 0.0),
        (4, 1, 192, 128, 16, None, None, 0.0),
        (4, 4, 128, 128, 64, None, 48, 0.0),
        (4, 1, 576, 512, 16, None, None, 0.0),
        (3, 1, 264, 256, 1, None, None, 0.0),
    ],
)
def test_attention(
    heads: int, kv_heads: int, dim: int, v_dim: int, size: int, window: int | None,
    chunk: int | None, soft_cap: float, dtype: torch.dtype, package: Any,
) -> None:  # fmt: skip
    """Prefill and decode, alone and mixed, against the reference, with two tokens of padding."""
    shape = AttentionShape(heads, kv_heads, dim, v_dim, size, dtype, window, chunk)
    for starts, news in (([600, 0, 100, 130], [1, 0, 20, 2]), ([70, 7], [1, 1]), ([0], [90])):
        step = Step(shape, starts, news)
        step.q *= dim**-0.5
        if dim > 256:
            step.share()
        options: Any = {"soft_cap": soft_cap}
        expected = step.expected(**options)
        out = torch.full((len(step.q), heads * v_dim), torch.nan, dtype=dtype)
        got = flash_attention.attention(
            step.q, step.k, step.v, flash_plan(step, padded=True), out=out, **options
        )
        assert got is out
        torch.testing.assert_close(
            got, expected, rtol=2e-2, atol=1e-2 if dtype == torch.bfloat16 else 2e-3
        )
        assert not got[-2:].any()
        plan = flash_plan(step, padded=False)
        alone = flash_attention.attention(step.q, step.k, step.v, plan, **options)
        assert torch.equal(alone[:-2], got[:-2])
        assert plan.padding_T is None


def test_parts_of_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are split to keep the device busy if the longest row is alone.

    There are no more parts than the workspace has room for.
    """
    monkeypatch.setattr(flash_attention, "facts_of", lambda device: H100)

    def splits(heads: int, kv_heads: int, dim: int, v_dim: int, rows: int, new: int) -> int:
        shape = AttentionShape(heads, kv_heads, dim, v_dim, 16, torch.bfloat16)
        blocks = torch.zeros((rows, 9), dtype=torch.int32)
        starts = torch.zeros(rows, dtype=torch.int32)
        offsets = torch.arange(rows + 1, dtype=torch.int32) * new
        bounds = Bounds(rows, rows * new, new, 9999)
        return flash_attention.plan_attention(
            blocks, starts, offsets, shape, bounds, tokens=rows * new
        ).splits

    assert splits(32, 4, 128, 128, 64, 1) == 33
    assert splits(32, 4, 128, 128, 1, 2048) == 1
    assert splits(16, 1, 576, 512, 1, 1) == 128
    assert splits(128, 1, 576, 512, 8, 1) == 128
    assert splits(128, 1, 576, 512, 512, 1) == MAX_SPACE_FLOATS // (512 * 128 * 512) == 2
    assert splits(128, 1, 576, 512, 1, 4) == 33
    assert splits(8, 8, 64, 64, 1, 8192) == 1


def test_nothing_asks_the_device(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a step can be recorded, with the padding of that time."""
    asked: list[str] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked.append(str(func))
            return func(*args, **(kwargs or {}))

    step = Step(AttentionShape(4, 2, 64, 64, 16, torch.float16, 40), [600, 0], [1, 5])
    monkeypatch.setattr(package, flash_attention.FUNCTION, lambda **given: given["q"].clone())
    rows = step.rows()
    monkeypatch.setattr(step, "rows", lambda: rows)
    with Watch():  # type: ignore[no-untyped-call]
        flash_attention.attention(
            step.q, step.k, step.v, flash_plan(step, padded=True), out=torch.empty(8, 256).half()
        )
    assert any("masked_fill" in name for name in asked)
    assert not [
        name
        for name in asked
        if "_local_scalar_dense" in name or "nonzero" in name or "index" in name
    ]


def test_which_heads_fit() -> None:
    for sizes in ((64, 64), (128, 128), (256, 256), (192, 128), (8, 8)):
        assert not misfit(*sizes)
    for sizes in ((576, 512), (320, 256)):
        assert not misfit(*sizes, latent=True)
        assert misfit(*sizes)
    assert misfit(512, 512) == "FlashAttention-3 does not support heads of width 512"
    assert misfit(60, 60) == "FlashAttention-3 does not support heads of width 60"
    assert misfit(24, 16) == "FlashAttention-3 does not support heads of width 24 and 16"
    assert (
        misfit(40, 32, latent=True)
        == "FlashAttention-3 does not support latents of width 40 and 32"
    )
    assert misfit(128, 128, sinks=True) == "FlashAttention-3 does not support attention sinks"


def test_what_is_in_the_way(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")

    def why(device: torch.device = cuda) -> str:
        flash_attention.unsupported_reason.cache_clear()
        return str(flash_attention.unsupported_reason(device))

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why() == "None"
    assert why(torch.device("cpu")) == "FlashAttention-3 is supported on Hopper only, not on cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "Hopper only" in why()
    for parameters, missing in zip(OLD.values(), ("qv", "attention_chunk"), strict=True):
        old = SimpleNamespace(**{flash_attention.FUNCTION: recorded(parameters)})
        monkeypatch.setitem(sys.modules, flash_attention.PACKAGE, old)
        assert f"does not take {missing}; install FlashAttention 3.0.0" in why()
    monkeypatch.setitem(sys.modules, flash_attention.PACKAGE, SimpleNamespace())
    assert "does not take q;" in why()
    monkeypatch.setitem(sys.modules, flash_attention.PACKAGE, None)
    assert "cannot be imported: ModuleNotFoundError" in why()


HEADS = HeadShape(4, 2, 64, 64)
NEEDS: dict[str, Any] = {"cache": CacheConfig(), "required": True, "misfit": ""}


def triton_ops(dtype: torch.dtype = torch.float16, exact: bool = False) -> Ops:
    return pick_ops(DEVICE, dtype, "triton", exact=exact)


def test_a_table_that_cannot_have_it_says_so(
    as_on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by name it is not replaced in silence; else all stays as it was."""
    fast = triton_ops()
    for ops, changes, said in (
        (triton_ops(exact=True), {}, "use --determinism fast"),
        (triton_ops(torch.float32), {}, "float16, not in torch.float32"),
        (
            fast,
            {"cache": CacheConfig(kv_cache_dtype="int8")},
            "does not support a KV cache in int8",
        ),
        (
            fast,
            {"cache": CacheConfig(block_size=64)},
            "beyond the end of a context in blocks of 64",
        ),
        (
            fast,
            {"misfit": "FlashAttention-3 does not support attention sinks"},
            "FlashAttention-3 does not support attention sinks",
        ),
    ):
        with pytest.raises(
            ConfigError, match=f"attention_backend=fa3: .*{said}.*choose attention_backend: auto"
        ):
            with_flash_attention(ops, **(NEEDS | changes))
        assert with_flash_attention(ops, **(NEEDS | changes | {"required": False})) is ops
    assert "attention: fa3" in with_flash_attention(fast, **NEEDS).description
    monkeypatch.setattr(flash_attention, "unsupported_reason", lambda device: "not here")
    with pytest.raises(ConfigError, match="attention_backend=fa3: not here"):
        with_flash_attention(fast, **NEEDS)


def test_it_runs_where_it_was_measured_to_be_faster(as_on_hopper: None, tmp_path: Path) -> None:
    """The choice is by the tokens of a step's longest row.

    Batch-invariant kernels read the same table and must ignore it.
    """
    configs.add_folder(tmp_path)
    shape = AttentionShape(4, 2, 64, 64, 16, torch.float16)
    latent = AttentionShape(128, 1, 576, 512, 16, torch.float16)
    asked = NEEDS | {"required": False}
    for kept in (shape, latent):
        sizes = {16: {"num_warps": 4}, 64: flash_attention.FASTER, 128: flash_attention.FASTER}
        configs.save(
            "paged_attention",
            configs.facts_of(DEVICE).name,
            shape_of(kept, torch.float16),
            sizes,
            tmp_path,
        )
    configs.table.cache_clear()
    wins = [flash_attention.is_faster(DEVICE, shape, new) for new in (1, 8, 9, 500)]
    assert wins == [False, False, True, True]
    assert [flash_attention.is_faster(DEVICE, latent, new) for new in (1, 2)] == [
        True,
        False,
    ]  # the other was not measured
    ops = with_flash_attention(triton_ops(), **asked)
    assert "attention: fa3 where `moeserve tune` found" in ops.description
    exact = triton_ops(exact=True)
    assert with_flash_attention(exact, **asked) is exact
    for news, calls in (([1, 20], 1), ([1, 2], 0)):
        step = Step(shape, [40, 0], news)
        group, inputs = host_step(step.blocks, 16, step.starts, np.cumsum([0, *news]).tolist())
        inputs = replace(
            inputs, rows_on_device=step.rows(), ids_T=torch.zeros(len(step.q), dtype=torch.int64)
        )
        FOUND.clear()
        plan = ops.plan_attention(group, inputs, HEADS)
        found = ops.attention(step.q, step.k, step.v, plan)
        assert len(FOUND) == calls
        close(found[: sum(news)], step.expected()[: sum(news)])


def test_tuning_times_it_beside_ours(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(tuning, "CONTEXT_LENGTH", 64)
    monkeypatch.setattr(tuning, "DECODE_ROWS", 2)
    monkeypatch.setattr(tuning, "PREFILL_TOKENS", 40)
    shape = AttentionShape(4, 2, 64, 64, 16, torch.float16)
    assert {job.rival for job in tuning.attention_jobs(shape, DEVICE)} == {None}
    monkeypatch.setattr(flash_attention, "unsupported_reason", lambda device: None)
    jobs = {job.size: job for job in tuning.attention_jobs(shape, DEVICE)}
    assert {size: job.rival for size, job in jobs.items()} == {
        16: flash_attention.FASTER,
        64: None,
        128: flash_attention.FASTER,
    }
    for size, call in ((16, (2, 1)), (128, (1, 40))):
        job = jobs[size]
        ours = job.run(job.default).clone()
        assert not FOUND
        close(job.run({**job.default, **flash_attention.FASTER}), ours)
        assert [call] == FOUND
        FOUND.clear()
    wide = AttentionShape(4, 2, 20, 20, 16, torch.float16)
    assert {job.rival for job in tuning.attention_jobs(wide, DEVICE)} == {None}


no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there it may be installed, Triton is not interpreted"
)


def runner_of(path: Path, **settings: Any) -> Driver:
    usual = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "prefill_chunk": 8,
        "kv_cache_bytes": 1 << 22,
    }
    config = config_of(path, **(usual | {"dtype": "float16", "kernels": "triton"} | settings))
    runner = CPUModelRunner(config, read_model_spec(path), path)
    runner.prepare()
    return Driver(runner)


def serve(driver: Driver) -> list[Request]:
    """Run a prompt in chunks, others beside it, and single tokens."""
    rng = np.random.default_rng(3)
    a, b, c = requests = [Request(rng.integers(1, 200, n).tolist(), greedy()) for n in (22, 5, 4)]
    driver.add(a)
    driver.run([(a, 17)])
    driver.add(b)
    driver.add(c)
    driver.run([(a, 5), (b, 5), (c, 3)])
    driver.run([(a, 1), (b, 1), (c, 1)])
    driver.run([(c, 1), (a, 1)])
    return requests


def assert_close(found: Sequence[Request], expected: Sequence[Request]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.output == other.output
        for logits, wanted in zip(one.logits, other.logits, strict=True):
            assert (logits - wanted).norm() <= 2e-2 * wanted.norm()


LATENT = {"kv_lora_rank": 256, "qk_rope_head_dim": 64}


@no_gpu
@pytest.mark.full("models", keep=2)
@pytest.mark.parametrize(
    ("family", "sizes", "graphs"),
    [
        ("qwen3_moe", {"num_hidden_layers": 1}, "full"),
        ("mistral", {"num_hidden_layers": 1, "sliding_window": 12}, "piecewise"),
        ("llama4_text", {"num_hidden_layers": 1, "attention_chunk_size": 16}, "off"),
        ("deepseek_v2", {"num_hidden_layers": 1, **LATENT}, "full"),
    ],
    ids=["plain", "windows", "chunks", "latents"],
)
def test_a_whole_model(
    family: str, sizes: dict[str, Any], graphs: str, as_on_hopper: None, make_checkpoint: Any
) -> None:
    """Chunked prefill, decode and mixed steps, with and without graphs, agree with Triton."""
    path = make_checkpoint(family, **sizes).path
    found = serve(runner_of(path, attention_backend="fa3", graphs=graphs))
    assert {new for _, new in FOUND} >= {1, 5, 17}
    assert_close(found, serve(runner_of(path, attention_backend="triton")))


@no_gpu
@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("gpt_oss", {"kernels": "triton"}, "FlashAttention-3 does not support attention sinks"),
        (
            "deepseek_v2",
            {"kernels": "triton"},
            "FlashAttention-3 does not support latents of width 40 and 32",
        ),
        (
            "qwen3_moe",
            {"kernels": "triton", "kv_cache_dtype": "int8"},
            "does not support a KV cache in int8",
        ),
        ("qwen3_moe", {"kernels": "triton", "determinism": "batch"}, "use --determinism fast"),
        ("qwen3_moe", {"kernels": "triton"}, "cannot be imported"),
        ("qwen3_moe", {"kernels": "torch"}, "needs Triton kernels, but the kernels here are"),
    ],
)
def test_a_model_is_refused(
    family: str, settings: dict[str, Any], said: str, make_checkpoint: Any
) -> None:
    with pytest.raises(ConfigError, match=said):
        runner_of(make_checkpoint(family).path, attention_backend="fa3", **settings)


@no_gpu
def test_a_model_is_served_without_it(
    make_checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "moeserve.ops"):
        runner_of(make_checkpoint("qwen3_moe").path)
    assert "attention by Triton, not fa3: flash_attn_interface cannot be imported" in caplog.text
