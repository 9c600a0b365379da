"""GET /openapi.json, generated from the route table and its structs, and the page that shows it.

A new route needs no change here. Summaries are the handlers' docstrings; field descriptions are the
comments beside the structs' fields. Token ids have the bounds of the model's vocabulary.
`assets/docs` has the page, and examples of requests by operation.
"""

import base64
import hashlib
import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, get_args, get_type_hints

import msgspec

from moeserve import protocol
from moeserve.sampling import TOKEN_ID
from moeserve.server.call import RESUMABLE_PATHS, RESUME_HEADER
from moeserve.server.route import Route
from moeserve.version import __version__

_ASSETS = files("moeserve") / "assets" / "docs"
_REF = "#/components/schemas/{name}"
_AT_THE_END = {"stop_reason"}  # fields that only the end of a choice has
_DONE = {"const": "[DONE]", "description": "the last event of OpenAI's streams"}
_FORM = "multipart/form-data"
_STATUSES = {
    400: "A field is missing, of the wrong type, or out of its range; `param` names it",
    401: "The API key is missing or wrong",
    403: "The API key does not allow this",
    404: "The model or object does not exist",
    408: "The body did not arrive in time",
    409: "The server's current state does not allow this; the message gives the reason",
    413: "The body is too large",
    415: "The body has an unsupported media type or is not UTF-8",
    503: "Loading, draining or overloaded: retry after `Retry-After` seconds",
}
_RETRY_AFTER = {
    "Retry-After": {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 1}}
}
_REQUEST_ID = {
    "X-Request-Id": {
        "description": "identifies the request in the server's log",
        "schema": {"type": "string"},
    }
}
_COMMENT = re.compile(r"    # (.*)")
_FIELD = re.compile(r"    (\w+): (?:[^#\"]|\"[^\"]*\")*(?:  # (.*))?$")
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}


@cache
def document(routes: Sequence[Route], vocab_size: int | None, *, keyed: bool) -> bytes:
    """Return the document as JSON.

    vocab_size: None until the model is loaded. keyed: whether requests need a key.
    """
    kinds = {
        kind
        for route in routes
        for kind in (route.takes, route.gives, route.event, route.error)
        if kind
    }
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    for name, schema in components.items():
        if kind := vars(protocol).get(name):
            # An answer. The fields that it always has are required.
            omits_defaults = kind.__struct_config__.omit_defaults
            written = {
                field.encode_name
                for field in msgspec.structs.fields(kind)
                if not omits_defaults or field.default is msgspec.NODEFAULT
            }
            schema["required"] = sorted(written - _AT_THE_END)
    _describe_fields(components, kinds)
    if vocab_size is not None:
        for schema in _token_ids(components):
            schema["maximum"] = vocab_size - 1
    shapes = dict(zip(kinds, schemas, strict=True))
    examples: dict[str, dict[str, Any]] = msgspec.json.decode(
        (_ASSETS / "examples.json").read_bytes()
    )
    paths: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for route in routes:
        path = f"{route.path}{{id}}{route.suffix}" if route.path.endswith("/") else route.path
        name = route.handler.__name__.strip("_")
        if name in names:  # a handler with several paths
            name = path.strip("/").replace("/", "_")
        names.add(name)
        shown = _operation(route, shapes, examples.get(f"{route.method} {path}", {}))
        paths.setdefault(path, {})[route.method.lower()] = {"operationId": name} | shown
    keys: list[dict[str, list[str]]] = [{name: []} for name in _SCHEMES]
    spec = {
        "openapi": "3.2.0",
        "info": {"title": "moeserve", "version": __version__, "license": {"name": "Apache-2.0"}},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SCHEMES},
        "security": keys if keyed else [{}, *keys],
    }
    return msgspec.json.encode(spec)


def _describe_fields(components: dict[str, Any], kinds: Collection[Any]) -> None:
    """Use the comments beside the structs' fields as descriptions of these fields."""
    for kind in _structs_of(kinds):
        properties = components.get(kind.__name__, {}).get("properties", {})
        for base in kind.__mro__:
            for name, text in _field_comments(base).items():
                if name in properties:
                    properties[name].setdefault("description", text)


def _structs_of(kinds: Collection[Any]) -> set[type[msgspec.Struct]]:
    """Return the structs among some types, and those of their fields, recursively."""
    structs = set[type[msgspec.Struct]]()
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        waiting += get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in structs:
            structs.add(kind)
            waiting += get_type_hints(kind).values()
    return structs


@cache
def _field_comments(kind: type) -> dict[str, str]:
    """Return the comments above a class's fields, or at the end of their lines, by field."""
    if not kind.__module__.startswith("moeserve."):
        return {}
    comments = {}
    above: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        if (comment := _COMMENT.fullmatch(line)) is not None:
            above.append(comment[1])
        else:
            if (field := _FIELD.match(line)) is not None and (text := field[2] or " ".join(above)):
                comments[field[1]] = text
            above = []
    return comments


def _token_ids(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas of token ids, which have the format TOKEN_ID."""
    if isinstance(node, dict):
        if node.get("format") == TOKEN_ID:
            yield node
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from _token_ids(inner)


def _operation(route: Route, shapes: dict[Any, Any], examples: dict[str, Any]) -> dict[str, Any]:
    summary, _, rest = (route.handler.__doc__ or "").strip().partition("\n\n")
    operation: dict[str, Any] = {
        "summary": " ".join(summary.split()),
        "tags": [_tag(route)],
        "responses": _responses(route, shapes),
    }
    if rest := " ".join(rest.split()):
        operation["description"] = rest
    if route.probe:
        operation["security"] = []
    if route.path.endswith("/"):
        text = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": text}]
    if route.path in RESUMABLE_PATHS:
        id = {"type": "string", "description": "the id of a stream's last event, to get the rest"}
        operation["parameters"] = [{"name": RESUME_HEADER, "in": "header", "schema": id}]
    if route.query is not None:
        (_, components) = msgspec.json.schema_components([route.query])
        for name, schema in components[route.query.__name__]["properties"].items():
            if schema.get("type") == "boolean":  # `?x` alone means true
                schema = {"anyOf": [schema, {"const": ""}]}
            operation.setdefault("parameters", []).append(
                {"name": name, "in": "query", "schema": schema}
            )
    if route.takes is not None:
        content: dict[str, Any] = {"schema": shapes[route.takes]}
        if examples:
            content["examples"] = {name: {"value": value} for name, value in examples.items()}
        operation["requestBody"] = {
            "required": True,
            "content": {_FORM if route.form else "application/json": content},
        }
    return operation


def _tag(route: Route) -> str:
    if route.path.startswith("/v1/admin/"):
        return "administration"
    return "state" if route.takes is None else "inference"


def _responses(route: Route, shapes: dict[Any, Any]) -> dict[str, Any]:
    """Return the responses by status: each likely status, and all others as `default`."""
    content: dict[str, Any] = {
        route.media: {} if route.gives is None else {"schema": shapes[route.gives]}
    }
    if route.event is not None and route.ndjson:
        content["application/x-ndjson"] = {"itemSchema": shapes[route.event]}
    elif route.event is not None:
        # One server-sent event whose data are JSON.
        data = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": shapes[route.event],
        }
        event = {"event": {"type": "string"}, "data": {"anyOf": [data, _DONE]}}
        content["text/event-stream"] = {
            "itemSchema": {"type": "object", "required": ["data"], "properties": event}
        }
    error = {
        "headers": _REQUEST_ID,
        "content": {"application/json": {"schema": shapes[route.error]}},
    }
    responses: dict[str, Any] = {
        "200": {"description": "OK", "headers": _REQUEST_ID, "content": content}
    }
    for status in sorted(_statuses(route)):
        responses[str(status)] = {"description": _STATUSES[status], **error}
    if route.gives is protocol.StatusResponse:
        responses["503"] = {
            "description": "Not ready",
            "headers": _REQUEST_ID | _RETRY_AFTER,
            "content": content,
        }
    elif "503" in responses:
        responses["503"]["headers"] = _REQUEST_ID | _RETRY_AFTER
    return responses | {"default": {"description": "Another error, in the same shape", **error}}


def _statuses(route: Route) -> set[int]:
    statuses = set() if route.probe else {401, 503}
    if route.takes is not None:
        statuses |= {400, 408, 413, 415}
    if route.query is not None:
        statuses.add(400)
    if route.path.startswith("/v1/admin/"):
        statuses |= {403, 409}
    if route.path.endswith("/") or "model" in getattr(route.takes, "__struct_fields__", ()):
        statuses.add(404)
    return statuses


@cache
def page() -> tuple[bytes, str]:
    """Return the page, and a content security policy that allows only its own script."""
    text = (_ASSETS / "index.html").read_text(encoding="utf-8")
    allowed = {}
    for tag, body in re.findall(r"<(style|script)>(.*?)</\1>", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        allowed[tag] = f"{tag}-src 'sha256-{digest}'"
    policy = [
        "default-src 'none'",
        "connect-src 'self'",
        *allowed.values(),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return text.encode(), "; ".join(policy)
