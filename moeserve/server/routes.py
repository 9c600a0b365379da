"""The route table, and GET /openapi.json, which is made from it and from the structs of requests and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from moeserve import protocol
from moeserve.protocol import ErrorResponse, StatusResponse
from moeserve.server import (
    admin,
    batches,
    chat,
    completions,
    file_objects,
    files,
    messages,
    responses,
    responses_events,
    status,
    tokenize,
    trace,
    ui,
)
from moeserve.server.app import HttpCall
from moeserve.server.chat_request import ChatRequest
from moeserve.server.messages_request import CountTokensRequest, MessagesRequest
from moeserve.server.responses_request import ResponsesRequest
from moeserve.version import __version__

_REF = "#/components/schemas/{name}"
_CHAT = "/v1/chat/completions"
_EXPERTS = protocol.ExpertStatus
_CHUNK = protocol.ChatCompletionChunk
_RESPONSES = "/v1/responses"
_RESPONSE = responses_events.Response
_CREATE = responses.create_response, ResponsesRequest, _RESPONSE, responses_events.ResponseEvent
_INPUT_TOKENS = responses.count_input_tokens, ResponsesRequest, responses_events.InputTokens
_INPUT_ITEMS = responses.list_input_items, None, responses_events.ItemList
_MESSAGE = messages.create_message, MessagesRequest, messages.MessageAnswer, messages.MessageEvent
_TOKENIZE = tokenize.tokenize, tokenize.TokenizeRequest, protocol.Tokenized
_DETOKENIZE = tokenize.detokenize, tokenize.DetokenizeRequest, protocol.Detokenized


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. A path that ends in "/", but for "/" itself, takes the rest of the URL, up to `suffix`, as its
    argument.

    Of routes that fit, the first one counts.

    takes, gives: the structs of the body and of the answer; event: the struct of a streamed answer's events; query:
    the struct of the URL's parameters. probe: needs no key.
    """

    method: str
    path: str
    handler: Callable[[HttpCall], Awaitable[web.StreamResponse]]
    takes: type[msgspec.Struct] | None = None
    gives: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    probe: bool = False
    suffix: str = ""

    @property
    def label(self) -> str:
        """The operation's path in metrics and logs."""
        return f"{self.path}{{id}}{self.suffix}" if self.suffix else self.path


async def _openapi(call: HttpCall) -> web.StreamResponse:
    """Return this document."""
    return web.Response(body=_document(), content_type="application/json", headers=call.headers())


ROUTES = (
    Route("POST", _CHAT, chat.chat_completions, ChatRequest, protocol.ChatCompletion, _CHUNK),
    Route("POST", f"{_CHAT}/render", chat.render, ChatRequest, protocol.RenderedPrompt),
    Route(
        "POST",
        "/v1/completions",
        completions.completions,
        completions.CompletionRequest,
        protocol.Completion,
        protocol.Completion,
    ),
    Route("POST", _RESPONSES, *_CREATE),
    Route("POST", f"{_RESPONSES}/input_tokens", *_INPUT_TOKENS),
    Route("POST", f"{_RESPONSES}/compact", responses.compact_response, None, _RESPONSE),
    Route("POST", f"{_RESPONSES}/", responses.cancel_response, None, _RESPONSE, suffix="/cancel"),
    Route("GET", f"{_RESPONSES}/", *_INPUT_ITEMS, query=responses.ItemsQuery, suffix="/input_items"),
    Route("GET", f"{_RESPONSES}/", responses.retrieve_response, None, _RESPONSE, query=responses.RetrieveQuery),
    Route("DELETE", f"{_RESPONSES}/", responses.delete_response, None, responses_events.DeletedResponse),
    Route("POST", "/v1/messages", *_MESSAGE),
    Route("POST", "/v1/messages/count_tokens", messages.count_tokens, CountTokensRequest, messages.TokenCount),
    Route("GET", "/v1/models", status.list_models, None, protocol.ModelList),
    Route("GET", "/v1/models/", status.retrieve_model, None, protocol.ModelCard),
    Route("DELETE", "/v1/requests/", admin.abort_request, None, protocol.Aborted),
    Route("POST", "/v1/admin/scale", admin.scale, admin.ScaleRequest, protocol.ScaleResponse),
    Route("POST", "/v1/admin/rebalance", admin.rebalance, None, protocol.RebalanceResponse),
    Route("POST", "/v1/admin/trace", trace.take_trace, None, trace.TraceFile, query=trace.TraceQuery),
    Route("GET", "/v1/experts", status.experts, None, _EXPERTS, _EXPERTS, status.WatchQuery),
    Route("GET", "/v1/receipt-key", status.receipt_key, None, protocol.ReceiptKey),
    Route("POST", "/tokenize", *_TOKENIZE),
    Route("POST", "/v1/tokenize", *_TOKENIZE),
    Route("POST", "/detokenize", *_DETOKENIZE),
    Route("POST", "/v1/detokenize", *_DETOKENIZE),
    Route("POST", "/v1/files", files.upload_file, None, file_objects.FileObject),
    Route("GET", "/v1/files", files.list_files, None, file_objects.FileList, query=files.FilesQuery),
    Route("GET", "/v1/files/", files.file_content, suffix="/content"),
    Route("GET", "/v1/files/", files.retrieve_file, None, file_objects.FileObject),
    Route("DELETE", "/v1/files/", files.delete_file, None, files.Deleted),
    Route("POST", "/v1/batches", batches.create_batch, batches.BatchRequest, file_objects.Batch),
    Route("GET", "/v1/batches", batches.list_batches, None, file_objects.BatchList, query=batches.BatchesQuery),
    Route("POST", "/v1/batches/", batches.cancel_batch, None, file_objects.Batch, suffix="/cancel"),
    Route("GET", "/v1/batches/", batches.retrieve_batch, None, file_objects.Batch),
    Route("GET", "/tokenizer_info", tokenize.tokenizer_info, None, protocol.TokenizerInfo),
    Route("GET", "/livez", status.livez, None, StatusResponse, probe=True),
    Route("GET", "/ping", status.livez, None, StatusResponse, probe=True),
    Route("GET", "/readyz", status.readyz, None, StatusResponse, probe=True),
    Route("GET", "/health", status.readyz, None, StatusResponse, probe=True),
    Route("GET", "/startupz", status.startupz, None, StatusResponse, probe=True),
    Route("GET", "/version", status.version, None, protocol.VersionResponse),
    Route("GET", "/metrics", status.metrics),
    Route("GET", "/openapi.json", _openapi),
)
# for people, so /openapi.json leaves them out
PAGES = (Route("GET", "/", ui.page, probe=True), Route("GET", "/ui/", ui.asset, probe=True))


@cache
def _document() -> bytes:
    kinds = {kind for route in ROUTES for kind in (route.takes, route.gives, route.event) if kind is not None}
    _, components = msgspec.json.schema_components({*kinds, ErrorResponse}, ref_template=_REF)
    for name, schema in components.items():
        if kind := vars(protocol).get(name):  # an answer: lists the fields that are never left out
            partial = kind.__struct_config__.omit_defaults
            fields = msgspec.structs.fields(kind)
            schema["required"] = [f.encode_name for f in fields if not partial or f.default is msgspec.NODEFAULT]
    paths: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for route in ROUTES:
        path = f"{route.path}{{id}}{route.suffix}" if route.path.endswith("/") else route.path
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
    if route.query is not None:
        (_, components) = msgspec.json.schema_components([route.query])
        shown = components[route.query.__name__]["properties"].items()
        operation["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in shown]
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(route.takes)}}
    return operation


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(name=kind.__name__)}}
