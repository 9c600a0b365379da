"""Print the lines of each package, and the longest functions; fail on files and functions too long.

    python tools/check_size.py

A file of more than 600 lines or a function of more than 90 fails the check, because readers get
lost there. The totals are only printed.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES = 600
FUNCTION_LINES = 90


def functions(path: Path) -> list[tuple[int, str]]:
    """Return (lines, where) of every function in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            found.append((lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return found


def lines_of_packages(files: dict[Path, int]) -> dict[str, int]:
    """Return the lines of each package, such as "moeserve/engine"."""
    packages: dict[str, int] = {}
    for path, lines in files.items():
        parts = path.relative_to(ROOT).parts
        package = "/".join(parts[:2] if len(parts) > 2 else parts[:1])
        packages[package] = packages.get(package, 0) + lines
    return packages


def main() -> int:
    kernels = ROOT / "moeserve" / "kernels"  # a link to kernels/, counted separately
    paths = [p for p in (ROOT / "moeserve").rglob("*.py") if not p.is_relative_to(kernels)]
    paths += (ROOT / "kernels").rglob("*.py")
    files = {path: path.read_text().count("\n") for path in sorted(paths)}
    packages = lines_of_packages(files)
    for name, lines in sorted(packages.items(), key=lambda item: -item[1]):
        print(f"{lines:7,}  {name}")
    print(f"{sum(packages.values()):7,}  in total")

    longest = sorted((found for path in files for found in functions(path)), reverse=True)
    for lines, where in longest[:5]:
        print(f"{lines:7}  {where}")

    too_long = [
        f"{path.relative_to(ROOT)}: {lines} lines, at most {FILE_LINES}"
        for path, lines in files.items()
        if lines > FILE_LINES
    ]
    too_long += [
        f"{where}: {lines} lines, at most {FUNCTION_LINES}"
        for lines, where in longest
        if lines > FUNCTION_LINES
    ]
    for line in too_long:
        print(f"too long: {line}")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
