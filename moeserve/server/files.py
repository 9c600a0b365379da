"""/v1/files: uploads, lists, contents and deletions. `file_store.py` keeps the files."""

import asyncio
from typing import Annotated, Literal

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import BadHttpMessage
from msgspec import Meta, Struct

from moeserve.errors import InvalidRequest, NotFound, UnsupportedMedia
from moeserve.server.body import READ_TIMEOUT_S, continue_body
from moeserve.server.call import HttpCall
from moeserve.server.cors import check_form
from moeserve.server.errors import HttpError, shorten
from moeserve.server.file_objects import Deleted, FileList, FileObject, page
from moeserve.server.file_store import FileStore, QuotaExceeded, Upload, owner_key
from moeserve.server.requests import unknown_fields

OFF = (
    "this server stores no files; set `server: {files_dir: FOLDER}` in its --config to enable "
    "/v1/files and /v1/batches"
)
CHUNK_BYTES = 2**18
MAX_FIELD_BYTES = 1024  # of a form field that is not the file
FRAMING_BYTES = 64 * 1024  # of a form, in addition to the file in it
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
    """The URL's parameters of a list of files."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    after: Annotated[str | None, Meta(description="the last id of the page before")] = None
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


async def upload_file(call: HttpCall) -> web.StreamResponse:
    """Store a file, sent as multipart/form-data with the fields purpose (batch) and file."""
    store, owner = store_of(call)
    if not call.caller.owner:  # pages of other origins do not have the key
        check_form(call.request, call.context.cors)
    if call.request.content_type != "multipart/form-data":
        what = "the Content-Type must be multipart/form-data, with the fields purpose and file"
        raise UnsupportedMedia(what)
    if (call.request.content_length or 0) > store.quota.num_left + FRAMING_BYTES:
        raise QuotaExceeded(store.quota.num_left)
    async with store.upload(owner) as upload:
        fields = await _receive(call.request, upload)
        for name in FileForm.__struct_fields__:
            if name not in fields:
                raise InvalidRequest(f"{name} is required", param=name)
        if fields["purpose"] != "batch":
            what = "purpose must be batch: no other purpose is supported"
            raise InvalidRequest(what, param="purpose")
        if "expires_after[anchor]" in fields:
            what = "expires_after: files stay until they are deleted"
            raise InvalidRequest(what, param="expires_after", code="unsupported_parameter")
        call.note_unknown(unknown_fields(fields, FileForm.__struct_fields__))
        return call.answer(await upload.keep(fields["file"], "batch"))


async def _receive(request: web.BaseRequest, upload: Upload) -> dict[str, str]:
    """Write the form's file to the upload. Return the other fields, and its name as `file`."""
    fields: dict[str, str] = {}
    await continue_body(request)
    try:
        async with asyncio.timeout(READ_TIMEOUT_S) as timeout:
            async for field in await request.multipart():
                _check_field(field, fields)
                assert isinstance(field, BodyPartReader)
                assert field.name is not None
                if field.name == "file":
                    fields["file"] = shorten(field.filename or "file")
                    await _write(field, upload, timeout)
                else:
                    fields[field.name] = await _text_of(field)
    except TimeoutError as error:
        what = f"the body did not arrive within {READ_TIMEOUT_S:g} s"
        raise HttpError(408, "request_timeout", what) from error
    except _BAD_FORM as error:
        what = "the body is not multipart/form-data as expected"
        raise InvalidRequest(what, code="invalid_multipart") from error
    return fields


def _check_field(field: object, fields: dict[str, str]) -> None:
    """Raise ValueError for a field that is not valid in a plain form."""
    if not isinstance(field, BodyPartReader) or not field.name:
        raise ValueError("a field has no name")
    if field.name in fields:
        raise ValueError("two fields have one name")
    if len(fields) == MAX_FIELDS:
        raise ValueError("too many fields")
    if {"Content-Encoding", "Content-Transfer-Encoding"} & {*field.headers}:
        raise ValueError("a field is encoded")


async def _text_of(field: BodyPartReader) -> str:
    text = await field.read_chunk(MAX_FIELD_BYTES)
    if not field.at_eof() and await field.read_chunk(1):
        raise ValueError("a field is too long")
    return text.decode()


async def _write(field: BodyPartReader, upload: Upload, timeout: asyncio.Timeout) -> None:
    loop = asyncio.get_running_loop()
    num_bytes = 0
    while chunk := await field.read_chunk(CHUNK_BYTES):
        await upload.write(chunk)
        previous_num_bytes = num_bytes
        num_bytes += len(chunk)
        if num_bytes >> 20 > previous_num_bytes >> 20:  # each MiB restarts the timeout
            timeout.reschedule(loop.time() + READ_TIMEOUT_S)


async def list_files(call: HttpCall) -> web.StreamResponse:
    """List the files of this key, a page at a time."""
    store, owner = store_of(call)
    query = call.query(FilesQuery)
    files = [file for file in store.all(owner, FileObject) if query.purpose in (None, file.purpose)]
    if query.order == "asc":
        files.reverse()
    return call.answer(FileList(**page(files, query.after, query.limit)))


async def retrieve_file(call: HttpCall) -> web.StreamResponse:
    """Describe a file."""
    store, owner = store_of(call)
    return call.answer(store.find(owner, call.tail, FileObject))


async def file_content(call: HttpCall) -> web.StreamResponse:
    """Return the bytes of a file."""
    store, owner = store_of(call)
    path = store.path(owner, store.find(owner, call.tail, FileObject).id)
    headers = {
        "Content-Type": "application/octet-stream",
        "X-Content-Type-Options": "nosniff",
        "Content-Disposition": "attachment",
    }
    return web.FileResponse(path, headers=call.headers() | headers)


async def delete_file(call: HttpCall) -> web.StreamResponse:
    """Delete a file. Status 409 while a batch reads it."""
    store, owner = store_of(call)
    await store.delete(owner, call.tail)
    return call.answer(Deleted(id=call.tail, object="file"))


def store_of(call: HttpCall) -> tuple[FileStore, str]:
    """Return the file store and the caller's owner name in it. Raise NotFound without a store."""
    if call.context.batches is None:
        raise NotFound(OFF, code="files_off")
    return call.context.batches.store, owner_key(call.caller.owner)
