"""Config tables: launch parameters of kernels per device, shape and size.

A table is `<folder>/<family>-<device>.json`: {shape: {size: {parameter: value}}}. The weights
determine the shape (such as "E128 I768 D2048 bfloat16"), the step determines the size (such as the
number of rows). If a size is missing, the nearest one is used. Beside the parameters, "by" says
where they are from: "predicted" by kernels/cost.py, or measured.

Folders added by `add_folder` take precedence over `kernels/configs/`, the folder of the package,
whose tables are all predicted.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

Config = Mapping[str, int]
FOLDER = Path(__file__).parent / "configs"
_folders = [FOLDER]


class DeviceFacts(NamedTuple):
    """The properties of a device that choose launch parameters."""

    name: str  # also used in the file names of config tables
    multiprocessors: int


@cache
def facts_of(device: torch.device) -> DeviceFacts:
    """Return the facts of a device. They are cached because a query takes longer than a launch.

    cpu -> ("cpu", 1)
    """
    if device.type != "cuda":
        return DeviceFacts(device.type, 1)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(properties.name, properties.multi_processor_count)


def cache_folder(name: str) -> Path:
    """Return the folder `name` in the user's moeserve cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moeserve" / name


def user_folder() -> Path:
    """Return the folder in which `moeserve tune` stores its tables."""
    return cache_folder("configs")


def add_folder(folder: Path) -> None:
    """Give `folder` precedence over the folders known so far.

    Call it before the first launch, because launch parameters are cached.
    """
    if folder not in _folders:
        _folders.insert(0, folder)


def path_of(family: str, device: str, folder: Path) -> Path:
    """Return the path of a kernel family's table for a device.

    linear, NVIDIA H200 -> linear-nvidia-h200.json
    """
    return folder / f"{family}-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


@cache
def table(family: str, device: str, folder: Path = FOLDER) -> Mapping[str, Mapping[int, Config]]:
    """Read the table of a kernel family for a device, "by" included; empty if there is none."""
    path = path_of(family, device, folder)
    if not path.exists():
        return {}
    return {
        shape: {int(size): c for size, c in sizes.items()}
        for shape, sizes in json.loads(path.read_text()).items()
    }


def listing(folder: Path) -> Iterator[str]:
    """Yield a line for each shape in a folder's tables, with its sizes and their "by"."""
    for path in sorted(folder.glob("*.json")):
        for shape, sizes in json.loads(path.read_text()).items():
            origins = sorted({config.get("by", "measured") for config in sizes.values()})
            yield f"{path.stem} {shape}, sizes {', '.join(sizes)}: {'; '.join(origins)}"


def nearest(sizes: Mapping[int, Config], size: int) -> Config | None:
    """Return the config of the size with the nearest ratio to `size`; the larger one on a tie.

    {16: a, 64: b}, 20 -> a; {16: a, 64: b}, 32 -> b
    """
    if not sizes:
        return None
    return sizes[min(sizes, key=lambda known: (abs(math.log(known / max(size, 1))), -known))]


def tuned_config(family: str, device: str, shape: str, size: int, default: Config) -> Config:
    """Return `default`, updated with the tables' entry for the nearest size, if there is one."""
    entries = (nearest(table(family, device, folder).get(shape, {}), size) for folder in _folders)
    changes = next((config for config in entries if config), {})
    return {**default, **{name: value for name, value in changes.items() if name != "by"}}


def known_configs(family: str, device: str, shape: str) -> list[Config]:
    """Return the configs of all sizes that the tables have for a shape."""
    return [
        config
        for folder in _folders
        for config in table(family, device, folder).get(shape, {}).values()
    ]


def save(
    family: str,
    device: str,
    shape: str,
    configs: Mapping[int, Config],
    folder: Path,
    by: str = "measured",
) -> Path:
    """Add configs by size to a table, and return its path.

    The file is replaced atomically, so readers see the old table or the new one.

    by: where the configs are from.
    """
    path = path_of(family, device, folder)
    whole = json.loads(path.read_text()) if path.exists() else {}
    sizes = whole.get(shape, {}) | {
        str(size): {**config, "by": by} for size, config in configs.items()
    }
    whole[shape] = {size: sizes[size] for size in sorted(sizes, key=int)}
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(whole, indent=1) + "\n")
    temporary.replace(path)
    table.cache_clear()
    return path
