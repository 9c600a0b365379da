"""Finds a model's own Jinja template, and renders chat messages as prompt text by it.

Templates come with checkpoints, so they may be anybody's code. They run in processes of their own
(`template_sandbox`), which bound their reach, their time and their memory. One pool of these
processes serves the whole program; it starts with the first template and is closed at exit.
"""

import asyncio
import atexit
import importlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypedDict, Unpack

import msgspec

from moeserve.errors import CheckpointError, ConfigError, InvalidRequest
from moeserve.loader.documents import read_optional_json
from moeserve.text.sandbox_pool import SandboxPool
from moeserve.text.sandbox_process import SandboxDied, SandboxProcess
from moeserve.text.tokenizer import Tokenizer

_CONTINUE = "\ufdd3"  # marks the end of the message to be continued, while the template works on it
_REASONING = ("reasoning_content", "thinking", "reasoning")  # the first that a message has counts
_CLOCK = "strftime_now"  # the template function that shows the date; a request may set the date
_RESERVED = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template", "conversation", "tokenize", "return_dict", "return_tensors", "padding",
    "truncation", "max_length",
})  # fmt: skip
MAX_SECONDS = 2.0  # of CPU time for one rendering
MAX_KWARGS = 32
MAX_KWARG_CHARS = 4096
MAX_TEMPLATE_CHARS = 2 * 2**20
_OURS = {"deepseek_v32": "deepseek_v32.jinja"}  # by model_type
# A conversation with a call whose message has no text; the content is filled in by the probe.
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
_CALL_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "c"},
    {"role": "user", "content": "more"},
]

SANDBOXES = SandboxPool(
    "moeserve.text.template_sandbox", str(MAX_SECONDS), purpose="chat templates"
)
atexit.register(SANDBOXES.close)


class RenderOptions(TypedDict, total=False):
    """The options of `ChatTemplate.render`."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool  # default: true
    continue_final_message: bool  # the answer continues the last message; default: false
    kwargs: Mapping[str, Any] | None  # variables for the template


class ChatTemplate:
    """A model's chat template."""

    def __init__(
        self,
        source: str,
        *,
        origin: str = "chat template",
        for_tools: str | None = None,
        sandboxes: SandboxPool = SANDBOXES,
    ) -> None:
        """Render small conversations. Raise CheckpointError for a template that does not compile or
        leaves the sandbox.

        Args:
            source: The template's text.
            origin: The file that the source comes from, for error messages.
            for_tools: The variant for requests with tools.
            sandboxes: The processes that render.
        """
        self.source = source
        self.source_for_tools = for_tools or source
        self._sandboxes = sandboxes
        if max(len(source), len(self.source_for_tools)) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"{origin}: refused: it has more than {MAX_TEMPLATE_CHARS:,} characters"
            )
        # Whether the template shows the model tools that it may call, and earlier calls.
        self.takes_tools = "tools" in self._probe(origin).split()
        self.takes_calls = "tool_calls" in self.source_for_tools
        # The content that the template gets for a message that has calls and no text.
        self._no_content = self._probe_no_content() if self.takes_calls else ""

    @classmethod
    def load(cls, model_dir: Path, override: Path | str | None = None) -> "ChatTemplate | None":
        """Return a model's template, None if it has none, as base models. Raise CheckpointError,
        ConfigError.

        The first of these counts:
        - the file that the user names (`override`);
        - `chat_template.jinja`, with `additional_chat_templates/tool_use.jinja` for requests with
          tools;
        - `chat_template` in chat_template.json or tokenizer_config.json: a text, or a list of named
          texts;
        - moeserve's own, for a model whose format is published as Python code;
        - the template that mistral-common writes for a tekken.json.
        """
        if override is not None:
            if not Path(override).is_file():
                raise ConfigError(f"--chat-template {override}: no such file")
            return cls(_read(Path(override)), origin=str(override))
        path = model_dir / "chat_template.jinja"
        if path.is_file():
            tools = model_dir / "additional_chat_templates" / "tool_use.jinja"
            for_tools = _read(tools) if tools.is_file() else None
            return cls(_read(path), origin=str(path), for_tools=for_tools)
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
        **options: Unpack[RenderOptions],
    ) -> str:
        """Return the prompt for `Tokenizer.encode_prompt`, in which control tokens that users typed
        are marked. It may block for seconds.

        Contents are strings or lists of text parts; a tool call's arguments are an object, not JSON
        text. Raise InvalidRequest if the template rejects the messages.
        """
        work = partial(self._render, tokenizer=tokenizer, messages=messages, **options)
        return self._sandboxes.submit(work).result()

    async def render_async(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        owner: str = "",
        **options: Unpack[RenderOptions],
    ) -> str:
        """Do `render` in a thread of the pool. Requests of several owners take turns. Raise
        Overloaded if that takes too long.
        """
        work = partial(self._render, tokenizer=tokenizer, messages=messages, **options)
        return await self._sandboxes.run(work, owner)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        **options: Unpack[RenderOptions],
    ) -> list[int]:
        """Return the token ids of the rendered messages."""
        return tokenizer.encode_prompt(self.render(tokenizer, messages, **options))

    async def encode_async(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        owner: str = "",
        **options: Unpack[RenderOptions],
    ) -> list[int]:
        """Do `encode` without blocking the event loop."""
        text = await self.render_async(tokenizer, messages, owner, **options)
        return await asyncio.to_thread(tokenizer.encode_prompt, text)

    def _render(
        self,
        sandbox: SandboxProcess,
        *,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
        shield = tokenizer.control.shield
        shielded = [self._shielded(message, shield) for message in messages]
        if continue_final_message:
            if messages[-1].get("content") is None:
                raise InvalidRequest("the final message has no text to continue", param="messages")
            shielded[-1]["content"] += _CONTINUE + " "
        extra = dict(kwargs or {})
        now = _clock(extra.pop(_CLOCK, None))
        _check_kwargs(extra)
        variables = {name: shield(v) if isinstance(v, str) else v for name, v in extra.items()}
        variables |= tokenizer.special_tokens
        variables |= {
            "tools": _shield_all(tools, shield),
            "add_generation_prompt": add_generation_prompt,
        }
        outcome, text = self._run(sandbox, variables | {"messages": shielded}, now)
        if outcome != "text":
            what = {"rejects": "rejects", "limit": "exceeds its limits on"}.get(outcome, "fails on")
            raise InvalidRequest(
                f"the model's chat template {what} these messages: {text[:200]}", param="messages"
            )
        if not continue_final_message:
            return text
        text, found, rest = text.rpartition(_CONTINUE)
        if not found:
            raise InvalidRequest(
                "the chat template drops the final message, so it cannot be continued",
                param="continue_final_message",
            )
        return text if rest.startswith(" ") else text.rstrip()  # the template trims contents

    def _shielded(self, message: Mapping[str, Any], shield: Callable[..., str]) -> dict[str, Any]:
        """Return a copy for the template: without fields that are None, with a content, and with
        the reasoning under each name that templates use.

        Tags in an assistant's message (`<think>`) stay tags, because the model wrote them.
        """
        role = message.get("role")
        given = {name: value for name, value in message.items() if value is not None}
        given.pop("role", None)
        if isinstance(content := given.get("content"), list):
            given["content"] = "\n".join(part["text"] for part in content)
        copy: dict[str, Any] = {"role": "system" if role == "developer" else role}
        for name, value in given.items():
            only_special = role == "assistant" and isinstance(value, str)
            copy[name] = _shield_all(value, shield, only_special=only_special)
        # Templates concatenate a content of null, show it as the word None, or fail on it.
        copy.setdefault("content", self._no_content if copy.get("tool_calls") else "")
        reasoning = next((copy[name] for name in _REASONING if name in copy), None)
        if reasoning is None:
            return copy
        return {"thinking": reasoning} | copy | {"reasoning_content": reasoning}

    def _run(
        self, sandbox: SandboxProcess, variables: dict[str, Any], now: datetime
    ) -> tuple[str, str]:
        source = self.source if variables.get("tools") is None else self.source_for_tools
        return _ask(sandbox, source, {"tools": None, "documents": None} | variables, now)

    def _probe(self, origin: str) -> str:
        """Return the names of the template's variables. Raise CheckpointError if the simplest
        conversation leaves the sandbox.
        """
        simple = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}

        def work(sandbox: SandboxProcess) -> list[tuple[str, str]]:
            now = datetime.now()
            return [
                self._run(sandbox, simple, now),
                self._run(sandbox, simple | {"tools": []}, now),
                _ask(sandbox, self.source_for_tools, None, now),
            ]

        found = self._sandboxes.submit(work).result()
        for outcome, why in found:
            if outcome in ("syntax", "limit"):  # others: it rejects this conversation, maybe alone
                raise CheckpointError(
                    f"{origin}: refused: {why[:500]}. Pass another with --chat-template"
                )
        return found[-1][1]

    def _probe_no_content(self) -> str | None:
        """Return the content for messages with calls and without text: "", or None where the
        template writes less for it.

        Most templates render both alike. Some fail on None or show the word None. A few take "" for
        a turn of its own (DeepSeek-R1-Distill-Qwen).
        """

        def work(sandbox: SandboxProcess) -> list[tuple[str, str]]:
            now = datetime.now()
            found = []
            for content in ("", None):
                user, call, *rest = _CALL_PROBE
                messages = [user, call | {"content": content}, *rest]
                variables = {"messages": messages, "add_generation_prompt": True}
                found.append(self._run(sandbox, variables, now))
            return found

        (outcome, empty), (outcome_of_none, none) = self._sandboxes.submit(work).result()
        if outcome_of_none != "text" or (outcome == "text" and len(none) >= len(empty)):
            return ""
        return None


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:  # some editors write a byte order mark
            return file.read(MAX_TEMPLATE_CHARS + 1)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text") from error


def _named(found: Any, origin: str) -> tuple[str, str | None]:
    """Return the template and its variant for tools. found: a text, or a list of named texts."""
    if not isinstance(found, list):
        found = [{"name": "default", "template": found}]
    named = {
        entry.get("name"): entry.get("template", 0) for entry in found if isinstance(entry, dict)
    }
    text = named.get("default", next(iter(named.values()), 0))
    for_tools = named.get("tool_use")
    if not isinstance(text, str) or not isinstance(for_tools, str | None):
        raise CheckpointError(f"{origin} is neither a text nor a list of named texts")
    return text.removeprefix("\ufeff"), for_tools and for_tools.removeprefix("\ufeff")


def _from_mistral_common(path: Path) -> str:
    """Return the template that mistral-common makes for a tokenizer. The versions of tekken.json
    differ in format.
    """
    try:
        module = importlib.import_module(
            "mistral_common.integrations.chat_templates.chat_templates"
        )
    except ImportError as error:
        raise CheckpointError(
            f"{path}: the checkpoint has no chat template; pip install 'moeserve[mistral]' for "
            f"mistral-common's ({error}), or pass one with --chat-template"
        ) from error
    try:
        return str(module.convert_tokenizer_to_chat_template(path))
    except Exception as error:  # the library raises many kinds, AssertionError among them
        raise CheckpointError(
            f"{path}: mistral-common makes no chat template for it: {str(error)[:200]}. Pass one "
            "with --chat-template"
        ) from error


def _shield_all(value: Any, shield: Callable[..., str], **options: bool) -> Any:
    """Return JSON data in which the control tokens in all strings are broken by marks."""
    if isinstance(value, str):
        return shield(value.replace(_CONTINUE, ""), **options)
    if isinstance(value, Mapping):
        return {_shield_all(key, shield): _shield_all(item, shield) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shield_all(item, shield) for item in value]
    return value


def _clock(given: Any) -> datetime:
    """Return the date and time that the template shows: the one that the request gives, or the
    present.
    """
    if given is None:
        return datetime.now()
    try:
        return datetime.fromisoformat(given)
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"chat_template_kwargs.{_CLOCK} is the date that the template shows, such as "
            f'"2026-11-27" or "2026-11-27T09:30", not {str(given)[:64]!r}',
            param=f"chat_template_kwargs.{_CLOCK}",
        ) from None


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidRequest unless chat_template_kwargs are scalars, under names that the caller
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


def _ask(
    sandbox: SandboxProcess, source: str, variables: dict[str, Any] | None, now: datetime
) -> tuple[str, str]:
    """Return the outcome of a rendering, and the text or the reason why there is none; see
    `template_sandbox`.
    """
    try:
        line = msgspec.json.encode((source, variables, now.isoformat()))
    except (TypeError, UnicodeEncodeError) as error:
        # From Python callers only: objects of other kinds, half a surrogate pair.
        return "fails", str(error)
    try:
        return msgspec.json.decode(sandbox.ask(line), type=tuple[str, str])
    except SandboxDied as death:
        return "limit", f"it {death}"
