"""The files of a model directory: opens those that really belong to it, and reads typed values from
their JSON.
"""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moeserve.errors import CheckpointError

_INFINITY = re.compile(rb"(?<=[\[,:\s])Infinity(?=[\],}\s])")
_MAX_JSON_BYTES = 64 * 2**20
_MAX_SHOWN = 80
CONFIG = "config.json"
PARAMS = "params.json"
GGUF = ".gguf"


def model_file(model_dir: Path, name: str) -> Path:
    """Returns the path of the regular file `name` directly in `model_dir`.

    A link may lead to a file of the same directory or, as in the Hugging Face cache, from
    `snapshots/<revision>` to `blobs`. Any other link is refused: a downloaded directory must not
    make us read other files of this machine.
    """
    home = model_dir.resolve()
    if Path(name).name != name or name in ("", ".", ".."):
        raise CheckpointError(
            f"{model_dir}: {name!r} is not the plain name of a file in this directory"
        )
    path = home / name
    try:
        real = path.resolve(strict=True)
        is_regular = stat.S_ISREG(real.stat().st_mode)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; download the model again, completely") from None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL byte
        raise CheckpointError(f"{path} cannot be opened: {error}") from None
    allowed = {home}
    if home.parent.name == "snapshots":
        allowed.add(home.parent.parent / "blobs")
    if real.parent not in allowed:
        raise CheckpointError(
            f"{path} is a link to {real}, outside the model's directory; replace the link by the file itself"
        )
    if not is_regular:
        raise CheckpointError(f"{path} is not a regular file")
    return path


def config_name(model_dir: Path) -> str:
    """Returns the file that describes the model: config.json, or Mistral's params.json where it is
    alone.
    """
    alone = os.path.lexists(model_dir / PARAMS) and not os.path.lexists(model_dir / CONFIG)
    return PARAMS if alone else CONFIG


def read_json(model_dir: Path, name: str) -> dict[str, Any]:
    """Returns the JSON object in the file `name`; at most 64 MiB, plain JSON (no NaN). Infinity,
    which transformers 4 writes, is read as what transformers 5 writes in its place. Raises
    CheckpointError.

    Of a GGUF file, which has all of a model, it is what its metadata say in the keys of that file.
    """
    if is_gguf(model_dir):
        from moeserve.loader.gguf_config import documents  # reads fields, too

        return documents(model_dir).get(name, {})
    path = model_file(model_dir, name)
    with CheckpointError.instead_of(OSError, f"{model_dir / name} cannot be read"):
        if (num_bytes := path.stat().st_size) > _MAX_JSON_BYTES:
            raise CheckpointError(
                f"{model_dir / name} has {num_bytes} bytes; at most {_MAX_JSON_BYTES} are read"
            )
        text = path.read_bytes()
    damages = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    what = f"{model_dir / name} is not valid JSON"
    with CheckpointError.instead_of(damages, what, "; download it again"):
        value = _decoded(text)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{model_dir / name} must hold a JSON object, not {type(value).__name__}"
        )
    return value


def read_optional_json(model_dir: Path, name: str) -> dict[str, Any]:
    """Returns what `read_json` does, and {} if there is no such file."""
    return (
        read_json(model_dir, name)
        if is_gguf(model_dir) or os.path.lexists(model_dir / name)
        else {}
    )


def is_gguf(model_dir: Path) -> bool:
    """Returns whether what stands for a model's directory is a GGUF file."""
    return model_dir.suffix == GGUF and not model_dir.is_dir()


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        plain = _INFINITY.sub(b'{"__float__": "Infinity"}', text)
        if plain == text:
            raise
        return msgspec.json.decode(plain)


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object, with defaults for absent keys and errors that name file, key, value and
    remedy.

    An explicit null counts as null, not as absent; only the optional reads accept it.
    """

    path: Path
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    prefix: str = ""

    def raw(self, key: str) -> Any:
        """Returns the value or its default, unchecked."""
        if key in self.values:
            return self.values[key]
        if key in self.defaults:
            return self.defaults[key]
        raise CheckpointError(f"{self.path}: {self.prefix}{key} is missing")

    def error(self, key: str, must: str) -> CheckpointError:
        """Returns the error for a bad value; `must` goes on after "key is value; "."""
        shown = repr(self.raw(key))
        if len(shown) > _MAX_SHOWN:
            shown = shown[:_MAX_SHOWN] + "..."
        return CheckpointError(f"{self.path}: {self.prefix}{key} is {shown}; {must}")

    def integer(self, key: str, low: int, high: int) -> int:
        """Reads an integer in [low, high]."""
        value = self.raw(key)
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise self.error(key, f"it must be an integer from {low} to {high}")

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """Reads an integer in [low, high], or null."""
        return None if self.raw(key) is None else self.integer(key, low, high)

    def number(self, key: str, low: float, high: float) -> float:
        """Reads a finite number in [low, high]; with low 0 in (0, high], because a zero here always
        means damage.
        """
        value = self.raw(key)
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and low <= value <= high
            and value
        ):
            return float(value)
        bracket = "(" if low == 0 else "["
        raise self.error(key, f"it must be a number other than 0 in {bracket}{low:g}, {high:g}]")

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        """Reads a number as `number` does, or null."""
        return None if self.raw(key) is None else self.number(key, low, high)

    def boolean(self, key: str) -> bool:
        """Reads true or false."""
        value = self.raw(key)
        if isinstance(value, bool):
            return value
        raise self.error(key, "it must be true or false")

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Reads one of the strings `choices`."""
        value = self.raw(key)
        if isinstance(value, str) and value in choices:
            return value
        raise self.error(key, f"supported: {', '.join(choices)}")

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...]:
        """Reads a list of integers in [low, high], or null for none."""
        value = self.raw(key)
        if value is None:
            return ()
        if isinstance(value, list) and all(
            type(item) is int and low <= item <= high for item in value
        ):
            return tuple(value)
        raise self.error(key, f"it must be a list of integers from {low} to {high}")

    def section(self, key: str) -> dict[str, Any]:
        """Reads a nested object; empty for null."""
        value = self.raw(key)
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        raise self.error(key, "it must be an object or null")

    def only(self, **known: Any) -> None:
        """Refuses other values of these keys, since they are what is computed; an absent key and
        null mean it, too.
        """
        for key, value in known.items():
            if self.values.get(key) not in (None, value):
                raise self.error(key, f"only {value!r} is supported")

    def unsupported(self, key: str, remedy: str) -> None:
        """Refuses a key that would change the model's result if it were ignored."""
        if self.values.get(key) is not None:
            raise self.error(key, remedy)
