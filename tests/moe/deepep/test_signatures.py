"""The fake's signatures, and the adapters' calls, against what was recorded of the releases; those
against the package.

DEEPEP_SOURCE=<wheel or folder> compares a release that is not installed; tools/record_deepep.py
records a new one.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from moeserve.moe.ubatch import UBatch
from tests.moe.contract.test_contract import there_and_back
from tests.moe.deepep import fake
from tests.moe.deepep.fake.utils import comm
from tests.moe.deepep.ranks import LOCAL, NAMES, joined, on_all, some
from tools.record_deepep import record

RELEASES: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("signatures.json").read_text()
)
MAIN = "deep_ep 2.1.0"  # the others may take more arguments
CLASSES = {
    name: getattr(fake, name) for name in ("Buffer", "ElasticBuffer", "EPHandle", "EventOverlap")
}


def signature(parameters: str) -> inspect.Signature:
    """Return the signature of a recorded text.

    Defaults are literals or names of missing modules.
    """
    space: dict[str, Any] = {"torch": Any, "dist": Any}
    exec(f"def recorded({parameters}): ...", space)
    return inspect.signature(space["recorded"])


def plain(function: Any) -> list[tuple[str, Any]]:
    """Names and defaults."""
    given = function if isinstance(function, inspect.Signature) else inspect.signature(function)
    return [(name, parameter.default) for name, parameter in given.parameters.items()]


def offered() -> Iterator[tuple[str, Any]]:
    """Return the package's public methods and functions that the fake has."""
    yield "destroy_all_managed_nccl_comm", comm.destroy_all_managed_nccl_comm
    for class_name, kind in CLASSES.items():
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if name == "__init__" or not name.startswith("_"):
                yield f"{class_name}.{name}", method


@pytest.mark.parametrize(("name", "method"), list(offered()))
def test_the_fake_is_as_recorded(name: str, method: Any) -> None:
    assert plain(method) == plain(signature(RELEASES[MAIN][name]))


@pytest.mark.parametrize("release", [release for release in RELEASES if release != MAIN])
@pytest.mark.parametrize("name", [name for name, _ in offered()])
def test_other_releases_only_add(release: str, name: str) -> None:
    main, other = (dict(plain(signature(RELEASES[r][name]))) for r in (MAIN, release))
    assert main.items() <= other.items()
    assert all(other[added] is not inspect.Parameter.empty for added in other.keys() - main.keys())


@pytest.mark.parametrize("adapter", NAMES)
def test_the_adapters_calls_mean_the_same_to_every_release(
    adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moeserve.moe.all2all.deepep import ADAPTERS

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for name, method in offered():
        if "." not in name:
            continue
        kind = CLASSES[name.split(".")[0]]
        attribute = name.split(".")[1]

        def noting(*args: Any, name: str = name, method: Any = method, **kwargs: Any) -> Any:
            calls.append((name, args, kwargs))
            return method(*args, **kwargs)

        is_static = isinstance(inspect.getattr_static(kind, attribute), staticmethod)
        monkeypatch.setattr(kind, attribute, staticmethod(noting) if is_static else noting)
    parts = [some(5, 2, rank) for rank in range(2)]
    with joined(ADAPTERS[adapter], 2) as backends:
        on_all(backends, lambda r, backend: there_and_back(backend, UBatch(), parts[r], r * LOCAL))
    assert {name.split(".")[1] for name, _, _ in calls} > {"__init__", "destroy"}
    for name, args, kwargs in calls:
        bound = [
            signature(recorded[name]).bind(*args, **kwargs).arguments
            for recorded in RELEASES.values()
        ]
        assert all(one.keys() == bound[0].keys() for one in bound), name


def real() -> Path:
    """The package that is installed, or the one that is named."""
    if source := os.environ.get("DEEPEP_SOURCE"):
        return Path(source)
    spec = find_spec("deep_ep")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("deep_ep is not installed, and DEEPEP_SOURCE names no wheel or folder of it")
    return Path(spec.submodule_search_locations[0])


def test_the_record_holds_for_the_package_that_is_here() -> None:
    """A release that is none of the recorded ones must at least only add to them."""
    found = record(real())
    if found in RELEASES.values():
        return
    for name, _ in offered():
        main = dict(plain(signature(RELEASES[MAIN][name])))
        here = dict(plain(signature(found[name])))
        assert main.items() <= here.items(), (name, versions())
        assert all(
            here[added] is not inspect.Parameter.empty for added in here.keys() - main.keys()
        ), name


def versions() -> list[str]:
    try:
        return [f"{name} {version(name)}" for name in packages_distributions().get("deep_ep", [])]
    except PackageNotFoundError:
        return []


def test_a_release_that_differs_is_noticed(tmp_path: Path) -> None:
    """The comparison itself: sources with a parameter renamed."""
    (tmp_path / "deep_ep").mkdir()
    lines = [*(f"class {name}:\n" for name in CLASSES), ""]
    for name, parameters in RELEASES[MAIN].items():
        if "." not in name:
            lines[-1] += f"def {name}({parameters}): ...\n"
            continue
        kind, method = name.split(".")
        changed = (
            parameters.replace("return_recv_hook", "hook")
            if method == "low_latency_combine"
            else parameters
        )
        lines[list(CLASSES).index(kind)] += f"    def {method}({changed}): ...\n"
    (tmp_path / "deep_ep" / "all.py").write_text("".join(lines))
    found = record(tmp_path)
    assert [name for name in found if found[name] != RELEASES[MAIN][name]] == [
        "Buffer.low_latency_combine"
    ]
    with pytest.raises(ValueError, match="no Python sources"):
        record(tmp_path / "deep_ep" / "nothing")
