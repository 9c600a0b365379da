"""Requests that the demo model must decline politely."""

import random
from functools import cache
from pathlib import Path

from .grammar import Slots, blocks, render
from .words import plain, words_of


@cache
def _templates() -> dict[str, list[str]]:
    source = (Path(__file__).parent / "outside.txt").read_text()
    return {title: [text for _, text in entries] for title, entries in blocks(source)}


def ask_outside(rng: random.Random) -> tuple[str, str]:
    templates = _templates()
    fill: Slots = {
        "country": plain(rng.choice(words_of("countries"))),
        "person": plain(rng.choice(words_of("persons"))),
        "topic": plain(rng.choice(words_of("topics"))),
        "n": str(rng.randrange(1, 1000)),
        "m": str(rng.randrange(1, 100)),
    }
    question = render(rng, rng.choice(templates["ask"]), fill)
    return question, render(rng, rng.choice(templates["answer"]))
