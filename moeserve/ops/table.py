"""The table of kernels: chosen once at start, by device, dtype and what the probe found, and logged."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from moeserve.errors import ConfigError
from moeserve.ops import (
    attention,
    elementwise,
    native_attention,
    native_layer,
    native_rows,
    qk_norm_rope_cache,
)
from moeserve.ops.inputs import PlanAttention, from_host
from moeserve.ops.linear import PackLinear, padded_rows, plain_packer
from moeserve.ops.memory import keep_freed_memory
from moeserve.ops.native import native
from moeserve.ops.probe import probe_attention, probe_linear, probe_native

log = logging.getLogger(__name__)
PLAN_BY_TORCH = from_host(attention.plan_attention)


def _as_it_is(function: Any) -> Any:
    return function


@dataclass(frozen=True, slots=True)
class Ops:
    """Every kernel that model code calls. Meanings, shapes and examples are at the functions of the same names.

    pad_rows(n): the number of rows that n rows of a step or of an expert are padded to; the padding may hold anything.
    pack_linear(weight, bias): a matrix product with a constant weight, in this table's layout. native, triton: whether
    these are the kernels of csrc/ or of kernels/, which have kernels for experts, too. room: where native kernels pack.
    exact: whether a row's bits depend on nothing but the row. attention_block: joins the steps of attention in one
    call, where such a call exists. trace(function): the function, compiled where these kernels can be joined
    (ops/traced.py). opaque(function): the function, hidden from any trace. weight_obstacle(kind, group, inputs): why
    quantised weights with so many inputs in all and per scale (0: all) cannot be computed with; empty if they can.
    None: no quantised weights can.
    """

    device: torch.device
    dtype: torch.dtype
    chosen: tuple[tuple[str, str], ...]  # kernel -> implementation and why
    pad_rows: Callable[[int], int]
    pack_linear: PackLinear
    silu_mul: Callable[[Tensor], Tensor]
    sigmoid_gate: Callable[[Tensor], Tensor]
    native: bool = False
    triton: bool = False
    exact: bool = True
    room: native_layer.Room = native_layer.new_room
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = elementwise.rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = elementwise.add_rms_norm
    embedding: Callable[[Tensor, Tensor], Tensor] = elementwise.embedding
    route: Callable[..., tuple[Tensor, Tensor]] = elementwise.route  # triton's: and num_tokens, on the device
    qk_norm_rope_cache: Callable[..., Tensor] = qk_norm_rope_cache.qk_norm_rope_cache
    plan_attention: PlanAttention = PLAN_BY_TORCH
    attention: Callable[..., Tensor] = attention.attention  # takes this table's own plans; triton's: `out`, too
    attention_block: Callable[..., Callable[..., Tensor]] | None = None
    trace: Callable[[Any], Any] = _as_it_is
    opaque: Callable[[Any], Any] = _as_it_is
    weight_obstacle: Callable[[str, int, int], str] | None = None

    def packing_into(self, room: native_layer.Room) -> Ops:
        """Returns the native kernels with packed weights in memory from `room`."""
        assert self.native
        return replace(self, room=room, pack_linear=partial(native_layer.NativeLinear, room=room))

    def describe(self) -> str:
        """Each kernel with the implementation that serves it, on one line."""
        return ", ".join(f"{kernel}: {how}" for kernel, how in self.chosen)


Choice = Literal["auto", "native", "torch", "triton"]


def pick_ops(
    device: torch.device | str,
    dtype: torch.dtype,
    kernels: Choice = "auto",
    *,
    head_dim: int | None = None,
    exact: bool = False,
) -> Ops:
    """Chooses the kernels for this machine, after a probe that their bits do not depend on the batch.

    On a CPU it also tells the C library to keep freed memory (ops/memory.py). Call it after the thread count is set:
    native kernels compute with as many threads and leave torch one, because threads of two pools would wait for each
    other.

    kernels: auto takes native ones on CPUs and Triton's elsewhere, else torch's; the other choices demand one.
    head_dim: of the model's attention. exact: whether a row's bits may not depend on the batch (on CPUs they never do).
    Raises ConfigError for a dtype that no kernel serves, or where the kernels demanded do not work.
    """
    device = torch.device(device)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"no kernels for dtype {dtype}; choose float32, bfloat16 or float16")
    if device.type != "cpu" or kernels == "triton":
        return _on_device(device, dtype, kernels, head_dim, exact)
    keep_freed_memory()
    how = "torch"
    if kernels != "torch":
        obstacle = _native_obstacle(dtype, head_dim)
        if obstacle is None:
            return _native(device, dtype)
        if kernels == "native":
            raise ConfigError(f"{obstacle}; choose kernels: auto")
        how = f"torch ({obstacle})"
    return _torch(device, dtype, how)


def _on_device(device: torch.device, dtype: torch.dtype, kernels: Choice, head_dim: int | None, exact: bool) -> Ops:
    if kernels == "native":
        raise ConfigError(f"kernels: native is for CPUs; choose kernels: auto on {device.type}")
    obstacle = None if kernels == "torch" else _triton_obstacle(device, dtype, head_dim)
    if kernels != "torch" and obstacle is None:
        return _triton(device, dtype, exact)
    if kernels == "triton":
        raise ConfigError(f"{obstacle}; choose kernels: auto")
    if exact:
        raise ConfigError(
            f"determinism=batch needs the Triton kernels on {device.type}: {obstacle or 'torch was asked for'}; use "
            "--determinism fast, or --device cpu, which is always deterministic"
        )
    if obstacle:
        log.warning("%s; torch serves, slower", obstacle)
    ops = _table(device, dtype, 1, "torch on " + device.type, 1)
    return replace(ops, exact=False)


def _triton_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int | None) -> str | None:
    """Returns why the Triton kernels cannot serve here, or None."""
    if head_dim is not None and not native_attention.serves(head_dim):
        return f"Triton attention does not know heads of width {head_dim}"
    if importlib.util.find_spec("triton") is None:
        return "there is no triton (pip install triton)"
    if device.type != "cpu":
        return None
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton kernels need a GPU; TRITON_INTERPRET=1 lets tests run them on a CPU, very slowly"
    return "Triton's interpreter computes bfloat16 products wrongly" if dtype == torch.bfloat16 else None


def _triton(device: torch.device, dtype: torch.dtype, exact: bool) -> Ops:
    from moeserve.ops import triton_ops, triton_weights

    products = "triton, batch-invariant" if exact else f"torch on {device.type}"
    ops = Ops(
        device=device,
        dtype=dtype,
        chosen=(("linear", products), ("others", "triton" + ", batch-invariant" * exact)),
        triton=True,
        exact=exact,
        pad_rows=lambda rows: max(1, rows),
        pack_linear=triton_ops.pack_exact if exact else triton_ops.pack_fast,
        weight_obstacle=partial(triton_weights.obstacle, device),
        silu_mul=triton_ops.silu_mul,
        sigmoid_gate=elementwise.plain_sigmoid_gate,
        rms_norm=triton_ops.rms_norm,
        add_rms_norm=triton_ops.add_rms_norm,
        embedding=triton_ops.embedding,
        route=triton_ops.route,
        qk_norm_rope_cache=triton_ops.qk_norm_rope_cache,
        plan_attention=triton_ops.planner(dtype, exact),
        attention=triton_ops.attention,
    )
    log.info("kernels for %s on %s: %s", dtype, device, ops.describe())
    return ops


def _native_obstacle(dtype: torch.dtype, head_dim: int | None) -> str | None:
    """Returns why the native kernels cannot serve, or None with the best instruction set in use."""
    module: Any = native()
    if module is None or not module.supported_isas():
        return "there are no native kernels for this machine"
    if head_dim is not None and not native_attention.serves(head_dim):
        return f"native attention does not know heads of width {head_dim}"
    for isa in reversed(module.supported_isas()):
        module.use_isa(isa)
        wrong = probe_native(dtype)
        if wrong is None:
            return None
        log.warning("the native kernels for %s do not serve: %s; please report this processor", isa, wrong)
    return "no native kernels compute rightly here"


def _native(device: torch.device, dtype: torch.dtype) -> Ops:
    module: Any = native()
    threads = torch.get_num_threads()
    module.set_threads([-1] * threads)
    torch.set_num_threads(1)
    ops = Ops(
        device=device,
        dtype=dtype,
        chosen=(("all", f"native, {module.serving_isa()}"),),
        native=True,
        pad_rows=lambda rows: max(1, rows),
        pack_linear=native_layer.NativeLinear,
        silu_mul=native_rows.silu_mul,
        sigmoid_gate=native_rows.sigmoid_gate,
        rms_norm=native_rows.rms_norm,
        add_rms_norm=native_rows.add_rms_norm,
        embedding=native_rows.embedding,
        route=native_rows.route,
        qk_norm_rope_cache=native_rows.qk_norm_rope_cache,
        plan_attention=from_host(native_attention.plan_attention),
        attention=native_attention.attention,
        attention_block=native_layer.AttentionBlock,
        weight_obstacle=lambda kind, group, inputs: "",
    )
    log.info("kernels for %s on %s with %d threads: %s", dtype, device, threads, ops.describe())
    return ops


def _torch(device: torch.device, dtype: torch.dtype, how: str) -> Ops:
    """torch's kernels with the least padding of rows whose products pass the probe."""
    threads = torch.get_num_threads()
    for pad in (1, 8, 16, 32):
        if probe_linear(plain_packer(pad), dtype):
            probe_attention(dtype)
            return _table(device, dtype, pad, f"{how}, rows in {pad}s", threads)
    log.warning("products of %s depend on the row count at every padding up to 32 on this machine: "
                "a request's tokens may depend on what else is in the batch", dtype)  # fmt: skip
    return _table(device, dtype, 32, f"{how}, not batch-invariant", threads)


def _table(device: torch.device, dtype: torch.dtype, pad: int, how: str, threads: int) -> Ops:
    ops = Ops(
        device=device,
        dtype=dtype,
        chosen=(("linear", how), ("attention", "torch, tiles of 64"), ("others", "torch")),
        pad_rows=lambda rows: padded_rows(rows, pad),
        pack_linear=plain_packer(pad),
        silu_mul=lambda x: elementwise.silu_mul(x, threads),
        sigmoid_gate=lambda x: elementwise.sigmoid_gate(x, threads),
    )
    log.info("kernels for %s on %s with %d threads: %s", dtype, device, torch.get_num_threads(), ops.describe())
    return ops
