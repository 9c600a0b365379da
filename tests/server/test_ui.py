"""The page at `/`: its files, their headers, and that it needs nothing from elsewhere. The
browser's side is in tests/integration/test_ui_in_browser.py."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files

import pytest

ASSETS = sorted((files("moeserve") / "assets" / "ui").iterdir(), key=lambda entry: entry.name)
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
named = pytest.mark.parametrize("asset", ASSETS, ids=lambda asset: asset.name)


async def test_files_are_served_with_their_types_and_a_strict_policy(live):
    for asset in [None, *ASSETS]:
        path, kind = (
            (f"/ui/{asset.name}", asset.name.rpartition(".")[2]) if asset else ("/", "html")
        )
        async with live.session.get(live.url + path) as response:
            assert (response.status, response.content_type) == (200, TYPES[kind])
            assert (
                await response.read()
                == (asset or files("moeserve") / "assets/ui/index.html").read_bytes()
            )
            policy = dict(
                part.strip().split(" ", 1)
                for part in response.headers["Content-Security-Policy"].split(";")
            )
        assert (
            policy.pop("default-src")
            == policy.pop("frame-ancestors")
            == policy.pop("base-uri")
            == "'none'"
        )
        assert set(policy.values()) <= {
            "'self'",
            "'none'",
        }  # nothing inline, nothing evaluated, nothing from elsewhere
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        headers = {"If-None-Match": response.headers["ETag"]}
        async with live.session.get(live.url + path, headers=headers) as again:
            assert (again.status, await again.read()) == (304, b"")
        async with live.session.head(live.url + path) as head:
            assert (head.status, head.headers["ETag"]) == (200, response.headers["ETag"])


@pytest.mark.parametrize(
    "name", ["", "nothing.js", "../demo/config.json", "..%2f..%2fconfig.py", "index.html/", "%00"]
)
async def test_only_the_files_themselves_are_served(live, name):
    answer = await live.raw(
        f"GET /ui/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )
    assert answer.startswith(b"HTTP/1.1 404")


async def test_the_page_loads_without_a_key_and_leaves_other_paths_alone(launch):
    async with launch(api_key=("right",)) as live:
        for path, status in (
            ("/", 200),
            ("/ui/main.js", 200),
            ("/v1/models", 401),
            ("/nothing", 401),
        ):
            async with live.session.get(live.url + path) as response:
                assert response.status == status
        async with live.session.post(live.url + "/") as response:
            assert response.status == 401


async def test_it_can_be_switched_off(launch):
    async with launch(ui=False) as live:
        for path in ("/", "/ui/main.js"):
            assert (await live.get(path))[0] == 404


@named
def test_nothing_comes_from_elsewhere(asset):
    """Nothing is inline either, because the policy would block it."""
    text = asset.read_text("utf-8")
    urls = set(
        re.findall(
            r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", re.sub(r"^\s*//.*$", "", text, flags=re.M)
        )
    )
    assert urls <= {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text
    assert "eval(" not in text
    if asset.name == "index.html":
        assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)", text)
        linked = re.findall(r"""(?:src|href)="ui/([^"]+)""", text)
        assert {"style.css", "main.js", "theme.js", "icon.svg"} == set(linked)
    for name in re.findall(r'from "\./([^"]+)"', text):
        assert name in {other.name for other in ASSETS}


@named
def test_scripts_parse(asset):
    node = shutil.which("node")
    if node is None or not asset.name.endswith(".js"):
        pytest.skip("needs node, and a script")
    kind = "commonjs" if asset.name == "theme.js" else "module"
    done = subprocess.run(
        [node, f"--input-type={kind}", "--check", "-"],
        input=asset.read_bytes(),
        capture_output=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr.decode()


def test_every_element_that_a_script_looks_up_is_in_the_page():
    page = (files("moeserve") / "assets/ui/index.html").read_text("utf-8")
    ids = set(re.findall(r'\bid="([\w-]+)"', page))
    labelled = re.findall(r'(?:for|aria-labelledby)="([\w-]+)"', page)
    asked = [
        name
        for asset in ASSETS
        for name in re.findall(r'\$\("([\w-]+)"\)', asset.read_text("utf-8"))
    ]
    assert {*asked, *labelled} - ids == {"tooltip"}  # made when it is first needed
