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
    lm_studio,
    openapi,
    status,
    tokenize,
    trace,
    ui,
)
from moeserve.server.call import HttpCall
from moeserve.server.chat_request import ChatRequest
from moeserve.server.dialects import (
    chat,
    completions,
    infill,
    messages,
    ollama,
    ollama_models,
    responses,
)
from moeserve.server.dialects.infill_answer import InfillAnswer, InfillChunk
from moeserve.server.dialects.infill_request import InfillRequest
from moeserve.server.dialects.messages_answer import MessageAnswer, MessageEvent, TokenCount
from moeserve.server.dialects.messages_request import CountTokensRequest, MessagesRequest
from moeserve.server.dialects.ollama_answer import OllamaChatAnswer, OllamaGenerateAnswer
from moeserve.server.dialects.ollama_request import OllamaChatRequest, OllamaGenerateRequest
from moeserve.server.dialects.responses_answer import (
    InputTokens,
    ItemList,
    Response,
    ResponseEvent,
)
from moeserve.server.dialects.responses_request import ResponsesRequest
from moeserve.server.errors import AnthropicError, OllamaError
from moeserve.server.route import Route


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
    Route(
        "POST",
        "/v1/chat/completions",
        chat.chat_completions,
        takes=ChatRequest,
        gives=protocol.ChatCompletion,
        event=protocol.ChatCompletionChunk,
    ),
    Route(
        "POST",
        "/v1/chat/completions/render",
        chat.render,
        takes=ChatRequest,
        gives=protocol.RenderedPrompt,
    ),
    Route(
        "POST",
        "/v1/completions",
        completions.completions,
        takes=completions.CompletionRequest,
        gives=protocol.Completion,
        event=protocol.Completion,
    ),
    Route(
        "POST",
        "/infill",
        infill.infill,
        takes=InfillRequest,
        gives=InfillAnswer | list[InfillAnswer],
        event=InfillChunk,
    ),
    Route(
        "POST",
        "/v1/responses",
        responses.create_response,
        takes=ResponsesRequest,
        gives=Response,
        event=ResponseEvent,
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        responses.count_input_tokens,
        takes=ResponsesRequest,
        gives=InputTokens,
    ),
    Route("POST", "/v1/responses/compact", responses.compact_response, gives=Response),
    Route("POST", "/v1/responses/", responses.cancel_response, gives=Response, suffix="/cancel"),
    Route(
        "GET",
        "/v1/responses/",
        responses.list_input_items,
        gives=ItemList,
        query=responses.ItemsQuery,
        suffix="/input_items",
    ),
    Route(
        "GET",
        "/v1/responses/",
        responses.retrieve_response,
        gives=Response,
        query=responses.RetrieveQuery,
    ),
    Route("DELETE", "/v1/responses/", responses.delete_response, gives=file_objects.Deleted),
    Route(
        "POST",
        "/v1/messages",
        messages.create_message,
        takes=MessagesRequest,
        gives=MessageAnswer,
        event=MessageEvent,
        error=AnthropicError,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        messages.count_tokens,
        takes=CountTokensRequest,
        gives=TokenCount,
        error=AnthropicError,
    ),
    Route(
        "POST",
        "/api/chat",
        ollama.chat,
        takes=OllamaChatRequest,
        gives=OllamaChatAnswer,
        event=OllamaChatAnswer,
        ndjson=True,
        error=OllamaError,
    ),
    Route(
        "POST",
        "/api/generate",
        ollama.generate,
        takes=OllamaGenerateRequest,
        gives=OllamaGenerateAnswer,
        event=OllamaGenerateAnswer,
        ndjson=True,
        error=OllamaError,
    ),
    Route(
        "POST",
        "/api/show",
        ollama_models.show,
        takes=ollama_models.ShowRequest,
        gives=ollama_models.ShownModel,
        error=OllamaError,
    ),
    Route(
        "GET",
        "/api/tags",
        ollama_models.tags,
        gives=ollama_models.ListedModels,
        error=OllamaError,
    ),
    Route("GET", "/api/ps", ollama_models.ps, gives=ollama_models.LoadedModels, error=OllamaError),
    Route(
        "GET",
        "/api/version",
        ollama_models.ollama_version,
        gives=protocol.VersionResponse,
        error=OllamaError,
    ),
    Route(
        "POST",
        "/api/v0/chat/completions",
        lm_studio.studio_chat_completions,
        takes=ChatRequest,
        gives=protocol.ChatCompletion,
        event=protocol.ChatCompletionChunk,
    ),
    Route(
        "POST",
        "/api/v0/completions",
        completions.completions,
        takes=completions.CompletionRequest,
        gives=protocol.Completion,
        event=protocol.Completion,
    ),
    Route("GET", "/api/v0/models", lm_studio.list_studio_models, gives=lm_studio.StudioModels),
    Route("GET", "/api/v0/models/", lm_studio.retrieve_studio_model, gives=lm_studio.StudioModel),
    Route("GET", "/v1/models", status.list_models, gives=protocol.ModelList),
    Route("GET", "/v1/models/", status.retrieve_model, gives=protocol.ModelCard),
    Route("DELETE", "/v1/requests/", admin.abort_request, gives=protocol.Aborted),
    Route(
        "POST",
        "/v1/admin/scale",
        admin.scale,
        takes=admin.ScaleRequest,
        gives=protocol.ScaleResponse,
    ),
    Route(
        "POST",
        "/v1/admin/drain",
        admin.drain,
        takes=admin.DrainRequest,
        gives=protocol.ScaleResponse,
    ),
    Route("POST", "/v1/admin/rebalance", admin.rebalance, gives=protocol.RebalanceResponse),
    Route(
        "POST",
        "/v1/admin/trace",
        trace.take_trace,
        gives=trace.TraceFile,
        query=trace.TraceQuery,
    ),
    Route(
        "GET",
        "/v1/experts",
        status.experts,
        gives=protocol.ExpertStatus,
        event=protocol.ExpertStatus,
        query=status.WatchQuery,
    ),
    Route("GET", "/v1/receipt-key", status.receipt_key, gives=protocol.ReceiptKey),
    Route(
        "POST",
        "/tokenize",
        tokenize.tokenize,
        takes=tokenize.TokenizeRequest,
        gives=protocol.Tokenized,
    ),
    Route(
        "POST",
        "/v1/tokenize",
        tokenize.tokenize,
        takes=tokenize.TokenizeRequest,
        gives=protocol.Tokenized,
    ),
    Route(
        "POST",
        "/detokenize",
        tokenize.detokenize,
        takes=tokenize.DetokenizeRequest,
        gives=protocol.Detokenized,
    ),
    Route(
        "POST",
        "/v1/detokenize",
        tokenize.detokenize,
        takes=tokenize.DetokenizeRequest,
        gives=protocol.Detokenized,
    ),
    Route(
        "POST",
        "/v1/files",
        files.upload_file,
        takes=files.FileForm,
        gives=file_objects.FileObject,
        form=True,
    ),
    Route(
        "GET",
        "/v1/files",
        files.list_files,
        gives=file_objects.FileList,
        query=files.FilesQuery,
    ),
    Route(
        "GET",
        "/v1/files/",
        files.file_content,
        suffix="/content",
        media="application/octet-stream",
    ),
    Route("GET", "/v1/files/", files.retrieve_file, gives=file_objects.FileObject),
    Route("DELETE", "/v1/files/", files.delete_file, gives=file_objects.Deleted),
    Route(
        "POST",
        "/v1/batches",
        batches.create_batch,
        takes=batches.BatchRequest,
        gives=file_objects.Batch,
    ),
    Route(
        "GET",
        "/v1/batches",
        batches.list_batches,
        gives=file_objects.BatchList,
        query=batches.BatchesQuery,
    ),
    Route("POST", "/v1/batches/", batches.cancel_batch, gives=file_objects.Batch, suffix="/cancel"),
    Route("GET", "/v1/batches/", batches.retrieve_batch, gives=file_objects.Batch),
    Route("GET", "/tokenizer_info", tokenize.tokenizer_info, gives=tokenize.TokenizerInfo),
    Route("GET", "/livez", status.livez, gives=StatusResponse, probe=True),
    Route("GET", "/ping", status.livez, gives=StatusResponse, probe=True),
    Route("GET", "/readyz", status.readyz, gives=StatusResponse, probe=True),
    Route("GET", "/health", status.readyz, gives=StatusResponse, probe=True),
    Route("GET", "/startupz", status.startupz, gives=StatusResponse, probe=True),
    Route("GET", "/version", status.version, gives=protocol.VersionResponse),
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
