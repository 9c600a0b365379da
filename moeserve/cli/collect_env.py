"""`moeserve collect-env`: what a maintainer asks first. Torch is imported here and nowhere else in the command line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from moeserve.version import __version__

PACKAGES = ("torch", "numpy", "aiohttp", "msgspec", "pyzmq", "uvloop", "tokenizers", "safetensors", "transformers")
CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)
VARIABLES = ("OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "NCCL_", "LD_PRELOAD", "MALLOC_", "MOESERVE_")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--no-torch", action="store_true", help="leave torch and the GPUs out (it is quicker)")


def run(args: argparse.Namespace) -> int:
    found = collect(torch=not args.no_torch)
    print(json.dumps(found, indent=2) if args.json else as_text(found))
    return 0


def collect(*, torch: bool = True) -> dict[str, Any]:
    """Everything, by topic; sizes in bytes."""
    found = {
        "moeserve": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": versions(),
        "cpu": cpu(),
        "memory": memory(),
        "environment": variables(),
    }
    return found | ({"torch": torch_facts()} if torch else {})


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu() -> dict[str, Any]:
    import psutil

    info = _read("/proc/cpuinfo") or ""
    fields = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    have = (fields.get("flags") or fields.get("Features") or "").split()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "logical_cores": psutil.cpu_count(),
        "physical_cores": psutil.cpu_count(logical=False),
        "allowed_cores": allowed,
        "cgroup_cores": _cgroup_cores(),
        "load_average": list(os.getloadavg()),
        "flags": [flag for flag in CPU_FLAGS if flag in have],
    }


def memory() -> dict[str, Any]:
    import psutil

    limit = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    host = psutil.virtual_memory()
    limited = limit is not None and limit.isdecimal() and int(limit) < host.total
    return {
        "total_bytes": host.total,
        "available_bytes": host.available,
        "cgroup_limit_bytes": int(limit or 0) if limited else None,
        "shm_free_bytes": psutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        "swap_bytes": psutil.swap_memory().total,
    }


def variables() -> dict[str, str]:
    """Variables that change how we run; keys are not shown."""
    mine = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {name: "(not shown)" if "KEY" in name else value for name, value in mine.items()}


def torch_facts() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"error": str(error)}
    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        gpus.append({"name": gpu.name, "memory_bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"})
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "build": [line.strip(" -") for line in torch.__config__.show().splitlines() if "settings" not in line],
    }


def as_text(found: dict[str, Any], indent: int = 0) -> str:
    lines = []
    for name, value in found.items():
        head = " " * indent + f"{name}:"
        if isinstance(value, dict):
            lines += [head, as_text(value, indent + 2)] if value else [f"{head} -"]
        elif name.endswith("_bytes") and value is not None:
            lines.append(f"{head[:-7]}: {value / 2**30:.2f} GiB")
        elif isinstance(value, list):
            lines.append(f"{head} {', '.join(map(str, value)) or '-'}")
        else:
            lines.append(f"{head} {'-' if value is None else value}")
    return "\n".join(lines)


def _cgroup_cores() -> float | None:
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    return None if quota == "max" or not period else int(quota) / int(period)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError:
        return None
