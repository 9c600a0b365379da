"""`moeserve config show`: every setting with its value and its origin, as YAML that --config reads again."""

from __future__ import annotations

import argparse

from moeserve.cli.settings import SECRET, Settled, add_flags, settings, settle
from moeserve.cli.yaml_file import dump_value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print every setting with its value and origin. Takes --config and all flags of `moeserve serve`."
    )
    add_flags(parser, shown=False)
    parser.usage = "%(prog)s [MODEL] [flags of `moeserve serve`]"


def run(args: argparse.Namespace) -> int:
    print(rendered(settle(args)))
    return 0


def rendered(settled: Settled) -> str:
    """The whole tree as YAML, origins as comments. Secrets are not shown."""
    lines: list[str] = []
    section = ""
    for setting in settings():
        if setting.section != section:
            section = setting.section
            lines.append(f"{section}:")
        value = getattr(getattr(settled.config, section), setting.name)
        origin = settled.origins.get(setting.path, "default")
        if setting.name in SECRET and value:
            lines.append(f"  # {setting.name}: {len(value)} set, not shown  ({origin})")
        else:
            text = f"  {setting.name}: {dump_value(value)}"
            lines.append(f"{text:<44} # {origin}")
    return "\n".join(lines)
