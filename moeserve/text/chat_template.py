"""Loads a model's chat template (Jinja), and renders chat messages to a prompt with it.

Templates come with checkpoints, so they are untrusted code. They run in sandbox processes
(`template_sandbox`) with limits on access, time and memory. One pool of these processes serves the
whole program; it starts with the first template and is closed at exit.
"""

import asyncio
import atexit
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import msgspec

from moeserve.errors import CheckpointError, ConfigError, InvalidRequest
from moeserve.loader.documents import read_optional_json
from moeserve.text.chat_messages import TemplateInput
from moeserve.text.sandbox_pool import SandboxPool
from moeserve.text.sandbox_process import SandboxDied, SandboxProcess
from moeserve.text.template_fit import TemplateFit
from moeserve.text.tokenizer import Tokenizer

_CONTINUE_MARK = "\ufdd3"  # marks the end of the message to continue, during rendering
# The first one in a message is used.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_CLOCK_NAME = "strftime_now"  # the template's function for the date, which a request may set
_RESERVED_NAMES = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template", "conversation", "tokenize", "return_dict", "return_tensors", "padding",
    "truncation", "max_length",
})  # fmt: skip
MAX_SECONDS = 2.0  # CPU time of one rendering
MAX_KWARGS = 32
MAX_KWARG_CHARS = 4096
MAX_TEMPLATE_CHARS = 2 * 2**20
# model_type -> moeserve's own template, for a model whose format is published as Python code
_OWN_TEMPLATES = {name: f"{name}.jinja" for name in ("deepseek_v32", "deepseek_v4")}

SANDBOXES = SandboxPool(
    "moeserve.text.template_sandbox", str(MAX_SECONDS), purpose="chat templates"
)
atexit.register(SANDBOXES.close)


_VERBS = {
    "rejects": "rejects", "limit": "exceeds its limits on", "died": "exceeds its limits on",
}  # fmt: skip


class _Rendering(NamedTuple):
    outcome: str  # "text", "died" (the sandbox), or what failed; see `template_sandbox`
    text: str  # the prompt, or the reason


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
        """Probe the template with small conversations.

        Raise CheckpointError if it does not compile or exceeds the limits of the sandbox.

        Args:
            source: The template's text.
            origin: The file of the source, for error messages.
            for_tools: The variant for requests with tools.
            sandboxes: The processes that render.
        """
        self.source = source
        self.source_for_tools = for_tools or source
        self._sandboxes = sandboxes
        if max(len(source), len(self.source_for_tools)) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"{origin}: rejected: it has more than {MAX_TEMPLATE_CHARS:,} characters"
            )
        # Whether the template renders definitions of tools, and earlier tool calls
        self._names = frozenset(self._probe_variables(origin).split())
        self.takes_tools = "tools" in self._names or "functions" in self._names
        self.takes_calls = "tool_calls" in self.source_for_tools
        self._fit = TemplateFit()

    @classmethod
    def load(cls, model_dir: Path, override: Path | str | None = None) -> "ChatTemplate | None":
        """Return a model's template; None if it has none, like base models.

        The first of these is used:
        - the file `override`;
        - `chat_template.jinja`, with `additional_chat_templates/tool_use.jinja` for requests with
          tools;
        - `chat_template` in chat_template.json or tokenizer_config.json: a text, or a list of named
          texts;
        - moeserve's own template, for a model whose format is published as Python code;
        - the template that mistral-common generates for a tekken.json.

        Raise CheckpointError for a damaged or unsupported template, ConfigError for a missing
        `override`.
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
                text, for_tools = _named_templates(found, origin)
                return cls(text, origin=origin, for_tools=for_tools)
        model_type = str(read_optional_json(model_dir, "config.json").get("model_type"))
        if own := _OWN_TEMPLATES.get(model_type):
            asset = files("moeserve") / "assets" / "chat_templates" / own
            return cls(asset.read_text(encoding="utf-8"), origin=own)
        if (path := model_dir / "tekken.json").is_file():
            return cls(_from_mistral_common(path), origin=f"mistral-common's template for {path}")
        return None

    def render(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        **options: Unpack[RenderOptions],
    ) -> str:
        """Return the prompt, for `Tokenizer.encode_prompt`. It may block for seconds.

        Contents are strings or lists of text parts; a tool call's arguments are an object, not JSON
        text. Control tokens typed by users are marked in the prompt. Raise InvalidRequest if the
        template rejects the messages.
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
        """Run `render` in a thread of the pool, fairly among owners.

        Raise Overloaded if no process is free in time.
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
        """Run `encode` without blocking the event loop."""
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
                "add_generation_prompt and continue_final_message cannot both be true",
                param="continue_final_message",
            )
        shield = tokenizer.control.shield
        shielded = [self._shielded(message, shield) for message in messages]
        extra = dict(kwargs or {})
        now = _clock(extra.pop(_CLOCK_NAME, None))
        _check_kwargs(extra)
        chat = TemplateInput(shielded, _shield_all(tools, shield))
        chat = self._fit.fit(chat, partial(self._render_probe, sandbox, tokenizer))
        if continue_final_message:
            if messages[-1].get("content") is None or not chat.messages[-1].get("content"):
                raise InvalidRequest("the final message has no text to continue", param="messages")
            # The space shows whether the template trims contents.
            continued = chat.messages[-1]["content"] + _CONTINUE_MARK + " "
            chat.messages[-1] = chat.messages[-1] | {"content": continued}
        variables = {name: shield(v) if isinstance(v, str) else v for name, v in extra.items()}
        variables |= tokenizer.special_tokens
        variables["add_generation_prompt"] = add_generation_prompt
        outcome, text = self._run_template(sandbox, variables | self._variables(chat, now), now)
        if outcome != "text":
            verb = _VERBS.get(outcome, "fails on")
            raise InvalidRequest(
                f"the model's chat template {verb} these messages: {text[:200]}", param="messages"
            )
        if not continue_final_message:
            return text
        text, mark, rest = text.rpartition(_CONTINUE_MARK)
        if not mark:
            raise InvalidRequest(
                "the chat template drops the final message, so it cannot be continued",
                param="continue_final_message",
            )
        return text if rest.startswith(" ") else text.rstrip()

    def _shielded(self, message: Mapping[str, Any], shield: Callable[..., str]) -> dict[str, Any]:
        """Return a copy of a message for the template, with control tokens in texts shielded.

        The copy has no fields that are None, it has a content, and it has the reasoning under each
        name that templates use. Tags in an assistant's message (`<think>`) are not shielded,
        because the model wrote them.
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
        if not copy.get("tool_calls"):
            copy.setdefault("content", "")
        reasoning = next((copy[name] for name in _REASONING_FIELDS if name in copy), None)
        if reasoning is None:
            return copy
        return {"thinking": reasoning} | copy | {"reasoning_content": reasoning}

    def _render_probe(
        self, sandbox: SandboxProcess, tokenizer: Tokenizer, chat: TemplateInput
    ) -> str | None:
        """Return the prompt of a probe; None if the template fails.

        Raise InvalidRequest if it exceeds the limits of time and memory, which it may do with each
        of the probes.
        """
        now = datetime.now()
        variables = tokenizer.special_tokens | {"add_generation_prompt": True}
        outcome, text = self._run_template(sandbox, variables | self._variables(chat, now), now)
        if outcome == "died":
            raise InvalidRequest(f"the model's chat template exceeds its limits: {text[:200]}")
        return text if outcome == "text" else None

    def _variables(self, chat: TemplateInput, now: datetime) -> dict[str, Any]:
        """Return the variables of a conversation."""
        variables: dict[str, Any] = {"messages": chat.messages, "tools": chat.tools}
        if "functions" in self._names:  # a name of 2024, for JSON text
            functions = [tool.get("function", tool) for tool in chat.tools or ()]
            variables["functions"] = json.dumps(functions, ensure_ascii=False)
        if "datetime" in self._names:
            variables["datetime"] = now.strftime("%Y-%m-%d")  # no time: it would change each prompt
        return variables

    def _run_template(
        self, sandbox: SandboxProcess, variables: dict[str, Any], now: datetime
    ) -> _Rendering:
        source = self.source if variables.get("tools") is None else self.source_for_tools
        return _ask_sandbox(sandbox, source, {"tools": None, "documents": None} | variables, now)

    def _probe_variables(self, origin: str) -> str:
        """Return the names of the template's variables.

        Raise CheckpointError if it does not compile, or the simplest conversation exceeds a limit.
        """
        simple = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}

        def work(sandbox: SandboxProcess) -> list[_Rendering]:
            now = datetime.now()
            return [
                self._run_template(sandbox, simple, now),
                self._run_template(sandbox, simple | {"tools": []}, now),
                _ask_sandbox(sandbox, self.source_for_tools, None, now),  # the names of variables
            ]

        renderings = self._sandboxes.submit(work).result()
        for outcome, why in renderings:
            # With other outcomes, it may still render conversations.
            if outcome in ("syntax", "limit", "died"):
                raise CheckpointError(
                    f"{origin}: rejected: {why[:500]}. Pass another with --chat-template"
                )
        return renderings[-1].text


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:  # some editors write a byte order mark
            return file.read(MAX_TEMPLATE_CHARS + 1)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text") from error


def _named_templates(found: Any, origin: str) -> tuple[str, str | None]:
    """Return the template and its variant for tools. found: a text, or a list of named texts."""
    if not isinstance(found, list):
        found = [{"name": "default", "template": found}]
    # An entry without a text gets 0, which is refused below. None would be an absent variant.
    named = {
        entry.get("name"): entry.get("template", 0) for entry in found if isinstance(entry, dict)
    }
    text = named.get("default", next(iter(named.values()), 0))
    for_tools = named.get("tool_use")
    if not isinstance(text, str) or not isinstance(for_tools, str | None):
        raise CheckpointError(f"{origin} is neither a text nor a list of named texts")
    if for_tools is not None:
        for_tools = for_tools.removeprefix("\ufeff")
    return text.removeprefix("\ufeff"), for_tools


def _from_mistral_common(path: Path) -> str:
    """Return the template that mistral-common generates for a tekken.json of any version."""
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
    """Return JSON data with the control tokens in all strings shielded."""
    if isinstance(value, str):
        return shield(value.replace(_CONTINUE_MARK, ""), **options)
    if isinstance(value, Mapping):
        return {_shield_all(key, shield): _shield_all(item, shield) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shield_all(item, shield) for item in value]
    return value


def _clock(given: Any) -> datetime:
    """Return the date and time for the template: from the request, or the current time."""
    if given is None:
        return datetime.now()
    try:
        return datetime.fromisoformat(given)
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"chat_template_kwargs.{_CLOCK_NAME} must be a date for the template, such as "
            f'"2026-11-27" or "2026-11-27T09:30", not {str(given)[:64]!r}',
            param=f"chat_template_kwargs.{_CLOCK_NAME}",
        ) from None


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidRequest unless chat_template_kwargs are scalars with permitted names."""
    param = "chat_template_kwargs"
    if len(kwargs) > MAX_KWARGS:
        raise InvalidRequest(f"{len(kwargs)} values; at most {MAX_KWARGS} are allowed", param=param)
    for name, value in kwargs.items():
        shown = name[:64]
        if name in _RESERVED_NAMES or not name.isidentifier() or name.startswith("_"):
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


def _ask_sandbox(
    sandbox: SandboxProcess, source: str, variables: dict[str, Any] | None, now: datetime
) -> _Rendering:
    """Return the outcome of a rendering, and its text or the reason; see `template_sandbox`.

    variables: None to get the names of the template's variables instead.
    """
    try:
        line = msgspec.json.encode((source, variables, now.isoformat()))
    except (TypeError, UnicodeEncodeError) as error:
        # Only possible for Python callers: objects that are not JSON, unpaired surrogates.
        return _Rendering("fails", str(error))
    try:
        return _Rendering(*msgspec.json.decode(sandbox.ask(line), type=tuple[str, str]))
    except SandboxDied as death:
        return _Rendering("died", f"it {death}")
