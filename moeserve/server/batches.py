"""/v1/batches: files of requests that run with the lowest priority, with OpenAI's states.

All state is in the file store. Results are appended as they arrive, and a restarted server
continues with the lines that have none. Lines use the same handlers as requests over HTTP
(`internal.py`).

Failures while a batch runs:

| failure | the batch |
|---|---|
| a line is answered with an error | continues; the line is in the error file |
| the server is full, or the key's rate is exhausted | waits |
| the disk fails to store a result, a file or a record | waits, and continues as after a restart |
| there is no space for more results (`files_bytes`) | fails |
| a bug | fails |
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import web
from msgspec import Meta, Struct

from moeserve.actor.tasks import cancel, log_error, spawn
from moeserve.errors import Conflict, InvalidRequest
from moeserve.server.batch_file import BatchLine, ResultFile, Url, answer_lines, read_input
from moeserve.server.call import HttpCall
from moeserve.server.file_objects import (
    Batch,
    BatchError,
    BatchErrors,
    BatchList,
    BatchState,
    FileObject,
    page,
    result_ids,
)
from moeserve.server.file_store import FileStore, QuotaExceeded, StorageFailed
from moeserve.server.files import store_of

log = logging.getLogger(__name__)

WINDOW_S = 24 * 3600
MAX_LOADED_BATCHES = 4  # batches whose lines are in memory
MAX_LINES = 50_000
MAX_ERRORS = 100  # in the object of a failed batch
MAX_KEPT_BATCHES = 1000  # per key
FIRST_PAUSE_S = 1.0  # after a failure of the disk; doubled each time
MAX_PAUSE_S = 60.0
BUG = "internal error; the server's log says which"

T = TypeVar("T")
Ask = Callable[[str, bytes, str], Awaitable[web.Response]]  # path, body, owner -> answer
Text = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Text], Meta(max_length=16)]


class BatchRequest(Struct, kw_only=True):
    """A file of requests to answer."""

    input_file_id: str
    endpoint: Annotated[Url, Meta(description="of every line in the file")]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: dict[str, Any] | None = None


class BatchesQuery(Struct, kw_only=True):
    """The URL's parameters of a list of batches."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: Annotated[str | None, Meta(description="the last id of the page before")] = None


class BatchFailed(Exception):
    """Raised to end a batch as failed. The message is for its owner."""


class Batches:
    """The running batches."""

    def __init__(self, store: FileStore, ask: Ask, num_slots: Callable[[], Awaitable[int]]) -> None:
        """Continue the unfinished batches in the store.

        Args:
            store: The files and batches.
            ask: Answers the request of a line.
            num_slots: Returns how many lines of all batches may run at the same time.
        """
        self.store = store
        self._ask = ask
        self._num_slots = num_slots
        # For the lines of all batches, with the number of slots when the last batch began.
        self._num_line_slots = 0
        self._line_slots = asyncio.Semaphore(0)
        self._loading_slots = asyncio.Semaphore(MAX_LOADED_BATCHES)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by id of the batch
        self._timeouts: dict[str, asyncio.Timeout] = {}  # by id of the batch, while its lines run
        for owner in store.owners():
            for batch in reversed(store.all(owner, Batch)):
                if not batch.ended:
                    self.start(owner, batch)

    def start(self, owner: str, batch: Batch) -> None:
        """Run a batch, or the rest of it."""

        def failed(name: str, error: Exception) -> None:
            log_error(name, error)
            _fail_in_memory(batch)

        task = spawn(self._run(owner, batch), name=batch.id, on_error=failed)
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def create(self, owner: str, batch: Batch) -> None:
        """Keep a new batch and run it. Raise PayloadTooLarge and StorageFailed."""
        await self.store.run_to_end(self._create(owner, batch), f"create {batch.id}")

    async def _create(self, owner: str, batch: Batch) -> None:
        await self.store.add(owner, batch)
        self.start(owner, batch)
        await self.store.prune(owner, MAX_KEPT_BATCHES)

    async def cancel(self, owner: str, batch: Batch) -> None:
        """Stop a batch; its results stay. Raise Conflict if it has ended."""
        if batch.ended:
            raise Conflict(f"the batch is {batch.status} already")
        if is_cancelled(batch):
            return
        timeout = self._timeouts.get(batch.id)
        if timeout is not None and not timeout.expired():
            # End the lines now, as if their time were over. `_run_lines` sees the new status.
            timeout.reschedule(asyncio.get_running_loop().time())
        await self._enter(owner, batch, "cancelling")

    async def stop(self) -> None:
        """Stop all batches. The next server on these files continues with them."""
        await cancel(*self._tasks.values())

    async def close(self) -> None:
        """Stop all batches, and let another server use the files."""
        await self.stop()
        await self.store.close()

    async def _run(self, owner: str, batch: Batch) -> None:
        end = await _retried(batch, lambda: self._run_lines(owner, batch))
        await _retried(batch, lambda: self._finish(owner, batch, end))

    async def _run_lines(self, owner: str, batch: Batch) -> BatchState:
        """Answer the lines. Return the state in which the batch ends. Raise StorageFailed."""
        batch.errors = None  # those of an earlier try
        try:
            async with asyncio.timeout(max(0, batch.expires_at - time.time())) as timeout:
                self._timeouts[batch.id] = timeout
                await self._answer_file(owner, batch)
        except TimeoutError:
            if not timeout.expired():  # it is another timeout, inside
                raise
            return "cancelled" if is_cancelled(batch) else "expired"
        except StorageFailed:
            raise
        except BatchFailed as error:
            _set_error(batch, str(error))
        except Exception as error:
            log_error(batch.id, error)
            _set_error(batch, BUG)
        finally:
            self._timeouts.pop(batch.id, None)
        if is_cancelled(batch):
            return "cancelled"
        return "completed" if batch.errors is None else "failed"

    async def _answer_file(self, owner: str, batch: Batch) -> None:
        if is_cancelled(batch):  # before this server started
            return
        async with self._loading_slots:
            path = self.store.path(owner, batch.input_file_id)
            if not await self.store.run_io(path.is_file):
                raise BatchFailed(f"there is no file {batch.input_file_id!r} any more")
            lines = await self.store.run_io(read_input, path)
            if errors := list(_input_errors(lines, batch.endpoint)):
                batch.errors = BatchErrors(data=errors)
                return
            batch.request_counts.total = len(lines)
            if batch.status == "validating":
                await self._enter(owner, batch, "in_progress")
            await self._answer_lines(owner, batch, lines)
        if not is_cancelled(batch):
            await self._enter(owner, batch, "finalizing")

    async def _answer_lines(self, owner: str, batch: Batch, lines: list[BatchLine]) -> None:
        """Ask for all lines that have no result."""
        store = self.store
        ids = result_ids(batch.id)
        output = ResultFile(store.path(owner, ids["output"]))
        errors = ResultFile(store.path(owner, ids["error"]))
        done_keys = await store.run_io(output.read) | await store.run_io(errors.read)
        for file in (output, errors):
            store.quota.set_size(file.path, file.size)
        num_slots = await self._num_slots()
        if num_slots != self._num_line_slots:  # the first batch, or the fleet was scaled
            self._num_line_slots = num_slots
            self._line_slots = asyncio.Semaphore(num_slots)
        line_slots = self._line_slots
        counts = batch.request_counts

        def update_counts() -> None:
            counts.completed = output.num_lines
            counts.failed = errors.num_lines

        async def handle(line: BatchLine) -> None:
            status, result = await self._answer_line(owner, line, line_slots)
            file = output if status == 200 else errors
            try:
                store.quota.grow(file.path, len(result))
            except QuotaExceeded:
                what = "there is no space for more results; delete files and send the batch again"
                raise BatchFailed(what) from None
            await store.run_in_order(file.append, result)
            update_counts()

        try:
            unanswered = [line for line in lines if line.key not in done_keys]
            update_counts()
            await answer_lines(unanswered, handle, num_slots)
        finally:
            # The thread may still append the result of a cancelled line, so the files are closed in
            # the same thread.
            for file in (output, errors):
                await store.run_in_order(file.close)
                store.quota.set_size(file.path, file.size)
            update_counts()

    async def _answer_line(
        self, owner: str, line: BatchLine, line_slots: asyncio.Semaphore
    ) -> tuple[int, bytes]:
        """Return the status and the result of a line. Wait while the server is full."""
        while True:
            async with line_slots:
                response = await self._ask(line.url, bytes(line.body), owner)
            is_full = response.status in (429, 503)
            if not is_full or response.headers.get("X-Should-Retry") == "false":
                body = response.body
                assert isinstance(body, bytes)
                request_id = response.headers.get("X-Request-Id")
                return response.status, line.result(response.status, request_id, body)
            await asyncio.sleep(float(response.headers.get("Retry-After", 1)))

    async def _finish(self, owner: str, batch: Batch, end: BatchState) -> None:
        """Make files of the results, and end the batch.

        If this raises StorageFailed, the batch has not ended.
        """
        for kind, id in result_ids(batch.id).items():
            name = f"{batch.id}_{kind}.jsonl"
            if await self.store.publish(owner, id, name, "batch_output") is not None:
                setattr(batch, f"{kind}_file_id", id)
        previous_status = batch.status
        end = "cancelled" if is_cancelled(batch) else end
        try:
            await self._enter(owner, batch, end)
        except StorageFailed:
            batch.status = previous_status
            setattr(batch, f"{end}_at", None)
            raise

    async def _enter(self, owner: str, batch: Batch, status: BatchState) -> None:
        """Change the status of a batch, and save the batch. Raise StorageFailed."""
        batch.status = status
        setattr(batch, f"{status}_at", int(time.time()))
        await self.store.save(owner, batch)


async def _retried(batch: Batch, work: Callable[[], Awaitable[T]]) -> T:
    """Return the result of work that is tried again whenever the disk fails."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await work()
        except StorageFailed as error:
            log.warning("%s: %s; next try in %g s", batch.id, error, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def is_cancelled(batch: Batch) -> bool:
    """Return whether a batch has to end without answering more lines."""
    return batch.status == "cancelling"


def _set_error(batch: Batch, message: str) -> None:
    batch.errors = BatchErrors(data=[BatchError(code="batch_failed", message=message)])


def _fail_in_memory(batch: Batch) -> None:
    """End a batch as failed without saving it, so that the next server tries again."""
    _set_error(batch, BUG)
    batch.status = "failed"
    batch.failed_at = int(time.time())


def _input_errors(lines: list[BatchLine], endpoint: str) -> Iterator[BatchError]:
    """Yield the first reasons why a file cannot be a batch."""
    if not lines:
        yield BatchError(code="empty_file", message="the input file has no line")
    if len(lines) > MAX_LINES:
        what = f"the input file has more than {MAX_LINES:,} lines"
        yield BatchError(code="too_many_lines", message=what)
    faults = [
        (line, line.fault or f"url must be {endpoint}")
        for line in lines
        if line.fault or line.url != endpoint
    ]
    for line, fault in faults[:MAX_ERRORS]:
        yield BatchError(code="invalid_line", message=fault, line=line.number)


async def create_batch(call: HttpCall) -> web.StreamResponse:
    """Answer the requests in a file with the lowest priority. The results become files."""
    store, owner = store_of(call)
    request = await call.read(BatchRequest)
    if request.output_expires_after is not None:
        what = "output_expires_after: files stay until they are deleted"
        raise InvalidRequest(what, param="output_expires_after", code="unsupported_parameter")
    file = store.find(owner, request.input_file_id, FileObject, param="input_file_id")
    now = int(time.time())
    front = call.context.front
    batch = Batch(
        id=f"batch_{uuid.uuid4().hex}",
        endpoint=request.endpoint,
        model=front.model_name if front is not None else None,
        input_file_id=file.id,
        created_at=now,
        expires_at=now + WINDOW_S,
        metadata=request.metadata,
    )
    batches = call.context.batches
    assert batches is not None
    answer = call.answer(batch)  # encoded before the batch runs and changes
    await batches.create(owner, batch)
    return answer


async def list_batches(call: HttpCall) -> web.StreamResponse:
    """List the batches of this key, newest first, a page at a time."""
    store, owner = store_of(call)
    query = call.query(BatchesQuery)
    return call.answer(BatchList(**page(store.all(owner, Batch), query.after, query.limit)))


async def retrieve_batch(call: HttpCall) -> web.StreamResponse:
    """Describe a batch: its state, and how many requests are done."""
    store, owner = store_of(call)
    return call.answer(store.find(owner, call.tail, Batch))


async def cancel_batch(call: HttpCall) -> web.StreamResponse:
    """Cancel a batch. The results so far become files. Takes no body."""
    store, owner = store_of(call)
    batch = store.find(owner, call.tail, Batch)
    assert call.context.batches is not None
    await call.context.batches.cancel(owner, batch)
    return call.answer(batch)
