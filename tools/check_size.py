"""Size report: lines per package, and the tail (longest files and functions). Fails above the budgets.

    python tools/check_size.py

A reader should get through moeserve in a weekend; what makes code unreadable is its tail, so the tail has a budget.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 450
FUNCTION_LINES = 70
PACKAGE_LINES = 61_450  # rises only with a decision record (docs/decisions/0034)


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines, where) of every function in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            found.append((lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return found


def main() -> int:
    paths = [p for p in (ROOT / "moeserve").rglob("*.py") if not p.is_relative_to(ROOT / "moeserve" / "kernels")]
    files = {p: p.read_text().count("\n") for p in sorted([*paths, *(ROOT / "kernels").rglob("*.py")])}
    packages: dict[str, int] = {}
    for path, lines in files.items():
        parts = path.relative_to(ROOT).parts
        package = "/".join(parts[:2] if len(parts) > 2 else parts[:1])
        packages[package] = packages.get(package, 0) + lines
    for name, lines in sorted(packages.items(), key=lambda item: -item[1]):
        print(f"{lines:7,}  {name}")
    total = sum(packages.values())
    print(f"{total:7,}  in all (budget {PACKAGE_LINES:,})")
    tail = sorted((f for p in files for f in functions(p)), reverse=True)
    for lines, where in tail[:5]:
        print(f"{lines:7}  {where}")
    broken = [f"{p.relative_to(ROOT)} has {n} lines (budget {FILE_LINES})" for p, n in files.items() if n > FILE_LINES]
    broken += [f"{where} has {n} lines (budget {FUNCTION_LINES})" for n, where in tail if n > FUNCTION_LINES]
    if total > PACKAGE_LINES:
        broken.append(f"moeserve/ and kernels/ have {total} lines (budget {PACKAGE_LINES})")
    for line in broken:
        print(f"over budget: {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
