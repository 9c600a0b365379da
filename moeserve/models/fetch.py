"""Get a model by name: a path is left as it is, and a model on a hub is downloaded if need be.

A complete copy in the cache is used without asking the hub, so that a start needs no network, and
the next start serves the same weights. `moeserve pull` gets a newer revision.
"""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from moeserve.actor.process import to_stderr
from moeserve.config import Config
from moeserve.hub.cache import CachedRepo
from moeserve.hub.names import HubName
from moeserve.hub.progress import Report, TerminalProgress
from moeserve.loader.files import CONFIG, PARAMS
from moeserve.loader.model_dir import NotCached, cached_model, hub_name_of, resolve_model_dir
from moeserve.models.hf_config import read_model_spec
from moeserve.speculation import SpeculationSpec

log = logging.getLogger(__name__)


async def local_config(config: Config, report: Report) -> Config:
    """Return the settings with the path of the model, which is downloaded if it is not here.

    Downloads a draft model as well, whose name stays. Raises CheckpointError.
    """
    draft = _draft_of(config)
    if draft is not None:  # first, because it is small: a wrong name is told at once
        await fetch(draft, report, is_draft=True)
    return await _with_local_model(config, report)


def _draft_of(config: Config) -> HubName | None:
    """Return the name of the draft model on a hub, None if there is none."""
    if config.scheduler.speculate is None:
        return None
    speculation = SpeculationSpec.parse(config.scheduler.speculate)
    return hub_name_of(speculation.path) if speculation.kind in ("model", "eagle") else None


async def _with_local_model(config: Config, report: Report) -> Config:
    text = config.model.model
    name = hub_name_of(text)
    if name is None:
        return config
    path = await fetch(name, report)
    served = str(name) if "//" in text else text
    if "," in served:  # it would be read as several names
        served = name.repo
    model = replace(
        config.model,
        model=str(path),
        served_model_name=config.model.served_model_name or served,
    )
    return replace(config, model=model)


def local_config_now(config: Config) -> Config:
    """Return `local_config` in a program without an event loop, with progress on the terminal."""
    with TerminalProgress(to_stderr) as progress:
        return asyncio.run(local_config(config, progress))


async def fetch(name: HubName, report: Report, *, is_draft: bool = False) -> Path:
    """Return the path of a model on a hub. Download it if there is no complete copy.

    Raises CheckpointError; also, before the weights are downloaded, if the model cannot be served.

    is_draft: It is a draft model, which may be one that cannot be served alone.
    """
    copy = await asyncio.to_thread(cached_model, name)
    if copy is not None:
        log.info("%s: %s in the cache; `moeserve pull %s` gets a newer revision", name, copy, name)
        return copy
    return await pull(name, report, is_draft=is_draft)


async def pull(name: HubName, report: Report, *, is_draft: bool = False) -> Path:
    """Return the path of a model on a hub, at the hub's newest revision. Download what is missing.

    Raises as `fetch` does.
    """
    from moeserve.hub.download import download

    done = await download(name, report, check=_check_nothing if is_draft else _check)
    pinned = replace(name, revision=done.commit)
    copy = await asyncio.to_thread(cached_model, pinned)
    if copy is None:
        raise NotCached(name)
    return copy


def fetch_config(text: str) -> Path:
    """Return the path of a model of which only the config is read. Download only its small files.

    Raises CheckpointError.
    """
    name = hub_name_of(text)
    if name is None:
        return resolve_model_dir(text)
    copy = cached_model(name) or _cached_config(name)
    if copy is not None:
        return copy
    from moeserve.hub.download import download

    with TerminalProgress(to_stderr) as progress:
        downloading = download(name, progress, check=_check_nothing, configs_only=True)
        return asyncio.run(downloading).folder


def _cached_config(name: HubName) -> Path | None:
    """Return the folder of a copy that may lack weights, or None if there is no config either."""
    snapshot = CachedRepo.named(name.repo).snapshot(name.revision)
    if snapshot is None or name.quant:
        return None
    folder = snapshot / name.path
    return folder if any((folder / each).is_file() for each in (CONFIG, PARAMS)) else None


def _check(folder: Path) -> None:
    """Refuse a model whose config is not supported."""
    read_model_spec(folder)


def _check_nothing(folder: Path) -> None:
    """Accept any model."""
