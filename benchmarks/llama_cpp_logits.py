"""Runs llama.cpp for gguf_beside_llama_cpp and expert_memory, in an interpreter that has it.

    PYTHON benchmarks/llama_cpp_logits.py quantize IN OUT TYPE
    PYTHON benchmarks/llama_cpp_logits.py run MODEL
    PYTHON benchmarks/llama_cpp_logits.py decode MODEL

`run` reads {"prompts": [[5, 6]], "texts": [[5, 6, 7]], "max_tokens": 2, "top": 20} and prints JSON:
the greedy tokens after each prompt, and the most likely tokens with their log probabilities at each
position of each text. The KV cache is fp32. With "strings", it also prints their token ids.

`decode` reads {"tokens": [5, 6, 7], "timed": 2, "threads": 2}, decodes the tokens one by one from a
mapped file, and prints the seconds of each of the last `timed` ones.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q4_K": 15,
    "Q5_K": 17,
    "Q6_K": 18,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "MXFP4": 38,
}
F32 = 0


def quantize(source: str, out: str, kind: str) -> None:
    import llama_cpp  # type: ignore[import-not-found]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = TYPES[kind]
    params.nthread = 2
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params)):
        sys.exit(f"llama.cpp does not quantize {source} to {kind}")


def plain_buffers() -> None:
    """Keep llama.cpp from copying weights and from using AMX.

    Some virtual machines advertise AMX and do not have it.
    """
    import llama_cpp

    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def plain() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = plain


def decode(model: str, case: dict[str, Any]) -> dict[str, Any]:
    import llama_cpp

    plain_buffers()
    tokens = case["tokens"]
    threads = case["threads"]
    seconds = []
    llm = llama_cpp.Llama(
        model,
        n_ctx=len(tokens) + 8,
        n_batch=64,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    llm.eval(tokens[: -case["timed"]])
    for token in tokens[-case["timed"] :]:
        start = time.perf_counter()
        llm.eval([token])
        seconds.append(time.perf_counter() - start)
    return {"version": llama_cpp.__version__, "seconds": seconds}


def run(model: str, case: dict[str, Any]) -> dict[str, Any]:
    import llama_cpp
    import numpy as np

    plain_buffers()
    longest = max((len(text) for text in case["texts"] + case["prompts"]), default=1)
    longest += case["max_tokens"]
    llm = llama_cpp.Llama(
        model,
        n_ctx=longest + 8,
        n_batch=512,
        n_threads=2,
        logits_all=True,
        verbose=False,
        type_k=F32,
        type_v=F32,
    )

    def logits(tokens: list[int]) -> Any:
        llm.reset()
        llm.eval(tokens)
        return llm.scores[: len(tokens)].astype(np.float64)

    greedy = []
    tops = []
    for prompt in case["prompts"]:
        tokens = []
        rows = logits(prompt)
        for _ in range(case["max_tokens"]):
            tokens.append(int(rows[-1].argmax()))
            llm.eval(tokens[-1:])
            rows = llm.scores[: len(prompt) + len(tokens)]
        greedy.append(tokens)
    for text in case["texts"]:
        rows = logits(text)
        rows = (
            rows
            - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True))
            - rows.max(-1, keepdims=True)
        )
        best = np.argsort(-rows, -1)[:, : case["top"]]
        tops.append(
            [
                {int(token): float(row[token]) for token in ids}
                for row, ids in zip(rows, best, strict=True)
            ]
        )
    ids = [
        llm.tokenize(text.encode(), add_bos=False, special=True) for text in case.get("strings", [])
    ]
    return {"version": llama_cpp.__version__, "greedy": greedy, "tops": tops, "ids": ids}


if __name__ == "__main__":
    if sys.argv[1] == "quantize":
        quantize(*sys.argv[2:])
    else:
        print(
            json.dumps(
                {"run": run, "decode": decode}[sys.argv[1]](sys.argv[2], json.load(sys.stdin))
            )
        )
