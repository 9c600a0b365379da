"""Paths in settings."""

from pathlib import Path

from moeserve.errors import ConfigError


def user_path(setting: str, path: str) -> Path:
    """Return a setting's path with `~` replaced. Raises ConfigError if there is no home."""
    remedy = "; give an absolute path, or set HOME"
    with ConfigError.instead_of(RuntimeError, f"{setting} {path}", remedy):
        return Path(path).expanduser()
