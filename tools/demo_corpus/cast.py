"""The ingredients of a story: characters, a thing, a place, a sight."""

import random
import re
from dataclasses import dataclass, field, replace

from . import words
from .grammar import Slots, article

_PLACES = words.places()
_PEOPLE_HE, _PEOPLE_SHE = set(words.PEOPLE_HE), set(words.PEOPLE_SHE)


@dataclass(frozen=True)
class Character:
    kind: str
    name: str | None
    she: bool
    adjective: str | None

    @property
    def noun(self) -> str:
        """The noun with its adjective, such as `brave fox`, without article or name."""
        return f"{self.adjective} {self.kind}" if self.adjective else self.kind

    @property
    def intro(self) -> str:
        text = f"{article(self.noun)} {self.noun}"
        return f"{text} named {self.name}" if self.name else text


@dataclass
class Cast:
    hero: Character
    friend: Character
    thing: str
    look: str | None
    preposition: str
    place: str
    sight: str
    skill: str
    # The ingredients that the request mentions; set by requests.py.
    named: set[str] = field(default_factory=set)

    @property
    def a_thing(self) -> str:
        noun = f"{self.look} {self.thing}" if self.look else self.thing
        return f"{article(noun)} {noun}"


def character(rng: random.Random, avoid: str = "", she: bool | None = None) -> Character:
    pools = [words.ANIMALS] * 5 + [words.PEOPLE_ANY] * 4 + [words.PEOPLE_HE, words.PEOPLE_SHE]
    kind = avoid
    while kind == avoid:
        kind = rng.choice(rng.choice(pools))
    if she is None:
        she = rng.random() < 0.5
    she = kind in _PEOPLE_SHE or (she and kind not in _PEOPLE_HE)
    name = rng.choice(words.NAMES_SHE if she else words.NAMES_HE) if rng.random() < 0.75 else None
    mind = rng.choice(words.MINDS) if rng.random() < 0.45 else None
    if mind in words.plain(kind).split():
        mind = None
    return Character(words.plain(kind), name, she, mind)


def cast(rng: random.Random) -> Cast:
    """Draw a cast; hero and friend always differ in kind, and often in pronoun."""
    hero = character(rng)
    she = (not hero.she) if rng.random() < 0.7 else hero.she
    friend = character(rng, hero.kind.replace(" ", "_"), she)
    if friend.name is not None and friend.name == hero.name:
        friend = replace(friend, name=None)
    preposition, place = rng.choice(_PLACES)
    return Cast(
        hero=hero,
        friend=friend,
        thing=words.plain(rng.choice(words.THINGS)),
        look=rng.choice(words.LOOKS) if rng.random() < 0.5 else None,
        preposition=preposition,
        place=place,
        sight="the " + words.plain(rng.choice(words.SIGHTS)),
        skill=rng.choice(words.FLYING if hero.kind in words.BIRDS else words.SKILLS),
    )


def slots(rng: random.Random, cast: Cast) -> Slots:
    """Return a story's template slots; a named character is mostly called by its name."""

    def called(who: Character) -> str:
        if who.name and rng.random() < 0.7:
            return who.name
        return f"the {who.kind}"

    hero = cast.hero
    friend = cast.friend
    return {
        "intro": hero.intro,
        "hero": lambda: called(hero),
        "he": "she" if hero.she else "he",
        "him": "her" if hero.she else "him",
        "his": "her" if hero.she else "his",
        "himself": "herself" if hero.she else "himself",
        "fintro": friend.intro,
        "friend": lambda: called(friend),
        "fhe": "she" if friend.she else "he",
        "fhim": "her" if friend.she else "him",
        "fhis": "her" if friend.she else "his",
        "fkind": friend.kind,
        "thing": cast.thing,
        "athing": cast.a_thing,
        # After its first mention a place is "the bakery", not "a bakery".
        "place": re.sub("^an? ", "the ", cast.place),
        "inplace": f"{cast.preposition} {cast.place}",
        "sight": cast.sight,
        "skill": cast.skill,
    }
