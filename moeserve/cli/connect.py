"""The flags of the commands that connect to a running server, and the client made from them."""

import argparse
import os
from typing import Any

from moeserve.client import AsyncClient
from moeserve.errors import ConfigError

DEFAULT_URL = "http://localhost:8000"


def add_url_flag(parser: argparse.ArgumentParser, default: str | None = DEFAULT_URL) -> None:
    """Add --base-url, and its alias --url, which --help does not list."""
    shown = (
        f"URL of the running server, with or without /v1 [{default}]"
        if default
        else "URL of a running server, with or without /v1"
    )
    parser.add_argument("--base-url", default=default, metavar="URL", help=shown)
    parser.add_argument("--url", dest="base_url", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_server_flags(parser: argparse.ArgumentParser, default: str = DEFAULT_URL) -> None:
    """Add --base-url and --api-key."""
    add_url_flag(parser, default)
    parser.add_argument(
        "--api-key", metavar="KEY", help="the server's API key (default: $MOESERVE_API_KEY)"
    )


def client_from(args: argparse.Namespace, **options: Any) -> AsyncClient:
    """Return a client for the server of the flags. Raises ConfigError for a malformed URL."""
    return client_of(args.base_url, key_from(args), **options)


def key_from(args: argparse.Namespace) -> str | None:
    """Return the API key of the flags or the environment."""
    return args.api_key or os.environ.get("MOESERVE_API_KEY", "").split(",")[0] or None


def client_of(url: str, key: str | None, **options: Any) -> AsyncClient:
    """Return a client for `url`, with or without /v1. Raises ConfigError for a malformed URL."""
    with ConfigError.instead_of(ValueError, "--base-url"):
        return AsyncClient(url.rstrip("/").removesuffix("/v1") + "/v1", key, **options)


async def model_name(client: AsyncClient, wanted: str | None) -> str:
    """Return `wanted`, or else the first model that the server lists."""
    if wanted:
        return wanted
    listed = (await client.models.list()).data
    if not listed:
        raise ConfigError("the server lists no models; is it still loading?")
    return listed[0].id
