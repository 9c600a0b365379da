"""The number of KV blocks and the context length for many cases, and reading memory limits."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeserve.config import Limits, config_of
from moeserve.engine.blocks import KVGroup, groups_of
from moeserve.engine.kv_rule import KVRule
from moeserve.errors import ConfigError, DoesNotFit
from moeserve.runner.host_memory import host_memory
from moeserve.runner.kv_cache import KVCache, block_bytes
from moeserve.runner.kv_transport import page_locked
from moeserve.runner.limits import (
    MemoryFacts,
    blocks_for,
    check_weights_fit,
    kv_budget,
    longest_context,
    resolve,
    with_step_tokens,
)
from tests.runner.harness import spec_of

GIB = 2**30
FULL = (KVGroup(KVRule(), 16, (0, 1)),)
HYBRID = groups_of((KVRule(), KVRule(64), KVRule(), KVRule(64)), 16)


def plan(
    budget: int, max_position: int, *, groups: Any = FULL, fill: bool = False, **settings: Any
) -> tuple[Limits, tuple[str, ...]]:
    """Limits and notes for blocks of 1,000 bytes."""
    values = {"max_num_seqs": 8, "block_size": 16, "prefill_chunk": 256, "watermark": 0.0}
    config = with_step_tokens(config_of(None, **(values | settings)), 2048)
    return resolve(config, spec_of(max_position=max_position), groups, 1000, budget, fill=fill)


@pytest.mark.parametrize(
    ("limit", "used", "free", "workspace", "expected"),
    [
        (100, 10, 90, 5, 75),  # 0.9 * 100 - 10 - 5
        (100, 10, 40, 5, 31),  # others use memory: 0.9 * 40 - 5
        (100, 95, 5, 0, 0),
        (100, 10, 90, 200, 0),
    ],
)
def test_the_budget_is_what_is_left(
    limit: int, used: int, free: int, workspace: int, expected: int
) -> None:
    assert kv_budget(MemoryFacts(limit, used, free), 0.9, workspace) == expected


def test_weights_in_a_file_are_not_free_memory() -> None:
    """The system reports 60 as free.

    Of these, 20 are pages of a file that every step reads.
    """
    assert kv_budget(MemoryFacts(100, 30, 60), 0.9, 5, mapped=20) == 31  # 0.9 * 40 - 5
    assert kv_budget(MemoryFacts(100, 30, 10), 0.9, 5, mapped=20) == 0


def test_ranks_of_one_host_share_its_memory() -> None:
    """Each of four counts what it uses itself against a quarter of the limit."""
    host = MemoryFacts(limit=400, used=30, free=300)
    assert host.shared(1) == host
    assert host.shared(4) == MemoryFacts(limit=100, used=30, free=75)
    assert kv_budget(host.shared(4), 0.9, 5) == 55  # 0.9 * 100 - 30 - 5
    assert 4 * (kv_budget(host.shared(4), 0.9, 5) + 5) <= 0.9 * host.free


def test_weights_that_cannot_fit_are_refused_before_loading() -> None:
    check_weights_fit(100, MemoryFacts(200, 0, 100))
    check_weights_fit(90, MemoryFacts(200, 0, 100), while_loading=10)
    with pytest.raises(DoesNotFit, match=r"take 0.00 MiB and 0.00 MiB more until they are loaded"):
        check_weights_fit(90, MemoryFacts(200, 0, 100), while_loading=11)
    with pytest.raises(
        DoesNotFit, match=r"this process loads take 2.00 MiB, but only 1.00 MiB of memory are free"
    ):
        check_weights_fit(2 << 20, MemoryFacts(4 << 20, 0, 1 << 20))


def test_a_shared_host_gives_what_requests_can_use() -> None:
    limits, notes = plan(GIB, 1 << 20, max_model_len=1024)
    assert limits.num_blocks == 8 * 64 + 1 + 1
    assert limits.max_model_len == 1024
    assert notes == ()


def test_a_long_context_is_not_provided_for_every_request() -> None:
    limits, _ = plan(GIB, 100_000)
    assert limits.max_model_len == 100_000
    assert 100_000 // 16 < limits.num_blocks < 100_000 // 16 + 5
    small, _ = plan(GIB, 100_000, max_num_seqs=100)
    assert 100 * 4096 // 16 < small.num_blocks < 100 * 4096 // 16 + 5


def test_a_device_of_our_own_is_filled() -> None:
    assert plan(999_999, 64, max_model_len=64, fill=True)[0].num_blocks == 999


def test_the_models_context_is_reduced_to_what_fits_and_said_so() -> None:
    limits, notes = plan(50_500, 4096)
    assert (limits.num_blocks, limits.max_model_len) == (50, 49 * 16)
    assert "reduced from 4096 to 784" in notes[0]


def test_a_context_that_was_asked_for_is_refused_with_the_one_that_fits() -> None:
    with pytest.raises(
        DoesNotFit, match=r"max_model_len=4096 needs .* max_model_len=784 would fit"
    ):
        plan(50_500, 8192, max_model_len=4096)
    assert plan(50_500, 8192, max_model_len=784)[0].max_model_len == 784
    with pytest.raises(DoesNotFit, match="max_model_len=784 would fit"):
        plan(50_500, 8192, max_model_len=785)


def test_kv_bytes_that_were_asked_for_are_taken_or_refused() -> None:
    assert plan(50_000, 64, kv_cache_bytes=30_999)[0].num_blocks == 30
    with pytest.raises(DoesNotFit, match="at most 50000"):
        plan(50_000, 64, kv_cache_bytes=50_001)


def test_what_a_context_needs_beside_its_blocks_is_subtracted() -> None:
    """A block of 16 tokens has 1,000 bytes, and a token 1,000 more."""

    def longest(budget: int, **settings: Any) -> int:
        asked = with_step_tokens(config_of(None, max_num_seqs=1, watermark=0.0, **settings), 256)
        spec = spec_of(max_position=4096)
        limits, _ = resolve(
            asked, spec, FULL, 1000, budget, fill=False, beside=lambda tokens: 1000 * tokens
        )
        assert 1000 * (limits.num_blocks + limits.max_model_len) <= budget
        return limits.max_model_len

    assert longest(10_000_000) == 4096
    assert longest(101_000) == 94  # six blocks, the null block, and 94 tokens
    assert longest(110_000) == 102
    assert longest(101_000, max_model_len=94) == 94
    with pytest.raises(DoesNotFit, match="max_model_len=94 would fit"):
        longest(101_000, max_model_len=95)
    assert longest(101_000, kv_cache_bytes=21_000) == 80
    with pytest.raises(DoesNotFit, match="at most 100000"):
        longest(101_000, kv_cache_bytes=100_001)


@pytest.mark.parametrize("watermark", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("budget", [0, 999, 1500])
def test_no_room_for_one_block_is_refused_with_the_least_that_helps(
    budget: int, groups: tuple[KVGroup, ...], watermark: float
) -> None:
    with pytest.raises(DoesNotFit, match="cannot hold even one block") as refused:
        plan(budget, 4096, groups=groups, watermark=watermark)
    numbers = re.findall(r"([\d,]+) is the least", str(refused.value))
    least = int(numbers[0].replace(",", ""))
    assert plan(least, 4096, groups=groups, watermark=watermark)[0].max_model_len >= 16
    with pytest.raises(DoesNotFit):
        plan(least - 1, 4096, groups=groups, watermark=watermark)


@pytest.mark.parametrize("watermark", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("budget", [20_000, 100_000, 10_000_000])
def test_whatever_is_promised_fits_beside_null_block_and_watermark(
    groups: tuple[KVGroup, ...], budget: int, watermark: float
) -> None:
    limits, _ = plan(budget, 4096, groups=groups, watermark=watermark)
    usable = limits.num_blocks - 1 - limits.watermark_blocks
    assert limits.num_blocks * 1000 <= budget
    assert blocks_for(groups, limits.max_model_len, 256) <= usable
    assert (
        limits.max_model_len == 4096 or blocks_for(groups, limits.max_model_len + 1, 256) > usable
    )


def test_a_window_group_needs_no_more_than_window_and_chunk() -> None:
    window = (groups_of((KVRule(64),), 16)[0],)
    assert longest_context(window, blocks_for(window, 10**6, 256), 256, 10**6) == 10**6
    assert longest_context(FULL, 10, 256, 10**6) == 160
    assert longest_context(FULL, 0, 256, 10**6) == 0


def write_cgroup(root: Path, path: str, **files: str) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_smallest_control_group_limit_counts(tmp_path: Path) -> None:
    write_cgroup(
        tmp_path,
        "a",
        memory__max=f"{2 * GIB}\n",
        memory__current=f"{GIB}\n",
        memory__stat="file 7\n",
    )
    write_cgroup(
        tmp_path,
        "a/b",
        memory__max="max\n",
        memory__current=f"{GIB}\n",
        memory__stat="inactive_file 1\n",
    )
    (tmp_path / "membership").write_text("0::/a/b\n")
    facts = host_memory(tmp_path, tmp_path / "membership")
    assert (facts.limit, facts.free) == (2 * GIB, GIB)
    write_cgroup(tmp_path, "a", memory__stat=f"inactive_file {GIB // 4}\nactive_file {GIB // 4}\n")
    assert host_memory(tmp_path, tmp_path / "membership").free == GIB + GIB // 2


def test_the_limit_that_slows_a_group_down_counts_like_the_one_that_kills(tmp_path: Path) -> None:
    write_cgroup(
        tmp_path,
        "pod/container",
        memory__max=f"{4 * GIB}\n",
        memory__high=f"{3 * GIB}\n",
        memory__current=f"{GIB}\n",
        memory__stat="",
    )
    (tmp_path / "membership").write_text("0::/pod/container\n")
    facts = host_memory(tmp_path, tmp_path / "membership")
    assert (facts.limit, facts.free) == (3 * GIB, 2 * GIB)
    # The pod has another container, and less memory left.
    write_cgroup(
        tmp_path,
        "pod",
        memory__max="max\n",
        memory__high=f"{2 * GIB}\n",
        memory__current=f"{2 * GIB - 5}\n",
        memory__stat="",
    )
    facts = host_memory(tmp_path, tmp_path / "membership")
    assert (facts.limit, facts.free) == (2 * GIB, 5)


def test_control_groups_version_1_are_read_too(tmp_path: Path) -> None:
    write_cgroup(
        tmp_path,
        "memory/x",
        memory__limit_in_bytes=f"{GIB}",
        memory__usage_in_bytes="1000",
        memory__stat="",
    )
    (tmp_path / "membership").write_text("5:cpu,memory:/x\n4:pids:/x\n")
    facts = host_memory(tmp_path, tmp_path / "membership")
    assert (facts.limit, facts.free) == (GIB, GIB - 1000)


def test_without_control_groups_it_is_the_machine(tmp_path: Path) -> None:
    facts = host_memory(tmp_path, tmp_path / "missing")
    assert 0 < facts.free <= facts.limit
    assert 0 < facts.used < facts.limit


def test_block_bytes_are_what_the_cache_allocates() -> None:
    spec = spec_of(num_layers=4, windows=(None, 64, None, 64), num_kv_heads=3, head_dim=8)
    for dtype, width in ((torch.float32, 8), (torch.bfloat16, 8), (torch.int8, 12)):
        cache = KVCache(HYBRID, spec, 10, dtype, torch.device("cpu"))
        tensors = {t.data_ptr(): t for layer in cache.layers for t in layer}
        assert len(tensors) == 4
        assert sum(t.nbytes for t in tensors.values()) == 10 * block_bytes(HYBRID, spec, dtype)
        assert all(t.dtype == dtype and t.shape == (10, 16, 3, width) for t in tensors.values())
        assert not any(t.any() for t in tensors.values())


def test_layers_of_a_draft_model_have_memory_of_their_own() -> None:
    """A draft model may write to blocks that its request has returned and other layers use."""
    spec = spec_of(num_layers=3, windows=(None, 64, 64))
    spec = spec.with_drafter((spec.layers[0],))
    groups = groups_of((*spec.kv_rules, KVRule()), 16)
    assert [group.layers for group in groups] == [(0, 3), (1, 2)]
    cache = KVCache(groups, spec, 10, torch.float32, torch.device("cpu"))
    ours = {tensor.data_ptr() for layer in cache.layers for tensor in layer}
    drafts = {tensor.data_ptr() for layer in cache.draft_layers for tensor in layer}
    assert len(ours) == 4
    assert len(drafts) == 2
    assert not ours & drafts
    total = sum(tensor.nbytes for tensor in cache.pools[0].tensors)
    assert total == 10 * block_bytes(groups, spec, torch.float32)


def test_kv_memory_is_taken_only_where_it_is_touched() -> None:
    before = host_memory().used
    cache = KVCache(
        FULL, spec_of(num_kv_heads=8, head_dim=128), 20_000, torch.float32, torch.device("cpu")
    )
    assert cache.layers[0][0].nbytes > GIB
    cache.layers[0][0][5] = 1.0
    assert host_memory().used - before < GIB // 8


def test_locked_host_memory_is_what_was_asked_for_or_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: list[tuple[int, int]] = []

    def register(address: int, size: int, flags: int) -> int:
        registered.append((address, size))
        return 2 if size > 1 << 20 else 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    memory = page_locked((5, 3), torch.float32)
    assert registered == [(memory.data_ptr(), 60)]
    assert not memory.any()
    assert page_locked((0, 3), torch.float32).shape == (0, 3)
    with pytest.raises(ConfigError, match=r"5 MiB .*CUDA error 2.*host_store_bytes"):
        page_locked((5, 1 << 20), torch.int8)
