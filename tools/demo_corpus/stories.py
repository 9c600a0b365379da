"""Short stories: a cast put through a plot."""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .cast import Cast, slots
from .grammar import Slots, blocks, render

_HERE = Path(__file__).parent
SHORT = 0
MEDIUM = 1
LONG = 2


@dataclass(frozen=True)
class Beat:
    wordings: tuple[str, ...]
    optional: bool


@dataclass(frozen=True)
class Plot:
    title: str
    need: frozenset[str]
    theme: str
    asks: tuple[str, ...]
    moral: str
    beats: tuple[Beat, ...]


@dataclass(frozen=True)
class Story:
    cast: Cast
    plot: Plot
    moral: str
    text: str


def _plot(title: str, entries: list[tuple[str, str]]) -> Plot:
    beats: list[Beat] = []
    for key, text in entries:
        if key in "no":
            beats.append(Beat((text,), key == "o"))
        elif key == "v":
            last = beats[-1]
            beats[-1] = Beat((*last.wordings, text), last.optional)
    one = dict(entries)
    asks = tuple(text for key, text in entries if key == "ask")
    return Plot(
        title, frozenset(one["need"].split()), one["theme"], asks, one["moral"], tuple(beats)
    )


@cache
def plots() -> tuple[Plot, ...]:
    sources = [(_HERE / name).read_text() for name in ("plots_a.txt", "plots_b.txt")]
    return tuple(_plot(*block) for source in sources for block in blocks(source))


@cache
def _frame() -> dict[str, list[str]]:
    source = (_HERE / "openings.txt").read_text()
    return {title: [text for _, text in entries] for title, entries in blocks(source)}


def _ending(rng: random.Random, length: int) -> list[str]:
    frame = _frame()
    parts = []
    if length == LONG or rng.random() < 0.65:
        parts.append(rng.choice(frame["lesson"]))
    if not parts or rng.random() < (0.2 if length == SHORT else 0.45):
        parts.append(rng.choice(frame["close"]))
    return parts


def _extras(cast: Cast, plot: Plot) -> list[str]:
    """Return sentences for what the request names but the plot does not use."""
    parts = []
    if "thing" in cast.named and "thing" not in plot.need:
        parts.append(
            "{<He> never went anywhere without <athing>|<His> dearest possession was <athing>"
            "|By the door <he> kept <athing>, and <he> was very fond of it"
            "|With <him> <he> carried <athing>, as always}."
        )
    if "friend" in cast.named and "friend" not in plot.need:
        parts.append("{<His> best friend was <fintro>|Next door lived <fintro>, a dear friend}.")
    if "sight" in cast.named and "sight" not in plot.need:
        parts.append(
            "{From the window <he> could see <sight>|Every day, <he> looked at <sight> and smiled"
            "|<He> loved <sight> more than anything}."
        )
    return parts


def _sentences(rng: random.Random, cast: Cast, plot: Plot, length: int) -> list[list[str]]:
    frame = _frame()
    first = [rng.choice(frame["open"])]
    if length == LONG or (length == MEDIUM and rng.random() < 0.5):
        first.append(rng.choice(frame["trait"]))
    first += _extras(cast, plot)
    chances = {SHORT: 0.0, MEDIUM: 0.4, LONG: 1.0}
    beats = [
        rng.choice(beat.wordings)
        for beat in plot.beats
        if not beat.optional or rng.random() < chances[length]
    ]
    middle = len(beats) // 2
    return [first + beats[:middle], beats[middle:] + _ending(rng, length)]


def tell(rng: random.Random, cast: Cast, plot: Plot, length: int = MEDIUM) -> Story:
    """Write the story; longer ones have paragraphs."""
    fill: Slots = slots(rng, cast)
    moral = render(rng, plot.moral, fill)
    moral = moral[0].lower() + moral[1:]
    fill["moral"] = moral
    halves = _sentences(rng, cast, plot, length)
    parts = [" ".join(render(rng, s, fill) for s in half) for half in halves]
    return Story(cast, plot, moral, ("\n\n" if length != SHORT else " ").join(parts))
