"""The shared part of the offline benchmarks: an LLM from the flags of `moeserve serve`, and random prompts for it."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeserve.cli.settings import add_flags, resolve
from moeserve.errors import ConfigError

if TYPE_CHECKING:
    from moeserve import LLM, SamplingParams


def add_llm_flags(parser: argparse.ArgumentParser) -> None:
    """Adds model, lengths, seed and output file, and the flags of `moeserve serve` without help."""
    parser.usage = "%(prog)s [--model MODEL] [flags] [flags of `moeserve serve`]"
    parser.add_argument("--model", metavar="MODEL", help="Hugging Face model directory (default: demo)")
    parser.add_argument("--input-len", type=int, default=32, metavar="N", help="prompt tokens [32]")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="answer tokens [128]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the prompts [0]")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the result there too")
    add_flags(parser, shown=False, model=False)


def open_llm(args: argparse.Namespace) -> tuple[LLM, SamplingParams]:
    """Returns an LLM without a tokenizer (token ids in and out) and sampling of exactly --output-len tokens."""
    for name in ("input_len", "output_len"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    config = resolve(args).config
    from moeserve import LLM, SamplingParams

    llm = LLM(config=replace(config, model=replace(config.model, skip_tokenizer_init=True)))
    return llm, SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=args.output_len)


def random_prompts(llm: LLM, count: int, length: int, seed: int) -> list[Any]:
    """Returns `count` prompts of `length` token ids each, drawn from the model's whole vocabulary."""
    ready = llm.ready
    assert ready is not None
    rng = random.Random(seed)
    ids = range(ready.vocab_size)
    return [{"prompt_token_ids": rng.choices(ids, k=length)} for _ in range(count)]


def report(args: argparse.Namespace, result: dict[str, Any]) -> int:
    """Prints the result and the lengths as JSON, writes them to --output-json too, and returns exit code 0."""
    text = json.dumps({**result, "input_len": args.input_len, "output_len": args.output_len}, indent=2)
    print(text)
    if args.output_json is not None:
        args.output_json.write_text(text + "\n", "utf-8")
    return 0
