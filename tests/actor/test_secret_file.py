"""The users besides the owner who may read the cluster's secret.

These are members of a group that root chose, as for a Kubernetes Secret.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeserve.actor.handshake import read_secret
from moeserve.errors import ConfigError

SECRET = "a secret of many bytes"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file that root owns")
@pytest.mark.parametrize(
    ("mode", "we_are_root", "fits"),
    [
        (0o440, False, True),
        (0o400, False, True),
        (0o444, False, False),
        (0o460, False, False),
        (0o440, True, False),
    ],
)
def test_a_file_of_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, we_are_root: bool, fits: bool
) -> None:
    path = tmp_path / "key"
    path.write_text(SECRET)
    path.chmod(mode)
    if not we_are_root:
        monkeypatch.setattr(os, "geteuid", lambda: 10001)
    if fits:
        assert read_secret(str(path)) == SECRET.encode()
    else:
        with pytest.raises(ConfigError, match="can be read by others"):
            read_secret(str(path))
