"""Flags that every command which talks to a running server shares, and the client made from them."""

from __future__ import annotations

import argparse
import os

from moeserve.client import AsyncClient
from moeserve.errors import ConfigError

DEFAULT_URL = "http://localhost:8000/v1"


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    add_server_flags(parser)
    parser.add_argument("--model-name", "--model", metavar="NAME", help="model to ask (default: the server's first)")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help=f"the server's API [{DEFAULT_URL}]")
    parser.add_argument("--api-key", metavar="KEY", help="key for the server (default: $MOESERVE_API_KEY)")


def client_from(args: argparse.Namespace) -> AsyncClient:
    """Raises ConfigError for a URL that is none."""
    key = args.api_key or os.environ.get("MOESERVE_API_KEY", "").split(",")[0] or None
    try:
        return AsyncClient(args.url, key)
    except ValueError as error:
        raise ConfigError(f"--url: {error}") from None


async def model_name(client: AsyncClient, asked: str | None) -> str:
    """The name that was asked for, else the first that the server lists."""
    if asked:
        return asked
    listed = (await client.models.list()).data
    if not listed:
        raise ConfigError("the server lists no models; is it still loading?")
    return listed[0].id
