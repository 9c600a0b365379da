"""Documents and search results in messages, of which the model reads the text.

Text comes as it is, or in base64. A file of another kind, or behind a URL, is refused.
"""

import base64
from functools import cached_property
from pathlib import PurePath
from typing import Any

from msgspec import Struct

_TEXT_TYPES = ("application/json", "application/xml", "application/yaml", "application/toml")
_TEXT_SUFFIXES = frozenset({
    ".c", ".cpp", ".css", ".csv", ".go", ".h", ".html", ".ini", ".java", ".js", ".json", ".log",
    ".md", ".py", ".rs", ".rst", ".sh", ".sql", ".tex", ".toml", ".ts", ".txt", ".xml", ".yaml",
    ".yml",
})  # fmt: skip
_REMEDY = "this server reads plain text only: extract the text yourself, and send that"


class _Source(Struct, kw_only=True):
    type: str
    media_type: str | None = None
    data: str | None = None
    content: str | list[dict[str, Any]] | None = None


class _Citations(Struct):
    enabled: bool = False


class DocumentBlock(Struct, kw_only=True, dict=True):
    """Anthropic's block of a document."""

    source: _Source
    title: str | None = None
    context: str | None = None  # about the document
    citations: _Citations | None = None

    def __post_init__(self) -> None:
        _check_citations(self.citations)
        _ = self.text

    @cached_property
    def text(self) -> str:
        """The document with its title. Raises ValueError."""
        return _headed("document", self.title, self.context, _source_text(self.source))


class SearchResultBlock(Struct, kw_only=True, dict=True):
    """Anthropic's block of a search result."""

    source: str
    title: str
    content: list[dict[str, Any]]
    citations: _Citations | None = None

    def __post_init__(self) -> None:
        _check_citations(self.citations)
        _ = self.text

    @cached_property
    def text(self) -> str:
        """The result with its title and source. Raises ValueError."""
        return _headed("search result", self.title, self.source, _parts_text(self.content))


class InputFile(Struct, kw_only=True, dict=True):
    """The file of a response's input."""

    filename: str | None = None
    file_data: str | None = None  # a data URL, or base64
    file_url: str | None = None
    file_id: str | None = None

    def __post_init__(self) -> None:
        _ = self.text

    @cached_property
    def text(self) -> str:
        """The file with its name. Raises ValueError."""
        if self.file_data is None:
            raise ValueError(f"the file must be in file_data, not behind a URL or an id; {_REMEDY}")
        head, comma, data = self.file_data.partition(",")
        if comma and head.startswith("data:"):
            media_type, *options = head.removeprefix("data:").split(";")
            if "base64" not in options:
                raise ValueError("a data URL must be in base64")
        else:
            data = self.file_data
            suffix = PurePath(self.filename or "").suffix.lower()
            media_type = "text/plain" if suffix in _TEXT_SUFFIXES else suffix
        return _headed("file", self.filename, None, _decoded(media_type, data))


def _check_citations(citations: _Citations | None) -> None:
    if citations is not None and citations.enabled:
        raise ValueError("citations are not supported: leave out citations, or set enabled: false")


def _headed(kind: str, title: str | None, about: str | None, text: str) -> str:
    head = f"[{kind}: {title}]" if title else f"[{kind}]"
    return "\n".join(filter(None, [head, about, text]))


def _source_text(source: _Source) -> str:
    if source.type == "text" and source.data is not None:
        return source.data
    if source.type == "base64" and source.data is not None:
        return _decoded(source.media_type or "", source.data)
    if source.type == "content" and source.content is not None:
        return _parts_text(source.content)
    raise ValueError(f"a source of type {source.type[:64]!r}, or without data; {_REMEDY}")


def _parts_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    texts = [part.get("text") if part.get("type") == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"its parts must be of type text; {_REMEDY}")
    return "\n".join(text for text in texts if text is not None)


def _decoded(media_type: str, data: str) -> str:
    """Return base64 as text. Raises ValueError."""
    kind = media_type.partition(";")[0].strip().lower()
    if not (kind.startswith("text/") or kind in _TEXT_TYPES):
        raise ValueError(f"a file of type {media_type[:64]!r}; {_REMEDY}")
    try:
        return base64.b64decode(data, validate=True).decode("utf-8-sig")
    except ValueError:  # not base64, not UTF-8
        raise ValueError(f"the data must be UTF-8 text in base64; {_REMEDY}") from None
