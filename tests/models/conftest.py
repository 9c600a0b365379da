"""Checkpoints written by transformers, and a driver that steps a model over a paged cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from moeserve.blocks.mixer import TILED
from moeserve.comm.tensor import ALONE, TensorParallel
from moeserve.comm.world import World
from moeserve.config import Activations
from moeserve.engine.blocks import KVGroup
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.load_plan import Param
from moeserve.models.build import build_decoder
from moeserve.models.decoder import Decoder
from moeserve.models.hf_config import read_model_spec
from moeserve.models.load_plan import load_plan
from moeserve.models.spec import ModelSpec
from moeserve.moe.all2all.base import All2All
from moeserve.moe.placement.placement import Placement
from moeserve.moe.ubatch import UBatch
from moeserve.ops.inputs import GroupInputs, LayerCache, Positions, StepInputs
from moeserve.ops.native import native
from moeserve.ops.pick import pick_ops
from moeserve.ops.quantized import QuantizeTo
from moeserve.ops.table import Choice, Ops
from moeserve.runner.kv_cache import block_shape
from tests.families import FAMILIES as FAMILIES
from tests.families import FEW as FEW
from tests.loader.conftest import write_config as write_config
from tests.loader.eager import load


def carry_out(
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    world: World | None = None,
    placement: Placement | None = None,
) -> dict[str, Tensor]:
    """Execute a LoadPlan plainly: fill every parameter piece by piece."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    plan = load_plan(spec, tensors.keys(), world, placement)
    params = {param.name: _unset(param, dtype) for param in plan.params}
    for piece in plan.pieces:
        assert tensors[piece.source].shape == piece.shape
        part = tensors[piece.source][piece.take]
        part = part.transpose(-1, -2) if piece.transposed else part
        params[piece.param][piece.at] = part.to(params[piece.param].dtype)
    surplus = tensors.keys() - {piece.source for piece in plan.pieces} - plan.ignore
    assert not surplus, surplus
    assert not any(param.isnan().any() for param in params.values())
    return params


def _unset(param: Param, dtype: torch.dtype) -> Tensor:
    """Return a parameter that is not filled yet."""
    if param.int64:
        return torch.zeros(param.shape, dtype=torch.int64)
    return torch.full(param.shape, torch.nan, dtype=torch.float32 if param.fp32 else dtype)


@functools.cache
def _ops(dtype: torch.dtype, kernels: Choice, threads: int) -> Ops:
    """Return the ops, probed once per dtype and number of threads."""
    return pick_ops("cpu", dtype, kernels, exact=True)


class Driver:
    """A model over its own paged cache.

    Sequences hold scattered blocks. Each step takes rows of (sequence, tokens).
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype = torch.float32,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        kernels: Choice = "auto",
        spec: ModelSpec | None = None,
        world: World | None = None,
        tp: TensorParallel = ALONE,
        placement: Placement | None = None,
        backends: Sequence[All2All] | None = None,
        asked: QuantizeTo | None = None,
        activations: Activations = "auto",
        change: Callable[[dict[str, Any]], None] = lambda params: None,
    ) -> None:
        self.spec = spec or read_model_spec(path)
        threads = torch.get_num_threads()
        ops = _ops(dtype, kernels, threads)
        if ops.native:
            module: Any = native()
            module.set_threads([-1] * threads)
        if asked or self.spec.stored or path.is_file():
            checkpoint = replace(open_checkpoint(path, self.spec.stored), activations=activations)
            plan = load_plan(self.spec, checkpoint.names, world, placement)
            params = load(checkpoint, plan, dtype, quantize_to=asked)
        else:
            params = carry_out(path, self.spec, dtype, world, placement)
        change(params)
        self.model: Decoder = build_decoder(
            self.spec, params, ops, world=world, tp=tp, placement=placement, backends=backends
        )
        self.block_size = block_size
        self.ubatch = UBatch()
        # NaN marks entries that no request may read, the null block included.
        self.rules = list(dict.fromkeys(self.spec.kv_rules))
        self.kv: list[LayerCache] = [
            tuple(
                torch.full((num_blocks, *shape), torch.nan, dtype=kind)
                for shape, kind in (
                    block_shape(tensor, KVGroup(layer.mixer.rule, block_size, ()), dtype)
                    for tensor in layer.mixer.cache(tp.size)
                )
            )
            + tuple(
                torch.full((num_blocks, *shape), torch.nan, dtype=kind)
                for shape, kind in (
                    block_shape(tensor, KVGroup(TILED, block_size, ()), dtype)
                    for tensor in layer.mixer.tiled_state(tp.size)
                )
            )
            for layer in self.spec.layers
        ]
        self.tables: dict[Any, list[int]] = {}
        self.lengths: dict[Any, int] = {}
        self.tokens: dict[Any, list[int]] = {}
        self.free = np.random.default_rng(7).permutation(np.arange(1, num_blocks)).tolist()

    def step(self, rows: Sequence[tuple[Any, Sequence[int]]]) -> list[Tensor]:
        """Append each row's tokens to its sequence; return its fp32 logits [tokens, V]."""
        starts = [self.lengths.get(key, 0) for key, _ in rows]
        for (key, tokens), start in zip(rows, starts, strict=True):
            table = self.tables.setdefault(key, [])
            while len(table) * self.block_size < start + len(tokens):
                table.append(self.free.pop())
            self.lengths[key] = start + len(tokens)
            self.tokens[key] = [*self.tokens.get(key, [])[:start], *tokens]
        counts = [len(tokens) for _, tokens in rows]
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        positions = [
            start + i for start, count in zip(starts, counts, strict=True) for i in range(count)
        ]
        owners = [key for key, tokens in rows for _ in tokens]
        size = self.block_size
        cells = [
            self.tables[k][p // size] * size + p % size
            for k, p in zip(owners, positions, strict=True)
        ]
        width = max(len(self.tables[key]) for key, _ in rows)
        blocks = [self.tables[key] + [0] * (width - len(self.tables[key])) for key, _ in rows]
        starts_R = np.array(starts, np.int32)
        step = StepInputs(
            ids_T=torch.tensor([t for _, tokens in rows for t in tokens]),
            positions=Positions.of_text(torch.tensor(positions)),
            groups=tuple(
                GroupInputs(
                    slot_mapping_T=torch.tensor(cells),
                    blocks_RN=torch.tensor(blocks),
                    block_size=size,
                    window=rule.window,
                    chunk=rule.chunk,
                    diffusion_block=rule.diffusion_block,
                )
                for rule in self.rules
            ),
            logits_indices_N=torch.arange(len(positions)),
            offsets_R1=offsets,
            starts_R=starts_R,
            rows_on_device=(torch.from_numpy(starts_R), torch.from_numpy(offsets)),
            earlier_ids_TN=self._earlier_ids(list(zip(owners, positions, strict=True))),
        )
        with torch.inference_mode():
            hidden = self.hidden_TD = self.model.forward(step, self.kv, self.ubatch)
            logits = self.model.logits(hidden)
        return list(torch.split(logits, counts))

    def _earlier_ids(self, tokens: list[tuple[Any, int]]) -> Tensor | None:
        """Return the ids of earlier tokens, of tokens given as (sequence, position)."""
        if not (count := self.spec.num_earlier_ids):
            return None
        rows = [
            [self.tokens[key][p - i] if p >= i else -1 for i in range(1, count + 1)]
            for key, p in tokens
        ]
        return torch.tensor(rows).view(-1, count)

    def drop(self, key: Any) -> None:
        self.free = self.tables.pop(key) + self.free
        del self.tokens[key]
        del self.lengths[key]

    def prefill(self, key: Any, tokens: Sequence[int], chunk: int | None = None) -> Tensor:
        """Return the logits of every position, computed in chunks."""
        chunk = chunk or len(tokens)
        parts = [self.step([(key, tokens[i : i + chunk])])[0] for i in range(0, len(tokens), chunk)]
        return torch.cat(parts)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch's allocator held at once beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        run()
    held = 0
    peak = 0
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
