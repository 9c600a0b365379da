"""`moeserve verify` and `moeserve replay` recompute answers and compare them; `moeserve
receipt-key` makes a key that signs receipts.
"""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moeserve.cli.answers import ReceiptInFile, answer_difference, read_answers
from moeserve.cli.settings import add_flags, resolve
from moeserve.config import Config
from moeserve.errors import ConfigError, RequestError
from moeserve.messages import Logprobs
from moeserve.receipts import VERSION, Computed, Receipt, check_form, difference, first_link
from moeserve.sampling import MAX_LOGPROBS

if TYPE_CHECKING:
    from moeserve.frontend.front_end import FrontEnd


class Verify:
    """Verifies receipts, and the answers that came with them."""

    about = (
        "a receipt or a list of receipts, a complete or streamed answer with receipts, "
        "or the output of a batch"
    )
    chosen = "--key", "HEX", "public key of the expected signer (GET /v1/receipt-key)"
    is_signed = True  # whether signatures are checked

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add file and model, and the flags of `moeserve serve`, which --help does not list."""
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
        """Print the result of each comparison; return 0 if all are equal."""
        config = resolve(args).config
        config = replace(config, server=replace(config.server, receipt_key=None, request_log=None))
        what = f"cannot read {args.file}; expected {cls.about}"
        with ConfigError.instead_of((OSError, msgspec.DecodeError), what):
            found = cls.read(args.file, args.chosen)
        faults = 0
        if cls.is_signed:
            faults = sum(_signature_faults(one.receipt, args.chosen) for one in found)
        faults += _faults(config, found)
        print("not equal" if faults else "equal")
        return 1 if faults else 0

    @classmethod
    def read(cls, path: Path, chosen: str | None) -> list[ReceiptInFile]:
        """Return the receipts in a file."""
        return read_answers(path)


class Replay(Verify):
    """Recomputes a request of a server's request log."""

    about = "the server's request_log"
    chosen = "--id", "ID", "X-Request-Id of the request (default: that of the last line)"
    is_signed = False

    @classmethod
    def read(cls, path: Path, chosen: str | None) -> list[ReceiptInFile]:
        """Return the log's lines about a request."""
        with path.open("rb") as file:
            lines = [msgspec.json.decode(line, type=Receipt) for line in file]
        wanted = lines[-1].id if chosen is None and lines else chosen
        if found := [ReceiptInFile(line) for line in lines if line.id == wanted]:
            return found
        raise ConfigError(f"{path} has no request {chosen!r}; ids are the answers' X-Request-Id")


class MakeReceiptKey:
    """Makes a key that signs receipts."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the file."""
        parser.add_argument("file", type=Path, metavar="FILE", help="new file for the private key")

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Write the private key and print the public one."""
        from moeserve.frontend.signing_key import make_key

        print(f"public key: {make_key(args.file)}")
        return 0


def _signature_faults(receipt: Receipt, key: str | None) -> int:
    """Print and count faults of version, signature and key."""
    from moeserve.frontend.signing_key import is_signed

    checks = (
        (
            receipt.version == VERSION,
            f"version: {receipt.version} is not supported; this moeserve supports {VERSION}",
        ),
        (
            is_signed(receipt),
            "signature: does not match: the receipt was changed, or was not signed with its "
            "public key",
        ),
        (key in (None, receipt.public_key), f"key: {receipt.public_key or 'none'}, not {key}"),
    )
    return sum(_print(receipt, wrong) for good, wrong in checks if not good)


def _faults(config: Config, found: list[ReceiptInFile]) -> int:
    """Print and count differences. Recompute only answers of this model's weights."""
    from moeserve.loader.checkpoint import weights_digest
    from moeserve.loader.model_dir import resolve_model_dir

    weights, _ = weights_digest(resolve_model_dir(config.model.model))
    faults = 0
    sound = []
    for one in found:
        receipt = one.receipt
        if receipt.links and receipt.links[0] != first_link(receipt):
            faults += _print(
                receipt,
                "link 0 does not match this request, weights and numerics: one was changed",
            )
        if not receipt.weights and not receipt.links:
            _print(receipt, "weights: unknown when the request was logged, so not compared")
        if receipt.weights != weights and (receipt.weights or receipt.links):
            faults += _print(
                receipt,
                f"weights: {receipt.weights or 'unknown'}, but {config.model.model} has {weights}",
            )
        elif wrong := check_form(receipt):
            faults += _print(receipt, f"form: {wrong}")
        else:
            sound.append(one)
    return faults + (asyncio.run(_compute(config, sound)) if sound else 0)


async def _compute(config: Config, found: list[ReceiptInFile]) -> int:
    """Recompute answers one by one; print the results and count those that differ."""
    from moeserve.frontend.open import open_front_end

    faults = 0
    async with open_front_end(config, child=False, signs=False) as front:
        ready = await front.wait_ready()
        for one in found:
            receipt = one.receipt
            try:
                wrong = await _difference(front, one)
            except RequestError as error:
                wrong = f"this engine rejects the request: {error}"
            if others := dict(receipt.numerics.items() - ready.numerics.items()):
                _print(
                    receipt,
                    f"the numerics differ, so bits may differ: {others}, here {ready.numerics}",
                )
            faults += _print(receipt, wrong or _equal(one)) * bool(wrong)
    return faults


async def _difference(front: "FrontEnd", one: ReceiptInFile) -> str:
    """Return the first difference between receipt or answer and the computation; "" if none."""
    num_logprobs = None if one.shown is None else one.shown.num_logprobs
    computed = await compute_again(front, one.receipt, num_logprobs)
    wrong = difference(one.receipt, computed)
    if wrong or one.shown is None:
        return wrong
    return answer_difference(front, one.receipt, one.shown, computed)


def _equal(one: ReceiptInFile) -> str:
    """Return a line on what was found equal, and what was not compared."""
    num_tokens = f"{len(one.receipt.token_ids)} tokens"
    if not one.receipt.links:
        return f"{num_tokens} are equal; logits were not compared: the request had no receipt"
    if one.shown is None:
        return f"{num_tokens} and their logits are equal; the file has no text to compare"
    omitted = one.shown.is_chat and one.receipt.marked and one.shown.reasoning is None
    note = "; the answer has no reasoning to compare" if omitted else ""
    return f"{num_tokens}, their logits and the answer are equal{note}"


async def compute_again(
    front: "FrontEnd", receipt: Receipt, num_logprobs: int | None = None
) -> Computed:
    """Return this engine's answer, up to the first token that differs from the receipt.

    num_logprobs: alternatives per token to compute; None for no logprobs. Raises RequestError if
    the engine rejects the request.
    """
    wanted = receipt.token_ids
    params = receipt.sampling
    least = min(params.min_tokens, len(wanted))
    params = msgspec.structs.replace(
        params,
        n=1,
        seed=int(receipt.seed),
        max_tokens=len(wanted),
        min_tokens=least,
        receipt=True,
        logprobs=None if num_logprobs is None else min(num_logprobs, MAX_LOGPROBS),
    )
    found: list[int] = []
    text = ""
    logprobs: list[Logprobs] = []
    prompt = receipt.prompt_token_ids
    grammar = receipt.grammar
    async with await front.generate(
        prompt, params, marked=receipt.marked, grammar=grammar
    ) as generation:
        async for delta in generation:
            found += delta.token_ids
            text += delta.text
            logprobs += delta.logprobs
            if found != wanted[: len(found)]:
                break
        digests = generation.sequences[0].digests[: len(found)]
    return Computed(found, digests, delta.finish_reason, delta.stop_reason, text, logprobs)


def _print(receipt: Receipt, what: str) -> int:
    """Print a line about a receipt; return 1, for counting."""
    print(f"{receipt.id or 'receipt'} {receipt.index}: {what}")
    return 1
