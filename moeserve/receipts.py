"""Receipts: signed records of answers, which anybody who has the model can verify by recomputation.

A receipt has a chain of SHA-256 digests in hexadecimal:

- link 0 covers everything that determines the answer: weights, numerics and request;
- each further link covers the previous link, the next LINK_TOKENS token ids (little-endian int32),
  and the digests of the raw logits from which these tokens were sampled.

docs/receipts.md explains what a receipt proves.
"""

import hashlib
import re
from array import array
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from moeserve.messages import Logprobs
from moeserve.sampling import GrammarSpec, SamplingParams

LINK_TOKENS = 64
# Hexadecimal digits of a mark, the beginning of a token's digest. Marks show at which token logits
# begin to differ; the proof that they do not is in the links.
MARK_DIGITS = 8
VERSION = 1
_LINK = re.compile("[0-9a-f]{64}")
_SEED = re.compile("-?[0-9]{1,19}")


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of one sequence of a request.

    Lines of the request log have the same format, without links unless a receipt was requested.
    """

    version: int = VERSION
    id: str
    index: int = 0
    model: str
    created: int
    weights: str
    numerics: dict[str, str]  # see `messages.Ready`
    prompt_token_ids: list[int]
    seed: str  # decimal, because it may have more bits than a number in JavaScript
    sampling: SamplingParams  # parameters of this sequence, resolved by the server
    grammar: GrammarSpec | None = None  # replaces structured_outputs in `sampling`
    marked: bool = False  # see `FrontEnd.generate`
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    links: list[str] = []
    marks: str = ""  # the first MARK_DIGITS of each token's digest
    public_key: str = ""  # Ed25519, hexadecimal
    signature: str = ""


class Computed(NamedTuple):
    """A recomputed answer."""

    token_ids: list[int]
    digests: list[bytes]  # the digest of each token's logits
    finish_reason: str | None
    stop_reason: int | str | None
    text: str = ""
    logprobs: Sequence[Logprobs] = ()  # one for each token, if requested


def with_chain(receipt: Receipt, digests: Sequence[bytes]) -> Receipt:
    """Return the receipt with its links and marks. digests: of each token's logits."""
    links = [first_link(receipt)]
    for start in range(0, len(receipt.token_ids), LINK_TOKENS):
        links.append(_next_link(links[-1], receipt.token_ids, digests, start))
    return replace(receipt, links=links, marks="".join(_mark_of(digest) for digest in digests))


def _mark_of(digest: bytes) -> str:
    return digest.hex()[:MARK_DIGITS]


def first_link(receipt: Receipt) -> str:
    """Return link 0, the digest of everything that determines the answer."""
    request = replace(
        receipt, token_ids=[], finish_reason="", stop_reason=None, links=[], marks="", public_key=""
    )
    return hashlib.sha256(signed_bytes(request)).hexdigest()


def _next_link(link: str, token_ids: Sequence[int], digests: Sequence[bytes], start: int) -> str:
    tokens = slice(start, start + LINK_TOKENS)
    content = (
        bytes.fromhex(link) + array("i", token_ids[tokens]).tobytes() + b"".join(digests[tokens])
    )
    return hashlib.sha256(content).hexdigest()


def signed_bytes(receipt: Receipt) -> bytes:
    """Return the bytes to sign: the receipt without its signature, as JSON with sorted keys."""
    return b"moeserve receipt\n" + msgspec.json.encode(
        replace(receipt, signature=""), order="deterministic"
    )


def check_form(receipt: Receipt) -> str:
    """Return what is wrong with the receipt by itself; empty if the answer can be recomputed.

    Links are optional.
    """
    num_tokens = len(receipt.token_ids)
    num_links = len(receipt.links)
    max_tokens = receipt.sampling.max_tokens
    if not num_tokens or not _SEED.fullmatch(receipt.seed):
        return f"it has {num_tokens} tokens, and its seed is {receipt.seed[:80]!r}"
    if receipt.finish_reason == "length" and max_tokens != num_tokens:
        return f"it ends by length with {num_tokens} tokens, but max_tokens is {max_tokens}"
    if num_links and num_links != (expected := 1 + -(-num_tokens // LINK_TOKENS)):
        return f"it has {num_links} links; {num_tokens} tokens have {expected}"
    if wrong := [number for number, link in enumerate(receipt.links) if not _LINK.fullmatch(link)]:
        return f"link {wrong[0]} is not a SHA-256 digest in hexadecimal"
    num_digits = MARK_DIGITS * num_tokens if num_links else 0
    if len(receipt.marks) != num_digits:
        return (
            f"its marks have {len(receipt.marks)} digits; those of {num_tokens} tokens have "
            f"{num_digits}"
        )
    return ""


def difference(receipt: Receipt, answer: Computed) -> str:
    """Return the first difference between a receipt and the recomputed answer; empty if none.

    The receipt must have passed `check_form`.
    """
    for i, (recorded, computed) in enumerate(zip_longest(receipt.token_ids, answer.token_ids)):
        if computed is None:
            return f"token {i} is {recorded} in the receipt; the computed answer ends before it"
        mark = receipt.marks[MARK_DIGITS * i : MARK_DIGITS * (i + 1)]
        has_other_logits = bool(receipt.links) and mark != _mark_of(answer.digests[i])
        if recorded != computed:
            return (
                f"token {i} is {recorded} in the receipt, {computed} "
                f"computed{' from other logits' if has_other_logits else ''}"
            )
        if has_other_logits and _link_matches(receipt, answer, 1 + i // LINK_TOKENS):
            return f"token {i} and its logits are equal; its mark was changed"
        if has_other_logits:
            return f"token {i} is {recorded} in both, but sampled from other logits"
    for number in range(1, len(receipt.links)):
        if not _link_matches(receipt, answer, number):
            first_token = (number - 1) * LINK_TOKENS
            last_token = min(number * LINK_TOKENS, len(answer.token_ids)) - 1
            return (
                f"link {number} is not of tokens {first_token} to {last_token}, though "
                "they are equal"
            )
    recorded_end = receipt.finish_reason, receipt.stop_reason
    computed_end = answer.finish_reason, answer.stop_reason
    if recorded_end != computed_end:
        return (
            f"the last token ends the answer by {recorded_end} in the receipt, by {computed_end} "
            "computed"
        )
    return ""


def _link_matches(receipt: Receipt, answer: Computed, number: int) -> bool:
    """Return whether link `number` matches the previous link and the recomputed tokens."""
    start = (number - 1) * LINK_TOKENS
    return receipt.links[number] == _next_link(
        receipt.links[number - 1], answer.token_ids, answer.digests, start
    )
