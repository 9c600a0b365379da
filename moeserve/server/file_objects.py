"""What /v1/files and /v1/batches answer and keep on disk, in OpenAI's shapes."""

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
    """The requests of a batch by how they ended."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(Struct, kw_only=True):
    """A reason why a batch could not run. line: of its input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, kw_only=True):
    """All such reasons."""

    object: str = "list"
    data: list[BatchError]


class Batch(Answer, kw_only=True):
    """A batch, and when it reached each state."""

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
        """Whether nothing will happen to it any more."""
        return self.status in ("completed", "failed", "expired", "cancelled")


class Deleted(Answer, kw_only=True):
    """What was deleted."""

    id: str
    object: str
    deleted: bool = True


class Page(Answer, kw_only=True):
    """A page of a list. has_more: whether `after: last_id` has some."""

    object: str = "list"
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


def page(
    items: list[T], after: str | None, limit: int, id_of: Callable[[T], str] = attrgetter("id")
) -> dict[str, Any]:
    """Returns the fields of one page of a list. Raises NotFound if `after` is none of the ids."""
    ids = [id_of(item) for item in items]
    if after is not None and after not in ids:
        raise NotFound(f"after: {shorten(after)!r} is not in the list", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    shown = ids[begin : begin + limit]
    more = len(ids) > begin + limit
    first, last = (shown[0], shown[-1]) if shown else (None, None)
    return {
        "data": items[begin : begin + limit],
        "first_id": first,
        "last_id": last,
        "has_more": more,
    }


class FileList(Page, kw_only=True):
    """Files."""

    data: list[FileObject]


class BatchList(Page, kw_only=True):
    """Batches."""

    data: list[Batch]
