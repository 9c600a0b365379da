"""Chooses the table of kernels at start, by device, dtype, and a probe of this machine."""

import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

# torch computes bf16 products with oneDNN. With AMX, its order of sums depends on the row count.
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
# Parameters of glibc's mallopt
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MAX_HEAP_BYTES = 32 << 20  # of a tensor in the heap; glibc's maximum
MAX_FREE_BYTES = 256 << 20  # that the heap keeps
NEEDS_TRITON = ("triton", "deep_gemm", "flashinfer")  # values of `kernels`


def pick_ops(
    device: torch.device | str,
    dtype: torch.dtype,
    kernels: Choice = "auto",
    *,
    obstacle: Callable[[str], str] = lambda kernels: "",
    exact: bool = False,
) -> Ops:
    """Choose the kernels for this machine, after probing that they are batch-invariant.

    kernels: auto chooses native kernels on CPUs and Triton's on other devices, with torch's as a
        fallback. Other values choose a table without a fallback.
    obstacle: returns why "native" or "triton" kernels do not support the model; empty if they do.
    exact: require batch-invariant kernels (on CPUs they always are).

    Set torch's number of threads before: native kernels use as many threads, and torch then gets
    only one, because two thread pools would wait for each other. On CPUs this also configures the
    C library to keep freed memory.

    Raises ConfigError for an unsupported dtype, or if the kernels that were chosen do not work.
    """
    device = torch.device(device)
    threads = torch.get_num_threads()
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"no kernels for dtype {dtype}; choose float32, bfloat16 or float16")
    if device.type != "cpu" or kernels in NEEDS_TRITON:
        ops = _table_on_device(device, dtype, kernels, obstacle("triton"), exact)
    else:
        keep_freed_memory()
        native_obstacle = ""
        if kernels != "torch":
            native_obstacle = obstacle("native") or _select_isa(dtype)
        if native_obstacle and kernels == "native":
            raise ConfigError(f"{native_obstacle}; choose kernels: auto")
        if native_obstacle or kernels == "torch":
            ops = _torch_table(device, dtype, native_obstacle)
        else:
            ops = _native_table(device, dtype)
    log.debug("kernels for %s on %s with %d threads: %s", dtype, device, threads, ops.description)
    return ops


def keep_freed_memory() -> None:
    """Configure glibc to allocate tensors up to 32 MiB in the heap, and keep 256 MiB of it free.

    By default glibc maps and unmaps memory for each large tensor, and an RMS norm of 512 tokens
    takes ten times as long. Applies to the whole process. Other C libraries have no such setting.
    """
    if sys.platform.startswith("linux") and (
        mallopt := getattr(ctypes.CDLL(None), "mallopt", None)
    ):
        mallopt(M_MMAP_THRESHOLD, MAX_HEAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, MAX_FREE_BYTES)


def _table_on_device(
    device: torch.device, dtype: torch.dtype, kernels: Choice, obstacle: str, exact: bool
) -> Ops:
    if kernels == "native":
        raise ConfigError(f"kernels: native is for CPUs; choose kernels: auto on {device.type}")
    if kernels == "torch":
        obstacle = "kernels: torch is set"
    else:
        obstacle = obstacle or _triton_obstacle(device, dtype)
    if not obstacle:
        from moeserve.ops.triton_ops import triton_table  # slow to import: only if it is used

        return replace(triton_table(device, dtype, exact), kernels_setting=kernels)
    if kernels in NEEDS_TRITON:
        raise ConfigError(f"{obstacle}; choose kernels: auto")
    if exact:
        raise ConfigError(
            f"determinism=batch needs the Triton kernels on {device.type}: {obstacle}; use "
            "--determinism fast, or --device cpu, which is always deterministic"
        )
    if kernels != "torch":
        log.warning("%s; torch's kernels are used, which are slower", obstacle)
    return _build_torch_table(
        device, dtype, pad=1, linear=f"torch on {device.type}", threads=1, exact=False
    )


def _triton_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Return why the Triton kernels cannot be used here; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
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


def _select_isa(dtype: torch.dtype) -> str:
    """Select the best instruction set whose native kernels pass the probe.

    Returns why no native kernels can be used; empty if an instruction set is selected.
    """
    module: Any = native()
    if module is None or not module.supported_isas():
        return "there are no native kernels for this machine"
    for isa in reversed(module.supported_isas()):
        module.use_isa(isa)
        if not (mismatch := probe_native(dtype)):
            return ""
        log.warning(
            "the native kernels for %s are not used: %s; please report this processor",
            isa,
            mismatch,
        )
    return "no native kernels compute correctly on this machine"


def _native_table(device: torch.device, dtype: torch.dtype) -> Ops:
    module: Any = native()
    module.set_threads([-1] * torch.get_num_threads())
    torch.set_num_threads(1)
    return Ops(
        device=device,
        dtype=dtype,
        description=f"all: native, {module.serving_isa()}",
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


def _torch_table(device: torch.device, dtype: torch.dtype, obstacle: str) -> Ops:
    """Return torch's kernels, with the least padding of rows that passes the probe."""
    if obstacle:
        log.info("torch's kernels are used, which are slower: %s", obstacle)
    linear = f"torch ({obstacle})" if obstacle else "torch"
    threads = torch.get_num_threads()
    pads = (pad for pad in (1, 8, 16, 32) if probe_linear(partial(PlainLinear, pad=pad), dtype))
    pad = next(pads, 0)
    exact = pad > 0 and probe_attention(dtype)
    if not exact:
        log.warning(
            "bits of %s in %s depend on the number of rows on this machine: the tokens of a "
            "request may depend on other requests in the batch",
            "attention" if pad else "products",
            dtype,
        )
    linear += f", rows in {pad}s" if pad else ", not batch-invariant"
    return _build_torch_table(
        device, dtype, pad=pad or 32, linear=linear, threads=threads, exact=exact
    )


def _build_torch_table(
    device: torch.device,
    dtype: torch.dtype,
    *,
    pad: int,
    linear: str,
    threads: int,
    exact: bool,
) -> Ops:
    """Return torch's kernels. linear: the description of its products."""
    pack_linear = partial(PlainLinear, pad=pad)
    return Ops(
        device=device,
        dtype=dtype,
        description=f"linear: {linear}, attention: torch, tiles of 64, others: torch",
        exact=exact,
        pad_rows=lambda rows: padded_rows(rows, pad),
        pack_linear=pack_linear,
        pack_heads=partial(latent.PlainHeads, pack_linear=pack_linear),
        act_mul=partial(elementwise.act_mul, threads=threads),
        sigmoid_gate=lambda x: elementwise.sigmoid_gate(x, threads),
        sigmoid_mul=partial(elementwise.sigmoid_mul, threads=threads),
        soft_cap=partial(elementwise.soft_cap, threads=threads),
    )
