"""There are no import cycles, not even through lazy or TYPE_CHECKING imports."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Packages whose modules are in no circle.
FREE_OF_CIRCLES = [
    "kernels",
    "moeserve.actor",
    "moeserve.blocks",
    "moeserve.cli",
    "moeserve.client",
    "moeserve.cluster",
    "moeserve.comm",
    "moeserve.engine",
    "moeserve.frontend",
    "moeserve.loader",
    "moeserve.models",
    "moeserve.moe",
    "moeserve.ops",
    "moeserve.plan",
    "moeserve.runner",
    "moeserve.server",
    "moeserve.text",
]

Graph = Mapping[str, Set[str]]


def modules_of(root: Path, *packages: str) -> dict[str, Path]:
    """Return the path of each module of these packages, by its dotted name."""
    modules = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imports_of(name: str, source: str, modules: Set[str]) -> set[str]:
    """Return which of `modules` a module imports anywhere in its source."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: relative imports are not used here"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else str(node.module))
    return found & modules - {name}


def graph_of(modules: Mapping[str, Path]) -> Graph:
    """Return the imports of each module. `moeserve.kernels` is a link to `kernels`."""
    return {
        name: imports_of(name, path.read_text("utf-8"), modules.keys())
        for name, path in modules.items()
    }


def circles(graph: Graph) -> list[list[str]]:
    """Return the sets of nodes that reach each other, sorted (Kosaraju's algorithm)."""
    finished: list[str] = []
    seen: set[str] = set()

    def visit(start: str, edges: Graph, found: list[str]) -> None:
        if start in seen:
            return
        seen.add(start)
        path = [(start, iter(sorted(edges[start])))]
        while path:
            node, targets = path[-1]
            target = next((it for it in targets if it not in seen), None)
            if target is None:
                found.append(node)
                path.pop()
            else:
                seen.add(target)
                path.append((target, iter(sorted(edges[target]))))

    for node in sorted(graph):
        visit(node, graph, finished)
    backward: dict[str, set[str]] = {node: set() for node in graph}
    for node, targets in graph.items():
        for target in targets:
            backward[target].add(node)
    seen.clear()
    components = []
    for node in reversed(finished):
        component: list[str] = []
        visit(node, backward, component)
        components.append(sorted(component))
    return sorted(component for component in components if len(component) > 1)


@pytest.fixture(scope="module")
def found() -> list[list[str]]:
    return circles(graph_of(modules_of(ROOT, "moeserve", "kernels")))


@pytest.mark.parametrize("package", FREE_OF_CIRCLES)
def test_no_module_of_this_package_is_in_a_circle(package: str, found: list[list[str]]) -> None:
    bad = [
        circle
        for circle in found
        if any(name == package or name.startswith(f"{package}.") for name in circle)
    ]
    assert not bad, "\n".join(" <-> ".join(circle) for circle in bad)


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e", "a"}}
    assert circles(graph) == [["a", "b", "c"], ["e", "f"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_lazy_and_type_checking_imports_count() -> None:
    source = """
import m.top
from m import module, name
if TYPE_CHECKING:
    from m.typed import T
def f():
    from m.lazy import x
"""
    modules = {"m", "m.top", "m.module", "m.typed", "m.lazy", "m.unused"}
    expected = {"m.top", "m.module", "m", "m.typed", "m.lazy"}
    assert imports_of("m.here", source, modules) == expected
