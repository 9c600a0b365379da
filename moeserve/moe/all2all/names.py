"""The names of all2all backends, for those who must not import torch to check a setting."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points

from moeserve.errors import ConfigError

GROUP = "moeserve.all2all"  # of entry points, by which other packages add theirs
DEEPEP = ("deepep_ht", "deepep_ll", "deepep_v2")
AUTO = {  # by device, in order of preference
    "cpu": ("shm", "torch", "allgather"),
    "cuda": ("deepep_v2", "deepep_ht", "deepep_ll", "cuda_ipc", "torch", "allgather"),
}


def foreign() -> list[EntryPoint]:
    """What other packages offer."""
    return list(entry_points(group=GROUP))


def check_name(asked: str) -> None:
    """Raises ConfigError for a backend that nobody offers."""
    known = list(dict.fromkeys(("local", *AUTO["cpu"], *AUTO["cuda"], *(entry.name for entry in foreign()))))
    if asked not in ("auto", *known):
        near = get_close_matches(asked, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no all2all backend {asked!r}; {hint}known: auto, {', '.join(known)}")
