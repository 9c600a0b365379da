"""Helpers to write Lark, the grammar language of llguidance: literals, and named rules."""

import re
from collections.abc import Mapping

from moeserve.sampling import GrammarSpec
from moeserve.text.grammar_limits import answer_spec

SLOT = re.compile(r"\{(\w+)\}")
TEXT = r"TEXT: /(.|\n)*/"


def exactly(text: str) -> str:
    """Return a regex that matches exactly one text, with all special characters escaped."""
    return "".join(
        char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text
    )


def special_in(text: str, special: Mapping[str, int]) -> str:
    """Return the first special token in a text, "" if there is none."""
    match = _pattern(special).search(text)
    return match[0] if match else ""


def literal(text: str, special: Mapping[str, int]) -> str:
    """Return the Lark of a text, in which names of special tokens stand for these tokens."""
    parts = enumerate(_pattern(special).split(text))  # text, name, text, name, ..., text
    return " ".join(
        f"<[{special[part]}]>" if i % 2 else f"/{exactly(part)}/" for i, part in parts if part
    )


def _pattern(special: Mapping[str, int]) -> re.Pattern[str]:
    names = sorted(special, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, names))})" if names else "((?!))")


class Rules:
    """The rules of one grammar."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """special: the tokenizer's special tokens."""
        self.special = special
        self._lines = [TEXT]
        self._name_of_body: dict[str, str] = {}  # body of a rule -> its name

    def literal(self, text: str) -> str:
        """Return the Lark of a format's text; names of special tokens stand for the tokens."""
        return literal(text, self.special)

    def plain_literal(self, text: str) -> str:
        """Return the Lark of a request's text, which never stands for special tokens."""
        return f"/{exactly(text)}/" if text else '""'

    def fill(self, write: str, **slots: str) -> str:
        """Return the Lark of a format's text with {slots}. slots: the Lark of each slot."""
        parts = SLOT.split(write)  # text, name of a slot, text, ..., text
        slots["index"] = "/[0-9]+/"
        return " ".join(
            slots[part] if i % 2 else self.literal(part) for i, part in enumerate(parts) if part
        )

    def text_until(self, mark: str) -> str:
        """Return the Lark of any text followed by a mark."""
        if special := special_in(mark, self.special):
            before = mark.partition(special)[0]
            if not before.strip():  # ordinary text cannot contain a special token
                return f"TEXT {self.literal(mark[len(before) :])}"
        return self.add_rule(f"TEXT {self.literal(mark)}", lazy=True)

    def add_rule(self, body: str, *, lazy: bool = False) -> str:
        """Return the name of a rule with this body. lazy: it ends as early as possible."""
        key = f"lazy {body}" if lazy else body
        if key not in self._name_of_body:
            number = len(self._lines)
            name = f"until_{number}" if lazy else f"r_{number}"
            self._name_of_body[key] = name
            self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return self._name_of_body[key]

    def add_named(self, name: str, body: str) -> None:
        """Add a rule with the caller's name."""
        self._lines.append(f"{name}: {body}")

    def reserve_name(self) -> str:
        """Return a name for a recursive rule, to be added with `add_named`."""
        self._lines.append("")  # so that the next name has another number
        return f"r_{len(self._lines) - 1}"

    def grammar_spec(self, start: str) -> GrammarSpec:
        """Return the grammar. Raise GrammarFault if it is too long."""
        return answer_spec("\n".join([f"start: {start}", *filter(None, self._lines)]))
