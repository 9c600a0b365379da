"""Tell which groups of full tests are stale, and record those that have passed.

    python tools/full_tests.py stale                 # print groups whose sources have changed
    python tools/full_tests.py record [GROUP ...]    # these groups (default: all) have passed

A test marked `full("group")` runs in full if `--full` names its group. tests/full_tests.json has a
digest of each group's sources as of its last pass, so that a fresh clone knows what was tested
without any history. `make test-all` runs all groups and records them. The groups "shapes" (an
hour), "http" (ten minutes of random requests) and "wheel" (which needs the package index) have no
sources: only `make test-all` runs them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "full_tests.json"
SOURCES = {
    "sanitizers": ["csrc/**/*.[ch]pp", "tests/native/*.py", "tests/ops/*.cpp"],
    "aot": ["kernels/*.py", "tests/kernels/*.py"],
    "kernels": [
        *("kernels/*.py", "tests/kernels/*.py", "tools/gpu/references.py"),
        *("moeserve/ops/*.py", "moeserve/moe/experts/*.py"),
    ],
    "models": [
        *("kernels/*.py", "csrc/**/*.[ch]pp", "tests/models/*.py", "tests/*.py"),
        *(f"moeserve/{p}/**/*.py" for p in ("ops", "blocks", "loader", "models")),
    ],
    "graphs": [
        "moeserve/runner/**/*.py",
        "moeserve/moe/*.py",
        "kernels/*.py",
        "tools/gpu/*.py",
        "tests/runner/*.py",
    ],
    "ranks": [f"moeserve/{p}/**/*.py" for p in ("comm", "moe", "cluster", "engine", "runner")],
}


def digest(group: str) -> str:
    """Return a digest of the contents of the group's sources, in the order of their names."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES[group] for path in ROOT.glob(pattern)}):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def known() -> dict[str, str]:
    """Return the digests with which each group last passed."""
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {}


def stale() -> list[str]:
    """Return the groups whose sources differ from those with which their tests last passed."""
    recorded = known()
    return [group for group in SOURCES if recorded.get(group) != digest(group)]


def main() -> None:
    match sys.argv[1:]:
        case ["stale"]:
            print(",".join(stale()))
        case ["record", *groups] if set(groups) <= set(SOURCES):
            RECORD.write_text(
                json.dumps(
                    known() | {group: digest(group) for group in groups or SOURCES}, indent=1
                )
                + "\n"
            )
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
