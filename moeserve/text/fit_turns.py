"""Conversions of system messages and of the order of turns, for templates that do not take all."""

from collections.abc import Callable
from itertools import pairwise

from moeserve.text.chat_messages import Message, TemplateInput, joined

# The user's turn before a conversation that the assistant begins, for templates that need one
START = "(start of the conversation)"


def has_system(chat: TemplateInput) -> bool:
    return any(message["role"] == "system" for message in chat.messages)


def has_adjacent_systems(chat: TemplateInput) -> bool:
    return any(
        before["role"] == message["role"] == "system" for before, message in pairwise(chat.messages)
    )


def has_late_system(chat: TemplateInput) -> bool:
    return any(message["role"] == "system" for message in chat.messages[1:])


def adjacent_systems_joined(chat: TemplateInput) -> TemplateInput:
    return _neighbors_joined(chat, "system")


def systems_joined(chat: TemplateInput) -> TemplateInput:
    """Join all system messages to the first message: the rules of agents must reach the model."""
    systems = [message for message in chat.messages if message["role"] == "system"]
    rest = [message for message in chat.messages if message["role"] != "system"]
    first = systems[0]
    for message in systems[1:]:
        first = joined(first, message)
    return chat._replace(messages=[first, *rest])


def system_in_first_user(chat: TemplateInput) -> TemplateInput:
    """Join all system messages, and put them before the text of the user who begins. Without one,
    they are a turn of the user.
    """
    first, *rest = systems_joined(chat).messages
    first = first | {"role": "user"}
    if rest and rest[0]["role"] == "user":
        rest[0] = rest[0] | {"content": joined(first, rest[0])["content"]}
        return chat._replace(messages=rest)
    return chat._replace(messages=[first, *rest])


def system_in_last_user(chat: TemplateInput) -> TemplateInput:
    """Join all system messages, and put them before the text of the last user's message."""
    first, *rest = systems_joined(chat).messages
    asked = [i for i, message in enumerate(rest) if message["role"] == "user"]
    if not asked:
        return chat._replace(messages=[first | {"role": "user"}, *rest])
    rest[asked[-1]] = rest[asked[-1]] | {"content": joined(first, rest[asked[-1]])["content"]}
    return chat._replace(messages=rest)


def ends_without_user(chat: TemplateInput) -> bool:
    return has_system(chat) and chat.messages[-1]["role"] != "user"


def lacks_user(chat: TemplateInput) -> bool:
    return all(message["role"] == "system" for message in chat.messages)


# ---- The order of turns


def has_empty_answer(chat: TemplateInput) -> bool:
    return any(map(_is_empty_answer, chat.messages))


def _is_empty_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not (
        message.get("content") or message.get("tool_calls")
    )


def without_empty_answers(chat: TemplateInput) -> TemplateInput:
    kept = [message for message in chat.messages if not _is_empty_answer(message)]
    return chat._replace(messages=kept)


def has_user_after_result(chat: TemplateInput) -> bool:
    return any(
        before["role"] == "tool" and message["role"] == "user"
        for before, message in pairwise(chat.messages)
    )


def user_in_result(chat: TemplateInput) -> TemplateInput:
    messages: list[Message] = []
    for message in chat.messages:
        if message["role"] == "user" and messages and messages[-1]["role"] == "tool":
            messages[-1] = joined(messages[-1], message)
        else:
            messages.append(message)
    return chat._replace(messages=messages)


def has_neighbors(role: str) -> Callable[[TemplateInput], bool]:
    def occurs(chat: TemplateInput) -> bool:
        was_plain = False
        for message in chat.messages:
            is_plain = message["role"] == role and not message.get("tool_calls")
            if is_plain and was_plain:
                return True
            was_plain = is_plain
        return False

    return occurs


def users_joined(chat: TemplateInput) -> TemplateInput:
    return _neighbors_joined(chat, "user")


def assistants_joined(chat: TemplateInput) -> TemplateInput:
    return _neighbors_joined(chat, "assistant")


def _neighbors_joined(chat: TemplateInput, role: str) -> TemplateInput:
    messages: list[Message] = []
    for message in chat.messages:
        if messages and _are_plain(role, messages[-1], message):
            messages[-1] = joined(messages[-1], message)
        else:
            messages.append(message)
    return chat._replace(messages=messages)


def _are_plain(role: str, *messages: Message) -> bool:
    return all(message["role"] == role and not message.get("tool_calls") for message in messages)


def _first_turn(chat: TemplateInput) -> int:
    """Return the index of the first message that is not a system's."""
    turns = (i for i, message in enumerate(chat.messages) if message["role"] != "system")
    return next(turns, len(chat.messages))


def assistant_begins(chat: TemplateInput) -> bool:
    first = chat.messages[_first_turn(chat) :][:1]
    return bool(first) and first[0]["role"] == "assistant"


def assistant_begins_without_user(chat: TemplateInput) -> bool:
    return assistant_begins(chat) and all(message["role"] != "user" for message in chat.messages)


def user_begins(chat: TemplateInput) -> TemplateInput:
    messages = list(chat.messages)
    messages.insert(_first_turn(chat), {"role": "user", "content": START})
    return chat._replace(messages=messages)
