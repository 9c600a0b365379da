"""Reading and writing the YAML of `--config`: plain scalars only, no key twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from moeserve.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses a key that occurs twice, whose first value YAML drops silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raises ConstructorError at a repeated key; see PyYAML."""
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_mapping(path: Path) -> dict[Any, Any]:
    """Returns the top-level mapping of a file, {} if it is empty. Raises ConfigError with line and column."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --config {path}: {error}") from None
    try:
        found = yaml.load(text, _Loader)  # a subclass of SafeLoader
    except (yaml.YAMLError, TypeError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {where}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected sections such as `server:`, got {found!r:.64}")
    return found


def dump_value(value: Any) -> str:
    """Returns a value as YAML on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=10**6)
    return text.removesuffix("\n...\n").rstrip("\n")
