"""Translation of the flags of `vllm serve` and SGLang; the table is `assets/foreign_flags.yaml`.

A flag is translated to a setting, accepted because moeserve always behaves like that, or rejected
with the alternative. The first two print a note; no flag is ignored silently.
"""

import argparse
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import msgspec

from moeserve.cli.settings import setting_named
from moeserve.errors import ConfigError

_METHODS = {
    "draft_model": "model",
    "eagle3": "eagle",
}  # methods of --speculative-config that have another name here


class Table(msgspec.Struct, frozen=True):
    """The table, by flag. The YAML file documents its parts."""

    settings: dict[str, str]
    values: dict[str, str]
    granted: dict[str, str]
    refused: dict[str, str]
    others: dict[str, str]

    def advice(self, flag: str) -> str:
        """Return why a flag of another server is rejected; "" if no server has the flag."""
        if (exact := self.refused.get(flag)) is not None:
            return exact
        for server, names in self.others.items():
            if flag[2:] in names.split():
                kinds = (why for kind, why in self.refused.items() if fnmatchcase(flag, kind))
                return next(kinds, f"it is a flag of {server} that has no counterpart here")
        return ""


class ForeignSetting(NamedTuple):
    """A foreign flag, and the value (as text) that it gives to a setting."""

    flag: str
    value: str


class Translation(NamedTuple):
    """A command line with its foreign flags translated."""

    words: list[str]  # without the foreign flags
    settings: dict[str, ForeignSetting]  # the settings that these set, by name
    notes: list[str]  # a line about each of them


@cache
def table() -> Table:
    """Load the table, once."""
    return msgspec.yaml.decode(
        (files("moeserve") / "assets/foreign_flags.yaml").read_bytes(), type=Table
    )


def translate(words: Sequence[str], known: Collection[str]) -> Translation:
    """Translate the foreign flags in `words`; the command's own flags, `known`, stay.

    Raises ConfigError for a value that the setting does not support, and for a missing value.
    """
    found = Translation([], {}, [])
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        if not equals:
            value = rest[0] if rest and not rest[0].startswith("-") else ""
        if flag == "--served-model-name" and value and not equals:
            found.words.extend((flag, _names(found, rest)))
            continue
        name = flag.removeprefix("--").replace("-", "_")
        own = f"{name}={{}}" if flag in known and f"{name}={value}" in table().values else None
        template = own or (None if flag in known else table().settings.get(flag))
        granted, takes_value = _granted(flag, value)
        if granted:
            found.notes.append(f"{flag}{f' {value}' * takes_value} needs no setting: {granted}")
        elif template is None:
            found.words.append(flag + equals + value if equals else flag if flag in known else word)
            continue
        else:
            takes_value = "{}" in template
            _set(found, flag, value if takes_value else None, template)
        if takes_value and not equals and rest:
            rest.pop(0)
    return found


def _names(found: "Translation", rest: list[str]) -> str:
    """Take the values of --served-model-name: like vLLM, a name and aliases.

    If no model was given before, only the first word is a name: the second one is the model.
    """
    names = [rest.pop(0)]
    has_model = bool(found.words) and not found.words[0].startswith("-")
    while (has_model or "model" in found.settings) and rest and not rest[0].startswith("-"):
        names.append(rest.pop(0))
    return ",".join(names)


def _granted(flag: str, value: str) -> tuple[str, bool]:
    """Return why a flag needs no setting, or "" if it does, and whether the flag takes a value."""
    for pattern, why in table().granted.items():
        wanted, _, values = pattern.partition(" ")
        if wanted == flag and (not values or (value and fnmatchcase(value, values))):
            return why, bool(values)
    return "", False


def _set(found: Translation, flag: str, value: str | None, template: str) -> None:
    if value == "":
        raise ConfigError(f"{flag} needs a value")
    ours = value
    if value is not None and template == "speculate={}":
        ours = _speculate(flag, value)
    name, _, ours = template.format(ours).partition("=")
    ours = table().values.get(f"{name}={ours}", ours)
    if found.settings.setdefault(name, ForeignSetting(flag, ours)).value != ours:
        raise ConfigError(f"{found.settings[name].flag} and {flag} disagree: both set {name}")
    setting = setting_named(name)
    setting.read(ours, f"flag {flag}")
    meant = (
        f"{setting.flag} {ours}"
        if setting.flag
        else f"`{setting.section}: {{{name}: {ours!r}}}` in --config"
    )
    meant = f"the argument {ours}" if name == "model" else meant
    found.notes.append(f"{flag}{'' if value is None else f' {value}'} is {meant}")


def _speculate(flag: str, text: str) -> str:
    """Return the JSON of --speculative-config as a value of --speculate. Raises ConfigError."""
    remedy = "; or use --speculate, e.g. ngram:4"
    with ConfigError.instead_of(msgspec.MsgspecError, f"{flag}: expected a JSON object", remedy):
        asked = msgspec.json.decode(text, type=dict[str, str | int])
    unknown = asked.keys() - {"method", "model", "num_speculative_tokens"}
    if unknown:
        raise ConfigError(
            f"{flag}: {', '.join(sorted(unknown))}: no counterpart; use --speculate, e.g. ngram:4"
        )
    method = str(asked.get("method", "draft_model"))
    kind = "mtp" if method.endswith("mtp") else _METHODS.get(method, method)
    path = asked.get("model") if kind in ("model", "eagle") else None
    return ":".join(
        str(part) for part in (kind, path, asked.get("num_speculative_tokens")) if part is not None
    )


def merge(args: argparse.Namespace, settings: Mapping[str, ForeignSetting]) -> None:
    """Add the settings of a translation to the parsed arguments. Raises ConfigError if one is given
    twice.
    """
    args.foreign_flags = {name: setting.flag for name, setting in settings.items()}
    for name, (flag, value) in settings.items():
        if getattr(args, name, None) is not None:
            raise ConfigError(
                f"{flag} and {setting_named(name).flag or name.upper()} both set {name}: give one"
            )
        setattr(args, name, value)
