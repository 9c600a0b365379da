"""Grammars of an engine's slots, and masks on logits.

Masks are computed beside forward passes, with drafts, endings, errors, and slots that change
owners.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moeserve
from moeserve.engine.plan import NewRequest, decode_plan, encode_plan
from moeserve.errors import PeerLost
from moeserve.kernels.sampling import apply_bitmask as triton_bitmask
from moeserve.ops import native_rows
from moeserve.runner.dummy import dummy_plan
from moeserve.runner.sampling.constraints import Accepted, Constraints, StepMasks
from moeserve.runner.sampling.reference import apply_bitmask
from moeserve.runner.sampling.sampler import Masks, Status
from moeserve.sampling import GrammarSpec, TokenSampling
from moeserve.text.tokenizer import Tokenizer
from tests.kernels.aot import Case, compile_all
from tests.kernels.device import DEVICE
from tests.runner.test_sampler import KINDS, add, sample, sampler_of
from tests.runner.test_triton_sampler import add as add_both
from tests.runner.test_triton_sampler import pair, sample_both

MODEL = Path(moeserve.__file__).parent / "assets" / "demo"
TOKENIZER = Tokenizer.load(MODEL)
VOCAB = TOKENIZER.backend.get_vocab_size() + 40
END = TOKENIZER.backend.token_to_id("<|im_end|>")
PROMPT = 3
PERSON = GrammarSpec(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "age": {"type": "integer", "minimum": 0, "maximum": 99},
                "sex": {"enum": ["f", "m"]},
            },
            "required": ["age", "sex"],
            "additionalProperties": False,
        }
    ),
    any_whitespace=False,
)
WORDS = GrammarSpec("regex", "(ab)+")  # may always end, and always go on
NO_DRAFTS = np.zeros(0, np.int32)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, special=False)


@pytest.fixture
def constraints() -> Iterator[Constraints]:
    made = Constraints(MODEL, VOCAB, [END])
    yield made
    made.close()


def take(
    constraints: Constraints, slot: int, spec: GrammarSpec | None, answer: list[int] | None = None
) -> None:
    tokens = np.array([*range(PROMPT), *(answer or [])], np.int32)
    constraints.add(
        NewRequest(slot, tokens, PROMPT, TokenSampling(seed=0, max_tokens=99, grammar=spec))
    )


def begin(constraints: Constraints, rows: dict[int, tuple[int, list[int]]]) -> StepMasks:
    """Start grammars; `rows` maps slots to known tokens of the answer and drafts."""
    drafts = [np.array(drafts, np.int32) for _, drafts in rows.values()]
    step = constraints.begin(list(rows), [PROMPT + known for known, _ in rows.values()], drafts)
    assert step is not None
    return step


def allowed(bits_W: Any) -> list[int]:
    return np.flatnonzero(
        np.unpackbits(np.ascontiguousarray(bits_W).view(np.uint8), bitorder="little")
    ).tolist()


def test_requests_without_a_grammar_cost_nothing(constraints: Constraints) -> None:
    assert constraints.begin([0, 1], [3, 3]) is None
    take(constraints, 0, None)
    assert constraints.begin([0, 1], [3, 3]) is None
    take(constraints, 5, PERSON)
    assert constraints.begin([0, 1], [3, 3]) is None
    step = begin(constraints, {5: (0, [])})
    step.result()
    assert constraints._compiler.grammars.end_ids == {END}


def test_rows_among_others_and_their_drafts(constraints: Constraints) -> None:
    take(constraints, 2, PERSON)
    take(constraints, 4, WORDS, ids("ab"))
    word = ids("ab")
    step = begin(constraints, {7: (5, [1, 2]), 2: (0, ids('{"')), 1: (9, []), 4: (len(word), word)})
    rows_C, bits_CW = step.result()
    width = 1 + len(ids('{"'))
    first = 3 + width + 1
    assert rows_C.tolist() == [*range(3, 3 + width), *range(first, first + 1 + len(word))]
    assert bits_CW.shape == (len(rows_C), -(-VOCAB // 32))
    assert END not in allowed(bits_CW[0])
    assert END in allowed(bits_CW[width])
    assert max(max(allowed(bits)) for bits in bits_CW) < TOKENIZER.backend.get_vocab_size()
    kept = [[], [ids("{")[0]], [], [*word, END]]
    assert step.accept(kept) == Accepted({4: len(word) + 1}, {})


@pytest.mark.parametrize("seed", range(4))
def test_drafts_and_repeated_steps_change_nothing(constraints: Constraints, seed: int) -> None:
    """One slot goes token by token, the other by drafts, right and wrong; its steps run twice now
    and then, and its request comes back with what it has."""
    rng = random.Random(seed)
    spec = rng.choice([PERSON, WORDS, GrammarSpec("choice", '["yes", "no", "yes, of course"]')])
    take(constraints, 0, spec)
    text: list[int] = []
    rows = []
    while True:
        step = begin(constraints, {0: (len(text), [])})
        rows.append(allowed(step.result().bits_CW[0]))
        text.append(rng.choice([*[END] * (END in rows[-1] and len(text) > 6), *rows[-1]]))
        accepted = step.accept([text[-1:]])
        assert not accepted.failed
        if accepted.complete:
            assert accepted.complete == {0: 1}
            break
    take(constraints, 1, spec)
    at = 0
    while at < len(text):
        right = rng.randrange(4)
        drafts = [*text[at : at + right], *rng.choices(range(VOCAB), k=rng.randrange(2))]
        if rng.random() < 0.2:
            take(constraints, 1, spec, text[:at])
        for _ in range(rng.choice([1, 1, 2])):
            step = begin(constraints, {1: (at, drafts)})
            found = [allowed(bits) for bits in step.result().bits_CW]
        kept = [
            *text[at : at + right],
            *(text[at + right : at + right + 1] or [rng.randrange(VOCAB)]),
        ]
        for i in range(min(len(kept), len(text) - at)):
            assert found[i] == rows[at + i]
        accepted = step.accept([kept])
        if at + len(kept) >= len(text):
            assert accepted == Accepted({1: len(text) - at}, {})
        else:
            assert accepted == Accepted({}, {})
            if rng.random() < 0.3:  # it runs again after all
                step = begin(constraints, {1: (at, drafts)})
                assert [allowed(bits) for bits in step.result().bits_CW] == found
                assert step.accept([kept]) == accepted
        at += len(kept)


def test_masks_wait_for_the_tokens_of_the_step_before(constraints: Constraints) -> None:
    take(constraints, 0, GrammarSpec("choice", '["no", "yes"]'))
    first = begin(constraints, {0: (0, [])})
    first.result()
    letter = ids("n")
    second = begin(constraints, {0: (len(letter), [])})
    time.sleep(0.05)
    assert not second.masks.done()
    collector = threading.Timer(0.05, lambda: first.accept([letter]))
    collector.start()
    assert allowed(second.result().bits_CW[0]) == ids("o")
    collector.join()
    assert second.accept([ids("o")]) == Accepted({0: 1}, {})


def test_a_step_that_will_never_be_accepted_holds_nobody_up(constraints: Constraints) -> None:
    take(constraints, 0, WORDS)
    begin(constraints, {0: (0, [])}).result()
    lost = begin(constraints, {0: (1, [])})
    take(constraints, 0, WORDS, ids("ab"))
    again = begin(constraints, {0: (len(ids("ab")), [])})
    assert END in allowed(again.result().bits_CW[0])
    assert lost.masks.done()
    constraints.close()


def test_nobody_waits_for_tokens_of_a_request_that_failed_in_sampling(
    constraints: Constraints,
) -> None:
    for slot in range(2):
        take(constraints, slot, GrammarSpec("choice", '["no", "yes"]'))
    letter = ids("n")
    first = begin(constraints, {0: (0, []), 1: (0, [])})
    second = begin(constraints, {0: (len(letter), []), 1: (len(letter), [])})
    for _ in range(2):
        assert first.accept([[], letter]) == Accepted(
            {}, {}
        )  # again: as if another rank had to run it again
    bits_CW = second.masks.result(5).bits_CW
    assert (bits_CW[0] == -1).all()
    assert allowed(bits_CW[1]) == ids("o")
    assert second.accept([[5], ids("o")]) == Accepted({1: 1}, {})


def test_a_lost_step_ends_the_one_that_waits_for_it(constraints: Constraints) -> None:
    take(constraints, 0, GrammarSpec("choice", '["no", "yes"]'))
    letter = ids("n")
    for _ in range(2):
        lost = begin(constraints, {0: (0, [])})
        assert set(letter) < set(allowed(lost.masks.result(5).bits_CW[0]))
        behind = begin(constraints, {0: (len(letter), [])})
        with pytest.raises(PeerLost), lost.lost_by_errors():
            raise PeerLost("rank 1 is gone")
        with pytest.raises(PeerLost, match="rank 1"):
            behind.masks.result(5)
    again = begin(constraints, {0: (0, [])})
    assert again.accept([letter]) == Accepted({}, {})
    assert allowed(begin(constraints, {0: (len(letter), [])}).masks.result(5).bits_CW[0]) == ids(
        "o"
    )


def test_a_slot_that_changes_hands_while_a_step_is_in_flight(constraints: Constraints) -> None:
    take(constraints, 0, WORDS)
    take(constraints, 1, WORDS)
    old = begin(constraints, {0: (0, []), 1: (0, [])})
    old.result()
    take(constraints, 0, GrammarSpec("choice", '["xy"]'))
    new = begin(constraints, {0: (0, [])})
    assert old.accept([ids("ab")[:1], ids("ab")[:1]]) == Accepted({}, {})
    assert END not in allowed(new.result().bits_CW[0])
    assert new.accept([ids("xy")]).complete == {0: len(ids("xy"))}


@pytest.mark.parametrize(
    ("spec", "answer", "message"),
    [
        (GrammarSpec("regex", "("), [], "does not compile"),
        (GrammarSpec("json_schema", "{"), [], "not JSON"),
        (WORDS, [END], "does not allow"),
        (WORDS, [-1], "structured output"),
        (WORDS, [VOCAB + 5], "structured output"),
        (PERSON, ids("]"), "does not allow"),
    ],
)
def test_a_bad_request_fails_alone(
    constraints: Constraints, spec: GrammarSpec, answer: list[int], message: str
) -> None:
    take(constraints, 0, spec, answer)
    take(constraints, 1, GrammarSpec("choice", '["no"]'))
    for known in (len(answer), len(answer) + 1):
        step = begin(constraints, {0: (known, [1]), 1: (0, [])})
        assert (step.result().bits_CW[:2] == -1).all()
        assert allowed(step.result().bits_CW[2])[0] in [i for i in range(VOCAB - 40) if i != END]
        accepted = step.accept([[5], ids("n")])
        assert accepted.complete == {}
        assert message in accepted.failed[0]
        assert set(accepted.failed) == {0}
    step = begin(constraints, {1: (0, [])})
    assert step.accept([ids("no")]) == Accepted({1: len(ids("no"))}, {})


def test_tokens_that_no_mask_allowed(constraints: Constraints) -> None:
    take(constraints, 0, PERSON)
    step = begin(constraints, {0: (0, [])})
    step.result()
    assert "does not allow" in step.accept([ids("]")]).failed[0]


def test_a_row_without_a_token_has_ended(constraints: Constraints) -> None:
    """Its next step is in flight already and must not wait for a token that never comes."""
    take(constraints, 0, PERSON)
    take(constraints, 1, GrammarSpec("choice", '["no"]'))
    first = begin(constraints, {0: (0, []), 1: (0, [])})
    first.result()
    second = begin(constraints, {0: (1, []), 1: (1, [])})
    assert first.accept([[], ids("no")[:1]]) == Accepted({}, {})
    bits_CW = second.masks.result(5).bits_CW
    assert (bits_CW[0] == -1).all()
    assert allowed(bits_CW[1]) == ids("no")[1:]
    assert second.accept([[5], ids("no")[1:]]) == Accepted({1: 1}, {})


def test_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    constraints = Constraints(tmp_path, VOCAB, [END])
    take(constraints, 0, PERSON)
    step = begin(constraints, {0: (0, [])})
    assert (step.result().bits_CW == -1).all()
    assert "tokenizer" in step.accept([[1]]).failed[0]
    constraints.close()


def test_a_plan_with_a_grammar_travels(constraints: Constraints) -> None:
    sampling = TokenSampling(seed=0, max_tokens=2, grammar=PERSON)
    plan = dummy_plan(1, 0, [2], (NewRequest(0, np.zeros(2, np.int32), 2, sampling),))
    assert decode_plan(encode_plan(plan)).new_requests[0].sampling == sampling


# ---- masks on logits
# ----------------------------------------------------------------------------------------


def random_masks(
    rng: np.random.Generator, rows: int, count: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    bits = rng.integers(-(2**31), 2**31, (count, -(-width // 32)), dtype=np.int64).astype(np.int32)
    bits[rng.random(bits.shape) < 0.3] = 0
    bits[rng.random(bits.shape) < 0.3] = -1
    return rng.permutation(rows)[:count], bits


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 95, 1000, 5000])
def test_bitmasks(width: int) -> None:
    rng = np.random.default_rng(width)
    x = torch.from_numpy(rng.normal(0, 1, (5, width + 3)).astype(np.float32))
    x[0, 0] = torch.nan
    x[1, 0] = -torch.inf
    rows, bits = random_masks(rng, 5, 3, width)
    expected = x.numpy().copy()
    for row, words in zip(rows, bits, strict=True):
        for token in range(width):
            if not int(words[token // 32]) >> token % 32 & 1:
                expected[row, token] = -np.inf
    functions = [apply_bitmask, *([native_rows.apply_bitmask] if native_rows.AVAILABLE else [])]
    for function in functions:
        found = x.clone()
        function(found[:, :width], torch.from_numpy(rows), torch.from_numpy(bits))
        np.testing.assert_array_equal(found.numpy(), expected)
    found = x.to(DEVICE)
    triton_bitmask(
        found[:, :width], torch.from_numpy(rows).to(DEVICE), torch.from_numpy(bits).to(DEVICE)
    )
    np.testing.assert_array_equal(found.cpu().numpy(), expected)


def test_bitmask_rows_are_checked() -> None:
    if native_rows.AVAILABLE:
        x = torch.zeros(2, 40)
        bits = torch.zeros(1, 2, dtype=torch.int32)
        for row in (2, -1):
            with pytest.raises(IndexError):
                native_rows.apply_bitmask(x, torch.tensor([row]), bits)
        with pytest.raises(AssertionError):
            native_rows.apply_bitmask(x, torch.tensor([0]), bits[:, :1].contiguous())


@pytest.mark.full("aot")
def test_bitmask_compiles_for_hopper() -> None:
    types = {
        "x_ptr": "*fp32",
        "rows_ptr": "*i64",
        "bits_ptr": "*i32",
        "stride": "i32",
        "width": "i32",
        "words": "i32",
    }
    (report,) = compile_all([Case("sampling:bitmask_kernel", types, {"BLOCK": 4096})])
    assert report.stack_bytes == 0, report


def spec_rows(vocab: int, count: int, rng: np.random.Generator) -> Masks:
    """Masks of the first `count` rows; each allows a fifth of the tokens."""
    allowed_CV = rng.random((count, -(-vocab // 32) * 32)) < 0.2
    bits = np.packbits(allowed_CV, axis=1, bitorder="little").view(np.int32)
    return Masks(np.arange(count), bits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [70, 5000])
def test_masked_rows_are_rows_with_allowed_ids(kind: Any, vocab: int) -> None:
    """Logprobs use the raw logits; a mask applies before penalties, biases and cutoffs."""
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(0, 2, (12, vocab)).astype(np.float32))
    masks = spec_rows(vocab, 8, rng)
    sampler = sampler_of(vocab, kind=kind)
    twin = sampler_of(vocab, kind=kind)
    for slot in range(12):
        asked = {
            "temperature": [0.0, 0.7, 1.3][slot % 3],
            "top_k": [0, 5][slot % 2],
            "top_p": [1.0, 0.8][slot // 6],
        }
        asked |= {"logprobs": 2, "repetition_penalty": [1.0, 1.5][slot % 2]}
        asked |= {"logit_bias": {1: 2.0}} if slot % 4 else {}
        add(sampler, slot, [1, 2, 3], 2, grammar=PERSON if slot < 8 else None, **asked)
        fits = [t for t in allowed(masks.bits_CW[slot]) if t < vocab] if slot < 8 else None
        add(twin, slot, [1, 2, 3], 2, allowed_ids=fits, **asked)
    order = rng.permutation(12)
    places = np.argsort(order)[:8]
    slots = order.astype(np.int64)
    at = np.full(12, 3)
    shuffled = logits[torch.from_numpy(order)]
    raw = shuffled.clone()
    found = sampler.sample(shuffled, slots, at, Masks(places, masks.bits_CW))
    expected = sample(twin, shuffled, order.tolist(), 3)
    assert torch.equal(shuffled, raw)
    assert found.tokens_S.tolist() == expected.tokens_S.tolist()
    assert found.logprobs is not None
    assert expected.logprobs is not None
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert torch.equal(ours, theirs)


def test_masked_rows_by_triton() -> None:
    rng = np.random.default_rng(0)
    vocab = 600
    count = 9
    samplers = pair(vocab)
    for slot in range(count):
        asked = {"seed": slot, "temperature": [0.0, 1.0][slot % 2], "top_k": [0, 7][slot % 3 == 0]}
        add_both(
            samplers,
            slot,
            np.array([1, 2], np.int32),
            1,
            grammar=PERSON if slot < 5 else None,
            **asked,
        )
    masks = spec_rows(vocab, 5, rng)
    logits = torch.from_numpy(rng.normal(0, 2, (count, vocab)).astype(np.float32))
    slots = np.arange(count)
    at = np.full(count, 2)
    plain, by_triton = sample_both(samplers, logits, slots, at, masks)
    assert by_triton.tokens_S.tolist() == plain.tokens_S.tolist()
    for row in range(5):
        assert int(plain.tokens_S[row]) in allowed(masks.bits_CW[row])


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_and_rules_that_leave_nothing(kind: Any) -> None:
    """min_tokens and a grammar that allows only the end; allowed ids that the grammar does not
    allow.
    """
    sampler = sampler_of(70, kind=kind)
    add(sampler, 0, [1, 2], 2, grammar=PERSON, min_tokens=4, stop_ids=(5,), temperature=0.0)
    add(sampler, 1, [1, 2], 2, grammar=PERSON, allowed_ids=(7, 8))
    add(sampler, 2, [1, 2], 2, grammar=PERSON, stop_ids=(5,))
    bits = np.zeros((3, 3), np.int32)
    bits[:, 0] = 1 << 5
    found = sampler.sample(
        torch.randn(3, 70), np.arange(3), np.full(3, 2), Masks(np.arange(3), bits)
    )
    assert found.status_S.tolist() == [Status.NOTHING_ALLOWED, Status.NOTHING_ALLOWED, Status.FINE]
    assert found.tokens_S.tolist() == [0, 0, 5]
    assert "grammar" in Status.MESSAGES[Status.NOTHING_ALLOWED]


def test_many_threads_of_acceptance(constraints: Constraints) -> None:
    """Launch and collection in their own threads, 30 slots, one step ahead."""
    for slot in range(30):
        take(constraints, slot, WORDS if slot % 2 else PERSON)
    rng = random.Random(1)
    texts: list[list[int]] = [[] for _ in range(30)]
    live = list(range(30))
    with ThreadPoolExecutor(1) as collector:
        before = None
        for _ in range(12):
            step = begin(constraints, {slot: (len(texts[slot]), []) for slot in live})
            bits_CW = step.result().bits_CW
            chosen = [rng.choice(allowed(bits)) for bits in bits_CW]
            for slot, token in zip(live, chosen, strict=True):
                texts[slot].append(token)
            if before is not None:
                assert before.result().failed == {}
            before = collector.submit(step.accept, [[token] for token in chosen])
            done = before.result().complete
            live = [slot for slot in live if slot not in done]
