"""Print the signatures of a deep_ep release as JSON.

    python tools/record_deepep.py WHEEL_OR_FOLDER --name RELEASE

Reads the Python sources without importing them, so it needs neither CUDA nor torch. The output is
{"RELEASE": {"Buffer.combine": "self, x, handle, topk_weights=None, ...", ...}}.
tests/moe/deepep/signatures.json has the releases against which the adapters are tested.
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

CLASSES = ("Buffer", "ElasticBuffer", "EPHandle", "EventOverlap")
FUNCTIONS = ("destroy_all_managed_nccl_comm",)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes down the signatures of a deep_ep release as JSON."
    )
    parser.add_argument(
        "source", type=Path, help="a wheel, or a folder that holds the package deep_ep"
    )
    parser.add_argument("--name", required=True, help="of the release")
    arguments = parser.parse_args()
    print(json.dumps({arguments.name: record(arguments.source)}, indent=1, sort_keys=True))


def record(source: Path) -> dict[str, str]:
    """Return the parameters of all functions and public methods that the adapters use.

    Raises ValueError if there are none.
    """
    found: dict[str, str] = {}
    for text in _modules(source):
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
                found[node.name] = _parameters(node)
            if isinstance(node, ast.ClassDef) and node.name in CLASSES:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and _is_public(method.name):
                        found[f"{node.name}.{method.name}"] = _parameters(method)
    if not found:
        raise ValueError(f"{source} holds no Python sources of deep_ep")
    return found


def _is_public(name: str) -> bool:
    return name == "__init__" or not name.startswith("_")


def _modules(source: Path) -> Iterator[str]:
    if source.is_file():
        with zipfile.ZipFile(source) as wheel:
            for name in wheel.namelist():
                if name.startswith("deep_ep/") and name.endswith(".py"):
                    yield wheel.read(name).decode()
        return
    folder = source / "deep_ep" if (source / "deep_ep").is_dir() else source
    for path in sorted(folder.rglob("*.py")):
        yield path.read_text()


def _parameters(method: ast.FunctionDef) -> str:
    """Return names and defaults, without annotations."""
    arguments = method.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    return ast.unparse(arguments)


if __name__ == "__main__":
    main()
