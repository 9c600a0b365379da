"""Speculative decoding of five tokens at temperature 1, verified by equality: prints the tables of
docs/speculation.md.

A target and a drafter have six words, and logits that depend on the last word alone. The noise is
that of moeserve's sampler. `speculate` has the whole algorithm.

python examples/speculation_by_hand.py
"""

import math

import numpy as np
import torch

from moeserve.runner.sampling.noise import Gumbel
from moeserve.runner.sampling.rows import row_keys

WORDS = ("the", "fox", "owl", "saw", "hid", ".")
TARGET: dict[str, tuple[float, ...]] = {  # logits of the next word
    "the": (-1.0, 2.5, 2.1, 0.2, 0.1, -2.0),
    "fox": (-0.5, -1.5, -1.0, 2.2, 1.9, 0.6),
    "owl": (-0.7, -1.2, -1.5, 1.8, 2.4, 0.8),
    "saw": (2.9, 0.3, 0.4, -2.0, -1.8, 0.9),
    "hid": (0.5, -0.9, -1.0, -1.4, -2.0, 2.6),
    ".": (2.7, 0.9, 0.8, -1.0, -1.2, -2.0),
}
DRAFTER: dict[str, tuple[float, ...]] = {  # logits of a smaller model
    "the": (-0.5, 2.0, 2.3, 0.5, 0.4, -1.0),
    "fox": (0.0, -1.0, -1.0, 1.6, 1.8, 0.9),
    "owl": (0.0, -1.0, -1.0, 1.9, 1.7, 0.9),
    "saw": (2.2, 0.5, 0.5, -1.0, -1.0, 1.2),
    "hid": (0.9, -0.5, -0.5, -1.0, -1.0, 2.0),
    ".": (2.2, 1.1, 1.0, -0.5, -0.5, -1.0),
}
SEED = 6
FIRST = 10  # position of the first word to choose
LAST = "the"  # the last known word, at position 9
NUM_DRAFTS = 3


def noise(position: int, seed: int = SEED) -> list[float]:
    """Return the noise of each word at a position: a hash of (seed, position, word)."""
    low, high = torch.from_numpy(row_keys(np.array([seed], np.uint64), np.array([position])))
    return Gumbel(len(WORDS), torch.device("cpu"))(low, high)[0, : len(WORDS)].tolist()


def choose(logits: tuple[float, ...], position: int, seed: int = SEED) -> str:
    """Return the word with the largest sum of logit and noise: a draw from softmax(logits)."""
    sums = [x + g for x, g in zip(logits, noise(position, seed), strict=True)]
    return WORDS[sums.index(max(sums))]


def one_by_one(count: int) -> list[str]:
    """Return the next words without drafts."""
    words: list[str] = []
    last = LAST
    for position in range(FIRST, FIRST + count):
        last = choose(TARGET[last], position)
        words.append(last)
    return words


def speculate(count: int) -> tuple[list[str], list[str]]:
    """Return the next words, and the lines of a table with every step."""
    words: list[str] = []
    lines: list[str] = []
    last = LAST
    step = 0
    while len(words) < count:
        step += 1
        start = FIRST + len(words)
        drafts: list[str] = []
        for i in range(min(NUM_DRAFTS, count - len(words) - 1)):  # each draft follows the last one
            behind = drafts[-1] if drafts else last
            drafts.append(choose(DRAFTER[behind], start + i))
            lines.append(line(step, "drafter", behind, DRAFTER, start + i, f"draft {drafts[-1]}"))
        right = True
        # One forward pass of the target computes all of these positions.
        for i, behind in enumerate([last, *drafts]):
            word = choose(TARGET[behind], start + i)
            lines.append(
                line(
                    step,
                    "target",
                    behind,
                    TARGET,
                    start + i,
                    verdict(word, drafts[i : i + 1], right),
                )
            )
            if right:
                words.append(word)
                right = drafts[i : i + 1] == [word]
        last = words[-1]
    return words, lines


def verdict(word: str, draft: list[str], right: bool) -> str:
    """Describe what happens to the target's word after right or wrong drafts."""
    if not right:
        return f"{word}, dropped: after a wrong draft"
    if not draft:
        return f"**{word}**, kept"
    return f"**{word}**, kept: draft {draft[0]} is {'right' if draft[0] == word else 'wrong'}"


def line(
    step: int,
    who: str,
    behind: str,
    model: dict[str, tuple[float, ...]],
    position: int,
    outcome: str,
) -> str:
    """Return a line of the table: logit + noise = sum for each word."""
    cells = [
        f"{x:.1f} {g:+.2f} = {x + g:.2f}"
        for x, g in zip(model[behind], noise(position), strict=True)
    ]
    best = cells[WORDS.index(choose(model[behind], position))]
    shown = [f"**{cell}**" if cell is best else cell for cell in cells]
    return f"| {step} | {who} | {position} | {behind} | {' | '.join(shown)} | {outcome} |"


def agreement(behind: str) -> tuple[float, float, float]:
    """Return the share of right drafts after a word: the lower bound, with common noise, and with
    rejection sampling.
    """
    p, q = (softmax(model[behind]) for model in (TARGET, DRAFTER))
    distance = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    same = sum(
        1 / sum(max(pj / pi, qj / qi) for pj, qj in zip(p, q, strict=True))
        for pi, qi in zip(p, q, strict=True)
    )
    return (1 - distance) / (1 + distance), same, 1 - distance


def softmax(logits: tuple[float, ...]) -> list[float]:
    powers = [math.exp(x) for x in logits]
    return [x / sum(powers) for x in powers]


def main() -> None:
    words, lines = speculate(5)
    print(f"| step | who | position | after | {' | '.join(WORDS)} | outcome |")
    print("|---" * (len(WORDS) + 5) + "|")
    print("\n".join(lines))
    print(f"\nWith drafts: {' '.join(words)}\nOne by one:  {' '.join(one_by_one(5))}")
    assert words == one_by_one(5)
    print(
        "\n| after | at least (1 - TV) / (1 + TV) | common noise | rejection sampling, 1 - TV |\n"
        "|---|---|---|---|"
    )
    for behind in WORDS:
        print(f"| {behind} | " + " | ".join(f"{share:.3f}" for share in agreement(behind)) + " |")


if __name__ == "__main__":
    main()
