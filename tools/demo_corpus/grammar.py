"""A small template language: `{a|b}` picks one, `<slot>` is filled, `a~ ` becomes a or an."""

import random
import re
from collections.abc import Callable

Slots = dict[str, str | Callable[[], str]]

_SLOT = re.compile(r"<([A-Za-z_]+)>")
_CHOICE = re.compile(r"\{([^{}]*)\}")
_ARTICLE = re.compile(r"\b([Aa])~ (\W?)(\w+)")
# The project's name is lowercase, even at the start of a sentence.
_SENTENCE = re.compile(r"(^|[.!?] |\.\" |\n)(?!moeserve)([a-z])")
# Spelled with a vowel but spoken with a consonant, and vice versa.
_A_WORDS = ("uni", "use", "one", "eu")
_AN_WORDS = ("hour", "honest", "heir")


def article(word: str) -> str:
    low = word.lower()
    if low.startswith(_AN_WORDS):
        return "an"
    return "an" if low[0] in "aeiou" and not low.startswith(_A_WORDS) else "a"


def choose(rng: random.Random, text: str) -> str:
    """Replace every `{a|b|c}`, innermost first, by one of its alternatives."""
    while True:
        text, count = _CHOICE.subn(lambda m: rng.choice(m.group(1).split("|")), text)
        if not count:
            return text


def fill(text: str, slots: Slots) -> str:
    """Replace every `<slot>`; a capitalized slot gives a capitalized value."""

    def value(match: re.Match[str]) -> str:
        key = match.group(1)
        found = slots[key.lower()]
        word = found if isinstance(found, str) else found()
        return word[0].upper() + word[1:] if key[0].isupper() else word

    return _SLOT.sub(value, text)


def finish(text: str) -> str:
    """Fix articles, capitals at the start of sentences, and double spaces."""

    def with_article(match: re.Match[str]) -> str:
        first, quote, word = match.groups()
        right = article(word)
        return (right.capitalize() if first == "A" else right) + " " + quote + word

    text = _ARTICLE.sub(with_article, text)
    text = _SENTENCE.sub(lambda m: m.group(1) + m.group(2).upper(), text)
    return re.sub(r" +", " ", text).strip()


def render(rng: random.Random, text: str, slots: Slots | None = None) -> str:
    return finish(fill(choose(rng, text), slots or {}))


def blocks(source: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Parse a template file into (title, [(key, text)]).

    `@title` starts a block, `key: text` an entry, an indented line continues the entry before it.
    """
    result: list[tuple[str, list[tuple[str, str]]]] = []
    for line in source.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("@"):
            result.append((line[1:].strip(), []))
        elif line.startswith(" "):
            key, text = result[-1][1][-1]
            result[-1][1][-1] = (key, text + " " + line.strip())
        else:
            key, _, text = line.partition(":")
            result[-1][1].append((key.strip(), text.strip()))
    return result
