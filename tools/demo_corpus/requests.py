"""Requests for stories, and the cast and plot that fit them."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from . import words
from .cast import Cast, Character, cast, slots
from .grammar import article, blocks, render
from .stories import LONG, MEDIUM, SHORT, Plot, Story, plots, tell

_PROMPTS = {
    title: [text for _, text in entries]
    for title, entries in blocks((Path(__file__).parent / "requests.txt").read_text())
}
_SIZES = {
    SHORT: ["short ", "short ", "very short ", "little ", "brief ", "quick ", "tiny "],
    MEDIUM: ["", "", "", "", "nice ", "good ", "new ", "lovely ", "funny ", "sweet "],
    LONG: ["long ", "longer ", "long ", "detailed "],
}


@dataclass(frozen=True)
class Request:
    prompt: str
    cast: Cast
    plot: Plot
    length: int


def noisy(rng: random.Random, prompt: str) -> str:
    """Drop capitals and punctuation as people do, and add a please at times."""
    if rng.random() < 0.08 and not prompt.lower().startswith("please"):
        prompt = prompt.rstrip(".?!") + rng.choice([", please", " please", ", please."])
    roll = rng.random()
    if roll < 0.3:
        prompt = prompt.rstrip(".?!")
    elif roll < 0.5 and prompt[-1].isalnum():
        prompt += rng.choice([".", ".", "!"])
    if rng.random() < 0.25:
        prompt = prompt.lower()
    elif rng.random() < 0.1:
        prompt = prompt[0].lower() + prompt[1:]
    if rng.random() < 0.03 and len(prompt) > 12:
        at = rng.randrange(4, len(prompt) - 1)
        prompt = prompt[:at] + prompt[at + 1 :]
    return prompt


def mention(rng: random.Random, who: Character) -> tuple[str, Character]:
    """Return words for a character in a request, and a character with only what they fix."""
    kind = who.kind
    if rng.random() < 0.1:
        kind = words.invented(rng)
    who = replace(who, kind=kind)
    roll = rng.random()
    if roll < 0.18:
        name = words.invented(rng).capitalize() if rng.random() < 0.3 else who.name
        name = name or rng.choice(words.NAMES_SHE if who.she else words.NAMES_HE)
        who = replace(who, name=name)
        called = rng.choice(["named", "called"])
        return f"{article(who.noun)} {who.noun} {called} {name}", who
    if roll < 0.26 and who.name:
        return rng.choice([f"{who.name} the {kind}", who.name]), replace(who, adjective=None)
    if roll < 0.55 and who.adjective:
        return f"{article(who.noun)} {who.noun}", who
    if roll < 0.62:
        return kind, replace(who, adjective=None)
    if roll < 0.66:
        return f"the {kind}", replace(who, adjective=None)
    # If the request has only a kind, the story chooses an adjective, and mostly has none.
    adjective = who.adjective if rng.random() < 0.3 else None
    return f"{article(kind)} {kind}", replace(who, adjective=adjective)


def _mention_thing(rng: random.Random, c: Cast) -> str:
    if rng.random() < 0.1:
        c.thing = words.invented(rng)
    roll = rng.random()
    if roll < 0.3 and c.look:
        return c.a_thing
    if rng.random() < 0.7:
        c.look = None
    if roll < 0.4:
        return c.thing
    if roll < 0.5:
        return f"the {c.thing}"
    return f"{article(c.thing)} {c.thing}"


def _fitting(rng: random.Random, named: set[str]) -> Plot:
    """Return a plot that mostly uses what the request names; extra lines may cover the rest."""
    wanted = {need for need in ("thing", "friend", "sight") if need in named}
    fit = [plot for plot in plots() if wanted <= plot.need]
    if fit and rng.random() < 0.93:
        return rng.choice(fit)
    return rng.choice(plots())


_COMBINATIONS: list[tuple[int, tuple[str, ...]]] = [
    (10, ()),
    (26, ("hero",)),
    (22, ("hero", "thing")),
    (7, ("thing",)),
    (10, ("hero", "friend")),
    (5, ("hero", "place")),
    (7, ("hero", "ask")),
    (5, ("theme",)),
    (4, ("hero", "theme")),
    (3, ("sight",)),
    (4, ("hero", "sight")),
    (3, ("hero", "thing", "place")),
    (2, ("place",)),
    (7, ("hero", "friend", "thing")),
    (2, ("hero", "friend", "place")),
]


def _parts(rng: random.Random, c: Cast, plot: Plot) -> list[str]:
    """Return words for each thing that the request names; the cast is changed to fit them."""
    parts: list[str] = []
    if "hero" in c.named:
        said, c.hero = mention(rng, c.hero)
        parts.append(said)
    if "friend" in c.named:
        said, c.friend = mention(rng, c.friend)
        parts.append(said)
    if "thing" in c.named:
        parts.append(_mention_thing(rng, c))
    if "sight" in c.named:
        parts.append(c.sight)
    if "theme" in c.named:
        parts.append(plot.theme)
    return parts


def _joined(rng: random.Random, c: Cast, parts: list[str]) -> str:
    """Join the parts as people do."""
    if c.named == {"hero", "friend"} and rng.random() < 0.3:
        link = rng.choice(["who meets", "who helps", "meeting", "and his friend,", "who visits"])
        return f"{parts[0]} {link} {parts[1]}"
    if c.named == {"hero", "thing"} and rng.random() < 0.25:
        link = rng.choice(
            ["who has", "with", "who wants", "looking for", "who loves", "in search of"]
        )
        return f"{parts[0]} {link} {parts[1]}"
    if len(parts) > 1 and rng.random() < 0.08:
        return rng.choice([" ", ", "]).join(parts)
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)


def _subject(rng: random.Random, c: Cast, plot: Plot) -> str:
    """Return the part of the request after "about"."""
    text = _joined(rng, c, _parts(rng, c, plot))
    if "place" in c.named:
        where = f"{c.preposition} {c.place}"
        if not text:
            return rng.choice([c.place, f"life {where}"])
        text += " and " + c.place if rng.random() < 0.1 else " " + where
    if "ask" in c.named:
        text += " " + render(rng, rng.choice(plot.asks), slots(rng, c)).replace("And ", "and ")
    return text


def request(rng: random.Random) -> Request:
    """Return a request for a story, and the story's ingredients."""
    weights = [weight for weight, _ in _COMBINATIONS]
    c = cast(rng)
    c.named = set(rng.choices(_COMBINATIONS, weights)[0][1])
    plot = _fitting(rng, c.named)
    length = rng.choices([SHORT, MEDIUM, LONG], [3, 6, 1])[0]
    size = rng.choice(_SIZES[length]) if rng.random() < 0.6 else ""
    if not size and length == LONG:
        length = MEDIUM
    if c.named:
        subject = _subject(rng, c, plot)
        if "ask" in c.named:
            subject = lower_first(subject, c)
        prompt = render(rng, rng.choice(_PROMPTS["about"]), {"x": subject, "size": size})
    else:
        prompt = render(rng, rng.choice(_PROMPTS["any"]), {"size": size})
    return Request(noisy(rng, prompt), c, plot, length)


def lower_first(text: str, c: Cast) -> str:
    """Undo the capital that rendering gave to `Who`, wherever it is now."""
    return (
        text.replace(" Who ", " who ").replace(" Whose ", " whose ").replace(" Who's ", " who's ")
    )


def answer(rng: random.Random, wanted: Request) -> Story:
    return tell(rng, wanted.cast, wanted.plot, wanted.length)
