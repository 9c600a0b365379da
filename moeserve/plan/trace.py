"""The request trace of a simulation: arrival times, lengths and shared prefixes.

A trace is synthetic or read from a file: ShareGPT (a JSON list of conversations), Mooncake's traces
(JSON lines with timestamp in ms, input_length, output_length and hash_ids of blocks of 512 tokens),
or an access log of moeserve.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from moeserve.errors import ConfigError

MOONCAKE_BLOCK = 512  # tokens per hash id
CHARACTERS_PER_TOKEN = 4  # for files with text only
_MAX_TOKENS = 10_000_000


class Arrival(NamedTuple):
    """One request."""

    at_s: float  # time of arrival
    input: int  # prompt tokens
    output: int  # generated tokens
    hash_ids: tuple[int, ...] = ()  # of the prompt's blocks; equal ids mean equal tokens


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests in order of arrival."""

    arrivals: Sequence[Arrival]

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise ConfigError("the trace has no requests to simulate")

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts may share prefixes."""
        return any(arrival.hash_ids for arrival in self.arrivals)

    @property
    def longest(self) -> int:
        """The largest number of tokens of a request, prompt included."""
        return max(arrival.input + arrival.output for arrival in self.arrivals)


def synthetic(
    times_s: Sequence[float], num_input: int, num_output: int, spread: float = 0.0, seed: int = 0
) -> RequestTrace:
    """Return requests at these times, with lengths uniform in mean * (1 - spread .. 1 + spread)."""
    rng = np.random.default_rng(seed)

    def draw_lengths(mean: int) -> list[int]:
        lengths = np.rint(mean * rng.uniform(1 - spread, 1 + spread, len(times_s)))
        as_ints: list[int] = np.maximum(1, lengths).astype(int).tolist()
        return as_ints

    inputs = draw_lengths(num_input)
    outputs = draw_lengths(num_output)
    return RequestTrace(
        [
            Arrival(at_s, input, output)
            for at_s, input, output in zip(times_s, inputs, outputs, strict=True)
        ]
    )


def prompt_of(rid: int, arrival: Arrival) -> bytes:
    """Return a prompt as bytes of int32 tokens.

    The tokens of a block are its hash id. Without hash ids, no two prompts share a prefix.
    """
    if not arrival.hash_ids:  # the first token is the request id, the others are 0
        return rid.to_bytes(4, "little") + bytes(4 * arrival.input - 4)
    ids = np.array([hash_id % (2**31 - 1) for hash_id in arrival.hash_ids], "<i4")
    return np.resize(np.repeat(ids, MOONCAKE_BLOCK), arrival.input).tobytes()


def read_trace(path: Path, rate: float | None = None) -> RequestTrace:
    """Read a trace file of any kind. Raises ConfigError with the file, the line and the remedy.

    rate: requests per second. Files with times are rescaled to it; it is required for files without
        times, which get random arrivals.
    """
    with ConfigError.instead_of(OSError, f"--trace {path}"):
        text = path.read_bytes()
    if text.lstrip()[:1] == b"[":
        if rate is None:
            raise ConfigError(
                f"--trace {path}: conversations have no times; give the requests per second with"
                " --rates"
            )
        arrivals = list(_read_conversations(path, text))
    else:
        arrivals = [
            arrival
            for number, line in enumerate(text.splitlines(), 1)
            if (arrival := _parse_line(path, number, line))
        ]
    if not arrivals:
        raise ConfigError(f"--trace {path}: the file has no requests")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    first_s = arrivals[0].at_s
    duration_s = arrivals[-1].at_s - first_s
    if rate is None or duration_s:
        stretch = 1.0 if rate is None else len(arrivals) / rate / duration_s
        return RequestTrace(
            [arrival._replace(at_s=stretch * (arrival.at_s - first_s)) for arrival in arrivals]
        )
    # The file has no times, or all are equal: draw random ones.
    gaps_s = np.random.default_rng(0).exponential(1 / rate, len(arrivals))
    return RequestTrace(
        [
            arrival._replace(at_s=float(at_s))
            for arrival, at_s in zip(arrivals, gaps_s.cumsum(), strict=True)
        ]
    )


def _read_conversations(path: Path, text: bytes) -> Iterator[Arrival]:
    for i, entry in enumerate(_decode_json(f"--trace {path}", text)):
        turns = entry.get("conversations", []) if isinstance(entry, dict) else None
        if turns is None or not all(
            isinstance(turn, dict) and isinstance(turn.get("value"), str) for turn in turns
        ):
            raise ConfigError(
                f"--trace {path}: entry {i} has no `conversations` of turns with a text `value`"
            )
        if len(turns) >= 2:
            prompt, answer = (
                max(1, len(turn["value"]) // CHARACTERS_PER_TOKEN) for turn in turns[:2]
            )
            yield Arrival(0.0, prompt, answer)


def _parse_line(path: Path, number: int, line: bytes) -> Arrival | None:
    """Parse a line. Return None if it is empty, or a log line of a request without answer."""
    if not line.strip():
        return None
    where = f"--trace {path}: line {number}"
    entry = _decode_json(where, line)
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not a JSON object")
    if "input_length" in entry:
        at_s = _read_number(where, entry, "timestamp") / 1e3
        sizes = ("input_length", "output_length")
        ids = entry.get("hash_ids", [])
        if not isinstance(ids, list) or not all(isinstance(hash_id, int) for hash_id in ids):
            raise ConfigError(f"{where}: hash_ids must be a list of integers")
    elif "route" in entry and "time" in entry:
        if not entry.get("prompt_tokens") or not entry.get("completion_tokens"):
            return None
        sizes = ("prompt_tokens", "completion_tokens")
        ids = []
        try:
            at_s = datetime.fromisoformat(entry["time"]).timestamp()
        except (TypeError, ValueError):
            raise ConfigError(
                f"{where}: time {entry['time']!r} is not like 2026-01-31T12:00:00Z"
            ) from None
    else:
        keys = ", ".join(itertools.islice(entry, 6)) or "(none)"
        raise ConfigError(
            f"{where}: expected Mooncake's timestamp, input_length and output_length, or a line"
            f" of moeserve's access log, got the keys {keys}"
        )
    num_input, num_output = (int(_read_number(where, entry, key)) for key in sizes)
    return Arrival(
        at_s=at_s, input=max(1, num_input), output=max(1, num_output), hash_ids=tuple(ids)
    )


def _read_number(where: str, entry: dict[str, Any], key: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{where}: {key} must be a number of at least 0, got {value!r}")
    if key != "timestamp" and value > _MAX_TOKENS:
        raise ConfigError(f"{where}: {key} must be at most {_MAX_TOKENS}, got {value!r}")
    return float(value)


def _decode_json(where: str, text: bytes) -> Any:
    with ConfigError.instead_of(msgspec.DecodeError, where):
        return msgspec.json.decode(text)
