"""Where a front end gets its engine from: one interface, three ways in which engines may run."""

from moeserve.launch.child_engine import ChildEngine
from moeserve.launch.fleet import Fleet
from moeserve.launch.interface import EngineGone, EngineLink, FromEngine, RequestsLost, Resized
from moeserve.launch.local_engine import LocalEngine

__all__ = ["ChildEngine", "EngineGone", "EngineLink", "Fleet", "FromEngine", "LocalEngine", "RequestsLost", "Resized"]
