"""Prompts for benchmarks: random token ids, ShareGPT conversations, or JSON Lines (local files)."""

import argparse
import random
import string
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec

from moeserve.client import AsyncClient
from moeserve.errors import ConfigError, RequestError

# Limits in tokens: vLLM's filter.
SHAREGPT_MIN_TOKENS = 4
SHAREGPT_MAX_PROMPT_TOKENS = 1024
SHAREGPT_MAX_TOKENS = 2048


@dataclass(slots=True)
class Sample:
    """A prompt as text or token ids, and the lengths of prompt and answer in tokens."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int | None  # None: no limit is sent


class ServerTokenizer:
    """The server's tokenizer, through /tokenize and /detokenize.

    vocab_size: number of ids for random prompts, for servers without a tokenizer.
    """

    def __init__(self, client: AsyncClient, model: str, vocab_size: int | None = None) -> None:
        self._client = client
        self._model = model
        self._vocab_size = vocab_size

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` without special tokens. Raises ConfigError if the server
        has no tokenizer.
        """
        try:
            answer = await self._client.tokenize(text, model=self._model, add_special_tokens=False)
            return answer.tokens
        except RequestError as error:
            raise ConfigError(
                f"the server cannot tokenize ({error}); use random prompts with "
                "--random-vocab-size N"
            ) from error

    async def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        return (await self._client.detokenize(ids, model=self._model)).prompt

    async def ids_for_random_prompts(self) -> list[int]:
        """Return the token ids that random prompts are drawn from.

        With a tokenizer, they are the ids of made-up words, so that no special token is drawn.
        """
        if self._vocab_size is not None:
            return list(range(self._vocab_size))
        rng = random.Random(0)
        words = (
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 9))) for _ in range(3000)
        )
        return sorted(set(await self.encode(" ".join(words))))


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose prompts and lengths, named as in `vllm bench serve`."""
    group = parser.add_argument_group("data")

    def number(*flags: str, default: Any, help: str) -> None:
        """Add an integer flag."""
        group.add_argument(*flags, type=int, default=default, metavar="N", help=help)

    group.add_argument(
        "--dataset-name",
        default="random",
        choices=tuple(BUILDERS),
        help="source of prompts [random]",
    )
    group.add_argument(
        "--dataset-path", type=Path, metavar="FILE", help="JSON (sharegpt) or JSON Lines (custom)"
    )
    number(
        "--random-vocab-size",
        default=None,
        help="draw random prompts from ids below N, for servers without a tokenizer",
    )
    number("--num-prompts", default=1000, help="number of requests [1000]")
    number("--output-len", default=None, help="output tokens per request, for any dataset")
    number(
        "--random-input-len",
        "--input-len",
        default=1024,
        help="prompt tokens per random request [1024]",
    )
    number("--random-output-len", default=128, help="output tokens per random request [128]")
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="draw lengths from len*(1-R) to len*(1+R) [0]",
    )
    number(
        "--random-prefix-len",
        default=0,
        help="length of a common prefix, in addition to --random-input-len [0]",
    )
    number(
        "--sharegpt-output-len", default=None, help="output tokens (default: the file's answers)"
    )
    number(
        "--custom-output-len",
        default=256,
        help="output tokens of lines without output_tokens; -1: no limit [256]",
    )
    group.add_argument("--disable-shuffle", action="store_true", help="keep the order of the file")
    group.add_argument(
        "--no-oversample",
        action="store_true",
        help="do not repeat a short file up to --num-prompts",
    )
    number("--seed", default=0, help="seed of prompts, lengths and arrivals [0]")


async def build_samples(
    args: argparse.Namespace, tokenizer: ServerTokenizer, *, text_only: bool
) -> list[Sample]:
    """Return the samples of the flags, the same for the same seed. With `text_only`, prompts of
    token ids are decoded.
    """
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    build = BUILDERS[args.dataset_name]
    samples: list[Sample] = await build(args, tokenizer, random.Random(args.seed))
    if text_only:
        for sample in samples:
            if not isinstance(sample.prompt, str):
                sample.prompt = await tokenizer.decode(sample.prompt)
    return samples


async def _random(
    args: argparse.Namespace, tokenizer: ServerTokenizer, rng: random.Random
) -> list[Sample]:
    ratio = args.random_range_ratio
    prefix_len = args.random_prefix_len
    input_len = args.random_input_len
    output_len = args.output_len or args.random_output_len
    if not 0 <= ratio < 1 or prefix_len < 0:
        raise ConfigError(
            "--random-range-ratio must be in [0, 1) and --random-prefix-len at least 0"
        )
    if input_len < 1 or output_len < 1:
        raise ConfigError(
            f"input and output lengths must be at least 1, got {input_len} and {output_len}"
        )

    def random_length(length: int) -> int:
        """Return a random length in len*(1-R..1+R)."""
        return rng.randint(max(1, int(length * (1 - ratio))), max(1, int(length * (1 + ratio))))

    known_ids = await tokenizer.ids_for_random_prompts()
    prefix = rng.choices(known_ids, k=prefix_len)
    samples = []
    for _ in range(args.num_prompts):
        ids = prefix + rng.choices(known_ids, k=random_length(input_len))
        samples.append(Sample(ids, len(ids), random_length(output_len)))
    return samples


async def _sharegpt(
    args: argparse.Namespace, tokenizer: ServerTokenizer, rng: random.Random
) -> list[Sample]:
    entries = _decode(args, _read(args), "")
    if not isinstance(entries, list):
        raise ConfigError(f"--dataset-path {args.dataset_path}: expected a list of conversations")
    questions_and_answers = []
    for entry in entries:
        conversation = entry.get("conversations", []) if isinstance(entry, dict) else []
        if len(conversation) >= 2 and all(
            isinstance(turn, dict) and isinstance(turn.get("value"), str)
            for turn in conversation[:2]
        ):
            questions_and_answers.append((conversation[0]["value"], conversation[1]["value"]))
    if not args.disable_shuffle:
        rng.shuffle(questions_and_answers)
    given_output_len = args.output_len or args.sharegpt_output_len
    samples: list[Sample] = []
    for question, answer in questions_and_answers:
        if len(samples) == args.num_prompts:
            break
        prompt_len = len(await tokenizer.encode(question))
        output_len = given_output_len or len(await tokenizer.encode(answer))
        is_too_long = (
            prompt_len > SHAREGPT_MAX_PROMPT_TOKENS or prompt_len + output_len > SHAREGPT_MAX_TOKENS
        )
        shortest_len = prompt_len if given_output_len else min(prompt_len, output_len)
        if not is_too_long and shortest_len >= SHAREGPT_MIN_TOKENS:
            samples.append(Sample(question, prompt_len, output_len))
    return _repeat_samples(samples, args)


async def _custom(
    args: argparse.Namespace, tokenizer: ServerTokenizer, rng: random.Random
) -> list[Sample]:
    texts = enumerate(_read(args).splitlines(), 1)
    lines = [_decode(args, text, f":{number}") for number, text in texts if text.strip()]
    if not args.disable_shuffle:
        rng.shuffle(lines)
    samples = []
    for line in lines[: args.num_prompts]:
        if not isinstance(line, dict) or not isinstance(line.get("prompt"), str):
            raise ConfigError(
                f'{args.dataset_path}: each line must be {{"prompt": "...", "output_tokens": N}}'
            )
        given_len = line.get("output_tokens", args.output_len or args.custom_output_len)
        prompt_len = len(await tokenizer.encode(line["prompt"]))
        output_len = None if given_len == -1 else int(given_len)  # None: no limit
        samples.append(Sample(line["prompt"], prompt_len, output_len))
    return _repeat_samples(samples, args)


BUILDERS: dict[str, Any] = {"random": _random, "sharegpt": _sharegpt, "custom": _custom}


def _repeat_samples(samples: list[Sample], args: argparse.Namespace) -> list[Sample]:
    """Return the samples, repeated up to --num-prompts unless --no-oversample is given."""
    if not samples:
        raise ConfigError(f"{args.dataset_path} has no usable prompt")
    if args.no_oversample:
        return samples
    return list(islice(cycle(samples), args.num_prompts))


def _read(args: argparse.Namespace) -> bytes:
    path: Path | None = args.dataset_path
    if path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    with ConfigError.instead_of(OSError, f"--dataset-path {path}"):
        return path.read_bytes()


def _decode(args: argparse.Namespace, text: bytes, where: str) -> Any:
    with ConfigError.instead_of(
        msgspec.MsgspecError, f"--dataset-path {args.dataset_path}{where}: not JSON"
    ):
        return msgspec.json.decode(text)
