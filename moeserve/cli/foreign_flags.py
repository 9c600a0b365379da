"""Translation of the flags of vLLM, SGLang and llama.cpp; `foreign_table.py` has their meanings.

A flag is translated to a setting, accepted because moeserve always behaves like that ("granted") or
because it changes nothing here ("no effect"), or rejected with the alternative ("refused"). A flag
that is translated or accepted prints a note, so no flag is ignored silently.
"""

import argparse
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_origin

import msgspec

from moeserve.cli.foreign_parts import ADAPTERS, COMPOSERS, REMAINDERS
from moeserve.cli.foreign_table import Meaning, foreign_table
from moeserve.cli.settings import all_settings, setting_named
from moeserve.errors import ConfigError

# Own flags that take several values elsewhere, and may stand before the model.
BEFORE_MODEL = ("--served-model-name", "--api-key")


class ForeignSetting(NamedTuple):
    """A foreign flag, and the value (as text) that it gives to a setting."""

    flag: str
    value: str


@dataclass
class Translation:
    """A command line with its foreign flags translated."""

    words: list[str] = field(default_factory=list)  # without the foreign flags
    # The settings that the foreign flags set, by name.
    settings: dict[str, ForeignSetting] = field(default_factory=dict)
    # Settings that several flags make together, by name; each with its parts.
    parts: dict[str, dict[str, ForeignSetting]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # a line about each foreign flag
    refusals: dict[str, str] = field(default_factory=dict)  # why, by flag and value


class _Word(NamedTuple):
    """A flag of a command line, with the values that follow it."""

    flag: str
    values: list[str]
    has_equals: bool

    @property
    def value(self) -> str:
        return " ".join(self.values)

    def __str__(self) -> str:
        return f"{self.flag} {self.value}" if self.values else self.flag


def translate(words: Sequence[str], known: Collection[str]) -> Translation:
    """Translate the foreign flags in `words`; the command's own flags, `known`, stay.

    Raises ConfigError for the refused flags, for a value that the setting does not support, and for
    a missing value.
    """
    translation = Translation()
    rest = join_dotted(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        full = "" if flag in known else foreign_table().full_name(flag)
        if full and full not in known:  # own flags have no abbreviations
            translation.notes.append(f"{flag} is short for {full}")
            flag = full
        if flag not in foreign_table().flags:
            translation.words.append(f"{flag}={value}" if equals and flag in known else word)
            if flag in known and not equals:
                translation.words[-1] = flag
            continue
        values = [value] if equals else _take_values(flag, translation, rest)
        _translate_word(translation, _Word(flag, values, bool(equals)), known)
    _check_refusals(translation.refusals)
    _compose(translation)
    return translation


def _check_refusals(refusals: Mapping[str, str]) -> None:
    """Raise ConfigError that names all refused flags, so that a user can correct them at once."""
    if len(refusals) > 1:
        lines = "".join(f"\n  {word}: {why}" for word, why in refusals.items())
        raise ConfigError(f"{len(refusals)} flags are not supported:{lines}")
    for word, why in refusals.items():
        raise ConfigError(f"{word} is not supported: {why}")


def join_dotted(words: Sequence[str]) -> list[str]:
    """Return the words with vLLM's two shorthands written out.

    `--x.a 1 --x.b.c=2` becomes `--x {"a": 1, "b": {"c": 2}}`, and -O3 becomes
    `--optimization-level=3`.
    """
    joined: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        base, dot, path = name.partition(".")
        base = base.replace("_", "-") if base.startswith("--") else base
        if base == "-O":
            base = "--optimization-level"
        if dot and base in foreign_table().flags:
            if not equals:
                value = rest.pop(0) if rest else ""
            _put(objects.setdefault(base, {}), path, value)
        elif word.startswith("-O"):
            level = word.removeprefix("-O").removeprefix("=")
            joined.append(f"--optimization-level={level}" if level else "--optimization-level")
        else:
            joined.append(word)
    for flag, tree in objects.items():
        joined.append(f"{flag}={json.dumps(tree)}")
    return joined


def _put(tree: dict[str, Any], path: str, text: str) -> None:
    """Set the item at a path with dots. A path that ends in "+" names a list, as in vLLM."""
    *parents, name = path.removesuffix("+").split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f".{path}: {parent} has a value already")
    value: Any = text
    if path.endswith("+"):
        value = text.split(",")
    else:
        with suppress(json.JSONDecodeError):
            value = json.loads(text)
    if isinstance(tree.get(name), dict):
        raise ConfigError(f".{path}: {name} has parts already")
    tree[name] = value


def _take_values(flag: str, translation: Translation, rest: list[str]) -> list[str]:
    """Remove the values of a flag from `rest`, and return them.

    Of the words behind a flag of BEFORE_MODEL, only the first is a value if no model was given
    before: the second one is the model.
    """
    table = foreign_table()
    if not table.takes_value(flag):
        return []
    has_model = "model" in translation.settings
    if translation.words and not translation.words[0].startswith("-"):
        has_model = True
    takes_many = table.flags[flag].arity == "many" and (has_model or flag not in BEFORE_MODEL)
    values: list[str] = []
    while rest and re.match(r"(?!-)|-[0-9]", rest[0]) and (takes_many or not values):
        values.append(rest.pop(0))
    return values


def _translate_word(translation: Translation, word: _Word, known: Collection[str]) -> None:
    """Add a flag that is in the table, or an own flag that other servers have too."""
    table = foreign_table()
    if word.flag in known:
        meaning = table.meaning_of_value(word.flag, word.value)
        name = word.flag.removeprefix("--").replace("-", "_")
        if meaning is None and f"{name}={word.value}" in table.values:
            meaning = Meaning("setting", f"{name}={{}}")
    else:
        meaning = table.meaning(word.flag, word.value)
        if word.has_equals and not table.takes_value(word.flag):
            raise ConfigError(f"{word.flag} takes no value, got {word.value!r:.64}")
    if meaning is None:
        translation.words.extend(_own_words(word))
    elif meaning.kind == "setting":
        _set(translation, word, meaning.text)
    elif meaning.kind == "refused":
        translation.refusals[_shown(word)] = meaning.text
    else:
        effect = "needs no setting" if meaning.kind == "granted" else "has no effect"
        translation.notes.append(f"{_shown(word)} {effect}: {meaning.text}")


def _shown(word: _Word) -> str:
    text = str(word)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _own_words(word: _Word) -> list[str]:
    """Return an own flag as its parser expects it: a flag for each of several values."""
    values = word.values
    if word.flag == "--served-model-name":
        values = [",".join(values)] if values else []
    elif len(values) == 1 and _is_list(word.flag) and values[0].startswith("["):
        with ConfigError.instead_of(msgspec.MsgspecError, f"{word.flag}: expected a JSON list"):
            values = msgspec.json.decode(values[0], type=list[str])
    if not values:
        return [word.flag]
    if word.has_equals and len(values) == 1:
        return [f"{word.flag}={values[0]}"]
    return [text for value in values for text in (word.flag, value)]


def _is_list(flag: str) -> bool:
    settings = {setting.flag: setting for setting in all_settings()}
    return flag in settings and get_origin(settings[flag].kind) is tuple


def _set(translation: Translation, word: _Word, template: str) -> None:
    """Add the setting, or the part of one, that a foreign flag sets, with a note."""
    if "{}" in template and not word.value:
        raise ConfigError(f"{word.flag} needs a value")
    name, _, value = template.format(word.value).partition("=")
    name, _, part = name.partition(".")
    if part:
        group = translation.parts.setdefault(name, {})
        _set_once(group, part, ForeignSetting(word.flag, value))
        return
    value = foreign_table().values.get(f"{name}={value}", value)
    _set_once(translation.settings, name, ForeignSetting(word.flag, value))
    setting_named(name).read(value, f"flag {word.flag}")  # raises if it does not support it
    translation.notes.append(f"{_shown(word)} is {_own_form(name, value)}")


def _set_once(group: dict[str, ForeignSetting], name: str, given: ForeignSetting) -> None:
    earlier = group.setdefault(name, given)
    if earlier.value != given.value:
        raise ConfigError(f"{earlier.flag} and {given.flag} disagree: both set {name}")


def _own_form(name: str, value: str) -> str:
    """Return how a setting is given in moeserve's own way."""
    setting = setting_named(name)
    if name == "model":
        return f"the argument {value}"
    if setting.flag == "--enable-prefix-caching":
        return setting.flag if value == "yes" else "--no-enable-prefix-caching"
    if setting.flag:
        return f"{setting.flag} {value}"
    return f"`{setting.section}: {{{name}: {value!r}}}` in --config"


def _compose(translation: Translation) -> None:
    """Add the settings that several flags make together."""
    for name, parts in translation.parts.items():
        if name not in COMPOSERS:  # needs the other arguments: `merge`
            continue
        flags = ", ".join(dict.fromkeys(part.flag for part in parts.values()))
        with ConfigError.instead_of(ConfigError, flags):
            value = COMPOSERS[name]({part: given.value for part, given in parts.items()})
        if name in translation.settings:
            raise ConfigError(f"{translation.settings[name].flag} and {flags} both set {name}")
        translation.settings[name] = ForeignSetting(flags, value)
        verb = "are" if ", " in flags else "is"
        remainder = REMAINDERS.get(name, "")
        translation.notes.append(f"{flags} {verb} {_own_form(name, value)}{remainder}")


def merge(args: argparse.Namespace, translation: Translation) -> None:
    """Add the settings of a translation to the parsed arguments. Raises ConfigError if one is given
    twice.
    """
    settings = translation.settings.items()
    args.foreign_flags = {name: setting.flag for name, setting in settings}
    for name, (flag, value) in settings:
        if getattr(args, name, None) is not None:
            raise ConfigError(
                f"{flag} and {setting_named(name).flag or name.upper()} both set {name}: give one"
            )
        setattr(args, name, value)
    for name, adapt in ADAPTERS.items():
        for given in translation.parts.get(name, {}).values():
            translation.notes.append(adapt(args, given.flag, given.value))
