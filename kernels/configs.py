"""Launch parameters per device and shape, measured or predicted, with those of the nearest size as
fallback.

A table is `<folder>/<family>-<device>.json`: {shape: {size: {parameter: value}}}. A shape is fixed
by the weights (such as "E128 I768 D2048 bfloat16"), a size by the step (such as the number of
rows). Beside the parameters, "by" says where they are from: "predicted" by kernels/cost.py, or what
measured them. Added folders take precedence over `kernels/configs/`, the folder of the package,
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
    """name: as in tables of configurations."""

    name: str
    multiprocessors: int


@cache
def facts_of(device: torch.device) -> DeviceFacts:
    """Return facts about a device, cached: asking CUDA takes longer than a launch. cpu -> ("cpu",
    1)
    """
    if device.type != "cuda":
        return DeviceFacts(device.type, 1)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(properties.name, properties.multi_processor_count)


def cache_folder(name: str) -> Path:
    """The folder `name` of the user's cache of moeserve."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moeserve" / name


def user_folder() -> Path:
    """The folder in which `moeserve tune` keeps its tables."""
    return cache_folder("configs")


def add_folder(folder: Path) -> None:
    """Look in `folder` first from now on. Call it before the first launch: launches remember what
    they found.
    """
    if folder not in _folders:
        _folders.insert(0, folder)


def path_of(family: str, device: str, folder: Path) -> Path:
    """The file of a kernel family's table for a device. linear, NVIDIA H200 ->
    linear-nvidia-h200.json
    """
    return folder / f"{family}-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


@cache
def table(family: str, device: str, folder: Path = FOLDER) -> Mapping[str, Mapping[int, Config]]:
    """Return the known configurations of a kernel family on a device, with their "by"; empty where
    there are none.
    """
    path = path_of(family, device, folder)
    if not path.exists():
        return {}
    return {
        shape: {int(size): c for size, c in sizes.items()}
        for shape, sizes in json.loads(path.read_text()).items()
    }


def listing(folder: Path) -> Iterator[str]:
    """Yield a line for each shape of a folder's tables: the sizes, and where they are from."""
    for path in sorted(folder.glob("*.json")):
        for shape, sizes in json.loads(path.read_text()).items():
            origins = sorted({config.get("by", "measured") for config in sizes.values()})
            yield f"{path.stem} {shape}, sizes {', '.join(sizes)}: {'; '.join(origins)}"


def nearest(sizes: Mapping[int, Config], size: int) -> Config | None:
    """Return the configuration whose size is nearest by ratio; of two equally near, the larger's.

    {16: a, 64: b}, 20 -> a; {16: a, 64: b}, 32 -> b
    """
    if not sizes:
        return None
    return sizes[min(sizes, key=lambda known: (abs(math.log(known / max(size, 1))), -known))]


def tuned(family: str, device: str, shape: str, size: int, default: Config) -> Config:
    """Return `default`, changed by what the tables know of the shape at the nearest size, if they
    do.
    """
    found = (nearest(table(family, device, folder).get(shape, {}), size) for folder in _folders)
    changes = next((config for config in found if config), {})
    return {**default, **{name: value for name, value in changes.items() if name != "by"}}


def known(family: str, device: str, shape: str) -> list[Config]:
    """Return all configurations in tables for a shape, whatever the size."""
    return [
        config
        for folder in _folders
        for config in table(family, device, folder).get(shape, {}).values()
    ]


def keep(
    family: str,
    device: str,
    shape: str,
    found: Mapping[int, Config],
    folder: Path,
    by: str = "measured",
) -> Path:
    """Add configurations by size to a shape's in a folder's table, and where they are from.

    The file is replaced atomically: readers find the old table or the new one.
    """
    path = path_of(family, device, folder)
    whole = json.loads(path.read_text()) if path.exists() else {}
    sizes = whole.get(shape, {}) | {
        str(size): {**config, "by": by} for size, config in found.items()
    }
    whole[shape] = {size: sizes[size] for size in sorted(sizes, key=int)}
    folder.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(whole, indent=1) + "\n")
    aside.replace(path)
    table.cache_clear()
    return path
