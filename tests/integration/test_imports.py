"""The package's imports: torch only where needed, and nothing that a plain install lacks."""

from __future__ import annotations

import subprocess
import sys


def test_decisions_and_the_front_end_load_no_torch():
    modules = [
        "moeserve.frontend.front_end",
        "moeserve.server.run",
        "moeserve.cli.main",
        "moeserve.engine.core",
    ]
    code = (
        f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'transformers') if m in"
        " sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True
    )
    assert run.stdout.strip() == "[]"


PLAIN_INSTALL = """
import importlib, pkgutil, sys
from importlib.metadata import packages_distributions, requires
from packaging.requirements import Requirement

needed = [Requirement(text) for text in requires("moeserve")]
plain = {one.name.lower() for one in needed if not (one.marker and "extra" in str(one.marker))}
extras = {one.name.lower() for one in needed} - plain - {"triton"}
tops = packages_distributions().items()
away = {top for top, of in tops if {name.lower() for name in of} <= extras}
assert {"pytest", "transformers"} <= away, away

class Away:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in away:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Away())
import moeserve
for module in pkgutil.walk_packages(moeserve.__path__, "moeserve."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        print(module.name, error)
"""


def test_a_plain_install_has_what_every_module_imports():
    """The packages of the extras are made absent, except triton, which comes with torch where there
    are cards.
    """
    run = subprocess.run(
        [sys.executable, "-c", PLAIN_INSTALL],
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    assert run.stdout == ""
