"""Which files of a repository are chosen, on layouts of repositories as people publish them."""

from __future__ import annotations

import pytest

from moeserve.errors import CheckpointError
from moeserve.hub.names import HubName, parse_hub_name
from moeserve.hub.select import FileSelection, SeveralModels, indexed, select

GIB = 2**30
NAME = HubName("o/n")
TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def sizes(*paths: str, **by_name: int) -> dict[str, int]:
    return dict.fromkeys(paths, 10) | by_name


def gib(**quants: int) -> dict[str, int]:
    """GGUF files of so many GiB: `Q8_0=30`."""
    return {f"M-{quant}.gguf": size * GIB for quant, size in quants.items()}


def chosen(files: dict[str, int], text: str = "o/n", memory: int = 0) -> FileSelection:
    name = parse_hub_name(text)
    assert name is not None
    return select(files, name, lambda: memory * GIB)


def test_safetensors_without_what_is_not_read() -> None:
    files = sizes(
        *TEXTS,
        "README.md",
        "LICENSE.txt",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "modeling_x.py",
        "original/consolidated.00.pth",
        "original/params.json",
        "onnx/model.onnx",
        "figures/a.png",
        "M-Q4_K_M.gguf",
    )
    selection = chosen(files)
    assert selection.texts == tuple(
        sorted(
            [
                *TEXTS,
                "merges.txt",
                "chat_template.jinja",
                "additional_chat_templates/tool_use.jinja",
                "model.safetensors.index.json",
            ]
        )
    )
    assert selection.index == "model.safetensors.index.json"
    assert selection.weights == ()
    assert selection.gguf is None


def test_one_file_precedes_an_index_and_others() -> None:
    files = sizes(
        "config.json", "model.safetensors", "model.safetensors.index.json", "x.safetensors"
    )
    selection = chosen(files)
    assert (selection.weights, selection.index) == (("model.safetensors",), "")


def test_mistrals_files_have_no_index() -> None:
    files = sizes("params.json", "tekken.json", "consolidated-00002-of-00002.safetensors",
                  "consolidated-00001-of-00002.safetensors")  # fmt: skip
    selection = chosen(files)
    assert selection.weights == tuple(sorted(files)[:2])
    assert selection.texts == ("params.json", "tekken.json")


def test_a_folder_of_safetensors() -> None:
    files = sizes("README.md", "fp8/config.json", "fp8/model.safetensors", "bf16/config.json",
                  "bf16/model.safetensors")  # fmt: skip
    with pytest.raises(CheckpointError, match="in folders; pass one of o/n/bf16, o/n/fp8"):
        chosen(files)
    selection = chosen(files, "o/n/fp8")
    assert selection.weights == ("fp8/model.safetensors",)
    assert selection.texts == ("fp8/config.json",)
    pasted = "https://huggingface.co/o/n/blob/main/fp8/model.safetensors"
    assert chosen(files, pasted) == selection


def test_a_quantization_with_all_its_parts_and_its_image_encoder() -> None:
    parts = [f"UD-Q4_K_XL/M-UD-Q4_K_XL-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    files = sizes(*parts, "M-Q8_0.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf",
                  "imatrix_unsloth.gguf", "config.json", "UD-Q4_K_XL/imatrix.gguf")  # fmt: skip
    for text in ("o/n:UD-Q4_K_XL", "o/n:ud-q4_k_xl", "o/n:Q4_K_XL", f"o/n/{parts[1]}"):
        selection = chosen(files, text)
        assert selection.gguf is not None
        assert selection.gguf.files == tuple(parts)
        assert selection.encoders == ("mmproj-F16.gguf",)
        assert selection.texts == ()
    assert chosen(files, "o/n/UD-Q4_K_XL").gguf == selection.gguf


def test_the_image_encoder_beside_the_model_goes_first() -> None:
    files = sizes("a/M-Q8_0.gguf", "a/mmproj-Q8_0.gguf", "mmproj-F16.gguf")
    assert chosen(files).encoders == ("a/mmproj-Q8_0.gguf",)


@pytest.mark.parametrize("label", ["Q4_K_M", "q4_k_m", "UD-Q4_K_M"])
def test_without_a_quantization_it_is_q4_k_m(label: str) -> None:
    selection = chosen(gib(Q8_0=30, Q4_K_S=17) | {f"M-{label}.gguf": 18 * GIB}, memory=4)
    assert selection.gguf is not None
    assert selection.gguf.label == label
    assert selection.note == f"{label}: the default quantization"


def test_without_q4_k_m_it_is_the_largest_that_fits() -> None:
    files = gib(Q8_0=30, Q5_K_M=22, Q3_K_M=14, IQ2_XXS=9)
    selection = chosen(files, memory=24)
    assert selection.gguf is not None
    assert selection.gguf.label == "Q3_K_M"  # 22 GiB and a cache do not fit into 24
    assert selection.note == (
        "Q3_K_M (14.0 GiB): the largest that fits into 24.0 GiB of memory, as there is no Q4_K_M"
    )
    assert chosen(files, memory=25).gguf.label == "Q5_K_M"  # type: ignore[union-attr]


def test_where_none_fits_all_are_named_with_sizes() -> None:
    says = (
        r"no Q4_K_M, and no other quantization fits into 8.0 GiB of memory: .*Q8_0 \(30.0 GiB\).*; "
        "name one, as o/n:IQ2_XXS$"
    )
    with pytest.raises(CheckpointError, match=says):
        chosen(gib(Q8_0=30, IQ2_XXS=9), memory=8)


def test_the_only_model_needs_no_name_and_no_memory() -> None:
    assert chosen(gib(F16=60), memory=1).gguf is not None


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("Qwen3-30B-A3B-Q4_K_M.gguf", "Q4_K_M"),
        ("gpt-oss-20b-mxfp4.gguf", "mxfp4"),
        ("model.IQ3_XXS.gguf", "IQ3_XXS"),
        ("M-UD-IQ1_M-00001-of-00001.gguf", "UD-IQ1_M"),
        ("M-BF16-Q6_K.gguf", "Q6_K"),
        ("M-Q4_0-imat.gguf", "Q4_0"),
        ("M-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("TQ1_0/M.gguf", "TQ1_0"),
        ("Qwen3.gguf", "Qwen3"),
    ],
)
def test_labels(file: str, label: str) -> None:
    selection = chosen(sizes(file))
    assert selection.gguf is not None
    assert selection.gguf.label == label
    assert chosen(sizes(file), f"o/n:{label}").gguf == selection.gguf


def test_an_unknown_quantization_lists_those_that_exist() -> None:
    with pytest.raises(CheckpointError) as caught:
        chosen(gib(Q8_0=30, Q4_0=16), "o/n:Q2_K")
    assert str(caught.value) == (
        "o/n has no quantization Q2_K; it has Q4_0 (16.0 GiB), Q8_0 (30.0 GiB)"
    )


def test_several_models_are_named() -> None:
    with pytest.raises(SeveralModels, match=r"several models \(a.gguf, b.gguf\); pass one of them"):
        chosen(sizes("a.gguf", "b.gguf"))
    with pytest.raises(SeveralModels, match=r"as o/n/a-Q8_0.gguf$"):
        chosen(sizes("a-Q8_0.gguf", "b-Q8_0.gguf"), "o/n:Q8_0")
    assert chosen(sizes("a.gguf", "b.gguf"), "o/n/b.gguf").gguf.files == ("b.gguf",)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("files", "text", "says"),
    [
        (("config.json", "pytorch_model.bin"), "o/n", "only pickled weights"),
        (("README.md",), "o/n", "is not a model that moeserve reads; it has README.md"),
        ((), "o/n", "it has no files"),
        (("adapter_config.json", "adapter_model.safetensors"), "o/n", "is an adapter"),
        (("config.json", "model.safetensors"), "o/n:Q8_0", "has no GGUF files, and so no"),
        (("config.json", "model.safetensors"), "o/n/x", "no file or folder 'x'; it has model"),
        (("M-00001-of-00003.gguf", "M-00003-of-00003.gguf"), "o/n", "1 of the files"),
        (("M.gguf", "mmproj.gguf"), "o/n/mmproj.gguf", "is not a model, but belongs to one"),
    ],
)
def test_what_cannot_be_served(files: tuple[str, ...], text: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        chosen(sizes(*files), text)


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        {},
        [],
        {"w": 1},
        {"w": "../../x.safetensors"},
        {"w": "a/b.safetensors"},
        {"w": "pytorch_model.bin"},
    ],
)
def test_a_damaged_index_is_refused(weight_map: object) -> None:
    with pytest.raises(CheckpointError, match="does not name safetensors files"):
        indexed(weight_map, "")
