"""What the flags of vLLM, SGLang and llama.cpp mean here: `assets/foreign_flags/`.

The directory has a list of all flags of each server, and `table.yaml` with their meanings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Literal, NamedTuple

import msgspec

# The first list counts for a flag that several servers have.
LISTS = {"vLLM": "vllm.txt", "SGLang": "sglang.txt", "llama.cpp": "llama_cpp.txt"}
MIN_ABBREVIATION = 8  # characters; shorter words are rather typing errors
Kind = Literal["setting", "granted", "no_effect", "refused"]
_ARITIES = {"": "none", "VALUE": "one", "[VALUE]": "optional", "VALUE...": "many"}


class ForeignFlag(NamedTuple):
    """A flag of another server, with all its names."""

    server: str
    names: tuple[str, ...]
    negations: tuple[str, ...]  # names that negate it, such as --no-x
    arity: str  # how many values it takes: none, one, optional, many


class Meaning(NamedTuple):
    """What a flag means here: the setting NAME=VALUE, or why it is granted or refused."""

    kind: Kind
    text: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """`table.yaml`, which documents its parts."""

    settings: dict[str, str]
    values: dict[str, str]
    granted: dict[str, str]
    no_effect: dict[str, str]
    refused: dict[str, str]


class _FlagMeaning(NamedTuple):
    flag: str  # a name, or a shell pattern of names
    value: str  # a shell pattern of values; "": any
    meaning: Meaning

    @property
    def is_pattern(self) -> bool:
        return any(sign in self.flag for sign in "*?[")


@dataclass(frozen=True, slots=True)
class Table:
    """The meanings, by flag."""

    flags: Mapping[str, ForeignFlag]  # by name and negation
    values: Mapping[str, str]  # "setting=value" as given to other servers: the value here
    entries: Sequence[_FlagMeaning]

    def full_name(self, word: str) -> str:
        """Return the flag of which `word` is an abbreviation, as vLLM and SGLang have them.

        "" if `word` is a flag, if no flag begins with it, or if several do.
        """
        if word in self.flags or not word.startswith("--") or len(word) < MIN_ABBREVIATION:
            return ""
        found = {
            flag.names: name
            for name, flag in self.flags.items()
            if name.startswith(word) and flag.server != "llama.cpp"
        }
        return next(iter(found.values())) if len(found) == 1 else ""

    def takes_value(self, word: str) -> bool:
        """Return whether values can follow a flag of the lists."""
        flag = self.flags[word]
        return flag.arity != "none" and word not in flag.negations

    def meaning(self, word: str, value: str) -> Meaning | None:
        """Return what the flag `word` means with this value; None for an unknown flag."""
        flag = self.flags.get(word)
        if flag is None:
            return None
        if word in flag.negations:
            exact = next((entry for entry in self._named((word,)) if not entry.value), None)
            return exact.meaning if exact else self._negated(flag)
        return self.meaning_of_value(word, value) or self._plain(flag)

    def meaning_of_value(self, word: str, value: str) -> Meaning | None:
        """Return what a flag means with this value, if that differs from its other values."""
        flag = self.flags.get(word)
        if flag is None or not value:
            return None
        with_values = [entry for entry in self.entries if entry.value]
        for entry in sorted(with_values, key=lambda entry: -len(entry.value)):
            has_name = any(fnmatchcase(name, entry.flag) for name in flag.names)
            if has_name and fnmatchcase(value, entry.value):
                return entry.meaning
        return None

    def _plain(self, flag: ForeignFlag) -> Meaning | None:
        """Return what a flag means whatever its value: by its name, or by the longest pattern."""
        plain = [entry for entry in self._named(flag.names) if not entry.value]
        if plain:
            return plain[0].meaning
        patterns = [
            entry
            for entry in self.entries
            if entry.is_pattern
            and not entry.value
            and any(fnmatchcase(name, entry.flag) for name in flag.names)
        ]
        longest = max(patterns, key=lambda entry: len(entry.flag), default=None)
        return longest.meaning if longest else None

    def _negated(self, flag: ForeignFlag) -> Meaning | None:
        """Return what the negation of a flag means, from what the flag means."""
        meaning = self._plain(flag)
        if meaning is None or meaning.kind == "setting":
            return None
        if meaning.kind == "refused":
            return Meaning("granted", "it is the default")
        return Meaning("no_effect", meaning.text)

    def _named(self, names: Sequence[str]) -> Iterator[_FlagMeaning]:
        return (entry for entry in self.entries if entry.flag in names)


@cache
def foreign_table() -> Table:
    """Load the lists and the table, once."""
    file = msgspec.yaml.decode(_read("table.yaml"), type=_File)
    entries = [
        _entry(words, Meaning("setting", setting)) for words, setting in file.settings.items()
    ]
    reasons: dict[Kind, dict[str, str]] = {
        "granted": file.granted,
        "no_effect": file.no_effect,
        "refused": file.refused,
    }
    for kind, flags_by_reason in reasons.items():
        for reason, words in flags_by_reason.items():
            entries += [_entry(word, Meaning(kind, reason)) for word in words.split()]
    flags: dict[str, ForeignFlag] = {}
    for server in LISTS:
        for flag in flags_of(server):
            # The same short name has other meanings elsewhere: -n is --nnodes, or --predict.
            names = tuple(name for name in flag.names if name.startswith("--") or name not in flags)
            for name in (*names, *flag.negations):
                flags.setdefault(name, flag._replace(names=names))
    return Table(flags, file.values, entries)


def flags_of(server: str) -> list[ForeignFlag]:
    """Return all flags of a server, from its list."""
    lines = _read(LISTS[server]).decode().splitlines()
    return [_flag(server, line) for line in lines if line and not line.startswith("#")]


def _flag(server: str, line: str) -> ForeignFlag:
    words = line.split()
    value = "" if words[-1].startswith("-") else words.pop()
    slash = words.index("/") if "/" in words else len(words)
    return ForeignFlag(server, tuple(words[:slash]), tuple(words[slash + 1 :]), _ARITIES[value])


def _entry(word: str, meaning: Meaning) -> _FlagMeaning:
    flag, _, value = word.partition("=")
    return _FlagMeaning(flag, value, meaning)


def _read(name: str) -> bytes:
    return (files("moeserve") / "assets" / "foreign_flags" / name).read_bytes()
