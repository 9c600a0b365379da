"""Create and sign the receipts of answers, and log finished requests."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from moeserve.errors import CheckpointError, InvalidRequest, RequestFailed
from moeserve.frontend.generation import Delta, Sequence
from moeserve.frontend.paths import user_path
from moeserve.frontend.request_log import RequestLog
from moeserve.loader.checkpoint import weights_digest
from moeserve.messages import Ready
from moeserve.receipts import Receipt, with_chain

if TYPE_CHECKING:
    from moeserve.frontend.signing_key import SigningKey

NO_KEY = (
    "this server signs no receipts: create a key with `moeserve receipt-key FILE`, and put "
    "`receipt_key: FILE` under `server:` in the file for --config"
)
_VARIES = (
    "this server's answers depend on more than the request, so they could not be reproduced; "
    "start it with --determinism batch and wire: auto"
)


class WeightsHash:
    """The digest of a model's weights, computed in a thread. Large models take minutes."""

    def __init__(self, model_dir: Path) -> None:
        self._closing = threading.Event()
        self._result: Future[tuple[str, str]] = Future()
        thread = threading.Thread(
            target=self._run, args=(model_dir,), name="weights digest", daemon=True
        )
        thread.start()

    def _run(self, model_dir: Path) -> None:
        try:
            self._result.set_result(weights_digest(model_dir, self._check_open))
        except BaseException as error:  # any error, so that `wait` does not wait forever
            self._result.set_exception(error)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise CheckpointError("the server stops")

    async def wait(self) -> None:
        """Wait until the digest is known. Raises CheckpointError."""
        await asyncio.shield(asyncio.wrap_future(self._result))

    def of(self, fingerprint: str) -> str:
        """Return the digest; "" if it is not known, or if the files had another fingerprint."""
        if not self._result.done() or self._result.exception() is not None:
            return ""
        digest, hashed_fingerprint = self._result.result()
        return digest if hashed_fingerprint == fingerprint else ""

    async def close(self) -> None:
        """Stop computing."""
        self._closing.set()
        await asyncio.gather(asyncio.wrap_future(self._result), return_exceptions=True)


class ReceiptSigner:
    """Signs receipts if there is a key, and logs finished requests if there is a log.

    If there is either, hashing the weights begins at once.

    key, request_log: paths of files.

    Raises ConfigError.
    """

    def __init__(
        self, model_name: str, model_dir: Path, key: str | None, request_log: str | None
    ) -> None:
        self.key: SigningKey | None = None
        self.logs_requests = request_log is not None
        self._model_name = model_name
        if key is not None:
            from moeserve.frontend.signing_key import SigningKey  # its import takes 40 ms

            self.key = SigningKey(user_path("receipt_key", key))
        self._log = None
        if request_log is not None:
            self._log = RequestLog(user_path("request_log", request_log))
        self._hash = WeightsHash(model_dir) if key or request_log else None

    async def weights(self, ready: Ready) -> str:
        """Wait until the weights are hashed, and return the digest.

        Raises InvalidRequest if this server signs no receipts, and RequestFailed if the engine has
        loaded other weights.
        """
        if self.key is None or self._hash is None:
            raise InvalidRequest(NO_KEY, param="receipt", code="no_receipts")
        if not ready.numerics:
            raise InvalidRequest(_VARIES, param="receipt", code="no_receipts")
        try:
            await self._hash.wait()
        except CheckpointError as error:
            raise RequestFailed(f"no receipts: the weights cannot be read: {error}") from error
        return self._checked_weights(ready)

    def _checked_weights(self, ready: Ready) -> str:
        assert self._hash is not None
        if not (digest := self._hash.of(ready.checkpoint)):
            raise RequestFailed(
                "no receipts: the model's files are not those that were loaded; restart the server"
            )
        return digest

    def create_receipt(
        self, sequence: Sequence, last: Delta, ready: Ready, *, logged: bool
    ) -> Receipt | None:
        """Return the receipt of a sequence that ends with this delta, if the request wants one.

        logged: also log the sequence.

        Raises RequestFailed if an engine has loaded other weights since the request arrived.
        """
        owner = sequence.owner
        sampling = sequence.sampling
        # Of several sequences, each has its own receipt, with its own seed. The receipt's `grammar`
        # replaces structured_outputs.
        resolved = {
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
            weights="" if self._hash is None else self._hash.of(ready.checkpoint),
            numerics=ready.numerics,
            prompt_token_ids=owner.prompt_token_ids,
            seed=str(sampling.seed),
            sampling=replace(owner.params, logprobs=None, prompt_logprobs=None, **resolved),
            grammar=sampling.grammar,
            marked=owner.marked,
            token_ids=sequence.tokens,
            finish_reason=last.finish_reason or "",
            stop_reason=last.stop_reason,
        )
        if sampling.receipt and self.key is not None:
            digests = sequence.digests[: len(sequence.tokens)]  # see `Sequence`
            assert len(digests) == len(sequence.tokens), "a token without its digest"
            receipt = replace(receipt, weights=self._checked_weights(ready))
            receipt = self.key.signed(with_chain(receipt, digests))
        if self._log is not None and logged:
            self._log.add(msgspec.json.encode(receipt))
        return receipt if receipt.signature else None

    async def close(self) -> None:
        """Write the rest of the log, and stop hashing."""
        if self._log is not None:
            await self._log.close()
        if self._hash is not None:
            await self._hash.close()
