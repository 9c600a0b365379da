"""The page at `/`: its files, their headers, and that it needs nothing from elsewhere. The
browser's side is in tests/integration/test_ui_in_browser.py."""

from __future__ import annotations

import hashlib
import posixpath
import re
import shutil
import subprocess
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UI = files("moeserve") / "assets" / "ui"
PATHS = sorted(
    str(path.relative_to(str(UI))) for path in Path(str(UI)).rglob("*") if path.is_file()
)
TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}
SERVED = [path for path in PATHS if path.rpartition(".")[2] in TYPES]
OWN = [path for path in SERVED if not path.startswith("vendor/")]
# What npm's packages have in these versions; a newer version changes both.
VENDORED = {
    "marked.umd.js": (
        "marked 18.2.1",
        "marked",
        "bb95d4c15f1289f78486eaacebf3bb18688475ed58a040ef762ed49337090542",
    ),
    "purify.min.js": (
        "dompurify 3.5.0",
        "dompurify",
        "f69a46022ab1f53e969c8ebbca98172c8995785a9b3be72ea4a12d25b1a1bf67",
    ),
    "temml.min.js": (
        "temml 0.13.5",
        "temml",
        "1ab19148afe0dbc836b7a74f344071b3f3a70a7a8259ae4049e76894fcdf8d95",
    ),
    "Temml-Local.css": (
        "temml 0.13.5",
        "temml",
        "544f4e3fee4c36f4568e4f145fa626dc9573c5f4c96c523aadcc433c3989a239",
    ),
    "Temml.woff2": (
        "temml 0.13.5",
        "temml",
        "fc70501355ae6d38ff0b80f825af153557d5f2f474198d6b9b7dd2d3a291a0cc",
    ),
    "noto-sans-math-latin-400-normal.woff2": (
        "@fontsource/noto-sans-math 5.3.0",
        "noto-sans-math",
        "c39a9444f95747345dcbde1032ec0ea2af1db63dccf53a31b38a957bdcf4a01f",
    ),
}
named = pytest.mark.parametrize("path", OWN)


def text_of(path: str) -> str:
    return (UI / path).read_text("utf-8")


async def test_files_are_served_with_their_types_and_a_strict_policy(live):
    for name in ["", *SERVED]:
        path = f"/ui/{name}" if name else "/"
        kind = name.rpartition(".")[2] or "html"
        async with live.session.get(live.url + path) as response:
            assert (response.status, response.content_type) == (200, TYPES[kind])
            assert await response.read() == (UI / (name or "index.html")).read_bytes()
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
        assert policy.pop("require-trusted-types-for") == "'script'"
        assert policy.pop("trusted-types") == "dompurify"
        # Nothing inline, nothing evaluated, nothing from elsewhere.
        assert set(policy.values()) <= {"'self'", "'none'"}
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        headers = {"If-None-Match": response.headers["ETag"]}
        async with live.session.get(live.url + path, headers=headers) as again:
            assert (again.status, await again.read()) == (304, b"")
        async with live.session.head(live.url + path) as head:
            assert (head.status, head.headers["ETag"]) == (200, response.headers["ETag"])


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nothing.js",
        "../demo/config.json",
        "..%2f..%2fconfig.py",
        "index.html/",
        "%00",
        "chat",
        "chat/",
        "chat/../main.js",
        "vendor/LICENSE-temml.txt",
    ],
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
def test_nothing_comes_from_elsewhere(path):
    """Nothing is inline either, because the policy would block it."""
    text = text_of(path)
    urls = set(
        re.findall(
            r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", re.sub(r"^\s*//.*$", "", text, flags=re.M)
        )
    )
    assert urls <= {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text
    assert "eval(" not in text
    if path == "index.html":
        assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\ssrc=)", text)
    folder = path.rpartition("/")[0]
    linked = re.findall(r"""(?:src|href)="(ui/[^"]+)""", text) if path == "index.html" else []
    for target in [*linked, *re.findall(r"""(?:from |url\()"(\.[^"]+)""", text)]:
        found = posixpath.normpath(posixpath.join(folder, target.removeprefix("ui/")))
        assert found in SERVED


@named
def test_scripts_parse(path):
    node = shutil.which("node")
    if node is None or not path.endswith(".js"):
        pytest.skip("needs node, and a script")
    kind = "commonjs" if path == "theme.js" else "module"
    done = subprocess.run(
        [node, f"--input-type={kind}", "--check", "-"],
        input=(UI / path).read_bytes(),
        capture_output=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr.decode()


def test_every_element_that_a_script_looks_up_is_in_the_page():
    page = text_of("index.html")
    ids = set(re.findall(r'\bid="([\w-]+)"', page))
    labelled = re.findall(r'(?:for|aria-labelledby|aria-controls)="([\w-]+)"', page)
    asked = [
        name
        for path in OWN
        if path.endswith(".js")
        for name in re.findall(r'\$\("([\w-]+)"\)', text_of(path))
    ]
    assert {*asked, *labelled} - ids == {"tooltip"}  # made when it is first needed


def test_no_element_has_the_name_of_a_property_of_its_form():
    """A form's element with the id "reset" would hide the form's method of that name."""
    taken = {"reset", "submit", "elements", "action", "method", "name", "id", "title", "hidden"}
    fields = re.findall(r"<(?:button|input|select|textarea)[^>]*>", text_of("index.html"))
    names = re.findall(r'\b(?:id|name)="([\w-]+)"', " ".join(fields))
    assert len(names) > 20
    assert not taken & set(names)


def test_vendored_files_are_those_of_their_packages_and_have_licences():
    assert {path for path in SERVED if path.startswith("vendor/")} == {
        f"vendor/{name}" for name in VENDORED
    }
    for name, (_, licence, digest) in VENDORED.items():
        assert hashlib.sha256((UI / "vendor" / name).read_bytes()).hexdigest() == digest
        assert "ermission" in text_of(f"vendor/LICENSE-{licence}.txt")


def test_packages_carry_every_file_of_the_page():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = setup["tool"]["setuptools"]["package-data"]["moeserve"]
    package = Path(str(files("moeserve")))
    carried = {path for pattern in patterns for path in package.glob(pattern)}
    assert {package / "assets" / "ui" / path for path in PATHS} <= carried
    licences = {
        path for pattern in setup["project"]["license-files"] for path in ROOT.glob(pattern)
    }
    assert {ROOT / "moeserve/assets/ui" / path for path in PATHS if "LICENSE" in path} <= licences
