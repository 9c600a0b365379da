"""`moeserve config show`: every setting with its value and its origin, as YAML that --config reads again."""

from __future__ import annotations

import argparse
from pathlib import Path

from moeserve.cli.settings import SECRET, ResolvedSettings, add_flags, resolve, settings
from moeserve.cli.yaml_file import dump_value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `moeserve serve` without help."""
    parser.description = "Print every setting with its value and origin. FILE is short for --config FILE."
    add_flags(parser, shown=False)
    parser.usage = "%(prog)s [FILE | MODEL] [flags of `moeserve serve`]"


def run(args: argparse.Namespace) -> int:
    """Prints the settings."""
    if args.model and not args.config and (Path(args.model).is_file() or args.model.endswith((".yaml", ".yml"))):
        args.model, args.config = None, args.model  # a model is a directory
    print(rendered(resolve(args)))
    return 0


def rendered(resolved: ResolvedSettings) -> str:
    """Returns all settings as YAML, with origins as comments and without secrets."""
    lines: list[str] = []
    section = ""
    for setting in settings():
        if setting.section != section:
            section = setting.section
            lines.append(f"{section}:")
        value = getattr(getattr(resolved.config, section), setting.name)
        origin = resolved.origins.get(setting.path, "default")
        if setting.name in SECRET and value:
            lines.append(f"  # {setting.name}: {len(value)} set, not shown  ({origin})")
        else:
            text = f"  {setting.name}: {dump_value(value)}"
            lines.append(f"{text:<44} # {origin}")
    return "\n".join(lines)
