"""Plugins: packages whose entry points add parts, and every way in which one cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moeserve.errors import ConfigError
from moeserve.plugins import VARIABLE, Registry, installed_plugins
from tests.plugin_packages import Install

GROUP = "moeserve.test_group"
MODULE = "def one():\n    return 1\n\n\ndef two():\n    return 2\n\n\nNUMBER = 3\n"


def registry(**options: Any) -> Registry[Any]:
    built_in = {"dumps": "json:dumps", "lazy": "antigravity:fly", "gone": "no_such_module:x"}
    return Registry(GROUP, built_in, **options)


def test_built_in_parts_are_imported_when_they_are_asked_for() -> None:
    parts = registry()
    parts.load_plugins()
    assert list(parts) == ["dumps", "lazy", "gone"]
    assert len(parts) == 3
    assert "lazy" in parts
    assert "other" not in parts
    assert "antigravity" not in sys.modules
    assert parts["dumps"]([1]) == "[1]"
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        parts["gone"]
    with pytest.raises(KeyError):
        parts["other"]


def test_a_package_adds_parts(install: Install) -> None:
    parts = registry()
    assert "first" not in parts
    install("mine", {GROUP: {"first": "mine_parts:one"}}, {"mine_parts.py": MODULE})
    assert "mine_parts" not in sys.modules
    assert list(parts) == ["dumps", "lazy", "gone", "first"]
    assert "mine_parts" not in sys.modules
    parts.load_plugins()
    assert "mine_parts" in sys.modules
    assert parts["first"]() == 1
    (plugin,) = installed_plugins()
    assert (plugin.package, plugin.version, plugin.target) == ("mine", "1.0", "mine_parts:one")
    assert plugin.used


@pytest.mark.parametrize(
    ("target", "code", "why"),
    [
        ("broken_a:f", "import no_such_module\n", "ModuleNotFoundError: No module named 'no_such"),
        ("broken_b:f", "1 / 0\n", "ZeroDivisionError: division by zero"),
        ("broken_c:f", "", "AttributeError: module 'broken_c' has no attribute 'f'"),
        ("broken_d:f", "f = 3\n", "it is a int, but must be callable"),
        ("broken_e:f", "def f(:\n", "SyntaxError"),
        ("not a target", "", "AttributeError"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_refused_by_name(
    target: str, code: str, why: str, install: Install
) -> None:
    install("bad-package", {GROUP: {"bad": target}}, {f"{target[:8]}.py": code})
    parts = registry()
    with pytest.raises(ConfigError) as caught:
        parts.load_plugins()
    text = str(caught.value)
    assert text.startswith("plugin 'bad' of bad-package 1.0 (moeserve.test_group, ")
    assert why in text
    assert "uninstall bad-package" in text
    assert VARIABLE in text
    assert parts["dumps"]([1]) == "[1]"  # others serve


def test_a_variable_limits_which_plugins_are_used(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {GROUP: {"a": "limited:one", "b": "limited:two", "broken": "no_such_module:x"}}
    install("limited", entries, {"limited.py": MODULE})
    monkeypatch.setenv(VARIABLE, " a, b ,")
    parts = registry()
    parts.load_plugins()
    assert sorted(parts.plugins) == ["a", "b"]
    assert [plugin.used for plugin in installed_plugins()] == [True, True, False]
    monkeypatch.setenv(VARIABLE, "")
    assert list(registry()) == ["dumps", "lazy", "gone"]
    monkeypatch.setenv(VARIABLE, "a,c")
    with pytest.raises(ConfigError, match=r"=a,c: no .* plugin 'c'; .*: a, b, broken$"):
        registry().load_plugins()
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match="plugin 'broken' of limited"):
        registry().load_plugins()


def test_a_name_has_one_meaning(install: Install) -> None:
    install("mine", {GROUP: {"auto": "mine_parts:one"}}, {"mine_parts.py": MODULE})
    assert "auto" in registry()
    with pytest.raises(ConfigError, match=r"'auto' of mine 1.0 .* the name of a built-in one"):
        registry(reserved=("auto",)).load_plugins()
    install("theirs", {GROUP: {"auto": "mine_parts:two"}}, version="2.0")
    with pytest.raises(ConfigError, match=r"plugin 'auto' of .*another plugin 'auto' of .*uninst"):
        registry().load_plugins()


def test_a_plugin_does_not_replace_a_built_in_part(install: Install) -> None:
    install("mine", {GROUP: {"dumps": "mine_parts:one"}}, {"mine_parts.py": MODULE})
    with pytest.raises(ConfigError, match=r"'dumps' of mine 1.0 .* built-in one; rename"):
        registry().load_plugins()
    assert registry()["dumps"]([1]) == "[1]"


def test_a_value_of_a_setting_is_checked_against_both(install: Install) -> None:
    install("mine", {GROUP: {"first": "mine_parts:one"}}, {"mine_parts.py": MODULE})
    for name in ("auto", "first"):
        registry().check(name, "transport", ("auto", "dumps"))
    with pytest.raises(
        ConfigError,
        match=r"^transport: 'fist' is unknown; did you mean 'first'\? known: auto, dumps, first$",
    ):
        registry().check("fist", "transport", ("auto", "dumps"))


def test_of_packages_of_one_name_the_first_on_the_path_counts(
    install: Install, tmp_path: Path
) -> None:
    install("mine", {GROUP: {"first": "mine_parts:one"}}, {"mine_parts.py": MODULE})
    (tmp_path / "mine-site").rename(tmp_path / "older")
    sys.path.append(str(tmp_path / "older"))
    try:
        install("mine", {GROUP: {"first": "mine_parts:two"}}, {"mine_parts.py": MODULE}, "2.0")
        assert [plugin.version for plugin in installed_plugins()] == ["2.0"]
        assert registry()["first"]() == 2
    finally:
        sys.path.remove(str(tmp_path / "older"))
