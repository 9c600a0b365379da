"""Translation of the flags of `vllm serve` and SGLang; the table is `assets/foreign_flags.yaml`.

A flag is translated to a setting, accepted because moeserve always behaves like that ("granted"),
or rejected with the alternative ("refused"). A translated or granted flag prints a note, so no flag
is ignored silently.
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

# Methods of --speculative-config that have another name in --speculate.
_METHODS = {"draft_model": "model", "eagle3": "eagle"}


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
                default = f"it is a flag of {server} that has no counterpart here"
                causes = (why for kind, why in self.refused.items() if fnmatchcase(flag, kind))
                return next(causes, default)
        return ""


class ForeignSetting(NamedTuple):
    """A foreign flag, and the value (as text) that it gives to a setting."""

    flag: str
    value: str


class Translation(NamedTuple):
    """A command line with its foreign flags translated."""

    words: list[str]  # without the foreign flags
    settings: dict[str, ForeignSetting]  # the settings that the foreign flags set, by name
    notes: list[str]  # a line about each foreign flag


@cache
def flag_table() -> Table:
    """Load the table, once."""
    return msgspec.yaml.decode(
        (files("moeserve") / "assets/foreign_flags.yaml").read_bytes(), type=Table
    )


def translate(words: Sequence[str], known: Collection[str]) -> Translation:
    """Translate the foreign flags in `words`; the command's own flags, `known`, stay.

    Raises ConfigError for a value that the setting does not support, and for a missing value.
    """
    translation = Translation(words=[], settings={}, notes=[])
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        if not equals:  # the value is the next word, if there is one
            value = rest[0] if rest and not rest[0].startswith("-") else ""
        if flag == "--served-model-name" and value and not equals:
            translation.words.extend((flag, _take_served_names(translation, rest)))
            continue
        template = _setting_template(flag, value, known)
        cause, takes_value = _why_granted(flag, value)
        if cause:
            shown_value = f" {value}" if takes_value else ""
            translation.notes.append(f"{flag}{shown_value} needs no setting: {cause}")
        elif template is None:
            # A flag of the command, or a word that the parser of the command rejects or uses.
            if equals:
                word = f"{flag}={value}"
            elif flag in known:
                word = flag
            translation.words.append(word)
            continue
        else:
            takes_value = "{}" in template
            _set(translation, flag, value if takes_value else None, template)
        if takes_value and not equals and rest:
            rest.pop(0)
    return translation


def _take_served_names(translation: Translation, rest: list[str]) -> str:
    """Remove the values of --served-model-name from `rest`: like vLLM, a name and aliases.

    Return them in the form of the setting. If no model was given before, only the first word is a
    name: the second one is the model.
    """
    names = [rest.pop(0)]
    has_model = "model" in translation.settings
    if translation.words and not translation.words[0].startswith("-"):
        has_model = True
    while has_model and rest and not rest[0].startswith("-"):
        names.append(rest.pop(0))
    return ",".join(names)


def _setting_template(flag: str, value: str, known: Collection[str]) -> str | None:
    """Return NAME={} or NAME=VALUE, the setting that a flag sets; None if it needs no translation.

    A flag of the command needs a translation only for values that have another name here.
    """
    if flag not in known:
        return flag_table().settings.get(flag)
    name = flag.removeprefix("--").replace("-", "_")
    return f"{name}={{}}" if f"{name}={value}" in flag_table().values else None


def _why_granted(flag: str, value: str) -> tuple[str, bool]:
    """Return why a flag needs no setting, or "" if it does, and whether the flag takes a value."""
    for pattern, why in flag_table().granted.items():
        granted_flag, _, value_pattern = pattern.partition(" ")
        if granted_flag != flag:
            continue
        if not value_pattern or (value and fnmatchcase(value, value_pattern)):
            return why, bool(value_pattern)
    return "", False


def _set(translation: Translation, flag: str, value: str | None, template: str) -> None:
    """Add the setting of a foreign flag, with a note. value: None if the flag takes none."""
    if value == "":
        raise ConfigError(f"{flag} needs a value")
    own_value = value
    if value is not None and template == "speculate={}":
        own_value = _speculate(flag, value)
    name, _, own_value = template.format(own_value).partition("=")
    own_value = flag_table().values.get(f"{name}={own_value}", own_value)
    earlier = translation.settings.setdefault(name, ForeignSetting(flag, own_value))
    if earlier.value != own_value:
        raise ConfigError(f"{earlier.flag} and {flag} disagree: both set {name}")
    setting = setting_named(name)
    setting.read(own_value, f"flag {flag}")  # raises if the setting does not support it
    if name == "model":
        meaning = f"the argument {own_value}"
    elif setting.flag:
        meaning = f"{setting.flag} {own_value}"
    else:
        meaning = f"`{setting.section}: {{{name}: {own_value!r}}}` in --config"
    shown_value = "" if value is None else f" {value}"
    translation.notes.append(f"{flag}{shown_value} is {meaning}")


def _speculate(flag: str, text: str) -> str:
    """Return the JSON of --speculative-config as a value of --speculate. Raises ConfigError."""
    remedy = "; or use --speculate, e.g. ngram:4"
    with ConfigError.instead_of(msgspec.MsgspecError, f"{flag}: expected a JSON object", remedy):
        config = msgspec.json.decode(text, type=dict[str, str | int])
    unknown = config.keys() - {"method", "model", "num_speculative_tokens"}
    if unknown:
        raise ConfigError(
            f"{flag}: {', '.join(sorted(unknown))}: no counterpart; use --speculate, e.g. ngram:4"
        )
    method = str(config.get("method", "draft_model"))
    own_method = "mtp" if method.endswith("mtp") else _METHODS.get(method, method)
    path = config.get("model") if own_method in ("model", "eagle") else None
    parts = (own_method, path, config.get("num_speculative_tokens"))
    return ":".join(str(part) for part in parts if part is not None)


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
