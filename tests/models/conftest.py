"""Small random checkpoints written by transformers, and a driver that steps a model over a paged cache by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from moeserve.layers.inputs import GroupInputs, LayerKV, StepInputs
from moeserve.loader.hf_config import read_model_spec
from moeserve.loader.spec import ModelSpec
from moeserve.models.decoder import Decoder
from moeserve.models.registry import family
from moeserve.moe.lane import Lane
from moeserve.ops.table import pick_ops

SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 1024, "initializer_range": 0.15, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {**EXPERTS, "clip_qkv": 2.0}),
    "granite_moe": (
        "GraniteMoe",
        {
            "num_local_experts": 8, "num_experts_per_tok": 3, "embedding_multiplier": 6.0, "attention_multiplier": 0.1,
            "residual_multiplier": 0.3, "logits_scaling": 4.0,
        },
    ),
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    reference: Any  # the transformers model, fp32


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """make_checkpoint(family, **config overrides): written once per session and combination."""
    made: dict[str, Checkpoint] = {}

    def make(name: str, **overrides: Any) -> Checkpoint:
        key = f"{name}-{sorted(overrides.items())}"
        if key not in made:
            class_name, extra = FAMILIES[name]
            config = getattr(transformers, class_name + "Config")(**{**SMALL, **extra, **overrides})
            torch.manual_seed(sum(name.encode()))
            model = getattr(transformers, class_name + "ForCausalLM")(config).eval()
            randomise(model)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            made[key] = Checkpoint(path, model)
        return made[key]

    return make


def randomise(model: torch.nn.Module) -> None:
    """Norms and biases start as ones and zeros; make them matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)


def carry_out(path: Path, spec: ModelSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """The plain meaning of a WeightPlan: every parameter, filled piece by piece."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    plan = family(spec).weight_plan(spec, tensors.keys())
    params = {param.name: torch.full(param.shape, torch.nan, dtype=dtype) for param in plan.params}
    for piece in plan.pieces:
        assert tensors[piece.source].shape == piece.shape
        part = tensors[piece.source][piece.take]
        params[piece.param][piece.at] = (part.transpose(-1, -2) if piece.transpose else part).to(dtype)
    surplus = tensors.keys() - {piece.source for piece in plan.pieces} - plan.ignore
    assert not surplus, surplus
    assert not any(param.isnan().any() for param in params.values())
    return params


class Driver:
    """A model over its own paged cache. Sequences hold scattered blocks; each step takes rows of (sequence, tokens)."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype = torch.float32,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        onednn: bool | None = None,
        spec: ModelSpec | None = None,
    ) -> None:
        self.spec = spec or read_model_spec(path)
        ops = pick_ops("cpu", dtype, onednn=onednn)
        params = carry_out(path, self.spec, dtype)
        self.model: Decoder = family(self.spec).build(self.spec, params, ops, dtype)
        self.block_size = block_size
        self.lane = Lane()
        shape = (num_blocks, block_size, self.spec.num_kv_heads, self.spec.head_dim)
        # NaN marks what no request may read, the null block included.
        self.kv = [
            LayerKV(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
            for _ in range(self.spec.num_layers)
        ]
        self.windows = list(dict.fromkeys(self.spec.windows or (None,)))
        self.tables: dict[Any, list[int]] = {}
        self.lengths: dict[Any, int] = {}
        self.free = np.random.default_rng(7).permutation(np.arange(1, num_blocks)).tolist()

    def step(self, rows: Sequence[tuple[Any, Sequence[int]]]) -> list[Tensor]:
        """Feed each row's tokens after what its sequence holds; fp32 logits [tokens, V] of every row."""
        starts = [self.lengths.get(key, 0) for key, _ in rows]
        for (key, tokens), start in zip(rows, starts, strict=True):
            table = self.tables.setdefault(key, [])
            while len(table) * self.block_size < start + len(tokens):
                table.append(self.free.pop())
            self.lengths[key] = start + len(tokens)
        counts = [len(tokens) for _, tokens in rows]
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        owners = [key for key, tokens in rows for _ in tokens]
        size = self.block_size
        cells = [self.tables[k][p // size] * size + p % size for k, p in zip(owners, positions, strict=True)]
        width = max(len(self.tables[key]) for key, _ in rows)
        blocks = [self.tables[key] + [0] * (width - len(self.tables[key])) for key, _ in rows]
        step = StepInputs(
            ids_T=torch.tensor([t for _, tokens in rows for t in tokens]),
            positions_T=torch.tensor(positions),
            groups=tuple(
                GroupInputs(torch.tensor(cells), torch.tensor(blocks), size, window) for window in self.windows
            ),
            sample_S=torch.arange(len(positions)),
            offsets_R1=offsets,
            starts_R=np.array(starts, np.int32),
        )
        with torch.inference_mode():
            hidden = self.model.forward(step, self.kv, self.lane)
            logits = self.model.logits(hidden)
        return list(logits.split(counts))

    def drop(self, key: Any) -> None:
        self.free = self.tables.pop(key) + self.free
        del self.lengths[key]

    def prefill(self, key: Any, tokens: Sequence[int], chunk: int | None = None) -> Tensor:
        """Logits of every position, fed in chunks."""
        chunk = chunk or len(tokens)
        parts = [self.step([(key, tokens[i : i + chunk])])[0] for i in range(0, len(tokens), chunk)]
        return torch.cat(parts)
