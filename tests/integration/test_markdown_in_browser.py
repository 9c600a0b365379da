"""What a model writes, in a browser: Markdown, code and maths are shown, and nothing of it runs."""

from __future__ import annotations

from typing import Any

from tests.integration.browser import DONE, ask, chatting, marks, say

pytestmark = marks
ANSWER = r"""# Title

Text with **bold**, *italic*, `code` and a [link](https://example.org/a?b=1&c=2 "a title").
A second line<br>and a third, H<sub>2</sub>O, and a type List<String> of the text.

- one
  1. inner
- [x] done

> quoted
> twice

| left | right |
|:-----|------:|
| a    | $x^2$ |

```python
if a < b:

    print("&amp;")
```

It costs $5 and $10, but \(a_1 + b\) and $\frac{1}{2}$ are maths, and so is

$$
\sum_{k=1}^{n} k = \frac{n (n+1)}{2}
$$

\[ \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix} \]

$\notacommand{x}$ is no maths. See [the note][note] too.

[note]: https://example.org/note
"""
HOSTILE = [
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "<svg onload='window.ran = 1'></svg>",
    "<svg><animate onbegin='window.ran = 1' attributeName=x dur=1s></svg>",
    "<details open ontoggle='window.ran = 1'>x</details>",
    "<iframe srcdoc=\"<script>parent.ran = 1</script>\"></iframe>",
    "<style>* { display: none }</style>",
    "<form action='https://evil.example'><input name=x><button id=reset>x</button></form>",
    "<base href='https://evil.example/'>",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<math><mtext><table><mglyph><style><img src=x onerror='ran = 1'></style></table></math>",
    "<b onclick='window.ran = 1'>bold</b>",
    "<a href='javascript:window.ran = 1'>link</a>",
    "[link](javascript:window.ran=1)",
    "[link](JaVaScRiPt:window.ran=1)",
    "[link](java&#10;script:window.ran=1)",
    "[link](data:text/html,<script>window.ran=1</script>)",
    "[link](vbscript:x)",
    "[link](/v1/models)",
    "[a](https://example.org/\"onmouseover=\"window.ran=1)",
    "![alt](https://evil.example/pixel.png)",
    "![x](javascript:window.ran=1)",
    "![\" onerror=\"window.ran=1](https://evil.example/x)",
    "<javascript:window.ran=1>",
    "```\"><img src=x onerror='window.ran=1'>\ncode\n```",
    r"$\href{javascript:window.ran=1}{x}$",
    r"$\includegraphics{https://evil.example/x.png}$",
    r"$\style{position:fixed}{x}$ $\class{shade}{x}$ $\id{prompt}{x}$",
    "$<img src=x onerror='window.ran=1'>$",
    "$$\\text{<img src=x onerror='window.ran=1'>}$$",
    r"$\def\a{\a\a}\a$",
    r"$\rule{99999em}{99999em}$",
    "[x]: javascript:window.ran=1\n\n[x]",
    "> " * 3000 + "deep",
    "[" * 3000 + "a" + "](b)" * 3000,
    "<div>" * 2000,
    "*" * 5000 + "a",
]  # fmt: skip


async def render(page: Any, text: str) -> None:
    """Show a text as the page shows an answer."""
    await page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import("/ui/chat/markdown-view.js");
          const view = new MarkdownView("text markdown");
          document.querySelector("#turns").replaceChildren(view.node);
          for (let end = 1; end < text.length; end += 1 + (text.length >> 5)) {
            view.show(text.slice(0, end));
          }
          view.show(text, { whole: true });
        }""",
        text,
    )


async def test_markdown_code_and_maths_are_shown() -> None:
    async with chatting(ANSWER) as (_, page):
        await ask(page, "Show all.")
        await page.wait_for_selector(DONE)
        text = page.locator(f"{DONE} > .text")
        assert await text.locator("h1").inner_text() == "Title"
        assert await text.locator("strong").first.inner_text() == "bold"
        assert await text.locator("p > code").first.inner_text() == "code"
        link = text.locator("a").first
        assert await link.get_attribute("href") == "https://example.org/a?b=1&c=2"
        assert "noopener" in (await link.get_attribute("rel") or "")
        assert await link.get_attribute("target") == "_blank"
        assert await text.locator("sub").first.inner_text() == "2"
        assert "a type List<String> of the text" in await text.inner_text()
        assert await text.locator("li li").inner_text() == "inner"
        assert "☑ done" in await text.inner_text()
        assert "twice" in await text.locator("blockquote").inner_text()
        assert await text.locator("td[align=right] math").count() == 1
        assert await text.locator(".code-head > span").inner_text() == "python"
        assert await text.locator("pre").inner_text() == 'if a < b:\n\n    print("&amp;")'
        assert "It costs $5 and $10, but" in await text.inner_text()
        assert await text.locator(".maths math").count() == 5
        assert await text.locator(".maths.display math").count() == 2
        assert await text.locator("munderover").count() >= 1
        assert await text.locator(".maths code").inner_text() == r"$\notacommand{x}$"
        assert await text.locator("a", has_text="the note").count() == 1


async def test_the_copy_buttons_copy() -> None:
    browser = {"permissions": ["clipboard-read", "clipboard-write"]}
    async with chatting(ANSWER, browser=browser) as (_, page):
        await ask(page, "Show all.")
        await page.wait_for_selector(DONE)
        await page.locator(".code-head button").click()
        await page.get_by_text("Copied").wait_for()
        copied = await page.evaluate("navigator.clipboard.readText()")
        assert copied == 'if a < b:\n\n    print("&amp;")'
        await page.locator(f"{DONE} footer").get_by_role("button", name="Copy").click()
        await page.get_by_text("Copied").nth(1).or_(page.get_by_text("Copied")).first.wait_for()
        await page.wait_for_timeout(100)
        assert await page.evaluate("navigator.clipboard.readText()") == ANSWER


async def test_nothing_that_a_model_writes_runs_or_loads() -> None:
    async with chatting() as (_, page):
        elsewhere: list[str] = []
        page.on(
            "request",
            lambda request: elsewhere.append(request.url) if "evil" in request.url else None,
        )
        for text in HOSTILE:
            await render(page, text)
            await page.hover("#turns")
            bad = await page.evaluate(
                """[...document.querySelectorAll("#turns *")].filter((node) =>
                  /^(script|img|iframe|svg|style|form|input|base|meta|object|embed|link)$/i.test(
                    node.localName)
                  || [...node.attributes].some(({ name }) => /^on|^src|^action|^id$/.test(name))
                  || (node.href && !/^(https?|mailto):/.test(node.getAttribute("href")))
                  || getComputedStyle(node).position === "fixed").map((node) => node.outerHTML)"""
            )
            assert bad == [], text[:100]
            for link in await page.locator("#turns a").all():
                assert "javascript" not in (await link.get_attribute("href") or "")
        assert await page.evaluate("window.ran") is None
        assert elsewhere == []
        assert await page.evaluate("document.querySelector('#turns').scrollWidth <= innerWidth")


async def test_a_hostile_answer_title_and_tool_do_not_run() -> None:
    text = "".join(f"{part}\n\n" for part in HOSTILE[:24])
    async with chatting(text) as (live, page):
        await ask(page, "<img src=x onerror='window.ran = 1'>")
        await page.wait_for_selector(DONE)
        assert await page.inner_text("#title") == "<img src=x onerror='window.ran = 1'>"
        say(live, "Fine.")
        await page.reload()
        await page.wait_for_selector(DONE)
        assert await page.evaluate("window.ran") is None


async def test_no_script_of_the_page_can_parse_a_string() -> None:
    """The policy is the second wall: it holds where the page's own care would not."""
    async with chatting(browser={"provoked": "The action has been blocked."}) as (_, page):
        refused = await page.evaluate(
            """() => [
              () => { document.body.innerHTML = "<b>x</b>"; },
              () => document.body.insertAdjacentHTML("beforeend", "<b>x</b>"),
              () => { document.createElement("script").src = "/x.js"; },
              () => document.createElement("script").text = "window.ran = 1",
              () => setTimeout("window.ran = 1"),
              () => trustedTypes.createPolicy("own", { createHTML: (text) => text }),
            ].map((act) => { try { act(); return ""; } catch (error) { return error.name; } })"""
        )
        assert all(refused), refused
        assert await page.evaluate("window.ran") is None


async def test_a_stream_shows_what_the_whole_text_shows() -> None:
    """Also where text at the end changes what was shown before it."""
    texts = [
        ANSWER,
        "para\n===\n\n- a\n\n- b\n\n      code\n\n1. x\n1. y\n\ntext [a] and [b]\n\n[a]: https://a.org",
        "```a\nb\n~~~\nc\n```\nd\n\n~~~\ne",
        "| a |\n|--|\n| b |\n\nc\r\nd\r\n\r\n* * *\n\ne",
        "\n\n\n  x\n\n\n\n",
    ]  # fmt: skip
    async with chatting() as (_, page):
        for text in texts:
            same = await page.evaluate(
                """async (text) => {
                  const { MarkdownView } = await import("/ui/chat/markdown-view.js");
                  const [grown, whole] = [new MarkdownView("a"), new MarkdownView("a")];
                  for (let end = 1; end <= text.length; end += 1) grown.show(text.slice(0, end));
                  grown.show(text, { whole: true });
                  whole.show(text, { whole: true });
                  return [grown.node.innerHTML, whole.node.innerHTML];
                }""",
                text,
            )
            assert same[0] == same[1]


async def test_a_long_answer_stays_cheap() -> None:
    """The last pieces of a long answer take no longer than the first ones."""
    async with chatting() as (_, page):
        early, late = await page.evaluate(
            """async () => {
              const { MarkdownView } = await import("/ui/chat/markdown-view.js");
              const view = new MarkdownView("text markdown");
              const code = "```js\\nlet a = 1;\\n```\\n\\n";
              const part = `Some **text** of a paragraph with $x^2$.\\n\\n${code}`;
              const times = [];
              let text = "";
              for (let round = 0; round < 1500; round += 1) {
                text += part;
                const began = performance.now();
                view.show(text);
                times.push(performance.now() - began);
              }
              const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];
              return [median(times.slice(50, 200)), median(times.slice(-150))];
            }"""
        )
        assert late < 5 * early + 1
