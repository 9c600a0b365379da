"""The page at `/` in headless Chromium. Its tests are skipped where playwright or a chromium is
missing: `pip install playwright` and Debian's package `chromium`, or CHROMIUM with its path.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.server.conftest import Live, live_server, make_tokenizer

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or ""
browsers = pytest.importorskip("playwright.async_api")
marks = [pytest.mark.timeout(240), pytest.mark.skipif(not CHROMIUM, reason="needs chromium")]
LONG_CONTEXT = 4096  # tokens
DONE = "article.assistant:last-child[aria-busy=false]"


@asynccontextmanager
async def opened(
    url: str, *, refusals: int = 0, provoked: str = "", **context: Any
) -> AsyncIterator[Any]:
    """A page without errors.

    refusals: whether requests are refused, which the console shows. provoked: a part of the errors
    that the test provokes.
    """
    wrong: list[str] = []

    def note(message: Any) -> None:
        if message.type == "error":
            wrong.append(f"{message.text} {message.location['url']}")

    def watch(page: Any) -> None:
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", note)

    async with browsers.async_playwright() as play:
        browser = await play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        window = await browser.new_context(**context)
        window.on("page", watch)
        page = await window.new_page()
        await show(page, url)
        yield page
        await browser.close()
    refused = [text for text in wrong if "the server responded with a status of" in text]
    others = [text for text in wrong if text not in refused]
    unexpected = [text for text in others if not provoked or provoked not in text]
    assert unexpected == [], unexpected
    assert bool(refused) == bool(refusals), refused


async def show(page: Any, url: str) -> None:
    """Go to an address of the page, and wait until its scripts have run."""
    await page.goto(url)
    await page.wait_for_selector("#turns > *", state="attached")


async def ask(page: Any, text: str) -> None:
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")


def say(live: Live, *texts: str) -> None:
    """Let the model answer with the texts in turn, over and over."""
    tokens = []
    for text in texts:
        tokens += [*live.engine.tokenizer.encode(text, special=False), live.engine.end]
    live.engine.script = tokens


@asynccontextmanager
async def chatting(
    *texts: str, browser: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[Live, Any]]:
    """A server that answers with these texts, and the page."""
    async with live_server(make_tokenizer(), context=LONG_CONTEXT, **settings) as live:
        say(live, *(texts or ["Once upon a time."]))
        async with opened(live.url, **(browser or {})) as page:
            yield live, page


CONTRAST = """() => {
  const light = (colour) => {
    const context = document.createElement("canvas").getContext("2d");
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    const colour = getComputedStyle(node).backgroundColor;
    const clear = colour === "rgba(0, 0, 0, 0)";
    return clear && node.parentElement ? ground(node.parentElement) : colour;
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest(".sr, .skip, option, noscript")) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(node.outerHTML.slice(0, 120));
  }
  return poor;
}"""
