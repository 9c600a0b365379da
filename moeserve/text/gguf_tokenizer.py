"""Builds the tokenizer that a GGUF file's metadata describe: byte-level BPE (gpt2), or
SentencePiece's BPE (llama).

llama.cpp knows how a text is split into words by a name, `tokenizer.ggml.pre`; the patterns here
are those of the tokenizer.json that the names stand for.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from moeserve.errors import CheckpointError
from moeserve.loader.gguf_file import read_gguf
from moeserve.text.byte_bpe import CONTRACTIONS, HAN_APART, REST

# tokenizer.ggml.token_type
_CONTROL = 3
_USER = 4
_UNUSED = 5
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED = tuple(pattern.replace("&&[^\\p{Han}]", "") for pattern in HAN_APART)
_SLASH = (REST[0].replace(r"\n]*", r"\n/]*"), *REST[1:])
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"


class _Split(NamedTuple):
    """patterns: each splits what the ones before left whole. bos: added unless the file says
    otherwise. whole: a word that is a token is not merged from its parts."""

    patterns: tuple[str, ...]
    nfc: bool = False
    bos: bool = False
    whole: bool = False


_QWEN2 = _Split(("|".join((CONTRACTIONS, _WORD, r"\p{N}", *REST)),), nfc=True)
_LLAMA3 = _Split(("|".join((CONTRACTIONS, _WORD, r"\p{N}{1,3}", *REST)),), bos=True, whole=True)
_GPT4O = _Split(
    ("|".join((*(word + CONTRACTIONS + "?" for word in _CASED), r"\p{N}{1,3}", *_SLASH)),)
)
_DIGITS = _Split((r"\p{N}", _GPT2))
_SPLITS = {
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "hunyuan": _QWEN2, "megrez": _QWEN2,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "pixtral": _LLAMA3,
    "glm4": _LLAMA3._replace(bos=False, whole=False), "chatglm-bpe": _LLAMA3._replace(bos=False, whole=False),
    "dbrx": _LLAMA3._replace(bos=False, whole=False), "smaug-bpe": _LLAMA3._replace(bos=False, whole=False),
    "gpt-4o": _GPT4O, "llama4": _GPT4O, "minimax-m2": _GPT4O,
    "tekken": _Split(("|".join((*_CASED, r"\p{N}", *_SLASH)),), bos=True, whole=True),
    "deepseek-v3": _Split((
        r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
        "|".join((_PUNCTUATION, r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", *REST[1:])),
    )),
    "kimi-k2": _Split(("|".join((
        r"[\p{Han}]+", *(word + CONTRACTIONS + "?" for word in HAN_APART), r"\p{N}{1,3}", *REST
    )),), whole=True),
    "gpt-2": _Split((_GPT2,)), "olmo": _Split((_GPT2,), nfc=True),
    "refact": _DIGITS, "starcoder": _DIGITS, "smollm": _DIGITS, "command-r": _DIGITS,
}  # fmt: skip


def read_gguf_tokenizer(path: Path) -> Backend:
    """Returns the tokenizer in a GGUF file. Raises CheckpointError for kinds that are not known."""
    meta = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in read_gguf(path).metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = meta.get("model")
    tokens = meta.get("tokens", [])
    make = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if make is None:
        raise _error(path, "model", kind, "gpt2, llama")
    types = [int(number) for number in meta.get("token_type", [])] or [1] * len(tokens)
    if not tokens or len(types) != len(tokens) or len(set(tokens)) != len(tokens) or "" in tokens:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens has {len(tokens)} tokens, {len(set(tokens))} different ones, and "
            f"{len(types)} types; each token must be there once and have a type. Download it again"
        )
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    try:
        backend, adds_bos = make(path, meta, vocab, tokens)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path}: no tokenizer: {str(error)[:200]}. Download it again"
        ) from error
    backend.add_tokens([
        AddedToken(tokens[i], special=kind == _CONTROL, normalized=False)
        for i, kind in enumerate(types)
        if kind in (_CONTROL, _USER)
    ])  # fmt: skip
    around = {"bos": adds_bos, "eos": False}
    names: dict[str, Any] = {}
    for name, default in around.items():
        number = meta.get(f"{name}_token_id")
        if (
            meta.get(f"add_{name}_token", default)
            and isinstance(number, int)
            and 0 <= number < len(tokens)
        ):
            names[name] = (tokens[number], number)
    if names:
        single = [f"{names[name][0]}:0" if name in names else "" for name in around]
        template = [part for part in (single[0], "$A:0", single[1]) if part]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(names.values())
        )
    return backend


def _byte_level(
    path: Path, meta: Mapping[str, Any], vocab: dict[str, int], tokens: list[str]
) -> tuple[Backend, bool]:
    pre = meta.get("pre")
    if pre not in _SPLITS:
        raise _error(path, "pre", pre, ", ".join(_SPLITS))
    split = _SPLITS[pre]
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("merges", [])]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole))
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    return backend, split.bos


def _sentencepiece(
    path: Path, meta: Mapping[str, Any], vocab: dict[str, int], tokens: list[str]
) -> tuple[Backend, bool]:
    """SentencePiece joins the neighbours whose union has the highest score: merges in the order of
    scores.
    """
    scores = meta.get("scores", [])
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"{path}: {len(scores)} scores for {len(tokens)} tokens; download it again"
        )
    merges = [
        (token[:i], token[i:])
        for token in sorted(vocab, key=lambda token: -scores[vocab[token]])
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    ]
    number = meta.get("unknown_token_id", 0)
    unknown = tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = meta.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def _error(path: Path, key: str, value: Any, known: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: tokenizer.ggml.{key} is {repr(value)[:80]}; supported: {known}. Serve token ids only, with "
        "`model: {skip_tokenizer_init: true}` in --config"
    )
