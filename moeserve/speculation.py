"""The setting `speculate`: which proposer drafts tokens, and how many per step.

Packages add proposers by entry points of "moeserve.proposers". An entry is a callable that takes
`ProposerFacts` and returns a `Proposer` (runner/speculation/base.py). This module does not import
torch, because settings are checked without it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moeserve.errors import ConfigError
from moeserve.plugins import Registry

PROPOSERS: Registry[Callable[[Any], Any]] = Registry(
    "moeserve.proposers",
    {
        "ngram": "moeserve.runner.speculation.ngram:make",
        "suffix": "moeserve.runner.speculation.suffix:make",
        "model": "moeserve.runner.speculation.model_proposer:make",
        "mtp": "moeserve.runner.speculation.model_proposer:make",
        "eagle": "moeserve.runner.speculation.model_proposer:make",
    },
    reserved=("auto",),
)
MAX_DRAFTS = 15  # and the last known token: 16 rows meet two blocks of 16 tokens at most
_NUM_DRAFTS = {"ngram": 4, "suffix": 8, "model": 3, "mtp": 1, "eagle": 3}  # per kind, unless stated
_NUM_PLUGIN_DRAFTS = 4
_NUM_AUTO_DRAFTS = _NUM_DRAFTS | {"ngram": 8, "mtp": 3}  # only as many as pay are verified
_WITH_PATH = ("model", "eagle")
_COUNT = re.compile(r"(?:(.*):)?([+-]?[0-9]+)", re.DOTALL)  # of "/a:b:3": "/a:b" and 3
_FORMS = (
    "ngram[:4], suffix[:8], mtp[:1], model:PATH[:3], eagle:PATH[:3], auto or auto: before one "
    "of these "
    "(auto:ngram[:8], auto:mtp[:3])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSpec:
    """A proposer and how many tokens it drafts."""

    kind: str  # a name of `PROPOSERS`, or auto, which `resolve` replaces
    path: str = ""  # the checkpoint of kinds model and eagle; any text for a plugin
    num_drafts: int = 0  # most drafts per row and step
    auto: bool = False  # fewer drafts, or none, where they do not pay

    @classmethod
    def parse(cls, value: str) -> "SpeculationSpec":
        """Returns what "ngram:4", "model:PATH:3" or "auto:suffix" says. Raises ConfigError.

        A path may have colons: only an integer behind the last one is the number of drafts.
        """
        kind, colon, rest = value.partition(":")
        if kind == "auto":
            if not colon:
                return cls(kind="auto", auto=True)
            kind, colon, rest = rest.partition(":")
        auto = value.startswith("auto:")
        is_plugin = kind in PROPOSERS.plugins
        if kind not in _NUM_DRAFTS and not is_plugin:
            plugins = "".join(f", {name}[:TEXT][:K]" for name in PROPOSERS.plugins)
            raise ConfigError(
                f"speculate={value!r}: {kind!r} is not a proposer. Possible are {_FORMS}{plugins}."
            )
        path = rest
        num_drafts = (_NUM_AUTO_DRAFTS if auto else _NUM_DRAFTS).get(kind, _NUM_PLUGIN_DRAFTS)
        if (match := _COUNT.fullmatch(rest)) and (match[1] is not None or kind not in _WITH_PATH):
            path = match[1] or ""
            num_drafts = int(match[2])
        if (bool(path) != (kind in _WITH_PATH) and not is_plugin) or (colon and not rest):
            needs = (
                "needs the path of a checkpoint"
                if kind in _WITH_PATH
                else "takes at most a number of drafts"
            )
            raise ConfigError(f"speculate={value!r}: {kind} {needs}. Possible are {_FORMS}.")
        if not 1 <= num_drafts <= MAX_DRAFTS:
            raise ConfigError(
                f"speculate={value!r}: must have 1 to {MAX_DRAFTS} drafts, got {num_drafts}"
            )
        return cls(kind=kind, path=path, num_drafts=num_drafts, auto=auto)

    def resolve(self, *, has_mtp: bool) -> "SpeculationSpec":
        """Returns the proposer for a model. Kind auto is the checkpoint's own head if there is one,
        otherwise n-grams.

        Raises ConfigError if the model lacks the head that kind mtp needs.
        """
        if self.kind == "mtp" and not has_mtp:
            raise ConfigError(
                f"speculate={str(self)!r}: the checkpoint has no MTP head. Possible are {_FORMS}."
            )
        if self.kind != "auto":
            return self
        kind = "mtp" if has_mtp else "ngram"
        return replace(self, kind=kind, num_drafts=_NUM_AUTO_DRAFTS[kind])

    def __str__(self) -> str:
        """Returns what `parse` reads back as the same."""
        if self.kind == "auto":
            return "auto"
        return ":".join(
            filter(None, ("auto" * self.auto, self.kind, self.path, str(self.num_drafts)))
        )
