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
# Drafts and the last sampled token are 16 tokens per request and step, in two KV blocks of 16 at
# most.
MAX_DRAFTS = 15
# Drafts per step by default
_NUM_DRAFTS = {"ngram": 4, "suffix": 8, "model": 3, "mtp": 1, "eagle": 3}
_NUM_PLUGIN_DRAFTS = 4
# With "auto:" only as many drafts as pay are verified, so the limit may be higher.
_NUM_AUTO_DRAFTS = _NUM_DRAFTS | {"ngram": 8, "mtp": 3}
_WITH_PATH = ("model", "eagle")  # kinds that need the path of a checkpoint
_COUNT = re.compile(r"(?:(.*):)?([+-]?[0-9]+)", re.DOTALL)  # "/a:b:3" -> "/a:b" and "3"
_FORMS = (
    "ngram[:4], suffix[:8], mtp[:1], model:PATH[:3], eagle:PATH[:3], auto, or auto: before one "
    "of these (auto:ngram[:8], auto:mtp[:3])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSpec:
    """A proposer, and how many tokens it drafts."""

    kind: str  # a name of `PROPOSERS`, or "auto", which `resolve` replaces
    path: str = ""  # the checkpoint of kinds model and eagle; any text for a plugin
    num_drafts: int = 0  # maximum drafts per request and step
    auto: bool = False  # draft fewer tokens, or none, when drafts do not pay

    @classmethod
    def parse(cls, value: str) -> "SpeculationSpec":
        """Parse a setting such as "ngram:4", "model:PATH:3" or "auto:suffix".

        A path may contain colons: only an integer after the last one is the number of drafts.
        Raises ConfigError.
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
                f"speculate={value!r}: {kind!r} is not a proposer. Supported: {_FORMS}{plugins}."
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
                else "takes only a number of drafts"
            )
            raise ConfigError(f"speculate={value!r}: {kind} {needs}. Supported: {_FORMS}.")
        if not 1 <= num_drafts <= MAX_DRAFTS:
            raise ConfigError(
                f"speculate={value!r}: must have 1 to {MAX_DRAFTS} drafts, got {num_drafts}"
            )
        return cls(kind=kind, path=path, num_drafts=num_drafts, auto=auto)

    def resolve(self, *, has_mtp: bool) -> "SpeculationSpec":
        """Return the spec for a model, in which kind auto is the MTP head if any, otherwise ngram.

        Raises ConfigError for kind mtp if the checkpoint has no MTP head.
        """
        if self.kind == "mtp" and not has_mtp:
            raise ConfigError(
                f"speculate={str(self)!r}: the checkpoint has no MTP head. Supported: {_FORMS}."
            )
        if self.kind != "auto":
            return self
        kind = "mtp" if has_mtp else "ngram"
        return replace(self, kind=kind, num_drafts=_NUM_AUTO_DRAFTS[kind])

    def __str__(self) -> str:
        """Return the setting that `parse` turns into this spec."""
        if self.kind == "auto":
            return "auto"
        parts = ("auto" if self.auto else "", self.kind, self.path, str(self.num_drafts))
        return ":".join(filter(None, parts))
