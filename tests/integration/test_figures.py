"""Every measured figure in README.md, docs/*.md and CHANGELOG.md is what its result file holds,
rounded as shown.

A claim is a sentence with {} for the figures, and the result file that holds them. The claim's
paragraph or table row links that file. Two more things fail: a digit in docs/comparison.md that is
in no claim and no fact, and a figure with a unit anywhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "CHANGELOG.md"]
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
MEASURED = re.compile(rf"{NUMBER} (?:ms|µs|us|s|minutes|seconds|tok/s|GB/s|times|%|×)(?![\w-])")


class Claim(NamedTuple):
    """A sentence of a page, the result file named in its paragraph, and the figures from that
    file's results.
    """

    text: str
    file: str
    figures: Callable[[Any], Sequence[float]]
    page: str = "README.md"


def _step_us(found: Any) -> list[float]:
    p50 = {result["num_running"]: result["step_us"]["p50"] for result in found["results"]}
    return [p50[256], p50[1024]]


def _decode_rounds(found: Any, engine: str, key: str) -> list[float]:
    rows = [x for x in found["samples"] if (x["case"], x["engine"]) == ("decode-1", engine)]
    return [x[key] for x in sorted(rows, key=lambda x: x["round"])]


def _memory_rates(found: Any) -> list[float]:
    rates = sorted(_decode_rounds(found, "moeserve", "read_gb_s"))
    return [rates[2], rates[4], rates[0], rates[1]]


def _beside_llamacpp(found: Any) -> list[float]:
    ours, theirs = (
        _decode_rounds(found, name, "tokens_per_s") for name in ("moeserve", "llamacpp")
    )
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [median(ratios), min(ratios), max(ratios)]


def _beside_vllm(found: Any) -> list[float]:
    by = {(x["engine"], x["streams"]): x for x in found["samples"]}
    assert len(by) == len(found["samples"])  # one round
    keys = ("output_throughput", "p99_ttft_ms")
    return [by["moeserve", n][key] / by["vllm", n][key] for key in keys for n in (16, 64)]


def _quantized(found: Any) -> list[float]:
    speeds = next(case for case in found["cases"] if case["case"] == "decode-1")["tokens_per_s"]
    return [
        speeds["moeserve-int8"] / speeds["moeserve"],
        speeds["moeserve-int4"] / speeds["moeserve"],
    ]


def _by_round(found: Any, ours: str, others: Sequence[str]) -> list[float]:
    """Return our speed over that of the fastest other engine, by case.

    It is the median of the rounds' ratios.
    """
    by = {
        (x["case"], x["round"], x["engine"]): x["tokens_per_s"]
        for x in found["samples"]
        if "tokens_per_s" in x
    }
    cases = [case["case"] for case in found["cases"]]
    rounds = sorted({key[1] for key in by})
    return [
        median(by[case, i, ours] / max(by[case, i, name] for name in others) for i in rounds)
        for case in cases
    ]


def _beside_llamacpp_gguf(found: Any) -> list[float]:
    return [case["ratio"]["llamacpp"] for case in found["cases"]]


def _returns(found: Any) -> list[float]:
    rounds = found["rounds"]
    assert not any(it["lost_requests"] or it["different"] for it in rounds)
    return [pick(it["return_s"] for it in rounds) for pick in (min, max)]


def _kills(found: Any, key: str) -> list[float]:
    kills = found["kills"]
    assert not any(it["lost"] or it["different"] or it["repeated_events"] for it in kills)
    return [pick(it[key] for it in kills) for pick in (min, max)]


def _simulated(found: Any) -> list[float]:
    return [
        100 * found[key] for key in ("median_error", "worst_error", "median_apart", "worst_apart")
    ]


PEERS = ("vllm", "llamacpp", "transformers")
ZEN_4 = "peers_amd-epyc-zen4-2c-avx512bf16"


COMPARISON = "docs/comparison.md"


def _moving(found: Any) -> list[float]:
    return [found["median_s"]["moving"], found["max_s"]["moving"]]


def _worst_kill(found: Any) -> list[float]:
    return [len(found["kills"]), found["max_s"]["moving"], found["lost"], found["different"]]


CLAIMS = [
    *[
        Claim(
            f"{machine} ([samples](benchmarks/results/"
            f"peers-15b-q4-0_{file}-2c-avx512bf16_202611.json)) | {{}} | {{}} | {{}} |",
            "peers-15b-q4-0",
            _beside_llamacpp_gguf,
        )
        for machine, file in (("Intel Xeon", "intel-xeon"), ("AMD Zen 4", "amd-epyc-zen4"))
    ],
    Claim(
        "AMD EPYC ([samples](benchmarks/results/"
        "serve-peers_amd-epyc-2c-avx512bf16_202611.json)) | {} | {} |",
        "serve-peers",
        lambda r: _beside_vllm(r)[:2],
    ),
    Claim(
        "under 32 streams, {} times"
        " ([samples](benchmarks/results/kills_amd-epyc-2c-avx512bf16_202611.json))."
        " Every stream resumed within {} s; {} requests were lost, and {} tokens differed.",
        "kills",
        _worst_kill,
    ),
    *[
        Claim(
            f"/{file}_{machine}_202611.json)) | {{}} | {{}} | {{}} |",
            file,
            _beside_llamacpp_gguf,
            COMPARISON,
        )
        for file, machine in (
            ("peers-15b-q4-0", "intel-xeon-2c-avx512bf16"),
            ("peers-15b-q4-0", "intel-xeon-2c-avx2"),
            ("peers-15b-q4-0", "amd-epyc-zen4-2c-avx512bf16"),
            ("peers-15b-q4-k-m", "intel-xeon-2c-avx512bf16"),
            ("peers-gpt-oss-mxfp4", "intel-xeon-2c-avx512bf16"),
        )
    ],
    Claim("three rounds had {} to {} GB/s, two had {} to {}", "peers", _memory_rates, COMPARISON),
    Claim(
        "five rounds ([samples](../benchmarks/results/peers_amd-epyc-2c-avx512bf16_202611.json))"
        " | {} | {} | {} |",
        "peers",
        _beside_llamacpp,
        COMPARISON,
    ),
    Claim(
        f"16 bits ([samples](../benchmarks/results/{ZEN_4}_202611.json))"
        " | {} | {} | {} | {} | {} |",
        ZEN_4,
        partial(_by_round, ours="moeserve", others=PEERS),
        COMPARISON,
    ),
    Claim(
        "`lossless_compression: all`"
        f" ([samples](../benchmarks/results/{ZEN_4}_202611.json)) | {{}} | {{}} | {{}} | {{}} |"
        f" {{}} |",
        ZEN_4,
        partial(_by_round, ours="moeserve-12-bit", others=PEERS),
        COMPARISON,
    ),
    Claim(
        "both in moeserve"
        f" ([samples](../benchmarks/results/{ZEN_4}_202611.json)) | {{}} | {{}} | {{}} | {{}} |"
        f" {{}} |",
        ZEN_4,
        partial(_by_round, ours="moeserve-12-bit", others=["moeserve"]),
        COMPARISON,
    ),
    Claim(
        "`--quantization`, one request"
        " ([samples](../benchmarks/results/quantized_amd-epyc-2c-avx512bf16_202611.json))"
        " | {} | {} |",
        "quantized",
        _quantized,
        COMPARISON,
    ),
    Claim(
        "output tokens per second"
        " ([samples](../benchmarks/results/serve-peers_amd-epyc-2c-avx512bf16_202611.json))"
        " | {} | {} |",
        "serve-peers",
        lambda r: _beside_vllm(r)[:2],
        COMPARISON,
    ),
    Claim(
        "smaller is better"
        " ([samples](../benchmarks/results/serve-peers_amd-epyc-2c-avx512bf16_202611.json))"
        " | {} | {} |",
        "serve-peers",
        lambda r: _beside_vllm(r)[2:],
        COMPARISON,
    ),
    Claim(
        "to the first answer"
        " ([samples](../benchmarks/results/peers_amd-epyc-2c-avx512bf16_202611.json))"
        " | {} | {} | {} | {} |",
        "peers",
        lambda r: [r["start_s"][name] for name in ("moeserve", "llamacpp", "vllm", "transformers")],
        COMPARISON,
    ),
    Claim(
        "moeserve"
        " ([samples](../benchmarks/results/startup-hf_amd-epyc-2c-avx512bf16_202611.json))"
        " | {} | {} |",
        "startup-hf",
        lambda r: [r["packed_cache_first_token_s"]["median"], r["first_token_s"]["median"]],
        COMPARISON,
    ),
    Claim("| {} µs at 256 running requests, {} µs at 1,024 |", "step", _step_us, COMPARISON),
    Claim(
        "| ready after {} s; HTTP answers after {} s |",
        "startup-demo",
        lambda r: [r["ready_s"]["median"], r["listening_s"]["median"]],
        COMPARISON,
    ),
    Claim("on one core | {} |", "streaming", lambda r: [r["events_per_s"]["median"]], COMPARISON),
    Claim(
        "| {} % of a core |",
        "idle",
        lambda r: [100 * r["core_share_total"]["median"]],
        COMPARISON,
    ),
    Claim("| median of 20 kills {} s, slowest {} s |", "kills", _moving, COMPARISON),
    Claim(
        "| {} to {} s after sshd returned",
        "lost-machine-ssh",
        _returns,
        "docs/multi-node.md",
    ),
    Claim(
        "| {} to {} s after slurmd returned",
        "lost-machine-slurm",
        _returns,
        "docs/multi-node.md",
    ),
    Claim(
        "| {} to {} s after the end of `ray start`",
        "lost-machine-ray",
        _returns,
        "docs/multi-node.md",
    ),
    Claim(
        "which served {} to {} s after the kill",
        "standby",
        partial(_kills, key="served_s"),
        "docs/multi-node.md",
    ),
    Claim(
        "| {} to {} s after the kill",
        "standby",
        partial(_kills, key="all_streams_moving_s"),
        "docs/multi-node.md",
    ),
    *[
        Claim(
            f"/{file}_intel-xeon-2c-avx512bf16_202611.json)) | {{}} % | {{}} % | {{}} % | {{}} % |",
            file,
            _simulated,
            "docs/planning.md",
        )
        for file in ("simulate-dp1", "simulate-dp2", "simulate-1b-dp1", "simulate-1b-dp2")
    ],
]
FACTS = (  # digits of the comparison that name a case or a format
    "1.29 billion parameters",
    "0.38 billion active",
    "Zen 5",
    "Zen 4",
    "12 bits",
    "16 bits",
    "Qwen3-MoE",
    "bf16",
    "`int8`",
    "`int4`",
    "p99",
    "Q4_0",
    "AVX2",
    "AVX-512",
    "AVX512-BF16",
    "Q4_K_M",
    "MXFP4",
    "Qwen3-30B-A3B",
    "gpt-oss-20b",
    "15 billion weights",
    "1 request",
    "8 requests",
    "32 requests",
    "1,024 tokens",
    "8 × 512 tokens",
    "1 × 1,024 tokens",
    "`ATEN_CPU_CAPABILITY=avx2`",
    "16 streams",
    "64 streams",
    "256 and 1,024 running requests",
    "above 1 means",
    "32 streams",
)
NOT_FROM_A_FILE = {  # figures with a unit elsewhere, and why no result file has them
    "waits longer than 10 s is refused": "a limit of moeserve/frontend/grammars.py",
    "`wait_s` (2 s)": "a default of moeserve/engine/connector.py",
    "within 5 s:": "a limit, which tests/integration/test_machines.py checks",
    "No room within 60 s": "a limit, PLACE_S of moeserve/cluster/launch/on_ray.py",
    "only after 15 s": "a default of Ray: five health checks, every three seconds",
    "and it takes 3 s": "the settings beside it: three health checks, every second",
    "wait for machine 0 for 30 s": "a limit, KEEP_S of moeserve/cluster/node.py",
    "wants within 30 s is ended": "the same",
    "It has 60 s to do so": "a default, DEFAULT_RESUME_WINDOW_S of moeserve/server/standby.py",
    "nothing for 10 s": "a limit of moeserve/server/standby.py",
    "silence after 5 s": "a limit, which tests/integration/test_machines.py checks",
    "take 36.0 ms for a decode step": "predicted: what `moeserve plan` prints",
    "the goal of 1 s is missed (3.0 s at p99)": "the same",
    "takes 4.7 minutes on one core; its first 40,000 requests take 3 s, and 39 s with"
    " schedulers": "benchmarks/LOG.md",
    "10 to 35 % too short": "a range of errors in the files of the table above it",
    "take 58 us and more in these tables": "others' measurements",
}


def _blocks(page: Path) -> list[str]:
    """Return paragraphs and table rows, one line each, without code blocks."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    blocks = re.split(r"\n\s*\n|\n(?=\|)", text)
    return [" ".join(block.split()) for block in blocks]


def _pattern(claim: Claim) -> re.Pattern[str]:
    return re.compile(re.escape(claim.text).replace(r"\{\}", f"({NUMBER})"))


def _rounded_alike(shown: str, value: float) -> bool:
    plain = shown.replace(",", "")
    if "." in plain:
        half_unit = 0.5 * 10 ** -len(plain.partition(".")[2])
    else:  # trailing zeros of a whole number are not significant
        half_unit = 0.5 * 10 ** (len(plain) - len(plain.rstrip("0")))
    return abs(float(plain) - value) <= half_unit * (1 + 1e-9)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
def test_a_figure_is_what_its_file_holds(claim: Claim) -> None:
    ((block, match),) = [
        (b, m) for b in _blocks(ROOT / claim.page) for m in [_pattern(claim).search(b)] if m
    ]
    (file,) = set(
        re.findall(rf"\((?:\.\./)?(benchmarks/results/{claim.file}_[\w-]+\.json)\)", block)
    )
    figures = claim.figures(json.loads((ROOT / file).read_text("utf-8"))["results"])
    shown = match.groups()
    assert len(shown) == len(figures)
    wrong = [
        f"{text} is {value:g} in {file}"
        for text, value in zip(shown, figures, strict=True)
        if not _rounded_alike(text, value)
    ]
    assert wrong == []


def _comparison() -> list[str]:
    return _blocks(ROOT / COMPARISON)[1:]


def _unknown(block: str, facts: Sequence[str]) -> str:
    for claim in CLAIMS:
        block = _pattern(claim).sub("", block)
    for fact in sorted(facts, key=len, reverse=True):
        block = block.replace(fact, "")
    return re.sub(r"\]\([^)]*\)", "]", block)  # addresses of links


def test_no_digit_of_the_comparison_is_unknown() -> None:
    unknown = {
        block: digits
        for block in _comparison()
        if (digits := re.findall(NUMBER, _unknown(block, FACTS)))
    }
    assert unknown == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_with_a_unit_is_unknown(page: Path) -> None:
    known = [*NOT_FROM_A_FILE, *FACTS]
    assert {
        b: found for b in _blocks(page) if (found := MEASURED.findall(_unknown(b, known)))
    } == {}


def test_links_to_results_lead_to_files() -> None:
    pages = [*PAGES, *sorted((ROOT / "benchmarks").glob("*.md"))]
    links = {
        link
        for page in pages
        for link in re.findall(r"\((?:benchmarks/)?(results/[^)]*)\)", page.read_text("utf-8"))
    }
    assert [link for link in links if not (ROOT / "benchmarks" / link).is_file()] == []


@pytest.mark.parametrize(
    ("shown", "value", "alike"),
    [
        ("1.9", 1.861, True),
        ("1.9", 1.84, False),
        ("582", 581.7, True),
        ("24,800", 24_772, True),
        ("24,800", 24_700, False),
    ],
)
def test_figures_are_compared_as_they_are_rounded(shown: str, value: float, alike: bool) -> None:
    assert _rounded_alike(shown, value) is alike
