"""`moeserve pull`, `moeserve list` and `moeserve rm`, on a hub of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.cli.main import main
from moeserve.errors import CheckpointError
from moeserve.hub.cache import CachedRepo
from moeserve.loader.cached_models import cached_models, remove
from moeserve.loader.model_dir import hub_name_of, resolve_model_dir
from tests.hub.test_download import demo_files, get, weights
from tests.hub_server import Hub, Repo


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    out = capsys.readouterr()
    return code, out.out, out.err


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.fixture
def models(hub: Hub) -> Hub:
    hub.repos["o/n"] = Repo(demo_files())
    hub.repos["o/g"] = Repo(
        {"M-Q4_K_M.gguf": weights(2**20), "M-Q8_0.gguf": weights(2**21), "mmproj-F16.gguf": b"GGUF"}
    )
    return hub


def test_a_model_is_pulled_listed_and_removed(
    models: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(capsys, "list") == (
        0, "", f"{cache} has no models; `moeserve pull NAME` downloads one\n"
    )  # fmt: skip
    code, out, err = command(capsys, "pull", "o/g")
    assert (code, Path(out.strip()).name) == (0, "M-Q4_K_M.gguf")
    assert "downloading o/g: Q4_K_M: the default quantization" in err
    assert command(capsys, "pull", "hf.co/o/g:Q8_0")[0] == 0
    assert command(capsys, "pull", f"{models.url}/o/n")[0] == 0
    commits = {name: repo.commit[:12] for name, repo in models.repos.items()}
    code, out, err = command(capsys, "list")
    head, *listed = rows(out)
    assert head == ["NAME", "REVISION", "SIZE", "LAST", "USED"]
    assert {tuple(row[:4]) for row in listed} == {
        ("o/g:Q4_K_M", commits["o/g"], "1.0", "MiB"),
        ("o/g:Q8_0", commits["o/g"], "2.0", "MiB"),
        ("o/n", commits["o/n"], "19.2", "MiB"),
    }
    for row in listed:
        assert resolve_model_dir(row[0]).exists()  # each name that is listed can be served
    assert command(capsys, "rm", "o/g:Q8_0") == (0, "removed o/g:Q8_0: 2.0 MiB freed\n", "")
    assert [row[0] for row in rows(command(capsys, "list")[1])[1:]].count("o/g:Q8_0") == 0
    assert resolve_model_dir("o/g").name == "M-Q4_K_M.gguf"
    code, out, _ = command(capsys, "rm", "o/g", "o/n")
    assert (code, out.count("freed")) == (0, 2)
    assert cached_models() == []
    assert not list(cache.glob("models--*"))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("rm", "o/none"), 3, "has no copy of o/none; `moeserve list` shows the models there"),
        (("rm", "o/n@v9"), 3, "has no revision 'v9'"),
        (("rm", "o/g:Q2_K"), 3, "has no quantization Q2_K; it has Q4_K_M"),
        (("rm", "demo"), 2, "'demo' is not the name of a model on a hub; expected owner/name"),
        (("rm", "https://example.com/o/n"), 3, "is not an address of http"),
        (("pull", "demo"), 2, "is not the name of a model on a hub"),
        (("pull", "o/none"), 3, "has no model o/none"),
        (("pull", "../x"), 2, "is not the name of a model on a hub"),
    ],
)
def test_what_is_not_there_is_told(
    words: tuple[str, ...], code: int, says: str, models: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    get("o/n")
    get("o/g")
    got, out, err = command(capsys, *words)
    assert (got, out) == (code, "")
    assert says in err.splitlines()[-1]
    assert resolve_model_dir("o/n").exists()
    assert resolve_model_dir("o/g").exists()


def removed(text: str) -> int:
    name = hub_name_of(text)
    assert name is not None
    return remove(name)


def test_contents_that_two_revisions_share_stay_until_the_last_is_removed(models: Hub) -> None:
    repo = models.repos["o/g"]
    repo.revisions = ("main", "v1")
    old = get("o/g@v1")
    repo.files["README.md"] = b"new"  # another commit with the same weights
    new = get("o/g")
    assert old.parent != new.parent
    assert old.resolve() == new.resolve()
    assert {str(model.name) for model in cached_models()} == {"o/g:Q4_K_M", "o/g@v1:Q4_K_M"}
    assert removed("o/g@v1") < 100  # the name of the revision
    assert not old.exists()
    assert new.exists()
    assert removed("o/g:Q4_K_M") > 2**20
    assert not CachedRepo.named("o/g").folder.exists()


def test_an_image_encoder_stays_as_long_as_a_model_needs_it(models: Hub) -> None:
    first = get("o/g:Q4_K_M")
    get("o/g:Q8_0")
    removed("o/g:Q8_0")
    assert (first.parent / "mmproj-F16.gguf").exists()


def test_what_an_interrupted_download_left_can_be_removed(models: Hub) -> None:
    cached = CachedRepo.named("o/g")
    cached.blobs.mkdir(parents=True)
    (cached.blobs / f"{'a' * 64}.incomplete").write_bytes(bytes(1000))
    assert cached_models() == []
    assert removed("o/g") == 1000
    with pytest.raises(CheckpointError, match="has no copy of o/g"):
        removed("o/g")


def test_incomplete_models_and_other_repositories_are_not_listed(models: Hub, cache: Path) -> None:
    get("o/n")
    (cache / "models--a--b--c" / "snapshots" / "x").mkdir(parents=True)
    (cache / "datasets--o--d" / "snapshots" / "x").mkdir(parents=True)
    (cache / "models--nobody").mkdir()
    part = cache / "models--o--p" / "snapshots" / "x" / "M-Q8_0-00001-of-00002.gguf"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"GGUF")
    assert [str(model.name) for model in cached_models()] == ["o/n"]
    next(iter(resolve_model_dir("o/n").glob("*.safetensors"))).resolve().unlink()
    assert cached_models() == []


def test_a_snapshot_with_several_models_hides_no_others(models: Hub, cache: Path) -> None:
    get("o/n")
    other = cache / "models--o--several" / "snapshots" / "x"
    other.mkdir(parents=True)
    for name in ("config.json", "first.gguf", "second.gguf"):
        (other / name).write_bytes(b"GGUF")
    names = [str(model.name) for model in cached_models()]
    assert sorted(names) == ["o/n", "o/several@x:first", "o/several@x:second"]


def test_a_tag_is_removed_and_what_it_shares_with_a_branch_stays(models: Hub) -> None:
    models.repos["o/g"].revisions = ("main", "v1")
    path = get("o/g")
    assert get("o/g@v1") == path
    assert removed("o/g@v1") == 0 or path.exists()
    assert resolve_model_dir("o/g") == path
    commit = models.repos["o/g"].commit
    assert removed(f"o/g@{commit}") >= 2**20
    assert not CachedRepo.named("o/g").folder.exists()


def test_a_cache_of_huggingface_hub_with_shared_contents_is_freed(hub: Hub, cache: Path) -> None:
    """huggingface_hub 2 keeps the contents of Xet files once for all repositories."""
    from huggingface_hub.utils._shared_blobs import publish_blob_to_shared_store

    hub.repos["o/g"] = Repo({"M-Q8_0.gguf": weights(2**20)})
    path = get("o/g")
    blob = path.resolve()
    published = publish_blob_to_shared_store(
        blob_path=str(blob), xet_hash="ab" * 32, cache_dir=cache, expected_size=blob.stat().st_size
    )
    assert published
    assert blob.is_symlink()
    shared = blob.resolve()
    assert resolve_model_dir("o/g") == path
    removed("o/g")
    assert not shared.exists()
    assert not CachedRepo.named("o/g").folder.exists()
