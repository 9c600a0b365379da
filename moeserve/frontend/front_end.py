"""The front end: everything between a caller's text and the engine's integers, on one asyncio loop, without torch.

It numbers sequences, submits them over a link to the engine, turns columnar step outputs into deltas, finds stop
strings, counts, and survives the engine: prompt and emitted tokens stay here, so when the engine dies and is
started again, every running sequence is submitted with what it already has and goes on with the same tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, assert_never

import msgspec

from moeserve.errors import EngineLost, InvalidRequest, MoeserveError, Overloaded, RequestError, RequestFailed
from moeserve.frontend.generation import Generation, Sequence
from moeserve.frontend.prepare import check_prompt, token_sampling
from moeserve.frontend.stats import FrontStats
from moeserve.launch.link import EngineGone, EngineLink
from moeserve.messages import (
    Abort,
    Answer,
    Drain,
    FinishReason,
    Phase,
    Pong,
    Ready,
    Refused,
    StepOutput,
    Stopped,
    Submit,
)
from moeserve.sampling import SamplingParams
from moeserve.text.bad_words import bad_sequences
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.detokenizer import Detokenizer, make_detokenizer
from moeserve.text.stop import StopMatcher
from moeserve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "draining", "lost"]
LONG_TEXT = 4_000  # characters; longer texts are tokenized in a thread
MAX_RETRY_AFTER_S = 60.0


class FrontEnd:
    """Owns all running sequences of one engine. `run()` must run as a task while anything else is called.

    max_queued: sequences that may wait beyond those that the engine runs at once; None for no limit (offline use).
    """

    def __init__(
        self,
        link: EngineLink,
        *,
        model_name: str,
        model_dir: Path,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        defaults: dict[str, Any],
        max_queued: int | None,
    ) -> None:
        self.model_name = model_name
        self.model_dir = model_dir
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.defaults = defaults
        self.stats = FrontStats()
        self.state: State = "loading"
        self.ready: Ready | None = None
        self.phase = Phase("starting", 0, 0.0)
        self.failure: MoeserveError | None = None  # why the engine is gone for good
        self._link = link
        self._max_queued = max_queued
        self._rids = itertools.count(1)
        self._sequences: dict[int, Sequence] = {}
        self._changed = asyncio.Event()  # set whenever state changes or the last sequence ends
        self._seconds_per_end = 0.1  # moving average, for Retry-After
        self._last_end_at = 0.0

    # ---- requests -------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        request_id: str = "",
    ) -> Generation:
        """Checks, admits and submits. Raises RequestError before anything runs; otherwise the deltas follow."""
        ready = self._admit(params.n)
        check_prompt(prompt, ready)
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            raise InvalidRequest("stop strings and bad words need a tokenizer; this server runs without one")
        bad = bad_sequences(self.tokenizer, params.bad_words) if self.tokenizer and params.bad_words else ()
        samplings = token_sampling(params, len(prompt), ready, bad)
        generation = Generation(prompt, params, request_id, self._now(), self._abort, priority, salt)
        for index, sampling in enumerate(samplings):
            if index and sampling.prompt_logprobs is not None:
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)  # they come once
            sequence = Sequence(next(self._rids), index, generation, sampling, *self._text_side(prompt, params))
            generation.sequences.append(sequence)
            self._sequences[sequence.rid] = sequence
            self._link.send(self._submission(sequence))
        self.stats.num_active = len(self._sequences)
        return generation

    def _text_side(self, prompt: list[int], params: SamplingParams) -> tuple[Detokenizer | None, StopMatcher | None]:
        if self.tokenizer is None:
            return None, None
        detok = make_detokenizer(self.tokenizer, prompt, skip_special_tokens=params.skip_special_tokens)
        stops = params.stop_strings
        return detok, StopMatcher(stops, include_stop=params.include_stop_str_in_output) if stops else None

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, with the tokenizer's own special tokens around it if `special`."""
        if self.tokenizer is None:
            raise InvalidRequest("this server runs without a tokenizer: send token ids", param="prompt")
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, special=special)
        return await asyncio.to_thread(self.tokenizer.encode, text, special=special)

    def _admit(self, num_sequences: int) -> Ready:
        if self.state == "draining":
            raise Overloaded("the server is shutting down", code="server_draining", retry_after_s=5)
        if self.ready is None or self.state != "ready":
            what = "the engine is being restarted" if self.state == "lost" else f"loading: {self.phase.name}"
            raise Overloaded(what, code="model_loading", retry_after_s=2)
        if self._max_queued is not None:
            excess = len(self._sequences) + num_sequences - self.ready.max_num_seqs - self._max_queued
            if excess > 0:
                self.stats.rejected += 1
                wait_s = min(max(1.0, excess * self._seconds_per_end), MAX_RETRY_AFTER_S)
                raise Overloaded(
                    f"{len(self._sequences)} sequences run or wait; no more are taken now",
                    retry_after_s=wait_s,
                )
        return self.ready

    def _abort(self, generation: Generation) -> None:
        live = [s for s in generation.sequences if s.rid in self._sequences]
        for sequence in live:
            self._end(sequence, "abort")
        if live:
            self._link.send(Abort([s.rid for s in live]))

    # ---- the engine's news ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Handles what the engine says until cancelled, or until it is gone for good (`failure` says why)."""
        while self.failure is None:
            for msg in await self._link.inbox.drain(wait=True):
                match msg:
                    case StepOutput():
                        self._deliver(msg)
                    case Phase():
                        self.phase = msg
                    case Ready():
                        self._on_ready(msg)
                    case Refused():
                        self._on_refused(msg)
                    case EngineGone():
                        self._on_gone(msg)
                    case Pong() | Answer() | Stopped():
                        pass  # the link answers for these
                    case _:
                        assert_never(msg)

    def _deliver(self, out: StepOutput) -> None:
        now = self._now()
        if out.record is not None:
            self.stats.step(out.record)
        rids = memoryview(out.rids).cast("q")
        tokens = memoryview(out.tokens).cast("i")
        sequences = self._sequences
        for rid, piece in out.prompt_logprobs.items():
            if rid in sequences:
                sequences[rid].owner.add_prompt_rows(piece)
        for rid, token, finish in zip(rids, tokens, out.finish, strict=True):
            sequence = sequences.get(rid)
            # None: aborted here, or ended by a stop string, while the engine still computed
            if sequence is not None:
                self._advance(sequence, token, finish, out, now)

    def _advance(self, sequence: Sequence, token: int, finish: int, out: StepOutput, now: float) -> None:
        """One row of a step output, for a sequence that somebody still reads."""
        rid = sequence.rid
        if finish == FinishReason.ERROR:
            self._fail(sequence, RequestFailed(out.errors.get(rid, "the request failed inside the engine")))
            return
        delta = sequence.advance(token, finish, out.stop_ids.get(rid))
        if token >= 0:
            self._count_token(sequence, now)
        if rid in out.logprobs:
            delta.logprobs.append(out.logprobs[rid])
        if rid in out.cached:
            delta.cached_tokens = out.cached[rid]
            self.stats.cached_prompt_tokens += out.cached[rid]
        if sequence.index == 0:
            delta.prompt_logprobs = sequence.owner.take_prompt_rows()
        if delta.finish_reason is not None:
            if not finish:
                self._link.send(Abort([rid]))  # a stop string ended it; the engine does not know yet
            self._end(sequence, delta.finish_reason)
        sequence.owner.push(delta)

    def _count_token(self, sequence: Sequence, now: float) -> None:
        stats = self.stats
        stats.generation_tokens += 1
        if sequence.first_at is None:
            sequence.first_at = now
            stats.ttft_s.add(now - sequence.owner.submitted_at)
        else:
            stats.itl_s.add(now - sequence.last_at)
        sequence.last_at = now

    def _on_ready(self, ready: Ready) -> None:
        again = self.ready is not None
        self.ready = ready
        if self.state != "draining":
            self.state = "ready"
        if again:
            self.stats.engine_restarts += 1
            log.warning("engine is back; %d sequences go on where they were", len(self._sequences))
            for sequence in self._sequences.values():
                self._link.send(self._submission(sequence))
        self._notify()

    @staticmethod
    def _submission(sequence: Sequence) -> Submit:
        """Its prompt and whatever was already emitted: the same message starts a sequence and replays it."""
        owner = sequence.owner
        sampling = sequence.sampling
        if sequence.tokens and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)  # already delivered
        return Submit(
            rid=sequence.rid,
            tokens=array("i", [*owner.prompt_token_ids, *sequence.tokens]).tobytes(),
            num_prompt=len(owner.prompt_token_ids),
            sampling=sampling,
            priority=owner.priority,
            salt=owner.salt,
        )

    def _on_refused(self, msg: Refused) -> None:
        sequence = self._sequences.get(msg.rid)
        if sequence is not None:
            self._fail(sequence, RequestError(msg.message, code=msg.code))

    def _on_gone(self, gone: EngineGone) -> None:
        log.error("engine gone (%s)%s", gone.cause, "; restarting it" if gone.restarting else "")
        if self.state != "draining":
            self.state = "lost"
        if gone.restarting and self.state != "draining":
            self._notify()
            return
        self.failure = gone.error()
        for sequence in list(self._sequences.values()):
            self._fail(sequence, EngineLost("the engine stopped while this request ran; send it again"))
        self._notify()

    # ---- endings --------------------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: RequestError) -> None:
        """One failed sequence fails its request: the others of the same request are aborted."""
        owner = sequence.owner
        self._end(sequence, "error")
        owner.fail(error)
        self._abort(owner)

    def _end(self, sequence: Sequence, reason: str) -> None:
        now = self._now()
        del self._sequences[sequence.rid]
        owner = sequence.owner
        owner.num_live -= 1
        self.stats.num_active = len(self._sequences)
        self.stats.end(reason, now - owner.submitted_at, len(owner.prompt_token_ids), len(sequence.tokens))
        if self._last_end_at:
            self._seconds_per_end += 0.05 * (now - self._last_end_at - self._seconds_per_end)
        self._last_end_at = now
        if not self._sequences:
            self._notify()

    async def wait_ready(self) -> Ready:
        """Returns when the engine serves. Raises ConfigError or EngineDied when it is gone for good."""
        await self._until(lambda: self.state == "ready" or self.failure is not None)
        if self.failure is not None:
            raise self.failure
        assert self.ready is not None
        return self.ready

    async def died(self) -> MoeserveError:
        """Returns, with the cause, once the engine is gone for good."""
        await self._until(lambda: self.failure is not None)
        assert self.failure is not None
        return self.failure

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and the engine makes progress: what a readiness probe wants to know."""
        return self.state == "ready" and self._link.healthy

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, lets running ones finish for timeout_s seconds, then aborts the rest."""
        was_serving = self.state == "ready"
        self.state = "draining"
        self._notify()
        if was_serving:
            self._link.send(Drain(timeout_s))
        try:
            async with asyncio.timeout(timeout_s + 2.0 if was_serving else 0):
                await self._until(lambda: not self._sequences)
        except TimeoutError:
            for sequence in list(self._sequences.values()):
                self._fail(sequence, EngineLost("the server stopped before this request could finish"))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
