"""`moeserve pull`, `moeserve list` and `moeserve rm`: models of a hub in the cache."""

import argparse
import asyncio
import sys
import time

from moeserve.errors import ConfigError
from moeserve.hub.names import HubName, parse_hub_name
from moeserve.hub.units import size_text

NAME_HELP = "owner/name, owner/name@revision, owner/name:QUANTIZATION, or an address of the hub"


class Pull:
    """Downloads a model."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the name."""
        parser.add_argument("name", metavar="NAME", help=NAME_HELP)
        parser.epilog = (
            "Downloads what is missing in the Hugging Face cache, and only files that are read. "
            "HF_TOKEN is the token for gated and private models, HF_ENDPOINT another hub, "
            "HF_HUB_CACHE or HF_HOME another cache."
        )

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Download, and print the path."""
        from moeserve.actor.process import to_stderr
        from moeserve.hub.progress import TerminalProgress
        from moeserve.models.fetch import pull

        with TerminalProgress(to_stderr) as progress:
            path = asyncio.run(pull(_name(args.name), progress))
        print(path)
        return 0


class List:
    """Lists the models in the cache."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add nothing."""

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Print a table."""
        from moeserve.hub.cache import cache_dir
        from moeserve.loader.cached_models import cached_models

        models = cached_models()
        if not models:
            print(
                f"{cache_dir()} has no models; `moeserve pull NAME` downloads one", file=sys.stderr
            )
            return 0
        rows = [("NAME", "REVISION", "SIZE", "LAST USED")]
        for model in models:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.used_at_s))
            rows.append((str(model.name), model.commit[:12], size_text(model.size), used))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for row in rows:
            print("  ".join(map(str.ljust, row, widths)).rstrip())
        return 0


class Remove:
    """Removes a model from the cache."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the names."""
        parser.add_argument("names", nargs="+", metavar="NAME", help=NAME_HELP)
        parser.epilog = (
            "owner/name removes all that the cache has of the repository; a quantization, path or "
            "revision only that. A running server keeps the files that it has opened, but ends if "
            "it has to start an engine again."
        )

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Remove one after the other."""
        from moeserve.loader.cached_models import remove

        names = [_name(text) for text in args.names]
        for name in names:
            freed = remove(name)
            print(f"removed {name}: {size_text(freed)} freed")
        return 0


def _name(text: str) -> HubName:
    """Return the name of a model on a hub. Raises ConfigError."""
    name = parse_hub_name(text)
    if name is None:
        raise ConfigError(
            f"{text[:200]!r} is not the name of a model on a hub; expected {NAME_HELP}"
        )
    return name
