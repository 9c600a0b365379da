"""The notary: makes the receipts of answers, signs them, and keeps the log of requests, if there is
one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
from msgspec.structs import replace

from moeserve.errors import CheckpointError, ConfigError, InvalidRequest, RequestFailed
from moeserve.frontend.generation import Delta, Sequence
from moeserve.loader.checkpoint import weights_digest
from moeserve.messages import Ready
from moeserve.receipts import Receipt, with_chain

if TYPE_CHECKING:
    from moeserve.frontend.signer import Signer

log = logging.getLogger(__name__)
NO_KEY = (
    "this server signs no receipts: make a key with `moeserve receipt-key FILE`, and put `receipt_key: FILE` under "
    "`server:` in the file for --config"
)
_VARIES = (
    "this server's answers depend on more than the request, so nobody could compute them again; start it with "
    "--determinism batch and wire: auto"
)


class Notary:
    """Makes receipts if there is a key, and writes each finished request to the log if there is
    one.

    key, request_log: files. One thread reads the weights, from the start on, and then writes the
    log. The constructor raises ConfigError.
    """

    def __init__(
        self, model_name: str, model_dir: Path, key: str | None, request_log: str | None
    ) -> None:
        self.signer: Signer | None = None
        self._model_name = model_name
        self._log: BinaryIO | None = None
        self._closing = False
        self._thread = ThreadPoolExecutor(1, "notary")
        self._weights: Future[tuple[str, str]] = Future()
        if key is not None:
            from moeserve.frontend.signer import Signer  # few need it, and its import takes 40 ms

            self.signer = Signer(key)
        self.logs = request_log is not None
        if request_log is not None:
            self._log = _opened(request_log)
        if key is not None or request_log is not None:
            self._weights = self._thread.submit(weights_digest, model_dir, self._check_open)

    async def weights(self, ready: Ready) -> str:
        """Returns the digest of the weights, once they have been read. Raises InvalidRequest where
        there are no receipts, RequestFailed if the weights are not those that the engine has."""
        if self.signer is None:
            raise InvalidRequest(NO_KEY, param="receipt", code="no_receipts")
        if not ready.numerics:
            raise InvalidRequest(_VARIES, param="receipt", code="no_receipts")
        try:
            await asyncio.shield(asyncio.wrap_future(self._weights))
        except CheckpointError as error:
            raise RequestFailed(f"no receipts: the weights cannot be read: {error}") from error
        return self._checked_weights(ready)

    def _checked_weights(self, ready: Ready) -> str:
        digest, fingerprint = self._weights.result()
        if fingerprint != ready.checkpoint:
            raise RequestFailed(
                "no receipts: the model's files are not those that were loaded; restart the server"
            )
        return digest

    def end(
        self, sequence: Sequence, last: Delta, ready: Ready, *, logged: bool = True
    ) -> Receipt | None:
        """Returns the receipt of a sequence that ends with this delta, if it asked for one; logs
        the sequence if `logged`.

        Raises RequestFailed if an engine has loaded other weights since the request came.
        """
        owner = sequence.owner
        sampling = sequence.sampling
        digests = sequence.digests[: len(sequence.tokens)]
        chosen = {
            "n": 1,
            "seed": None,
            "max_tokens": sampling.max_tokens,
            "receipt": False,
            "structured_outputs": None,
        }
        receipt = Receipt(
            id=owner.request_id,
            index=sequence.index,
            model=self._model_name,
            created=int(time.time()),
            weights="",
            numerics=ready.numerics,
            prompt_token_ids=owner.prompt_token_ids,
            seed=str(sampling.seed),
            sampling=replace(owner.params, logprobs=None, prompt_logprobs=None, **chosen),
            grammar=sampling.grammar,
            marked=owner.marked,
            token_ids=sequence.tokens,
            finish_reason=last.finish_reason or "",
            stop_reason=last.stop_reason,
        )
        if sampling.receipt and self.signer is not None:
            assert len(digests) == len(sequence.tokens), "a token without its digest"
            receipt = replace(receipt, weights=self._checked_weights(ready))
            receipt = self.signer.signed(with_chain(receipt, digests))
        if self._log is not None and logged:
            self._thread.submit(self._write, self._log, receipt, ready.checkpoint)
        return receipt if receipt.signature else None

    def _write(self, file: BinaryIO, receipt: Receipt, loaded: str) -> None:
        """Appends a line to the log. In the thread, when the weights have been read. loaded: their
        fingerprint.
        """
        if not receipt.weights and self._weights.exception() is None:
            digest, fingerprint = self._weights.result()
            receipt = replace(receipt, weights=digest if fingerprint == loaded else "")
        try:
            file.write(msgspec.json.encode(receipt) + b"\n")
            file.flush()
        except OSError as error:
            log.warning("a finished request is missing in the log of requests: %s", error)

    def _check_open(self) -> None:
        if self._closing:
            raise CheckpointError("the server stops")

    async def close(self) -> None:
        """Writes the rest of the log and ends the thread."""
        self._closing = True
        self._thread.shutdown()  # in this thread: while the interpreter ends, no other can start
        if self._log is not None:
            self._log.close()


def _opened(path: str) -> BinaryIO:
    with ConfigError.instead_of((OSError, RuntimeError), f"request_log {path} cannot be written"):
        return open(
            Path(path).expanduser(), "ab", opener=lambda name, flags: os.open(name, flags, 0o600)
        )
