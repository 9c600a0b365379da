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
    """One operation. The first route that matches a request handles it."""

    method: str
    # A path that ends in "/" (except "/" itself) takes the rest of the URL, up to `suffix`, as its
    # argument.
    path: str
    handler: Callable[[HttpCall], Awaitable[web.StreamResponse]]
    takes: type[msgspec.Struct] | None = None  # the struct of the body
    gives: Any = None  # the struct of the answer, or a union with it; None: no JSON
    event: Any = None  # the struct of a streamed answer's events, or a union of structs
    query: type[msgspec.Struct] | None = None  # the struct of the URL's parameters
    probe: bool = False  # needs no key
    ndjson: bool = False  # the events of a stream are lines of JSON, not server-sent events
    form: bool = False  # the body is multipart/form-data, not JSON
    media: str = "application/json"  # the media type of an answer that is not a struct
    error: type[msgspec.Struct] = ErrorResponse  # the struct of errors
    suffix: str = ""
