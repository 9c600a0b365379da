"""Answers of /v1/chat/completions: chunks of a stream, or a whole answer."""

from typing import Any

from moeserve import protocol
from moeserve.frontend.generation import Delta
from moeserve.server.chat_request import ChatRequest
from moeserve.server.conversation import Conversation
from moeserve.server.logprobs import LogprobFormat
from moeserve.server.writer import TEXT_MARK, ChunkWriter, encode
from moeserve.text.answer_format import Part


class ChatWriter(ChunkWriter):
    """Writes the answer of a chat. The bytes around a text are kept as in `ChunkWriter`."""

    last_choice = protocol.ChatChunkChoice
    reasoning_field = "reasoning"

    def __init__(self, chat: Conversation, *, request: ChatRequest) -> None:
        logprob_format = None
        if request.logprobs:
            logprob_format = LogprobFormat(
                chat.front.tokenizer,
                num_top=chat.params.logprobs or 0,
                as_ids=request.return_tokens_as_token_ids,
            )
        head = chat.running.head.fields("chatcmpl", "chat.completion.chunk")
        chunk = protocol.ChatCompletionChunk(**head)
        super().__init__(chat.running, request, chunk, logprob_format)
        self._chat = chat
        self._hides_reasoning = request.include_reasoning is False
        # (index of the choice, kind and number of the part) -> bytes before and after the text
        self._templates: dict[tuple[int, str, int], tuple[bytes, bytes]] = {}

    def opening(self) -> bytes:
        """Return one chunk with the role for each choice."""
        frames = b""
        for index in range(self.n):
            delta = protocol.ChoiceDelta(role="assistant", content="")
            choice = protocol.OpenChatChoice(index=index, delta=delta)
            if self.shows_token_ids and index == 0:
                choice.prompt_token_ids = self._chat.prompt
            frames += self.frame(choice)
        return frames

    def choice(self, index: int, text: str) -> protocol.OpenChatChoice:
        return protocol.OpenChatChoice(index=index, delta=protocol.ChoiceDelta(content=text))

    def format_logprobs(
        self, index: int, logprob_format: LogprobFormat, delta: Delta
    ) -> protocol.ChatLogprobs:
        return logprob_format.chat_logprobs(delta.logprobs)

    def frames(self, prompt: int, delta: Delta) -> bytes:
        """Return the chunks of a delta: one for each part, if the answer is parsed."""
        if not self._chat.is_parsed:
            return super().frames(prompt, delta)
        self.counts.add(delta)
        index = delta.index
        parts = self._shown_parts(delta)
        if self._text_only:
            # Most deltas have one part: nothing to join.
            frames = b"" if not parts else self._frame_of_part(index, parts[0])
            for part in parts[1:]:
                frames += self._frame_of_part(index, part)
        else:
            choices = [
                protocol.OpenChatChoice(index=index, delta=self._choice_delta(part))
                for part in parts
            ]
            if delta.token_ids:
                choices = choices or [protocol.OpenChatChoice(index=index)]
                self._add_token_fields(choices[0], delta)
            frames = b"".join(map(self.frame, choices))
        if delta.finish_reason is None:
            return frames
        return frames + self.last_frame(index, delta, self._finish_reason(delta))

    def _shown_parts(self, delta: Delta) -> list[Part]:
        parts = self._chat.parts(delta)
        if self._hides_reasoning:
            return [part for part in parts if part.kind != "reasoning"]
        return parts

    def _frame_of_part(self, index: int, part: Part) -> bytes:
        """Return the chunk of one part. Chunks of one block differ only in the text."""
        key = index, part.kind, part.number
        if (template := self._templates.get(key)) is None:
            delta = self._choice_delta(part._replace(text=TEXT_MARK))
            choice = protocol.OpenChatChoice(index=index, delta=delta)
            before, after = encode(choice).split(encode(TEXT_MARK))
            template = self._chunk_head + before, after + self._chunk_tail
            self._templates[key] = template
        before, after = template
        return before + encode(part.text) + after

    def _finish_reason(self, delta: Delta) -> str | None:
        """Return OpenAI's finish reason: "stop" if the request named the tool."""
        if self._chat.tools.choice == "named" and delta.finish_reason == "tool_calls":
            return "stop"
        return delta.finish_reason

    def whole(self) -> protocol.ChatCompletion:
        (sequences,) = self.sequences()
        head = self.running.head.fields("chatcmpl", "chat.completion")
        answer = protocol.ChatCompletion(**head, usage=self.counts.usage())
        for delta in sequences:
            choice = protocol.ChatChoice(
                index=delta.index,
                message=self._message(self._shown_parts(delta)),
                logprobs=None
                if self.logprob_format is None
                else self.logprob_format.chat_logprobs(delta.logprobs),
                finish_reason=self._finish_reason(delta),
                stop_reason=delta.stop_reason,
                token_ids=delta.token_ids if self.shows_token_ids else None,
                receipt=delta.receipt,
            )
            answer.choices.append(choice)
        if self.shows_token_ids:
            answer.prompt_token_ids = self._chat.prompt
        if (rows := sequences[0].prompt_logprobs) is not None:
            logprob_format = LogprobFormat(self._chat.front.tokenizer)
            answer.prompt_logprobs = logprob_format.prompt_logprobs(rows)
        return answer

    def _message(self, parts: list[Part]) -> protocol.ChatMessage:
        """Return the message of a whole answer. Its content is null only if it has calls."""
        message = protocol.ChatMessage()
        calls = list[dict[str, Any]]()
        reasoning: str | None = None
        for part in parts:
            if part.kind == "content":
                message.content = (message.content or "") + part.text
            elif part.kind == "reasoning":
                reasoning = (reasoning or "") + part.text
            elif part.kind == "call":
                calls.append(_tool_call(part))
            else:
                calls[-1]["function"]["arguments"] += part.text
        if reasoning is not None:
            setattr(message, self.reasoning_field, reasoning)
        if calls:
            message.tool_calls = calls
        elif message.content is None:
            message.content = ""
        return message

    def _choice_delta(self, part: Part) -> protocol.ChoiceDelta:
        if part.kind == "content":
            return protocol.ChoiceDelta(content=part.text)
        if part.kind == "reasoning":
            fields: dict[str, Any] = {self.reasoning_field: part.text}
            return protocol.ChoiceDelta(**fields)
        if part.kind == "call":
            return protocol.ChoiceDelta(tool_calls=[{"index": part.number} | _tool_call(part)])
        return protocol.ChoiceDelta(
            tool_calls=[{"index": part.number, "function": {"arguments": part.text}}]
        )


def _tool_call(part: Part) -> dict[str, Any]:
    return {"id": part.id, "type": "function", "function": {"name": part.text, "arguments": ""}}
