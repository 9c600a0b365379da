"""/v1/files: uploads, lists, contents and deletions; `file_store.py` keeps them."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import BadHttpMessage
from msgspec import Meta, Struct

from moeserve.errors import InvalidRequest, NotFound, PayloadTooLarge, UnsupportedMedia
from moeserve.server.call import HttpCall
from moeserve.server.errors import HttpError, shorten
from moeserve.server.file_objects import Deleted, FileList, FileObject, page
from moeserve.server.file_store import FileStore, owner_key
from moeserve.server.requests import READ_TIMEOUT_S, continue_body, unknown_fields

OFF = "this server keeps no files; `server: {files_dir: FOLDER}` in its --config turns /v1/files and /v1/batches on"
MAX_FIELD_BYTES = 1024  # of a form's field that is no file
FRAMING_BYTES = 64 * 1024  # of a form, beyond the file in it
MAX_FIELDS = 8
_BAD_FORM = (
    ValueError,
    AssertionError,
    RuntimeError,
    BadHttpMessage,
    web.RequestPayloadError,
    web.HTTPException,
)


class FileForm(Struct, kw_only=True):
    """The fields of an upload."""

    purpose: Literal["batch"]
    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]


class FilesQuery(Struct, kw_only=True):
    """A page of the list. after: the last id of the page before."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


async def upload_file(call: HttpCall) -> web.StreamResponse:
    """Keep a file, sent as multipart/form-data with the fields purpose, which is batch, and file."""
    store, owner = store_of(call)
    if call.request.content_type != "multipart/form-data":
        raise UnsupportedMedia(
            "the Content-Type must be multipart/form-data, with the fields purpose and file"
        )
    part = store.new_part(owner)
    room = await asyncio.to_thread(store.room)
    if (call.request.content_length or 0) > room + FRAMING_BYTES:
        raise _no_room(room)
    try:
        fields = await _receive(call.request, part, room)
        for name in FileForm.__struct_fields__:
            if name not in fields:
                raise InvalidRequest(f"{name} is required", param=name)
        if fields["purpose"] != "batch":
            raise InvalidRequest(
                "purpose must be batch: nothing else here reads files", param="purpose"
            )
        if "expires_after[anchor]" in fields:
            what = "expires_after: files stay until they are deleted"
            raise InvalidRequest(what, param="expires_after", code="unsupported_parameter")
        call.note_unknown(unknown_fields(fields, FileForm.__struct_fields__))
        return call.answer(store.add(owner, part, fields["file"], "batch"))
    finally:
        part.unlink(missing_ok=True)


async def _receive(request: web.BaseRequest, part: Path, room: int) -> dict[str, str]:
    """Writes the form's file to `part` and returns the other fields, with the name of the file as
    `file`.
    """
    fields: dict[str, str] = {}
    await continue_body(request)
    try:
        async with asyncio.timeout(READ_TIMEOUT_S) as limit:
            async for field in await request.multipart():
                if not isinstance(field, BodyPartReader) or not field.name or field.name in fields:
                    raise ValueError("a field has no name, or that of another")
                if len(fields) == MAX_FIELDS or {
                    "Content-Encoding",
                    "Content-Transfer-Encoding",
                } & {*field.headers}:
                    raise ValueError("a field too many, or one that is encoded")
                if field.name == "file":
                    fields["file"] = shorten(field.filename or "file")
                    await _write(field, part, room, limit)
                else:
                    text = await field.read_chunk(MAX_FIELD_BYTES)
                    if not field.at_eof() and await field.read_chunk(1):
                        raise ValueError("a field is too long")
                    fields[field.name] = text.decode()
    except TimeoutError as error:
        raise HttpError(
            408, "request_timeout", f"the body did not arrive within {READ_TIMEOUT_S:g} s"
        ) from error
    except _BAD_FORM as error:
        raise InvalidRequest(
            "the body is not multipart/form-data as expected", code="invalid_multipart"
        ) from error
    return fields


async def _write(field: BodyPartReader, part: Path, room: int, limit: asyncio.Timeout) -> None:
    loop = asyncio.get_running_loop()
    num_bytes = 0
    with part.open("wb") as file:
        while chunk := await field.read_chunk(2**18):
            num_bytes += len(chunk)
            if num_bytes > room:
                raise _no_room(room)
            await asyncio.to_thread(file.write, chunk)
            if num_bytes >> 20 > (num_bytes - len(chunk)) >> 20:
                limit.reschedule(loop.time() + READ_TIMEOUT_S)


def _no_room(room: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"there is room for {max(room, 0):,} more bytes of files; delete some", param="file"
    )


async def list_files(call: HttpCall) -> web.StreamResponse:
    """List the files of this key, a page at a time."""
    store, owner = store_of(call)
    query = call.query(FilesQuery)
    files = [file for file in store.all(owner, FileObject) if query.purpose in (None, file.purpose)]
    return call.answer(
        FileList(**page(files if query.order == "desc" else files[::-1], query.after, query.limit))
    )


async def retrieve_file(call: HttpCall) -> web.StreamResponse:
    """Describe a file."""
    store, owner = store_of(call)
    return call.answer(store.find(owner, call.tail, FileObject))


async def file_content(call: HttpCall) -> web.StreamResponse:
    """Return the bytes of a file."""
    store, owner = store_of(call)
    path = store.path(owner, store.find(owner, call.tail, FileObject).id)
    safe = {"Content-Type": "application/octet-stream", "X-Content-Type-Options": "nosniff"}
    return web.FileResponse(
        path, headers=call.headers() | safe | {"Content-Disposition": "attachment"}
    )


async def delete_file(call: HttpCall) -> web.StreamResponse:
    """Delete a file that no batch is reading."""
    store, owner = store_of(call)
    store.delete(owner, call.tail)
    return call.answer(Deleted(id=call.tail, object="file"))


def store_of(call: HttpCall) -> tuple[FileStore, str]:
    """Returns the server's files and the caller's name in them. Raises NotFound if the server keeps
    none.
    """
    if call.context.batches is None:
        raise NotFound(OFF, code="files_off")
    return call.context.batches.store, owner_key(call.caller.owner)
