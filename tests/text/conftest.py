"""Two small tokenizers in model directories (byte-level BPE as Qwen's, SentencePiece as Mixtral's),
and the grammars and the grammar checker on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from moeserve.sampling import GrammarSpec
from moeserve.text.grammar_check import GrammarChecker
from moeserve.text.tokenizer import Tokenizer
from tests.text.grammar_case import EXTRA, Case

CORPUS = [
    (
        "Once upon a time a fox found a lantern in the old harbour. "
        "It was not lit, and nobody knew why."
    ),
    "Don't count 12345 sheep; count the 😀 and the 漢字 and the naïve café owners instead!",
    "def main():\n    print('hello')\n\n\nif x == 3:\n\treturn",
    "Was weiß ich? Über allen Gipfeln ist Ruh. Привет, мир. مرحبا",
] * 3

CHATML = """\
{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

INST = """\
{{ bos_token }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% else %}{{ message['content'] + eos_token }}{% endif %}\
{% endfor %}"""


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet)
    )
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>", "    ")]
    )
    return backend


def sentencepiece_backend() -> Backend:
    words = ["▁", "▁the", "▁fox", "▁a", "th", "he", "▁t", "▁f", "ox", "INST", "▁漢"]
    letters = sorted(
        {c for text in CORPUS[:2] for c in text if c.isalnum() and c.isascii()}
        | set("[]/<>|_.:, '")
    )
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *letters, "漢"]
    vocab += [w for w in words if w not in vocab]
    merges = [
        ("t", "h"),
        ("h", "e"),
        ("▁", "t"),
        ("▁t", "he"),
        ("▁", "f"),
        ("o", "x"),
        ("▁f", "ox"),
        ("▁", "a"),
    ]
    ids = {token: i for i, token in enumerate(dict.fromkeys(vocab))}
    backend = Backend(
        models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


def write_model(folder: Path, backend: Backend, config: dict[str, object], template: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            | config
        )
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return write_model(tmp_path_factory.mktemp("byte_level"), byte_level_backend(), config, CHATML)


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "unk_token": "<unk>",
    }
    return write_model(
        tmp_path_factory.mktemp("sentencepiece"), sentencepiece_backend(), config, INST
    )


@pytest.fixture(scope="session")
def byte_level(byte_level_dir: Path) -> Tokenizer:
    return Tokenizer.load(byte_level_dir)


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_dir: Path) -> Tokenizer:
    return Tokenizer.load(sentencepiece_dir)


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def bytes_case(byte_level: Tokenizer) -> Case:
    return Case(byte_level, "<|im_end|>")


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def case(request: pytest.FixtureRequest, bytes_case: Case) -> Case:
    if request.param == "byte_level":
        return bytes_case
    return Case(request.getfixturevalue("sentencepiece"), "</s>")


@pytest.fixture(scope="module")
def checker(byte_level: Tokenizer) -> Iterator[GrammarChecker]:
    made = GrammarChecker(
        byte_level,
        byte_level.backend.get_vocab_size() + EXTRA,
        [byte_level.backend.token_to_id("<|im_end|>")],
    )
    made.check(GrammarSpec("json_object"), "x")  # starts the sandbox process
    yield made
    made.close()
