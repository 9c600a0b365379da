"""The route table, from which GET /openapi.json and GET /docs are made."""

from dataclasses import replace

from aiohttp import web

from moeserve import protocol
from moeserve.protocol import StatusResponse
from moeserve.server import (
    admin,
    batches,
    file_objects,
    files,
    openapi,
    status,
    tokenize,
    trace,
    ui,
)
from moeserve.server.call import HttpCall
from moeserve.server.chat_request import ChatRequest
from moeserve.server.dialects import chat, completions, messages, responses
from moeserve.server.dialects.messages_answer import MessageAnswer, MessageEvent, TokenCount
from moeserve.server.dialects.messages_request import CountTokensRequest, MessagesRequest
from moeserve.server.dialects.responses_answer import (
    InputTokens,
    ItemList,
    Response,
    ResponseEvent,
)
from moeserve.server.dialects.responses_request import ResponsesRequest
from moeserve.server.errors import AnthropicError
from moeserve.server.route import Route

_CHAT = "/v1/chat/completions"
_EXPERTS = protocol.ExpertStatus
_CHUNK = protocol.ChatCompletionChunk
_RESPONSES = "/v1/responses"
_CREATE = responses.create_response, ResponsesRequest, Response, ResponseEvent
_INPUT_TOKENS = responses.count_input_tokens, ResponsesRequest, InputTokens
_INPUT_ITEMS = responses.list_input_items, None, ItemList
_MESSAGE = messages.create_message, MessagesRequest, MessageAnswer, MessageEvent
_COUNT = messages.count_tokens, CountTokensRequest, TokenCount
_TOKENIZE = tokenize.tokenize, tokenize.TokenizeRequest, protocol.Tokenized
_DETOKENIZE = tokenize.detokenize, tokenize.DetokenizeRequest, protocol.Detokenized


async def _openapi(call: HttpCall) -> web.StreamResponse:
    """Return this document."""
    front = call.context.front
    keyed = call.context.auth.required
    vocab_size = front.ready.vocab_size if front is not None and front.ready is not None else None
    body = openapi.document(ROUTES, vocab_size, keyed=keyed)
    return web.Response(body=body, content_type="application/json", headers=call.headers())


async def _docs(call: HttpCall) -> web.StreamResponse:
    """Show this document as a page."""
    body, policy = openapi.page()
    headers = call.headers() | {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
    }
    return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)


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
    Route("POST", f"{_RESPONSES}/compact", responses.compact_response, None, Response),
    Route("POST", f"{_RESPONSES}/", responses.cancel_response, None, Response, suffix="/cancel"),
    Route(
        "GET", f"{_RESPONSES}/", *_INPUT_ITEMS, query=responses.ItemsQuery, suffix="/input_items"
    ),
    Route(
        "GET",
        f"{_RESPONSES}/",
        responses.retrieve_response,
        None,
        Response,
        query=responses.RetrieveQuery,
    ),
    Route("DELETE", f"{_RESPONSES}/", responses.delete_response, None, file_objects.Deleted),
    Route("POST", "/v1/messages", *_MESSAGE, error=AnthropicError),
    Route("POST", "/v1/messages/count_tokens", *_COUNT, error=AnthropicError),
    Route("GET", "/v1/models", status.list_models, None, protocol.ModelList),
    Route("GET", "/v1/models/", status.retrieve_model, None, protocol.ModelCard),
    Route("DELETE", "/v1/requests/", admin.abort_request, None, protocol.Aborted),
    Route("POST", "/v1/admin/scale", admin.scale, admin.ScaleRequest, protocol.ScaleResponse),
    Route("POST", "/v1/admin/drain", admin.drain, admin.DrainRequest, protocol.ScaleResponse),
    Route("POST", "/v1/admin/rebalance", admin.rebalance, None, protocol.RebalanceResponse),
    Route(
        "POST", "/v1/admin/trace", trace.take_trace, None, trace.TraceFile, query=trace.TraceQuery
    ),
    Route("GET", "/v1/experts", status.experts, None, _EXPERTS, _EXPERTS, status.WatchQuery),
    Route("GET", "/v1/receipt-key", status.receipt_key, None, protocol.ReceiptKey),
    Route("POST", "/tokenize", *_TOKENIZE),
    Route("POST", "/v1/tokenize", *_TOKENIZE),
    Route("POST", "/detokenize", *_DETOKENIZE),
    Route("POST", "/v1/detokenize", *_DETOKENIZE),
    Route(
        "POST", "/v1/files", files.upload_file, files.FileForm, file_objects.FileObject, form=True
    ),
    Route(
        "GET", "/v1/files", files.list_files, None, file_objects.FileList, query=files.FilesQuery
    ),
    Route(
        "GET", "/v1/files/", files.file_content, suffix="/content", media="application/octet-stream"
    ),
    Route("GET", "/v1/files/", files.retrieve_file, None, file_objects.FileObject),
    Route("DELETE", "/v1/files/", files.delete_file, None, file_objects.Deleted),
    Route("POST", "/v1/batches", batches.create_batch, batches.BatchRequest, file_objects.Batch),
    Route(
        "GET",
        "/v1/batches",
        batches.list_batches,
        None,
        file_objects.BatchList,
        query=batches.BatchesQuery,
    ),
    Route("POST", "/v1/batches/", batches.cancel_batch, None, file_objects.Batch, suffix="/cancel"),
    Route("GET", "/v1/batches/", batches.retrieve_batch, None, file_objects.Batch),
    Route("GET", "/tokenizer_info", tokenize.tokenizer_info, None, tokenize.TokenizerInfo),
    Route("GET", "/livez", status.livez, None, StatusResponse, probe=True),
    Route("GET", "/ping", status.livez, None, StatusResponse, probe=True),
    Route("GET", "/readyz", status.readyz, None, StatusResponse, probe=True),
    Route("GET", "/health", status.readyz, None, StatusResponse, probe=True),
    Route("GET", "/startupz", status.startupz, None, StatusResponse, probe=True),
    Route("GET", "/version", status.version, None, protocol.VersionResponse),
    Route("GET", "/metrics", status.metrics, media="text/plain"),
    Route("GET", "/openapi.json", _openapi),
    Route("GET", "/docs", _docs, probe=True, media="text/html"),
)
METRICS_ROUTES = tuple(
    replace(route, probe=True)
    for route in ROUTES
    if route.gives is StatusResponse or route.path == "/metrics"
)
# The web page, which /openapi.json omits.
PAGES = (Route("GET", "/", ui.page, probe=True), Route("GET", "/ui/", ui.asset, probe=True))
