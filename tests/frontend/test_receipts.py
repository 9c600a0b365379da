"""Receipts: equal however the answer is computed again, and whatever was changed is named."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from moeserve.cli import main
from moeserve.cli.verify import compute_again
from moeserve.errors import ConfigError, InvalidRequest, RequestFailed
from moeserve.frontend.async_engine import AsyncEngine
from moeserve.frontend.receipt_signer import NO_KEY
from moeserve.frontend.signing_key import SigningKey, is_signed, make_key
from moeserve.loader.checkpoint import weights_digest
from moeserve.receipts import Computed, Receipt, check_form, difference, first_link, with_chain
from moeserve.sampling import GrammarSpec, SamplingParams, StructuredOutputsParams

DEMO = Path(__file__).parents[2] / "moeserve/assets/demo"
STORY = "Once upon a time there was a fox. "
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, receipt=True),
    SamplingParams(
        temperature=0.9, top_p=0.9, seed=5, n=2, max_tokens=70, logprobs=2, receipt=True
    ),
    SamplingParams(
        temperature=1.0,
        top_k=20,
        frequency_penalty=0.5,
        min_tokens=9,
        stop="e",
        max_tokens=64,
        receipt=True,
    ),
    SamplingParams(
        structured_outputs=StructuredOutputsParams(
            json={"type": "object", "properties": {"b": {"type": "integer"}}}
        ),
        max_tokens=40,
        receipt=True,
    ),
]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("keys") / "key.pem"
    make_key(path)
    return str(path)


async def receipts(engine: AsyncEngine, prompt: str, params: SamplingParams) -> list[Receipt]:
    return [
        part.outputs[0].receipt
        async for part in engine.generate(prompt, params, request_id="r")
        if part.outputs[0].receipt is not None
    ]


async def test_an_answer_is_equal_however_it_is_computed(key: str, tmp_path: Path) -> None:
    """In a crowd short of blocks, with drafts, chunks and cached prefixes; then alone, without any
    of them.
    """
    crowd = [(STORY * (3 + i % 3), PARAMS[i % len(PARAMS)]) for i in range(8)]
    settings: dict[str, Any] = {
        "speculate": "mtp:2",
        "prefill_chunk": 17,
        "kv_cache_bytes": 2**20,
        "max_model_len": 256,
    }
    async with AsyncEngine("demo", receipt_key=key, **settings) as engine:
        found = await asyncio.gather(*(receipts(engine, *one) for one in crowd))
        stats = engine.front.stats
        assert stats.preemptions, "the test tries less than it says"
        assert sum(stats.accepted_drafts) > 0
        assert stats.cached_prompt_tokens > 0
    assert [len(each) for each in found] == [params.n for _, params in crowd]
    assert all(is_signed(receipt) and not check_form(receipt) for each in found for receipt in each)
    async with AsyncEngine("demo", enable_prefix_caching=False) as engine:
        engine.front.receipt_signer = None
        for receipt in (receipt for each in found[:4] for receipt in each):
            assert difference(receipt, await compute_again(engine.front, receipt)) == ""
    for one, same in zip(found[:3], found[4:], strict=False):  # the same parameters, another prompt
        assert one[0].links[0] != same[0].links[0]


@pytest.fixture(scope="module")
def made(key: str) -> tuple[Receipt, Computed]:
    """A receipt of made-up logits, and what an honest engine computes."""
    digests = [bytes([i]) * 32 for i in range(130)]
    ids = list(range(1000, 1130))
    params = SamplingParams(max_tokens=130)
    receipt = Receipt(
        id="r",
        model="m",
        created=1,
        weights="w",
        numerics={"dtype": "float32"},
        prompt_token_ids=[1, 2],
        seed="7",
        sampling=params,
        token_ids=ids,
        finish_reason="length",
    )
    return SigningKey(Path(key)).signed(with_chain(receipt, digests)), Computed(
        ids, digests, "length", None
    )


def test_what_was_not_changed_is_equal(made: tuple[Receipt, Computed]) -> None:
    receipt, found = made
    assert is_signed(receipt)
    assert check_form(receipt) == difference(receipt, found) == ""
    assert receipt.links[0] == first_link(receipt)
    assert len(receipt.links) == 4
    travelled = json.dumps(json.loads(msgspec.json.encode(receipt)), sort_keys=True, indent=2)
    assert is_signed(msgspec.json.decode(travelled, type=Receipt))


def _with(receipt: Receipt, name: str, at: int, value: Any) -> Receipt:
    values = list(getattr(receipt, name))
    values[at] = value
    return replace(receipt, **{name: values})


def test_changes_are_named(made: tuple[Receipt, Computed]) -> None:
    receipt, found = made
    link = "0" * 64
    for changed, what in (
        (_with(receipt, "token_ids", 77, 5), "token 77 is 5 in the receipt, 1077 computed"),
        (_with(receipt, "links", 2, link), "link 2 is not of tokens 64 to 127"),
        (_with(receipt, "links", 3, link), "link 3 is not of tokens 128 to 129"),
        (
            replace(receipt, marks=receipt.marks[:-8] + "00000000"),
            "token 129 and its logits are equal; its mark",
        ),
        (
            replace(receipt, finish_reason="stop", stop_reason=5),
            "the last token ends the answer by ('stop', 5) in the receipt, by ('length', None)",
        ),
    ):
        assert not is_signed(changed)
        assert difference(changed, found).startswith(what)
    for changed, what in (
        (replace(receipt, token_ids=receipt.token_ids[:128]), "max_tokens is 130"),
        (replace(receipt, links=receipt.links[:2]), "it has 2 links"),
        (_with(receipt, "links", 1, "x"), "link 1 is not a SHA-256"),
        (
            replace(receipt, marks=receipt.marks[8:]),
            "its marks have 1032 digits; those of 130 tokens have 1040",
        ),
        (replace(receipt, seed="x"), "'x'"),
    ):
        assert what in check_form(changed)
        assert not is_signed(changed)
    for changed in (
        _with(receipt, "prompt_token_ids", 0, 3),
        replace(receipt, seed="8"),
        replace(receipt, sampling=replace(receipt.sampling, top_k=3)),
        replace(receipt, numerics={"dtype": "bfloat16"}),
    ):
        assert changed.links[0] != first_link(changed)
        assert not is_signed(changed)


def test_other_computations_are_told_by_their_first_token(made: tuple[Receipt, Computed]) -> None:
    receipt, found = made
    ids = found.token_ids
    digests = found.digests
    moved = [*digests[:99], bytes(32), *digests[100:]]
    assert (
        difference(receipt, found._replace(digests=moved))
        == "token 99 is 1099 in both, but sampled from other logits"
    )
    other = found._replace(token_ids=[*ids[:3], 9], digests=[*digests[:3], bytes(32)])
    assert (
        difference(receipt, other) == "token 3 is 1003 in the receipt, 9 computed from other logits"
    )
    short = found._replace(token_ids=ids[:70], digests=digests[:70], finish_reason="stop")
    assert (
        difference(receipt, short)
        == "token 70 is 1070 in the receipt; the computed answer ends before it"
    )


def test_weights_are_told_apart_by_any_byte_and_not_by_files(tmp_path: Path) -> None:
    original, _ = weights_digest(DEMO)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads((DEMO / "config.json").read_text()), indent=7))
    tensors = {
        name: tensor
        for path in DEMO.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    half = dict(sorted(tensors.items())[: len(tensors) // 2])
    save_file(half, tmp_path / "a.safetensors")
    save_file(
        {name: tensors[name] for name in tensors.keys() - half.keys()}, tmp_path / "b.safetensors"
    )
    assert weights_digest(tmp_path)[0] == original
    content = bytearray((tmp_path / "b.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "b.safetensors").write_bytes(content)
    assert weights_digest(tmp_path)[0] != original
    (tmp_path / "b.safetensors").write_bytes(bytes(content[:-1]) + bytes([content[-1] ^ 1]))
    assert weights_digest(tmp_path)[0] == original
    config.write_text(config.read_text().replace("1e-06", "1e-05").replace("1e-6", "1e-5"))
    assert weights_digest(tmp_path)[0] != original


def test_keys_are_refused_with_a_remedy(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists; choose the name of a new file"):
        make_key(Path(key))
    assert Path(key).stat().st_mode & 0o777 == 0o600
    wrong = tmp_path / "wrong"
    wrong.write_text("no key")
    for path in (wrong, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="moeserve receipt-key"):
            SigningKey(path)


async def test_the_command_line_names_what_differs(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    async with AsyncEngine("demo", receipt_key=key, request_log=str(log)) as engine:
        (good,) = await receipts(engine, STORY, replace(PARAMS[2], stop=()))
        async for _ in engine.generate("A dog", SamplingParams(max_tokens=5), request_id="plain"):
            pass
    bad = [
        replace(_with(good, "token_ids", 7, 11), id="token"),
        replace(good, id="weights", weights="0" * 64),
        replace(_with(good, "prompt_token_ids", 1, 99), id="request"),
    ]

    def verify(*words: str) -> tuple[int, list[str]]:
        code = main.main([*words, "--model", "demo"])
        return code, capsys.readouterr().out.splitlines()

    def written(name: str, content: Any) -> str:
        (tmp_path / name).write_bytes(msgspec.json.encode(content))
        return str(tmp_path / name)

    answer = written("good", {"choices": [{"receipt": good}]})
    assert await asyncio.to_thread(
        verify, "verify", answer, "--speculate", "ngram:2", "--key", good.public_key
    ) == (
        0,
        [
            f"r 0: {len(good.token_ids)} tokens and their logits are equal; "
            "the file has no text to compare",
            "equal",
        ],
    )
    code, lines = await asyncio.to_thread(verify, "verify", written("bad", bad))
    assert code == 1
    assert lines[-1] == "not equal"
    said = {
        id: " ".join(line for line in lines if line.startswith(id))
        for id in ("token", "weights", "request")
    }
    assert all("signature: does not match" in text for text in said.values())
    assert f"token 7 is 11 in the receipt, {good.token_ids[7]} computed" in said["token"]
    assert "weights: 000" in said["weights"]
    assert "computed" not in said["weights"]
    assert "link 0 does not match this request" in said["request"]
    assert "computed" in said["request"] or "other logits" in said["request"]

    code, lines = await asyncio.to_thread(verify, "replay", str(log))
    assert (code, lines) == (
        0,
        [
            "plain 0: 5 tokens are equal; logits were not compared: the request had no receipt",
            "equal",
        ],
    )
    code, lines = await asyncio.to_thread(verify, "replay", str(log), "--id", "r")
    assert (code, lines[-1]) == (0, "equal")
    assert await asyncio.to_thread(main.main, ["replay", str(log), "--id", "x"]) == 2


async def test_a_grammar_of_the_servers_own_is_in_receipt_and_log(key: str, tmp_path: Path) -> None:
    """A grammar that `structured_outputs` cannot express: Lark that contains the sign of GBNF."""
    grammar = GrammarSpec("answer", 'start: /[a-f]{9}/ "::=" /[0-9]+/')
    log = tmp_path / "log.jsonl"
    async with AsyncEngine("demo", receipt_key=key, request_log=str(log)) as engine:
        found = []
        for params in (
            SamplingParams(seed=2, max_tokens=30, receipt=asks) for asks in (True, False)
        ):
            async with await engine.front.generate(
                [5, 6, 7], params, grammar=grammar
            ) as generation:
                found += [delta.receipt async for delta in generation if delta.finish_reason]
        engine.front.receipt_signer, notary = None, engine.front.receipt_signer
        assert found[0].grammar == grammar
        assert difference(found[0], await compute_again(engine.front, found[0])) == ""
        engine.front.receipt_signer = notary
    written = [msgspec.json.decode(line, type=Receipt) for line in log.read_bytes().splitlines()]
    assert [line.grammar for line in written] == [grammar, grammar]
    assert written[0].weights == written[1].weights != ""


async def test_an_aborted_answer_has_neither_receipt_nor_line(key: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    params = SamplingParams(max_tokens=1900, ignore_eos=True, receipt=True)
    async with AsyncEngine("demo", receipt_key=key, request_log=str(log)) as engine:
        async with await engine.front.generate([5, 6, 7], params) as generation:
            await anext(generation)
            draining = asyncio.create_task(engine.front.drain(0.0))
            last = [delta async for delta in generation][-1]
            await draining
        assert (last.finish_reason, last.receipt) == ("abort", None)
    assert log.read_bytes() == b""


async def test_no_receipt_is_of_weights_that_were_replaced_meanwhile(
    key: str, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    async with AsyncEngine("demo", receipt_key=key, request_log=str(log)) as engine:
        ready = await engine.front.wait_ready()
        async with await engine.front.generate(
            [5, 6, 7], replace(PARAMS[0], max_tokens=60)
        ) as generation:
            await anext(generation)
            engine.front.ready = replace(
                ready, checkpoint="of other files"
            )  # as if an engine came back with them
            with pytest.raises(RequestFailed, match="not those that were loaded"):
                [delta async for delta in generation]
        async with await engine.front.generate(
            [5, 6, 7], SamplingParams(max_tokens=5)
        ) as generation:
            [delta async for delta in generation]
        assert not engine.front.stats.num_active
    (line,) = log.read_bytes().splitlines()
    assert msgspec.json.decode(line, type=Receipt).weights == ""


async def test_without_a_key_a_receipt_is_refused_with_the_remedy() -> None:
    async with AsyncEngine("demo") as engine:
        with pytest.raises(InvalidRequest) as refused:
            await receipts(engine, STORY, PARAMS[0])
    assert (refused.value.message, refused.value.param) == (NO_KEY, "receipt")
