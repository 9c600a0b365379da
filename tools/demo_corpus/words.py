"""Nouns, adjectives and names for stories, and invented ones to copy."""

import random
from pathlib import Path

from .grammar import blocks

_ENTRIES = dict(blocks((Path(__file__).parent / "words.txt").read_text())[0][1])


def plain(word: str) -> str:
    return word.replace("_", " ")


def words_of(key: str) -> list[str]:
    return _ENTRIES[key].split()


ANIMALS, PEOPLE_ANY = words_of("animals"), words_of("people_any")
PEOPLE_HE, PEOPLE_SHE = words_of("people_he"), words_of("people_she")
MINDS, LOOKS = words_of("minds"), words_of("looks")
THINGS, SIGHTS = words_of("things"), words_of("sights")
BIRDS = frozenset(words_of("birds"))
SKILLS = [plain(word) for word in words_of("skills")]
FLYING = ["fly", "fly", *SKILLS[:3]]
NAMES_HE, NAMES_SHE = words_of("names_he"), words_of("names_she")

_ONSETS, _VOWELS = words_of("onsets"), words_of("vowels")
_CODAS = ["", "", "n", "r", "l", "m", "t", "x", "nd", "rk", "ck", "sh", "ll"]


def places() -> list[tuple[str, str]]:
    """Return (preposition, place) pairs, such as ("by", "the sea")."""
    pairs = [plain(word).split("|") for word in words_of("places")]
    return [(preposition, place) for preposition, place in pairs]


def invented(rng: random.Random) -> str:
    """Return a word that is in no list, so that the model learns to copy from the prompt."""
    count = rng.choice([2, 2, 3])
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)) + rng.choice(
        _CODAS
    )
