"""`moeserve collect-env`: prints versions and hardware for a bug report."""

import argparse
import json
import os
import platform
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from moeserve.plugins import VARIABLE, installed_plugins
from moeserve.runner.cores import SYSTEM, assign_cpus, fast_cpus, format_cpus, nodes
from moeserve.version import __version__

PACKAGES = (
    "torch",
    "numpy",
    "aiohttp",
    "msgspec",
    "pyzmq",
    "uvloop",
    "tokenizers",
    "safetensors",
    "transformers",
)
CPU_FLAGS = (
    "avx2",
    "avx_vnni",
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
VARIABLES = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "CUDA_",
    "NCCL_",
    "LD_PRELOAD",
    "MALLOC_",
    "MOESERVE_",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the report."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    parser.add_argument(
        "--no-torch", action="store_true", help="do not import torch (faster; omits the GPUs)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    import yaml

    found = collect(torch=not args.no_torch)
    print(
        json.dumps(found, indent=2)
        if args.json
        else yaml.safe_dump(found, sort_keys=False, width=120).rstrip()
    )
    return 0


def collect(*, torch: bool = True) -> dict[str, Any]:
    """Return the report by topic. Values of variables with KEY in their name are not shown."""
    variables = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
    }
    found = {
        "moeserve": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "plugins": plugins(),
        "cpu": cpu(),
        "memory": memory(),
        "environment": {
            name: "(not shown)" if "KEY" in name else value for name, value in variables.items()
        },
    }
    return found | ({"torch": torch_facts()} if torch else {})


def plugins() -> dict[str, dict[str, str]]:
    """Return the package and version of each installed plugin, by group and name."""
    found: dict[str, dict[str, str]] = {}
    for plugin in installed_plugins():
        shown = f"{plugin.package} {plugin.version}, {plugin.target}"
        excluded = "" if plugin.used else f" (excluded by {VARIABLE})"
        found.setdefault(plugin.group, {})[plugin.name] = shown + excluded
    return found


def cpu(system: Path = SYSTEM) -> dict[str, Any]:
    """Return the model, cores, load, and the instruction sets among CPU_FLAGS. Lists of CPUs have
    the kernel's format (0-3,8).
    """
    import psutil

    first = (_read("/proc/cpuinfo") or "").split("\n\n")[0]
    fields = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in first.splitlines())
    }
    have = (fields.get("flags") or fields.get("Features") or "").split()
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "logical_cores": psutil.cpu_count(),
        "physical_cores": psutil.cpu_count(logical=False),
        "allowed_cores": len(allowed) or None,
        "fast_cpus": format_cpus(fast_cpus(allowed, system)) if allowed else None,
        "numa_nodes": [format_cpus(node) for node in nodes(allowed, system)],
        "one_rank_computes_on": (
            format_cpus(assign_cpus(allowed, 0, 1, system=system)[0]) if allowed else None
        ),
        "cgroup_cores": None if quota == "max" or not period else int(quota) / int(period),
        "load_average": list(os.getloadavg()),
        "flags": [flag for flag in CPU_FLAGS if flag in have],
    }


def memory() -> dict[str, Any]:
    """Return the host's memory, the limit of control groups if that is lower, and the free space of
    /dev/shm.
    """
    import psutil

    from moeserve.actor.control_groups import memory_limit

    limit = memory_limit()
    host = psutil.virtual_memory()
    return {
        "total_bytes": host.total,
        "available_bytes": host.available,
        "cgroup_limit_bytes": limit if limit < host.total else None,
        "shm_free_bytes": psutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        "swap_bytes": psutil.swap_memory().total,
    }


def torch_facts() -> dict[str, Any]:
    """Return torch's version, threads, build and GPUs, or the error of its import."""
    try:
        import torch
    except ImportError as error:
        return {"error": str(error)}
    from moeserve.ops.pick import pick_ops

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "version": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "gpus": [
            {
                "name": gpu.name,
                "memory_bytes": gpu.total_memory,
                "capability": f"{gpu.major}.{gpu.minor}",
            }
            for gpu in gpus
        ],
        "build": [
            line.strip(" -")
            for line in torch.__config__.show().splitlines()
            if "settings" not in line
        ],
        # last: it changes the threads
        "kernels": (ops := pick_ops("cpu", torch.bfloat16)).description,
        "lossless_compression": ops.supports_lossless,
    }


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _read(path: str) -> str | None:
    with suppress(OSError):
        return Path(path).read_text("utf-8").strip()
    return None
