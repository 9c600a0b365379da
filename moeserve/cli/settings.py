"""The settings of `moeserve.config` on the command line, in the environment and in YAML.

Flags, help and types are derived from the dataclass fields. Precedence: flag, MOESERVE_* variable,
--config file, default. The origin of every value is recorded. Text (25.6k, 2GiB, yes) and YAML
scalars are converted to the setting's type.
"""

import argparse
import dataclasses
import functools
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from moeserve.config import SECTIONS, Config, check_range
from moeserve.errors import ConfigError
from moeserve.plugins import VARIABLE

PREFIX = "MOESERVE_"
TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduling",
    "device": "device",
    "parallel": "ranks and experts",
    "server": "HTTP server",
}
SECRET_SETTINGS = ("api_key",)
MAX_SHOWN_NAMES = 100  # in an error message
FILE_SETTINGS = (
    "chat_template",
    "api_key_file",
    "admin_key_file",
    "cluster_key_file",
    "ssl_certfile",
    "ssl_keyfile",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the config tree. `flag` and `env` are None if only YAML can set it."""

    section: str
    name: str
    kind: Any  # type of its values
    help: str
    flag: str | None
    env: str | None  # environment variable
    field: dataclasses.Field[Any]

    @property
    def path(self) -> str:
        """The setting's path in a YAML file: section.name."""
        return f"{self.section}.{self.name}"

    def read(self, value: Any, origin: str) -> Any:
        """Convert and check `value`. Raises ConfigError that names its origin."""
        with ConfigError.instead_of(ValueError, origin, f" ({self.help})"):
            converted = convert(self.kind, value)
        check_range(self.field, converted, origin)
        return converted


@dataclass(frozen=True, slots=True)
class ResolvedSettings:
    """A config, and the origin of each value that is not the default, by "section.name"."""

    config: Config
    origins: Mapping[str, str]


@functools.cache
def all_settings() -> tuple[Setting, ...]:
    """Return every setting, in the order of the config tree."""
    settings = []
    for section, kind in SECTIONS.items():
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):
            name = field.name
            flag = field.metadata["flag"]
            if flag == "":  # named after the field; None: no flag
                flag = "--" + name.replace("_", "-")
            settings.append(
                Setting(
                    section=section,
                    name=name,
                    kind=hints[name],
                    help=field.metadata["help"],
                    flag=flag,
                    # MODEL has no flag, because it is positional.
                    env=PREFIX + name.upper() if flag or name == "model" else None,
                    field=field,
                )
            )
    return tuple(settings)


def add_flags(parser: argparse.ArgumentParser, *, shown: bool = True, model: bool = True) -> None:
    """Add the flags of all settings, grouped by section.

    Values stay text until `resolve`, so that values of all origins are checked alike.

    Args:
        shown: Whether --help lists the flags of the settings.
        model: Whether to add the positional MODEL too.
    """
    if model:
        parser.add_argument(
            "model", nargs="?", metavar="MODEL", help=_settings_by_name()["model"].help
        )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with settings by section (see `moeserve config show`)",
    )
    groups = {section: parser.add_argument_group(title) for section, title in TITLES.items()}
    for setting in all_settings():
        if setting.flag is None:
            continue
        kind, _ = strip_optional(setting.kind)
        options: dict[str, Any] = {"default": None, "dest": setting.name, "help": argparse.SUPPRESS}
        if shown:
            options["help"] = _help(setting)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(setting, kind)
        if get_origin(kind) is tuple:
            options["action"] = "append"
        groups[setting.section].add_argument(setting.flag, **options)


def _help(setting: Setting) -> str:
    default = setting.field.default
    if "(default" in setting.help or default in (None, False, ()):
        return setting.help
    if isinstance(default, float):
        default = f"{default:g}"
    return f"{setting.help} [{'yes' if default is True else default}]"


def _metavar(setting: Setting, kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    if setting.name.endswith("_bytes"):
        return "BYTES"
    if setting.name in FILE_SETTINGS:
        return "FILE"
    return "N" if kind in (int, float) else "TEXT"


def resolve(args: argparse.Namespace, env: Mapping[str, str] = os.environ) -> ResolvedSettings:
    """Return the config from flags, environment and file. Raises ConfigError that names the origin
    of an invalid value.
    """
    path = getattr(args, "config", None)
    file_values = getattr(args, "file_values", None)  # of a file of another server
    if file_values is None:
        file_values = read_file(Path(path)) if path else {}
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    origins: dict[str, str] = {}
    # Flags of other servers that were translated to settings, by the setting's name.
    foreign_flags = getattr(args, "foreign_flags", {})
    for setting in all_settings():
        value = getattr(args, setting.name, None)
        if value is not None:
            flag = foreign_flags.get(setting.name, setting.flag)
            origin = f"flag {flag}" if flag else "argument MODEL"
        elif setting.env and env.get(setting.env):
            value = env[setting.env]
            origin = f"environment {setting.env}"
            if setting.name == "port" and value.startswith("tcp://"):
                raise ConfigError(
                    f"{origin}={value!r} was set by Kubernetes for a service named 'moeserve'; "
                    "give the pod enableServiceLinks: false, or pass --port"
                )
        elif setting.path in file_values:
            value = file_values[setting.path]
            origin = f"{path}: {setting.path}"
        else:
            continue
        values[setting.section][setting.name] = setting.read(value, origin)
        origins[setting.path] = origin
    config = Config(**{section: kind(**values[section]) for section, kind in SECTIONS.items()})
    return ResolvedSettings(config, origins)


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses repeated keys, of which YAML silently keeps the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raise ConstructorError at a repeated key; see PyYAML."""
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_document(path: Path) -> dict[str, Any]:
    """Return what a --config file has at its top. Raises ConfigError if it is not a mapping."""
    try:
        document = yaml.load(path.read_text("utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --config {path}: {error}") from None
    except (yaml.YAMLError, TypeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict | None):
        raise ConfigError(f"{path}: expected sections such as `server:`, got {document!r:.64}")
    return document or {}


def read_file(path: Path) -> dict[str, Any]:
    """Return a YAML file's values by "section.name". Raises ConfigError for an unknown key, which
    suggests the nearest known one.
    """
    values: dict[str, Any] = {}
    for section, body in read_document(path).items():
        if section not in SECTIONS:
            raise ConfigError(
                f"{path}: unknown section {section!r}{_hint('write it', section, SECTIONS)}"
            )
        if not isinstance(body, dict | None):
            raise ConfigError(
                f"{path}: {section}: expected `name: value` lines below it, got {body!r:.64}"
            )
        known = [setting.name for setting in all_settings() if setting.section == section]
        for name, value in (body or {}).items():
            if name not in known:
                raise ConfigError(
                    f"{path}: unknown setting {section}.{name}{_hint('it belongs', name, known)}"
                )
            values[f"{section}.{name}"] = value
    return values


def _hint(advice: str, name: Any, known: Iterable[str]) -> str:
    """Return the end of an error message: the section of a setting with this name, or a similar
    name.
    """
    setting = _settings_by_name().get(name)
    return f"; {advice} under `{setting.section}:`" if setting else suggestion(name, known)


def unknown_variables(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the MOESERVE_* variables of no setting, each with a hint. Most are misspelled."""
    known = [VARIABLE, *(setting.env for setting in all_settings() if setting.env)]
    unknown = [name for name in env if name.startswith(PREFIX) and name not in known]
    not_settings = ("_SERVICE_", "_PORT_", "_LAUNCH_")  # set by Kubernetes and `moeserve launch`
    return [
        name + suggestion(name, known)
        for name in unknown
        if not any(word in name for word in not_settings)
    ]


def setting_named(name: str) -> Setting:
    """Return the setting with that name. Raises KeyError."""
    return _settings_by_name()[name]


def suggestion(word: Any, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: a similar known name, or all, if
    they are few.
    """
    names = sorted(known)
    close_names = get_close_matches(str(word), names, 1)
    if close_names:
        return f"; did you mean {close_names[0]!r}?"
    return "" if len(names) > MAX_SHOWN_NAMES else f"; known: {', '.join(names)}"


@functools.cache
def _settings_by_name() -> Mapping[str, Setting]:
    return {setting.name: setting for setting in all_settings()}


_BOOLS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def parse_int(text: str) -> int:
    """Parse a whole number: 4096, 1_000, 25.6k, 2GiB.

    Decimal units: k, m, g, t, kB, MB, ... Binary units: K, M, G, T, KiB, MiB, ...
    Raises ValueError with an example if `text` has another form or is not whole.
    """
    match = re.fullmatch(r"([+-]?[0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmgtKMGT]?)(i?B?)", text.strip())
    if match is None:
        raise ValueError(f"expected a whole number such as 4096, 25.6k or 2GiB, got {text!r}")
    digits, unit, suffix = match.groups()
    is_binary = suffix.startswith("i") or (unit.isupper() and not suffix)
    base = 1024 if is_binary else 1000
    scale: int = base ** " kmgt".index(unit.lower() or " ")  # the exponent of k is 1, of m 2, ...
    number = Fraction(digits.replace("_", "")) * scale
    if number.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return number.numerator


def strip_optional(kind: Any) -> tuple[Any, bool]:
    """Split a type: int | None -> (int, True); int -> (int, False)."""
    if get_origin(kind) in (Union, types.UnionType):
        (inner,) = (member for member in get_args(kind) if member is not type(None))
        return inner, True
    return kind, False


def convert(kind: Any, value: Any) -> Any:
    """Convert `value` (text from a flag or variable, or a YAML value) to `kind`. Raises ValueError
    that says what was expected.
    """
    inner, is_optional = strip_optional(kind)
    if value is None and is_optional:
        return None
    if inner is int and isinstance(value, str):
        return parse_int(value)
    form = get_origin(inner) or inner  # such as tuple, Literal, bool
    texts = value if isinstance(value, list) else [value]
    if not all(_is_utf8(text) for text in texts if isinstance(text, str)):
        raise ValueError(
            f"expected text in UTF-8, got {value!a:.64}; rename the file, or use a locale of"
            " UTF-8 such as LC_ALL=C.UTF-8"
        )
    try:
        parsed = value
        if isinstance(value, str) and form in _TEXT_PARSERS:
            parsed = _TEXT_PARSERS[form](value)
        converted = msgspec.convert(parsed, kind)
        has_empty_text = converted == "" or (form is tuple and not all(converted))
        if has_empty_text or (form is float and not math.isfinite(converted)):
            raise ValueError
    except (ValueError, KeyError):  # msgspec.ValidationError is a ValueError
        # Without an entry, the type is a Literal.
        expected = _EXPECTED_VALUES.get(form) or f"one of {', '.join(map(str, get_args(inner)))}"
        if form is Literal and isinstance(value, bool):
            expected += " (in quotes, as YAML reads it otherwise)"
        shown = repr(value)
        if len(shown) > 64:
            shown = shown[:61] + "..."
        raise ValueError(f"expected {expected}, got {shown}") from None
    return converted


def _is_utf8(text: str) -> bool:
    """Return whether a text can be sent to other processes.

    Python reads bytes of a path that are not UTF-8 as surrogates, which cannot be encoded.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# How text is parsed for each type. For other types, it is left as text.
_TEXT_PARSERS: dict[Any, Callable[[str], Any]] = {
    bool: lambda text: _BOOLS[text.lower()],
    float: float,
    tuple: lambda text: text.split(","),
}
_EXPECTED_VALUES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text (in quotes, if YAML reads it otherwise)",
    tuple: "a list of words",
}
