"""Registries of named parts of moeserve: built-in ones, and plugins from installed packages.

A plugin is an entry point in a registry's group, declared in the package's pyproject.toml:

    [project.entry-points."moeserve.models"]
    MyModelForCausalLM = "my_package.family:FAMILY"

Every installed plugin is used, unless MOESERVE_PLUGINS lists the names of plugins to use, such as
`MOESERVE_PLUGINS=a,b`; an empty value disables all. docs/plugins.md describes the groups.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, TypeVar

from moeserve.errors import ConfigError

PREFIX = "moeserve."  # prefix of the groups of entry points
VARIABLE = "MOESERVE_PLUGINS"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point of an installed package."""

    group: str
    name: str
    target: str  # "module:attribute"
    package: str
    version: str
    used: bool  # not excluded by MOESERVE_PLUGINS

    def __str__(self) -> str:
        return (
            f"plugin {self.name!r} of {self.package} {self.version} ({self.group}, {self.target})"
        )


def installed_plugins() -> tuple[Plugin, ...]:
    """Return all plugins of installed packages, including those that MOESERVE_PLUGINS excludes."""
    return _scan(tuple(sys.path), os.environ.get(VARIABLE))


@lru_cache(maxsize=4)  # a scan reads a file of each installed package
def _scan(path: tuple[str, ...], allowed: str | None) -> tuple[Plugin, ...]:
    names = _split_names(allowed)
    plugins = [
        Plugin(
            group=entry.group,
            name=entry.name,
            target=entry.value,
            package=package.name,
            version=package.version,
            used=allowed is None or entry.name in names,
        )
        for package in _packages()
        for entry in package.entry_points
        if entry.group.startswith(PREFIX)
    ]
    return tuple(sorted(plugins, key=lambda plugin: (plugin.group, plugin.name)))


def _split_names(allowed: str | None) -> set[str]:
    return {name.strip() for name in (allowed or "").split(",")} - {""}


def _packages() -> list[Distribution]:
    """Return the packages with plugins for moeserve; of equal names, the first on sys.path."""
    packages: dict[str, Distribution] = {}
    for package in distributions():
        if f"[{PREFIX}" in (package.read_text("entry_points.txt") or ""):
            packages.setdefault(package.name, package)
    return list(packages.values())


def _not_callable(name: str, part: Any) -> str:
    return "" if callable(part) else f"it is a {type(part).__name__}, but must be callable"


class Registry(Mapping[str, T]):
    """A mapping of names to parts of one kind, which are imported on first access.

    Iteration yields the names, built-in ones first. Iteration and `in` import nothing.
    """

    def __init__(
        self,
        group: str,
        built_in: Mapping[str, str],
        *,
        reserved: Collection[str] = (),
        misfit: Callable[[str, Any], str] = _not_callable,
    ) -> None:
        """Create a registry.

        group: the group of the entry points.
        built_in: name -> "module:attribute".
        reserved: names that plugins must not have.
        misfit: function of a plugin's name and object that returns why the object is not such a
            part, or "".
        """
        self.group = group
        self.built_in = tuple(built_in)
        self._targets = built_in
        self._reserved = reserved
        self._misfit = misfit
        self._parts: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name in self._targets:
            if name not in self._parts:
                self._parts[name] = _import_target(self._targets[name])
            return self._parts[name]
        return self._load(self.plugins[name])

    def __iter__(self) -> Iterator[str]:
        yield from self._targets
        yield from self.plugins

    def __len__(self) -> int:
        return len(self._targets) + len(self.plugins)

    def __contains__(self, name: object) -> bool:
        return name in self._targets or name in self.plugins

    def import_parts(self, names: Iterable[str]) -> None:
        """Import these parts now, so that their first use does not take the time."""
        for name in names:
            self[name]

    @property
    def plugins(self) -> dict[str, Plugin]:
        """The plugins in use, by name.

        Raises ConfigError if a name is ambiguous, or MOESERVE_PLUGINS has an unknown name.
        """
        by_name: dict[str, Plugin] = {}
        installed = installed_plugins()
        _check_variable(installed)
        for plugin in installed:
            if plugin.group != self.group or not plugin.used:
                continue
            if plugin.name in self._targets or plugin.name in self._reserved:
                raise ConfigError(
                    f"{plugin} has the name of a built-in one; rename the plugin, or list the "
                    f"plugins to use in {VARIABLE}"
                )
            if plugin.name in by_name:
                raise ConfigError(
                    f"{plugin} has the name of another {by_name[plugin.name]}; uninstall one of "
                    "the two packages"
                )
            by_name[plugin.name] = plugin
        return by_name

    def load_plugins(self) -> None:
        """Import every plugin of the group, at start, so that a broken one is found early.

        Raises ConfigError with the plugin's name, package and error.
        """
        for plugin in self.plugins.values():
            self._load(plugin)

    def check(self, name: str, setting: str, built_in: Sequence[str]) -> None:
        """Raise ConfigError unless `name` is a plugin or in `built_in`.

        The error names `setting` and the closest known value.
        """
        known = [*built_in, *self.plugins]
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"{setting}: {name!r} is unknown; {hint}known: {', '.join(known)}")

    def _load(self, plugin: Plugin) -> T:
        key = f"{plugin.name} = {plugin.target}"
        if key not in self._parts:
            try:
                part = EntryPoint(plugin.name, plugin.target, self.group).load()
            except Exception as error:
                raise _load_error(plugin, f"{type(error).__name__}: {error}") from error
            if misfit := self._misfit(plugin.name, part):
                raise _load_error(plugin, misfit)
            self._parts[key] = part
        return self._parts[key]


def _check_variable(installed: Collection[Plugin]) -> None:
    allowed = os.environ.get(VARIABLE)
    installed_names = {plugin.name for plugin in installed}
    if unknown := _split_names(allowed) - installed_names:
        raise ConfigError(
            f"{VARIABLE}={allowed}: no installed package has the plugin {min(unknown)!r}; "
            f"installed plugins: {', '.join(sorted(installed_names)) or 'none'}"
        )


def _import_target(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _load_error(plugin: Plugin, cause: str) -> ConfigError:
    return ConfigError(
        f"{plugin} cannot be loaded: {cause}. Repair or uninstall {plugin.package}, or list the "
        f"plugins to use in {VARIABLE}"
    )
