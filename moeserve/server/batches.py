"""/v1/batches: files of requests that run behind everything interactive, with OpenAI's states.

All state is in the file store: results are appended as they come, and a server that starts again
goes on with what has none yet. Lines go through the same handlers as requests over HTTP
(`inside.py`).
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Annotated, Any, BinaryIO, Literal

from aiohttp import web
from msgspec import Meta, Struct

from moeserve.errors import Conflict, InvalidRequest
from moeserve.server.batch_file import BatchLine, Url, open_output, read_done, read_input
from moeserve.server.call import HttpCall
from moeserve.server.file_objects import (
    Batch,
    BatchError,
    BatchErrors,
    BatchList,
    BatchState,
    FileObject,
    page,
)
from moeserve.server.file_store import FileStore
from moeserve.server.files import store_of

log = logging.getLogger(__name__)

WINDOW_S = 24 * 3600
MAX_LOADED = 4  # batches whose lines are in memory
MAX_LINES = 50_000
MAX_ERRORS = 100  # that the object of a failed batch lists
KEPT = 1000  # batches per key
CHECK_EVERY = 64  # lines between two looks at the room for results

Ask = Callable[[str, bytes, str], Awaitable[web.Response]]  # path, body, owner -> answer
Text = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Text], Meta(max_length=16)]


class BatchRequest(Struct, kw_only=True):
    """The file to answer. endpoint: of every line in it."""

    input_file_id: str
    endpoint: Url
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: dict[str, Any] | None = None


class BatchesQuery(Struct, kw_only=True):
    """A page of the list. after: the last id of the page before."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | None = None


class Batches:
    """The batches that run. slots: how many lines may run at once, all batches together."""

    def __init__(self, store: FileStore, ask: Ask, slots: Callable[[], Awaitable[int]]) -> None:
        self.store = store
        self._ask = ask
        self._num_slots = slots
        self._slots: asyncio.Semaphore | None = None
        self._loaded = asyncio.Semaphore(MAX_LOADED)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        for owner in store.owners():
            for batch in reversed(store.all(owner, Batch)):
                if not batch.ended:
                    self.start(owner, batch)

    def start(self, owner: str, batch: Batch) -> None:
        """Runs a batch, or what is left of it."""
        self._tasks[batch.id] = task = asyncio.create_task(self._run(owner, batch), name=batch.id)
        task.add_done_callback(lambda task: self._tasks.pop(batch.id, None))

    def cancel(self, owner: str, batch: Batch) -> None:
        """Stops a batch; what it has answered stays. Raises Conflict if it has ended."""
        if batch.ended:
            raise Conflict(f"the batch is {batch.status} already")
        if batch.status != "cancelling":
            self._enter(owner, batch, "cancelling")
            if batch.id in self._tasks:  # not in a server that is stopping: the next one ends it
                self._tasks[batch.id].cancel()

    async def stop(self) -> None:
        """Stops all batches; the next server on these files goes on with them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Stops, and lets another server have the files."""
        await self.stop()
        self.store.close()

    def _enter(self, owner: str, batch: Batch, status: BatchState) -> None:
        batch.status = status
        setattr(batch, f"{status}_at", int(time.time()))
        self.store.save(owner, batch)

    async def _run(self, owner: str, batch: Batch) -> None:
        try:
            async with asyncio.timeout(max(0, batch.expires_at - time.time())):
                end = await self._work(owner, batch)
        except TimeoutError:
            end = "expired"
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise
            end = "cancelled"
        except Exception as error:
            log.exception("batch %s failed", batch.id)
            what = (
                error.args[0]
                if isinstance(error, _Full)
                else "internal error; the server's log says which"
            )
            batch.errors = BatchErrors(data=[BatchError(code="batch_failed", message=what)])
            end = "failed"
        self._publish(owner, batch)
        self._enter(owner, batch, end)

    async def _work(self, owner: str, batch: Batch) -> BatchState:
        if batch.status == "cancelling":
            return "cancelled"  # a server before this one was asked to
        async with self._loaded:
            lines = await asyncio.to_thread(read_input, self.store.path(owner, batch.input_file_id))
            if faults := list(_faults(lines, batch.endpoint)):
                batch.errors = BatchErrors(data=faults)
                return "failed"
            batch.request_counts.total = len(lines)
            if batch.status == "validating":
                self._enter(owner, batch, "in_progress")
            await self._answer(owner, batch, lines)
        self._enter(owner, batch, "finalizing")
        return "completed"

    async def _answer(self, owner: str, batch: Batch, lines: list[BatchLine]) -> None:
        """Asks for all lines without a result."""
        paths = [self.store.path(owner, result_id(batch, kind)) for kind in ("output", "error")]
        good, bad = [await asyncio.to_thread(read_done, path) for path in paths]
        counts = batch.request_counts
        counts.completed = len(good)
        counts.failed = len(bad)
        waiting = iter([line for line in lines if line.key not in good | bad])
        num_slots = await self._num_slots()
        self._slots = slots = self._slots or asyncio.Semaphore(num_slots)

        async def worker(output: BinaryIO, errors: BinaryIO) -> None:
            """Asks for one line after the other until none is left."""
            for line in waiting:  # shared: each worker takes the next line that nobody has
                if line.number % CHECK_EVERY == 1 and await asyncio.to_thread(self.store.room) <= 0:
                    raise _Full(
                        "there is no room for more results; delete files and send the batch again"
                    )
                status, result = await self._ask_line(owner, line, slots)
                file = output if status == 200 else errors
                file.write(result)
                file.flush()
                counts.completed += status == 200
                counts.failed += status != 200

        with ExitStack() as files:
            output, errors = (files.enter_context(open_output(path)) for path in paths)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(num_slots):
                        group.create_task(worker(output, errors))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None

    async def _ask_line(
        self, owner: str, line: BatchLine, slots: asyncio.Semaphore
    ) -> tuple[int, bytes]:
        while True:
            async with slots:
                response = await self._ask(line.url, bytes(line.body), owner)
            if (
                response.status not in (429, 503)
                or response.headers.get("X-Should-Retry") == "false"
            ):
                body = response.body
                assert isinstance(body, bytes)
                return response.status, line.result(
                    response.status, response.headers.get("X-Request-Id"), body
                )
            await asyncio.sleep(
                float(response.headers.get("Retry-After", 1))
            )  # this request can wait

    def _publish(self, owner: str, batch: Batch) -> None:
        """Makes files of the results that there are."""
        for kind in ("output", "error"):
            id = result_id(batch, kind)
            path = self.store.path(owner, id)
            if path.exists() and path.stat().st_size:
                self.store.publish(owner, id, f"{batch.id}_{kind}.jsonl", "batch_output")
                setattr(batch, f"{kind}_file_id", id)
            else:
                path.unlink(missing_ok=True)


class _Full(Exception):
    """The file store takes no more results."""


def result_id(batch: Batch, kind: str) -> str:
    """Returns the id of a batch's file of results; always the same, so that a restart finds it."""
    return f"file-{uuid.uuid5(uuid.UUID(batch.id.removeprefix('batch_')), kind).hex}"


def _faults(lines: list[BatchLine], endpoint: str) -> Iterator[BatchError]:
    """Yields why the file cannot be a batch, the first reasons only."""
    if not lines:
        yield BatchError(code="empty_file", message="the input file has no line")
    if len(lines) > MAX_LINES:
        yield BatchError(
            code="too_many_lines", message=f"the input file has more than {MAX_LINES:,} lines"
        )
    faults = [
        (line, line.fault or f"url must be {endpoint}")
        for line in lines
        if line.fault or line.url != endpoint
    ]
    for line, fault in faults[:MAX_ERRORS]:
        yield BatchError(code="invalid_line", message=fault, line=line.number)


async def create_batch(call: HttpCall) -> web.StreamResponse:
    """Answer the requests in a file, behind all others; the results become files."""
    store, owner = store_of(call)
    request = await call.read(BatchRequest)
    if request.output_expires_after is not None:
        what = "output_expires_after: files stay until they are deleted"
        raise InvalidRequest(what, param="output_expires_after", code="unsupported_parameter")
    file = store.find(owner, request.input_file_id, FileObject, param="input_file_id")
    store.admit()
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
    store.save(owner, batch)
    store.prune(owner, KEPT)
    batches = call.context.batches
    assert batches is not None
    answer = call.answer(batch)
    batches.start(owner, batch)
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
    """Stop a batch. The results that it has so far become files. Takes no body."""
    store, owner = store_of(call)
    batch = store.find(owner, call.tail, Batch)
    assert call.context.batches is not None
    call.context.batches.cancel(owner, batch)
    return call.answer(batch)
