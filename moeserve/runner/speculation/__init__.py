"""Proposers of drafts, and where drafts meet the step."""

from __future__ import annotations

from moeserve.errors import ConfigError
from moeserve.runner.speculation.base import Proposer
from moeserve.runner.tables import Upload
from moeserve.speculation import SpeculationSpec


def make_proposer(spec: SpeculationSpec, slots: int, upload: Upload) -> Proposer:
    """Returns the proposer that `--speculate` names."""
    raise ConfigError(f"speculate={spec}: not available")
