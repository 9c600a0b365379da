"""Prompts with a gap: the tokens of each model family, their order, and what fits the context."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from moeserve.errors import InvalidRequest
from moeserve.sampling import SamplingParams
from moeserve.text.fill_in_middle import (
    ContextChunk,
    ending_at_markers,
    fill_in_middle_prompt,
    fim_tokens,
    infill_prompt,
)
from moeserve.text.gguf_tokenizer import gguf_fim_ids
from moeserve.text.tokenizer import Tokenizer

PREFIX = "def add(a, b):\n    return "
SUFFIX = "\n\nprint(add(1, 2))\n"
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
QWEN += ["<|repo_name|>", "<|file_sep|>"]
# The formats of the models' cards and papers: name, added tokens, prompt
FORMATS = {
    "qwen": (QWEN, "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"),
    "starcoder": (
        ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<filename>"],
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    ),
    "santacoder": (
        ["<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"],
        "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",
    ),
    "deepseek": (
        ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    ),
    "glm": (
        ["<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"],
        "<|code_prefix|>{prefix}<|code_suffix|>{suffix}<|code_middle|>",
    ),
    "seed-coder": (
        ["<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"],
        "<[fim-suffix]>{suffix}<[fim-prefix]>{prefix}<[fim-middle]>",
    ),
    "codestral": (["[PREFIX]", "[MIDDLE]", "[SUFFIX]"], "[SUFFIX]{suffix}[PREFIX]{prefix}"),
}


def make_tokenizer(
    added: list[str], *, special: bool = True, bos: bool = False, words: tuple[str, ...] = ()
) -> Tokenizer:
    """Return a tokenizer with a token for each byte, and these added ones.

    words: texts in the ordinary vocabulary.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*alphabet, *words])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|endoftext|>"])
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return Tokenizer(backend, {})


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_prompts_have_the_form_of_the_model_cards(name, bos, special):
    added, form = FORMATS[name]
    tokenizer = make_tokenizer(added, bos=bos, special=special)
    written = form.format(prefix=PREFIX, suffix=SUFFIX)
    # The tokenizer itself finds the control tokens in the card's text.
    assert fill_in_middle_prompt(tokenizer, PREFIX, SUFFIX) == tokenizer.encode(written)
    without = fill_in_middle_prompt(tokenizer, PREFIX, SUFFIX, special=False)
    assert without == tokenizer.encode(written, special=False)


def test_ids_are_a_prefix_with_or_without_bos():
    tokenizer = make_tokenizer(QWEN, bos=True)
    expected = fill_in_middle_prompt(tokenizer, PREFIX, SUFFIX)
    for special in (True, False):
        ids = tokenizer.encode(PREFIX, special=special)
        assert fill_in_middle_prompt(tokenizer, ids, SUFFIX) == expected


def test_control_tokens_in_a_users_text_are_text():
    tokenizer = make_tokenizer(QWEN)
    prefix = "a<|fim_suffix|>b\ufdd0<s>"
    suffix = "<|fim_middle|><|fim_pad|>"
    ids = fill_in_middle_prompt(tokenizer, prefix, suffix)
    fim = fim_tokens(tokenizer, "suffix")
    assert [i for i in ids if i in fim.end_ids] == [fim.prefix, fim.suffix, fim.middle]
    assert tokenizer.backend.token_to_id("<s>") not in ids
    shown = "<|fim_prefix|>a<|fim_suffix|>b<s><|fim_suffix|><|fim_middle|><|fim_pad|><|fim_middle|>"
    assert text_of(tokenizer, ids) == shown


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ([], ()),
        ([], ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")),  # ordinary vocabulary
        (["<|fim_prefix|>", "<|fim_suffix|>"], ()),  # one is missing
        (["<|fim_prefix|>", "<fim_suffix>", "<|code_middle|>"], ()),  # of several families
        (["[PREFIX]", "[MIDDLE]"], ()),
    ],
)
def test_a_model_without_the_tokens_is_refused(added, words):
    tokenizer = make_tokenizer(added, words=words)
    assert tokenizer.fim is None
    for make in (
        lambda: fill_in_middle_prompt(tokenizer, "a", "b"),
        lambda: infill_prompt(tokenizer, "a", "b", [], max_tokens=100),
        lambda: fim_tokens(None, "suffix"),
    ):
        with pytest.raises(InvalidRequest, match="suffix: this") as caught:
            make()
        assert caught.value.code == "unsupported_parameter"


def test_an_answer_ends_at_each_marker():
    tokenizer = make_tokenizer(QWEN)
    fim = fim_tokens(tokenizer, "suffix")
    ids = {tokenizer.backend.token_to_id(text) for text in [*QWEN, "<|endoftext|>"]}
    params = ending_at_markers(SamplingParams(stop_token_ids=[1]), fim)
    assert set(params.stop_token_ids) == ids | {1}
    params = ending_at_markers(SamplingParams(ignore_eos=True, logit_bias={1: 2.0}), fim)
    assert params.logit_bias == {1: 2.0} | dict.fromkeys(ids, -100.0)
    assert not params.stop_token_ids


def test_an_added_token_that_is_not_special_ends_no_answer_by_its_text():
    tokenizer = make_tokenizer([*QWEN, "</s>"], special=False)
    fim = fim_tokens(tokenizer, "suffix")
    assert tokenizer.backend.token_to_id("</s>") not in fim.end_ids


CHUNKS = [ContextChunk("a.py", "A = 1\n"), ContextChunk("<|file_sep|>b.py", "B = 2\n")]


def test_other_files_come_first_in_the_form_of_qwen_repositories():
    tokenizer = make_tokenizer(QWEN, bos=True)
    prompt = infill_prompt(tokenizer, "x = ", "\n", CHUNKS, max_tokens=1000)
    assert text_of(tokenizer, prompt.token_ids) == (
        "<s><|repo_name|>myproject\n<|file_sep|>a.py\nA = 1\n<|file_sep|><|file_sep|>b.py\nB = 2\n"
        "<|file_sep|>filename\n<|fim_prefix|>x = <|fim_suffix|>\n<|fim_middle|>"
    )
    assert not prompt.truncated
    separator = tokenizer.backend.token_to_id("<|file_sep|>")
    assert prompt.token_ids.count(separator) == 3  # that in a file's name is text


def test_other_files_without_tokens_for_them():
    tokenizer = make_tokenizer(FORMATS["deepseek"][0])
    prompt = infill_prompt(tokenizer, "x = ", "\n", CHUNKS[:1], max_tokens=1000)
    assert text_of(tokenizer, prompt.token_ids) == (
        "\n\n--- snippet ---\n\nA = 1\n<｜fim▁begin｜>x = <｜fim▁hole｜>\n<｜fim▁end｜>"
    )


def test_without_other_files_the_prompt_is_that_of_one_file():
    tokenizer = make_tokenizer(QWEN)
    prompt = infill_prompt(tokenizer, PREFIX, SUFFIX, [], max_tokens=1000)
    assert prompt.token_ids == fill_in_middle_prompt(tokenizer, PREFIX, SUFFIX)


def test_the_earliest_files_are_left_out_first():
    tokenizer = make_tokenizer(QWEN)
    whole = infill_prompt(tokenizer, "x", "y", CHUNKS, max_tokens=1000)
    num_tokens = len(whole.token_ids)
    assert infill_prompt(tokenizer, "x", "y", CHUNKS, max_tokens=num_tokens) == whole
    shorter = infill_prompt(tokenizer, "x", "y", CHUNKS, max_tokens=num_tokens - 1)
    assert shorter.truncated
    assert (
        shorter.token_ids
        == infill_prompt(tokenizer, "x", "y", CHUNKS[1:], max_tokens=1000).token_ids
    )
    alone = infill_prompt(tokenizer, "x", "y", CHUNKS, max_tokens=10)
    assert alone.token_ids == fill_in_middle_prompt(tokenizer, "x", "y")
    assert alone.truncated


@pytest.mark.parametrize(
    ("num_before", "num_after", "kept"),
    [
        (100, 100, (30, 10)),  # three parts and one
        (100, 4, (36, 4)),
        (10, 100, (10, 30)),
        (20, 20, (20, 20)),
        (0, 100, (0, 40)),
    ],
)
def test_a_long_text_loses_its_far_ends(num_before, num_after, kept):
    tokenizer = make_tokenizer(QWEN)
    prefix = "".join(chr(65 + i % 26) for i in range(num_before))
    suffix = "".join(chr(97 + i % 26) for i in range(num_after))
    prompt = infill_prompt(tokenizer, prefix, suffix, [], max_tokens=43)
    before, after = kept
    shown = f"<|fim_prefix|>{prefix[num_before - before :]}<|fim_suffix|>{suffix[:after]}"
    assert text_of(tokenizer, prompt.token_ids) == shown + "<|fim_middle|>"
    assert prompt.truncated == (before < num_before or after < num_after)


def test_a_context_without_room_for_the_markers_keeps_only_them():
    tokenizer = make_tokenizer(QWEN)
    for max_tokens in (-5, 0, 1, 3):
        prompt = infill_prompt(tokenizer, "a", "b", CHUNKS, max_tokens=max_tokens)
        assert len(prompt.token_ids) == 3
        assert prompt.truncated


def test_a_huge_text_is_cut_before_it_is_encoded():
    tokenizer = make_tokenizer(QWEN)
    prompt = infill_prompt(tokenizer, "a" * 10**7, "b" * 10**7, [], max_tokens=103)
    assert len(prompt.token_ids) == 103


def test_a_file_with_a_huge_name_is_not_encoded(monkeypatch):
    tokenizer = make_tokenizer(QWEN)
    lengths = []
    encode = tokenizer.encode_plain
    monkeypatch.setattr(
        tokenizer, "encode_plain", lambda text: lengths.append(len(text)) or encode(text)
    )
    chunks = [ContextChunk("a" * 10**6, "A"), CHUNKS[0]]
    prompt = infill_prompt(tokenizer, "x", "y", chunks, max_tokens=1000)
    assert prompt.truncated
    assert "a.py" in text_of(tokenizer, prompt.token_ids)
    assert max(lengths) < 100


def test_mellum_has_the_tokens_of_starcoder_in_another_order(tmp_path):
    added, form = FORMATS["starcoder"]
    backend = make_tokenizer(added).backend
    backend.save(str(tmp_path / "tokenizer.json"))
    for model_type, expected in (
        ("qwen3_moe", form),
        ("mellum", "<fim_suffix>{suffix}<fim_prefix>{prefix}<fim_middle>"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        tokenizer = Tokenizer.load(tmp_path)
        ids = fill_in_middle_prompt(tokenizer, PREFIX, SUFFIX)
        assert ids == tokenizer.encode(expected.format(prefix=PREFIX, suffix=SUFFIX))


def write_gguf(path: Path, texts: list[str], types: list[int], **ids: int | str) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*alphabet, *texts, "ab"])
    writer.add_token_types([*[1] * len(alphabet), *types, 1])
    writer.add_token_merges(["a b"])
    for name, value in ids.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


NAMED = ["<P>", "<S>", "<M>", "<pad>", "<repo>", "<file>"]


@pytest.mark.parametrize("kind", [1, 3, 4])  # normal, control, user-defined
@pytest.mark.parametrize(
    "keys",
    [
        ("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
        ("prefix_token_id", "suffix_token_id", "middle_token_id"),  # of older files
    ],
)
def test_a_gguf_file_names_its_tokens(tmp_path, keys, kind):
    more = {"fim_pad_token_id": 259, "fim_rep_token_id": 260, "fim_sep_token_id": 261}
    named = dict(zip(keys, (256, 257, 258), strict=True))
    path = write_gguf(tmp_path / "x.gguf", NAMED, [kind] * 6, **named, **more)
    tokenizer = Tokenizer.load(path)
    fim = fim_tokens(tokenizer, "suffix")
    assert (fim.prefix, fim.suffix, fim.middle) == (256, 257, 258)
    assert (fim.repo, fim.file, fim.suffix_first) == (260, 261, False)
    assert set(fim.end_ids) == set(range(256, 262))
    ids = fill_in_middle_prompt(tokenizer, "<S>x", "y")
    assert text_of(tokenizer, ids) == "<P><S>x<S>y<M>"
    assert ids.count(257) == 1


def test_a_gguf_file_without_ids_has_known_texts(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", QWEN, [3, 3, 3, 4, 4, 4])
    fim = fim_tokens(Tokenizer.load(path), "suffix")
    assert (fim.prefix, fim.suffix, fim.middle, fim.repo, fim.file) == (256, 257, 258, 260, 261)


def test_the_order_of_a_gguf_files_tokens_is_that_of_their_texts(tmp_path):
    added, form = FORMATS["seed-coder"]
    path = write_gguf(
        tmp_path / "x.gguf",
        added,
        [3] * 3,
        fim_pre_token_id=256,
        fim_suf_token_id=257,
        fim_mid_token_id=258,
    )
    tokenizer = Tokenizer.load(path)
    ids = fill_in_middle_prompt(tokenizer, PREFIX, SUFFIX)
    assert ids == tokenizer.encode(form.format(prefix=PREFIX, suffix=SUFFIX))


def test_ids_that_no_token_has_are_ignored(tmp_path):
    path = write_gguf(
        tmp_path / "x.gguf",
        NAMED,
        [3] * 6,
        fim_pre_token_id=2**32 - 1,
        fim_suf_token_id="x",
        fim_mid_token_id=258,
    )
    assert gguf_fim_ids(path) == {"mid": 258}
    assert Tokenizer.load(path).fim is None
