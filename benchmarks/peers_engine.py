"""One engine in a process of its own, driven by benchmarks.peers over standard input and output.

    PYTHON benchmarks/peers_engine.py ENGINE MODEL --threads 2
    python benchmarks/peers_engine.py ik_llama MODEL --threads 2 --sources DIR

PYTHON is an interpreter that has the engine; DIR has ik_llama.cpp's sources and, in build/, its
libraries. The first line of output, {"version": ...}, comes after a first answer. Then each line of
input is a case, answered by a line:

    {"prompts": [[5, 6], [7, 8]], "max_tokens": 2}
    {"seconds": 0.07, "tokens": [[9, 9], [4, 1]]}

Decoding is greedy and ignores the end of sequence; prefix caches are off. Only the adapter of
moeserve imports moeserve.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Run = Callable[[Prompts, int], Prompts]
Row = tuple[int, int, int, bool]  # token, position, sequence, whether its next token is wanted
Forward = Callable[[list[Row]], list[int]]  # decodes rows, returns the wanted next tokens
MAX_LEN = 2048
MAX_LLAMA_SEQS = 64
MAX_SEQS = 256
DUMMY: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "kv_cache_bytes": 2**30,
}


def moeserve(model: str, threads: int, **options: Any) -> Run:
    from moeserve import LLM, SamplingParams

    options.setdefault(
        "skip_tokenizer_init", not os.path.exists(os.path.join(model, "tokenizer.json"))
    )
    llm = LLM(
        model,
        threads=threads,
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        enable_prefix_caching=False,
        **options,
    )

    def run(prompts: Prompts, max_tokens: int) -> Prompts:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        done = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return [list(answer.outputs[0].token_ids) for answer in done]

    return run


def vllm(model: str, threads: int) -> Run:  # takes the number of threads from the environment
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        model,
        dtype="bfloat16",
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        enable_prefix_caching=False,
    )

    def run(prompts: Prompts, max_tokens: int) -> Prompts:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        done = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return [list(answer.outputs[0].token_ids) for answer in done]

    return run


def transformers(model: str, threads: int) -> Run:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(prompts: Prompts, max_tokens: int) -> Prompts:
        ids = torch.tensor(prompts)  # the prompts of a case have equal lengths
        with torch.inference_mode():
            out = lm.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
        answers: Prompts = out[:, ids.shape[1] :].tolist()
        return answers

    return run


def llamacpp(model: str, threads: int) -> Run:
    import llama_cpp as cpp  # type: ignore[import-not-found]
    import numpy as np

    cpp.llama_backend_init()
    lm = cpp.llama_model_load_from_file(model.encode(), cpp.llama_model_default_params())
    options = cpp.llama_context_default_params()
    options.n_ctx = 8 * MAX_LEN
    options.n_batch = MAX_LEN
    options.n_seq_max = MAX_LLAMA_SEQS
    options.kv_unified = True
    options.n_threads = options.n_threads_batch = threads
    context = cpp.llama_init_from_model(lm, options)
    vocab_size = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(lm))

    def forward(rows: list[Row]) -> list[int]:
        batch = cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.logits[i] = wanted
            batch.seq_id[i][0] = sequence
        if cpp.llama_decode(context, batch) != 0:
            raise RuntimeError(f"llama_decode failed for {len(rows)} tokens")
        logits = [cpp.llama_get_logits_ith(context, i) for i, row in enumerate(rows) if row[3]]
        cpp.llama_batch_free(batch)
        return [int(np.ctypeslib.as_array(row, shape=(vocab_size,)).argmax()) for row in logits]

    return greedy(forward, lambda: cpp.llama_memory_clear(cpp.llama_get_memory(context), True))


def ik_llama(model: str, threads: int, sources: Path, repack: bool) -> Run:
    """Load ik_llama.cpp through peers_ik_llama.cpp."""
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-") as folder:
        library = compiled_ik_llama(sources, Path(folder))
    library.ik_open.restype = ctypes.c_void_p
    context = ctypes.c_void_p(
        library.ik_open(
            model.encode(), threads, 8 * MAX_LEN, MAX_LEN, MAX_LLAMA_SEQS, ctypes.c_bool(repack)
        )
    )
    if not context:
        raise RuntimeError(f"ik_llama.cpp does not load {model}")

    def forward(rows: list[Row]) -> list[int]:
        numbers = (ctypes.c_int32 * (4 * len(rows)))(*(int(x) for row in rows for x in row))
        tokens = (ctypes.c_int32 * sum(row[3] for row in rows))()
        if library.ik_forward(context, len(rows), numbers, tokens) != 0:
            raise RuntimeError(f"llama_decode failed for {len(rows)} tokens")
        return list(tokens)

    return greedy(forward, lambda: library.ik_clear(context))


def compiled_ik_llama(sources: Path, folder: Path) -> ctypes.CDLL:
    """Compile peers_ik_llama.cpp by $CXX (default: c++) against the sources' libraries."""
    build = sources / "build"
    libraries = [next(build.rglob(name)) for name in ("libllama.so", "libggml.so")]
    out = folder / "ik_llama.so"
    subprocess.run(
        [
            os.environ.get("CXX", "c++"),
            "-O2",
            "-shared",
            "-fPIC",
            f"-I{sources / 'include'}",
            f"-I{sources / 'ggml/include'}",
            Path(__file__).with_name("peers_ik_llama.cpp"),
            *libraries,
            *(f"-Wl,-rpath,{library.parent}" for library in libraries),
            "-o",
            out,
        ],
        check=True,
    )
    return ctypes.CDLL(str(out))


def greedy(forward: Forward, clear: Callable[[], Any]) -> Run:
    """Return a function that decodes prompts of one length. `clear` empties the KV cache."""

    def run(prompts: Prompts, max_tokens: int) -> Prompts:
        clear()
        last = len(prompts[0]) - 1
        answers = [
            forward([(token, i, sequence, i == last) for i, token in enumerate(prompt)])
            for sequence, prompt in enumerate(prompts)
        ]
        for position in range(last + 1, last + max_tokens):
            step = forward(
                [(answer[-1], position, sequence, True) for sequence, answer in enumerate(answers)]
            )
            for answer, token in zip(answers, step, strict=True):
                answer.append(token)
        return answers

    return run


# Name -> (module that has the version, function that loads the engine).
ENGINES: dict[str, tuple[str, Callable[[str, int], Run]]] = {
    "moeserve": ("moeserve", moeserve),
    "moeserve-int8": (
        "moeserve",
        lambda model, threads: moeserve(model, threads, quantization="int8"),
    ),
    "moeserve-int4": (
        "moeserve",
        lambda model, threads: moeserve(model, threads, quantization="int4"),
    ),
    "moeserve-12-bit": (
        "moeserve",
        lambda model, threads: moeserve(model, threads, lossless_compression="all"),
    ),
    "moeserve-12-bit-experts": (
        "moeserve",
        lambda model, threads: moeserve(model, threads, lossless_compression="experts"),
    ),
    "moeserve-gguf": (
        "moeserve",
        lambda model, threads: moeserve(model, threads, kv_cache_bytes=3 * 2**27),
    ),
    "moeserve-dummy": ("moeserve", lambda model, threads: moeserve(model, threads, **DUMMY)),
    "vllm": ("vllm", vllm),
    "llamacpp": ("llama_cpp", llamacpp),
    "transformers": ("transformers", transformers),
}
# Name -> whether weights are repacked at the start (-rtr). These need --sources.
OF_SOURCES = {"ik_llama": True, "ik_llama-as-stored": False}


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("engine", choices=[*ENGINES, *OF_SOURCES])
    flags.add_argument("model")
    flags.add_argument("--threads", type=int, required=True)
    flags.add_argument("--sources", type=Path, help=f"for {' and '.join(OF_SOURCES)}")
    args = flags.parse_args()
    del sys.path[0]  # this folder, whose kernels.py would hide the package of that name
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to standard error instead
    version, run = started(args)
    run([[5] * 16], 4)
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        begun_s = time.perf_counter()
        tokens = run(case["prompts"], case["max_tokens"])
        print(
            json.dumps({"seconds": time.perf_counter() - begun_s, "tokens": tokens}),
            file=answers,
            flush=True,
        )


def started(args: argparse.Namespace) -> tuple[str, Run]:
    """Return the version of an engine, and the function that runs it."""
    if args.engine in OF_SOURCES:
        run = ik_llama(args.model, args.threads, args.sources, repack=OF_SOURCES[args.engine])
        return commit_of(args.sources), run
    module, start = ENGINES[args.engine]
    run = start(args.model, args.threads)
    return sys.modules[module].__version__, run


def commit_of(sources: Path) -> str:
    """Return the commit of a checkout, or "unknown" if git does not know it."""
    command = ["git", "-C", str(sources), "rev-parse", "--short=9", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
