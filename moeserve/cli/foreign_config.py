"""A --config file of vLLM or SGLang: their flags as names of a flat YAML file."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from moeserve.cli.foreign_flags import merge, translate
from moeserve.cli.foreign_table import foreign_table
from moeserve.cli.settings import add_flags, all_settings, read_document, suggestion
from moeserve.config import SECTIONS
from moeserve.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def adopt_foreign_file(args: argparse.Namespace) -> None:
    """If args.config is a file of another server, translate its values into args.file_values.

    Prints a note about each flag. Raises ConfigError, as for flags on the command line.
    """
    path = getattr(args, "config", None)
    if not path:
        return
    document = read_document(Path(path))
    if not _is_foreign(document):
        return
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_flags(parser, shown=False, model=False)
    with ConfigError.instead_of(ConfigError, path):
        translation = translate(_words(document), parser._option_string_actions)
        found, unknown = parser.parse_known_args(translation.words)
        if unknown:
            name = unknown[0].lstrip("-").partition("=")[0]
            raise ConfigError(f"unknown name {name!r}{suggestion(name, _known_names())}")
        merge(found, translation)
    for note in translation.notes:
        print(f"moeserve: {path}: {note}", file=sys.stderr)
    args.file_values = {
        setting.path: value
        for setting in all_settings()
        if (value := getattr(found, setting.name, None)) is not None
    }


def _is_foreign(document: Mapping[Any, Any]) -> bool:
    """Return whether the names at the top are flags, not sections with settings below them."""
    names = _known_names()
    is_flag = False
    for key, value in document.items():
        if key in SECTIONS and isinstance(value, dict | None):
            return False
        is_flag = is_flag or str(key).replace("_", "-") in names
    return is_flag


def _known_names() -> set[str]:
    flags = {setting.flag for setting in all_settings() if setting.flag}
    return {flag[2:] for flag in (*flags, *foreign_table().flags) if flag.startswith("--")}


def _words(document: Mapping[Any, Any]) -> list[str]:
    """Return the values as words of a command line, the model first."""
    words: list[str] = []
    known = _known_names()
    for key, value in sorted(document.items(), key=lambda item: item[0] != "model"):
        flag = "--" + str(key).replace("_", "-")
        is_unknown = flag[2:] not in known and not foreign_table().full_name(flag)
        if value is True or (is_unknown and not value):
            words.append(flag)  # an unknown name is refused, whatever its value
        elif value is False:
            negation = f"--no-{flag[2:]}"
            if negation[2:] in known or negation == "--no-enable-prefix-caching":
                words.append(negation)
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif isinstance(value, dict):
            words.append(f"{flag}={json.dumps(value, default=str)}")
        elif value is not None:
            words.append(f"{flag}={value}")
    return words
