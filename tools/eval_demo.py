"""Measure the demo model within its domain.

    python tools/eval_demo.py

The requests come from the templates of the training text with another seed. So most questions about
moeserve also occur in training, word for word; most story requests do not. The cities of the
weather questions do not occur in the training text.
"""

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.demo_corpus.chats import outside_exchange
from tools.demo_corpus.facts import Fact, ask, facts
from tools.demo_corpus.requests import Request, noisy, request
from tools.demo_corpus.tools import (
    Tool,
    ask_tool,
    call_text,
    declined,
    kinds,
    ordinary,
    outcome,
    tool,
    tool_choice,
)

ASSETS = Path(__file__).parents[1] / "moeserve" / "assets" / "demo"
Answer = tuple[str, bool]
Chat = dict[str, Any]  # messages and tools
CITIES = [
    "Reykjavik",
    "Bologna",
    "Dakota Springs",
    "Nantes",
    "Kingston",
    "Montevideo",
    "Palermo",
    "Eindhoven",
    "Groningen",
    "Linz",
    "Innsbruck",
    "Stavanger",
    "Narvik",
    "Vaasa",
    "Tartu",
    "Kaunas",
    "Lublin",
    "Ostrava",
    "Szeged",
    "Varna",
    "Plovdiv",
    "Patras",
    "Haifa",
    "Aleppo",
    "Shiraz",
    "Multan",
    "Surat",
    "Nagpur",
    "Mandalay",
    "Hue",
    "Cebu",
    "Medan",
    "Darwin Bay",
    "Dunedin",
    "Fresno",
    "Omaha",
    "Boise",
    "Tucson",
    "Regina",
    "Puebla",
    "Managua",
    "Arequipa",
]


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[str | Chat], temperature: float
) -> list[Answer]:
    """Return the model's answer to each prompt or chat, and whether it ended by itself."""
    found: list[Answer] = []
    how = (
        {"do_sample": True, "temperature": temperature, "top_p": 0.9}
        if temperature
        else {"do_sample": False}
    )
    for at in range(0, len(prompts), 20):
        asked = [p if isinstance(p, dict) else chat(p) for p in prompts[at : at + 20]]
        texts = [
            tokenizer.apply_chat_template(**a, add_generation_prompt=True, tokenize=False)
            for a in asked
        ]
        inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            out = model.generate(**inputs, **how, max_new_tokens=300, top_k=0)
        for row in out[:, inputs["input_ids"].shape[1] :]:
            ended = tokenizer.eos_token_id in row.tolist()
            found.append((tokenizer.decode(row, skip_special_tokens=True), ended))
    return found


def chat(question: str, tools: list[Tool] | None = None) -> Chat:
    """Return a request with one question, as `apply_chat_template` takes it."""
    listed = [{"type": "function", "function": tool.function} for tool in tools or []]
    return {"conversation": [{"role": "user", "content": question}], "tools": listed or None}


def listed(rng: random.Random) -> list[Tool]:
    """Return the tools of a chat, at least one."""
    return tool_choice(rng) or listed(rng)


def weather_call(rng: random.Random, others: int) -> tuple[Chat, str]:
    """Return a question about the weather in one of CITIES, and the call that it needs.

    The chat has up to `others` other tools.
    """
    used = tool(rng, kinds()[0])
    tools = [used, *[tool for tool in listed(rng) if tool.kind.title != "weather"][:others]]
    rng.shuffle(tools)
    question, arguments, values = ask_tool(rng, used)
    city = rng.choice(CITIES)
    city = city.lower() if values["city"].islower() else city
    arguments[used.params["city"][0]] = city
    return chat(question.replace(values["city"], city), tools), call_text(
        used.function["name"], arguments
    )


def any_call(rng: random.Random) -> tuple[Chat, str]:
    """Return a question that needs one of its chat's tools, and the call."""
    tools = listed(rng)
    used = rng.choice(tools)
    question, arguments, _ = ask_tool(rng, used)
    return chat(question, tools), call_text(used.function["name"], arguments)


def no_call(rng: random.Random, n: int) -> Chat:
    """Return a question that needs none of its chat's tools.

    Every second one asks for something that cannot be had.
    """
    tools = listed(rng)
    return chat((declined(rng, tools) if n % 2 else ordinary(rng))[0], tools)


def result(rng: random.Random) -> tuple[Chat, str]:
    """Return a chat up to a tool's weather report, and the part that the answer must repeat."""
    used = tool(rng, kinds()[0])
    question, arguments, values = ask_tool(rng, used)
    given, said = outcome(rng, used, values)
    asked = chat(question, [used])
    call = {"type": "function", "function": {"name": used.function["name"], "arguments": arguments}}
    asked["conversation"] += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": given},
    ]
    return asked, said


def uses(wanted: Request, text: str) -> bool:
    """Return whether a story has every character and thing of the request; places may differ."""
    cast = wanted.cast
    prompt = wanted.prompt.lower()
    low = text.lower()
    asked = [cast.hero.kind, cast.hero.name, cast.friend.kind, cast.friend.name, cast.thing]
    return all(word.lower() in low for word in asked if word and f" {word.lower()}" in f" {prompt}")


def same(pairs: list[tuple[Chat, str]], n: int, text: str) -> bool:
    """Return whether an answer is exactly the expected one."""
    return text == pairs[n][1]


def right(rng: random.Random, fact: Fact, text: str) -> bool:
    """Return whether an answer is exactly one that the corpus gives about the fact."""
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
    with_tools = {
        "weather calls, one tool": [weather_call(rng, 0) for _ in range(args.count)],
        "weather calls, up to three tools": [weather_call(rng, 2) for _ in range(args.count)],
        "calls": [any_call(rng) for _ in range(args.count)],
        "results of tools": [result(rng) for _ in range(args.count)],
    }
    others = [no_call(rng, n) for n in range(args.count)]
    for temperature in (0.0, 0.7):
        for title, pairs in with_tools.items():
            said = answers(model, tokenizer, [asked for asked, _ in pairs], temperature)
            report(f"{title}, temperature {temperature}", said, partial(same, pairs))
        said = answers(model, tokenizer, others, temperature)
        report(
            f"no call needed, temperature {temperature}",
            said,
            lambda _, text: "<tool_call>" not in text,
        )
        said = answers(model, tokenizer, [r.prompt for r in stories], temperature)
        report(f"stories, temperature {temperature}", said, lambda n, text: uses(stories[n], text))
        said = answers(model, tokenizer, questions, temperature)
        report(
            f"facts, temperature {temperature}", said, lambda n, text: right(rng, topics[n], text)
        )
        said = answers(model, tokenizer, strange, temperature)
        report(
            f"outside, temperature {temperature}",
            said,
            lambda _, text: "moeserve" in text and "stor" in text,
        )


if __name__ == "__main__":
    main()
