"""States of recurrent layers: memory, their blocks beside KV blocks, and excluded settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moeserve.blocks.gated_delta import GatedDelta
from moeserve.config import Config, config_of
from moeserve.engine.blocks import STATES_HELD, groups_of
from moeserve.engine.plan import BlockMove
from moeserve.errors import ConfigError, DoesNotFit
from moeserve.models.spec import ModelSpec
from moeserve.runner.kv_cache import KVCache, block_bytes
from moeserve.runner.kv_transport import HostTransport
from moeserve.runner.limits import StateMemory, check_block_size, state_memory
from moeserve.runner.tables import host_upload
from tests.runner.harness import spec_of

STATE = 1000  # bytes of a block
CPU = torch.device("cpu")


def config(**settings: Any) -> Config:
    return config_of(None, **{"max_num_seqs": 8, "block_size": 16, **settings})


def recurrent(*layers: bool) -> ModelSpec:
    """A model whose layer i is a gated delta net if layers[i]."""
    spec = spec_of(num_layers=len(layers))
    mixer = GatedDelta(
        num_k_heads=2,
        num_v_heads=4,
        k_dim=4,
        v_dim=8,
        conv=4,
        inputs_by_head=True,
        gates_by_head=True,
    )
    both = zip(spec.layers, layers, strict=True)
    return replace(
        spec,
        layers=tuple(replace(layer, mixer=mixer) if is_one else layer for layer, is_one in both),
    )


def test_a_model_without_states_keeps_its_budget() -> None:
    asked = config()
    assert state_memory(asked, 0, 10**6, fill=True) == StateMemory(0, 0, asked, 10**6)


@pytest.mark.parametrize("fill", [False, True])
def test_a_shared_host_keeps_what_requests_can_use_and_an_own_device_fills_its_share(
    fill: bool,
) -> None:
    room = state_memory(config(), STATE, 10**8, fill=fill)
    useful = 8 * (STATES_HELD + 4096 // 16) + 1
    assert room.num_states == (50_000 if fill else useful)
    assert room.budget == 10**8 - room.num_states * STATE
    assert (room.config.scheduler.max_num_seqs, room.notes) == (8, ())


@pytest.mark.parametrize(
    ("budget", "running", "states"),
    [(6_000, 1, 3), (10_000, 2, 5), (33_999, 7, 16), (34_000, 8, 17)],
)
def test_fewer_requests_run_where_the_states_of_all_do_not_fit(
    budget: int, running: int, states: int
) -> None:
    room = state_memory(config(), STATE, budget, fill=True)
    assert (room.config.scheduler.max_num_seqs, room.num_states) == (running, states)
    assert room.num_states >= STATES_HELD * running + 1
    assert room.notes == (
        (f"max_num_seqs reduced from 8 to {running}: the states of more requests do not fit",)
        if running < 8
        else ()
    )


@pytest.mark.parametrize("asked", [{}, {"kv_cache_bytes": 5_999}])
def test_no_room_for_one_request_is_refused_with_what_to_raise(asked: dict[str, int]) -> None:
    with pytest.raises(
        DoesNotFit, match=r"needs 2 blocks of 1,000 bytes .* only 2,999 bytes .*--kv-cache-bytes"
    ):
        state_memory(config(**asked), STATE, 5_999 if not asked else 10**6, fill=False)


def test_bytes_that_were_asked_for_are_shared_too() -> None:
    room = state_memory(
        config(kv_cache_bytes=100_000, host_store_bytes=10_999), STATE, 10**8, fill=False
    )
    assert room.num_states == 50
    assert room.config.cache.kv_cache_bytes == 50_000
    assert (room.num_stored, room.config.cache.host_store_bytes) == (5, 5_999)
    assert room.budget == 10**8 - 50_000


def test_blocks_are_whole_tiles_and_some_layer_has_entries_per_token() -> None:
    check_block_size(config(block_size=8), recurrent(False))
    check_block_size(config(block_size=32), recurrent(True, False))
    with pytest.raises(
        ConfigError, match=r"block_size=8 must be a multiple of 16.* layers of Fake"
    ):
        check_block_size(config(block_size=8), recurrent(True, False))
    with pytest.raises(ConfigError, match="all layers are recurrent"):
        check_block_size(config(), recurrent(True, True))


def cache_of(dtype: torch.dtype) -> tuple[KVCache, int, int]:
    """Blocks and states of a model of two recurrent layers and one with entries; bytes of a block
    of either pool.
    """
    spec = recurrent(True, False, True)
    groups = groups_of(spec.kv_rules, 32)
    made = KVCache(groups, spec, 10, dtype, CPU, num_states=6)
    return made, block_bytes(groups, spec, dtype), block_bytes(groups, spec, dtype, pool=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_states_are_fp32_and_take_the_bytes_that_were_counted(dtype: torch.dtype) -> None:
    cache, per_block, per_state = cache_of(dtype)
    assert sum(tensor.nbytes for tensor in cache.layers[1]) == 10 * per_block
    states = [tensor for layer in (0, 2) for tensor in cache.layers[layer]]
    assert sum(tensor.nbytes for tensor in states) == 6 * per_state
    assert {tensor.dtype for tensor in states} == {torch.float32}
    assert {tensor.shape[1] for tensor in states} == {32, 2}, "rows of tokens, or of tiles of 16"
    assert {tensor.dtype for tensor in cache.layers[1]} == {dtype}


def test_moves_of_either_pool_leave_the_other_alone() -> None:
    cache, _, _ = cache_of(torch.float32)
    for layer in cache.layers:
        for tensor in layer:
            tensor.copy_(
                torch.arange(len(tensor)).view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor)
            )
    transport = HostTransport({0: 4, 1: 3}, CPU, host_upload)
    transport.register(cache.pools)
    transport.save([BlockMove(3, 1), BlockMove(5, 1, 1)])
    loading = transport.load([BlockMove(4, 1), BlockMove(2, 1, 1)])
    loading.before_layer(2)
    assert {int(tensor[2].unique()) for tensor in cache.layers[2]} == {5}
    assert {int(tensor[2].unique()) for tensor in cache.layers[0]} == {2}, "its turn is later"
    loading.finish()
    assert not loading.lost()
    assert [int(tensor[4].unique()) for tensor in cache.layers[1]] == [3, 3]
    assert [int(tensor[2].unique()) for tensor in cache.layers[1]] == [2, 2]
    for layer in (0, 2):
        assert {int(tensor[2].unique()) for tensor in cache.layers[layer]} == {5}
        assert {int(tensor[4].unique()) for tensor in cache.layers[layer]} == {4}
    cache.clear_null_block()
    assert not any(tensor[0].any() for layer in cache.layers for tensor in layer)
