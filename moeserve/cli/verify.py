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
    # The flag that selects a signer or a request.
    flag = "--key"
    flag_metavar = "HEX"
    flag_help = "public key of the expected signer (GET /v1/receipt-key)"
    checks_signatures = True

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add file and model, and the flags of `moeserve serve`, which --help does not list."""
        parser.usage = (
            f"%(prog)s FILE [{cls.flag} {cls.flag_metavar}] [--model MODEL]"
            " [flags of `moeserve serve`]"
        )
        parser.add_argument("file", type=Path, metavar="FILE", help=cls.about)
        parser.add_argument(cls.flag, metavar=cls.flag_metavar, dest="chosen", help=cls.flag_help)
        parser.add_argument(
            "--model", metavar="MODEL", help="Hugging Face model directory (default: demo)"
        )
        add_flags(parser, shown=False, model=False)

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        """Print the result of each comparison; return 0 if all are equal."""
        config = resolve(args).config
        # The engine here must neither sign nor log.
        config = replace(config, server=replace(config.server, receipt_key=None, request_log=None))
        what = f"cannot read {args.file}; expected {cls.about}"
        with ConfigError.instead_of((OSError, msgspec.DecodeError), what):
            entries = cls.read(args.file, args.chosen)
        num_faults = 0
        if cls.checks_signatures:
            for entry in entries:
                num_faults += _report_signature_faults(entry.receipt, args.chosen)
        num_faults += _report_differences(config, entries)
        print("not equal" if num_faults else "equal")
        return 1 if num_faults else 0

    @classmethod
    def read(cls, path: Path, chosen: str | None) -> list[ReceiptInFile]:
        """Return the receipts in a file."""
        return read_answers(path)


class Replay(Verify):
    """Recomputes a request of a server's request log."""

    about = "the server's request_log"
    flag = "--id"
    flag_metavar = "ID"
    flag_help = "X-Request-Id of the request (default: that of the last line)"
    checks_signatures = False

    @classmethod
    def read(cls, path: Path, chosen: str | None) -> list[ReceiptInFile]:
        """Return the log's lines about a request."""
        with path.open("rb") as file:
            lines = [msgspec.json.decode(line, type=Receipt) for line in file]
        wanted_id = chosen
        if chosen is None and lines:
            wanted_id = lines[-1].id
        if entries := [ReceiptInFile(line) for line in lines if line.id == wanted_id]:
            return entries
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


def _report_signature_faults(receipt: Receipt, key: str | None) -> int:
    """Print and count faults of version, signature and key."""
    from moeserve.frontend.signing_key import is_signed

    faults = []
    if receipt.version != VERSION:
        faults.append(
            f"version: {receipt.version} is not supported; this moeserve supports {VERSION}"
        )
    if not is_signed(receipt):
        faults.append(
            "signature: does not match: the receipt was changed, or was not signed with its"
            " public key"
        )
    if key not in (None, receipt.public_key):
        faults.append(f"key: {receipt.public_key or 'none'}, not {key}")
    for fault in faults:
        _print_about(receipt, fault)
    return len(faults)


def _report_differences(config: Config, entries: list[ReceiptInFile]) -> int:
    """Print and count differences. Recompute only answers of this model's weights."""
    from moeserve.loader.checkpoint import weights_digest
    from moeserve.loader.model_dir import resolve_model_dir
    from moeserve.models.fetch import local_config_now

    model = config.model.model
    config = local_config_now(config)
    weights, _ = weights_digest(resolve_model_dir(config.model.model))
    num_faults = 0
    comparable = []
    for entry in entries:
        receipt = entry.receipt
        if receipt.links and receipt.links[0] != first_link(receipt):
            num_faults += 1
            _print_about(
                receipt,
                "link 0 does not match this request, weights and numerics: one was changed",
            )
        has_no_weights = not receipt.weights and not receipt.links  # a line of the request log
        if has_no_weights:
            _print_about(receipt, "weights: unknown when the request was logged, so not compared")
        if receipt.weights != weights and not has_no_weights:
            num_faults += 1
            shown_weights = receipt.weights or "unknown"
            _print_about(receipt, f"weights: {shown_weights}, but {model} has {weights}")
        elif fault := check_form(receipt):
            num_faults += 1
            _print_about(receipt, f"form: {fault}")
        else:
            comparable.append(entry)
    if comparable:
        num_faults += asyncio.run(_recompute(config, comparable))
    return num_faults


async def _recompute(config: Config, entries: list[ReceiptInFile]) -> int:
    """Recompute answers one by one; print the results and count those that differ."""
    from moeserve.frontend.open import open_front_end

    num_faults = 0
    async with open_front_end(config, child=False, signs=False) as front:
        ready = await front.wait_ready()
        for entry in entries:
            receipt = entry.receipt
            try:
                fault = await _entry_difference(front, entry)
            except RequestError as error:
                fault = f"this engine rejects the request: {error}"
            if other_numerics := dict(receipt.numerics.items() - ready.numerics.items()):
                _print_about(
                    receipt,
                    f"the numerics differ, so bits may differ: {other_numerics}, here"
                    f" {ready.numerics}",
                )
            if fault:
                num_faults += 1
            _print_about(receipt, fault or _equal_parts(entry))
    return num_faults


async def _entry_difference(front: "FrontEnd", entry: ReceiptInFile) -> str:
    """Return the first difference between receipt or answer and the computation; "" if none."""
    num_logprobs = None if entry.shown is None else entry.shown.num_logprobs
    computed = await compute_again(front, entry.receipt, num_logprobs)
    receipt_difference = difference(entry.receipt, computed)
    if receipt_difference or entry.shown is None:
        return receipt_difference
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
    params = msgspec.structs.replace(
        receipt.sampling,
        n=1,
        seed=int(receipt.seed),
        max_tokens=len(expected_ids),
        min_tokens=min(receipt.sampling.min_tokens, len(expected_ids)),
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
    return Computed(
        token_ids=token_ids,
        digests=digests,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        text=text,
        logprobs=logprobs,
    )


def _print_about(receipt: Receipt, text: str) -> None:
    """Print a line about a receipt."""
    print(f"{receipt.id or 'receipt'} {receipt.index}: {text}")
