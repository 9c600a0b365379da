"""Which full tests a change asks for. `make test-all` runs all of them and records what they ran
on.

    python tools/full_tests.py stale     the groups whose sources changed since they last passed, comma separated
    python tools/full_tests.py record [GROUP ...]    these groups (all) have passed on the sources as they are

A test marked `full("group")` runs when `--full` names its group. The record is a file of digests,
so that a fresh clone knows without any history what was tested. The groups "shapes" (an hour),
"http" (ten minutes of random requests) and "wheel" (which asks the package index) have no sources:
`make test-all` alone runs them.
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
    """Returns a digest of the contents of the group's sources, in the order of their names."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES[group] for path in ROOT.glob(pattern)}):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def known() -> dict[str, str]:
    """Returns the digest on which each group last passed."""
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {}


def stale() -> list[str]:
    """Returns the groups whose sources are not those on which their tests last passed."""
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
