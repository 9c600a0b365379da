"""Reads answers with receipts from files, and compares their text with the computed tokens.

A file may have a receipt, a list of receipts, a complete answer of /v1/chat/completions or
/v1/completions, the events of a streamed answer as they were sent, or the output lines of a batch.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from moeserve.errors import ConfigError
from moeserve.receipts import Computed, Receipt

if TYPE_CHECKING:
    from moeserve.frontend.front_end import FrontEnd
    from moeserve.text.answer_format import Part


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _CallPart(msgspec.Struct):
    index: int = -1
    function: _Function = msgspec.field(default_factory=_Function)


class _AnswerMessage(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_CallPart] | None = None


class _Choice(msgspec.Struct):
    """A choice of a complete answer or of a chunk, of either route."""

    index: int = 0
    message: _AnswerMessage | None = None
    delta: _AnswerMessage | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    receipt: Receipt | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


class _Response(msgspec.Struct):
    body: _Answer


class _BatchLine(msgspec.Struct):
    response: _Response


@dataclass
class ShownChoice:
    """One choice as a client received it."""

    is_chat: bool
    content: str = ""
    reasoning: str | None = None
    calls: list[_Function] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)  # by column
    token_ids: list[int] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """The maximum number of alternatives of a token; None without logprobs."""
        rows = self.logprobs.get("content") or self.logprobs.get("top_logprobs")
        if rows is None:
            return None
        alternatives = [row["top_logprobs"] if self.is_chat else row for row in rows]
        return max((len(top or ()) for top in alternatives), default=0)


@dataclass
class ReceiptInFile:
    """A receipt and its choice; None if the file has only the receipt."""

    receipt: Receipt
    shown: ShownChoice | None = None


def read_answers(path: Path) -> list[ReceiptInFile]:
    """Return the receipts in a file. Raises OSError, msgspec.DecodeError, ConfigError."""
    content = path.read_bytes()
    if content.lstrip().startswith((b"data:", b"id:", b"event:", b":")):
        return _with_receipts(path, [_merge_chunks(_read_events(content))])
    lines = content.splitlines()
    if len(lines) > 1 and lines[0].startswith(b"{") and b'"custom_id"' in lines[0]:
        batch = [msgspec.json.decode(line, type=_BatchLine) for line in lines if line]
        return _with_receipts(path, [line.response.body for line in batch])
    document = msgspec.json.decode(content)
    if isinstance(document, list):
        return [ReceiptInFile(receipt) for receipt in msgspec.convert(document, list[Receipt])]
    if isinstance(document, dict) and "custom_id" in document:
        return _with_receipts(path, [msgspec.convert(document, _BatchLine).response.body])
    if isinstance(document, dict) and "choices" in document:
        return _with_receipts(path, [msgspec.convert(document, _Answer)])
    return [ReceiptInFile(msgspec.convert(document, Receipt))]


def _with_receipts(path: Path, answers: list[_Answer]) -> list[ReceiptInFile]:
    receipts = [
        ReceiptInFile(choice.receipt, _shown_choice(choice))
        for answer in answers
        for choice in answer.choices
        if choice.receipt is not None
    ]
    if receipts:
        return receipts
    raise ConfigError(
        f'{path} has an answer without a receipt: send the request with "receipt": true'
    )


def _read_events(content: bytes) -> list[_Answer]:
    data_lines = [line for line in content.splitlines() if line.startswith(b"data:")]
    payloads = [line.removeprefix(b"data:").strip() for line in data_lines]
    return [
        msgspec.json.decode(payload, type=_Answer) for payload in payloads if payload != b"[DONE]"
    ]


def _merge_chunks(chunks: list[_Answer]) -> _Answer:
    """Merge a stream's chunks into a complete answer."""
    merged_choices: dict[int, _Choice] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            merged = merged_choices.setdefault(choice.index, _Choice(choice.index))
            merged.finish_reason = choice.finish_reason or merged.finish_reason
            merged.stop_reason = choice.stop_reason or merged.stop_reason
            merged.receipt = choice.receipt or merged.receipt
            if choice.text is not None:
                merged.text = (merged.text or "") + choice.text
            if choice.delta is not None:
                merged.message = merged.message or _AnswerMessage()
                _add_delta(merged.message, choice.delta)
            if choice.token_ids is not None:
                merged.token_ids = (merged.token_ids or []) + choice.token_ids
            for name, column in (choice.logprobs or {}).items():
                merged.logprobs = merged.logprobs or {}
                merged.logprobs[name] = merged.logprobs.get(name, []) + (column or [])
    return _Answer(list(merged_choices.values()))


def _add_delta(message: _AnswerMessage, delta: _AnswerMessage) -> None:
    if delta.content is not None:
        message.content = (message.content or "") + delta.content
    if delta.reasoning is not None:
        message.reasoning = (message.reasoning or "") + delta.reasoning
    if message.tool_calls is None:
        message.tool_calls = []
    calls = message.tool_calls
    for call in delta.tool_calls or ():
        if call.index >= len(calls):  # a new call; its arguments may continue in later chunks
            calls.append(call)
        else:
            calls[call.index].function.arguments += call.function.arguments


def _shown_choice(choice: _Choice) -> ShownChoice | None:
    message = choice.message
    if message is None and choice.text is None:
        return None
    columns = {name: column for name, column in (choice.logprobs or {}).items() if column}
    shown = ShownChoice(
        is_chat=message is not None,
        content=choice.text or "",
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=columns,
        token_ids=choice.token_ids,
    )
    if message is not None:
        shown.content = message.content or ""
        shown.reasoning = message.reasoning
        shown.calls = [call.function for call in message.tool_calls or ()]
    return shown


def answer_difference(
    front: "FrontEnd", receipt: Receipt, shown: ShownChoice, computed: Computed
) -> str:
    """Return the first difference between an answer and its tokens; "" if there is none.

    computed: the recomputed answer, which has the receipt's tokens.
    """
    if shown.token_ids is not None and shown.token_ids != receipt.token_ids:
        return "token_ids: they differ from the receipt's"
    difference = (
        _chat_difference(front, receipt, shown, computed.text)
        if shown.is_chat
        else _text_difference(front, receipt, shown.content, computed.text)
    )
    if difference:
        return difference
    allowed_reasons = {receipt.finish_reason}
    if shown.calls and receipt.finish_reason == "stop":
        # The server shows "tool_calls", unless tool_choice named the tool.
        allowed_reasons.add("tool_calls")
    if shown.finish_reason not in allowed_reasons:
        return (
            f"finish_reason: {shown.finish_reason!r} in the answer, {receipt.finish_reason!r} "
            "computed"
        )
    if shown.stop_reason != receipt.stop_reason:
        return f"stop_reason: {shown.stop_reason!r} in the answer, {receipt.stop_reason!r} computed"
    return _logprobs_difference(front, receipt, shown, computed)


def _text_difference(front: "FrontEnd", receipt: Receipt, shown: str, text: str) -> str:
    if shown != text and front.tokenizer is not None:
        prompt = front.tokenizer.decode(receipt.prompt_token_ids)
        if shown == prompt + text:  # the request asked for an echo
            return ""
    return _first_difference("text", shown, text)


def _chat_difference(front: "FrontEnd", receipt: Receipt, shown: ShownChoice, text: str) -> str:
    """Compare a message with its tokens' text, parsed in every way that the request allows.

    A receipt contains neither the tools nor whether the answer continues a message. So the text is
    parsed without and with tools, as a new and as a continued message, and one equal result is
    enough.
    """
    if not receipt.marked:
        return _first_difference("content", shown.content, text)
    if front.answer_format is None:
        return "unknown answer format of this model; give the server's --tool-format"
    assert front.tokenizer is not None
    prompt = front.tokenizer.decode(receipt.prompt_token_ids, skip_special_tokens=False)
    differences = []
    for tools in ([], _matching_tools(shown)):
        for continued in (False, True):
            parser = front.answer_format.parser(tools, prompt=prompt, continued=continued)
            difference = _parts_difference(shown, parser.push(text, final=True))
            if not difference:
                return ""
            differences.append(difference)
    # Report the difference for a new message, parsed with tools if the answer has calls.
    return differences[2 if shown.calls else 0]


def _matching_tools(shown: ShownChoice) -> list[dict[str, Any]]:
    """Return tools that match an answer's calls, with the types that tag-based formats need."""
    tools = []
    for call in shown.calls or [_Function("a_tool")]:
        arguments: Any = {}
        with suppress(ValueError):  # invalid JSON differs from the computed arguments anyway
            arguments = json.loads(call.arguments or "{}")
        types = {
            name: {"type": "string"} if isinstance(value, str) else {}
            for name, value in (arguments.items() if isinstance(arguments, dict) else ())
        }
        parameters = {"type": "object", "properties": types}
        function = {"name": call.name, "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def _parts_difference(shown: ShownChoice, parts: "list[Part]") -> str:
    texts = {"content": "", "reasoning": ""}
    calls: list[_Function] = []
    for part in parts:
        if part.kind == "call":
            calls.append(_Function(part.text))
        elif part.kind == "arguments":
            calls[-1].arguments += part.text
        else:
            texts[part.kind] += part.text
    if shown.reasoning is not None:  # None if the request had include_reasoning: false
        difference = _first_difference("reasoning", shown.reasoning, texts["reasoning"])
        if difference:
            return difference
    if difference := _first_difference("content", shown.content, texts["content"]):
        return difference
    return _calls_difference(shown.calls, calls)


def _calls_difference(shown: list[_Function], computed: list[_Function]) -> str:
    if len(shown) != len(computed):
        return f"tool_calls: {len(shown)} in the answer, {len(computed)} computed"
    for i, (shown_call, computed_call) in enumerate(zip(shown, computed, strict=True)):
        for name in ("name", "arguments"):
            where = f"tool_calls[{i}].function.{name}"
            if difference := _first_difference(
                where, getattr(shown_call, name), getattr(computed_call, name)
            ):
                return difference
    return ""


def _first_difference(name: str, shown: str, computed: str) -> str:
    if shown == computed:
        return ""
    start = next(
        (i for i, (a, b) in enumerate(zip(shown, computed, strict=False)) if a != b),
        min(len(shown), len(computed)),
    )
    return (
        f"{name}: from character {start} on {shown[start : start + 20]!r} in the answer,"
        f" {computed[start : start + 20]!r} computed"
    )


def _logprobs_difference(
    front: "FrontEnd", receipt: Receipt, shown: ShownChoice, computed: Computed
) -> str:
    from moeserve.server.logprobs import LogprobFormat

    num_top = shown.num_logprobs
    if num_top is None:
        return ""
    num_tokens = len(receipt.token_ids)
    as_ids = "token_id:" in json.dumps(shown.logprobs)  # tokens were requested as ids
    if shown.is_chat:
        logprob_format = LogprobFormat(front.tokenizer, num_top, as_ids=as_ids)
        expected = msgspec.to_builtins(logprob_format.chat_logprobs(computed.logprobs))["content"]
        return _rows_difference(shown.logprobs["content"], expected, "logprobs.content")
    # The sampled token is an additional entry if it is not among the most likely ones. So the
    # request may have asked for one entry less than the largest number in the answer.
    for requested_top in (num_top, num_top - 1):
        logprob_format = LogprobFormat(front.tokenizer, max(requested_top, 0), as_ids=as_ids)
        columns, _ = logprob_format.completion_logprobs(receipt.token_ids, computed.logprobs)
        expected = msgspec.to_builtins(columns)
        difference = ""
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            # With `echo` the entries of the prompt come first.
            rows = shown.logprobs.get(name, [])[-num_tokens:]
            difference = difference or _rows_difference(rows, expected[name], f"logprobs.{name}")
        if not difference:
            return ""
    return difference


def _rows_difference(shown: list[Any], computed: list[Any], name: str) -> str:
    if len(shown) != len(computed):
        return f"{name}: {len(shown)} entries in the answer, {len(computed)} computed"
    for i, (shown_row, computed_row) in enumerate(zip(shown, computed, strict=True)):
        if shown_row != computed_row:
            return f"{name}[{i}]: {shown_row!r:.80} in the answer, {computed_row!r:.80} computed"
    return ""
