"""GET /openapi.json, made from the route table and the structs of `protocol.py`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from moeserve.server.protocol import ErrorResponse
from moeserve.version import __version__

if TYPE_CHECKING:
    from moeserve.server.routes import Route

_REF = "#/components/schemas/{name}"


@cache
def document(routes: tuple[Route, ...]) -> bytes:
    """The document as JSON."""
    kinds = [kind for route in routes for kind in (route.takes, route.gives) if kind is not None]
    _, components = msgspec.json.schema_components([*kinds, ErrorResponse], ref_template=_REF)
    spec = {
        "openapi": "3.1.0",
        "info": {"title": "moeserve", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": _paths(routes),
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }
    return msgspec.json.encode(spec)


def _paths(routes: Iterable[Route]) -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path + "{id}" if route.path.endswith("/") else route.path
        paths.setdefault(path, {})[route.method.lower()] = _operation(route)
    return paths


def _operation(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.gives is not None:
        content["application/json"] = _schema(route.gives)
    else:
        content["application/json" if route.path.endswith(".json") else "text/plain"] = {"schema": {}}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__.strip("_"),
        "summary": (route.handler.__doc__ or "").strip().partition("\n")[0],
        "responses": {
            "200": {"description": "OK", "content": content},
            "default": {"description": "Error", "content": {"application/json": _schema(ErrorResponse)}},
        },
    }
    if route.probe:
        operation["security"] = []
        operation["responses"]["503"] = {"description": "Not now", "content": content}
    if route.path.endswith("/"):
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.query:
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": {"type": kind}} for name, kind in route.query
        ]
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(route.takes)}}
    return operation


def _schema(kind: type[Any]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(name=kind.__name__)}}
