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
    "README.md",
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
