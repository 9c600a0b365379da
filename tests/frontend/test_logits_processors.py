"""Logits processors in `LLM`: whatever they do is their own request's affair, and no circumstance
changes a token.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moeserve import LLM, SamplingParams, StructuredOutputsParams
from moeserve import logits_processors as processors
from moeserve.config import config_of
from moeserve.errors import ConfigError, InvalidRequest, RequestFailed
from moeserve.sampling import LogitsProcessorSpec
from tests.plugin_packages import Install

HERE = "tests.frontend.test_logits_processors"
PROMPTS = ["Once upon a time", "A fox", "The small boat", "Two owls and a hare"]
INF = float("inf")


def forbid(args: dict[str, Any]) -> Callable[..., Any]:
    """In place, and what it was given is its own."""
    args["tokens"].append(0)
    assert args["tokens"].count(0) == 1

    def change(prompt_ids: Any, output_ids: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[args["tokens"]] = -INF
        return logits

    return change


def no_repeats(args: dict[str, Any]) -> Callable[..., Any]:
    """Forbid tokens of the prompt and the answer.

    The result depends on all previous tokens, so on a draft's position too.
    """

    def change(prompt_ids: Any, output_ids: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, torch.tensor([*prompt_ids, *output_ids]), -INF)

    return change


def cycle(args: dict[str, Any]) -> Callable[..., Any]:
    """The n-th token of the answer is args["ids"][n % len]: drafts are right, once the cycle has
    been seen.
    """

    def change(prompt_ids: Any, output_ids: Any, logits: torch.Tensor) -> torch.Tensor:
        logits = torch.full_like(logits, -INF)
        logits[args["ids"][len(output_ids) % len(args["ids"])]] = 0.0
        return logits

    return change


def returns(args: dict[str, Any]) -> Callable[..., Any]:
    made = {
        "none": lambda x: None,
        "list": lambda x: x.tolist(),
        "short": lambda x: x[:-1],
        "row": lambda x: x[None],
        "double": lambda x: x.double(),
        "ints": lambda x: x.int(),
        "nan": lambda x: x.index_fill(0, torch.tensor([3]), float("nan")),
        "inf": lambda x: x + INF,
        "meta": lambda x: x.to("meta"),
        "nothing": lambda x: torch.full_like(x, -INF),
        "raises": lambda x: {}["x"],
    }[args["what"]]
    at = args.get("at", 2)
    return lambda prompt_ids, output_ids, logits: made(logits) if len(output_ids) == at else logits


GIVEN: dict[str, Any] = {
    "forbid": forbid,
    "no-repeats": f"{HERE}:no_repeats",
    "cycle": f"{HERE}:cycle",
    "returns": returns,
    "no function": lambda args: 5,
    "halves": lambda args: lambda prompt_ids, output_ids, logits: logits / 2,
}


def ask(llm: LLM, *names: Any, prompts: Any = PROMPTS, **sampling: Any) -> list[Any]:
    params = SamplingParams(
        **({"temperature": 0, "max_tokens": 16, "logits_processors": names} | sampling)
    )
    return [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", threads=1, max_model_len=256, logits_processors=GIVEN) as it:
        yield it


def test_a_forbidden_token_does_not_come(llm: LLM) -> None:
    plain = ask(llm, logprobs=2)
    first = plain[0].token_ids[0]
    found = ask(llm, {"name": "forbid", "args": {"tokens": [first]}}, logprobs=2)
    assert first not in found[0].token_ids
    assert found[0].logprobs[0].ids[1] == first  # the raw logits' likeliest
    # By any form, one after the other; args of another request are its own.
    specs = [LogitsProcessorSpec("forbid", {"tokens": [first]}), "halves", "no-repeats"]
    for answer, prompt in zip(ask(llm, *specs, temperature=1, seed=1), PROMPTS, strict=True):
        tokens = [*llm._front.tokenizer.encode(prompt), *answer.token_ids]  # type: ignore[union-attr]
        assert first not in answer.token_ids
        assert len(set(answer.token_ids)) == len(answer.token_ids)
        assert not set(answer.token_ids[:-1]) & set(tokens[: -len(answer.token_ids)])
    assert ask(llm) == [*map(without_logprobs, plain)]


def without_logprobs(answer: Any) -> Any:
    answer.logprobs = answer.cumulative_logprob = None
    return answer


def test_rules_and_grammars_come_behind(llm: LLM) -> None:
    end = llm.ready.eos_token_ids[0]
    ends = {"name": "cycle", "args": {"ids": [end]}}
    assert [answer.token_ids for answer in ask(llm, ends)] == [[end]] * len(PROMPTS)
    with pytest.raises(RequestFailed, match=r"no token is left.*logits processors"):
        ask(llm, ends, min_tokens=2)
    with pytest.raises(RequestFailed, match=r"no token is left.*logits processors"):
        ask(llm, {"name": "cycle", "args": {"ids": [5]}}, allowed_token_ids=[6])
    fox = ask(
        llm, "no-repeats", "halves", structured_outputs=StructuredOutputsParams(choice=["fox"])
    )
    assert {answer.text for answer in fox} == {"fox"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "what", ["none", "list", "short", "row", "double", "ints", "nan", "inf", "meta", "raises"]
)
def test_nonsense_fails_its_own_request(llm: LLM, what: str, temperature: float) -> None:
    expected = ask(llm, prompts=PROMPTS[:1], temperature=temperature, seed=2)
    bad = {"name": "returns", "args": {"what": what}}
    sampling = {"temperature": temperature, "max_tokens": 16, "seed": 2}
    found = both(
        llm, SamplingParams(**sampling), SamplingParams(**sampling, logits_processors=[bad])
    )
    assert found == (expected[0].token_ids, expected[0].token_ids[:2])


def both(llm: LLM, good: SamplingParams, bad: SamplingParams) -> tuple[list[int], list[int]]:
    """The tokens of two requests at once; the second must fail in the end."""

    async def run() -> tuple[list[int], list[int]]:
        tokens = await llm._front.encode(PROMPTS[0])
        failed = []
        runs = [await llm._front.generate(tokens, params) for params in (good, bad)]
        fine = [token async for delta in runs[0] for token in delta.token_ids]
        with pytest.raises(
            RequestFailed,
            match=r"logits processor 'returns' failed: (KeyError|ValueError: expected)",
        ):
            await read(runs[1], failed)
        return fine, failed

    async def read(deltas: Any, into: list[int]) -> None:
        async for delta in deltas:
            into += delta.token_ids

    found = llm._thread.call(run())
    assert llm.stats.num_active == 0
    return found


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("no function", "'no function' failed: TypeError: .*int"),
        ({"name": "returns", "args": {"what": "nothing"}}, "no token is left"),
        ({"name": "returns", "args": {"what": "?"}}, r"'returns' failed: KeyError: '\?'"),
        ("returns", "'returns' failed: KeyError: 'what'"),
    ],
)
def test_a_factory_may_fail(llm: LLM, asked: Any, message: str) -> None:
    with pytest.raises(RequestFailed, match=message):
        ask(llm, asked)
    assert ask(llm, "halves", max_tokens=1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["forbit"], "'forbit' is unknown; known: .*cycle, forbid"),
        (["halves"] * 9, "length <= 8"),
        ("halves", "array"),
        ([5], r"logits_processors\[0\]"),
        ([""], r"logits_processors\[0\]"),
        ([{"nme": "halves"}], r"logits_processors\[0\]"),
        ([{"name": "halves", "args": []}], r"logits_processors\[0\].args"),
        ([LogitsProcessorSpec(5)], "5 is unknown; known:"),  # type: ignore[arg-type]
        ([LogitsProcessorSpec("halves", {"x": object()})], "object"),
        ([{"name": "halves", "args": {"x": "x" * processors.MAX_ARGS}}], "bytes"),
        ([forbid], "logits_processors"),
    ],
)
def test_what_is_no_processor_is_refused(llm: LLM, asked: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate("A", SamplingParams(logits_processors=asked))


def test_drafts_and_preemption_change_no_token(llm: LLM) -> None:
    cycles = {"name": "cycle", "args": {"ids": [9, 8, 7, 60, 61]}}
    params = [
        SamplingParams(
            logits_processors=names, temperature=temperature, seed=3, max_tokens=40, ignore_eos=True
        )
        for temperature in (0, 1)
        for names in (["no-repeats"], [cycles])
    ]
    expected = [out.outputs for out in llm.generate(PROMPTS, params, use_tqdm=False)]
    settings = {"max_model_len": 64, "kv_cache_bytes": 350_000, "speculate": "ngram:4"}
    with LLM("demo", threads=1, logits_processors=GIVEN, **settings) as other:
        assert [out.outputs for out in other.generate(PROMPTS, params, use_tqdm=False)] == expected
        assert other.stats.preemptions > 0
        assert sum(other.stats.accepted_drafts) > 20
        for at in range(20, 25):  # at any place among the drafts of a step
            breaks = {"name": "returns", "args": {"what": "raises", "at": at}}
            good, bad = (
                SamplingParams(logits_processors=[cycles, *more], max_tokens=40)
                for more in ([], [breaks])
            )
            assert both(other, good, bad) == ([9, 8, 7, 60, 61] * 8, ([9, 8, 7, 60, 61] * 8)[:at])
    assert expected[1][0].token_ids == [9, 8, 7, 60, 61] * 8


def test_plugins(install: Install) -> None:
    code = "def only(args):\n    return lambda p, o, x: x - 9 * x.abs()\n"
    targets = {"negative": "processors_for_a_test:only", "halves": "processors_for_a_test:only"}
    files = {"processors_for_a_test.py": code}
    install("processors-for-a-test", {processors.PLUGINS.group: targets}, files)
    with LLM(
        "demo", threads=1, max_model_len=64, logits_processors={"halves": GIVEN["halves"]}
    ) as llm:
        plain = ask(llm)
        halves = ask(llm, "halves")
        negative = ask(llm, "negative")
        assert plain == halves  # of the settings, though a plugin has the name, too
        assert plain != negative
        with pytest.raises(InvalidRequest, match=r"known: halves, negative"):
            ask(llm, "other")


def test_functions_and_names_in_settings() -> None:
    owner = type("Owner", (), {})()
    config = processors.with_processors(config_of(tp=2), {"a": f"{HERE}:forbid"}, owner)
    assert config.model.logits_processors == (f"a={HERE}:forbid",)
    assert processors.ProcessorFactories(config.model.logits_processors)._factories == {"a": forbid}
    for parallel in ({"tp": 2}, {"dp": 2}):
        with pytest.raises(ConfigError, match=r"'a' must be 'package.module:name'"):
            LLM(logits_processors={"a": forbid}, **parallel)
    local = processors.with_processors(
        config_of(), {"a": forbid, "b": f"{HERE}:cycle"}, owner
    ).model.logits_processors
    assert processors.ProcessorFactories(local)._factories == {"a": forbid, "b": cycle}
    del owner
    gc.collect()
    for setting in (
        local[0],
        "a=no_such:x",
        f"a={HERE}:no_such",
        "a=b",
        "=a:b",
        "a:b",
        "a=:b",
        "a= :b",
        "",
    ):
        with pytest.raises(ConfigError, match="logits_processors: "):
            processors.ProcessorFactories([setting])
