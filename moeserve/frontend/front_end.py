"""The front end: the part between text and token ids, on one asyncio loop, without torch.

It submits sequences to the engine over a link, converts step outputs into deltas of text, finds
stop strings and collects statistics.

It outlives the engine. It keeps the prompts and the generated tokens, so that it can submit the
sequences of a dead engine to another one. These continue with the same tokens.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, assert_never

import msgspec

from moeserve import errors
from moeserve import messages as m
from moeserve.actor.actor import Actor
from moeserve.actor.tasks import log_error
from moeserve.cluster.fleet import Fleet
from moeserve.cluster.link import EngineGone, EngineLink, FromEngine, RequestsLost, Resized
from moeserve.engine.decoding import SINGLE_TOKENS, Decoding
from moeserve.frontend.admission import Admission, Reservation, RunningSequences
from moeserve.frontend.engine_monitor import EngineMonitor
from moeserve.frontend.generation import (
    Delta,
    Generation,
    Sequence,
    check_request,
    submission,
    token_sampling,
)
from moeserve.frontend.grammars import GrammarAdmission
from moeserve.frontend.journal import StreamLog
from moeserve.frontend.receipt_signer import ReceiptSigner
from moeserve.frontend.resumable import ResumableStreams
from moeserve.frontend.serving_state import ServingState
from moeserve.frontend.stats import FrontStats
from moeserve.receipts import Receipt
from moeserve.sampling import GrammarSpec, SamplingParams
from moeserve.text.answer_format import AnswerFormat, AnswerParser
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.line_limits import LineLimits
from moeserve.text.stop import bad_sequences
from moeserve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LONG_TEXT = 4_000  # characters; longer texts are encoded in a thread
ABORT_GRACE_S = 2.0  # time for the engine's aborts to arrive, at the end of draining


class FrontEnd(Actor[FromEngine], ServingState):
    """The actor that owns all running sequences. Its inbox is that of the engine link."""

    def __init__(
        self,
        link: EngineLink,
        *,
        model_name: str,
        aliases: Collection[str] = (),
        model_dir: Path,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        answer_format: AnswerFormat | None = None,
        text_call_format: AnswerFormat | None = None,
        defaults: dict[str, Any],
        max_queued: int | None,
        max_wait_s: float = 0.0,
        processors: Collection[str] = (),
        receipt_signer: ReceiptSigner | None = None,
        resume_window_s: float = 0.0,
        decoding: Decoding = SINGLE_TOKENS,
    ) -> None:
        """Create a front end, which accepts requests once its engine is ready.

        Args:
            link: The connection to the engine or engines.
            aliases: Further names of the model.
            answer_format: The model's format of reasoning and tool calls; None if unknown.
            text_call_format: The format of tool calls, where the chat template has none and
                `answer_format` is unknown.
            defaults: Default values of sampling parameters.
            max_queued: The most sequences that may wait, beyond those that the engine runs at once.
                None: no limit (for offline use).
            max_wait_s: See `Admission`.
            processors: Names of logits processors.
            receipt_signer: Creates receipts. None: only their digests are computed.
            resume_window_s: See `ResumableStreams`. 0: streams end with their readers.
            decoding: How the model's requests gain tokens.
        """
        Actor.__init__(self, "front end", link.outbox)
        ServingState.__init__(self)
        self.model_name = model_name
        self.model_names = (model_name, *aliases)  # all that requests may name
        self.model_dir = model_dir
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.answer_format = answer_format
        self.text_call_format = text_call_format
        self.defaults = defaults
        self.receipt_signer = receipt_signer
        self.stats = FrontStats()
        # None if there is only one engine.
        self.fleet = link if isinstance(link, Fleet) and not link.single else None
        self.monitor = EngineMonitor(link, self.fleet, self.stats)
        self.link = link
        self._admission = Admission(self.stats, max_queued, max_wait_s)
        self.running = RunningSequences(self.stats, self._admission)
        self.resumable: ResumableStreams | None = None
        if resume_window_s:
            self.resumable = ResumableStreams(
                resume_window_s,
                running=self.running,
                tokenizer=tokenizer,
                abort_generation=self.drop,
                end_sequence=self._end_early,
                make_receipt=self._receipt,
            )
        self._grammars = GrammarAdmission(tokenizer)
        self._processors = processors
        self._decoding = decoding
        self.rids = itertools.count(1)
        # Generations with deltas that are not delivered yet. There may be duplicates.
        self._undelivered: list[Generation] = []
        self._unsent_aborts: list[int] = []  # aborts for which the engine's inbox was full
        self._drain_by_s: float | None = None  # deadline of draining

    # ---- requests
    # -------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        reservation: Reservation | None = None,
        priority: int = 0,
        salt: str = "",
        owner: str = "",
        request_id: str = "",
        marked: bool = False,
        parser: Callable[[], AnswerParser] | None = None,
        grammar: GrammarSpec | None = None,
        grammar_param: str = "structured_outputs",
        grammar_parts: Callable[[], Iterable[tuple[GrammarSpec, str]]] | None = None,
        line_limits: LineLimits | None = None,
    ) -> Generation:
        """Check, admit and submit a request. Raises RequestError before anything runs.

        Args:
            prompt: Token ids.
            params: The sampling parameters of the `params.n` sequences.
            reservation: From `admit`. None: the sequences are admitted here.
            priority: Lower values run first.
            salt: Requests with different salts do not share prefix-cache blocks.
            owner: The sender. New grammars of several owners are checked in turns.
            request_id: The name of the request in errors and receipts.
            marked: Keep special tokens in the text, between marks.
            parser: Returns a parser for the answer of a sequence. Implies `marked`.
            grammar: A grammar for the answers, in place of `params.structured_outputs`.
            grammar_param: The request field that errors about the grammar name.
            grammar_parts: The constraints in `grammar`, each with its request field; see
                `GrammarAdmission`.
            line_limits: Limits at which an answer ends with the stop reason AT_LINE_LIMIT.
        """
        ready = self._serving()
        check_request(prompt, priority, ready)
        params.check(ready.vocab_size)
        bad_seqs = self._bad_sequences(params)
        admitted_here = reservation is None
        reservation = reservation or self.admit(params.n, priority=priority)
        try:
            if grammar is not None or params.structured_outputs is not None:
                grammar = await self._grammars.checked_grammar(
                    params,
                    grammar,
                    param=grammar_param,
                    ready=ready,
                    owner=owner,
                    parts=grammar_parts,
                )
            if params.receipt and self.receipt_signer is not None:
                await self.receipt_signer.weights(ready)  # raises if it cannot have a receipt
            # Check again: the engine may have been lost or replaced in the meantime.
            ready = self._serving()
            samplings = token_sampling(
                params,
                len(prompt),
                ready,
                bad_seqs=bad_seqs,
                grammar=grammar,
                known_processors=self._processors,
            )
            self._decoding.check(samplings[0], grammar_param)
            generation = Generation(
                prompt,
                params,
                request_id=request_id,
                submitted_at_s=monotonic(),
                abort=self.drop,
                priority=priority,
                salt=salt,
                marked=marked or parser is not None,
            )
            generation.create_sequences(
                samplings, self.rids, self.tokenizer, parser, line_limits=line_limits
            )
            reservation.use(params.n)
            self.running.add(generation.sequences)
        finally:
            if admitted_here:
                reservation.release()
        try:
            for sequence in generation.sequences:
                self.link.send(submission(sequence))
        except errors.Overloaded:
            self.drop(generation)
            raise
        return generation

    def _bad_sequences(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of `bad_words`.

        Raises InvalidRequest for stop strings and bad words without a tokenizer.
        """
        if self.tokenizer is None:
            if params.stop_strings or params.bad_words:
                raise errors.InvalidRequest(
                    "stop strings and bad words need a tokenizer; this server runs without one"
                )
            return ()
        return bad_sequences(self.tokenizer, params.bad_words) if params.bad_words else ()

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text. special: add the tokenizer's special tokens."""
        return (await self.encode_all([text], special=special))[0]

    async def encode_all(self, texts: list[str], *, special: bool = True) -> list[list[int]]:
        """Return the token ids of several texts; see `encode`."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise errors.InvalidRequest(
                "this server runs without a tokenizer: send token ids", param="prompt"
            )

        def work() -> list[list[int]]:
            return [tokenizer.encode(text, special=special) for text in texts]

        return work() if sum(map(len, texts)) < LONG_TEXT else await asyncio.to_thread(work)

    def admit(
        self, num_sequences: int, *, within_s: float | None = None, priority: int = 0
    ) -> Reservation:
        """Admit the sequences of a request. Use the reservation in a `with` statement.

        Reserved sequences count as running, until they are submitted by `generate` or the block
        ends. Raises Overloaded if they cannot be admitted now or could not start within `within_s`
        seconds, and InvalidRequest if they could never be admitted.
        """
        ready = self._serving()
        now = monotonic()
        running = self.running
        try:
            self._admission.check(
                running.num_live,
                num_sequences,
                ready,
                now,
                within_s=within_s,
                num_behind=running.num_behind(priority),
            )
        except errors.Overloaded:
            self.stats.rejected += 1
            self._admission.count_arrivals(num_sequences, now)
            raise
        return Reservation(running, num_sequences, priority)

    def _serving(self) -> m.Ready:
        """Return the engine's facts. Raises RequestError while requests are not accepted."""
        if self.ready is None or self.state != "ready":
            raise self.refusal()
        return self.ready

    def drop(self, generation: Generation, reason: str = "abort") -> None:
        """End the running sequences of a request, here and in the engine."""
        live = [s for s in generation.sequences if self.running.sequences.get(s.rid) is s]
        for sequence in live:
            self._end(sequence, reason)
        if live:
            self._abort_in_engine([s.rid for s in live])
        if self.resumable is not None:
            self.resumable.remove(generation)

    # ---- streams of another front end
    # -------------------------------------------------------------------------------------------

    def adopt(self, log: StreamLog) -> StreamLog:
        """Take over a stream of another front end. `restart` continues to compute it.

        Return its log in this front end. Raises RequestError if that is not possible.
        """
        assert self.resumable is not None
        self._serving()  # raises if requests are not accepted
        rids = [next(self.rids) for _ in log.sequences]
        entry = msgspec.structs.replace(log.entry, rids=rids)
        adopted = self.resumable.adopt(entry, log.sequences).stream_log
        assert adopted is not None
        return adopted

    async def restart(self, log: StreamLog) -> None:
        """Submit the sequences of an adopted stream that have not ended, unless it was closed.

        Raises RequestError if that is not possible, and closes the log.
        """
        assert self.resumable is not None
        try:
            if log.entry.params.receipt and self.receipt_signer is not None:
                await self.receipt_signer.weights(self._serving())
            generation = self.resumable.generation_of(log)
            if generation is None:
                return
            live = [sequence for sequence in generation.sequences if not sequence.ended]
            self.running.add(live)
            for sequence in live:
                self.link.send(submission(sequence))
        except errors.RequestError as error:
            if (generation := self.resumable.generation_of(log)) is not None:
                self._fail(generation, error)
            raise

    def _abort_in_engine(self, rids: list[int]) -> None:
        """Abort sequences in the engine, together with those of earlier calls that were not sent.

        If the engine's inbox is full, `_apply` tries again after the next step.
        """
        self._unsent_aborts += rids
        try:
            self.link.send(m.Abort(self._unsent_aborts))
        except errors.Overloaded:
            return
        self._unsent_aborts = []

    # ---- messages from the engine
    # ---------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the front end was stopped, or the engine is gone for good (see `failure`)."""
        return self._stopping or self.failure is not None

    async def turn(self) -> None:
        """Handle the engine's messages. An unexpected error is logged, and becomes the `failure`
        that callers see.
        """
        try:
            await super().turn()
            for generation in self._undelivered:  # only once for all steps that have arrived
                generation.deliver()
            self._undelivered.clear()
        except Exception as error:
            log_error(self.name, error)
            self._give_up(errors.EngineDied(f"the front end failed: {error!r}"))

    async def on_stop(self) -> None:
        if self.failure is None:
            self._give_up(errors.EngineDied("the engine was closed"))
        if self.receipt_signer is not None:
            await self.receipt_signer.close()
        await self._grammars.close()

    def handle(self, msg: FromEngine) -> None:
        match msg:
            case m.StepOutput():
                self._on_step(msg)
            case m.Phase():
                self.phase = msg
            case m.Ready():
                self._on_ready(msg)
            case m.Refused():
                self._on_refused(msg)
            case EngineGone():
                self._on_gone(msg)
            case RequestsLost():
                self._on_lost(msg)
            case Resized(ready):
                self.ready = ready
            case m.ExpertLoad() | m.Traced():
                self.monitor.handle(msg, self.ready)
            case m.Pong() | m.Stopped() | m.Joined() | m.LeftGroup() | m.PlacementResult():
                pass  # the link handles these
            case _:
                assert_never(msg)

    def _on_step(self, out: m.StepOutput) -> None:
        if self.resumable is not None:
            self.resumable.on_step(out)  # first: `_apply` takes values out of `out`
        self._apply(out)

    def _apply(self, out: m.StepOutput) -> None:
        """Apply the rows of a step output to their sequences, and update the statistics."""
        now = monotonic()
        if out.record is not None:
            self.stats.record_step(out.record)
            self._admission.record_step(out.record)
            self.running.note_starts(out.started, now - out.record.device_us / 1e6)
        rids = memoryview(out.rids).cast("q")
        tokens = memoryview(out.tokens).cast("i")
        sequences = self.running.sequences
        for rid, piece in out.prompt_logprobs.items():
            if rid in sequences:
                sequences[rid].owner.add_prompt_rows(piece)
        for rid, digests in out.digests.items():
            if rid in sequences:
                sequences[rid].digests += digests
        for rid, token, finish in zip(rids, tokens, out.finish, strict=True):
            if (sequence := sequences.get(rid)) is None:
                # The sequence was aborted here, or a stop string ended it, while the engine still
                # computed it.
                continue
            try:
                self._advance(sequence, token, finish, out, now)
            except Exception as error:  # a bug that one request meets must not end the others
                log.error(
                    "request %s failed: %s", sequence.owner.request_id, errors.place_of(error)
                )
                self._fail(sequence.owner, errors.RequestFailed(f"{type(error).__name__}: {error}"))
        if self._unsent_aborts:
            self._abort_in_engine([])  # try again

    def _advance(
        self, sequence: Sequence, token: int, finish: int, out: m.StepOutput, now: float
    ) -> None:
        """Apply one row of a step output to a running sequence."""
        rid = sequence.rid
        if finish == m.FinishReason.ERROR:
            self._end(sequence, "error")
            message = out.errors.get(rid, "the request failed inside the engine")
            is_request_fault = message.startswith((m.NO_TOKEN_LEFT, m.GRAMMAR_FAILED))
            kind = errors.ConstraintFailed if is_request_fault else errors.RequestFailed
            self._fail(sequence.owner, kind(message))
            return
        delta = sequence.advance(token, finish, out)
        if token >= 0:
            self.running.count_token(sequence, now)
        if delta.cached_tokens is not None:
            self.stats.cached_prompt_tokens += delta.cached_tokens
        if sequence.owner.prompt_rows is not None and sequence.index == 0:
            delta.prompt_logprobs = sequence.owner.prompt_rows
            sequence.owner.prompt_rows = None
        if delta.finish_reason is not None:
            self._end(sequence, delta.finish_reason)
            if not finish:
                self._abort_in_engine([rid])  # a stop string, which the engine does not know
            sequence.receipt = self._receipt(sequence, delta)
            delta.receipt = sequence.receipt
        sequence.owner.push(delta)
        self._undelivered.append(sequence.owner)

    def _receipt(
        self, sequence: Sequence, last: Delta, ended_before: bool = False
    ) -> Receipt | None:
        """Return the receipt of a sequence that ends with this delta, if the request wants one.
        Also log the sequence, unless it ended in another process or before a replay.
        """
        if self.receipt_signer is None or last.finish_reason == "abort":
            return None  # the end of an aborted sequence cannot be reproduced
        if sequence.owner.must_replay:
            return None  # the replay creates the receipt, because it may find a stop string
        if not (sequence.sampling.receipt or self.receipt_signer.logs_requests):
            return None
        assert self.ready is not None
        return self.receipt_signer.create_receipt(
            sequence, last, self.ready, logged=not ended_before
        )

    def _on_ready(self, ready: m.Ready) -> None:
        is_restart = self.ready is not None
        self.ready = ready
        self._unsent_aborts = []
        self.phase = m.Phase("ready", 100, self.phase.elapsed_s)
        self.enter("ready")
        if is_restart:
            self.stats.record_lost_engine(0, died=True)
            self._resubmit(list(self.running.sequences), "the engine is back")
        if self._drain_by_s is not None:
            self.link.send(m.Drain(max(0.0, self._drain_by_s - monotonic())))

    def _on_lost(self, msg: RequestsLost) -> None:
        self.stats.record_lost_engine(msg.engine, died=msg.died)
        self._unsent_aborts = [rid for rid in self._unsent_aborts if rid not in msg.rids]
        what = "is gone" if msg.died else "gives requests back"
        self._resubmit(msg.rids, f"engine {msg.engine} {what} ({msg.cause})")

    def _resubmit(self, rids: Collection[int], why: str) -> None:
        """Submit these sequences again, with the tokens that they have."""
        live = [rid for rid in rids if rid in self.running.sequences]
        log.warning("%s; resuming %d sequences", why, len(live))
        for rid in live:
            if (sequence := self.running.sequences.get(rid)) is None:
                continue  # its request has failed, because another sequence could not be sent
            try:
                self.link.send(submission(sequence))
            except errors.Overloaded as error:
                self._fail(sequence.owner, error)

    def _on_refused(self, msg: m.Refused) -> None:
        if (sequence := self.running.sequences.get(msg.rid)) is not None:
            kind = errors.Overloaded if msg.code == "server_draining" else errors.RequestError
            self._fail(sequence.owner, kind(msg.message, code=msg.code))

    def _on_gone(self, gone: EngineGone) -> None:
        if gone.restarting:
            self.enter("lost")
        else:
            self._give_up(gone.error())

    def _give_up(self, failure: errors.MoeserveError) -> None:
        """Fail all sequences, because the engine is gone for good."""
        self.failure = failure
        self.enter("lost")
        self._fail_all("the engine stopped while this request ran; send it again")

    # ---- endings
    # --------------------------------------------------------------------------------------------

    def _fail(self, generation: Generation, error: errors.RequestError) -> None:
        """Fail a request because of one of its sequences."""
        generation.fail(error)
        self.drop(generation, "error")

    def _fail_all(self, why: str) -> None:
        for generation in {sequence.owner for sequence in self.running.sequences.values()}:
            error = errors.EngineLost(why)
            error.__cause__ = self.failure
            self._fail(generation, error)

    def _end_early(self, sequence: Sequence, reason: str) -> None:
        """End a sequence that is still running, here and in the engine."""
        if self.running.sequences.get(sequence.rid) is sequence:
            self._end(sequence, reason)
            self._abort_in_engine([sequence.rid])

    def _end(self, sequence: Sequence, reason: str) -> None:
        """End a sequence here. The engine has ended it, or the caller aborts it there."""
        assert self.ready is not None
        self.running.end(sequence, reason, self.ready)

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted and the engine makes progress, for readiness probes."""
        return self.state == "ready" and self.link.healthy

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let running ones finish for timeout_s seconds, and abort the rest.

        An engine that dies during this time is replaced as usual, and its requests are resumed.
        """
        if self.state == "ready":
            self.link.send(m.Drain(timeout_s))
        self.enter("draining")
        self._drain_by_s = monotonic() + timeout_s
        self.running.idle.clear()
        if self.resumable is not None:
            self.resumable.close_unread()
        if self.running.sequences:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.running.idle.wait(), timeout_s + ABORT_GRACE_S)
        self._fail_all("the server stopped before this request could finish")
