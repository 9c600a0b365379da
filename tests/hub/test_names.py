"""Names of models on a hub, as people write and paste them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.errors import CheckpointError
from moeserve.hub.names import HubName, parse_hub_name

HF = "https://huggingface.co"


@pytest.fixture(autouse=True)
def _no_other_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-30B-A3B", HubName("Qwen/Qwen3-30B-A3B")),
        ("o/n@v1.0", HubName("o/n", revision="v1.0")),
        ("o/n@refs/pr/3", HubName("o/n", revision="refs/pr/3")),
        ("o/n:Q4_K_M", HubName("o/n", quant="Q4_K_M")),
        ("o/n@v1:UD-Q4_K_XL", HubName("o/n", revision="v1", quant="UD-Q4_K_XL")),
        ("o/n:latest", HubName("o/n")),
        ("o/n/Q4", HubName("o/n", path="Q4")),
        ("o/n/Q4/x-00001-of-00002.gguf@b", HubName("o/n", "Q4/x-00001-of-00002.gguf", "b")),
        ("hf.co/o/n", HubName("o/n")),
        ("hf.co/o/n:q8_0", HubName("o/n", quant="q8_0")),
        ("huggingface.co/o/n", HubName("o/n")),
        (f"{HF}/o/n", HubName("o/n")),
        (f"{HF}/o/n/", HubName("o/n")),
        (f"{HF}/o/n.git", HubName("o/n")),
        ("HTTPS://HuggingFace.co/o/n?library=vllm#files", HubName("o/n")),
        (f"{HF}/o/n/tree/main", HubName("o/n")),
        (f"{HF}/o/n/tree/v1/Q4", HubName("o/n", path="Q4", revision="v1")),
        (f"{HF}/o/n/tree/refs%2Fpr%2F1", HubName("o/n", revision="refs/pr/1")),
        (f"{HF}/o/n/tree/refs/pr/1/Q4", HubName("o/n", path="Q4", revision="refs/pr/1")),
        (f"{HF}/o/n/blob/main/a%20b.gguf", HubName("o/n", path="a b.gguf")),
        (f"{HF}/o/n/resolve/main/x.gguf?download=true", HubName("o/n", path="x.gguf")),
    ],
)
def test_a_name(text: str, expected: HubName) -> None:
    assert parse_hub_name(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "demo", "n", "/o/n", "./o/n", "../o/n", "o/..", "o/n/../m", "o/n//x", "o/n@", "o/n:",
     "o/n@a/../b", "o n/x", "o/n\0", "~/n", f"{HF}/o/n/blob/main/%2E%2E/x.gguf",
     f"{HF}/o/n/blob/..%2F..%2Fx/y.gguf", f"{HF}/o/n@%0a", f"{HF}/o/n/blob/main/%1b[31m.gguf",
     "C:\\models\\n", "C:/models/n", "models\\n", "hf://o/n", "file:///etc/passwd"],
)  # fmt: skip
def test_no_name(text: str) -> None:
    assert parse_hub_name(text) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("https://example.com/o/n", "is not an address of https://huggingface.co"),
        (f"{HF}.evil.com/o/n", "is not an address of https://huggingface.co"),
        ("https://evil.com@example.com/huggingface.co/o/n", "is not an address of"),
        (f"{HF}/o", "is not the address of a model"),
        (f"{HF}/datasets/o/n", "is not the address of a model"),
        (f"{HF}/o/n/discussions/3", "is not the address of a model"),
        ("https://[/o/n", "is not an address"),
        ("https://", "is not an address of https://huggingface.co"),
        ("https://evil/o/n", "is not an address of https://huggingface.co"),
        ("hf.co/", "is not the address of a model"),
        ("hf.co/o/n:", "is not the address of a model"),
    ],
)
def test_an_address_of_no_model_is_refused(text: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        parse_hub_name(text)


def test_addresses_of_another_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/api/hf/")
    assert parse_hub_name("https://mirror.example/api/hf/o/n/tree/v1") == HubName(
        "o/n", revision="v1"
    )
    assert parse_hub_name(f"{HF}/o/n") == HubName("o/n")
    with pytest.raises(CheckpointError, match=r"not an address of https://mirror.example/api/hf"):
        parse_hub_name("https://mirror.example/o/n")
    monkeypatch.setenv("HF_ENDPOINT", "mirror.example")
    with pytest.raises(CheckpointError, match=r"HF_ENDPOINT is 'mirror.example'; expected"):
        parse_hub_name(f"{HF}/o/n")
    monkeypatch.setenv("HF_ENDPOINT", "http://[mirror")
    with pytest.raises(CheckpointError, match="HF_ENDPOINT is not an address"):
        parse_hub_name(f"{HF}/o/n")


@given(st.text(max_size=40) | st.from_regex(r"(https?://)?[a-z.]{0,9}/[\w./@:%-]{0,30}"))
def test_any_text_is_a_name_that_reads_again_or_none_or_an_error(text: str) -> None:
    try:
        name = parse_hub_name(text)
    except CheckpointError:
        return
    if name is not None:
        assert ".." not in f"{name.repo}/{name.path}/{name.revision}".split("/")
        assert not name.path.startswith("/")
