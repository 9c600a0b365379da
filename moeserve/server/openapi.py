"""GET /openapi.json, made from the route table and the structs of requests and answers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from moeserve import protocol
from moeserve.protocol import ErrorResponse
from moeserve.version import __version__

if TYPE_CHECKING:
    from moeserve.server.app import Route

_REF = "#/components/schemas/{name}"


@cache
def document(routes: tuple[Route, ...]) -> bytes:
    """Returns the document as JSON."""
    kinds = [kind for route in routes for kind in (route.takes, route.gives, route.event) if kind is not None]
    _, components = msgspec.json.schema_components({*kinds, ErrorResponse}, ref_template=_REF)
    for name, schema in components.items():
        if kind := vars(protocol).get(name):
            schema["required"] = _always_written(kind)
    paths: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for route in routes:
        path = route.path + "{id}" if route.path.endswith("/") else route.path
        name = route.handler.__name__.strip("_")
        if name in names:  # a handler with several paths
            name = path.strip("/").replace("/", "_")
        names.add(name)
        paths.setdefault(path, {})[route.method.lower()] = {"operationId": name} | _operation(route)
    spec = {
        "openapi": "3.1.0",
        "info": {"title": "moeserve", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"bearer": []}],
    }
    return msgspec.json.encode(spec)


def _always_written(kind: type[msgspec.Struct]) -> list[str]:
    """Returns the fields of an answer that are never left out."""
    partial = kind.__struct_config__.omit_defaults
    return [f.encode_name for f in msgspec.structs.fields(kind) if not partial or f.default is msgspec.NODEFAULT]


def _operation(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.gives is not None:
        content["application/json"] = _schema(route.gives)
    else:
        content["application/json" if route.path.endswith(".json") else "text/plain"] = {"schema": {}}
    if route.event is not None:
        content["text/event-stream"] = _schema(route.event)  # of each event's data; the last one is [DONE]
    operation: dict[str, Any] = {
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


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(name=kind.__name__)}}
