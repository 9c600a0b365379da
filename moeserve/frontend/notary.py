"""The notary: makes the receipts of answers, signs them, and keeps the log of requests, if there is one."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from moeserve.errors import CheckpointError, ConfigError, InvalidRequest, RequestFailed
from moeserve.frontend.generation import Delta, Sequence
from moeserve.frontend.signer import Signer
from moeserve.loader.weights_digest import weights_digest
from moeserve.messages import Ready
from moeserve.receipts import Receipt, with_chain
from moeserve.sampling import SamplingParams

log = logging.getLogger(__name__)
NO_KEY = "this server signs no receipts: start it with --receipt-key FILE (`moeserve receipt-key FILE` makes a key)"


class Notary:
    """Makes receipts if there is a key, and writes each finished request to the log if there is one.

    key, request_log: files. One thread reads the weights, from the start on, and then writes the log. The constructor
    raises ConfigError.
    """

    def __init__(self, model_name: str, model_dir: Path, key: str | None, request_log: str | None) -> None:
        self.signer = None if key is None else Signer(key)
        self._model_name = model_name
        self._log = None if request_log is None else _open_log(request_log)
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, "notary")
        self._weights: Future[tuple[str, str]] = Future()
        if self.signer is not None or self._log is not None:
            self._weights = self._thread.submit(weights_digest, model_dir, self._check_open)

    async def weights(self, ready: Ready) -> str:
        """Returns the digest of the weights, once they have been read. Raises InvalidRequest where there are no
        receipts, RequestFailed if the weights are not those that the engine has."""
        if self.signer is None:
            raise InvalidRequest(NO_KEY, param="receipt", code="no_receipts")
        if not ready.numerics:
            what = "this server's answers depend on more than the request, so nobody could compute them again"
            raise InvalidRequest(f"{what}: start it with --determinism batch and wire: auto", param="receipt")
        try:
            digest, fingerprint = await asyncio.shield(asyncio.wrap_future(self._weights))
        except CheckpointError as error:
            raise RequestFailed(f"no receipts: the weights cannot be read: {error}") from error
        if fingerprint != ready.checkpoint:
            raise RequestFailed("no receipts: the model's files are not those that were loaded; restart the server")
        return digest

    def end(self, sequence: Sequence, last: Delta, ready: Ready) -> Receipt | None:
        """Returns the receipt of a sequence that ends with this delta, if it asked for one; logs the sequence."""
        asked = sequence.sampling.receipt and self.signer is not None
        if not asked and self._log is None:
            return None
        receipt = self._receipt(sequence, last, ready)
        if asked and self.signer is not None:
            receipt = replace(receipt, weights=self._weights.result()[0])
            digests = sequence.digests[: len(sequence.tokens)]
            assert len(digests) == len(sequence.tokens), "a token without its digest"
            receipt = self.signer.signed(with_chain(receipt, digests))
        if self._log is not None:
            self._thread.submit(self._write, receipt)
        return receipt if asked else None

    def _receipt(self, sequence: Sequence, last: Delta, ready: Ready) -> Receipt:
        owner, sampling = sequence.owner, sequence.sampling
        return Receipt(
            id=owner.request_id,
            index=sequence.index,
            model=self._model_name,
            created=int(time.time()),
            weights="",
            numerics=ready.numerics,
            prompt_token_ids=owner.prompt_token_ids,
            seed=str(sampling.seed),
            sampling=_for_one(owner.params, sampling.max_tokens),
            marked=owner.marked,
            token_ids=sequence.tokens,
            finish_reason=last.finish_reason or "",
            stop_reason=last.stop_reason,
        )

    def _write(self, receipt: Receipt) -> None:
        """Appends a line to the log. In the thread, when the weights have been read."""
        try:
            if not receipt.weights and self._weights.exception() is None:
                receipt = replace(receipt, weights=self._weights.result()[0])
            assert self._log is not None
            self._log.write(msgspec.json.encode(receipt) + b"\n")
            self._log.flush()
        except (OSError, CancelledError) as error:
            log.warning("a finished request is missing in the log of requests: %s", error)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise CheckpointError("the server stops")

    async def close(self) -> None:
        """Writes the rest of the log and ends the thread."""
        self._closed.set()
        await asyncio.to_thread(self._thread.shutdown)
        if self._log is not None:
            self._log.close()


def _open_log(path: str) -> BinaryIO:
    try:
        return open(Path(path).expanduser(), "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
    except OSError as error:
        raise ConfigError(f"request_log {path} cannot be written: {error.strerror}") from None


def _for_one(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """Returns what decides the tokens of one sequence. Schemas become text, whose order nobody changes on the way."""
    constraint = params.structured_outputs
    if constraint is not None:
        values = {"json": constraint.json, "structural_tag": constraint.structural_tag}
        texts = {name: msgspec.json.encode(v).decode() for name, v in values.items() if isinstance(v, dict)}
        constraint = replace(constraint, **texts)
    return replace(
        params,
        n=1,
        seed=None,
        max_tokens=max_tokens,
        structured_outputs=constraint,
        logprobs=None,
        prompt_logprobs=None,
        receipt=False,
    )
