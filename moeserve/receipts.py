"""Receipts: what a server says about one answer, so that anybody who has the model can compute it again.

A receipt has a chain of digests, hexadecimal SHA-256. The first link is of all that the answer follows from: weights,
numerics and request. Each further link is of the link before, the next LINK_TOKENS token ids (little-endian int32), and
the digests of the raw logits that each of them was sampled from. docs/receipts.md says what that proves.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from array import array
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from moeserve.sampling import SamplingParams

LINK_TOKENS = 64
MARK_BYTES = 4  # of a digest: enough to say at which token logits begin to differ; the links prove that they do not
VERSION = 1
_LINK = re.compile("[0-9a-f]{64}")


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence of a request. An entry of the server's log of requests is one, too, without links if the request
    asked for no receipt.

    index: of the sequence. numerics: see `Ready`. seed: decimal, because it may have more bits than numbers have in JavaScript. sampling: as
    the server resolved it, for this one sequence. marked: see `FrontEnd.generate`. marks: the first bytes of each
    token's digest, base64. public_key, signature: Ed25519, hexadecimal.
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
    marked: bool = False
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    links: list[str] = []
    marks: str = ""
    public_key: str = ""
    signature: str = ""


def with_chain(receipt: Receipt, digests: Sequence[bytes]) -> Receipt:
    """Returns the receipt with its chain. digests: of each token's logits."""
    links = [first_link(receipt)]
    for start in range(0, len(receipt.token_ids), LINK_TOKENS):
        links.append(next_link(links[-1], receipt.token_ids, digests, start))
    marks = base64.b64encode(b"".join(digest[:MARK_BYTES] for digest in digests)).decode()
    return replace(receipt, links=links, marks=marks)


def first_link(receipt: Receipt) -> str:
    """Returns the digest of all that the answer follows from."""
    question = replace(receipt, token_ids=[], finish_reason="", stop_reason=None, links=[], marks="")
    return hashlib.sha256(signed_bytes(replace(question, public_key=""))).hexdigest()


def next_link(link: str, token_ids: Sequence[int], digests: Sequence[bytes], start: int) -> str:
    """Returns the link behind `link`, of up to LINK_TOKENS tokens from `start` on."""
    ids = array("i", token_ids[start : start + LINK_TOKENS]).tobytes()
    return hashlib.sha256(bytes.fromhex(link) + ids + b"".join(digests[start : start + LINK_TOKENS])).hexdigest()


def check_form(receipt: Receipt) -> str:
    """Returns what is wrong with the receipt as it stands; empty if it could be verified. Links are optional."""
    num_tokens, most = len(receipt.token_ids), receipt.sampling.max_tokens
    wanted = 1 + -(-num_tokens // LINK_TOKENS)
    if not num_tokens or not receipt.seed.removeprefix("-").isdecimal():
        return f"it has {num_tokens} tokens, and its seed is {receipt.seed[:80]!r}"
    if receipt.finish_reason == "length" and most != num_tokens:
        return f"it ends by length with {num_tokens} tokens, but max_tokens is {most}"
    if receipt.links and len(receipt.links) != wanted:
        return f"it has {len(receipt.links)} links; {num_tokens} tokens have {wanted}"
    for number, link in enumerate(receipt.links):
        if not _LINK.fullmatch(link):
            return f"link {number} is no SHA-256 in hexadecimal"
    try:
        marks = marks_of(receipt)
    except binascii.Error as error:
        return f"its marks are not base64: {error}"
    if receipt.links and not len(marks) == num_tokens == len(b"".join(marks)) / MARK_BYTES:
        return f"it has {len(marks)} marks for {num_tokens} tokens"
    return ""


def marks_of(receipt: Receipt) -> list[bytes]:
    """Returns each token's mark. Raises binascii.Error."""
    marks = base64.b64decode(receipt.marks, validate=True)
    return [marks[at : at + MARK_BYTES] for at in range(0, len(marks), MARK_BYTES)]


def signed_bytes(receipt: Receipt) -> bytes:
    """Returns what a signature is of: the receipt's JSON without the signature, with the keys of objects in order."""
    return b"moeserve receipt\n" + msgspec.json.encode(replace(receipt, signature=""), order="deterministic")
