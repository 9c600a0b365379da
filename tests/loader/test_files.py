"""A model directory cannot make us read anything outside of it, except through the Hugging Face
cache's own links.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moeserve.errors import CheckpointError
from moeserve.loader.documents import read_json
from moeserve.loader.files import model_file


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.json"
    path.write_text('{"key": 1}')
    return path


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return path


def test_a_plain_file_is_read(model_dir: Path) -> None:
    (model_dir / "config.json").write_text('{"a": [1]}')
    assert read_json(model_dir, "config.json") == {"a": [1]}


@pytest.mark.parametrize("relative", [True, False])
def test_a_link_out_of_the_directory_is_refused(
    relative: bool, model_dir: Path, secret: Path
) -> None:
    (model_dir / "config.json").symlink_to("../secret.json" if relative else secret)
    with pytest.raises(
        CheckpointError, match=r"outside of the model's directory; replace the link by the file"
    ):
        read_json(model_dir, "config.json")


def test_a_chain_of_links_is_judged_by_its_end(model_dir: Path, secret: Path) -> None:
    (model_dir / "inner").symlink_to(secret)
    (model_dir / "config.json").symlink_to("inner")
    with pytest.raises(CheckpointError, match="outside"):
        model_file(model_dir, "config.json")


def test_a_link_within_the_directory_is_followed(model_dir: Path) -> None:
    (model_dir / "real.json").write_text("{}")
    (model_dir / "config.json").symlink_to("real.json")
    assert read_json(model_dir, "config.json") == {}


def test_the_hub_caches_links_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "5678").write_text('{"a": 2}')
    (snapshot / "config.json").symlink_to("../../blobs/5678")
    assert read_json(snapshot, "config.json") == {"a": 2}
    (tmp_path / "by name").symlink_to(snapshot)
    assert read_json(tmp_path / "by name", "config.json") == {"a": 2}


def hub_repo(tmp_path: Path) -> tuple[Path, Path]:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs = tmp_path / "models--a--b" / "blobs"
    (snapshot / "Q4" / "inner").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "5678").write_text('{"a": 2}')
    return snapshot, blobs


def test_folders_of_a_snapshot_have_the_same_blobs(tmp_path: Path) -> None:
    snapshot, _ = hub_repo(tmp_path)
    for depth, folder in enumerate((snapshot / "Q4", snapshot / "Q4" / "inner"), 3):
        (folder / "config.json").symlink_to("../" * depth + "blobs/5678")
        assert read_json(folder, "config.json") == {"a": 2}


def test_the_blobs_may_be_on_another_disk(tmp_path: Path) -> None:
    snapshot, blobs = hub_repo(tmp_path)
    blobs.rename(tmp_path / "large disk")
    blobs.symlink_to(tmp_path / "large disk")
    (snapshot / "config.json").symlink_to("../../blobs/5678")
    assert read_json(snapshot, "config.json") == {"a": 2}


def test_links_out_of_the_hub_cache_are_refused(tmp_path: Path, secret: Path) -> None:
    snapshot, blobs = hub_repo(tmp_path)
    other = tmp_path / "models--c--d" / "blobs"
    other.mkdir(parents=True)
    (other / "9").write_text("{}")
    (blobs / "link").symlink_to(secret)
    targets = (secret, other / "9", "../../blobs/link", "../../refs")
    (snapshot.parent.parent / "refs").write_text("{}")
    for i, target in enumerate(targets):
        (snapshot / f"{i}.json").symlink_to(target)
        with pytest.raises(CheckpointError, match="outside of the model's directory"):
            read_json(snapshot, f"{i}.json")


def test_a_volume_of_kubernetes_has_links_below_it(model_dir: Path, secret: Path) -> None:
    """A ConfigMap's or a projected volume's files are links to ..data, a link to a folder."""
    (model_dir / "..2026_11_27").mkdir()
    (model_dir / "..2026_11_27" / "config.json").write_text('{"a": 3}')
    (model_dir / "..data").symlink_to("..2026_11_27")
    (model_dir / "config.json").symlink_to("..data/config.json")
    assert read_json(model_dir, "config.json") == {"a": 3}
    (model_dir / "..2026_11_27" / "out.json").symlink_to(secret)
    (model_dir / "out.json").symlink_to("..data/out.json")
    with pytest.raises(CheckpointError, match="outside"):
        read_json(model_dir, "out.json")


def test_a_directory_that_is_not_a_snapshot_has_no_blobs(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path.parent / "blobs").mkdir(exist_ok=True)
    (tmp_path.parent / "blobs" / "x").write_text("{}")
    (model_dir / "config.json").symlink_to("../../blobs/x")
    with pytest.raises(CheckpointError, match="outside"):
        model_file(model_dir, "config.json")


@pytest.mark.parametrize(
    "name", ["../secret.json", "/etc/passwd", "a/b", "", ".", "..", "a\0b", "x" * 5000]
)
def test_only_plain_names_are_opened(name: str, model_dir: Path, secret: Path) -> None:
    with pytest.raises(CheckpointError):
        model_file(model_dir, name)


def test_pipes_directories_and_loops_are_refused_without_waiting(model_dir: Path) -> None:
    os.mkfifo(model_dir / "pipe")
    (model_dir / "dir").mkdir()
    (model_dir / "loop").symlink_to("loop")
    (model_dir / "dangling").symlink_to("nowhere")
    for name in ("pipe", "dir", "loop", "dangling"):
        with pytest.raises(CheckpointError, match=name):
            model_file(model_dir, name)


def test_a_huge_json_file_is_refused_unread(model_dir: Path) -> None:
    with (model_dir / "config.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(CheckpointError, match="1073741824 bytes; at most 67108864"):
        read_json(model_dir, "config.json")
