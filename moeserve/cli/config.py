"""`moeserve config show` prints every setting and its origin; `moeserve config check` checks a
file.
"""

import argparse
from pathlib import Path

import yaml

from moeserve.cli.foreign_config import adopt_foreign_file
from moeserve.cli.settings import (
    SECRET_SETTINGS,
    ResolvedSettings,
    add_flags,
    all_settings,
    resolve,
)
from moeserve.errors import ConfigError


class Show:
    """Prints every setting as YAML that --config can read."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the flags of `moeserve serve` without help."""
        parser.description = (
            "Print every setting with its value and where it comes from, as YAML for --config. "
            "FILE is short for --config FILE."
        )
        add_flags(parser, shown=False)
        parser.usage = "%(prog)s [FILE | MODEL] [flags of `moeserve serve`]"

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Print the settings."""
        if args.model and not args.config and _is_settings_file(args.model):
            args.config = args.model
            args.model = None
            adopt_foreign_file(args)
        print(rendered(resolve(args)))
        return 0


class Check:
    """Validates a --config file without starting anything."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add FILE, which may also be given as --config FILE."""
        parser.add_argument("file", nargs="?", metavar="FILE", help="YAML file for --config")
        parser.add_argument("--config", metavar="FILE", help="the same as FILE")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        """Print how many settings the file has. Raises ConfigError for the first invalid one."""
        if (args.file is None) == (args.config is None):
            raise ConfigError("name one file: moeserve config check FILE")
        args.config = args.config or args.file
        adopt_foreign_file(args)
        print(f"{args.config}: ok, {len(resolve(args, env={}).origins)} settings")
        return 0


def _is_settings_file(path: str) -> bool:
    """Return whether an argument names a YAML file rather than a model."""
    if path.endswith((".yaml", ".yml")):
        return True
    return Path(path).is_file() and not path.endswith(".gguf")


def rendered(resolved: ResolvedSettings) -> str:
    """Return all settings as YAML, with origins as comments and without secrets."""
    lines: list[str] = []
    for setting in all_settings():
        if f"{setting.section}:" not in lines:
            lines.append(f"{setting.section}:")
        value = getattr(getattr(resolved.config, setting.section), setting.name)
        origin = resolved.origins.get(setting.path, "default")
        if setting.name in SECRET_SETTINGS and value:
            lines.append(f"  # {setting.name}: {len(value)} set, not shown  ({origin})")
        else:
            plain = list(value) if isinstance(value, tuple) else value
            text = (
                yaml.safe_dump(plain, default_flow_style=True, width=10**6)
                .removesuffix("\n...\n")
                .rstrip("\n")
            )
            lines.append(f"  {setting.name}: {text}".ljust(44) + f" # {origin}")
    return "\n".join(lines)
