"""The page at `/` in a browser: questions and answers, tools, keys, and the view of the engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.browser import CONTRAST, DONE, ask, marks, opened
from tests.integration.conftest import Server, running_server
from tests.server.conftest import live_server, make_tokenizer
from tests.server.test_harmony import CALLS, TOOLS, answering

pytestmark = marks


async def test_a_conversation_by_keyboard_alone(server: Server) -> None:
    async with opened(server.url) as page:
        await page.get_by_text("ready").wait_for()
        await page.fill("[name=system]", "Be kind.")
        await page.fill("[name=seed]", "3")
        await page.fill("[name=max_tokens]", "24")
        await page.check("[name=logprobs]")
        sent: list[dict[str, Any]] = []
        page.on(
            "request",
            lambda request: (
                sent.append(request.post_data_json) if request.method == "POST" else None
            ),
        )
        await page.focus("#prompt")
        await page.keyboard.type("Tell me a story.")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(DONE)
        assert await page.evaluate("document.activeElement.id") == "prompt"
        assert (sent[0]["seed"], sent[0]["max_tokens"], sent[0]["stream"]) == (3, 24, True)
        assert [message["role"] for message in sent[0]["messages"]] == ["system", "user"]
        assert await page.locator(".token").count() == 24
        text = await page.inner_text(".tokens")
        await page.locator(".token").nth(3).focus()
        await page.keyboard.press("ArrowRight")
        assert await page.locator("#tooltip tr").count() == 5
        assert await page.inner_text("#spoken") == text.strip()

        await page.get_by_role("button", name="Regenerate").click()
        await page.wait_for_selector(DONE)
        await page.get_by_text("2/2").wait_for()
        assert await page.inner_text(".tokens") == text  # the seed is the same
        await page.locator(".curl summary").click()
        shown = await page.inner_text(".curl pre")
        assert json.loads(shown.partition("-d '")[2].removesuffix("'")) == sent[-1]

        await page.reload()
        await page.wait_for_selector(DONE)
        assert await page.inner_text(".tokens") == text
        assert await page.input_value("[name=system]") == "Be kind."


async def test_escape_stops_and_errors_are_told(server: Server) -> None:
    async with opened(server.url, refusals=1) as page:
        await page.fill("[name=more]", '{"ignore_eos": true}')
        await ask(page, "Tell me a story about a fox.")
        await (
            page.locator("article.assistant > .text")
            .filter(has_text=re.compile(".{20}"))
            .wait_for()
        )
        await page.keyboard.press("Escape")
        await page.wait_for_selector(DONE)
        assert "stopped by you" in await page.inner_text(DONE)
        await page.fill("[name=more]", '{"stop": 5}')
        await ask(page, "And now?")
        await page.wait_for_selector(".problem:visible")
        assert "stop must be a string" in await page.inner_text(".problem:visible")
        assert "field stop" in await page.inner_text(".problem:visible")
        await page.fill("[name=more]", "{")
        await ask(page, "Not sent.")
        assert await page.input_value("#prompt") == "Not sent."


async def test_tools_are_called_and_answered() -> None:
    async with answering(CALLS, context=1024) as live, opened(live.url) as page:
        await page.fill("[name=tools]", json.dumps(TOOLS))
        await ask(page, "a fox")
        await page.wait_for_selector(DONE)
        assert await page.locator("details.fold").first.get_attribute("open") is None
        await page.get_by_text(re.compile("^Thought for")).click()
        assert await page.locator(".fold > .text").first.inner_text() == "A fox 😀?"
        assert [await page.locator(".call strong").nth(i).inner_text() for i in range(2)] == [
            "find",
            "go",
        ]
        assert json.loads(await page.locator(".call pre").first.inner_text()) == {"fox": 1}
        async with page.expect_request("**/v1/chat/completions") as sent:
            await page.locator(".call textarea").nth(0).fill("7 foxes")
            await page.locator(".call textarea").nth(1).fill("gone")
            await page.keyboard.press("Enter")
        _, assistant, first, second = (await sent.value).post_data_json["messages"]
        assert [call["id"] for call in assistant["tool_calls"]] == [
            first["tool_call_id"],
            second["tool_call_id"],
        ]
        assert (first["role"], first["content"], second["content"]) == ("tool", "7 foxes", "gone")
        await page.wait_for_selector(DONE)
        assert "7 foxes" in await page.inner_text("#turns")


async def test_the_demo_model_calls_the_example_tool(server: Server) -> None:
    async with opened(server.url) as page:
        await page.fill("[name=temperature]", "0")
        await page.click(".idea:has-text('Use a tool')")
        await page.press("#prompt", "Enter")
        await page.wait_for_selector(DONE)
        assert await page.inner_text(".call strong") == "get_weather"
        assert json.loads(await page.inner_text(".call pre")) == {"city": "Oslo"}
        await page.fill(".call textarea", '{"temperature": 7, "sky": "rain"}')
        await page.press(".call textarea", "Enter")
        await page.wait_for_selector(".result + " + DONE)
        text = await page.inner_text(".result + article > .text")
        assert all(word in text for word in ("7", "Oslo", "rain"))


async def test_a_key_is_asked_for_and_kept_in_the_tab() -> None:
    async with (
        live_server(make_tokenizer(), api_key=("right",)) as live,
        opened(live.url, refusals=1) as page,
    ):
        await page.wait_for_selector("dialog[open]")
        await page.fill("#key-value", "right")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("dialog:not([open])", state="attached")
        await ask(page, "a")
        await page.wait_for_selector(DONE)
        assert "Once upon a time" in await page.inner_text(DONE)
        await page.locator(".curl summary").click()
        assert "right" not in await page.inner_text(".curl")
        assert await page.evaluate("sessionStorage['moeserve.key']") == "right"
        assert "right" not in await page.evaluate("Object.values(localStorage).join()")


async def test_a_killed_engine_is_seen_and_the_answer_goes_on(tmp_path: Path) -> None:
    flags = ("--dp", "2", "--redundant-experts", "2")
    with running_server(tmp_path / "log", *flags) as server:
        async with opened(f"{server.url}/#engine", viewport={"width": 1280, "height": 900}) as page:
            await page.wait_for_selector("canvas[data-slots='10'][data-layers='4'][data-lost='0']")
            await page.wait_for_selector("tr[data-engine='1'][data-state=serving]")
            await page.focus("canvas")
            await page.keyboard.press("ArrowRight")
            assert "2 replicas, on ranks 0, 1" in await page.inner_text("#tooltip")
            await page.click("#tab-chat")
            await page.fill("[name=more]", '{"ignore_eos": true, "max_tokens": 300}')
            await ask(page, "Tell me a story about a fox.")
            await (
                page.locator("article.assistant > .text")
                .filter(has_text=re.compile(".{20}"))
                .wait_for()
            )
            await page.click("#tab-engine")
            pids = [engine["pid"] for engine in json.loads(server.get("/v1/experts")[1])["engines"]]
            psutil.Process(pids[1]).kill()
            await page.get_by_text("engine 1 was lost").wait_for()
            await page.get_by_text("engine 1 serves again").wait_for()
            await page.wait_for_selector("tr[data-engine='1'][data-state=serving]")
            await page.click("#tab-chat")
            await page.wait_for_selector(DONE)
            assert "cut at the limit" in await page.inner_text(
                DONE
            )  # all of its tokens, one dead engine or not


async def test_the_page_finds_a_server_that_comes_back(server: Server) -> None:
    async with opened(f"{server.url}/#engine", refusals=1) as page:
        await page.wait_for_selector("#state[data-state=ready]")
        draining = {"status": "draining", "phase": "draining", "percent": 100}
        await page.context.route(
            "**/readyz", lambda route: route.fulfill(status=503, json=draining)
        )
        await page.wait_for_selector("#state[data-state=draining]")
        await page.context.unroute("**/readyz")
        await page.wait_for_selector("#state[data-state=ready]")
        assert "the server is draining" in await page.inner_text("#events")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_a_phone_and_its_text_can_be_read(server: Server, scheme: str) -> None:
    size = {"width": 360, "height": 640}
    async with opened(
        server.url, viewport=size, color_scheme=scheme, reduced_motion="reduce"
    ) as page:
        for view in ("chat", "engine"):
            await page.click(f"#tab-{view}")
            await page.wait_for_selector("#state[data-state=ready]")
            assert await page.evaluate("document.documentElement.scrollWidth") == 360
            assert await page.evaluate(CONTRAST) == []
