"""Documents name only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = [
    "docs/architecture.md",
    "docs/expert-parallelism.md",
    "docs/speculation.md",
    "docs/reading-the-code.md",
    "CONTRIBUTING.md",
]


@pytest.mark.parametrize("doc", DOCS)
def test_every_file_named_exists(doc):
    names = re.findall(
        r"`((?!/)[\w./]+(?:\.(?:py|md|txt|toml)|/))(?: [^`]*)?`", (ROOT / doc).read_text()
    )
    assert names
    missing = [n for n in names if not (ROOT / n).exists() and not (ROOT / "moeserve" / n).exists()]
    assert missing == []


def test_every_package_is_in_the_table_of_folders():
    text = (ROOT / "docs/architecture.md").read_text()
    packages = [p.name for p in (ROOT / "moeserve").iterdir() if (p / "__init__.py").exists()]
    assert [p for p in packages if f"`{p}/`" not in text] == []


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_to_headings(page):
    broken = []
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text()):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (heading and heading not in headings_of(target)):
            broken.append(link)
    assert broken == []


def headings_of(page):
    """Return the anchors that a page's headings get on a code host."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert [name for name in pages if f"({name})" not in index] == []
