"""/v1/files through the openai package, and what its package would never send."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from moeserve.errors import ConfigError
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
                f"{method} /v1/files/{id}{tail} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
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
    live: Any, data: bytes, kind: str = "multipart/form-data; boundary=B"
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


def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    first = FileStore(tmp_path, 10)
    with pytest.raises(ConfigError, match="belongs to another server"):
        FileStore(tmp_path, 10)
    first.close()
    FileStore(tmp_path, 10).close()
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "file-x.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot use"):
        FileStore(tmp_path, 10)
