"""The one table of kernels: chosen once at start, by device, dtype and what the self-probe found; said aloud."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.errors import ConfigError
from moeserve.ops import attention, elementwise
from moeserve.ops.linear import PackLinear, onednn_pack, padded_rows, plain_packer
from moeserve.ops.memory import keep_freed_memory
from moeserve.ops.probe import probe_attention, probe_linear

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ops:
    """Every kernel that model code calls. Meanings, shapes and examples are at the functions of the same names.

    pad_rows(n): how many rows a step or an expert with n rows is computed with; what the rest holds is irrelevant.
    pack_linear(weight, bias): a matrix product with a constant weight, in this table's layout.
    """

    device: torch.device
    dtype: torch.dtype
    chosen: tuple[tuple[str, str], ...]  # kernel -> implementation and why
    pad_rows: Callable[[int], int]
    pack_linear: PackLinear
    silu_mul: Callable[[Tensor], Tensor]
    sigmoid_gate: Callable[[Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = elementwise.rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = elementwise.add_rms_norm
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor] = elementwise.rotary
    embedding: Callable[[Tensor, Tensor], Tensor] = elementwise.embedding
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = elementwise.write_kv
    route: Callable[[Tensor, int, str, bool], tuple[Tensor, Tensor]] = elementwise.route
    plan_attention: Callable[..., attention.AttentionPlan] = attention.plan_attention
    attention: Callable[[Tensor, Tensor, Tensor, attention.AttentionPlan], Tensor] = attention.attention

    def describe(self) -> str:
        return ", ".join(f"{kernel}: {how}" for kernel, how in self.chosen)


def pick_ops(device: torch.device | str, dtype: torch.dtype, *, onednn: bool | None = None) -> Ops:
    """Choose the kernels for this machine, after probing that their bits do not depend on the batch.

    On a CPU it also tells the C library to keep freed memory (ops/memory.py). Call it after the thread count is set.
    onednn: None takes oneDNN's packed products where they work; True demands them; False takes plain torch. Raises
    ConfigError for a dtype that no kernel serves.
    """
    device = torch.device(device)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"no kernels for dtype {dtype}; choose float32, bfloat16 or float16")
    if device.type != "cpu":
        return _table(device, dtype, plain_packer(1), 1, "torch on " + device.type, 1)
    keep_freed_memory()
    how = "torch"
    if onednn is not False:
        obstacle = _onednn_obstacle(dtype)
        if obstacle is None:
            probe_attention(dtype)
            return _table(device, dtype, onednn_pack, 1, "oneDNN, packed", torch.get_num_threads())
        if onednn:
            raise ConfigError(f"{obstacle}; leave onednn unset to use plain torch")
        how = f"torch ({obstacle})"
    for pad in (1, 8, 16, 32):
        if probe_linear(plain_packer(pad), dtype):
            probe_attention(dtype)
            return _table(device, dtype, plain_packer(pad), pad, f"{how}, rows in {pad}s", torch.get_num_threads())
    log.warning("products of %s depend on the row count at every padding up to 32 on this machine: "
                "a request's tokens may depend on what else is in the batch", dtype)  # fmt: skip
    return _table(device, dtype, plain_packer(32), 32, f"{how}, not batch-invariant", torch.get_num_threads())


def _onednn_obstacle(dtype: torch.dtype) -> str | None:
    """Why oneDNN's packed products cannot serve here, or None."""
    if dtype == torch.float16:
        return "oneDNN is not faster in float16"
    try:
        invariant = probe_linear(onednn_pack, dtype)
    except RuntimeError as error:  # no oneDNN in this build, or no support for the dtype on this processor
        return f"oneDNN cannot pack {dtype} here: {str(error).splitlines()[0]}"
    return None if invariant else "oneDNN's products depend on the row count here"


def _table(device: torch.device, dtype: torch.dtype, pack: PackLinear, pad: int, how: str, threads: int) -> Ops:
    ops = Ops(
        device=device,
        dtype=dtype,
        chosen=(("linear", how), ("attention", "torch, tiles of 64"), ("others", "torch")),
        pad_rows=lambda rows: padded_rows(rows, pad),
        pack_linear=pack,
        silu_mul=lambda x: elementwise.silu_mul(x, threads),
        sigmoid_gate=lambda x: elementwise.sigmoid_gate(x, threads),
    )
    log.info("kernels for %s on %s with %d threads: %s", dtype, device, torch.get_num_threads(), ops.describe())
    return ops
