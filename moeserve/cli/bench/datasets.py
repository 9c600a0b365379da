"""The prompts of a benchmark: random, repeated prefixes, ShareGPT, or lines of one's own. Local files only."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec

from moeserve.cli.bench.tokens import Tokens
from moeserve.errors import ConfigError

SHAREGPT_SHORTEST, SHAREGPT_LONGEST_PROMPT, SHAREGPT_LONGEST = 4, 1024, 2048  # tokens; vLLM's filter


@dataclass(slots=True)
class Sample:
    """One request: a prompt as text or token ids, its length and the answer's length in tokens."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int | None
    overrides: dict[str, Any] = field(default_factory=dict)


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")

    def number(flag: str, default: Any, help: str) -> None:
        group.add_argument(flag, type=int, default=default, metavar="N", help=help)

    group.add_argument(
        "--dataset-name", default="random", choices=tuple(BUILDERS), help="where prompts come from [random]"
    )
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="JSON (sharegpt) or JSON Lines (custom)")
    group.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder with tokenizer.json (default: the server's)"
    )
    number("--random-vocab-size", None, "no tokenizer: random prompts of ids below N")
    number("--num-prompts", 1000, "requests to send [1000]")
    number("--input-len", None, "prompt tokens, for any dataset that can choose")
    number("--output-len", None, "answer tokens, for any dataset")
    number("--random-input-len", 1024, "prompt tokens [1024]")
    number("--random-output-len", 128, "answer tokens [128]")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths spread over len*(1-R..1+R) [0]"
    )
    number("--random-prefix-len", 0, "tokens that all random prompts begin with, besides their own [0]")
    number("--sharegpt-output-len", None, "answer tokens (default: as in the file)")
    number("--custom-output-len", 256, "answer tokens of lines without output_tokens; -1: no limit sent [256]")
    number("--prefix-repetition-prefix-len", 256, "tokens of each shared prefix [256]")
    number("--prefix-repetition-suffix-len", 256, "tokens after it [256]")
    number("--prefix-repetition-num-prefixes", 10, "different prefixes [10]")
    number("--prefix-repetition-output-len", 128, "answer tokens [128]")
    group.add_argument("--disable-shuffle", action="store_true", help="keep the order of the file")
    group.add_argument("--no-oversample", action="store_true", help="a short file is not repeated up to --num-prompts")
    number("--seed", 0, "of prompts, lengths and arrivals [0]")


async def build_samples(args: argparse.Namespace, tokens: Tokens, *, text_only: bool) -> list[Sample]:
    """The samples that the flags ask for, the same for the same seed. text_only: no prompts of token ids."""
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    samples: list[Sample] = await BUILDERS[args.dataset_name](args, tokens, random.Random(args.seed))
    if text_only:
        for sample in samples:
            if not isinstance(sample.prompt, str):
                sample.prompt = await tokens.decode(sample.prompt)
    return samples


async def _random(args: argparse.Namespace, tokens: Tokens, rng: random.Random) -> list[Sample]:
    ratio, prefix_len = args.random_range_ratio, args.random_prefix_len
    input_len = args.input_len or args.random_input_len
    output_len = args.output_len or args.random_output_len
    if not 0 <= ratio < 1 or prefix_len < 0:
        raise ConfigError("--random-range-ratio must be in [0, 1) and --random-prefix-len at least 0")
    if input_len < 1 or output_len < 1:
        raise ConfigError(f"input and output lengths must be at least 1, got {input_len} and {output_len}")
    pool = await tokens.pool()
    prefix = rng.choices(pool, k=prefix_len)
    samples = []
    for _ in range(args.num_prompts):
        ids = prefix + rng.choices(pool, k=_spread(rng, input_len, ratio))
        samples.append(Sample(ids, len(ids), _spread(rng, output_len, ratio)))
    return samples


def _spread(rng: random.Random, length: int, ratio: float) -> int:
    return rng.randint(max(1, int(length * (1 - ratio))), max(1, int(length * (1 + ratio))))


async def _prefix_repetition(args: argparse.Namespace, tokens: Tokens, rng: random.Random) -> list[Sample]:
    num_prefixes = args.prefix_repetition_num_prefixes
    if not 1 <= num_prefixes <= args.num_prompts:
        raise ConfigError(f"--prefix-repetition-num-prefixes must be in 1..{args.num_prompts} (--num-prompts)")
    pool = await tokens.pool()
    prefixes = [rng.choices(pool, k=args.prefix_repetition_prefix_len) for _ in range(num_prefixes)]
    output_len = args.output_len or args.prefix_repetition_output_len
    samples = []
    for i in range(args.num_prompts):
        ids = prefixes[i * num_prefixes // args.num_prompts] + rng.choices(pool, k=args.prefix_repetition_suffix_len)
        samples.append(Sample(ids, len(ids), output_len))
    if not args.disable_shuffle:
        rng.shuffle(samples)
    return samples


async def _sharegpt(args: argparse.Namespace, tokens: Tokens, rng: random.Random) -> list[Sample]:
    turns = []
    for entry in _load_json(args):
        talk = entry.get("conversations", []) if isinstance(entry, dict) else []
        if len(talk) >= 2 and all(isinstance(t, dict) and isinstance(t.get("value"), str) for t in talk[:2]):
            turns.append((talk[0]["value"], talk[1]["value"]))
    if not args.disable_shuffle:
        rng.shuffle(turns)
    asked_len = args.output_len or args.sharegpt_output_len
    samples: list[Sample] = []
    for question, answer in turns:
        if len(samples) == args.num_prompts:
            break
        prompt_len = len(await tokens.encode(question))
        output_len = asked_len or len(await tokens.encode(answer))
        long = prompt_len > SHAREGPT_LONGEST_PROMPT or prompt_len + output_len > SHAREGPT_LONGEST
        shortest = prompt_len if asked_len else min(prompt_len, output_len)
        if not long and shortest >= SHAREGPT_SHORTEST:
            samples.append(Sample(question, prompt_len, output_len))
    return _enough(samples, args)


async def _custom(args: argparse.Namespace, tokens: Tokens, rng: random.Random) -> list[Sample]:
    lines = list(_load_lines(args))
    if not args.disable_shuffle:
        rng.shuffle(lines)
    default_len = args.output_len or args.custom_output_len
    samples = []
    for line in lines[: args.num_prompts]:
        if not isinstance(line, dict) or not isinstance(line.get("prompt"), str):
            raise ConfigError(f'{args.dataset_path}: each line must be {{"prompt": "...", "output_tokens": N}}')
        output_len = line.get("output_tokens", default_len)
        prompt_len = len(await tokens.encode(line["prompt"]))
        samples.append(Sample(line["prompt"], prompt_len, None if output_len == -1 else int(output_len)))
    return _enough(samples, args)


BUILDERS: dict[str, Any] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "custom": _custom,
    "prefix_repetition": _prefix_repetition,
}


def _enough(samples: list[Sample], args: argparse.Namespace) -> list[Sample]:
    if not samples:
        raise ConfigError(f"{args.dataset_path} has no usable prompt")
    return samples if args.no_oversample else list(islice(cycle(samples), args.num_prompts))


def _read(args: argparse.Namespace) -> bytes:
    path: Path | None = args.dataset_path
    if path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}") from None


def _load_json(args: argparse.Namespace) -> list[Any]:
    try:
        found = msgspec.json.decode(_read(args))
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--dataset-path {args.dataset_path}: not JSON: {error}") from None
    if not isinstance(found, list):
        raise ConfigError(f"--dataset-path {args.dataset_path}: expected a list of conversations")
    return found


def _load_lines(args: argparse.Namespace) -> Iterator[Any]:
    for number, line in enumerate(_read(args).splitlines(), 1):
        if line.strip():
            try:
                yield msgspec.json.decode(line)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{args.dataset_path}:{number}: not JSON: {error}") from None
