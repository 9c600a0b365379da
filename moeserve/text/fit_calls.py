"""Conversions of calls and results, for templates that do not take all of them."""

import string
from collections import OrderedDict, deque
from collections.abc import Iterator
from hashlib import sha256
from itertools import groupby, pairwise

from moeserve.text.chat_messages import Message, TemplateInput, as_json, joined, without

_ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # of the ids that Mistral's templates accept
TEXT_CALL_FORMAT = "hermes"  # the answer format of calls that are text
_CALL_INSTRUCTIONS = """

To call a function, write its name and its arguments as JSON, like this:
<tool_call>
{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}
</tool_call>"""


def has_calls(chat: TemplateInput) -> bool:
    return any(message.get("tool_calls") or message["role"] == "tool" for message in chat.messages)


def has_calls_or_listing(chat: TemplateInput) -> bool:
    return bool(chat.listing) or has_calls(chat)


def calls_as_text(chat: TemplateInput) -> TemplateInput:
    """Write calls and results as text, and tell the model how to write calls."""
    messages: list[Message] = []
    for are_results, group in groupby(chat.messages, lambda message: message["role"] == "tool"):
        if are_results:
            texts = [f"<tool_response>\n{result['content']}\n</tool_response>" for result in group]
            messages.append({"role": "user", "content": "\n".join(texts)})
        else:
            messages += [_with_text_calls(message, chat.listing) for message in group]
    return chat._replace(messages=messages, listing="")


def _with_text_calls(message: Message, listing: str) -> Message:
    if listing and listing in message.get("content", ""):
        told = message["content"].replace(listing, listing + _CALL_INSTRUCTIONS, 1)
        message = message | {"content": told}
    if made := message.get("tool_calls"):
        written = [f"<tool_call>\n{as_json(call['function'])}\n</tool_call>" for call in made]
        text = "\n".join(filter(None, [message.get("content"), *written]))
        message = without(message, "tool_calls") | {"content": text}
    return message


def lacks_ids(chat: TemplateInput) -> bool:
    return any(
        "id" not in call for message in chat.messages for call in message.get("tool_calls") or ()
    ) or any(
        message["role"] == "tool" and "tool_call_id" not in message for message in chat.messages
    )


def with_ids(chat: TemplateInput) -> TemplateInput:
    """Number calls without an id, and give results without an id those of the calls, in order."""
    messages = []
    open_ids: OrderedDict[str, None] = OrderedDict()  # of calls without a result
    num_calls = 0
    for message in chat.messages:
        if made := message.get("tool_calls"):
            identified = []
            for call in made:
                num_calls += 1
                identified.append({"id": f"call_{num_calls}"} | call)
            open_ids = OrderedDict.fromkeys(call["id"] for call in identified)
            message = message | {"tool_calls": identified}
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id", next(iter(open_ids), f"call_{num_calls}"))
            open_ids.pop(call_id, None)
            message = message | {"tool_call_id": call_id}
        messages.append(message)
    return chat._replace(messages=messages)


def with_short_ids(chat: TemplateInput) -> TemplateInput:
    messages = []
    for message in chat.messages:
        if made := message.get("tool_calls"):
            shortened = [call | {"id": _short_id(call.get("id") or "")} for call in made]
            message = message | {"tool_calls": shortened}
        elif message["role"] == "tool":
            message = message | {"tool_call_id": _short_id(message.get("tool_call_id") or "")}
        messages.append(message)
    return chat._replace(messages=messages)


def _short_id(given: str) -> str:
    if len(given) == ID_LENGTH:
        return given
    number = int.from_bytes(sha256(given.encode()).digest())
    letters = []
    for _ in range(ID_LENGTH):
        number, letter = divmod(number, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[letter])
    return "".join(letters)


def _steps(messages: list[Message]) -> Iterator[tuple[Message, list[Message]]]:
    """Yield each message that is not a result, with the results of its calls, wherever they are.

    Results without a call are yielded alone. A result belongs to the latest message before it with
    a call of its id, because some clients number the calls of each message from 0.
    """
    waiting: dict[str | None, list[int]] = {}  # positions of calls without a result, by their ids
    results: dict[int, list[Message]] = {}  # by the position of the message with the calls
    taken: set[int] = set()
    for i, message in enumerate(messages):
        made = message.get("tool_calls") or ()
        waiting |= {call.get("id"): [] for call in made}
        for call in made:
            waiting[call.get("id")].append(i)
        if message["role"] == "tool" and (calls := waiting.get(message.get("tool_call_id"))):
            results.setdefault(calls.pop(), []).append(message)
            taken.add(i)
    for i, message in enumerate(messages):
        if i not in taken:
            yield message, results.get(i, [])


def has_results_apart(chat: TemplateInput) -> bool:
    return any(
        message["role"] == "tool" and before["role"] not in ("tool", "assistant")
        for before, message in pairwise(chat.messages)
    )


def results_behind_calls(chat: TemplateInput) -> TemplateInput:
    moved = [message for step, results in _steps(chat.messages) for message in (step, *results)]
    return chat._replace(messages=moved)


def has_orphans(chat: TemplateInput) -> bool:
    return any(step["role"] == "tool" for step, _ in _steps(chat.messages))


def orphans_as_users(chat: TemplateInput) -> TemplateInput:
    orphans = {id(step) for step, _ in _steps(chat.messages) if step["role"] == "tool"}
    messages = [
        {"role": "user", "content": message["content"]} if id(message) in orphans else message
        for message in chat.messages
    ]
    return chat._replace(messages=messages)


def lacks_results(chat: TemplateInput) -> bool:
    return any(
        len(results) < len(step.get("tool_calls") or ()) and step is not chat.messages[-1]
        for step, results in _steps(chat.messages)
    )


def with_results(chat: TemplateInput) -> TemplateInput:
    """Add an empty result for each call without one, unless the conversation ends there."""
    messages: list[Message] = []
    missing: list[Message] = []
    steps = {id(step): (step, results) for step, results in _steps(chat.messages)}
    for message in chat.messages:
        if message["role"] != "tool":
            messages += missing
            missing = []
        messages.append(message)
        step, results = steps.get(id(message), (message, []))
        if step is not chat.messages[-1]:
            answered = {result.get("tool_call_id") for result in results}
            missing += [
                {"role": "tool", "tool_call_id": call.get("id"), "content": ""}
                for call in step.get("tool_calls") or ()
                if call.get("id") not in answered
            ]
    return chat._replace(messages=messages)


def lacks_names(chat: TemplateInput) -> bool:
    return any(message["role"] == "tool" and not message.get("name") for message in chat.messages)


def with_names(chat: TemplateInput) -> TemplateInput:
    names: dict[str, str] = {}  # by the id of the latest call
    messages = []
    for message, identified in zip(chat.messages, with_ids(chat).messages, strict=True):
        for call in identified.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and identified["tool_call_id"] in names:
            message = {"name": names[identified["tool_call_id"]]} | message
        messages.append(message)
    return chat._replace(messages=messages)


def has_parallel_calls(chat: TemplateInput) -> bool:
    return any(len(message.get("tool_calls") or ()) > 1 for message in chat.messages)


def one_call_at_a_time(chat: TemplateInput) -> TemplateInput:
    """Make a message of each call, followed by its result. The first one keeps other fields."""
    messages: list[Message] = []
    for step, results in _steps(chat.messages):
        made = step.get("tool_calls") or ()
        if len(made) < 2:
            messages += [step, *results]
            continue
        waiting: dict[str | None, deque[Message]] = {}  # results, by the id of the call
        for result in results:
            waiting.setdefault(result.get("tool_call_id"), deque()).append(result)
        for call in made:
            messages.append(step | {"tool_calls": [call]})
            if own := waiting.get(call.get("id")):
                messages.append(own.popleft())
            step = {"role": "assistant"}
    return chat._replace(messages=messages)


def has_text_and_thoughts_beside_calls(chat: TemplateInput) -> bool:
    return any(
        message.get("tool_calls") and message.get("content") and message.get("thinking")
        for message in chat.messages
    )


def text_as_thought(chat: TemplateInput) -> TemplateInput:
    messages = []
    for message in chat.messages:
        if message.get("tool_calls") and message.get("content") and message.get("thinking"):
            thoughts = f"{message['thinking']}\n\n{message['content']}"
            message = message | {"thinking": thoughts, "reasoning_content": thoughts}
            del message["content"]
        messages.append(message)
    return chat._replace(messages=messages)


def has_text_beside_calls(chat: TemplateInput) -> bool:
    return any(message.get("tool_calls") and message.get("content") for message in chat.messages)


def text_before_calls(chat: TemplateInput) -> TemplateInput:
    """Make an own message of the text beside calls. Thoughts stay with the calls."""
    messages = []
    for message in chat.messages:
        if message.get("tool_calls") and message.get("content"):
            messages.append({"role": "assistant", "content": message["content"]})
            message = without(message, "content")
        messages.append(message)
    return chat._replace(messages=messages)


def text_before_result(chat: TemplateInput) -> TemplateInput:
    """Put the text beside calls before that of the first result."""
    messages: list[Message] = []
    beside: int | None = None  # the position of calls whose text is not before a result yet
    for message in chat.messages:
        if message.get("tool_calls") and message.get("content"):
            beside = len(messages)
        elif message["role"] == "tool" and beside is not None:
            text = messages[beside]["content"]
            messages[beside] = without(messages[beside], "content")
            message = message | {"content": f"{text}\n\n{message['content']}"}
            beside = None
        messages.append(message)
    return chat._replace(messages=messages)


def has_text_before_calls(chat: TemplateInput) -> bool:
    return any(_are_text_and_calls(*pair) for pair in pairwise(chat.messages))


def text_beside_calls(chat: TemplateInput) -> TemplateInput:
    """Join an assistant's text to the assistant's next message, if that has calls."""
    messages: list[Message] = []
    for message in chat.messages:
        if messages and _are_text_and_calls(messages[-1], message):
            text = joined(messages[-1], message)["content"]
            message = messages.pop() | without(message, "content") | {"content": text}
            if not text:
                del message["content"]
        messages.append(message)
    return chat._replace(messages=messages)


def _are_text_and_calls(first: Message, second: Message) -> bool:
    is_text = not first.get("tool_calls") and bool(second.get("tool_calls"))
    return is_text and first["role"] == second["role"] == "assistant"
