"""Random requests for benchmarks.same_tokens: all kinds of prompts, parameters and grammars."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moeserve.sampling import SamplingParams, StructuredOutputsParams
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.tokenizer import Tokenizer

MAX_TOKENS = 64
MAX_PROMPT = 240
ANIMALS = ["fox", "cat", "dog", "bear", "bird", "mouse", "frog", "rabbit", "owl", "duck"]
NAMES = ["Lily", "Tom", "Ben", "Mia", "Sam", "Anna", "Max", "Sue", "Tim", "Lucy"]
THINGS = ["lantern", "ball", "box", "tree", "hat", "boat", "apple", "kite", "drum", "stone"]
STORIES = (
    "Once upon a time, there was a {animal} named {name}. {name} had a {thing}.",
    "One day {name} and the {animal} went to the park to find a {thing}.",
    "{name} was sad because the {thing} was lost. The {animal} said,",
    "The little {animal} liked to play with a big {thing} every day.",
)
QUESTIONS = (
    "Where is the {thing}?",
    "Tell me a story about {name} and a {animal}.",
    "Why did the {animal} cry?",
)
CODE = (
    "def f{i}(x):\n    return x + {i}\n",
    "x{i} = f{i}(x{i}) + 1\n",
    '{{"id": {i}, "name": "{name}"}},\n',
)
STOPS = (".", "the", "e", " was", "\n", "!", " and ", "you", "said", "zz")
BAD = ("the", " was", " a", "and", "said", ".", "He", " little")


@dataclass(frozen=True)
class Request:
    """One request and what its reader does."""

    kind: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    abort_after: int | None = None  # disconnect after so many tokens of all its sequences


class RandomRequests:
    """Makes request number i of a seed, the same in every process."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int, seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.vocab_size = vocab_size
        self.seed = seed
        self.kinds: dict[str, Callable[[random.Random], list[int]]] = {
            "story": lambda rng: tokenizer.encode(self.story(rng)),
            "question": lambda rng: self.chat([rng.choice(QUESTIONS)], rng),
            "code": self.code,
            "random": lambda rng: [
                rng.randrange(vocab_size) for _ in range(rng.choice((1, 5, 30, 120)))
            ],
            "shared": lambda rng: self.stems[rng.randrange(4)] + self.random_tail(rng),
            "turns": lambda rng: self.chat(
                [self.story(rng) for _ in range(rng.choice((3, 5)))], rng
            ),
        }
        stem = random.Random(f"{seed} stems")
        self.stems = [
            tokenizer.encode(" ".join(self.story(stem) for _ in range(5)))[:100] for _ in range(4)
        ]

    def request(self, i: int) -> Request:
        rng = random.Random(f"{self.seed} {i}")
        kind = rng.choice(list(self.kinds))
        prompt = self.kinds[kind](rng)[:MAX_PROMPT] or [self.vocab_size // 2]
        abort_after = rng.randint(1, 20) if rng.random() < 0.05 else None
        params = SamplingParams(**self.params(rng), seed=rng.randrange(2**40))
        return Request(kind, prompt, params, rng.choice((0, 0, 0, -1, 1)), abort_after)

    # ---- prompts

    def story(self, rng: random.Random) -> str:
        return filled(rng, rng.choice(STORIES))

    def code(self, rng: random.Random) -> list[int]:
        line = rng.choice(CODE)
        most = rng.choice((2, 3, 30))
        return self.tokenizer.encode(
            "".join(filled(rng, line, i % most) for i in range(rng.randint(4, 16)))
        )

    def random_tail(self, rng: random.Random) -> list[int]:
        return [rng.randrange(self.vocab_size) for _ in range(rng.randint(1, 12))]

    def chat(self, contents: list[str], rng: random.Random) -> list[int]:
        contents = [filled(rng, content) for content in contents]
        if self.template is None:
            return self.tokenizer.encode("\n".join(contents))
        roles = ("user", "assistant")
        messages = [
            {"role": roles[i % 2], "content": content} for i, content in enumerate(contents)
        ]
        return self.template.encode(self.tokenizer, messages, add_generation_prompt=True)

    # ---- parameters

    def params(self, rng: random.Random) -> dict[str, Any]:
        """Return random parameters.

        Most are at their default in any one request, so that single ones, pairs and triples occur.
        """
        max_tokens = rng.randint(1, MAX_TOKENS)
        ids = [rng.randrange(self.vocab_size) for _ in range(60)]
        choices: dict[str, tuple[float, Callable[[], Any]]] = {
            "temperature": (1.0, lambda: 0.0 if rng.random() < 0.3 else rng.uniform(0, 1.5)),
            "top_k": (0.3, lambda: rng.randint(1, 100)),
            "top_p": (0.3, lambda: rng.uniform(0.3, 1)),
            "min_p": (0.15, lambda: rng.uniform(0, 0.3)),
            "presence_penalty": (0.1, lambda: rng.uniform(-1, 1)),
            "frequency_penalty": (0.1, lambda: rng.uniform(-1, 1)),
            "repetition_penalty": (0.1, lambda: rng.uniform(0.7, 1.6)),
            "min_tokens": (0.15, lambda: rng.randint(0, max_tokens)),
            "logit_bias": (
                0.1,
                lambda: {token: rng.uniform(-5, 5) for token in ids[: rng.randint(1, 8)]},
            ),
            "bad_words": (0.1, lambda: rng.sample(BAD, rng.randint(1, 3))),
            "stop": (0.15, lambda: rng.sample(STOPS, rng.randint(1, 2))),
            "stop_token_ids": (0.1, lambda: ids[:20]),
            "ignore_eos": (0.4, lambda: True),
            "include_stop_str_in_output": (0.1, lambda: True),
            "logprobs": (0.35, lambda: rng.randint(0, 5)),
            "prompt_logprobs": (0.03, lambda: rng.randint(0, 2)),
            "n": (0.1, lambda: rng.randint(2, 3)),
            "speculate": (0.05, lambda: False),
        }
        params = {name: value() for name, (share, value) in choices.items() if rng.random() < share}
        if rng.random() < 0.15:
            params["structured_outputs"] = StructuredOutputsParams(**grammar(rng))
        elif rng.random() < 0.05:
            params["allowed_token_ids"] = ids
        return params | {"max_tokens": max_tokens}


def filled(rng: random.Random, text: str, i: int = 0) -> str:
    return text.format(
        animal=rng.choice(ANIMALS), name=rng.choice(NAMES), thing=rng.choice(THINGS), i=i
    )


def grammar(rng: random.Random) -> dict[str, Any]:
    """Return one of a hundred constraints."""
    kind = rng.choice(("regex", "choice", "json"))
    n = rng.randint(3, 30)
    if kind == "regex":
        return {
            "regex": rng.choice(
                (r"([a-z]+ ){%d}", r"[0-9]{1,%d}(\.[0-9]+)?", r"(The|A) [a-z ]{2,%d}\.")
            )
            % n
        }
    if kind == "choice":
        return {"choice": [f"{name} has a {thing}" for name in NAMES for thing in THINGS][: 3 * n]}
    text = {"type": "string", "maxLength": n}
    properties = {
        "name": text,
        "age": {"type": "integer"},
        "kind": {"enum": ANIMALS},
        "tags": {"items": text},
    }
    names = rng.sample(list(properties), 3)
    properties["tags"] = {"type": "array", "items": text, "maxItems": 3}
    schema = {
        "type": "object",
        "properties": {name: properties[name] for name in names},
        "required": names[:2],
        "additionalProperties": False,
    }
    return {"json": schema, "disable_any_whitespace": rng.random() < 0.7}
