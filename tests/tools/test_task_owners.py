"""Every background task has an owner: `create_task` is for tasks that the same function awaits."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in (ROOT / "moeserve").glob("*/__init__.py"))
# The only task of a loop that does not run yet, for which `spawn` would need a running one: the
# store's task handles its own errors, and the thread of an LLM awaits its task and logs its error.
EXCEPTIONS = {"moeserve/comm/store.py": 1, "moeserve/frontend/llm.py": 1}
STARTS = {"create_task", "ensure_future"}


def orphans(source: str) -> list[str]:
    """Return the lines that start a task which its function does not keep in a local name."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    found = []
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and _name(call.func) in STARTS):
            continue
        node: ast.AST = call
        while not isinstance(node, ast.stmt | ast.Await | ast.NamedExpr):
            node = parents[node]
        in_group = isinstance(call.func, ast.Attribute) and _name(call.func.value) == "group"
        if not (in_group or _kept_here(node, call)):
            found.append(f"line {call.lineno}: {ast.unparse(call)[:60]}")
    return found


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _kept_here(node: ast.AST, call: ast.Call) -> bool:
    match node:
        case ast.Await() | ast.NamedExpr():
            return True
        case ast.Assign(targets=[ast.Name() | ast.Tuple(elts=[ast.Name(), *_])]):
            return True
        case ast.AnnAssign(target=ast.Name()) | ast.AugAssign(target=ast.Name()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"))):
            return name != "self"
    return False


@pytest.mark.parametrize("package", ["", *PACKAGES])
def test_no_task_is_left_without_an_owner(package: str) -> None:
    """The package "" stands for modules outside of packages."""
    folder = ROOT / "moeserve" / package
    for path in sorted(folder.rglob("*.py") if package else folder.glob("*.py")):
        name = str(path.relative_to(ROOT))
        found = orphans(path.read_text("utf-8"))
        assert len(found) == EXCEPTIONS.get(name, 0), f"{name}: use spawn: {found}"


def test_every_package_is_looked_at() -> None:
    folders = {path.relative_to(ROOT).parts[1] for path in (ROOT / "moeserve").rglob("*.py")}
    assert {name for name in folders if not name.endswith(".py")} <= set(PACKAGES)


@pytest.mark.parametrize(
    ("line", "orphan"),
    [
        ("self.task = asyncio.create_task(f())", True),
        ("asyncio.create_task(f())", True),
        ("self.tasks.append(asyncio.ensure_future(f()))", True),
        ("self.tasks[1] = loop.create_task(f())", True),
        ("task = asyncio.create_task(f())", False),
        ("tasks = {asyncio.create_task(f()) for _ in range(3)}", False),
        ("group.create_task(f())", False),
        ("self.task = spawn(f(), name='f', on_error=log_error)", False),
    ],
)
def test_orphans_are_found(line: str, orphan: bool) -> None:
    assert bool(orphans(f"async def g(self):\n    {line}\n")) == orphan
