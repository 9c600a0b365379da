"""Finds a model's own Jinja template, and renders chat messages as prompt text by it.

Templates come with checkpoints and so may be anybody's code: they run in a process of their own
(`template_sandbox`), which bounds what they reach, their time and their memory. Rendering may take
seconds, so call it in a thread.
"""

import atexit
import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from queue import LifoQueue
from typing import Any

import msgspec

from moeserve.errors import CheckpointError, ConfigError, InvalidRequest
from moeserve.loader.files import read_optional_json
from moeserve.text.sandbox_process import SandboxDied, SandboxProcess
from moeserve.text.tokenizer import Tokenizer

_CONTINUE = "\ufdd3"  # ends the message to be continued while the template works on it
# fmt: off
# fields of a message, the first that is there counts
_REASONING = ("reasoning_content", "thinking", "reasoning")
_RESERVED = frozenset((
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
    "conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length",
))
# fmt: on
MAX_SECONDS = 2.0  # of one rendering
MAX_KWARGS = 32
MAX_KWARG_CHARS = 4096
MAX_TEMPLATE_CHARS = 2 * 2**20
_OURS = {"deepseek_v32": "deepseek_v32.jinja"}  # by model_type


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_TEMPLATE_CHARS + 1)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text") from error


def _named(found: Any, origin: str) -> tuple[str, str | None]:
    """Returns the text, and its variant for tools."""
    if not isinstance(found, list):
        found = [{"name": "default", "template": found}]
    named = {
        entry.get("name"): entry.get("template", 0) for entry in found if isinstance(entry, dict)
    }
    text = named.get("default", next(iter(named.values()), 0))
    for_tools = named.get("tool_use")
    if not isinstance(text, str) or not isinstance(for_tools, str | None):
        raise CheckpointError(f"{origin} is neither a text nor a list of named texts")
    return text, for_tools


def _from_mistral_common(path: Path) -> str:
    """Returns the template that mistral-common makes for a tokenizer: versions of tekken.json
    differ in format.
    """
    try:
        module = importlib.import_module(
            "mistral_common.integrations.chat_templates.chat_templates"
        )
    except ImportError as error:
        raise CheckpointError(
            f"{path}: the checkpoint has no chat template; pip install 'moeserve[mistral]' for mistral-common's "
            f"({error}), or pass one with --chat-template"
        ) from error
    try:
        return str(module.convert_tokenizer_to_chat_template(path))
    except Exception as error:  # the library raises many kinds, AssertionError among them
        raise CheckpointError(
            f"{path}: mistral-common makes no chat template for it: {str(error)[:200]}. Pass one with --chat-template"
        ) from error


class ChatTemplate:
    """A template. origin: the file that it came from, for error messages; for_tools: its variant
    for tools.

    takes_tools: whether it shows the model tools that it may call; takes_calls: whether it shows
    earlier calls.
    """

    def __init__(
        self, source: str, *, origin: str = "chat template", for_tools: str | None = None
    ) -> None:
        """Raises CheckpointError for a template that does not compile or reaches outside the
        sandbox.
        """
        self.source = source
        self.source_for_tools = for_tools or source
        if max(len(source), len(self.source_for_tools)) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"{origin}: refused: it has more than {MAX_TEMPLATE_CHARS:,} characters"
            )
        self.takes_tools = "tools" in self._probe(origin).split()
        self.takes_calls = "tool_calls" in self.source_for_tools

    @classmethod
    def load(cls, model_dir: Path, override: Path | str | None = None) -> "ChatTemplate | None":
        """Returns a model's template, None if it has none, as base models. Raises CheckpointError,
        ConfigError.

        They are, in this order: the file that the user names; `chat_template.jinja`, with
        `additional_chat_templates/tool_use.jinja` for requests with tools; `chat_template` in
        chat_template.json or tokenizer_config.json (one text, or a list of named ones); ours, for a
        model whose format is published as Python code; and what mistral-common writes for a
        tekken.json.
        """
        if override is not None:
            if not Path(override).is_file():
                raise ConfigError(f"--chat-template {override}: no such file")
            return cls(_read(Path(override)), origin=str(override))
        path = model_dir / "chat_template.jinja"
        if path.is_file():
            tools = model_dir / "additional_chat_templates" / "tool_use.jinja"
            return cls(
                _read(path), origin=str(path), for_tools=_read(tools) if tools.is_file() else None
            )
        for name in ("chat_template.json", "tokenizer_config.json"):
            if (found := read_optional_json(model_dir, name).get("chat_template")) is not None:
                origin = f"{model_dir / name} chat_template"
                text, for_tools = _named(found, origin)
                return cls(text, origin=origin, for_tools=for_tools)
        if ours := _OURS.get(str(read_optional_json(model_dir, "config.json").get("model_type"))):
            asset = files("moeserve") / "assets" / "chat_templates" / ours
            return cls(asset.read_text(encoding="utf-8"), origin=ours)
        if (path := model_dir / "tekken.json").is_file():
            return cls(_from_mistral_common(path), origin=f"mistral-common's template for {path}")
        return None

    def render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt for `Tokenizer.encode_prompt`, with control tokens typed by users
        marked.

        Contents are strings or lists of text parts; a tool call's arguments are an object, not JSON
        text. Raises InvalidRequest if the template rejects the messages.
        """
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
        shield = tokenizer.control.shield
        shielded = [_shielded(message, shield) for message in messages]
        if continue_final_message:
            if not isinstance(shielded[-1].get("content"), str):
                raise InvalidRequest("the final message has no text to continue", param="messages")
            shielded[-1]["content"] += _CONTINUE + " "
        _check_kwargs(kwargs or {})
        variables = {
            name: shield(v) if isinstance(v, str) else v for name, v in (kwargs or {}).items()
        }
        variables |= tokenizer.special_tokens
        variables |= {
            "tools": _shield_all(tools, shield),
            "add_generation_prompt": add_generation_prompt,
        }
        outcome, text = self._run(variables | {"messages": shielded})
        if outcome != "text":
            what = {"rejects": "rejects", "limit": "exceeds its limits on"}.get(outcome, "fails on")
            raise InvalidRequest(
                f"the model's chat template {what} these messages: {text[:200]}", param="messages"
            )
        if not continue_final_message:
            return text
        text, found, rest = text.rpartition(_CONTINUE)
        if not found:
            what = "the chat template drops the final message, so it cannot be continued"
            raise InvalidRequest(what, param="continue_final_message")
        return text if rest.startswith(" ") else text.rstrip()  # the template trims contents

    def encode(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """Returns the token ids of `render`, which takes the same options."""
        return tokenizer.encode_prompt(self.render(tokenizer, messages, **options))

    def _run(self, variables: dict[str, Any]) -> tuple[str, str]:
        source = self.source if variables.get("tools") is None else self.source_for_tools
        return _ask(source, {"tools": None, "documents": None} | variables)

    def _probe(self, origin: str) -> str:
        """Returns the names of the template's variables. Raises CheckpointError if the simplest
        conversation leaves the sandbox."""
        asked = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
        found = [
            self._run(asked),
            self._run(asked | {"tools": []}),
            _ask(self.source_for_tools, None),
        ]
        for outcome, why in found:
            if outcome in (
                "syntax",
                "limit",
            ):  # otherwise it may reject this conversation; requests will tell
                raise CheckpointError(
                    f"{origin}: refused: {why[:500]}. Pass another with --chat-template"
                )
        return found[-1][1]


def _shielded(message: Mapping[str, Any], shield: Callable[..., str]) -> dict[str, Any]:
    """Returns a copy for the template, without fields that are None (but for the content beside
    tool calls, where templates look for it), and with reasoning under the names in use.

    An assistant's tags (`<think>`) stay in force: the model wrote them.
    """
    role = message.get("role")
    content = message.get("content")
    given = {name: value for name, value in message.items() if value is not None and name != "role"}
    if isinstance(content, list):
        given["content"] = "\n".join(part["text"] for part in content)
    copy: dict[str, Any] = {"role": "system" if role == "developer" else role}
    for name, value in given.items():
        only_special = role == "assistant" and isinstance(value, str)
        copy[name] = _shield_all(value, shield, only_special=only_special)
    if copy.get("tool_calls") and "content" in message:
        copy.setdefault("content", None)
    reasoning = next((copy[name] for name in _REASONING if name in copy), None)
    return (
        copy
        if reasoning is None
        else {"thinking": reasoning} | copy | {"reasoning_content": reasoning}
    )


def _shield_all(value: Any, shield: Callable[..., str], **options: bool) -> Any:
    """Returns JSON data with the control tokens in all its strings broken by marks."""
    if isinstance(value, str):
        return shield(value.replace(_CONTINUE, ""), **options)
    if isinstance(value, Mapping):
        return {_shield_all(key, shield): _shield_all(item, shield) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shield_all(item, shield) for item in value]
    return value


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises InvalidRequest unless chat_template_kwargs are scalars, under names that the caller
    may set.
    """
    param = "chat_template_kwargs"
    if len(kwargs) > MAX_KWARGS:
        raise InvalidRequest(f"{len(kwargs)} values; at most {MAX_KWARGS} are allowed", param=param)
    for name, value in kwargs.items():
        shown = name[:64]
        if name in _RESERVED or not name.isidentifier() or name.startswith("_"):
            raise InvalidRequest(
                f"{shown!r} is not a template variable that a request may set", param=param
            )
        if value is not None and not isinstance(value, str | int | float | bool):
            raise InvalidRequest(
                f"{shown!r} must be text, a number, true, false or null", param=param
            )
        if isinstance(value, str) and len(value) > MAX_KWARG_CHARS:
            raise InvalidRequest(
                f"{shown!r} is longer than {MAX_KWARG_CHARS} characters", param=param
            )


_SANDBOXES: LifoQueue[SandboxProcess] = LifoQueue()  # one that is slow leaves another for the rest


def _ask(source: str, variables: dict[str, Any] | None) -> tuple[str, str]:
    """Returns what became of a template, and its text or why there is none, as `template_sandbox`
    does.
    """
    try:
        line = msgspec.json.encode((source, variables))
    except (
        TypeError,
        UnicodeEncodeError,
    ) as error:  # from Python only: objects of other kinds, half a surrogate pair
        return "fails", str(error)
    sandbox = _SANDBOXES.get()
    try:
        return msgspec.json.decode(sandbox.ask(line), type=tuple[str, str])
    except SandboxDied as death:
        return "limit", f"it {death}"
    finally:
        _SANDBOXES.put(sandbox)


@atexit.register
def _close() -> None:
    while not _SANDBOXES.empty():
        _SANDBOXES.get().close()


for _ in range(2):
    _SANDBOXES.put(SandboxProcess("moeserve.text.template_sandbox", str(MAX_SECONDS)))
