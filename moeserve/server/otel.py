"""OpenTelemetry: a span for each request, with the client's span as parent (W3C traceparent).

Needs the extra `otel`.
"""

from typing import Any

from aiohttp import web

from moeserve.errors import ConfigError
from moeserve.server.access_log import Answered
from moeserve.version import __version__

NS = 1_000_000_000


class Spans:
    """Makes spans of finished requests. A thread of the OpenTelemetry SDK sends them."""

    def __init__(self, exporter: Any, model: str) -> None:
        """exporter: a span exporter of the SDK."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        resource = Resource.create({"service.name": "moeserve", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("moeserve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER

    def __call__(self, record: Answered, request: web.BaseRequest) -> None:
        names = ("traceparent", "tracestate")
        carrier = {name: value for name in names if (value := request.headers.get(name))}
        began_ns = round(record.time.timestamp() * NS)
        attributes: dict[str, Any] = {
            "http.request.method": record.method,
            "http.route": record.route,
            "http.response.status_code": record.status,
            "moeserve.request_id": record.request_id,
        }
        if record.prompt_tokens is not None:
            attributes["gen_ai.request.model"] = self._model
            attributes["gen_ai.usage.input_tokens"] = record.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = record.completion_tokens
        if record.ttft_ms is not None:
            attributes["gen_ai.server.time_to_first_token"] = record.ttft_ms / 1e3
        if record.status >= 400:
            attributes["error.type"] = record.error or str(record.status)
        span = self._tracer.start_span(
            f"{record.method} {record.route}",
            context=self._propagator.extract(carrier),
            kind=self._kind,
            attributes=attributes,
            start_time=began_ns,
        )
        if record.status >= 500:
            from opentelemetry.trace import StatusCode

            span.set_status(StatusCode.ERROR)
        span.end(began_ns + round(record.duration_ms * 1e6))

    def close(self) -> None:
        """Send all queued spans; blocks."""
        self._provider.shutdown()


def spans_to(endpoint: str, model: str) -> Spans:
    """Return an observer that sends spans to an OTLP collector (HTTP). Raise ConfigError without
    the extra.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return Spans(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"), model)
    except ImportError as error:
        raise ConfigError(
            f"otel_endpoint needs the extra: pip install 'moeserve[otel]' ({error})"
        ) from None
