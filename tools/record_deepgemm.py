"""Print the signatures of a deep_gemm release as JSON.

    python tools/record_deepgemm.py FOLDER --name RELEASE

FOLDER has its sources. Reads the bindings in csrc/apis/gemm.hpp, or the Python functions if there
are none, without importing them. tests/moe/deep_gemm_signatures.json has the releases against which
the adapter is tested.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path

BOUND = re.compile(r'm\.def\("(\w+)",[^;]*?;', re.S)
ARGUMENT = re.compile(r'py::arg\("(\w+)"\)(?: = ([^,;)]+))?')
ALIAS = re.compile(r'm\.attr\("(\w+)"\) = m\.attr\("(\w+)"\)')
PYTHON_ALIAS = re.compile(r"'(\w+)': (m_grouped\w+),")
DEFAULTS = {"std::nullopt": "None", "true": "True", "false": "False"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes down the signatures of a deep_gemm release as JSON."
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--name", required=True, help="of the release")
    arguments = parser.parse_args()
    print(json.dumps({arguments.name: record(arguments.source)}, indent=1, sort_keys=True))


def record(source: Path) -> dict[str, str]:
    """Return the parameters of the grouped products over several experts.

    Raises ValueError if there are none.
    """
    bindings = source / "csrc" / "apis" / "gemm.hpp"
    found = bound(bindings.read_text()) if bindings.exists() else {}
    for path in () if found else sorted(source.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                for argument in node.args.args:
                    argument.annotation = None
                found.setdefault(node.name, ast.unparse(node.args))
        found |= {alias: found[name] for alias, name in PYTHON_ALIAS.findall(text) if name in found}
    found = {
        name: parameters
        for name, parameters in found.items()
        if name.startswith("m_grouped") and "_nt_" in name
    }
    if not found:
        raise ValueError(f"{source} holds no sources of deep_gemm")
    return found


def bound(text: str) -> dict[str, str]:
    """Return the functions that bindings define.

    m.def("f", &f, py::arg("a"), py::arg("b") = std::nullopt); -> {"f": "a, b=None"}
    """
    found = {}
    for definition in BOUND.finditer(text):
        arguments = [
            name if default == "" else f"{name}={DEFAULTS.get(default, default)}"
            for name, default in ARGUMENT.findall(definition[0])
        ]
        found[definition[1]] = ", ".join(arguments)
    return found | {alias: found[name] for alias, name in ALIAS.findall(text) if name in found}


if __name__ == "__main__":
    main()
