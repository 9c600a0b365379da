"""/v1/files through the openai package, and what its package would never send."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from moeserve.errors import ConfigError
from moeserve.server import file_store
from moeserve.server.file_objects import FileObject
from moeserve.server.file_store import FileStore

LINES = b'{"custom_id": "a"}\n' * 3


def client_of(live: Any, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def keeping(launch: Any, tmp_path: Path) -> Any:
    return lambda **settings: launch(files_dir=str(tmp_path / "files"), **settings)


async def test_a_file_from_upload_to_deletion(keeping: Any) -> None:
    async with keeping() as live, client_of(live) as client:
        big = LINES * 100_000  # several chunks
        made = await client.files.create(file=("in.jsonl", big), purpose="batch")
        assert (made.object, made.bytes, made.filename, made.purpose) == (
            "file",
            len(big),
            "in.jsonl",
            "batch",
        )
        assert await client.files.retrieve(made.id) == made
        assert (await client.files.content(made.id)).content == big
        assert [file async for file in client.files.list()] == [made]
        assert (await client.files.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.files.content(made.id)


async def test_lists_come_in_pages(keeping: Any) -> None:
    async with keeping() as live, client_of(live) as client:
        ids = [
            (await client.files.create(file=(f"{i}", LINES), purpose="batch")).id for i in range(5)
        ]
        page = await client.files.list(limit=2)
        assert ([file.id for file in page.data], page.has_more) == (ids[:-3:-1], True)
        assert [file.id async for file in client.files.list(limit=2)] == ids[::-1]
        assert [file.id async for file in client.files.list(order="asc")] == ids
        assert [file.id async for file in client.files.list(purpose="batch_output")] == []
        with pytest.raises(openai.NotFoundError) as caught:
            await client.files.list(after="file-nowhere")
        assert caught.value.param == "after"


async def test_keys_see_their_own_files_only(keeping: Any) -> None:
    async with (
        keeping(api_key=("one", "two")) as live,
        client_of(live, "one") as one,
        client_of(live, "two") as two,
    ):
        made = await one.files.create(file=("x", LINES), purpose="batch")
        assert [file async for file in two.files.list()] == []
        for call in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        with pytest.raises(openai.NotFoundError):
            await two.batches.create(
                input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        assert (await one.files.content(made.id)).content == LINES


async def test_files_survive_a_restart_and_unfinished_uploads_do_not(
    keeping: Any, tmp_path: Path
) -> None:
    async with keeping() as live, client_of(live) as client:
        made = await client.files.create(file=("x", LINES), purpose="batch")
        (folder,) = {path.parent for path in (tmp_path / "files").glob("*/*.data")}
        assert sorted(path.name for path in folder.iterdir()) == [
            f"{made.id}.data",
            f"{made.id}.json",
        ]
        (folder / "abc.part").write_bytes(b"x")
    async with keeping() as live, client_of(live) as client:
        assert [file async for file in client.files.list()] == [made]
        assert (await client.files.content(made.id)).content == LINES
        assert not (folder / "abc.part").exists()


@pytest.mark.parametrize(
    "id", ["..%2F..%2Fetc%2Fpasswd", "../lock", "file-..%2Fx", "%00", "lock", "", "a/b"]
)
async def test_no_id_reaches_another_path(keeping: Any, tmp_path: Path, id: str) -> None:
    async with keeping() as live:
        for method, tail in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            writer_reply = await live.raw(
                (
                    f"{method} /v1/files/{id}{tail} HTTP/1.1\r\nHost: localhost\r\n"
                    "Connection: close\r\n\r\n"
                ).encode()
            )
            assert writer_reply.split(b" ")[1] in (b"404", b"405", b"400"), writer_reply
        assert (tmp_path / "files" / "lock").exists()


async def test_a_hostile_name_stays_a_name(keeping: Any, tmp_path: Path) -> None:
    async with keeping() as live, client_of(live) as client:
        made = await client.files.create(
            file=("../../../x\r\ny" + "z" * 200, LINES), purpose="batch"
        )
        assert len(made.filename) <= 64
        assert made.filename.isprintable()
        answer = await client.files.with_raw_response.content(made.id)
        assert answer.headers["Content-Disposition"] == "attachment"
        assert answer.headers["Content-Type"] == "application/octet-stream"
        names = {name for _, _, names in os.walk(tmp_path) for name in names}
        assert names == {"lock", f"{made.id}.data", f"{made.id}.json"}


async def form(
    live: Any, data: Any, kind: str = "multipart/form-data; boundary=B"
) -> tuple[int, Any]:
    async with live.session.post(
        f"{live.url}/v1/files", data=data, headers={"Content-Type": kind}
    ) as response:
        return response.status, json.loads(await response.read())


def field(name: str, value: bytes, more: bytes = b"") -> bytes:
    return b'--B\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (
        name.encode(),
        more,
        value,
    )


PURPOSE, FILE = field("purpose", b"batch"), field("file", LINES, b'; filename="x"')


@pytest.mark.parametrize(
    ("data", "status", "param", "code"),
    [
        (PURPOSE + b"--B--\r\n", 400, "file", "invalid_value"),
        (FILE + b"--B--\r\n", 400, "purpose", "invalid_value"),
        (field("purpose", b"vision") + FILE + b"--B--\r\n", 400, "purpose", "invalid_value"),
        (
            PURPOSE + FILE + field("expires_after[anchor]", b"x") + b"--B--",
            400,
            "expires_after",
            "unsupported_parameter",
        ),
        (PURPOSE + PURPOSE + FILE + b"--B--\r\n", 400, None, "invalid_multipart"),
        (field("purpose", b"x" * 5000) + FILE + b"--B--\r\n", 400, None, "invalid_multipart"),
        (field("purpose", b"\xff") + FILE + b"--B--\r\n", 400, None, "invalid_multipart"),
        (field("a\x17", b"x") + PURPOSE + FILE + b"--B--\r\n", 400, None, "invalid_multipart"),
        (
            b"".join(field(f"f{i}", b"x") for i in range(9)) + b"--B--\r\n",
            400,
            None,
            "invalid_multipart",
        ),
        (
            PURPOSE + field("file", b"eA==", b"\r\nContent-Transfer-Encoding: base64") + b"--B--",
            400,
            None,
            "invalid_multipart",
        ),
        (b"no form", 400, None, "invalid_multipart"),
        (PURPOSE + FILE, 400, None, "invalid_multipart"),
        (
            PURPOSE + field("file", b"x" * 3000, b'; filename="x"') + b"--B--\r\n",
            413,
            "file",
            "payload_too_large",
        ),
        (b"x" * 100_000, 413, "file", "payload_too_large"),
    ],
)
async def test_a_bad_form_leaves_nothing_behind(
    keeping: Any, tmp_path: Path, data: bytes, status: int, param: str | None, code: str
) -> None:
    async with keeping(files_bytes=2000) as live:
        got, answer = await form(live, data)
        assert (got, answer["error"]["param"], answer["error"]["code"]) == (status, param, code), (
            answer
        )
        assert (await live.get("/v1/files"))[1]["data"] == []
        assert list((tmp_path / "files").glob("*/*")) == []


async def test_other_media_types_are_refused(keeping: Any) -> None:
    async with keeping() as live:
        assert (await form(live, b"{}", "application/json"))[0] == 415
        assert (await form(live, b"{}", "multipart/mixed; boundary=B"))[0] == 415
        assert (await form(live, b"{}", "multipart/form-data"))[0] == 400


async def test_without_a_folder_the_answer_says_how_to_get_one(live: Any) -> None:
    for path in ("/v1/files", "/v1/files/x", "/v1/files/x/content", "/v1/batches", "/v1/batches/x"):
        status, answer = await live.get(path)
        assert (status, answer["error"]["code"]) == (404, "files_off")
        assert "files_dir" in answer["error"]["message"]
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{live.url}/v1/files", data=b"x") as response,
    ):
        assert response.status == 404


async def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    first = FileStore(tmp_path, 10)
    with pytest.raises(ConfigError, match="another running server"):
        FileStore(tmp_path, 10)
    await first.close()
    await FileStore(tmp_path, 10).close()
    with pytest.raises(ConfigError, match="cannot use"):
        FileStore(tmp_path / "lock", 10)


async def upload_slowly(live: Any, chunks: int, size: int) -> int:
    """Upload without a Content-Length, in chunks. Return the status."""

    async def body() -> AsyncIterator[bytes]:
        yield PURPOSE + b'--B\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        for _ in range(chunks):
            yield b"x" * size
            await asyncio.sleep(0.01)
        yield b"\r\n--B--\r\n"

    return (await form(live, body()))[0]


async def test_uploads_at_the_same_time_share_the_room(keeping: Any, tmp_path: Path) -> None:
    async with keeping(files_bytes=1_000_000) as live:
        statuses = await asyncio.gather(*(upload_slowly(live, 6, 100_000) for _ in range(4)))
        assert statuses.count(200) <= 1
        assert set(statuses) <= {200, 413}
        on_disk = sum(path.stat().st_size for path in (tmp_path / "files").glob("*/*"))
        quota = live.context.batches.store.quota
        assert quota.num_left == 1_000_000 - on_disk
        assert await upload_slowly(live, 3, 100_000) == 200


async def test_files_come_and_go_while_batches_are_saved(keeping: Any) -> None:
    async with keeping() as live, client_of(live) as client:

        async def come_and_go() -> None:
            for _ in range(8):
                made = await client.files.create(file=("x", LINES), purpose="batch")
                batch = await client.batches.create(
                    input_file_id=made.id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                )
                while (await client.batches.retrieve(batch.id)).status != ("failed"):  # noqa: ASYNC110
                    await asyncio.sleep(0)
                await client.files.delete(made.id)

        await asyncio.gather(*(come_and_go() for _ in range(4)))
        assert [file async for file in client.files.list()] == []


async def test_damaged_records_cost_no_others(keeping: Any, tmp_path: Path) -> None:
    async with keeping() as live, client_of(live) as client:
        kept, empty, lost, other = [
            await client.files.create(file=("x", LINES), purpose="batch") for _ in range(4)
        ]
    (folder,) = {path.parent for path in (tmp_path / "files").glob("*/*.data")}
    (folder / f"{empty.id}.json").write_bytes(b"")
    (folder / f"{lost.id}.data").unlink()
    (folder / f"{other.id}.json").write_bytes((folder / f"{kept.id}.json").read_bytes())
    (folder / f"file-{'0' * 32}.data").write_bytes(LINES)  # an upload that never got its record
    async with keeping() as live, client_of(live) as client:
        assert [file async for file in client.files.list()] == [kept]
        assert (await client.files.content(kept.id)).content == LINES
        assert {path.name for path in folder.iterdir()} == {
            f"{kept.id}.json",
            f"{kept.id}.data",
            f"{empty.id}.json.damaged",
            f"{empty.id}.data",
            f"{lost.id}.json.damaged",
            f"{other.id}.json.damaged",
            f"{other.id}.data",
        }


async def test_bytes_are_on_the_disk_before_they_have_a_name(
    keeping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync = os.fsync
    replace = os.replace

    def noted_fsync(fd: int) -> None:
        fsync(fd)
        name = os.readlink(f"/proc/self/fd/{fd}")
        done.append("folder" if os.path.isdir(name) else f"sync {Path(name).suffixes[-1]}")

    def noted_replace(source: Path, target: Path) -> None:
        replace(source, target)
        done.append(f"name {target.suffix}")

    async with keeping() as live, client_of(live) as client:
        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "replace", noted_replace)
        await client.files.create(file=("x", LINES), purpose="batch")
    assert done == ["sync .part", "name .data", "sync .part", "name .json", "folder"]


async def test_a_disk_that_is_full_is_told_and_leaves_nothing_behind(
    keeping: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    async with keeping() as live, client_of(live) as client:
        kept = await client.files.create(file=("x", LINES), purpose="batch")
        left = live.context.batches.store.quota.num_left
        monkeypatch.setattr(file_store, "_write_whole", full)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.files.create(file=("x", LINES), purpose="batch")
        assert caught.value.status_code == 507
        assert "No space left on device" in caught.value.message
        assert str(tmp_path) not in caught.value.message
        assert [file async for file in client.files.list()] == [kept]
        assert len(list((tmp_path / "files").glob("*/*"))) == 2
        assert live.context.batches.store.quota.num_left == left
        monkeypatch.undo()
        await client.files.create(file=("x", LINES), purpose="batch")


async def test_a_change_is_finished_for_a_client_that_has_left(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 10_000)
    record = FileObject(id="file-1", bytes=1, created_at=1, filename="x", purpose="batch")
    saving = asyncio.create_task(store.save("owner", record))
    await asyncio.sleep(0)
    saving.cancel()
    await asyncio.gather(saving, return_exceptions=True)
    assert saving.cancelled()
    await store.close()
    assert store.find("owner", "file-1", FileObject) is record
    assert (tmp_path / "owner" / "file-1.json").exists()
    assert store.quota.num_left == 10_000 - (tmp_path / "owner" / "file-1.json").stat().st_size
