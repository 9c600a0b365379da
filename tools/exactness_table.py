"""Write docs/exactness.md from the newest result of `python -m benchmarks.cold_warm`.

    python -m tools.exactness_table          # write the file
    python -m tools.exactness_table --check  # fail if the file is out of date

A test compares the two, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tools.written_page import run

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "exactness.md"
RESULTS = ROOT / "benchmarks" / "results"
HEAD = """# Exactness: cold equals warm

For people who compare answers: what may not change an answer, and how this is checked.
`tools/exactness_table.py` writes this page from `{file}`.

The bits of an answer depend on the request, the model and the settings of its numbers. They do not
depend on other requests, the cache, the division of a prompt into chunks, preemption, ranks,
micro-batches, drafts of a proposer, the CPU's instruction set, or an engine that was killed in the
middle ([architecture.md](architecture.md)).

Answers that change with the cache are a frequent complaint about other engines. Their trackers
report:

- The first answer differs from later ones to the same prompt at temperature 0:
  [vLLM 40896](https://github.com/vllm-project/vllm/issues/40896),
  [SGLang 34683](https://github.com/sgl-project/sglang/issues/34683) (18 of 40 answers),
  [MAX 6681](https://github.com/modular/modular/issues/6681) (39 instead of 33 of 46 tasks solved),
  [OpenVINO GenAI 4367](https://github.com/openvinotoolkit/openvino.genai/issues/4367).
- Prefix cache and an MTP head together lose accuracy, or markup of tools leaks:
  [vLLM 43559](https://github.com/vllm-project/vllm/issues/43559),
  [47194](https://github.com/vllm-project/vllm/issues/47194),
  [53912](https://github.com/vllm-project/vllm/issues/53912).

## The table

Each family's small random checkpoint answers {prompts} prompts greedily with {max_tokens} tokens:
first without a prefix cache, then with one that has most of each prompt. The cached parts have
lengths of every class: shorter than a block, a whole number of blocks, and one token more or less.

- **different**: answers whose tokens, or the bits of whose log probabilities, differ
- **from the cache**: tokens of prompts that were not computed again, of all {prompts} prompts
- **with MTP**: answers whose tokens differ if the family's MTP head drafts three tokens, cold and
  warm together; "-": tests have no small checkpoint with a head

The names are rows of `tests/families.py` and `tests/diffusion.py`. Run it again with
`python -m benchmarks.cold_warm`.

| family | different | from the cache | with MTP |
|---|---|---|---|
"""


def newest() -> Path:
    """Return the newest result."""
    return max(RESULTS.glob("cold-warm_*.json"), key=lambda path: path.name.rsplit("_", 1)[1])


def row(result: dict[str, Any]) -> str:
    """Return a family's line."""
    with_mtp = result.get("different_mtp", "-")
    return (
        f"| {result['family']} | {result['different']} | {result['cached_tokens']:,} | {with_mtp} |"
    )


def text() -> str:
    """Return the whole page."""
    file = newest()
    record = json.loads(file.read_text())
    results = record["results"]
    head = HEAD.format(
        file=file.relative_to(ROOT),
        prompts=results[0]["prompts"],
        max_tokens=results[0]["max_tokens"],
    )
    return head + "\n".join(map(row, results)) + "\n"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], PATH, text, "python -m tools.exactness_table"))
