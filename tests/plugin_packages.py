"""Installed packages with entry points, made for a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Entries = Mapping[str, Mapping[str, str]]  # group -> name -> "module:attribute"
Install = Callable[..., Path]


def write_package(
    folder: Path,
    name: str,
    entries: Entries,
    files: Mapping[str, str] | None = None,
    version: str = "1.0",
) -> Path:
    """Write a distribution as pip leaves it in site-packages: its files and its dist-info."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines: list[str] = []
    for group, targets in entries.items():
        lines += [f"[{group}]", *(f"{key} = {target}" for key, target in targets.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for path, text in (files or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def installer(root: Path, monkeypatch: Any) -> Install:
    """Return `write_package`, whose packages this process and its children then find."""

    def install(name: str, *args: Any, **options: Any) -> Path:
        folder = write_package(root / f"{name}-site", name, *args, **options)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
        return folder

    return install
