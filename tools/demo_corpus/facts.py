"""Questions and answers about moeserve, the demo model, and small talk."""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .grammar import blocks, render

_HERE = Path(__file__).parent
_WHAT = """What is <x>?;What's <x>?;What is <x> in moeserve?;what is <x>;Explain <x>;Explain <x>.;
Can you explain <x>?;Could you explain <x> to me?;Please explain <x>.;Tell me about <x>;
Tell me about <x>.;What does moeserve mean by <x>?;Define <x>;<x>?;<x>;I do not understand <x>.;
What do you know about <x>?;
What exactly is <x>?;Describe <x>.;Explain <x> in simple words;Explain <x> to a beginner.;
What are <x>?;Can you tell me what <x> is?;I want to learn about <x>;How does <x> work?;
How would you explain <x>?;Help me understand <x>;Give me a short definition of <x>.;
What is meant by <x>?;Do you know what <x> is?;Tell me more about <x>""".replace("\n", "").split(
    ";"
)
_WHY = """Why does moeserve use <x>?;Why do we need <x>?;What is <x> good for?;Why <x>?;
Why is <x> {useful|important}?;What is the {point|purpose|benefit} of <x>?;Why would I want <x>?;
What are the advantages of <x>?;Why does <x> matter?""".replace("\n", "").split(";")
_PLURAL = "What are <x>?"


@dataclass(frozen=True)
class Fact:
    title: str
    names: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    whys: tuple[str, ...]


def _fact(title: str, entries: list[tuple[str, str]]) -> Fact:
    def of(key: str) -> tuple[str, ...]:
        return tuple(text for k, text in entries if k == key)

    names = tuple(n.strip() for text in of("names") for n in text.split(";"))
    return Fact(title, names, of("q"), of("a"), of("w"))


@cache
def facts() -> tuple[Fact, ...]:
    sources = [(_HERE / name).read_text() for name in ("facts_a.txt", "facts_b.txt")]
    return tuple(_fact(*block) for source in sources for block in blocks(source))


def _unescape(text: str) -> str:
    """Insert newlines and literal braces, which templates cannot express."""
    return text.replace("\\n", "\n").replace("\\l", "{").replace("\\r", "}")


def _about(rng: random.Random, name: str, forms: list[str]) -> str:
    form = rng.choice(forms)
    if form == _PLURAL and not name.endswith("s"):
        form = _WHAT[0]
    return render(rng, form, {"x": name})


def _answer(rng: random.Random, fact: Fact, question: str) -> str:
    """Return an answer; only yes-or-no questions get a yes."""
    closed = question.lower().startswith(("is ", "are ", "do ", "does ", "can ", "will "))
    fit = [a for a in fact.answers if not a.startswith("Yes")] if not closed else fact.answers
    return rng.choice(fit or fact.answers)


def ask(rng: random.Random, fact: Fact) -> tuple[str, str]:
    """Return a question about the fact, and an answer."""
    roll = rng.random()
    if fact.names and fact.whys and roll < 0.2:
        question = _about(rng, rng.choice(fact.names), _WHY)
        answer = rng.choice(fact.whys)
    elif fact.names and (roll < 0.75 or not fact.questions):
        question = _about(rng, rng.choice(fact.names), _WHAT)
        answer = _answer(rng, fact, "what")
    else:
        question = render(rng, rng.choice(fact.questions))
        answer = _answer(rng, fact, question)
    return question, _unescape(render(rng, answer))


def fact_named(title: str) -> Fact:
    return next(fact for fact in facts() if fact.title == title)
