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
            entries = cls.read(args.file, args.chosen)
        num_faults = 0
        if cls.is_signed:
            num_faults = sum(_signature_faults(entry.receipt, args.chosen) for entry in entries)
        num_faults += _count_faults(config, entries)
        print("not equal" if num_faults else "equal")
        return 1 if num_faults else 0

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
    return sum(_report(receipt, wrong) for good, wrong in checks if not good)


def _count_faults(config: Config, entries: list[ReceiptInFile]) -> int:
    """Print and count differences. Recompute only answers of this model's weights."""
    from moeserve.loader.checkpoint import weights_digest
    from moeserve.loader.model_dir import resolve_model_dir

    weights, _ = weights_digest(resolve_model_dir(config.model.model))
    num_faults = 0
    comparable = []
    for entry in entries:
        receipt = entry.receipt
        if receipt.links and receipt.links[0] != first_link(receipt):
            num_faults += _report(
                receipt,
                "link 0 does not match this request, weights and numerics: one was changed",
            )
        if not receipt.weights and not receipt.links:
            _report(receipt, "weights: unknown when the request was logged, so not compared")
        if receipt.weights != weights and (receipt.weights or receipt.links):
            num_faults += _report(
                receipt,
                f"weights: {receipt.weights or 'unknown'}, but {config.model.model} has {weights}",
            )
        elif wrong := check_form(receipt):
            num_faults += _report(receipt, f"form: {wrong}")
        else:
            comparable.append(entry)
    return num_faults + (asyncio.run(_recompute(config, comparable)) if comparable else 0)


async def _recompute(config: Config, entries: list[ReceiptInFile]) -> int:
    """Recompute answers one by one; print the results and count those that differ."""
    from moeserve.frontend.open import open_front_end

    num_faults = 0
    async with open_front_end(config, child=False, signs=False) as front:
        ready = await front.wait_ready()
        for entry in entries:
            receipt = entry.receipt
            try:
                wrong = await _entry_difference(front, entry)
            except RequestError as error:
                wrong = f"this engine rejects the request: {error}"
            if others := dict(receipt.numerics.items() - ready.numerics.items()):
                _report(
                    receipt,
                    f"the numerics differ, so bits may differ: {others}, here {ready.numerics}",
                )
            num_faults += _report(receipt, wrong or _equal_parts(entry)) * bool(wrong)
    return num_faults


async def _entry_difference(front: "FrontEnd", entry: ReceiptInFile) -> str:
    """Return the first difference between receipt or answer and the computation; "" if none."""
    num_logprobs = None if entry.shown is None else entry.shown.num_logprobs
    computed = await compute_again(front, entry.receipt, num_logprobs)
    wrong = difference(entry.receipt, computed)
    if wrong or entry.shown is None:
        return wrong
    return answer_difference(front, entry.receipt, entry.shown, computed)


def _equal_parts(entry: ReceiptInFile) -> str:
    """Return a line on what was found equal, and what was not compared."""
    num_tokens = f"{len(entry.receipt.token_ids)} tokens"
    if not entry.receipt.links:
        return f"{num_tokens} are equal; logits were not compared: the request had no receipt"
    if entry.shown is None:
        return f"{num_tokens} and their logits are equal; the file has no text to compare"
    omitted = entry.shown.is_chat and entry.receipt.marked and entry.shown.reasoning is None
    note = "; the answer has no reasoning to compare" if omitted else ""
    return f"{num_tokens}, their logits and the answer are equal{note}"


async def compute_again(
    front: "FrontEnd", receipt: Receipt, num_logprobs: int | None = None
) -> Computed:
    """Return this engine's answer, up to the first token that differs from the receipt.

    num_logprobs: alternatives per token to compute; None for no logprobs. Raises RequestError if
    the engine rejects the request.
    """
    expected_ids = receipt.token_ids
    params = receipt.sampling
    min_tokens = min(params.min_tokens, len(expected_ids))
    params = msgspec.structs.replace(
        params,
        n=1,
        seed=int(receipt.seed),
        max_tokens=len(expected_ids),
        min_tokens=min_tokens,
        receipt=True,
        logprobs=None if num_logprobs is None else min(num_logprobs, MAX_LOGPROBS),
    )
    token_ids: list[int] = []
    text = ""
    logprobs: list[Logprobs] = []
    prompt = receipt.prompt_token_ids
    grammar = receipt.grammar
    async with await front.generate(
        prompt, params, marked=receipt.marked, grammar=grammar
    ) as generation:
        async for delta in generation:
            token_ids += delta.token_ids
            text += delta.text
            logprobs += delta.logprobs
            if token_ids != expected_ids[: len(token_ids)]:
                break
        digests = generation.sequences[0].digests[: len(token_ids)]
    return Computed(token_ids, digests, delta.finish_reason, delta.stop_reason, text, logprobs)


def _report(receipt: Receipt, what: str) -> int:
    """Print a line about a receipt; return 1, for counting."""
    print(f"{receipt.id or 'receipt'} {receipt.index}: {what}")
    return 1
