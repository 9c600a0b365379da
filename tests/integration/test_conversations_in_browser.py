"""Conversations in a browser: kept, listed, branched, exported, imported, and shared by tabs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.browser import (
    CONTRAST,
    DONE,
    LONG_CONTEXT,
    ask,
    chatting,
    marks,
    opened,
    say,
    show,
)
from tests.server.conftest import live_server, make_tokenizer, until

pytestmark = marks
TITLES = "#conversation-list a"


async def asked(page: Any, text: str) -> str:
    """Ask, and return the answer."""
    answers = await page.locator("article.assistant").count()
    await ask(page, text)
    await page.locator("article.assistant[aria-busy=false]").nth(answers).wait_for()
    return await answer_of(page)


def turn(page: Any, text: str) -> Any:
    """Return what shows the text in the conversation."""
    return page.locator("#turns").get_by_text(text)


async def answer_of(page: Any) -> str:
    return (await page.inner_text(f"{DONE} > .text")).strip()


async def act(page: Any, title: str, name: str) -> None:
    """Choose an action of a conversation in the list."""
    item = page.locator("#conversation-list li").filter(has_text=title)
    await item.hover()
    await item.get_by_role("button").click()
    await page.get_by_role("menuitem", name=name, exact=True).click()


async def shown(page: Any) -> list[str]:
    """Return the texts of the questions and answers that are shown."""
    texts = await page.locator(".turn > .text:visible").all_inner_texts()
    return [text.strip() for text in texts]


async def test_conversations_are_listed_opened_renamed_and_kept() -> None:
    async with chatting("First answer.") as (live, page):
        await asked(page, "Tell me of foxes.")
        await page.click("#new")
        say(live, "Second answer.")
        await asked(page, "Tell me of\nlanterns, and of much else " + "that is long " * 8)
        assert await page.locator(TITLES).all_inner_texts() == ["Tell me of", "Tell me of foxes."]
        await page.click(f"{TITLES} >> text=foxes")
        await turn(page, "First answer.").wait_for()
        assert await shown(page) == ["Tell me of foxes.", "First answer."]

        await act(page, "foxes", "Rename")
        await page.keyboard.type("Of foxes")
        await page.keyboard.press("Enter")
        await page.locator("#title", has_text="Of foxes").wait_for()
        await page.reload()
        await turn(page, "First answer.").wait_for()
        assert await page.locator(TITLES).all_inner_texts() == ["Tell me of", "Of foxes"]
        await page.fill("#search", "FOX")
        assert await page.locator(TITLES).all_inner_texts() == ["Of foxes"]
        await page.go_back()
        await turn(page, "Second answer.").wait_for()


async def test_a_deleted_conversation_comes_back_by_undo_and_is_gone_without() -> None:
    async with chatting("The answer.") as (_, page):
        await asked(page, "Keep this.")
        await act(page, "Keep", "Delete")
        await page.locator(".welcome").wait_for()
        await page.get_by_role("button", name="Undo").click()
        await turn(page, "The answer.").wait_for()
        await act(page, "Keep", "Delete")
        await page.locator(".welcome").wait_for()
        await page.reload()
        await page.locator(".welcome").wait_for()
        assert await page.locator(TITLES).count() == 0

        for text in ("One.", "Two."):
            await asked(page, text)
            await page.click("#new")
        await page.click("#list-menu")
        await page.get_by_role("menuitem", name="Delete all").click()
        await page.get_by_role("button", name="Cancel").click()
        assert await page.locator(TITLES).count() == 2
        await page.click("#list-menu")
        await page.get_by_role("menuitem", name="Delete all").click()
        await page.get_by_role("button", name="Delete", exact=True).click()
        await page.wait_for_function(f"() => !document.querySelector('{TITLES}')")
        await page.reload()
        await page.locator(".welcome").wait_for()
        assert await page.locator(TITLES).count() == 0


async def test_questions_and_answers_branch() -> None:
    async with chatting("Red.") as (live, page):
        await asked(page, "Which colour?")
        say(live, "Blue.")
        await page.get_by_role("button", name="Regenerate").click()
        await page.get_by_label("Branch 2/2").wait_for()
        await page.wait_for_selector(DONE)
        assert await shown(page) == ["Which colour?", "Blue."]
        say(live, "Deep blue.")
        await asked(page, "Which shade?")

        first = page.locator("article").nth(1)
        await first.get_by_role("button", name="Previous branch").click()
        assert await shown(page) == ["Which colour?", "Red."]
        await first.get_by_role("button", name="Next branch").click()
        assert await shown(page) == ["Which colour?", "Blue.", "Which shade?", "Deep blue."]

        say(live, "Round.")
        await page.locator("article.user").first.hover()
        await page.locator("article.user").first.get_by_role("button", name="Edit").click()
        await page.fill(".editor textarea", "Which shape?")
        await page.get_by_role("button", name="Send", exact=True).first.click()
        await turn(page, "Round.").wait_for()
        await page.wait_for_selector(DONE)
        assert await shown(page) == ["Which shape?", "Round."]
        prompt = live.engine.prompt
        assert "colour" not in prompt
        await page.reload()
        await turn(page, "Round.").wait_for()
        await page.get_by_role("button", name="Previous branch").click()
        assert await shown(page) == ["Which colour?", "Blue.", "Which shade?", "Deep blue."]
        await page.get_by_label("Branch 1/2").first.wait_for()


async def test_an_edited_answer_is_what_the_model_is_told_it_said() -> None:
    async with chatting("Seven foxes.") as (live, page):
        await asked(page, "How many?")
        await page.locator(DONE).get_by_role("button", name="Edit").click()
        await page.fill(".editor textarea", "Eight **foxes**.")
        await page.keyboard.press("Control+Enter")
        await page.get_by_text("edited by you").wait_for()
        assert await shown(page) == ["How many?", "Eight foxes."]
        await page.get_by_label("Branch 2/2").wait_for()
        await asked(page, "Sure?")
        assert "Eight **foxes**." in live.engine.prompt
        assert "Seven" not in live.engine.prompt


async def test_a_cut_answer_is_continued() -> None:
    async with chatting("One two three four five six seven eight.") as (live, page):
        live.engine.pause_at = 6
        await ask(page, "Count.")
        await page.locator("article.assistant > .text", has_text="One").wait_for()
        await until(lambda: all(row.emitted == 6 for row in live.engine.rows.values()))
        await page.keyboard.press("Escape")
        await page.get_by_text("stopped by you").wait_for()
        before = await answer_of(page)
        live.engine.pause_at = None
        say(live, " and so on.")
        await page.get_by_role("button", name="Continue").click()
        await page.get_by_label("Branch 2/2").wait_for()
        await page.wait_for_selector(DONE)
        assert await answer_of(page) == f"{before} and so on."
        assert live.engine.prompt.endswith(f"assistant\n{before}")


async def test_settings_belong_to_a_conversation() -> None:
    async with chatting() as (live, page):
        await page.fill("[name=system]", "Be kind.")
        await page.fill("[name=temperature]", "0.5")
        await page.reload()
        await page.locator(".welcome").wait_for()
        assert await page.input_value("[name=system]") == "Be kind."  # not lost before it is sent
        await asked(page, "One.")
        assert "Be kind." in live.engine.prompt
        await page.click("#new")
        assert await page.input_value("[name=system]") == ""
        await page.fill("[name=system]", "Be brief.")
        await page.click("#make-default")
        await asked(page, "Two.")
        await page.click(f"{TITLES} >> text=One")
        await page.wait_for_function(
            "() => document.querySelector('[name=system]').value === 'Be kind.'"
        )
        assert await page.input_value("[name=temperature]") == "0.5"
        await page.click("#new")
        assert await page.input_value("[name=system]") == "Be brief."
        await page.click("#reset-settings")
        assert await page.input_value("[name=system]") == ""


async def test_what_is_exported_can_be_imported(tmp_path: Path) -> None:
    async with chatting("Red.", browser={"accept_downloads": True}) as (live, page):
        await page.fill("[name=system]", "Be kind.")
        await asked(page, "Which colour?")
        say(live, "Blue.")
        await page.get_by_role("button", name="Regenerate").click()
        await turn(page, "Blue.").wait_for()
        await page.wait_for_selector(DONE)
        async with page.expect_download() as download:
            await act(page, "Which", "Export as Markdown")
        saved = await download.value
        assert saved.suggested_filename == "which-colour.md"
        await saved.save_as(tmp_path / "saved.md")
        assert (tmp_path / "saved.md").read_text() == (
            "# Which colour?\n\n## System\n\nBe kind.\n\n## You\n\nWhich colour?\n\n"
            "## Assistant\n\nBlue.\n"
        )
        async with page.expect_download() as download:
            await act(page, "Which", "Export as JSON")
        saved = await download.value
        file = tmp_path / saved.suggested_filename
        await saved.save_as(file)
        (kept,) = json.loads(file.read_text())["conversations"]
        assert [message["content"] for message in kept["messages"]].count("Which colour?") == 1

        await act(page, "Which", "Delete")
        await page.locator(".welcome").wait_for()
        await page.set_input_files("#import", file)
        await turn(page, "Blue.").wait_for()
        assert await page.input_value("[name=system]") == "Be kind."
        await page.get_by_role("button", name="Previous branch").click()
        assert await shown(page) == ["Which colour?", "Red."]
        await page.set_input_files("#import", file)  # a second copy, not a replacement
        await page.wait_for_function(f"() => document.querySelectorAll('{TITLES}').length === 2")
        async with page.expect_download() as download:
            await page.click("#list-menu")
            await page.get_by_role("menuitem", name="Export all").click()
        saved = await download.value
        await saved.save_as(tmp_path / "all.json")
        assert len(json.loads((tmp_path / "all.json").read_text())["conversations"]) == 2


REQUEST = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    {"role": "assistant", "content": "Hi."},
]
HEAD = {"format": "moeserve.conversations", "version": 1}


def exported(*messages: dict[str, Any]) -> dict[str, Any]:
    return HEAD | {"conversations": [{"title": "A", "messages": list(messages)}]}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is not JSON"),
        ("{}", "it has neither conversations nor messages"),
        (json.dumps(HEAD | {"version": 2}), "version 2 is not known"),
        (json.dumps(HEAD | {"conversations": {}}), "it has no list of conversations"),
        (json.dumps(exported()), "a conversation has no messages"),
        (json.dumps(exported({"role": "root", "content": ""})), 'a message has the role "root"'),
        (json.dumps(exported({"role": "user", "content": 5})), "a message has no text"),
        (
            json.dumps(exported({"id": "a", "parent": "a", "role": "user", "content": ""})),
            "a message does not come after",
        ),
        (
            json.dumps(exported({"role": "assistant", "content": "", "tool_calls": [{}]})),
            "a call has no function",
        ),
        (json.dumps([None]), "a message is not an object"),
    ],
)
async def test_a_file_that_is_no_conversation_is_refused(
    tmp_path: Path, text: str, why: str
) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(text)
    async with chatting() as (_, page):
        await page.set_input_files("#import", file)
        await page.get_by_text(f"“wrong.json” was not imported: {why}").wait_for()
        assert await page.locator(TITLES).count() == 0


async def test_the_messages_of_a_request_are_imported(tmp_path: Path) -> None:
    for name, value in (("list.json", REQUEST), ("body.json", {"messages": REQUEST})):
        (tmp_path / name).write_text(json.dumps(value))
    async with chatting() as (live, page):
        await page.set_input_files("#import", [tmp_path / "list.json", tmp_path / "body.json"])
        await page.get_by_text("Imported 2 conversations.").wait_for()
        await turn(page, "Hi.").wait_for()
        await asked(page, "More.")
        assert "Be kind." in live.engine.prompt


async def test_a_reload_keeps_what_came_of_an_answer() -> None:
    async with chatting("One two three four five six seven eight nine.") as (live, page):
        live.engine.pause_at = 12
        await ask(page, "Count.")
        await until(lambda: any(row.emitted == 12 for row in live.engine.rows.values()))
        await page.locator("article.assistant > .text", has_text="three").wait_for()
        before = (await page.inner_text("article.assistant > .text")).strip()
        await page.reload()
        await page.get_by_text("interrupted").wait_for()
        assert await answer_of(page) == before
        live.engine.pause_at = None
        await page.get_by_role("button", name="Regenerate").click()
        await turn(page, "nine.").wait_for()


async def test_a_reload_resumes_an_answer_of_a_server_that_resumes() -> None:
    text = "One two three four five six seven eight nine."
    async with chatting(text, resume_window=30) as (live, page):
        live.engine.pause_at = 12
        await ask(page, "Count.")
        await page.locator("article.assistant > .text", has_text="three").wait_for()
        await page.reload()
        await page.locator("article.assistant[aria-busy=true]").wait_for()
        live.engine.pause_at = None
        await page.wait_for_selector(DONE)
        assert await answer_of(page) == text
        assert "complete" in await page.inner_text(DONE)
        assert len([told for told in live.engine.told if type(told).__name__ == "Submit"]) == 1


@asynccontextmanager
async def cuttable(port: int) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """A way to the server through which connections can be cut: its URL, and what cuts them."""
    writers: set[asyncio.StreamWriter] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        writers.update((writer, back))
        await asyncio.gather(pump(reader, back), pump(there, writer))

    def cut() -> None:
        for writer in writers:
            writer.transport.abort()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
    finally:
        cut()
        server.close()


async def test_an_answer_goes_on_after_its_connection_broke() -> None:
    text = "One two three four five six seven eight nine."
    async with (
        live_server(make_tokenizer(), context=LONG_CONTEXT, resume_window=30) as live,
        cuttable(live.port) as (url, cut),
        opened(url, provoked="net::ERR") as page,
    ):
        say(live, text)
        live.engine.pause_at = 8
        await ask(page, "Count.")
        await page.locator("article.assistant > .text", has_text="two").wait_for()
        async with page.expect_request("**/v1/chat/completions") as again:
            cut()
        assert (await again.value).headers["last-event-id"]
        live.engine.pause_at = None
        await page.wait_for_selector(DONE)
        assert await answer_of(page) == text
        assert "complete" in await page.inner_text(DONE)


async def test_stop_ends_an_answer_that_would_go_on_without_a_reader() -> None:
    async with chatting("One two three four.", resume_window=30) as (live, page):
        live.engine.pause_at = 8
        await ask(page, "Count.")
        await page.locator("article.assistant > .text", has_text="two").wait_for()
        await page.click("#stop")
        await page.get_by_text("stopped by you").wait_for()
        await until(lambda: not live.engine.rows)


async def test_an_answer_that_the_server_has_dropped_is_interrupted() -> None:
    browser = {"refusals": 1}
    async with chatting("One two three four.", resume_window=30, browser=browser) as (live, page):
        live.engine.pause_at = 8
        await ask(page, "Count.")
        await page.locator("article.assistant > .text", has_text="two").wait_for()
        await page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(
                status=404, json={"error": {"message": "this stream is unknown"}}
            ),
        )
        await page.reload()
        await page.get_by_text("interrupted").wait_for()
        assert (await answer_of(page)).startswith("One two")
        assert not await page.locator(".problem:visible").count()


async def test_an_answer_goes_on_while_another_conversation_is_open() -> None:
    async with chatting("One two three four five six seven eight nine.") as (live, page):
        live.engine.pause_at = 5
        await ask(page, "Count.")
        await page.locator("article.assistant > .text", has_text="One").wait_for()
        await page.click("#new")
        await page.locator("#conversation-list .busy").wait_for()
        live.engine.pause_at = None
        await page.locator("#conversation-list .busy").wait_for(state="detached")
        await page.click(f"{TITLES} >> text=Count")
        await turn(page, "seven eight nine.").wait_for()


async def test_two_tabs_add_to_one_conversation_and_lose_nothing() -> None:
    async with chatting("Red.") as (_, page):
        await asked(page, "Which colour?")
        deaf = await page.context.new_page()  # it learns nothing of the other tab in time
        await deaf.add_init_script("delete window.BroadcastChannel")
        await show(deaf, page.url)
        await turn(deaf, "Red.").wait_for()
        await asked(page, "From the first.")
        await asked(deaf, "From the second.")
        await deaf.close()
        await page.reload()
        await page.get_by_label("Branch 2/2").wait_for()
        assert await shown(page) == ["Which colour?", "Red.", "From the second.", "Red."]
        await page.get_by_role("button", name="Previous branch").click()
        assert await shown(page) == ["Which colour?", "Red.", "From the first.", "Red."]

        other = await page.context.new_page()
        await show(other, page.url)
        await act(other, "Which", "Rename")
        await other.keyboard.type("Colours")
        await other.keyboard.press("Enter")
        await page.locator("#title", has_text="Colours").wait_for()
        await page.fill("[name=system]", "Be kind.")
        await other.wait_for_function(
            "() => document.querySelector('[name=system]').value === 'Be kind.'"
        )
        await other.click("#new")
        await asked(other, "Mine.")
        await page.locator(TITLES, has_text="Mine.").wait_for()
        await act(other, "Colours", "Delete")
        await page.get_by_text("deleted in another tab").wait_for()
        await other.get_by_role("button", name="Undo").click()
        await page.locator(TITLES, has_text="Colours").wait_for()
        await page.click(f"{TITLES} >> text=Colours")
        await page.wait_for_function(
            "() => document.querySelector('[name=system]').value === 'Be kind.'"
        )


async def test_a_tab_leaves_an_answer_to_the_tab_that_receives_it() -> None:
    async with chatting("One two three four five six seven eight nine.") as (live, page):
        live.engine.pause_at = 5
        await ask(page, "Count.")
        await page.locator("article.assistant > .text", has_text="One").wait_for()
        await page.wait_for_timeout(700)  # until the page has stored it
        other = await page.context.new_page()
        await show(other, page.url)
        await other.get_by_text("another tab receives this answer").wait_for()
        live.engine.pause_at = None
        await page.wait_for_selector(DONE)
        await turn(other, "seven eight nine.").wait_for()
        assert await other.get_by_text("interrupted").count() == 0


async def test_a_browser_without_storage_is_told() -> None:
    async with chatting("The answer.") as (_, page):
        await page.add_init_script("Object.defineProperty(window, 'indexedDB', {value: undefined})")
        await page.reload()
        await page.get_by_text("does not let the page store anything").wait_for()
        await asked(page, "Is it there?")
        assert await shown(page) == ["Is it there?", "The answer."]
        await page.click("#new")
        await page.click(f"{TITLES} >> text=Is it there")
        await turn(page, "The answer.").wait_for()


async def test_blocked_storage_does_not_break_the_page() -> None:
    blocked = """for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
      const get = () => { throw new DOMException("no", "SecurityError"); };
      Object.defineProperty(window, name, { get });
    }"""
    async with chatting("The answer.") as (_, page):
        await page.add_init_script(blocked)
        await page.reload()
        await page.get_by_text("does not let the page store anything").wait_for()
        await page.fill("[name=system]", "Be kind.")
        assert await asked(page, "Is it there?") == "The answer."


async def test_a_full_storage_is_told() -> None:
    """The browser's own limit depends on the disk, so its refusal is put in its place."""
    full = """() => {
      window.put = IDBObjectStore.prototype.put;
      const refuse = () => { throw new DOMException("full", "QuotaExceededError"); };
      IDBObjectStore.prototype.put = refuse;
    }"""
    async with chatting("The answer.") as (_, page):
        await asked(page, "Before.")
        await page.evaluate(full)
        assert await asked(page, "Is it kept?") == "The answer."
        await page.get_by_text("storage for this page is full").wait_for()
        assert "Is it kept?" in await shown(page)
        await page.evaluate("() => { IDBObjectStore.prototype.put = window.put; }")
        await asked(page, "After.")
        await page.locator("#storage-note").wait_for(state="hidden")
        await page.reload()
        await page.wait_for_selector(DONE)
        kept = [text for text in await shown(page) if text != "The answer."]
        assert kept == ["Before.", "Is it kept?", "After."]


CONVERSATION = [
    {"role": "user", "content": "Explain it to me, with averyveryverylongwordthatdoesnotbreak" * 3},
    {
        "role": "assistant",
        "content": "| a | b | c | d | e |\n|--|--|--|--|--|\n"
        + "| a long cell | a long cell | a long cell | a long cell | a long cell |\n\n"
        + "```\n" + "a long line of code " * 20 + "\n```\n\n$$ " + "x + y + z + " * 30 + "1 $$\n\n"
        + "averyveryverylongwordthatdoesnotbreak" * 5,
        "reasoning": "I think.",
    },
]  # fmt: skip


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_shows_a_conversation_and_the_list_as_a_drawer(
    tmp_path: Path, scheme: str
) -> None:
    (tmp_path / "wide.json").write_text(json.dumps(CONVERSATION))
    phone = {"viewport": {"width": 360, "height": 640}, "color_scheme": scheme, "has_touch": True}
    async with chatting(browser=phone | {"reduced_motion": "reduce"}) as (_, page):
        await page.set_input_files("#import", tmp_path / "wide.json")
        await page.locator(".markdown math").wait_for()
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        assert await page.evaluate("document.querySelector('#turns').scrollWidth") == 360
        assert await page.evaluate(CONTRAST) == []
        assert await page.locator("#conversations").is_hidden()
        await page.click("#show-conversations")
        await page.locator(TITLES).wait_for()
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        assert await page.evaluate(CONTRAST) == []
        await page.keyboard.press("Escape")
        await page.locator("#conversations").wait_for(state="hidden")
        await page.click("#show-settings")
        assert await page.evaluate("document.activeElement.closest('#panel') !== null")
        await page.mouse.click(10, 320)  # beside the panel
        await page.locator("#panel").wait_for(state="hidden")
        await page.click("#show-conversations")
        await page.click("#new")
        await page.locator("#conversations").wait_for(state="hidden")
        await page.locator(".welcome").wait_for()


async def test_controls_have_names_and_the_list_works_by_keyboard() -> None:
    async with chatting("The answer.") as (_, page):
        await asked(page, "One.")
        nameless = await page.evaluate(
            """[...document.querySelectorAll("button, input, select, textarea, a")].filter((node) =>
              node.checkVisibility() && !node.labels?.length && !node.ariaLabel
              && !node.textContent.trim()).map((node) => node.outerHTML)"""
        )
        assert nameless == []
        await page.locator("#conversation-list .icon-button").focus()
        await page.keyboard.press("Enter")
        await page.keyboard.press("ArrowDown")
        assert await page.evaluate("document.activeElement.textContent") == "Export as JSON"
        await page.keyboard.press("ArrowUp")
        await page.keyboard.press("Enter")
        await page.keyboard.type("Mine")
        await page.keyboard.press("Enter")
        await page.locator("#title", has_text="Mine").wait_for()
