"""The checks that every client gets, for the scripts `with_*.py`.

A script subclasses `Checks` once per API of its library, and ends with `run(...)`. A check without
a method is left out. The environment has the server's BASE_URL and its MODEL.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

BASE_URL = os.environ.get("BASE_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("MODEL", "demo")
V1 = os.environ.get("V1", BASE_URL + "/v1")  # differs for a proxy in front of the server
KEY = os.environ.get("KEY", "none")

HELLO = "Tell me a story about a fox."
QUESTION = "What is the weather in Oslo?"
MANUAL = "You tell stories. " + "Once upon a time a fox found a lantern in the old harbour. " * 60
TOO_LONG = "word " * 70_000
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
MIN_CACHED = 0.9  # of the second turn's prompt
OVERFLOWS = ("maximum context length", "prompt is too long")

_cities: list[str] = []


class Paint(BaseModel):
    """What structured output is to be."""

    model_config = {"extra": "forbid"}
    colour: Literal["red", "green", "blue"]
    layers: Literal[1, 2, 3]


def get_weather(city: str) -> str:
    """Returns the weather in a city.

    Args:
        city: The name of the city.
    """
    _cities.append(city)
    return "7 degrees and rain"


class Checks:
    """The checks of one client over one API: methods, which may be coroutines.

    first_chat: Return the text of an answer to HELLO.
    stream: Return the pieces of the text.
    tool_round_trip: Have the model call `get_weather`, and return the answer to its result.
    second_turn: A generator that yields between the two turns of a conversation.
    structured_output: Return a Paint, or an object of its schema.
    overflow: Send TOO_LONG, and let the library's error through.
    """

    client: ClassVar[str]  # the package's name
    api: ClassVar[str]


NAMES = (
    "first_chat",
    "stream",
    "tool_round_trip",
    "second_turn",
    "structured_output",
    "overflow",
)


def cached_tokens() -> tuple[float, float]:
    """Return the prompt tokens that the server looked up in its prefix cache, and those found."""
    with urllib.request.urlopen(BASE_URL + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    looked_up, found = (
        float(re.search(rf"^moeserve:prefix_cache_{name}_total\S* (\S+)", text, re.M)[1])  # type: ignore[index]
        for name in ("queries", "hits")
    )
    return looked_up, found


async def settled(value: Any) -> Any:
    """Return the value, awaited if it can be."""
    return await value if inspect.isawaitable(value) else value


async def check_second_turn(method: Callable[[], Any]) -> None:
    turns: Iterator[None] | AsyncIterator[None] = method()
    end = object()
    steps: list[Any] = []
    for _ in range(2):
        if isinstance(turns, AsyncIterator):
            steps.append(await anext(turns, end))
        else:
            steps.append(next(turns, end))
        if len(steps) == 1:
            before = cached_tokens()
    assert [step is end for step in steps] == [False, True], "the generator yields once"
    looked_up, found = (b - a for a, b in zip(before, cached_tokens(), strict=True))
    assert found >= MIN_CACHED * looked_up > 0, f"{found:.0f} of {looked_up:.0f} tokens cached"


def texts(error: BaseException) -> str:
    """Return the texts of an error and of those that caused it."""
    found = [str(error), repr(error)]
    for inner in (error.__cause__, error.__context__):
        if inner is not None:
            found.append(texts(inner))
    return "\n".join(found)


async def check(name: str, method: Callable[[], Any]) -> None:
    """Raise an error unless the client does what the check demands."""
    if name == "second_turn":
        await check_second_turn(method)
        return
    _cities.clear()
    try:
        result = await settled(method())
    except Exception as error:
        if name == "overflow" and any(words in texts(error) for words in OVERFLOWS):
            return
        raise
    assert name != "overflow", f"no error, but {result!r:.200}"
    if name == "structured_output":
        Paint.model_validate(result)
        return
    if name == "stream":
        assert len(result) > 1, result
        result = "".join(result)
    assert str(result or "").strip(), repr(result)
    assert name != "tool_round_trip" or _cities, f"no call, but {result!r:.200}"


def shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


async def run_all(classes: Sequence[type[Checks]]) -> int:
    """Run the checks, print a line of JSON for each, and return how many failed."""
    num_failed = 0
    for cls in classes:
        checks = cls()
        for name in NAMES:
            method = getattr(checks, name, None)
            if method is None:
                continue
            error = None
            try:
                async with asyncio.timeout(300):
                    await check(name, method)
            except Exception as caught:
                error = shown(caught)
            num_failed += error is not None
            result = {"client": cls.client, "version": version(cls.client), "api": cls.api}
            print(json.dumps(result | {"check": name, "error": error}), flush=True)
    return num_failed


def run(*classes: type[Checks]) -> None:
    """Run the checks, and exit with 1 if any failed."""
    sys.exit(min(asyncio.run(run_all(classes)), 1))
