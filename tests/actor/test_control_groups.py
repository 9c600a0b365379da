"""The limits of control groups."""

from __future__ import annotations

from pathlib import Path

import psutil

from moeserve.actor.control_groups import memory_limit


def test_the_memory_of_a_control_group(tmp_path: Path) -> None:
    root = tmp_path
    membership = root / "cgroup"
    group = root / "fs" / "a" / "b"
    group.mkdir(parents=True)
    membership.write_text("0::/a/b\n")
    total = psutil.virtual_memory().total
    assert memory_limit(root / "fs", membership) == total
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("1000\n")
    assert memory_limit(root / "fs", membership) == 1000
    (group / "memory.high").write_text("900\n")
    assert memory_limit(root / "fs", membership) == 900
    (group / "memory.high").unlink()
    membership.write_text("3:cpu:/x\n4:memory:/old\n")
    old = root / "fs" / "memory" / "old"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("2000\n")
    assert memory_limit(root / "fs", membership) == 2000
    assert memory_limit(root / "fs", root / "none") == total
