"""Compare the GGUF files of llama.cpp's converter with those of the tests' writer.

    python -m tools.compare_gguf_converter LLAMA_CPP [FAMILY ...] [--mtp] [--fused]

LLAMA_CPP is a folder with convert_hf_to_gguf.py, conversion/ and gguf-py/. For each family of
tests/gguf_files.py (default: all) a small checkpoint is written, and converted in fp32. The files
are compared by the architecture's metadata and by the tensors; moeserve's logits from the
converter's file are compared with those from the safetensors file. --mtp: checkpoints with layers
for multi-token prediction. --fused: files with ffn_gate_up_exps, where the converter knows it.

Exit status 1: something differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from moeserve.errors import CheckpointError
from moeserve.models.hf_config import read_model_spec
from tests.checkpoints import write_checkpoint
from tests.gguf_files import FAMILIES, OPTIONS, write_gguf
from tests.models.conftest import Driver
from tests.mtp import LAYER, write_mtp_checkpoint

PROMPT = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(1)).tolist()
# Runs the converter without a tokenizer, which the checkpoints do not have.
CONVERT = """
import conversion.base

conversion.base.TextModel._set_vocab_gpt2 = lambda self: None  # of models inside of others
model_class = conversion.get_model_class

def without_tokenizer(*args, **kwargs):
    found = model_class(*args, **kwargs)
    found.set_vocab = lambda self: None
    return found

conversion.get_model_class = without_tokenizer
import convert_hf_to_gguf  # imports the name

convert_hf_to_gguf.main()
"""

# Family -> keys of config.json that the converter gets instead
CHANGES: dict[str, dict[str, Any]] = {
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},  # the hub's name of the class
    # transformers would translate these files to keys that the converter does not know.
    **{
        name: {"model_type": "unknown"}
        for name in ("mimo_v2_flash", "nemotron_h_dense", "qwen4_exp_text", "step3p5")
    },
}
# Family -> fields of the specification that have other values in the converter's file
OTHER_FIELDS = {
    **dict.fromkeys(("granite_moe_hybrid", "nemotron_h", "nemotron_h_dense"), ("max_position",)),
    "qwen4_exp_text": ("eos_token_ids",),  # the tokenizer's, which the checkpoint lacks
    "qwen3_next": ("mtp",),  # the checkpoint has one with --mtp only
}
# Fields of mixers that tell how weights are stored
STORAGE = ("decay_tensor", "inputs_by_head", "paired", "shards", "tiled")
# Converters that require layers for MTP, unless they are told that there are none
NEED_MTP = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
# The converter moved columns of these families' weights: sums run in another order.
REORDERED = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp_text")
# Mistral-Large-3 in its GGUF file. The converter reads Mistral's own format, and needs its package.
NOT_CONVERTED = ("mistral4",)
MOST = 1e-4  # difference of their logits
# Family -> prefix of tensors that the converter does not know
UNKNOWN_TENSORS = {"mellum": "mtp."}


class File:
    """What a GGUF file has: metadata of its architecture, and tensors by name."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.architecture: str = reader.fields["general.architecture"].contents()
        self.metadata = {
            key.removeprefix(f"{self.architecture}."): (
                [t.name for t in item.types],
                _contents(item),
            )
            for key, item in reader.fields.items()
            if key.startswith(f"{self.architecture}.")
        }
        self.tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def _contents(item: gguf.ReaderField) -> Any:
    value = item.contents()
    return (
        [float(part) if isinstance(part, np.floating) else part for part in value]
        if isinstance(value, list)
        else value
    )


def convert(
    llama_cpp: Path, family: str, checkpoint: Path, path: Path, *, mtp: bool, fused: bool
) -> None:
    """Run llama.cpp's converter. Raises RuntimeError with its last lines if it fails."""
    options = ["--fuse-gate-up-exps"] if fused else []
    if family in NEED_MTP and not mtp:
        options.append("--no-mtp")
    source = _source(family, checkpoint)
    command = [sys.executable, "-c", CONVERT, str(source), "--outfile", str(path)]
    done = subprocess.run(
        [*command, "--outtype", "f32", *options],
        cwd=llama_cpp,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not path.exists():
        raise RuntimeError(f"the converter failed:\n{done.stderr[-2000:]}")


def _source(family: str, checkpoint: Path) -> Path:
    """Write the checkpoint as the converter reads it, to a folder beside it."""
    source = checkpoint.parent / "source"
    source.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | CHANGES.get(family, {})))
    # Converters of some families count its tokens.
    vocab = {str(i): i for i in range(config.get("text_config", config)["vocab_size"])}
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": []}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = checkpoint / "model.safetensors"
    if unknown := UNKNOWN_TENSORS.get(family):
        known = {k: v for k, v in load_file(weights).items() if not k.startswith(unknown)}
        save_file(known, source / weights.name)
    else:
        (source / weights.name).symlink_to(weights)
    return source


def differences(theirs: File, ours: File) -> list[str]:
    """Return one line for each difference of the converter's file from the writer's."""
    found = []
    if theirs.architecture != ours.architecture:
        found.append(f"architecture: converter {theirs.architecture}, writer {ours.architecture}")
    for key in sorted(theirs.metadata.keys() | ours.metadata.keys()):
        values = [each.metadata.get(key, "absent") for each in (theirs, ours)]
        if values[0] != values[1]:
            found.append(f"key {key}: converter {values[0]}, writer {values[1]}")
    for name in sorted(theirs.tensors.keys() | ours.tensors.keys()):
        tensors = [each.tensors.get(name) for each in (theirs, ours)]
        shapes = ["absent" if tensor is None else tensor.shape for tensor in tensors]
        if shapes[0] != shapes[1]:
            found.append(f"tensor {name}: converter {shapes[0]}, writer {shapes[1]}")
        elif not np.array_equal(tensors[0], tensors[1]):  # type: ignore[arg-type]
            found.append(f"tensor {name}: other values")
    return found


def spec_differences(family: str, file: Path, checkpoint: Path) -> list[str]:
    """Return the fields of the model's specification that differ from the checkpoint's."""
    ours, theirs = (asdict(read_model_spec(path)) for path in (file, checkpoint))
    for spec in (ours, theirs):
        for layer in spec["layers"]:
            for field in STORAGE:
                layer["mixer"].pop(field, None)
    ignored = ("architecture", "layers", "norm", *OTHER_FIELDS.get(family, ()))
    return [
        f"spec: {key} is {ours[key]}, and {value} of the safetensors file"
        for key, value in theirs.items()
        if ours[key] != value and key not in ignored
    ] + [
        f"spec: layer {i} is {own}, and {other} of the safetensors file"
        for i, (own, other) in enumerate(zip(ours["layers"], theirs["layers"], strict=True))
        if own != other
    ]


def logits_difference(family: str, file: Path, checkpoint: Path) -> str:
    """Compare moeserve's logits from both files; "" if they are equal to the bit."""
    ours, theirs = (Driver(path).prefill("a", PROMPT, 31) for path in (file, checkpoint))
    distance = (ours - theirs).abs().max().item()
    if torch.equal(ours, theirs) or (family in REORDERED and distance <= MOST):
        return ""
    return f"logits: {distance:.3g} apart, of {theirs.abs().max():.3g}"


def compare(llama_cpp: Path, family: str, folder: Path, *, mtp: bool, fused: bool) -> list[str]:
    """Return the differences of a family, one line each."""
    checkpoint = folder / "checkpoint"
    write = write_mtp_checkpoint if mtp else write_checkpoint
    write(family, checkpoint, **OPTIONS.get(family, {}))
    converted = folder / "converter.gguf"
    try:
        convert(llama_cpp, family, checkpoint, converted, mtp=mtp, fused=fused)
        written = write_gguf(family, checkpoint, folder / "writer.gguf", fused=fused)
        found = differences(File(converted), File(written))
        found += spec_differences(family, converted, checkpoint)
        return [*found, *filter(None, [logits_difference(family, converted, checkpoint)])]
    except (RuntimeError, AssertionError, LookupError, ValueError, CheckpointError) as error:
        config = (checkpoint / "config.json").read_text()
        return [f"{type(error).__name__}: {error}", f"config.json: {config}"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare llama.cpp's converter with the tests'.")
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], metavar="FAMILY")
    parser.add_argument("--mtp", action="store_true", help="write layers for MTP, too")
    parser.add_argument("--fused", action="store_true", help="write gates and ups as one tensor")
    args = parser.parse_intermixed_args()
    every = [name for name in FAMILIES if name not in NOT_CONVERTED]
    families = args.families or [name for name in every if not args.mtp or name in LAYER]
    failed = []
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            found = compare(
                args.llama_cpp.resolve(), family, Path(folder), mtp=args.mtp, fused=args.fused
            )
        print(f"{family}: {'equal' if not found else f'{len(found)} differences'}", flush=True)
        for line in found:
            print(f"  {line}")
        failed += [family] if found else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
