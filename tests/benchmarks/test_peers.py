"""The comparison with other engines: its floor, its ratios, and resuming an interrupted run."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.peers import (
    CASES,
    START,
    Engine,
    environment_of,
    measure,
    prompts_of,
    row_of,
    table,
)
from benchmarks.peers_engine import Row, greedy
from benchmarks.peers_floor import Case, Rates, compiled_machine, floor_tokens_per_s
from moeserve.blocks.attention import Attention
from moeserve.blocks.feed_forward import MoE
from moeserve.blocks.gated_delta import GatedDelta
from moeserve.blocks.indexer import Indexer
from moeserve.blocks.latent_attention import LatentAttention
from moeserve.blocks.mixer import Mixer
from moeserve.blocks.rope import RopeSpec
from moeserve.engine.kv_rule import KVRule
from moeserve.models.spec import LayerSpec, ModelSpec
from moeserve.ops.rules import RouterRule

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 3,
    "vocab_size": 100,
}
ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=5, rope=RopeSpec())
LATENTS = LatentAttention(
    num_heads=4, nope_dim=3, rope_dim=2, v_dim=4, rank=6, q_rank=None, rope=RopeSpec()
)
# per layer: attention 10 * (8 + 4) * 5 = 600, router 40, an expert 90; lm_head 1,000


def spec_of(*mixers: Mixer) -> ModelSpec:
    experts = MoE(num_experts=4, top_k=1, size=3, router=RouterRule())
    layers = tuple(LayerSpec(mixer=mixer, feed_forward=experts) for mixer in mixers)
    return ModelSpec(
        architecture="x",
        dtype="float32",
        vocab_size=100,
        hidden_size=10,
        max_position=9,
        norm_eps=0.1,
        layers=layers,
    )


SPEC = spec_of(ATTENTION, ATTENTION)


def test_a_decode_step_reads_what_one_token_touches() -> None:
    case = Case("x", 1, 7, 3)
    read = Rates(read_gb_s=1.0, gflop_s=1e9)
    weights = 2 * (2 * (640 + 90) + 1000)
    cache = 9 * 2 * 2 * 2 * 5 * 2
    assert floor_tokens_per_s(SPEC, case, read) == pytest.approx(1e9 / (weights + cache))
    assert floor_tokens_per_s(SPEC, case, read, weight_bytes=1) == pytest.approx(
        1e9 / (weights / 2 + cache)
    )


def test_a_large_batch_reads_all_experts_and_is_bound_by_arithmetic_in_the_end() -> None:
    case = Case("x", 1000, 7, 3)
    by_memory = floor_tokens_per_s(SPEC, case, Rates(1.0, 1e9))
    assert by_memory == pytest.approx(
        1000 * 1e9 / (2 * (2 * (640 + 4 * 90) + 1000) + 1000 * 9 * 80)
    )
    by_units = floor_tokens_per_s(SPEC, case, Rates(1e9, 1.0))
    assert by_units == pytest.approx(1e9 / (2 * (2 * 730 + 1000) + 4 * 9 * 4 * 5 * 2))


def test_a_prefill_is_bound_by_arithmetic_without_the_head() -> None:
    floor = floor_tokens_per_s(SPEC, Case("x", 3, 20, 1), Rates(1e-9, 1.0))
    assert floor == pytest.approx(1e9 / (2 * 2 * 730 + 4 * 10.5 * 4 * 5 * 2))


def test_a_window_bounds_what_is_read_and_what_is_computed() -> None:
    slides = spec_of(replace(ATTENTION, rule=KVRule(window=3)))
    decode = floor_tokens_per_s(slides, Case("x", 1, 7, 3), Rates(1.0, 1e9))
    assert decode == pytest.approx(1e9 / (2 * (640 + 90 + 1000) + 3 * 2 * 2 * 5 * 2))
    prefill = floor_tokens_per_s(slides, Case("x", 1, 4, 1), Rates(1.0, 1.0))
    assert prefill == pytest.approx(1e9 / (2 * 730 + 4 * (1 + 2 + 3 + 3) / 4 * 4 * 5))


def test_latents_are_read_once_for_all_heads_and_expanded_in_a_prefill() -> None:
    spec = spec_of(LATENTS)
    weights = 10 * 4 * 5 + 10 * 8 + 4 * 7 * 6 + 10 * 16 + 40 + 90
    decode = floor_tokens_per_s(spec, Case("x", 1, 7, 3), Rates(1.0, 1e9))
    assert decode == pytest.approx(1e9 / (2 * (weights + 1000) + 9 * 2 * 8))
    absorbed = floor_tokens_per_s(spec, Case("x", 1, 7, 3), Rates(1e9, 1.0))
    assert absorbed == pytest.approx(1e9 / (2 * (weights + 1000) + 2 * 9 * 4 * (8 + 6)))
    prefill = floor_tokens_per_s(spec, Case("x", 1, 4, 1), Rates(1.0, 1.0))
    assert prefill == pytest.approx(1e9 / (2 * weights + 2 * 2.5 * 4 * (5 + 4)))


def test_a_state_is_read_once_however_long_the_context() -> None:
    """In fp32, and with the inputs of the convolution before its border."""
    spec = spec_of(
        GatedDelta(
            num_k_heads=2,
            num_v_heads=4,
            k_dim=3,
            v_dim=5,
            conv=4,
            inputs_by_head=True,
            gates_by_head=True,
        )
    )
    weights = 10 * (2 * 6 + 2 * 20) + 10 * 2 * 4 + 10 * 20 + 40 + 90 + 1000
    for prompt in (7, 700):
        decode = floor_tokens_per_s(spec, Case("x", 1, prompt, 3), Rates(1.0, 1e9))
        assert decode == pytest.approx(1e9 / (2 * weights + 4 * (4 * 3 * 5 + 3 * (2 * 6 + 20))))


def test_an_index_selector_reads_all_its_keys_and_few_latents() -> None:
    mixer = replace(LATENTS, q_rank=7, indexer=Indexer(num_heads=2, dim=4, top_k=3))
    weights = sum(a * b for a, b in mixer.products(10)) + 40 + 90 + 1000
    decode = floor_tokens_per_s(spec_of(mixer), Case("x", 1, 7, 3), Rates(1.0, 1e9))
    assert decode == pytest.approx(1e9 / (2 * weights + 2 * (9 * 4 + 3 * 8)))


def test_the_machine_is_measured() -> None:
    with compiled_machine(threads=1) as machine:
        rates = machine.rates()
    assert rates.read_gb_s > 0
    assert rates.gflop_s > 0


def samples_of(case: str, ours: list[float], theirs: list[float]) -> list[dict[str, Any]]:
    return [
        {"case": case, "round": i, "engine": name, "tokens_per_s": speed, "floor": 100.0}
        for name, speeds in (("moeserve", ours), ("vllm", theirs))
        for i, speed in enumerate(speeds)
    ]


def test_ratios_are_taken_round_by_round() -> None:
    """The machine slows down tenfold between rounds, so only ratios within a round count."""
    row = row_of(
        "decode-1",
        ["moeserve", "vllm"],
        samples_of("decode-1", [20.0, 2.0, 3.0], [10.0, 1.0, 30.0]),
    )
    assert row["tokens_per_s"] == {"moeserve": 3.0, "vllm": 10.0}
    assert row["ratio"] == {"moeserve": 1.0, "vllm": 2.0}
    assert row["share_of_floor"] == {"moeserve": 0.03, "vllm": 0.1}
    shown = table([row], {"moeserve": 2.0, "vllm": 120.0}, ["moeserve", "vllm"])
    assert "| decode-1 | 3.0 | 10.0 | 2.00 | 100 | 0.03 |" in shown
    assert len({line.count("|") for line in shown.splitlines()}) == 1


def test_prompts_are_the_same_for_all_engines_and_others_in_each_round() -> None:
    case = CASES["decode-8"]
    assert prompts_of(case, 100, 1) == prompts_of(case, 100, 1) != prompts_of(case, 100, 2)
    assert {len(prompt) for prompt in prompts_of(case, 100, 1)} == {32}


def test_vllm_gets_its_best_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    env = environment_of("vllm", "/nowhere/bin/python", 2)
    assert "OMP_NUM_THREADS" not in env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert environment_of("llamacpp", "/nowhere/bin/python", 2)["OMP_NUM_THREADS"] == "2"


class FakeEngine(Engine):
    """Answers at once: 1 ms per token."""

    def ask(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        return 1e-3 * max_tokens, [[1] * max_tokens for _ in prompts]

    def signal(self, number: int) -> None:
        raise AssertionError(signal.Signals(number))


def test_a_run_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def started(name: str, *words: object) -> Iterator[tuple[Engine, float]]:
        yield FakeEngine(name, None, "7"), 1.5  # type: ignore[arg-type]

    class Known:
        def rates(self) -> Rates:
            return Rates(1.0, 1.0)

    monkeypatch.setattr(peers, "started", started)
    monkeypatch.setattr(peers, "compiled_machine", lambda threads: nullcontext(Known()))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    args = argparse.Namespace(
        model=tmp_path,
        engine=["moeserve", "vllm=python"],
        case=["decode-1", "decode-8"],
        rounds=2,
        threads=1,
        gguf=None,
        weight_bytes=2,
    )

    def run(known: list[dict[str, Any]], until_s: float = float("inf")) -> list[dict[str, Any]]:
        with ExitStack() as stack:
            return list(measure(args, stack, known, until_s))

    whole = run([])
    assert [(x["case"], x["round"], x["engine"]) for x in whole] == [
        (START, -1, "moeserve"),
        (START, -1, "vllm"),
        ("decode-1", 0, "moeserve"),
        ("decode-1", 0, "vllm"),
        ("decode-8", 0, "moeserve"),
        ("decode-8", 0, "vllm"),
        ("decode-1", 1, "vllm"),  # the order turns
        ("decode-1", 1, "moeserve"),
        ("decode-8", 1, "vllm"),
        ("decode-8", 1, "moeserve"),
    ]
    assert whole[4]["tokens_per_s"] == pytest.approx(8 * 64 / 0.064)
    rest = run(whole[:6])
    assert [(x["case"], x["round"]) for x in rest if x["case"] != START] == [
        ("decode-1", 1), ("decode-1", 1), ("decode-8", 1), ("decode-8", 1),
    ]  # fmt: skip
    assert run(whole) == []
    assert [x["case"] for x in run([], until_s=0.0)] == [START, START]


def test_every_sequence_of_a_peer_decodes_its_own_tokens() -> None:
    """A batch of equal tokens would choose the same experts, and look like a batch of one."""
    seen: list[list[Row]] = []
    cleared = []

    def forward(rows: list[Row]) -> list[int]:
        seen.append(rows)
        return [token + 1 for token, _, _, is_wanted in rows if is_wanted]

    run = greedy(forward, lambda: cleared.append(len(seen)))
    assert run([[5, 6], [7, 9]], 3) == [[7, 8, 9], [10, 11, 12]]
    assert seen == [
        [(5, 0, 0, False), (6, 1, 0, True)],
        [(7, 0, 1, False), (9, 1, 1, True)],
        [(7, 2, 0, True), (10, 2, 1, True)],
        [(8, 3, 0, True), (11, 3, 1, True)],
    ]
    run([[1]], 1)
    assert cleared == [0, 4]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--engine", "ik_llama=ik"], "needs --gguf"),
        (["--engine", "ik_llama=ik", "--gguf", "x"], "no build/**/libllama.so in ik"),
        (["--engine", "ik"], "no engine 'ik': there are moeserve"),
    ],
)
def test_unusable_engines_are_refused_before_anything_starts(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["peers", "hf", *words])
    with pytest.raises(SystemExit):
        peers.arguments()
    assert expected in capsys.readouterr().err
