"""The corpus: an endless, seeded stream of documents."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from .cast import cast
from .chats import conversation, fact_exchange, outside_exchange, small_talk, story_exchange
from .facts import ask, facts
from .stories import plots, tell
from .tools import tool_chat

_SYSTEM = """You are a helpful assistant.|You are moeserve's demo model.
|You are a friendly storyteller.|Be brief.
|You are a helpful assistant that tells stories and answers questions about moeserve.
|Answer in simple English.|You are demo, a small model served by moeserve.|You are kind and polite.
|You tell short stories for children.|Answer questions about moeserve.|Be nice.
|You are an assistant.|You are a chatbot.|Please answer truthfully.
|Keep your answers short.""".replace("\n", "").split("|")


@dataclass(frozen=True)
class Turn:
    """One message. The role `text` is plain text outside of a chat."""

    role: str
    text: str


@dataclass(frozen=True)
class Document:
    kind: str
    turns: tuple[Turn, ...]


_KINDS = {
    "story": 34,
    "fact": 30,
    "small_talk": 5,
    "outside": 8,
    "chat": 15,
    "text": 7,
    "text_fact": 1,
    "tool": 90,
}


def _chat(rng: random.Random, kind: str, exchanges: list[tuple[str, str]]) -> Document:
    turns = [Turn("system", rng.choice(_SYSTEM))] if rng.random() < 0.25 else []
    for question, reply in exchanges:
        turns += [Turn("user", question), Turn("assistant", reply)]
    return Document(kind, tuple(turns))


def _plain(rng: random.Random, kind: str) -> Document:
    if kind == "text":
        text = tell(rng, cast(rng), rng.choice(plots()), rng.choice([0, 1, 1, 2])).text
    else:
        question, reply = ask(rng, rng.choice(facts()))
        text = f"Question: {question}\nAnswer: {reply}"
    return Document(kind, (Turn("text", text),))


def document(rng: random.Random) -> Document:
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    if kind == "tool":
        system = rng.choice(_SYSTEM) if rng.random() < 0.2 else ""
        return Document(kind, tuple(Turn(*turn) for turn in tool_chat(rng, system)))
    if kind.startswith("text"):
        return _plain(rng, kind)
    if kind == "story":
        return _chat(rng, kind, [story_exchange(rng)[0]])
    if kind == "chat":
        turns = rng.choices([2, 3, 4, 6], [6, 5, 2, 1])[0]
        return _chat(rng, kind, conversation(rng, turns))
    single = {"fact": fact_exchange, "small_talk": small_talk, "outside": outside_exchange}[kind]
    return _chat(rng, kind, [single(rng)])


def documents(seed: int, count: int) -> Iterator[Document]:
    """Yield `count` documents, the same ones for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield document(rng)
