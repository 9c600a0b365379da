"""The settings of `moeserve.config` on the command line, in the environment and in YAML.

Flags, help and types come from the fields themselves. Precedence: flag, MOESERVE_* variable, --config file, default.
Every value knows where it came from.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from moeserve.cli.values import convert, strip_optional
from moeserve.config import SECTIONS, Config, check_range
from moeserve.errors import ConfigError

PREFIX = "MOESERVE_"
TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduling",
    "device": "device",
    "parallel": "ranks and experts",
    "server": "HTTP server",
}
SECRET = ("api_key",)
FILES = ("chat_template", "api_key_file", "admin_key_file", "cluster_key_file")


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the config tree. `flag` and `env` are None where only YAML can set it."""

    section: str
    name: str
    kind: Any
    default: Any
    help: str
    flag: str | None
    env: str | None
    field: dataclasses.Field[Any]

    @property
    def path(self) -> str:
        """The setting's place in a YAML file: section.name."""
        return f"{self.section}.{self.name}"

    def read(self, value: Any, origin: str) -> Any:
        """Returns `value` converted and checked. Raises ConfigError that names its origin."""
        try:
            found = convert(self.kind, value)
        except ValueError as error:
            raise ConfigError(f"{origin}: {error} ({self.help})") from None
        check_range(self.field, found, origin)
        return found


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """A config, and by "section.name" the origin of each value that is not the default."""

    config: Config
    origins: Mapping[str, str]


@functools.cache
def settings() -> tuple[Setting, ...]:
    """Returns every setting, in the order of the config tree."""
    found = []
    for section, kind in SECTIONS.items():
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            flag = field.metadata["flag"]
            if flag == "":
                flag = "--" + field.name.replace("_", "-")
            env = PREFIX + field.name.upper() if flag or field.name == "model" else None
            help = field.metadata["help"]
            found.append(Setting(section, field.name, hints[field.name], field.default, help, flag, env, field))
    return tuple(found)


def add_flags(parser: argparse.ArgumentParser, *, shown: bool = True, model: bool = True) -> None:
    """Adds the flags of all settings, grouped by section. shown=False keeps them out of --help.

    model: adds the positional MODEL too. Values stay text until `resolve`, so that every origin is checked alike.
    """
    if model:
        parser.add_argument("model", nargs="?", metavar="MODEL", help=_by_name()["model"].help)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with settings by section (see `moeserve config show`)"
    )
    groups = {section: parser.add_argument_group(title) for section, title in TITLES.items()}
    for setting in settings():
        if setting.flag is None:
            continue
        help = _help(setting) if shown else argparse.SUPPRESS
        kind, _ = strip_optional(setting.kind)
        how: dict[str, Any] = {"default": None, "dest": setting.name, "help": help}
        if kind is bool:
            how["action"] = argparse.BooleanOptionalAction
        else:
            how["metavar"] = _metavar(setting, kind)
            if get_origin(kind) is tuple:
                how["action"] = "append"
        groups[setting.section].add_argument(setting.flag, **how)


def _help(setting: Setting) -> str:
    stated = "(default" in setting.help or setting.default in (None, False, ())
    default = "yes" if setting.default is True else setting.default
    return (setting.help if stated else f"{setting.help} [{default}]").replace("%", "%%")


def _metavar(setting: Setting, kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    if setting.name.endswith("_bytes"):
        return "BYTES"
    if setting.name in FILES:
        return "FILE"
    return "N" if kind in (int, float) else "TEXT"


def resolve(args: argparse.Namespace, env: Mapping[str, str] = os.environ) -> ResolvedSettings:
    """Returns the config from flags, environment and file. Raises ConfigError with the origin of a bad value."""
    path = getattr(args, "config", None)
    file = read_file(Path(path)) if path else {}
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    origins: dict[str, str] = {}
    for setting in settings():
        given = getattr(args, setting.name, None)
        if given is not None:
            value, origin = given, f"flag {setting.flag}" if setting.flag else "argument MODEL"
        elif setting.env and env.get(setting.env):
            value, origin = env[setting.env], f"environment {setting.env}"
            if setting.name == "port" and value.startswith("tcp://"):
                raise ConfigError(
                    f"{origin}={value!r} was set by Kubernetes for a service named 'moeserve'; "
                    "give the pod enableServiceLinks: false, or pass --port"
                )
        elif setting.path in file:
            value, origin = file[setting.path], f"{path}: {setting.path}"
        else:
            continue
        values[setting.section][setting.name] = setting.read(value, origin)
        origins[setting.path] = origin
    config = Config(**{section: kind(**values[section]) for section, kind in SECTIONS.items()})
    return ResolvedSettings(config, origins)


def read_file(path: Path) -> dict[str, Any]:
    """Returns a YAML file's values by "section.name". Raises ConfigError for an unknown key, with the nearest one."""
    from moeserve.cli.yaml_file import load_mapping

    known = {section: [s.name for s in settings() if s.section == section] for section in SECTIONS}
    found: dict[str, Any] = {}
    for section, body in load_mapping(path).items():
        if section not in known:
            home = _by_name().get(section)
            hint = f"; write it under `{home.section}:`" if home else nearest(section, known)
            raise ConfigError(f"{path}: unknown section {section!r}{hint}")
        if body is None:
            continue
        if not isinstance(body, dict):
            raise ConfigError(f"{path}: {section}: expected `name: value` lines below it, got {body!r:.64}")
        for name, value in body.items():
            if name not in known[section]:
                home = _by_name().get(name)
                hint = f"; it belongs under `{home.section}:`" if home else nearest(name, known[section])
                raise ConfigError(f"{path}: unknown setting {section}.{name}{hint}")
            found[f"{section}.{name}"] = value
    return found


def unknown_variables(env: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the MOESERVE_* variables that no setting has, each with a hint: most likely typing errors."""
    known = [s.env for s in settings() if s.env]
    unknown = [n for n in env if n.startswith(PREFIX) and n not in known]
    return [name + nearest(name, known) for name in unknown if "_SERVICE_" not in name and "_PORT_" not in name]


def nearest(word: Any, known: Any) -> str:
    """Returns the end of an error message about an unknown name: the nearest known one, or all."""
    near = get_close_matches(str(word), list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


@functools.cache
def _by_name() -> Mapping[str, Setting]:
    return {setting.name: setting for setting in settings()}
