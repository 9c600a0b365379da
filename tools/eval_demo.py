"""Measure the demo model within its domain: `python tools/eval_demo.py`.

The requests come from the templates of the training text with another seed. Most questions about moeserve
therefore also occur in training, word for word; most story requests do not.
"""

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.demo_corpus.chats import outside_exchange
from tools.demo_corpus.facts import Fact, ask, facts
from tools.demo_corpus.requests import Request, noisy, request

ASSETS = Path(__file__).parents[1] / "moeserve" / "assets" / "demo"
Answer = tuple[str, bool]


def answers(model: Any, tokenizer: Any, prompts: list[str], temperature: float) -> list[Answer]:
    """What the model says to each prompt, and whether it ended by itself."""
    found: list[Answer] = []
    how = {"do_sample": True, "temperature": temperature, "top_p": 0.9} if temperature else {"do_sample": False}
    for at in range(0, len(prompts), 20):
        chats = [[{"role": "user", "content": p}] for p in prompts[at : at + 20]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            out = model.generate(**inputs, **how, max_new_tokens=300, top_k=0)
        for row in out[:, inputs["input_ids"].shape[1] :]:
            ended = tokenizer.eos_token_id in row.tolist()
            found.append((tokenizer.decode(row, skip_special_tokens=True), ended))
    return found


def uses(wanted: Request, text: str) -> bool:
    """Whether a story holds every character and thing that the request names; places are not checked."""
    cast, prompt, low = wanted.cast, wanted.prompt.lower(), text.lower()
    asked = [cast.hero.kind, cast.hero.name, cast.friend.kind, cast.friend.name, cast.thing]
    return all(word.lower() in low for word in asked if word and f" {word.lower()}" in f" {prompt}")


def right(rng: random.Random, fact: Fact, text: str) -> bool:
    """Whether an answer is, to the letter, one that the corpus gives about the fact."""
    return any(ask(rng, fact)[1] == text for _ in range(400))


def report(title: str, said: list[Answer], good: Callable[[int, str], bool]) -> None:
    count = sum(good(n, text) for n, (text, _) in enumerate(said))
    ended = sum(end for _, end in said)
    print(f"{title}: good {count}/{len(said)}, ended {ended}/{len(said)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ASSETS)
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    rng = random.Random(987_654)
    stories = [request(rng) for _ in range(args.count)]
    topics = [rng.choice(facts()) for _ in range(args.count)]
    questions = [noisy(rng, ask(rng, fact)[0]) for fact in topics]
    strange = [outside_exchange(rng)[0] for _ in range(args.count)]
    for temperature in (0.0, 0.7):
        said = answers(model, tokenizer, [r.prompt for r in stories], temperature)
        report(f"stories, temperature {temperature}", said, lambda n, text: uses(stories[n], text))
        said = answers(model, tokenizer, questions, temperature)
        report(f"facts, temperature {temperature}", said, lambda n, text: right(rng, topics[n], text))
        said = answers(model, tokenizer, strange, temperature)
        report(f"outside, temperature {temperature}", said, lambda _, text: "moeserve" in text and "stor" in text)


if __name__ == "__main__":
    main()
