"""What all the files need to know of a server on several machines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

KEY = "/run/secrets/moeserve/cluster.key"  # in a container
USER_ID = 10001  # of the image's user
MARGIN_S = 15  # for the end of a server that has drained


@dataclass(frozen=True, slots=True)
class Deployment:
    """words: after `serve`. model: as given. drain_s: how long running requests may take at a stop."""

    words: Sequence[str]
    nodes: int
    model: Path | None
    rendezvous: str | None
    host_given: bool
    https: bool
    port: int
    drain_s: int
    image: str

    @property
    def words_for_all(self) -> list[str]:
        """The words of a server whose clients are on other machines."""
        return [*self.words, *(() if self.host_given else ("--host", "0.0.0.0"))]

    @property
    def model_folder(self) -> str | None:
        """The folder that has to be there on all machines, if the model is in one."""
        return str(self.model.parent) if self.model is not None and self.model.is_absolute() else None

    @property
    def stop_s(self) -> int:
        """How long a stop takes at most."""
        return self.drain_s + MARGIN_S


def as_yaml(head: str, *documents: dict[str, Any]) -> str:
    """Returns YAML documents below a comment."""
    texts = [yaml.safe_dump(it, sort_keys=False, width=100, allow_unicode=True) for it in documents]
    return "".join(f"# {line}\n" for line in head.splitlines()) + "---\n".join(texts)
