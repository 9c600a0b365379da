"""Chooses the kernels at start, by device, dtype and the probe's findings, and logs the choice."""

import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

# oneDNN, which computes torch's products of bf16, sums in another order with AMX, by the number of
# rows.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
import torch

from moeserve.errors import ConfigError
from moeserve.ops import (
    elementwise,
    latent,
    native_latent,
    native_layer,
    native_recurrence,
    native_recurrent_block,
    native_rows,
)
from moeserve.ops.linear import PlainLinear, padded_rows
from moeserve.ops.native import native
from moeserve.ops.probe import probe_attention, probe_linear, probe_native
from moeserve.ops.table import Choice, Ops

log = logging.getLogger(__name__)
# of glibc's mallopt
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_IN_HEAP = 32 << 20  # glibc accepts no more
KEPT_FREE = 256 << 20
ON_TRITON = ("triton", "deep_gemm", "flashinfer")  # which demand Triton's kernels


def pick_ops(
    device: torch.device | str,
    dtype: torch.dtype,
    kernels: Choice = "auto",
    *,
    obstacle: Callable[[str], str] = lambda kernels: "",
    exact: bool = False,
) -> Ops:
    """Choose the kernels for this machine, after a probe that their bits do not depend on the
    batch.

    On a CPU it also tells the C library to keep freed memory. Call it after the thread count is
    set: native kernels compute with as many threads and leave torch one, because threads of two
    pools would wait for each other.

    kernels: auto takes native ones on CPUs and Triton's elsewhere, else torch's; the other choices
    demand one. obstacle: why "native" or "triton" kernels cannot compute the model, empty if they
    can. exact: whether a row's bits may not depend on the batch (on CPUs they never do). Raises
    ConfigError for a dtype that no kernel serves, or where the kernels demanded do not work.
    """
    device = torch.device(device)
    threads = torch.get_num_threads()
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"no kernels for dtype {dtype}; choose float32, bfloat16 or float16")
    if device.type != "cpu" or kernels in ON_TRITON:
        ops = _on_device(device, dtype, kernels, obstacle("triton"), exact)
    else:
        keep_freed_memory()
        why_not = "" if kernels == "torch" else obstacle("native") or _native_obstacle(dtype)
        if why_not and kernels == "native":
            raise ConfigError(f"{why_not}; choose kernels: auto")
        ops = (
            _torch(device, dtype, why_not)
            if why_not or kernels == "torch"
            else _native(device, dtype)
        )
    log.debug("kernels for %s on %s with %d threads: %s", dtype, device, threads, ops.chosen)
    return ops


def keep_freed_memory() -> None:
    """Tell glibc to serve tensors up to 32 MiB from the heap and to keep up to 256 MiB of free
    heap.

    By default glibc maps and unmaps each larger tensor: an RMS norm over 512 tokens then takes ten
    times as long. Applies to the whole process; other C libraries have no such setting.
    """
    if sys.platform.startswith("linux") and (
        mallopt := getattr(ctypes.CDLL(None), "mallopt", None)
    ):
        mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)
        mallopt(M_TRIM_THRESHOLD, KEPT_FREE)


def _on_device(
    device: torch.device, dtype: torch.dtype, kernels: Choice, obstacle: str, exact: bool
) -> Ops:
    if kernels == "native":
        raise ConfigError(f"kernels: native is for CPUs; choose kernels: auto on {device.type}")
    obstacle = (
        "torch was asked for" if kernels == "torch" else obstacle or _triton_obstacle(device, dtype)
    )
    if not obstacle:
        from moeserve.ops.triton_ops import triton_table  # slow to import: only where it serves

        return replace(triton_table(device, dtype, exact), asked=kernels)
    if kernels in ON_TRITON:
        raise ConfigError(f"{obstacle}; choose kernels: auto")
    if exact:
        raise ConfigError(
            f"determinism=batch needs the Triton kernels on {device.type}: "
            f"{obstacle}; use --determinism fast, or "
            "--device cpu, which is always deterministic"
        )
    if kernels != "torch":
        log.warning("%s; torch serves, slower", obstacle)
    return _table(device, dtype, 1, f"torch on {device.type}", 1, exact=False)


def _triton_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Return why the Triton kernels cannot serve here; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "there is no triton (pip install triton)"
    if device.type != "cpu":
        return ""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return (
            "Triton kernels need a GPU; TRITON_INTERPRET=1 lets tests run them on a "
            "CPU, very slowly"
        )
    return (
        "Triton's interpreter computes bfloat16 products wrongly" if dtype == torch.bfloat16 else ""
    )


def _native_obstacle(dtype: torch.dtype) -> str:
    """Return why the native kernels cannot serve; empty with the best instruction set in use."""
    module: Any = native()
    if module is None or not module.supported_isas():
        return "there are no native kernels for this machine"
    for isa in reversed(module.supported_isas()):
        module.use_isa(isa)
        if not (wrong := probe_native(dtype)):
            return ""
        log.warning(
            "the native kernels for %s do not serve: %s; please report this processor", isa, wrong
        )
    return "no native kernels compute rightly here"


def _native(device: torch.device, dtype: torch.dtype) -> Ops:
    module: Any = native()
    module.set_threads([-1] * torch.get_num_threads())
    torch.set_num_threads(1)
    return Ops(
        device=device,
        dtype=dtype,
        chosen=f"all: native, {module.serving_isa()}",
        native=True,
        pad_rows=partial(max, 1),
        pack_linear=native_layer.NativeLinear,
        pack_heads=native_layer.NativeHeads,
        act_mul=native_rows.act_mul,
        sigmoid_gate=native_rows.sigmoid_gate,
        sigmoid_mul=partial(elementwise.sigmoid_mul, threads=1),
        soft_cap=partial(elementwise.soft_cap, threads=1),
        rms_norm=native_rows.rms_norm,
        add_rms_norm=native_rows.add_rms_norm,
        embedding=native_rows.embedding,
        route=native_rows.route,
        qk_norm_rope_cache=native_rows.qk_norm_rope_cache,
        latent_rope_cache=native_rows.latent_rope_cache,
        plan_tiles=native_recurrence.plan_tiles,
        causal_conv=native_recurrence.causal_conv,
        recurrence=native_recurrence.recurrence,
        selective_scan=native_recurrence.selective_scan,
        index_select=native_latent.index_select,
        plan_attention=native_layer.plan_attention,
        attention=native_layer.attention,
        attention_block=native_layer.AttentionBlock,
        latent_block=native_latent.LatentBlock,
        recurrent_block=native_recurrent_block.RecurrentBlock,
        mlp_block=native_layer.GatedMLPBlock,
        weight_obstacle=lambda kind, group, inputs: "",
    )


def _torch(device: torch.device, dtype: torch.dtype, obstacle: str) -> Ops:
    """torch's kernels with the least padding of rows whose products pass the probe."""
    if obstacle:
        log.info("torch computes: %s", obstacle)  # slower
    how = f"torch ({obstacle})" if obstacle else "torch"
    threads = torch.get_num_threads()
    pads = (pad for pad in (1, 8, 16, 32) if probe_linear(partial(PlainLinear, pad=pad), dtype))
    if not (exact := bool(pad := next(pads, 0)) and probe_attention(dtype)):
        log.warning(
            "bits of %s in %s depend on the number of rows on this machine: a request's tokens may "
            "depend on what else is in the batch",
            "attention" if pad else "products",
            dtype,
        )
    how += f", rows in {pad}s" if pad else ", not batch-invariant"
    return _table(device, dtype, pad or 32, how, threads, exact)


def _table(
    device: torch.device, dtype: torch.dtype, pad: int, how: str, threads: int, exact: bool = True
) -> Ops:
    pack_linear = partial(PlainLinear, pad=pad)
    return Ops(
        device=device,
        dtype=dtype,
        chosen=f"linear: {how}, attention: torch, tiles of 64, others: torch",
        exact=exact,
        pad_rows=lambda rows: padded_rows(rows, pad),
        pack_linear=pack_linear,
        pack_heads=partial(latent.PlainHeads, pack_linear=pack_linear),
        act_mul=partial(elementwise.act_mul, threads=threads),
        sigmoid_gate=lambda x: elementwise.sigmoid_gate(x, threads),
        sigmoid_mul=partial(elementwise.sigmoid_mul, threads=threads),
        soft_cap=partial(elementwise.soft_cap, threads=threads),
    )
