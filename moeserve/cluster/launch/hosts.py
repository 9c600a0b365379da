"""The machines that a user names: --hosts, and the hostfiles of MPI and DeepSpeed."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moeserve.errors import ConfigError

MAX_HOSTS = 1024  # as --nnodes
_NAME = r"(?P<name>(?:[\w.+-]+@)?(?:\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9_][\w.-]*))"
_HOST = re.compile(rf"{_NAME}(?::(?P<after>[0-9]{{1,5}})|\s+slots\s*=\s*(?P<slots>[0-9]{{1,5}}))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine by the name that ssh knows. slots: its processes, if the user says how many."""

    name: str
    slots: int | None = None


def parse_hosts(text: str) -> list[Host]:
    """Reads --hosts: a, b:8 or user@c, by commas. Raises ConfigError."""
    return _several((_host(word.strip(), "--hosts") for word in text.split(",")), "--hosts")


def read_hostfile(path: str) -> list[Host]:
    """Reads a file with `host`, `host slots=8` or `host:8` in each line, and # comments. Raises ConfigError."""
    with ConfigError.instead_of((OSError, UnicodeDecodeError), f"--hostfile {path}"):
        lines = Path(path).read_text("utf-8-sig").splitlines()
    told = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
    return _several((_host(text, f"{path}, line {number}") for number, text in told if text), path)


def common_slots(hosts: Iterable[Host]) -> int | None:
    """Returns how many processes every host has, if that was said. Raises ConfigError where hosts differ."""
    found = {host.slots: host.name for host in hosts}
    if len(found) > 1:
        told = ", ".join(f"{name} has {slots or 'no number of'} slots" for slots, name in found.items())
        raise ConfigError(f"{told}: all machines get equally many engines, so give all the same slots, or none")
    return next(iter(found))


def _host(text: str, where: str) -> Host:
    match = _HOST.fullmatch(text)
    slots = match and (match["after"] or match["slots"])
    if match is None or (slots and int(slots) == 0):
        raise ConfigError(
            f"{where}: {text!r:.100} is no host; write `host`, `user@host`, `host slots=8` or `host:8` "
            "(8: its processes; ports of ssh belong into ~/.ssh/config or --ssh-option Port=N)"
        )
    return Host(match["name"].replace("[", "").replace("]", ""), int(slots) if slots else None)


def _several(hosts: Iterable[Host], where: str) -> list[Host]:
    found: list[Host] = []
    for host in hosts:
        if host.name in (other.name for other in found):
            raise ConfigError(f"{where}: {host.name} is named twice; a machine has one part, `slots` say how large")
        found.append(host)
    if not 1 <= len(found) <= MAX_HOSTS:
        raise ConfigError(f"{where}: names {len(found)} hosts, must be 1 to {MAX_HOSTS}")
    return found
