"""`moeserve verify`, `moeserve replay` and `moeserve receipt-key`: answers that are computed again, and the key for it."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moeserve.cli.settings import add_flags, resolve
from moeserve.config import Config
from moeserve.errors import ConfigError, RequestError
from moeserve.receipts import VERSION, Receipt, check_form, first_link

if TYPE_CHECKING:
    from moeserve.messages import Ready


class Verify:
    """Verifies the receipt in a file, or those of a whole answer of the API."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the file and the model, and the flags of `moeserve serve` without help."""
        parser.usage = "%(prog)s FILE [--model MODEL] [flags] [flags of `moeserve serve`]"
        parser.add_argument("file", type=Path, metavar="FILE", help="receipt, or whole answer with receipts, as JSON")
        parser.add_argument("--key", metavar="HEX", help="public key that must have signed (GET /v1/receipt-key)")
        _add_engine(parser)

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Prints what is equal and what is not; returns 0 if all is."""
        return _verify(_config(args), read_receipts(args.file), args.key, signed=True)


class Replay:
    """Computes requests of a server's log again."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the log, the request and the model, and the flags of `moeserve serve` without help."""
        parser.usage = "%(prog)s FILE [--id ID] [--model MODEL] [flags of `moeserve serve`]"
        parser.add_argument("file", type=Path, metavar="FILE", help="the server's request_log")
        parser.add_argument("--id", metavar="ID", help="X-Request-Id of the request (default: the last one)")
        _add_engine(parser)

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Prints what is equal and what is not; returns 0 if all is."""
        return _verify(_config(args), read_log(args.file, args.id), None, signed=False)


class ReceiptKey:
    """Makes a key that signs receipts."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the file."""
        parser.add_argument("file", type=Path, metavar="FILE", help="where the private key goes; must not exist")

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Writes the private key and prints the public one."""
        from moeserve.frontend.signer import make_key

        print(f"public key {make_key(args.file)}\nserve with it: moeserve serve --receipt-key {args.file}")
        return 0


def read_receipts(path: Path) -> list[Receipt]:
    """Returns the receipts in a file. Raises ConfigError."""
    try:
        content = msgspec.json.decode(path.read_bytes())
        if isinstance(content, dict) and isinstance(content.get("choices"), list):
            content = [choice["receipt"] for choice in content["choices"] if choice.get("receipt")]
        found = msgspec.convert(content if isinstance(content, list) else [content], list[Receipt])
    except (OSError, msgspec.DecodeError, AttributeError) as error:
        raise ConfigError(f"{path} is no receipt and no answer of /v1/chat/completions: {error}") from None
    if not found:
        raise ConfigError(f'{path} has an answer without a receipt: send the request with "receipt": true')
    return found


def read_log(path: Path, id: str | None) -> list[Receipt]:
    """Returns the sequences of one request of a log, of the last one if none is named. Raises ConfigError."""
    found: list[Receipt] = []
    try:
        with path.open("rb") as file:
            for line in file:
                entry = msgspec.json.decode(line, type=Receipt)
                if id is None and found and found[0].id != entry.id:
                    found.clear()
                if id in (None, entry.id):
                    found.append(entry)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is no log of requests (server.request_log): {error}") from None
    if not found:
        raise ConfigError(f"{path} has no request {id!r}; its ids are the answers' X-Request-Id")
    return found


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="Hugging Face model directory (default: demo)")
    add_flags(parser, shown=False, model=False)


def _config(args: argparse.Namespace) -> Config:
    config = resolve(args).config
    return replace(config, server=replace(config.server, receipt_key=None, request_log=None))


def _verify(config: Config, receipts: list[Receipt], key: str | None, *, signed: bool) -> int:
    from moeserve.loader.model_dir import resolve_model_dir
    from moeserve.loader.weights_digest import weights_digest

    weights = weights_digest(resolve_model_dir(config.model.model))[0]
    faults, readable = 0, []
    for receipt in receipts:
        wrong = _seals(receipt, key) if signed else []
        if receipt.weights != weights:
            wrong.append(f"weights: {receipt.weights or 'unknown'} there, {weights} in {config.model.model}")
        elif form := check_form(receipt):
            wrong.append(f"receipt: {form}")
        else:
            readable.append(receipt)
        if receipt.links and receipt.links[0] != first_link(receipt):
            wrong.append("request: link 0 is not of this request, these weights and numerics: one of them was changed")
        faults += len(wrong)
        for line in wrong:
            print(f"{_name(receipt)}: {line}")
    if readable:
        faults += asyncio.run(_compute(config, readable))
    print("not equal" if faults else "equal")
    return 1 if faults else 0


def _seals(receipt: Receipt, key: str | None) -> list[str]:
    """Returns what is wrong with version, signature and key."""
    from moeserve.frontend.signer import is_signed

    wrong = []
    if receipt.version != VERSION:
        wrong.append(f"version: {receipt.version}; this moeserve knows {VERSION}")
    if not is_signed(receipt):
        wrong.append("signature: not of this receipt: it was changed, or never signed with the key that it names")
    if key is not None and receipt.public_key != key.strip().lower():
        wrong.append(f"key: {receipt.public_key or 'none'}, not {key}")
    return wrong


async def _compute(config: Config, receipts: list[Receipt]) -> int:
    """Computes answers again, one after the other, prints how that went, and returns how many of them differ."""
    from moeserve.frontend.open import open_front_end
    from moeserve.frontend.verification import compute_again, difference

    faults = 0
    async with open_front_end(config, child=False) as front:
        ready = await front.wait_ready()
        front.notary = None  # digests are all that is needed
        for receipt in receipts:
            try:
                wrong = difference(receipt, await compute_again(front, receipt))
            except RequestError as error:
                wrong = f"this engine does not take the request: {error}"
            if others := _other_numerics(receipt, ready):
                print(f"{_name(receipt)}: numerics: {others}; bits are the same only where numerics are")
            tokens = f"{len(receipt.token_ids)} tokens {'and their logits' if receipt.links else '(it has no logits)'}"
            print(f"{_name(receipt)}: {wrong or f'{tokens} are equal'}")
            faults += bool(wrong)
    return faults


def _name(receipt: Receipt) -> str:
    return f"{receipt.id} {receipt.index}"


def _other_numerics(receipt: Receipt, ready: Ready) -> str:
    names = sorted(receipt.numerics.keys() | ready.numerics.keys())
    pairs = [(name, receipt.numerics.get(name), ready.numerics.get(name)) for name in names]
    return ", ".join(f"{name} was {there}, is {here}" for name, there, here in pairs if there != here)
