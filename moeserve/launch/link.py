"""Where a front end gets its engine from: one interface, two places in which the engine may run."""

from moeserve.launch.child_engine import ChildEngine
from moeserve.launch.interface import EngineGone, EngineLink, FromEngine
from moeserve.launch.local_engine import LocalEngine

__all__ = ["ChildEngine", "EngineGone", "EngineLink", "FromEngine", "LocalEngine"]
