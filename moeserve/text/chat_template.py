"""Renders chat messages as prompt text by the model's own Jinja template.

The template is, in this order: the file that the user names, `chat_template.jinja`, or `chat_template` in
tokenizer_config.json (one text, or a list of named ones of which "default" is taken). Rendering is bounded
(`sandbox.py`) but may take seconds, so call it in a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from moeserve.errors import CheckpointError, ConfigError, InvalidRequest
from moeserve.text.sandbox import MAX_TEMPLATE_CHARS, TemplateRefusal, compile_template
from moeserve.text.tokenizer import Tokenizer, read_config

_CONTINUE = "\ufdd3"  # ends the message to be continued while the template works on it
# fmt: off
_RESERVED = frozenset((
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
    "conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length",
))
# fmt: on
_NO_TOOLS = {"tools": None, "documents": None}
MAX_KWARGS = 32
MAX_KWARG_CHARS = 4096


class ChatTemplate:
    """A compiled template. origin: the file that it came from, for error messages."""

    def __init__(self, source: str, *, origin: str = "chat template") -> None:
        """Raises CheckpointError for a template that does not compile or reaches outside the sandbox."""
        self.source = source
        self.origin = origin
        try:
            self._render = compile_template(source)
            self._probe()
        except (jinja2.TemplateError, RecursionError) as error:
            line = f" line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise CheckpointError(f"{origin}{line}: refused: {error}. Pass another with --chat-template") from error

    @classmethod
    def load(cls, model_dir: Path | str, override: Path | str | None = None) -> ChatTemplate | None:
        """Reads a model's template, or the file `override`. Returns None if there is none, as for base models."""
        if override is not None:
            path = Path(override)
            if not path.is_file():
                raise ConfigError(f"--chat-template {override}: no such file")
            return cls(_read(path), origin=str(path))
        path = Path(model_dir) / "chat_template.jinja"
        if path.is_file():
            return cls(_read(path), origin=str(path))
        path = Path(model_dir) / "tokenizer_config.json"
        source = _from_config(read_config(path).get("chat_template"), path)
        return None if source is None else cls(source, origin=f"{path} chat_template")

    def render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt for `Tokenizer.encode_prompt`, with control tokens typed by users marked.

        Contents are strings or lists of text parts. Raises InvalidRequest if the template rejects the messages.
        """
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        shield = tokenizer.control.shield
        shielded = [_shielded(message, shield) for message in messages]
        if continue_final_message:
            if not isinstance(shielded[-1]["content"], str):
                raise InvalidRequest("the final message has no text to continue", param="messages")
            shielded[-1]["content"] += _CONTINUE
        variables = {
            name: shield(value) if isinstance(value, str) else value for name, value in _checked(kwargs).items()
        }
        variables |= tokenizer.special_tokens
        variables |= {"messages": shielded, "add_generation_prompt": add_generation_prompt}
        text = self._run(variables)
        return _cut_at_continuation(text) if continue_final_message else text

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Returns the token ids of `render`, which takes the same options."""
        return tokenizer.encode_prompt(self.render(tokenizer, messages, **options))

    def _run(self, variables: dict[str, Any]) -> str:
        try:
            return self._render(_NO_TOOLS | variables)
        except Exception as error:  # a template is a program: it may fail in any way on these messages
            match error:
                case TemplateRefusal():
                    what = f"rejects these messages: {str(error)[:200]}"
                case SecurityError():
                    what = f"exceeds its limits: {str(error)[:200]}"
                case _:
                    what = f"fails on these messages ({type(error).__name__})"
            raise InvalidRequest(f"the model's chat template {what}", param="messages") from error

    def _probe(self) -> None:
        """Renders the simplest conversation. Raises SecurityError if that leaves the sandbox."""
        hi: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
        try:
            self._render(_NO_TOOLS | hi)
        except SecurityError:
            raise
        except Exception:  # it may reject this conversation; requests will tell
            return


def _shielded(message: Mapping[str, Any], shield: Callable[..., str]) -> dict[str, Any]:
    """Returns a copy for the template. An assistant's tags (`<think>`) stay in force: the model wrote them."""
    only_special = message.get("role") == "assistant"
    copy = {**message, "content": _flat(message.get("content"))}
    for name, value in copy.items():
        if isinstance(value, str) and name != "role":
            copy[name] = shield(value.replace(_CONTINUE, ""), only_special=only_special)
    if copy.get("role") == "developer":
        copy["role"] = "system"
    return copy


def _flat(content: Any) -> Any:
    """Joins text parts by newlines."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content


def _cut_at_continuation(text: str) -> str:
    cut = text.rfind(_CONTINUE)
    if cut < 0:
        raise InvalidRequest(
            "the chat template drops the final message, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:cut]


def _checked(kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Checks chat_template_kwargs: only scalars, under names that the caller may set."""
    if not kwargs:
        return {}
    param = "chat_template_kwargs"
    if len(kwargs) > MAX_KWARGS:
        raise InvalidRequest(f"{len(kwargs)} values; at most {MAX_KWARGS} are allowed", param=param)
    for name, value in kwargs.items():
        shown = name[:64]
        if name in _RESERVED or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(f"{shown!r} is not a template variable that a request may set", param=param)
        if value is not None and not isinstance(value, str | int | float | bool):
            raise InvalidRequest(f"{shown!r} must be text, a number, true, false or null", param=param)
        if isinstance(value, str) and len(value) > MAX_KWARG_CHARS:
            raise InvalidRequest(f"{shown!r} is longer than {MAX_KWARG_CHARS} characters", param=param)
    return kwargs


def _read(path: Path) -> str:
    if (size := path.stat().st_size) > MAX_TEMPLATE_CHARS:
        raise CheckpointError(f"{path}: {size:,} bytes; a chat template has at most {MAX_TEMPLATE_CHARS:,}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text") from error


def _from_config(found: Any, path: Path) -> str | None:
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        source = named.get("default", next(iter(named.values()), None))
        if isinstance(source, str):
            return source
    raise CheckpointError(f"{path}: chat_template is neither a text nor a list of named texts")
