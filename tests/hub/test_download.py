"""Downloads from a hub on this machine: what is asked for, what is kept, what is refused."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from moeserve.errors import CheckpointError
from moeserve.hub import transfer
from moeserve.hub.cache import CachedRepo
from moeserve.hub.locks import try_lock
from moeserve.hub.progress import Progress
from moeserve.loader.files import CONFIG
from moeserve.loader.model_dir import hub_name_of, resolve_model_dir
from moeserve.models.fetch import fetch, fetch_config, pull
from tests.hub_server import CHUNK, TOKEN, Hub, Repo, digest_of

DEMO = resolve_model_dir("demo")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
GGUF = "M-Q4_K_M.gguf"
UNREAD = (
    4 * 2**20
)  # bytes that a client may have received, but not written, when a connection breaks


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.001)


def demo_files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in DEMO.iterdir()}


def weights(num_bytes: int = 40 * CHUNK) -> bytes:
    """Content in which each place differs."""
    return b"GGUF" + b"".join(i.to_bytes(4) for i in range(num_bytes // 4))


def get(text: str, reports: list[Progress] | None = None) -> Path:
    name = hub_name_of(text)
    assert name is not None
    return asyncio.run(fetch(name, [].append if reports is None else reports.append))


def test_a_model_is_downloaded_once_and_only_what_is_read(hub: Hub) -> None:
    hub.repos["o/n"] = Repo(
        demo_files() | {"pytorch_model.bin": b"x", "original/a.bin": b"x", "M-Q8_0.gguf": b"GGUF"}
    )
    reports: list[Progress] = []
    path = get("o/n", reports)
    assert path == resolve_model_dir("o/n")
    for file in DEMO.iterdir():
        if file.name != "README.md":
            assert (path / file.name).read_bytes() == file.read_bytes()
    asked = [request.path.rpartition("/")[2] for request in hub.downloads()]
    assert not {"pytorch_model.bin", "a.bin", "M-Q8_0.gguf", "README.md"} & set(asked)
    order = [request.path.rpartition("/")[2] for request in hub.downloads()]
    assert order.index("tokenizer.json") < order.index(SHARDS[0])
    last = reports[-1]
    assert last.num_bytes == last.total_bytes == sum(len(data) for name, data in
        demo_files().items() if name != "README.md")  # fmt: skip
    assert [each.num_bytes for each in reports] == sorted(each.num_bytes for each in reports)
    before = len(hub.requests)
    assert get("o/n") == get(f"{hub.url}/o/n/tree/main") == path
    assert len(hub.requests) == before  # the hub is not even asked


def test_the_cache_is_that_of_huggingface_hub(hub: Hub, cache: Path) -> None:
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    hub.repos["o/n"] = Repo(demo_files())
    path = get("o/n")
    assert try_to_load_from_cache("o/n", CONFIG, cache_dir=cache) == str(path / CONFIG)
    info = scan_cache_dir(cache)
    assert not info.warnings
    (repo,) = info.repos
    assert (repo.repo_id, {str(ref) for ref in repo.refs}) == ("o/n", {"main"})


def test_offline_the_copy_is_served_and_nothing_else(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/n"] = Repo(demo_files())
    path = get("o/n")
    before = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert get("o/n") == path
    with pytest.raises(CheckpointError, match=r"o/m has no .* HF_HUB_OFFLINE forbids"):
        get("o/m")
    assert len(hub.requests) == before


def test_no_token_leaves_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repos["o/n"] = Repo(demo_files(), gated=True, private=True)
    get("o/n")
    by_host: dict[str, set[str | None]] = {"hub": set(), "cdn": set()}
    for request in hub.requests:
        by_host[request.host].add(request.headers.get("Authorization"))
    assert by_host == {"hub": {f"Bearer {TOKEN}"}, "cdn": {None}}
    assert not any(TOKEN in str(request) for request in hub.requests if request.host == "cdn")


def test_nothing_is_told_about_this_machine(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["o/n"] = Repo(demo_files())
    get("o/n")
    assert {request.headers["User-Agent"].partition("/")[0] for request in hub.requests} == {
        "moeserve"
    }
    assert not any("torch" in request.headers["User-Agent"] for request in hub.requests)
    assert not any("agent-harness" in request.path for request in hub.requests)


def test_a_quantization(hub: Hub) -> None:
    names = ("M-Q8_0.gguf", "Q4/M-Q4_0-00001-of-00002.gguf", "Q4/M-Q4_0-00002-of-00002.gguf")
    hub.repos["o/n"] = Repo({name: weights(CHUNK + 4 * i) for i, name in enumerate(names)}
                            | {"mmproj-F16.gguf": weights(64), "config.json": b"{}"})  # fmt: skip
    path = get("o/n:q4_0")
    assert path.name == "M-Q4_0-00001-of-00002.gguf"
    assert {request.path.rpartition("/")[2] for request in hub.downloads()} == {
        "M-Q4_0-00001-of-00002.gguf", "M-Q4_0-00002-of-00002.gguf", "mmproj-F16.gguf"
    }  # fmt: skip
    assert get("o/n") == path  # the only one that is here
    assert get("o/n:Q8_0").name == "M-Q8_0.gguf"
    with pytest.raises(CheckpointError, match=r"has no quantization Q2_K; it has Q8_0 \(64.0 Ki"):
        get("o/n:Q2_K")


def test_the_choice_of_a_quantization_is_told(hub: Hub) -> None:
    hub.repos["o/n"] = Repo({name: weights(64) for name in (GGUF, "M-Q8_0.gguf")})
    reports: list[Progress] = []
    assert get("o/n", reports).name == GGUF
    assert "downloading o/n: Q4_K_M: the default quantization" in map(str, reports)


def ranges(hub: Hub) -> list[int]:
    """The first bytes that the CDN was asked for."""
    return [
        int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        for request in hub.requests
        if request.host == "cdn"
    ]


def test_what_breaks_is_continued(hub: Hub) -> None:
    data = weights(300 * CHUNK)
    hub.repos["o/n"] = Repo({GGUF: data})
    hub.breaks_after = [100 * CHUNK, 0, 0, 100 * CHUNK, 0]
    assert get("o/n").read_bytes() == data
    first, second, *others, last = ranges(hub)
    assert len(others) == 3
    assert (first, others[:2]) == (0, [second, second])
    assert 100 * CHUNK - UNREAD <= second <= 100 * CHUNK
    assert second + 100 * CHUNK - UNREAD <= last <= second + 100 * CHUNK


def test_a_huge_file_comes_in_several_answers(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    data = weights(10 * CHUNK)
    hub.repos["o/n"] = Repo({GGUF: data})
    hub.repos["o/m"] = Repo({GGUF: data})
    monkeypatch.setattr(transfer, "MAX_ANSWER_BYTES", 4 * CHUNK)
    assert get("o/n").read_bytes() == data
    asked = [request.headers["Range"] for request in hub.requests if request.host == "cdn"]
    first, second, third = (4 * CHUNK * i for i in range(3))
    assert asked == [
        f"bytes={first}-{second - 1}",
        f"bytes={second}-{third - 1}",
        f"bytes={third}-",
    ]
    hub.ignores_ranges = True
    assert get("o/m").read_bytes() == data


def test_a_server_that_ignores_ranges_begins_again(hub: Hub) -> None:
    data = weights()
    hub.repos["o/n"] = Repo({GGUF: data})
    hub.ignores_ranges = True
    hub.breaks_after = [10 * CHUNK]
    reports: list[Progress] = []
    assert get("o/n", reports).read_bytes() == data
    assert reports[-1].num_bytes == len(data)


def test_errors_of_the_server_are_tried_again_and_then_told(hub: Hub) -> None:
    hub.repos["o/n"] = Repo({GGUF: weights()})
    hub.fails_with = [503, 500, 429]
    get("o/n")
    hub.repos["o/m"] = Repo({GGUF: weights(200 * CHUNK)})
    hub.breaks_after = [100 * CHUNK, *[0] * 9]
    with pytest.raises(CheckpointError) as caught:
        get("o/m")
    kept = part_size(GGUF, "o/m", hub)
    assert kept > 100 * CHUNK - UNREAD
    assert re.search(
        r"M-Q4_K_M.gguf cannot be downloaded from http://127.0.0.1:\d+: the connection broke; "
        rf"{kept / 2**20:.1f} MiB of 12.5 MiB are kept, and the next start continues there; check",
        str(caught.value),
    )
    hub.breaks_after = []
    hub.requests.clear()
    get("o/m")
    assert ranges(hub) == [kept]


def part_size(path: str, repo: str, hub: Hub) -> int:
    """The bytes that are kept of an incomplete file."""
    digest = digest_of(path, hub.repos[repo].files[path])
    return (CachedRepo.named(repo).blobs / f"{digest}.incomplete").stat().st_size


def test_wrong_bytes_are_found_and_downloaded_again_once(hub: Hub) -> None:
    data = weights()
    hub.repos["o/n"] = Repo({GGUF: data})
    hub.damages = 1
    assert get("o/n").read_bytes() == data
    hub.repos["o/m"] = Repo({GGUF: data})
    hub.damages = 2
    with pytest.raises(CheckpointError, match="is not the file that the hub lists"):
        get("o/m")
    assert not (CachedRepo.named("o/m").blobs / digest_of(GGUF, data)).exists()
    assert resolve_name_fails("o/m")


def resolve_name_fails(text: str) -> bool:
    with pytest.raises(CheckpointError, match="no complete copy"):
        resolve_model_dir(text)
    return True


@pytest.mark.parametrize("left", [b"", b"GGUF", b"x" * 100, weights(), weights() + b"more"])
def test_whatever_an_earlier_attempt_has_left(left: bytes, hub: Hub) -> None:
    data = weights()
    hub.repos["o/n"] = Repo({GGUF: data})
    blobs = CachedRepo.named("o/n").blobs
    blobs.mkdir(parents=True)
    (blobs / f"{digest_of(GGUF, data)}.incomplete").write_bytes(left)
    assert get("o/n").read_bytes() == data
    assert [path.name for path in blobs.iterdir()] == [digest_of(GGUF, data)]


def test_a_killed_download_is_continued_by_the_next_start(hub: Hub) -> None:
    data = weights(400 * CHUNK)
    hub.repos["o/n"] = Repo({GGUF: data})
    hub.stalls_after = 100 * CHUNK
    command = [sys.executable, "-m", "moeserve.cli.main", "pull", "o/n"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    part = CachedRepo.named("o/n").blobs / f"{digest_of(GGUF, data)}.incomplete"
    while not part.exists() or part.stat().st_size < 64 * CHUNK:
        assert process.poll() is None, process.stderr and process.stderr.read()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = part.stat().st_size
    assert 0 < kept < len(data)
    hub.stalls_after = None
    hub.released.set()
    before = len(hub.requests)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).read_bytes() == data
    (last,) = [request for request in hub.requests[before:] if request.host == "cdn"]
    assert last.headers["Range"] == f"bytes={kept}-"


def test_two_processes_download_once(hub: Hub) -> None:
    data = weights(200 * CHUNK)
    hub.repos["o/n"] = Repo({GGUF: data})
    hub.stalls_after = 50 * CHUNK
    command = [sys.executable, "-m", "moeserve.cli.main", "pull", "o/n"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while hub.num_sent < 50 * CHUNK:
        assert first.poll() is None
    second = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert second.stderr is not None
    line = second.stderr.readline()
    while "another process downloads it" not in line:
        assert line
        line = second.stderr.readline()
    hub.stalls_after = None
    hub.released.set()
    paths = [process.communicate()[0] for process in (first, second)]
    assert paths[0] == paths[1] != ""
    assert len([request for request in hub.requests if request.host == "cdn"]) == 1


@pytest.mark.parametrize(
    ("text", "token", "says"),
    [
        ("o/gated", None, r"o/gated is gated: accept its conditions at http.*/o/gated, then .*; "
         "set HF_TOKEN to a token of an account that has access"),
        ("o/gated", "hf_other", "the account of this token .HF_TOKEN. has no access yet"),
        ("o/private", None, "has no model o/private; check the spelling; set HF_TOKEN if it is"),
        ("o/private", "hf_other", "the account of HF_TOKEN does not see it"),
        ("o/n", "hf_wrong", "does not accept the token .HF_TOKEN.*Invalid credentials"),
        ("o/n", "hf_\u00e9", "HF_TOKEN has characters that no token has"),
        ("models/n", None, "there is no directory 'models/n', and http.* has no model models/n"),
        ("o/n@v9", None, "o/n has no revision 'v9' on http"),
        ("o/pickles", None, "has only pickled weights"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_says_why(
    text: str, token: str | None, says: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/n"] = Repo(demo_files())
    hub.repos["o/gated"] = Repo(demo_files(), gated=True)
    hub.repos["o/private"] = Repo(demo_files(), private=True)
    hub.repos["o/pickles"] = Repo({"config.json": b"{}", "pytorch_model.bin": b"x"})
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(CheckpointError) as caught:
        get(text)
    assert re.search(says, str(caught.value))
    assert "\n" not in str(caught.value)
    assert token is None or token not in str(caught.value)


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError) as caught:
        get("o/n")
    assert re.fullmatch(
        r"http://127.0.0.1:9 cannot be reached: .*refused.*; check the network and HTTPS_PROXY, "
        r"set HF_ENDPOINT to a mirror, or pass a model that is here: `moeserve list`",
        str(caught.value),
    )


def test_no_space(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["o/n"] = Repo({GGUF: weights()})
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40, 2**20))
    with pytest.raises(CheckpointError, match=r"needs 2.5 MiB of disk space, and .* has 1.0 MiB"):
        get("o/n")
    assert not hub.downloads()


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    hub.repos["o/n"] = Repo({GGUF: weights()})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        CheckpointError, match=r"cannot be written: .*; set HF_HUB_CACHE to a folder"
    ):
        get("o/n")


def test_a_model_that_cannot_be_served_is_refused_before_its_weights(hub: Hub) -> None:
    config = b'{"architectures": ["NoSuchForCausalLM"], "model_type": "no_such"}'
    hub.repos["o/n"] = Repo(demo_files() | {"config.json": config})
    with pytest.raises(CheckpointError, match="NoSuchForCausalLM"):
        get("o/n")
    assert not hub.downloads(".safetensors")


def test_of_a_model_that_is_only_planned_the_config_alone(hub: Hub) -> None:
    hub.repos["o/n"] = Repo(demo_files())
    hub.repos["o/g"] = Repo({GGUF: weights()})
    for _ in range(2):
        assert (fetch_config("o/n") / CONFIG).read_bytes() == (DEMO / CONFIG).read_bytes()
    assert not hub.downloads(".safetensors")
    assert resolve_name_fails("o/n")
    with pytest.raises(CheckpointError, match=r"whose config is in the file of 2.5 MiB; run"):
        fetch_config("o/g")
    assert not hub.downloads(".gguf")


def test_a_revision_and_an_update(hub: Hub) -> None:
    hub.repos["o/n"] = Repo({GGUF: weights(64)}, revisions=("main", "refs/pr/1"))
    old = get("o/n@refs/pr/1")
    commit = old.parent.name
    assert get("o/n") == get(f"o/n@{commit}") == old
    hub.repos["o/n"].files[GGUF] = weights(128)
    assert get("o/n") == old  # a start serves what is here
    name = hub_name_of("o/n")
    assert name is not None
    new = asyncio.run(pull(name, [].append))
    assert new != old
    assert new.read_bytes() == weights(128)
    assert get("o/n") == new
    assert get(f"o/n@{commit}") == old


def entry(**changes: object) -> dict[str, object]:
    lfs = {"oid": "a" * 64, "size": 4, "pointerSize": 1}
    return {"type": "file", "path": GGUF, "size": 4, "oid": "b" * 40, "lfs": lfs} | changes


@pytest.mark.parametrize(
    "listed",
    [
        entry(path="../../../x.gguf"),
        entry(path="/etc/x.gguf"),
        entry(path="a/../../x.gguf"),
        entry(path="a\\..\\x.gguf"),
        entry(lfs={"oid": "../../x", "size": 4, "pointerSize": 1}),
        entry(lfs={"oid": "a" * 64, "size": -4, "pointerSize": 1}),
        entry(lfs={"oid": "a" * 64, "size": "4", "pointerSize": 1}),
        entry(lfs=None, oid="c" * 64),
    ],
)
def test_a_hub_that_lies_writes_nothing(
    listed: dict[str, object], hub: Hub, tmp_path: Path
) -> None:
    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    hub.listed = [listed]
    with pytest.raises(CheckpointError, match="which cannot be; nothing was downloaded"):
        get("o/n")
    assert not list(tmp_path.rglob("*.gguf"))


def test_an_index_that_names_files_elsewhere(hub: Hub) -> None:
    index = b'{"weight_map": {"w": "../x.safetensors"}}'
    hub.repos["o/n"] = Repo(demo_files() | {"model.safetensors.index.json": index})
    with pytest.raises(CheckpointError, match="does not name safetensors files"):
        get("o/n")
    assert not hub.downloads(".safetensors")


def test_a_locked_repository_is_not_removed_from_under_a_download(hub: Hub) -> None:
    from moeserve.loader.cached_models import remove

    hub.repos["o/n"] = Repo({GGUF: weights(64)})
    path = get("o/n")
    cached = CachedRepo.named("o/n")
    code = (
        "import sys; from moeserve.hub.locks import try_lock; from pathlib import Path\n"
        "with try_lock(Path(sys.argv[1])) as free: print(free, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(cached.lock_file)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with try_lock(cached.lock_file) as is_free:
            assert not is_free
        name = hub_name_of("o/n")
        assert name is not None
        with pytest.raises(CheckpointError, match="is being downloaded by another process"):
            remove(name)
        other.communicate("")
    assert os.path.exists(path)
