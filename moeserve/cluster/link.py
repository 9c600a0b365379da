"""Where a front end gets its engine from: one interface, three ways in which engines may run."""

from moeserve.cluster.child_engine import ChildEngine
from moeserve.cluster.fleet import Fleet
from moeserve.cluster.interface import EngineGone, EngineLink, FromEngine, RequestsLost, Resized
from moeserve.cluster.local_engine import LocalEngine

__all__ = ["ChildEngine", "EngineGone", "EngineLink", "Fleet", "FromEngine", "LocalEngine", "RequestsLost", "Resized"]
