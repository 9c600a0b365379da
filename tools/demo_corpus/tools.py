"""Chats with tools: the system turn lists them, and the assistant calls one and reports its result.

The texts are those that the chat template (`tools/demo_export.py`) makes of such requests.
"""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from . import words
from .chats import fact_exchange, small_talk, story_exchange
from .grammar import blocks, choose, fill, finish, render
from .outside import ask_outside
from .requests import noisy

# Stands for a slot while noise is added to a question, because values must stay exact.
_MARK = 0xE000
_NUMBERS = ("a", "b", "number", "degrees")
_SUMS = {"add", "multiply", "calculate"}
_NEAR_TOOLS = re.compile(
    r"weather|rain|time|day|date|\d|Translate|say|email|letter|search|capital|live|[Pp]lay|far|cost|buy|trip|song|Who|born"
)
Exchange = list[tuple[str, str]]


@dataclass(frozen=True)
class Kind:
    """A kind of tool; `args` has, for each of its forms, the slots and their parameters' names."""

    title: str
    texts: Mapping[str, tuple[str, ...]]
    args: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...]


@dataclass(frozen=True)
class Tool:
    """A tool of a chat; `params` has the name and JSON type of each slot's parameter."""

    kind: Kind
    function: dict[str, Any]
    params: dict[str, tuple[str, str]]


@cache
def _sections() -> dict[str, list[tuple[str, str]]]:
    return dict(blocks((Path(__file__).parent / "tools.txt").read_text()))


@cache
def words_of(key: str) -> list[str]:
    """Return the words of a list in the file."""
    return [words.plain(word) for word in dict(_sections()["words"])[key].split()]


@cache
def kinds() -> tuple[Kind, ...]:
    """Return the kinds of tools in the file."""
    return tuple(
        _kind(title, entries) for title, entries in _sections().items() if title != "words"
    )


def _kind(title: str, entries: list[tuple[str, str]]) -> Kind:
    texts = {key: tuple(text for k, text in entries if k == key) for key, _ in entries}
    forms = [[part.split("=") for part in text.split("; ")] for text in texts["args"]]
    return Kind(
        title,
        texts,
        tuple(tuple((slot, tuple(names.split("|"))) for slot, names in form) for form in forms),
    )


def _made_up(rng: random.Random) -> Kind:
    """Return an invented kind of tool, so that the model must read the names."""
    noun = words.invented(rng) if rng.random() < 0.5 else words.plain(rng.choice(words.THINGS))
    slot = rng.choice(["city", "person", "thing"])
    name = rng.choice(
        ["name", "key", "id", "target", "item", "owner", "place", words.invented(rng)]
    )
    texts = {
        "names": (noun.replace(" ", "_"),),
        "about": (f"{{Returns|Gets|Finds}} the {noun} of {{a|the}} {name}{{.|}}",),
        "q": (
            f"{{What is|Tell me|Get|Find|Show me|Look up}} the {noun} {{of|for}} <{slot}>",
            f"{{Which {noun} has|What {noun} is there for}} <{slot}>?",
        ),
        "f": (f"{{And|What about}} <{slot}>?",),
        "gives": (
            f"{noun.replace(' ', '_')}|result|value=number",
            f"{noun.replace(' ', '_')}|result=word",
        ),
        "plain": ("<number>", "<word>"),
        "say": (f"The {noun} of <{slot}> is <number>.", f"The {noun} of <{slot}> is <word>."),
    }
    return Kind(noun, texts, (((slot, (name,)),),))


def _name(rng: random.Random, noun: str) -> str:
    verb = rng.choice(words_of("verbs"))
    roll = rng.random()
    if roll < 0.6:
        return f"{verb}_{noun}"
    if roll < 0.85:
        return noun
    if roll < 0.9:
        return verb + "".join(part.capitalize() for part in noun.split("_"))
    return rng.choice(
        [f"{noun}_{verb}", f"{noun}_tool", f"my_{noun}", f"{noun}_api", f"{verb}-{noun}"]
    )


def tool(rng: random.Random, kind: Kind) -> Tool:
    """Return a tool as clients describe it."""
    noun = rng.choice([name for text in kind.texts["names"] for name in text.split("; ")])
    params: dict[str, tuple[str, str]] = {}
    properties: dict[str, Any] = {}
    described = rng.random() < 0.35
    for slot, names in rng.choice(kind.args):
        name = rng.choice([n for n in names if n not in properties])
        of = rng.choice(["number", "number", "integer"]) if slot in _NUMBERS else "string"
        params[slot] = (name, of)
        properties[name] = {"type": of}
        if described:
            about = (
                f"{{The|A|Name of the}} {name.replace('_', ' ')}{{|.|, e.g. {_value(rng, slot)}}}"
            )
            properties[name]["description"] = render(rng, about)
        if slot == "unit":
            properties[name]["enum"] = ["celsius", "fahrenheit"]
    needed = [name for slot, (name, _) in params.items() if slot != "unit"]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": needed}
    if rng.random() < 0.1:
        del schema["required"]
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    function = {
        "name": _name(rng, noun),
        "description": render(rng, rng.choice(kind.texts["about"])),
    }
    if rng.random() < 0.06:
        del function["description"]
    return Tool(kind, function | {"parameters": schema}, params)


def tool_list(functions: list[dict[str, Any]]) -> str:
    """Return the list of tools for the system turn."""
    return "\n".join(
        ["<tools>", *(json.dumps(f, ensure_ascii=False) for f in functions), "</tools>"]
    )


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return the assistant's call."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def result_text(result: str) -> str:
    """Return a tool's result as a user turn."""
    return f"<tool_response>\n{result}\n</tool_response>"


def _proper(rng: random.Random, known: list[str], share: float) -> str:
    """Return a proper name, from the list or invented."""
    if rng.random() < share:
        return rng.choice(known)
    name = words.invented(rng).capitalize()
    roll = rng.random()
    if roll < 0.1:
        return f"{rng.choice(['New', 'San', 'Port', 'Saint', 'Bad', 'Upper', 'El'])} {name}"
    return name + rng.choice(
        ["", "", "", "", "burg", "ville", "ton", "stad", "ia", "ford", "son", "berg", "ova"]
    )


def _city(rng: random.Random) -> str:
    city = _proper(rng, words_of("cities"), 0.5)
    return (
        f"{city}, {words.plain(rng.choice(words.words_of('countries')))}"
        if rng.random() < 0.04
        else city
    )


def _person(rng: random.Random) -> str:
    person = _proper(rng, words.NAMES_HE + words.NAMES_SHE, 0.45)
    return f"{person} {_proper(rng, words_of('cities'), 0.1)}" if rng.random() < 0.15 else person


def _country(rng: random.Random) -> str:
    return _proper(rng, [words.plain(country) for country in words.words_of("countries")], 0.6)


def _whole(rng: random.Random) -> str:
    return str(rng.randrange(1, rng.choice([10, 100, 1000])))


def _number(rng: random.Random) -> str:
    number = rng.randrange(1, rng.choice([10, 100, 1000, 10000]))
    return str(number) if rng.random() < 0.7 else f"{number}.{rng.randrange(1, 10)}"


def _degrees(rng: random.Random) -> str:
    return str(rng.randrange(-15, 40)) + (f".{rng.randrange(1, 10)}" if rng.random() < 0.12 else "")


def _sum(rng: random.Random) -> str:
    return f"{rng.randrange(1, 100)} {rng.choice('+-*/')} {rng.randrange(1, 100)}"


def _clock(rng: random.Random) -> str:
    return (
        f"{rng.randrange(24)}:{rng.randrange(60):02}"
        if rng.random() < 0.75
        else f"{rng.randrange(1, 12)} am"
    )


def _title(rng: random.Random) -> str:
    return words.plain(f"{rng.choice(words.LOOKS)} {rng.choice(words.THINGS)}").capitalize()


def _thing(rng: random.Random) -> str:
    return words.plain(
        rng.choice([rng.choice(words.THINGS), rng.choice(words.ANIMALS), words.invented(rng)])
    )


def _topic(rng: random.Random) -> str:
    return rng.choice(
        [words.plain(rng.choice(words.words_of("topics"))), _thing(rng), words.invented(rng)]
    )


def _value(rng: random.Random, slot: str) -> str:
    """Return a value for a slot: generated, or a word of the list with the slot's name."""
    make = _MAKERS.get(slot)
    return make(rng) if make else rng.choice(words_of(_LISTS.get(slot, slot)))


_MAKERS = {
    **dict.fromkeys(("city", "city_b", "city_found"), _city),
    **dict.fromkeys(("person", "author"), _person),
    **dict.fromkeys(("a", "b"), _whole),
    **dict.fromkeys(("thing", "thing_found"), _thing),
    "country": _country,
    "number": _number,
    "degrees": _degrees,
    "sum": _sum,
    "clock": _clock,
    "title": _title,
    "topic": _topic,
    "word": words.invented,
}
_LISTS = {
    "sky": "skies",
    "mood": "moods",
    "phrase": "phrases",
    "language": "languages",
    "room": "rooms",
}
_LISTS |= {"code": "codes", "code_b": "codes", "switch": "switches", "unit": "units"}


def _ask(rng: random.Random, text: str, values: dict[str, str]) -> str:
    """Return a question with its values filled in.

    At times it is in lowercase, and then so are the values.
    """
    marks = {slot: chr(_MARK + n) for n, slot in enumerate(values) if f"<{slot}>" in text}
    plain = fill(text, dict(marks))
    while True:
        question = noisy(rng, plain)
        if all(mark in question for mark in marks.values()):
            break
    if rng.random() < 0.12:
        question = question.lower()
        values.update({slot: value.lower() for slot, value in values.items()})
    for slot, mark in marks.items():
        question = question.replace(mark, values[slot])
    return question


def _typed(value: str, of: str) -> Any:
    """Convert a value to its JSON type."""
    return value if of == "string" else json.loads(value)


def ask_tool(
    rng: random.Random, used: Tool, key: str = "q"
) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Return a question, the arguments of the call that it needs, and the values in it.

    `key` selects the templates of the question.
    """
    values = {slot: _value(rng, slot) for slot in used.params if slot != "unit"}
    text = finish(choose(rng, rng.choice(used.kind.texts[key])))
    unit = rng.choice(["", "celsius", "fahrenheit"]) if "unit" in used.params else ""
    if unit:
        text = text.rstrip("?.") + " in " + rng.choice([unit, unit.capitalize()]) + "?"
    question = _ask(rng, text, values)
    given = values | ({"unit": unit} if unit else {})
    arguments = {
        name: _typed(given[slot], of) for slot, (name, of) in used.params.items() if slot in given
    }
    return question, arguments, values


def outcome(rng: random.Random, used: Tool, values: dict[str, str]) -> tuple[str, str]:
    """Return the tool's result, and what the assistant says about it."""
    texts = used.kind.texts
    roll = rng.random()
    if roll < 0.06:
        error = rng.choice(words_of("errors"))
        result = rng.choice([json.dumps({"error": error}), f"error: {error}", f"Error: {error}"])
        return result, f"I could not find that out: {error}."
    found: dict[str, str] = {}
    if roll < 0.4:
        text = choose(rng, rng.choice(texts["plain"]))
        found = {slot: _value(rng, slot) for slot in _slots(text) if slot not in values}
        result = fill(text, {**values, **found})
    else:
        fields: dict[str, Any] = {}
        for field in rng.choice(texts["gives"]).split("; "):
            keys, slot = field.split("=")
            found[slot] = _value(rng, slot)
            number = slot in _NUMBERS and rng.random() < 0.9
            fields[rng.choice(keys.split("|"))] = json.loads(found[slot]) if number else found[slot]
        if rng.random() < 0.12:  # the result repeats the request, or something else
            asked = {
                name: values[slot] for slot, (name, _) in used.params.items() if slot in values
            }
            fields = (
                asked
                if rng.random() < 0.6
                else {rng.choice(["humidity", "id", "wind"]): rng.randrange(99)}
            ) | fields
        items = list(fields.items())
        rng.shuffle(items)
        styles: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"indent": 1}]
        how = rng.choices(styles, [16, 3, 1])[0]
        result = json.dumps(dict(items), ensure_ascii=False, **how)
    known = values | found
    needed = set(found) - {"done"}
    fit = [say for say in texts["say"] if needed <= set(_slots(say)) <= set(known)]
    return result, fill(rng.choice(fit), dict(known))


def _slots(text: str) -> list[str]:
    return [part.split(">")[0] for part in text.split("<")[1:]]


def tool_choice(rng: random.Random) -> list[Tool]:
    """Return the tools of a chat, all of different kinds; at times none."""
    count = rng.choices([0, 1, 2, 3], [6, 38, 34, 22])[0]
    weather, *others = kinds()
    picked = [weather] if count and rng.random() < 0.55 else []
    picked += [
        _made_up(rng) if rng.random() < 0.15 else kind
        for kind in rng.sample(others, count - len(picked))
    ]
    rng.shuffle(picked)
    found = [tool(rng, kind) for kind in picked]
    return list({used.function["name"]: used for used in found}.values())


def declined(rng: random.Random, listed: list[Tool]) -> tuple[str, str]:
    """Return a question that none of the tools can answer, and a polite refusal."""
    titles = {used.kind.title for used in listed}
    question, reply = ask_outside(rng)
    if "search" not in titles and rng.random() < 0.7:
        titles |= _SUMS if titles & _SUMS else set()
        fit = [kind for kind in kinds() if kind.title not in titles]
        kind = fit[0] if rng.random() < 0.4 else rng.choice(fit)
        return ask_tool(rng, tool(rng, kind))[0], reply
    while listed and _NEAR_TOOLS.search(question):
        question, reply = ask_outside(rng)
    return noisy(rng, question), reply


def _calls(rng: random.Random, used: Tool, key: str) -> Exchange:
    """Return the turns of a question that needs the tool.

    In most chats the assistant's sentence about the result follows.
    """
    question, arguments, values = ask_tool(rng, used, key)
    name = used.function["name"]
    if key == "q" and set(values) == {"city"} and rng.random() < 0.06:
        other = _proper(rng, words_of("cities"), 0.5)
        if question.count(values["city"]) == 1 and other != values["city"]:
            first = values["city"]
            question = question.replace(first, f"{first} and {other}")
            param = used.params["city"][0]
            both = [(arguments, values), (arguments | {param: other}, {"city": other})]
            results = [outcome(rng, used, of) for _, of in both]
            calls = "\n".join(call_text(name, asked) for asked, _ in both)
            given = "\n".join(result_text(result) for result, _ in results)
            return [
                ("user", question),
                ("assistant", calls),
                ("user", given),
                ("assistant", " ".join(s for _, s in results)),
            ]
    turns = [("user", question), ("assistant", call_text(name, arguments))]
    if rng.random() < 0.75:
        result, said = outcome(rng, used, values)
        turns += [("user", result_text(result)), ("assistant", said)]
    return turns


def tool_chat(rng: random.Random, system: str) -> Exchange:
    """Return the turns of a chat with a list of tools, which some of its questions need.

    `system` is further text of the system turn.
    """
    listed = tool_choice(rng)
    last = None
    head = [system] * bool(system) + [tool_list([used.function for used in listed])] * bool(listed)
    turns: Exchange = [("system", "\n\n".join(head))] if head else []
    for _ in range(rng.choices([1, 2, 3, 4], [4, 4, 3, 2])[0]):
        roll = rng.random()
        if listed and roll < 0.7:
            key = "f" if last and rng.random() < 0.5 else "q"
            last = last if last and key == "f" else rng.choice(listed)
            turns += _calls(rng, last, key)
            if not turns[-2][1].startswith("<tool_response>"):
                break
            continue
        last = None
        missing = [used for used in listed if "missing" in used.kind.texts]
        if missing and roll < 0.73:
            texts = missing[0].kind.texts
            pair = noisy(rng, render(rng, texts["short"][0])), render(rng, texts["missing"][0])
        elif roll < 0.84 or not listed:
            pair = declined(rng, listed)
        else:
            pair = ordinary(rng)
        turns += [("user", pair[0]), ("assistant", pair[1])]
    return turns


def ordinary(rng: random.Random) -> tuple[str, str]:
    """Return a question that needs no tool, and its answer."""
    roll = rng.random()
    if roll < 0.2:
        return story_exchange(rng)[0]
    return small_talk(rng) if roll < 0.45 else fact_exchange(rng)
