"""An object's fields are written by the object itself: no actor changes another one's state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["moeserve/actor", "moeserve/cluster", "moeserve/comm"]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def foreign_writes(source: str) -> list[str]:
    """Return the assignments `x.y = ...` where x is neither self nor made in that function."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, Function):
            made = _made_names(function)
            found += [
                f"line {target.lineno}: {ast.unparse(target)} = ..."
                for target in _targets(function)
                if not _is_own(target, made)
            ]
    return found


def _made_names(function: Function) -> set[str]:
    """Return the names of objects that the function makes."""
    found = set()
    for node in _nodes(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=made)):
                if _is_class(made):
                    found.add(name)
    return found


def _is_class(made: ast.expr) -> bool:
    name = made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")
    return name.lstrip("_")[:1].isupper() or name == "cls"


def _targets(function: Function) -> Iterator[ast.Attribute]:
    for node in _nodes(function):
        match node:
            case ast.Assign(targets=targets):
                pass
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                targets = [target]
            case ast.Delete(targets=targets):
                pass
            case _:
                continue
        for target in targets:
            yield from (
                part
                for part in ast.walk(target)
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store | ast.Del)
            )


def _is_own(target: ast.Attribute, made: set[str]) -> bool:
    """Return whether this is a field of the object itself, or within one that was just made."""
    root: ast.expr = target
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    if not isinstance(root, ast.Name):
        return False
    return root.id in made or (root.id in ("self", "cls") and target.value is root)


def _nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function, nested functions excluded."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function | ast.ClassDef):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_object_writes_the_fields_of_another(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}, {write}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for write in foreign_writes(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "foreign"),
    [
        ("engine.held = True", True),
        ("self.engine.held = True", True),
        ("engine.count += 1", True),
        ("a, engine.b = 1, 2", True),
        ("del engine.held", True),
        ("self.held = True", False),
        ("made = Engine(); made.held = True", False),
        ("held = engine.held", False),
        ("self.table[rank] = state", False),
    ],
)
def test_foreign_writes_are_found(line: str, foreign: bool) -> None:
    source = f"class A:\n    def method(self, engine):\n        {line}\n"
    assert bool(foreign_writes(source)) == foreign
