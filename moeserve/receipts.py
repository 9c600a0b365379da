"""Receipts: what a server says about one answer, so that anybody who has the model can compute it
again.

A receipt has a chain of digests, hexadecimal SHA-256. The first link is of all that the answer
follows from: weights, numerics and request. Each further link is of the link before, the next
LINK_TOKENS token ids (little-endian int32), and the digests of the raw logits that each of them was
sampled from. docs/receipts.md says what that proves.
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
# digits of a digest: enough to say at which token logits begin to differ; the links prove that they
# do not
MARK = 8
VERSION = 1
_LINK = re.compile("[0-9a-f]{64}")
_SEED = re.compile("-?[0-9]{1,19}")


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of a request. A line of the log of requests is one, too, without links if none
    were asked for.

    numerics: see `Ready`. seed: decimal, because it may have more bits than numbers have in
    JavaScript. sampling: as the server resolved it, for this one sequence. grammar: what the answer
    had to match, in place of structured_outputs there. marked: see `FrontEnd.generate`. marks: the
    first MARK digits of each token's digest. public_key, signature: Ed25519, hexadecimal.
    """

    version: int = VERSION
    id: str
    index: int = 0
    model: str
    created: int
    weights: str
    numerics: dict[str, str]
    prompt_token_ids: list[int]
    seed: str
    sampling: SamplingParams
    grammar: GrammarSpec | None = None
    marked: bool = False
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    links: list[str] = []
    marks: str = ""
    public_key: str = ""
    signature: str = ""


class Computed(NamedTuple):
    """An answer that was computed again."""

    token_ids: list[int]
    digests: list[bytes]  # of each token's logits
    finish_reason: str | None
    stop_reason: int | str | None
    text: str = ""
    logprobs: Sequence[Logprobs] = ()  # of each token, if they were asked for


def with_chain(receipt: Receipt, digests: Sequence[bytes]) -> Receipt:
    """Return the receipt with its chain. digests: of each token's logits."""
    links = [first_link(receipt)]
    for start in range(0, len(receipt.token_ids), LINK_TOKENS):
        links.append(_next_link(links[-1], receipt.token_ids, digests, start))
    return replace(receipt, links=links, marks="".join(digest.hex()[:MARK] for digest in digests))


def first_link(receipt: Receipt) -> str:
    """Return the digest of all that the answer follows from."""
    question = replace(
        receipt, token_ids=[], finish_reason="", stop_reason=None, links=[], marks="", public_key=""
    )
    return hashlib.sha256(signed_bytes(question)).hexdigest()


def _next_link(link: str, token_ids: Sequence[int], digests: Sequence[bytes], start: int) -> str:
    tokens = slice(start, start + LINK_TOKENS)
    content = (
        bytes.fromhex(link) + array("i", token_ids[tokens]).tobytes() + b"".join(digests[tokens])
    )
    return hashlib.sha256(content).hexdigest()


def signed_bytes(receipt: Receipt) -> bytes:
    """Return what a signature is of: the receipt's JSON without the signature, with the keys of
    objects in order.
    """
    return b"moeserve receipt\n" + msgspec.json.encode(
        replace(receipt, signature=""), order="deterministic"
    )


def check_form(receipt: Receipt) -> str:
    """Return what is wrong with the receipt as it stands; empty if it can be computed again. Links
    are optional.
    """
    num_tokens = len(receipt.token_ids)
    num_links = len(receipt.links)
    most = receipt.sampling.max_tokens
    if not num_tokens or not _SEED.fullmatch(receipt.seed):
        return f"it has {num_tokens} tokens, and its seed is {receipt.seed[:80]!r}"
    if receipt.finish_reason == "length" and most != num_tokens:
        return f"it ends by length with {num_tokens} tokens, but max_tokens is {most}"
    if num_links and num_links != (wanted := 1 + -(-num_tokens // LINK_TOKENS)):
        return f"it has {num_links} links; {num_tokens} tokens have {wanted}"
    if wrong := [number for number, link in enumerate(receipt.links) if not _LINK.fullmatch(link)]:
        return f"link {wrong[0]} is no SHA-256 in hexadecimal"
    if len(receipt.marks) != (wanted := MARK * num_tokens * bool(num_links)):
        return (
            f"its marks have {len(receipt.marks)} digits; those of {num_tokens} tokens have "
            f"{wanted}"
        )
    return ""


def difference(receipt: Receipt, found: Computed) -> str:
    """Return the first respect in which a computed answer is not that of a receipt of good form;
    empty if none.
    """
    for i, (said, computed) in enumerate(zip_longest(receipt.token_ids, found.token_ids)):
        if computed is None:
            return f"token {i} is {said} in the receipt; the computed answer ends before it"
        moved = (
            bool(receipt.links)
            and receipt.marks[MARK * i : MARK * (i + 1)] != found.digests[i].hex()[:MARK]
        )
        if said != computed:
            return (
                f"token {i} is {said} in the receipt, {computed} "
                f"computed{' from other logits' * moved}"
            )
        if moved and _holds(receipt, found, 1 + i // LINK_TOKENS):
            return f"token {i} and its logits are equal; its mark was changed"
        if moved:
            return f"token {i} is {said} in both, but sampled from other logits"
    for number in range(1, len(receipt.links)):
        if not _holds(receipt, found, number):
            last = min(number * LINK_TOKENS, len(found.token_ids)) - 1
            return (
                f"link {number} is not of tokens {(number - 1) * LINK_TOKENS} to {last}, though "
                "they are equal"
            )
    ends = receipt.finish_reason, receipt.stop_reason
    if ends != (now := (found.finish_reason, found.stop_reason)):
        return f"the last token ends the answer by {ends} in the receipt, by {now} computed"
    return ""


def _holds(receipt: Receipt, found: Computed, number: int) -> bool:
    """Whether a link follows from the one before and what was computed."""
    start = (number - 1) * LINK_TOKENS
    return receipt.links[number] == _next_link(
        receipt.links[number - 1], found.token_ids, found.digests, start
    )
