"""The meanings of a model's name, and the error if it has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moeserve.errors import CheckpointError
from moeserve.loader.checkpoint import open_checkpoint
from moeserve.loader.files import model_file
from moeserve.loader.model_dir import NotCached, resolve_model_dir
from moeserve.models.hf_config import read_model_spec
from tests.loader.conftest import WriteConfig


def test_demo_is_the_built_in_model() -> None:
    model_dir = resolve_model_dir("demo")
    assert read_model_spec(model_dir).num_experts > 0
    assert (
        sum(tensor.num_bytes for tensor in open_checkpoint(model_dir).tensors.values())
        <= 20 * 2**20
    )


def test_a_directory_is_itself(write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = write_config()
    assert resolve_model_dir(str(model_dir)) == model_dir.resolve()
    monkeypatch.chdir(model_dir.parent)
    assert resolve_model_dir(model_dir.name) == model_dir.resolve()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hf" / "hub"


def snapshot(cache: Path, revision: str, *, weights: bool = True) -> Path:
    """A download of this revision as `main`."""
    path = cache / "models--org--name" / "snapshots" / revision
    refs = cache / "models--org--name" / "refs"
    path.mkdir(parents=True)
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text(f"{revision}\n")
    (path / "config.json").write_text("{}")
    if weights:
        save_file({"w": torch.zeros(1)}, path / "model.safetensors")
    return path


def test_a_hub_name_is_its_complete_copy_in_the_cache(cache: Path) -> None:
    path = snapshot(cache, "aaa")
    assert resolve_model_dir("org/name") == path.resolve()


def test_the_main_revision_is_meant_and_no_other(cache: Path) -> None:
    _ = snapshot(cache, "aaa")
    newer = snapshot(cache, "bbb")
    assert resolve_model_dir("org/name") == newer.resolve()
    snapshot(cache, "ccc", weights=False)
    with pytest.raises(CheckpointError, match="no complete copy"):
        resolve_model_dir("org/name")


def test_hf_hub_cache_goes_before_hf_home(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot(cache, "aaa")
    elsewhere = snapshot(tmp_path / "elsewhere", "bbb")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert resolve_model_dir("org/name") == elsewhere.resolve()


def gguf(path: Path, blobs: Path | None = None) -> Path:
    """A file that begins as GGUF; in the cache, a link to a blob."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if blobs is None:
        path.write_bytes(b"GGUF\x03\0\0\0")
        return path
    blobs.mkdir(exist_ok=True)
    blob = blobs / f"{len(list(blobs.iterdir())):064x}"
    gguf(blob)
    path.symlink_to(os.path.relpath(blob, path.parent))
    return path


def test_a_folder_or_a_file_of_a_hub_copy(cache: Path) -> None:
    path = snapshot(cache, "aaa", weights=False)
    (path / "config.json").unlink()
    blobs = path.parents[1] / "blobs"
    parts = [gguf(path / "Q4" / f"x-0000{i}-of-00002.gguf", blobs) for i in (1, 2)]
    other = gguf(path / "Q8" / "x.gguf", blobs)
    assert resolve_model_dir("org/name/Q4") == parts[0]
    assert resolve_model_dir("org/name/Q4/x-00002-of-00002.gguf") == parts[0]
    assert resolve_model_dir("org/name/Q8/x.gguf") == other
    assert resolve_model_dir("org/name:Q4") == parts[0]
    assert resolve_model_dir("org/name@main:q8") == other
    assert resolve_model_dir("https://huggingface.co/org/name/tree/main/Q4") == parts[0]
    assert resolve_model_dir("org/name/Q8@aaa") == other
    parts[1].unlink()
    assert resolve_model_dir("org/name") == other  # the only complete model
    with pytest.raises(NotCached):
        resolve_model_dir("org/name:Q4")
    for name in ("org/name/Q5", "org/name/../name", "org/name/Q4/y.gguf", "org/name:Q5_K_M"):
        with pytest.raises(CheckpointError, match="there is no directory"):
            resolve_model_dir(name)


def test_contents_that_several_repositories_share(cache: Path) -> None:
    """huggingface_hub 2 keeps them beside the repositories, and links to them in blobs."""
    path = snapshot(cache, "aaa", weights=False)
    (path / "config.json").unlink()
    blob = gguf(path / "x-Q8_0.gguf", path.parents[1] / "blobs").resolve()
    shared = cache / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    found = resolve_model_dir("org/name")
    assert model_file(found.parent, found.name).read_bytes()[:4] == b"GGUF"
    blob.unlink()
    blob.symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="outside of the model's directory"):
        model_file(found.parent, found.name)


def test_several_models_in_one_hub_copy_are_named(cache: Path) -> None:
    path = snapshot(cache, "aaa", weights=False)
    (path / "config.json").unlink()
    for name in ("a.gguf", "b.gguf"):
        gguf(path / name, path.parents[1] / "blobs")
    with pytest.raises(CheckpointError, match=r"several models \(a.gguf, b.gguf\); pass one"):
        resolve_model_dir("org/name")
    assert resolve_model_dir("org/name/b.gguf").name == "b.gguf"


def test_gguf_in_capitals_and_without_an_ending(tmp_path: Path) -> None:
    upper = gguf(tmp_path / "one" / "X.GGUF")
    assert resolve_model_dir(str(upper)) == upper
    assert resolve_model_dir(str(upper.parent)) == upper
    blob = gguf(tmp_path / "blobs" / "sha256-0123")  # Ollama's
    assert resolve_model_dir(str(blob)) == blob
    link = tmp_path / "two" / "y.gguf"
    link.parent.mkdir()
    link.symlink_to(blob)
    assert resolve_model_dir(str(link)) == blob  # the user named the link
    split = gguf(tmp_path / "three" / "Z-00002-of-00003.GGUF")
    assert resolve_model_dir(str(split)).name == "Z-00001-of-00003.GGUF"


def test_without_a_home_the_cache_must_be_named(cache: Path) -> None:
    """A user id without an entry in passwd, as containers have them."""
    code = (
        "import os; from moeserve.loader.model_dir import resolve_model_dir as r; os.chdir('/')\n"
        "os.setuid(54321)\n"
        "try: r('org/name')\nexcept Exception as error: print(type(error).__name__, error)"
    )
    names = ("HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")
    env = {name: value for name, value in os.environ.items() if name not in names}
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("CheckpointError the Hugging Face cache cannot be found")
    assert "set HF_HOME" in done.stdout


@pytest.mark.parametrize(("complete"), [False, None])
def test_a_model_that_is_not_here_is_not_downloaded_by_engines(
    complete: bool | None, cache: Path
) -> None:
    if complete is False:
        snapshot(cache, "aaa", weights=False)
    with pytest.raises(
        CheckpointError, match=r"no complete copy .*; run `moeserve pull org/name` first"
    ):
        resolve_model_dir("org/name")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no-such-dir", "there is no directory 'no-such-dir'"),
        ("../no/such/dir", "there is no directory"),
        ("/no/such/dir", "there is no directory"),
        ("", "no directory"),
        ("../../x", "no directory"),
        ("~no_such_user_at_all/x", "not a directory"),
        ("a" * 100_000, "not a directory"),
        ("a\0b", "no directory"),
    ],
    ids=["name", "up", "absolute", "empty", "up twice", "user", "long", "nul"],
)
def test_a_name_that_means_nothing_says_what_to_pass(name: str, says: str, cache: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_model_dir(name)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_file_is_not_a_model_directory(small_file: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file, but not GGUF; pass the directory"):
        resolve_model_dir(str(small_file))
