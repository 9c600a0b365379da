"""A route: a path, its handler, and what /openapi.json says about them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from moeserve.protocol import ErrorResponse
from moeserve.server.call import HttpCall


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. Of the routes that fit a request, the first one counts."""

    method: str
    # A path that ends in "/" (but "/" itself) takes the rest of the URL, up to `suffix`, as its
    # argument.
    path: str
    handler: Callable[[HttpCall], Awaitable[web.StreamResponse]]
    takes: type[msgspec.Struct] | None = None  # the struct of the body
    gives: type[msgspec.Struct] | None = None  # the struct of the answer
    event: Any = None  # the struct of a streamed answer's events, or a union of such
    query: type[msgspec.Struct] | None = None  # the struct of the URL's parameters
    probe: bool = False  # needs no key
    form: bool = False  # the body comes as multipart/form-data, not as JSON
    media: str = "application/json"  # the type of an answer that is no struct
    error: type[msgspec.Struct] = ErrorResponse  # the struct of failures
    suffix: str = ""
