"""Logits processors: user-defined Python functions that change a request's logits before sampling.

A request names the factory of a processor. Factories come from plugins (entry points of
`moeserve.logits_processors`) and from settings, never from a request. The front end checks names;
only engines import the factories.
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

# (prompt_ids, output_ids, logits) -> logits. `logits` is float32 [vocabulary] on the device, a copy
# that may be changed in place. It must be a pure function, because a step may be repeated, may run
# on several ranks, and may verify drafts, which are in output_ids as if they were chosen.
LogitsProcessor = Callable[[Sequence[int], Sequence[int], "Tensor"], "Tensor"]
# Makes a processor from the `args` of a request.
LogitsProcessorFactory = Callable[[dict[str, Any]], LogitsProcessor]

PLUGINS: Registry[LogitsProcessorFactory] = Registry("moeserve.logits_processors", {})
# Functions given to `with_processors` in this process, by their source in the settings: "local:0"
_local: dict[str, LogitsProcessorFactory] = {}
_numbers = count()


def with_processors(
    config: Config, given: Mapping[str, LogitsProcessorFactory | str], owner: object
) -> Config:
    """Return the config with additional factories, by name.

    given: functions, which are kept as long as `owner` lives, or "package.module:name" to import.

    Raises ConfigError for a function if engines are separate processes, which must import it.
    """
    settings = list(config.model.logits_processors)
    for name, source in given.items():
        if not isinstance(source, str):
            if config.parallel.num_ranks > 1:
                raise ConfigError(
                    f"logits_processors: {name!r} must be 'package.module:name', which engine "
                    f"processes can import (dp or tp is above 1), got {source!r}"
                )
            function = source
            source = f"local:{next(_numbers)}"
            _local[source] = function
            weakref.finalize(owner, _local.pop, source, None)
        settings.append(f"{name}={source}")
    return replace(config, model=replace(config.model, logits_processors=tuple(settings)))


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
    """Return the names of all processors, from settings and from plugins."""
    return {*entries_of(settings), *PLUGINS}


def checked_processors(
    requested: LogitsProcessors, known: Collection[str]
) -> tuple[tuple[str, str], ...]:
    """Return name and args (as JSON) of each requested processor. Raises InvalidRequest."""
    checked = []
    try:
        for item in requested:
            spec = msgspec.convert(
                {"name": item} if isinstance(item, str) else item, LogitsProcessorSpec
            )
            args = msgspec.json.encode(spec.args).decode()
            if spec.name not in known:
                raise ValueError(
                    f"{spec.name!r} is unknown; known: {', '.join(sorted(known)) or 'none'}"
                )
            if len(args) > MAX_ARGS:
                raise ValueError(
                    f"args of {spec.name!r} have {len(args)} bytes of JSON; at most {MAX_ARGS} are "
                    "allowed"
                )
            checked.append((spec.name, args))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"logits_processors: {error}", param="logits_processors") from error
    return tuple(checked)


class ProcessorFactories:
    """The factories of an engine, imported when it starts.

    A factory from settings replaces a plugin of the same name. Raises ConfigError for a factory
    that cannot be imported.
    """

    def __init__(self, settings: Sequence[str] = ()) -> None:
        PLUGINS.load_plugins()
        self._factories: dict[str, LogitsProcessorFactory] = {}
        for name, entry in entries_of(settings).items():
            try:
                self._factories[name] = _local.get(entry.value) or entry.load()
            except Exception as error:
                raise ConfigError(
                    f"logits_processors: {name}={entry.value} cannot be imported: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def make(self, name: str, args: str) -> LogitsProcessor:
        """Create a processor that `checked_processors` accepted.

        Any exception of its factory is passed on.
        """
        factory = self._factories.get(name) or PLUGINS[name]
        return factory(msgspec.json.decode(args))
