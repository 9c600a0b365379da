"""Accuracy of served GGUF files beside llama.cpp: greedy tokens and log probabilities.

    python -m benchmarks.gguf_beside_llama_cpp DIR --llamacpp PYTHON [--file FILE.gguf]

PYTHON is an interpreter with llama-cpp-python; this one needs the package gguf. Three kinds of
files are written to DIR (with --file, only the third, of FILE):

1. the demo model as GGUF in F32, its experts padded with zeros to a multiple of 256 as K-quants
   require;
2. that model as llama.cpp quantizes it to each type; 3. each of those dequantized to F32.

The reference is llama.cpp on the dequantized file, where only fp32 rounding is left. It is compared
with llama.cpp and moeserve on the quantized file. With quantized weights llama.cpp rounds
activations to int8, as moeserve can.

Prints and saves for each type:

    logprob_*    differences of the reference's 5 most likely tokens' log probabilities, at every
                 position of the prompts and of the reference's greedy answers
    same_first   share of positions with the same most likely token
    greedy       answers whose tokens all equal the reference's

With --file, prompts are conversations in the file's chat template, and prompt_ids is the number of
prompts whose token ids are llama.cpp's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file

from benchmarks.common import ROOT, parser, save
from benchmarks.llama_cpp_logits import TYPES
from moeserve import LLM, SamplingParams
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.text.chat_template import ChatTemplate
from moeserve.text.tokenizer import Tokenizer
from tests.gguf_files import write_gguf

TOP = 20
COMPARED = 5
MAX_TOKENS = 48
PROMPTS = (
    "Tell me a story about a fox and a lantern.",
    "What is the weather in Paris?",
    "Hello!",
    "Once upon a time",
    "Write a short story about a girl who finds a key in the garden.",
    "Who are you?",
    "The little dog ran to",
    "Tell me a story about a boat, a storm and a brave boy named Tim.",
)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("dir", type=Path, metavar="DIR")
    flags.add_argument(
        "--llamacpp", required=True, metavar="PYTHON", help="an interpreter with llama-cpp-python"
    )
    flags.add_argument("--file", type=Path, help="compare this file instead of the demo model's")
    flags.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    flags.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = flags.parse_args()
    save("gguf-file-beside-llama-cpp" if args.file else "gguf-beside-llama-cpp", args, run(args))


def run(args: argparse.Namespace) -> dict[str, Any]:
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.file:
        return run_file(args)
    plain = args.dir / "F32.gguf"
    if not plain.exists():
        write_demo(plain)
    tokenizer = Tokenizer.load(resolve_model_dir("demo"))
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    results: dict[str, Any] = {}
    for kind in args.types:
        file = args.dir / f"{kind}.gguf"
        dequantized = args.dir / f"{kind}-f32.gguf"
        if not file.exists():
            llama_cpp(args.llamacpp, "quantize", plain, file, kind)
        results |= compare(args, file, dequantized, prompts, kind)
    return results


def run_file(args: argparse.Namespace) -> dict[str, Any]:
    """Compare one file, and the ids of its prompts."""
    tokenizer = Tokenizer.load(args.file)
    template = ChatTemplate.load(args.file)
    assert template is not None, f"{args.file} has no chat template"
    texts = [template.render(tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
    prompts = [tokenizer.encode_prompt(text) for text in texts]
    case = {"prompts": [], "texts": [], "strings": texts, "max_tokens": 0, "top": TOP}
    theirs = llama_cpp(args.llamacpp, "run", args.file, case=case)["ids"]
    same = sum(ours == ids for ours, ids in zip(prompts, theirs, strict=True))
    dequantized = args.dir / f"{args.file.stem}-f32.gguf"
    results = compare(args, args.file, dequantized, prompts, args.file.stem)
    return {**results, "prompt_ids": f"{same} of {len(prompts)}"}


def compare(
    args: argparse.Namespace, file: Path, dequantized: Path, prompts: list[list[int]], name: str
) -> dict[str, Any]:
    """Compare llama.cpp and moeserve on `file` with llama.cpp on the dequantized file."""
    if not dequantized.exists():
        write_dequantized(file, dequantized)
    case = {"prompts": prompts, "texts": prompts, "max_tokens": MAX_TOKENS, "top": TOP}
    answers = llama_cpp(args.llamacpp, "run", dequantized, case=case)["greedy"]
    case["texts"] = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    exact = llama_cpp(args.llamacpp, "run", dequantized, case=case)
    found = {"llama.cpp": llama_cpp(args.llamacpp, "run", file, case=case)}
    for dtype in args.dtypes:
        for activations in ("int8", "float"):
            found[f"moeserve {dtype} {activations}"] = moeserve(file, case, dtype, activations)
    result = {engine: compared(exact, one) for engine, one in found.items()}
    print(name, json.dumps(result, indent=1), flush=True)
    return {"version": exact["version"], name: result}


def llama_cpp(python: str, *words: Any, case: dict[str, Any] | None = None) -> Any:
    """Run llama_cpp_logits.py by the interpreter that has llama.cpp."""
    done = subprocess.run(
        [python, str(ROOT / "benchmarks" / "llama_cpp_logits.py"), *map(str, words)],
        input=json.dumps(case),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(map(str, words))}: exit status {done.returncode}\n{done.stderr[-2000:]}"
        )
    return json.loads(done.stdout) if case else None


def moeserve(file: Path, case: dict[str, Any], dtype: str, activations: str) -> dict[str, Any]:
    """Return moeserve's greedy tokens and top log probabilities, as `llama_cpp` does."""
    greedy = SamplingParams(temperature=0, max_tokens=case["max_tokens"], ignore_eos=True)
    score = SamplingParams(temperature=0, max_tokens=1, logprobs=TOP, prompt_logprobs=TOP)
    with LLM(str(file), dtype=dtype, activations=activations, max_model_len=512, threads=2) as llm:
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in case["prompts"]], greedy)
        scored = llm.generate([{"prompt_token_ids": text} for text in case["texts"]], score)
    places = [
        [*(one.prompt_logprobs or [])[1:], *(one.outputs[0].logprobs or [])] for one in scored
    ]
    tops = [[dict(zip(row.ids, row.values, strict=True)) for row in rows if row] for rows in places]
    return {"greedy": [list(one.outputs[0].token_ids) for one in answers], "tops": tops}


def compared(exact: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the differences from the reference."""
    differences = []
    first = 0
    places = 0
    for wanted, have in zip(exact["tops"], found["tops"], strict=True):
        for one, other in zip(wanted, have, strict=True):
            one, other = (
                {int(token): value for token, value in row.items()} for row in (one, other)
            )
            places += 1
            first += max(one, key=one.__getitem__) == max(other, key=other.__getitem__)
            for token in sorted(one, key=one.__getitem__)[-COMPARED:]:
                if token in other:
                    differences.append(abs(one[token] - other[token]))
    pairs = zip(exact["greedy"], found["greedy"], strict=True)
    return {
        "logprob_median": round(statistics.median(differences), 6),
        "logprob_p99": round(statistics.quantiles(differences, n=100)[98], 6),
        "logprob_max": round(max(differences), 6),
        "same_first": round(first / places, 4),
        "greedy": f"{sum(a == b for a, b in pairs)} of {len(exact['greedy'])}",
    }


def write_demo(path: Path) -> None:
    """Write the demo model without its MTP head."""
    folder = resolve_model_dir("demo")
    config = json.loads((folder / "config.json").read_text())
    wide = -(-config["moe_intermediate_size"] // 256) * 256
    more = wide - config["moe_intermediate_size"]
    tensors = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            padding = (0, more) if "down_proj" in name else (0, 0, 0, more)
            if not name.startswith("mtp."):
                tensors[name] = (
                    torch.nn.functional.pad(tensor, padding) if ".experts." in name else tensor
                )
    with tempfile.TemporaryDirectory() as padded:
        (Path(padded) / "config.json").write_text(
            json.dumps(config | {"moe_intermediate_size": wide})
        )
        save_file(tensors, Path(padded) / "model.safetensors")
        write_gguf("qwen3_moe", Path(padded), path, tokenizer=folder)


def write_dequantized(source: Path, out: Path) -> None:
    """Write `source` with all weights dequantized to F32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            of = field.types[-1]
            writer.add_key_value(
                field.name, field.contents(), kind, of if kind == gguf.GGUFValueType.ARRAY else None
            )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()


if __name__ == "__main__":
    main()
