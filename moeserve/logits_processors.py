"""Logits processors: Python functions of the user that change a request's logits before sampling.

A request names factories. They come from plugins (entry points of `moeserve.logits_processors`)
and from settings, never from a request. The front end knows their names; only engines import them.
"""

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from moeserve.config import Config
from moeserve.errors import ConfigError, InvalidRequest
from moeserve.plugins import Registry
from moeserve.sampling import LogitsProcessors, LogitsProcessorSpec

if TYPE_CHECKING:
    from torch import Tensor

MAX_ARGS = 16 * 1024  # bytes of JSON per processor

# (prompt_ids, output_ids, logits) -> logits: float32 [vocabulary] on the device, a copy that may be
# changed. It must be a pure function: a step may be repeated, run on several ranks, and try drafts,
# which are in output_ids as if chosen.
LogitsProcessor = Callable[[Sequence[int], Sequence[int], "Tensor"], "Tensor"]
# makes a processor from the args of a request
LogitsProcessorFactory = Callable[[dict[str, Any]], LogitsProcessor]

PLUGINS: Registry[LogitsProcessorFactory] = Registry("moeserve.logits_processors", {})
_local: dict[str, LogitsProcessorFactory] = {}  # functions of this process, as settings call them
_numbers = count()


def with_processors(
    config: Config, given: Mapping[str, LogitsProcessorFactory | str], owner: object
) -> Config:
    """Returns the settings with factories by name: functions, which live as long as `owner`, or
    "package.module:name".

    Raises ConfigError for a function if engines are other processes."""
    found = list(config.model.logits_processors)
    for name, source in given.items():
        if not isinstance(source, str):
            if config.parallel.num_ranks > 1:
                what = (
                    "must be 'package.module:name', which engines of dp or tp above 1 can "
                    f"import, got {source!r}"
                )
                raise ConfigError(f"logits_processors: {name!r} {what}")
            function = source
            source = f"local:{next(_numbers)}"
            _local[source] = function
            weakref.finalize(owner, _local.pop, source, None)
        found.append(f"{name}={source}")
    return replace(config, model=replace(config.model, logits_processors=tuple(found)))


def entries_of(settings: Sequence[str]) -> dict[str, EntryPoint]:
    """Return the entry point of each "name=package.module:name" by name. Raises ConfigError."""
    entries = {}
    for setting in settings:
        name, _, source = setting.partition("=")
        if not name or ":" not in source or not EntryPoint.pattern.match(source):
            raise ConfigError(
                f"logits_processors: must be NAME=package.module:name, got {setting!r}"
            )
        entries[name] = EntryPoint(name, source, PLUGINS.group)
    return entries


def known_names(settings: Sequence[str]) -> Collection[str]:
    """Return the names of all processors, of settings and of plugins."""
    return {*entries_of(settings), *PLUGINS}


def checked_processors(
    asked: LogitsProcessors, known: Collection[str]
) -> tuple[tuple[str, str], ...]:
    """Returns (name, args as JSON) of each processor that a request asks for. Raises
    InvalidRequest.
    """
    found = []
    try:
        for item in asked:
            spec = msgspec.convert(
                {"name": item} if isinstance(item, str) else item, LogitsProcessorSpec
            )
            args = msgspec.json.encode(spec.args).decode()
            if spec.name not in known:
                raise ValueError(
                    f"there is no {spec.name!r} here; known: {', '.join(sorted(known)) or 'none'}"
                )
            if len(args) > MAX_ARGS:
                raise ValueError(
                    f"args of {spec.name!r} have {len(args)} bytes of JSON; {MAX_ARGS} may be"
                )
            found.append((spec.name, args))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"logits_processors: {error}", param="logits_processors") from error
    return tuple(found)


class ProcessorFactories:
    """The factories of an engine, imported at start. Settings precede plugins of the same name.

    Raises ConfigError for one that cannot be imported.
    """

    def __init__(self, settings: Sequence[str] = ()) -> None:
        PLUGINS.load_plugins()
        self._factories: dict[str, LogitsProcessorFactory] = {}
        for name, entry in entries_of(settings).items():
            try:
                self._factories[name] = _local.get(entry.value) or entry.load()
            except Exception as error:
                what = f"{entry.value} cannot be imported: {type(error).__name__}: {error}"
                raise ConfigError(f"logits_processors: {name}={what}") from error

    def make(self, name: str, args: str) -> LogitsProcessor:
        """Return a processor that `checked_processors` accepted. Raises what its factory raises."""
        factory = self._factories.get(name) or PLUGINS[name]
        return factory(msgspec.json.decode(args))
