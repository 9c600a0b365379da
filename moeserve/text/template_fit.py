"""Converts conversations to what a chat template takes.

Templates refuse or lose what their authors did not think of: a second system message, several
calls at once, text beside a call. Agents send all of it, and it must reach the model. A template is
asked once about each shape (`template_shapes`), when the first conversation has it. A conversation
is converted only where its template needs it, and in the same way each turn, so that the prompt of
a longer conversation begins with that of a shorter one.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moeserve.text.chat_messages import Message, TemplateInput
from moeserve.text.template_shapes import (
    PROBE_TOOLS,
    SHAPES,
    STEP,
    TOOL_SHAPES,
    ChatShape,
    probe_texts,
)

Render = Callable[[TemplateInput], str | None]  # the prompt; None if the template fails
_ALL_SHAPES = (*TOOL_SHAPES, *SHAPES)
_TOOLS: dict[str, list[dict[str, Any]] | None] = {"none": None, "empty": [], "some": PROBE_TOOLS}


class CallForm(NamedTuple):
    """The form of a message with calls."""

    content: str | None = ""  # where it has no text
    has_text_arguments: bool = False  # arguments are JSON text

    def of(self, message: Message) -> Message:
        """Return a message in this form."""
        made = message.get("tool_calls")
        if not made:
            return message
        if self.has_text_arguments:
            made = [_with_text_arguments(call) for call in made]
        return message | {"content": message.get("content", self.content), "tool_calls": made}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": arguments}}


class TemplateFit:
    """What is known of one template. Thread-safe: equal questions have equal answers."""

    def __init__(self) -> None:
        self._needed: dict[tuple[int, str], bool] = {}  # by index of the shape, and kind of tools
        self._call_forms: dict[str, CallForm] = {}  # by kind of tools

    def fit(self, chat: TemplateInput, render: Render) -> TemplateInput:
        """Return the conversation that the template takes.

        render: renders probes.
        """
        kind = _kind_of_tools(chat)
        fitted = self._converted(chat, kind, render, _ALL_SHAPES)
        return self._with_call_form(fitted, kind, render)

    def _converted(
        self, chat: TemplateInput, kind: str, render: Render, shapes: Sequence[ChatShape]
    ) -> TemplateInput:
        for i, shape in enumerate(shapes):
            if self._needed.get((i, kind)) is False:
                continue  # most shapes of most templates: not looked for in each conversation
            if shape.occurs(chat) and self._is_needed(i, kind, render):
                # The conversion may make an earlier shape.
                chat = self._converted(shape.convert(chat), kind, render, shapes[:i])
        return chat

    def _is_needed(self, index: int, kind: str, render: Render) -> bool:
        """Return whether a shape must be converted, and the conversion heals it."""
        key = (index, kind)
        if key not in self._needed:
            shape = _ALL_SHAPES[index]
            tools = _TOOLS[kind] if shape.tools is None else shape.tools
            probe = TemplateInput(shape.probe, tools)
            texts = probe_texts((shape.probe, shape.tools))
            as_it_is = self._prompt(probe, kind, render, index)
            self._needed[key] = not _shows(as_it_is, texts) and all(
                _shows(
                    self._prompt(TemplateInput(messages, tools), kind, render, index, shape), texts
                )
                for messages in (shape.probe, shape.later)
                if messages is not None
            )
        return self._needed[key]

    def _prompt(
        self,
        probe: TemplateInput,
        kind: str,
        render: Render,
        num_shapes: int,
        shape: ChatShape | None = None,
    ) -> str | None:
        """Return the prompt of a probe after the first conversions, and that of `shape`."""
        earlier = _ALL_SHAPES[:num_shapes]
        probe = self._converted(probe, kind, render, earlier)
        if shape is not None:
            probe = self._converted(shape.convert(probe), kind, render, earlier)
        return render(self._with_call_form(probe, kind, render))

    def _with_call_form(self, chat: TemplateInput, kind: str, render: Render) -> TemplateInput:
        """Return the conversation with calls in the form that the template takes."""
        if not any(message.get("tool_calls") for message in chat.messages):
            return chat
        if kind not in self._call_forms:
            probe = self._converted(TemplateInput(STEP, _TOOLS[kind]), kind, render, TOOL_SHAPES)
            self._call_forms[kind] = _call_form(probe, render)
        form = self._call_forms[kind]
        return chat._replace(messages=[form.of(message) for message in chat.messages])


def _call_form(probe: TemplateInput, render: Render) -> CallForm:
    """Return the form of calls: the first that the template shows, else the first it renders.

    Most templates render a content of "" and of null equally. Some fail with null, or write the
    word None. A few write an additional turn for "" (DeepSeek-R1-Distill-Qwen); these get null.
    """
    prompts = {}
    for has_text_arguments in (False, True):
        for content in ("", None):
            form = CallForm(content, has_text_arguments)
            messages = [form.of(message) for message in probe.messages]
            prompts[form] = render(probe._replace(messages=messages))
    rendered = {form: prompt for form, prompt in prompts.items() if prompt is not None}
    texts = probe_texts(probe.messages)
    shown = [form for form, prompt in rendered.items() if _shows(prompt, texts)]
    candidates = shown or list(rendered) or [CallForm()]
    first, *others = candidates
    for other in others:
        is_content = other.has_text_arguments == first.has_text_arguments
        if is_content and len(rendered[other]) < len(rendered[first]):
            return other
    return first


def _shows(prompt: str | None, texts: list[str]) -> bool:
    return prompt is not None and all(text in prompt for text in texts)


def _kind_of_tools(chat: TemplateInput) -> str:
    if chat.tools is None:
        return "none"
    return "some" if chat.tools else "empty"
