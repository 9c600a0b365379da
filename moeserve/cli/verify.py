"""`moeserve verify` and `replay` compute answers again and compare; `moeserve receipt-key` makes a
key for receipts.
"""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moeserve.cli.settings import add_flags, resolve
from moeserve.config import Config
from moeserve.errors import ConfigError, RequestError
from moeserve.receipts import VERSION, Computed, Receipt, check_form, difference, first_link

if TYPE_CHECKING:
    from moeserve.frontend.front_end import FrontEnd


class _Choice(msgspec.Struct):
    receipt: Receipt | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


class Verify:
    """Verifies the receipt in a file, or those of a whole answer of the API."""

    about = "a receipt, receipts, or a whole answer with receipts, as JSON"
    chosen = "--key", "HEX", "public key that must have signed (GET /v1/receipt-key)"
    sealed = True  # whether signatures are looked at

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds file and model, and the flags of `moeserve serve` without help."""
        flag, metavar, text = cls.chosen
        parser.usage = (
            f"%(prog)s FILE [{flag} {metavar}] [--model MODEL] [flags of `moeserve serve`]"
        )
        parser.add_argument("file", type=Path, metavar="FILE", help=cls.about)
        parser.add_argument(flag, metavar=metavar, dest="chosen", help=text)
        parser.add_argument(
            "--model", metavar="MODEL", help="Hugging Face model directory (default: demo)"
        )
        add_flags(parser, shown=False, model=False)

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Prints what is equal and what is not; returns 0 if all is."""
        config = resolve(args).config
        config = replace(config, server=replace(config.server, receipt_key=None, request_log=None))
        what = f"{args.file} is not what this command takes ({cls.about})"
        with ConfigError.instead_of((OSError, msgspec.DecodeError), what):
            receipts = cls.read(args.file, args.chosen)
        faults = (
            sum(_seal_faults(receipt, args.chosen) for receipt in receipts) if cls.sealed else 0
        )
        faults += _faults(config, receipts)
        print("not equal" if faults else "equal")
        return 1 if faults else 0

    @classmethod
    def read(cls, path: Path, chosen: str | None) -> list[Receipt]:
        """Returns the receipts in a file."""
        content = msgspec.json.decode(path.read_bytes(), type=_Answer | list[Receipt])
        if isinstance(content, list):
            return content
        if found := [choice.receipt for choice in content.choices if choice.receipt is not None]:
            return found
        if not content.choices:
            return [msgspec.json.decode(path.read_bytes(), type=Receipt)]
        raise ConfigError(
            f'{path} has an answer without a receipt: send the request with "receipt": true'
        )


class Replay(Verify):
    """Computes a request of a server's log again."""

    about = "the server's request_log"
    chosen = "--id", "ID", "X-Request-Id of the request (default: that of the last line)"
    sealed = False

    @classmethod
    def read(cls, path: Path, chosen: str | None) -> list[Receipt]:
        """Returns the log's lines about a request."""
        with path.open("rb") as file:
            lines = [msgspec.json.decode(line, type=Receipt) for line in file]
        if found := [
            line for line in lines if line.id == (lines[-1].id if chosen is None else chosen)
        ]:
            return found
        raise ConfigError(f"{path} has no request {chosen!r}; ids are the answers' X-Request-Id")


class MakeReceiptKey:
    """Makes a key that signs receipts."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the file."""
        parser.add_argument(
            "file", type=Path, metavar="FILE", help="where the private key goes; must not exist"
        )

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Writes the private key and prints the public one."""
        from moeserve.frontend.signing_key import make_key

        print(f"public key: {make_key(args.file)}")
        return 0


def _seal_faults(receipt: Receipt, key: str | None) -> int:
    """Prints and counts what is wrong with version, signature and key."""
    from moeserve.frontend.signing_key import is_signed

    checks = (
        (
            receipt.version == VERSION,
            f"version: it is {receipt.version}; this moeserve knows {VERSION}",
        ),
        (
            is_signed(receipt),
            "signature: not of this receipt: it was changed, or its public key's owner did not sign",
        ),
        (key in (None, receipt.public_key), f"key: {receipt.public_key or 'none'}, not {key}"),
    )
    return sum(_say(receipt, wrong) for good, wrong in checks if not good)


def _faults(config: Config, receipts: list[Receipt]) -> int:
    """Prints and counts what differs; computes answers only if they are of these weights."""
    from moeserve.loader.checkpoint import weights_digest
    from moeserve.loader.model_dir import resolve_model_dir

    weights, _ = weights_digest(resolve_model_dir(config.model.model))
    faults = 0
    sound = []
    for receipt in receipts:
        if receipt.links and receipt.links[0] != first_link(receipt):
            faults += _say(
                receipt,
                "link 0 is not of this request, these weights and numerics: one was changed",
            )
        if receipt.weights != weights:
            faults += _say(
                receipt,
                f"weights: {receipt.weights or 'unknown'}, but {config.model.model} has {weights}",
            )
        elif wrong := check_form(receipt):
            faults += _say(receipt, f"form: {wrong}")
        else:
            sound.append(receipt)
    return faults + (asyncio.run(_compute(config, sound)) if sound else 0)


async def _compute(config: Config, receipts: list[Receipt]) -> int:
    """Computes answers again, one after the other; prints and counts those that differ."""
    from moeserve.frontend.open import open_front_end

    faults = 0
    async with open_front_end(config, child=False, signs=False) as front:
        ready = await front.wait_ready()
        for receipt in receipts:
            try:
                wrong = difference(receipt, await compute_again(front, receipt))
            except RequestError as error:
                wrong = f"this engine does not take the request: {error}"
            if others := dict(receipt.numerics.items() - ready.numerics.items()):
                _say(
                    receipt, f"other numerics, so bits may differ: {others}, here {ready.numerics}"
                )
            what = (
                "and their logits are equal"
                if receipt.links
                else "are equal; the request asked for no receipt"
            )
            faults += _say(receipt, wrong or f"{len(receipt.token_ids)} tokens {what}") * bool(
                wrong
            )
    return faults


async def compute_again(front: "FrontEnd", receipt: Receipt) -> Computed:
    """Returns this engine's answer, up to the first token that is not the receipt's. Raises
    RequestError where the engine takes no such request."""
    wanted = receipt.token_ids
    params = receipt.sampling
    least = min(params.min_tokens, len(wanted))
    params = msgspec.structs.replace(
        params, n=1, seed=int(receipt.seed), max_tokens=len(wanted), min_tokens=least, receipt=True
    )
    found: list[int] = []
    prompt = receipt.prompt_token_ids
    grammar = receipt.grammar
    async with await front.generate(
        prompt, params, marked=receipt.marked, grammar=grammar
    ) as generation:
        async for delta in generation:
            found += delta.token_ids
            if found != wanted[: len(found)]:
                break
        digests = generation.sequences[0].digests[: len(found)]
    return Computed(found, digests, delta.finish_reason, delta.stop_reason)


def _say(receipt: Receipt, what: str) -> int:
    """Prints a line about a receipt; returns 1, for counting."""
    print(f"{receipt.id or 'receipt'} {receipt.index}: {what}")
    return 1
