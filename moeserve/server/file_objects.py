"""The objects of /v1/files and /v1/batches, in OpenAI's shapes: used as answers, and as records on
disk.
"""

import uuid
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal, TypeVar

from msgspec import Struct, field

from moeserve.errors import NotFound
from moeserve.protocol import Answer
from moeserve.server.errors import shorten

T = TypeVar("T")

BatchState = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class FileObject(Answer, kw_only=True):
    """A file that the server keeps."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"


class BatchCounts(Struct, kw_only=True):
    """The number of a batch's requests: all, answered, and answered with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(Struct, kw_only=True):
    """A reason why a batch failed."""

    code: str
    message: str
    line: int | None = None  # of the input file, from 1
    param: str | None = None


class BatchErrors(Struct, kw_only=True):
    """The reasons why a batch failed."""

    object: str = "list"
    data: list[BatchError]


class Batch(Answer, kw_only=True):
    """A batch, and the times at which it reached its states."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: BatchState = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts = field(default_factory=BatchCounts)
    metadata: dict[str, str] | None = None

    @property
    def ended(self) -> bool:
        """Whether the batch has reached a state that does not change."""
        return self.status in ("completed", "failed", "expired", "cancelled")


def result_ids(batch_id: str) -> dict[str, str]:
    """Return the ids of a batch's result files, by kind.

    They depend on the batch's id alone, so a restarted server finds the files.
    """
    batch = uuid.UUID(batch_id.removeprefix("batch_"))
    return {kind: f"file-{uuid.uuid5(batch, kind).hex}" for kind in ("output", "error")}


class Deleted(Answer, kw_only=True):
    """The answer to a deletion."""

    id: str
    object: str
    deleted: bool = True


class Page(Answer, kw_only=True):
    """A page of a list."""

    object: str = "list"
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False  # `after: last_id` gives the next page


def page(
    items: list[T], after: str | None, limit: int, id_of: Callable[[T], str] = attrgetter("id")
) -> dict[str, Any]:
    """Return the fields of one page of a list. Raise NotFound if `after` is none of the ids."""
    ids = [id_of(item) for item in items]
    if after is not None and after not in ids:
        raise NotFound(f"after: {shorten(after)!r} is not in the list", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    shown = ids[begin : begin + limit]
    return {
        "data": items[begin : begin + limit],
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
        "has_more": len(ids) > begin + limit,
    }


class FileList(Page, kw_only=True):
    """A page of files."""

    data: list[FileObject]


class BatchList(Page, kw_only=True):
    """A page of batches."""

    data: list[Batch]
