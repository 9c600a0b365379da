"""Builds a tokenizer from the metadata of a GGUF file: byte-level BPE (gpt2), SentencePiece BPE
(llama), or Gemma 4's, which has SentencePiece's tokens and a list of merges.

`tokenizer.ggml.pre` is the name of a pre-tokenizer, which splits a text into words. The patterns
here are those of the corresponding tokenizer.json.
"""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from moeserve.errors import CheckpointError
from moeserve.loader.gguf_file import read_gguf
from moeserve.loader.gguf_vocab import end_tokens, special_id, tokens_of
from moeserve.text.byte_bpe import CASED_WORDS_WITHOUT_HAN, CONTRACTIONS, REST_PATTERNS

log = logging.getLogger(__name__)

# tokenizer.ggml.token_type
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_SWITCHES = ("add_bos_token", "add_eos_token", "add_space_prefix")
_SCALARS = (bool, int, float, str)
_MAX_LETTERS = 512  # of a token of SentencePiece, whose longest tokens have 16 by default
# Role of a fill-in-the-middle token -> names of its id, the newest first
_FIM_KEYS = {
    "pre": ("fim_pre_token_id", "prefix_token_id"),
    "suf": ("fim_suf_token_id", "suffix_token_id"),
    "mid": ("fim_mid_token_id", "middle_token_id"),
    "pad": ("fim_pad_token_id",),
    "rep": ("fim_rep_token_id",),
    "sep": ("fim_sep_token_id",),
}
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED_WORDS = tuple(pattern.replace("&&[^\\p{Han}]", "") for pattern in CASED_WORDS_WITHOUT_HAN)
_REST_WITH_SLASH = (REST_PATTERNS[0].replace(r"\n]*", r"\n/]*"), *REST_PATTERNS[1:])
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with cases, as DeepSeek-V2's tokenizer.json lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)


class _PreTokenizer(NamedTuple):
    """A pre-tokenizer, and options that depend on it."""

    patterns: tuple[str, ...]  # each one splits the parts that the previous ones did not match
    normalizes_nfc: bool = False
    adds_bos: bool = False  # unless the file says otherwise
    keeps_whole_words: bool = False  # a word that is a token gets its id directly, without merges


def _joined(*alternatives: str) -> tuple[str]:
    return ("|".join(alternatives),)


_QWEN2 = _PreTokenizer(_joined(CONTRACTIONS, _WORD, r"\p{N}", *REST_PATTERNS), normalizes_nfc=True)
_QWEN35 = _PreTokenizer(  # marks belong to words
    _joined(
        CONTRACTIONS,
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        *REST_PATTERNS[1:],
    ),
    normalizes_nfc=True,
)
_LLAMA3 = _PreTokenizer(
    _joined(CONTRACTIONS, _WORD, r"\p{N}{1,3}", *REST_PATTERNS),
    adds_bos=True,
    keeps_whole_words=True,
)
_CHATGLM = _LLAMA3._replace(adds_bos=False, keeps_whole_words=False)
_GPT4O = _PreTokenizer(
    _joined(*(word + CONTRACTIONS + "?" for word in _CASED_WORDS), r"\p{N}{1,3}", *_REST_WITH_SLASH)
)
_DIGITS = _PreTokenizer((r"\p{N}", _GPT2))
_WORDS_ONLY = _PreTokenizer((_GPT2,))
_DEEPSEEK3 = _PreTokenizer((
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "|".join((
        _PUNCTUATION,
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        *REST_PATTERNS[1:],
    )),
))  # fmt: skip
_DEEPSEEK_LLM = _PreTokenizer((
    "[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
))  # fmt: skip
_DEEPSEEK_CODER = _PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"))
_KIMI_K2 = _PreTokenizer(
    _joined(
        r"[\p{Han}]+",
        *(word + CONTRACTIONS + "?" for word in CASED_WORDS_WITHOUT_HAN),
        r"\p{N}{1,3}",
        *REST_PATTERNS,
    ),
    keeps_whole_words=True,
)
_YOUTU = _PreTokenizer(
    (
        "[\uac00-\ud7a3\u3131-\u318e]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
        *_joined(
            *(word + CONTRACTIONS + "?" for word in _CASED_WORDS), r"\p{N}", *_REST_WITH_SLASH
        ),
    ),
    keeps_whole_words=True,
)
# Scripts that are written without spaces, or in syllables
_EAST_AND_SOUTHEAST_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
    "\uac00-\ud7af\u1100-\u11ff]+"
)
_AFMOE = _PreTokenizer((
    # Groups of three digits, counted from the last one
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    _EAST_AND_SOUTHEAST_ASIAN,
    _DEEPSEEK3.patterns[-1],
))  # fmt: skip
_COHERE2 = _PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.patterns))
_EXAONE = _PreTokenizer(
    _joined(
        CONTRACTIONS,
        r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
        r"\s*[\r\n]",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_SEED = _PreTokenizer(
    _joined(CONTRACTIONS, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", *REST_PATTERNS[1:])
)
# `tokenizer.ggml.pre` -> pre-tokenizer, for the names that llama.cpp uses with our architectures
_PRE_TOKENIZERS = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "hunyuan", "megrez", "kormo"), _QWEN2),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3", "falcon-h1"), _LLAMA3
    ),
    **dict.fromkeys(("midm-2.0", "lfm2", "jina-v5-nano"), _LLAMA3),
    "qwen35": _QWEN35,
    # llama.cpp merges words of these from their parts, even words that are tokens.
    **dict.fromkeys(("chatglm-bpe", "dbrx", "smaug-bpe"), _CHATGLM),
    **dict.fromkeys(("glm4", "glm5"), _CHATGLM._replace(keeps_whole_words=True)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "tekken": _PreTokenizer(
        _joined(*_CASED_WORDS, r"\p{N}", *_REST_WITH_SLASH), adds_bos=True, keeps_whole_words=True
    ),
    **dict.fromkeys(("deepseek-v3", "joyai-llm", "hunyuan-dense", "hy_v4"), _DEEPSEEK3),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "kimi-k2": _KIMI_K2,
    "youtu": _YOUTU,
    "seed-coder": _SEED,
    "afmoe": _AFMOE,
    **dict.fromkeys(("cohere2moe", "tiny_aya"), _COHERE2),
    "exaone-moe": _EXAONE,
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe", "solar-open"),
        _QWEN2._replace(normalizes_nfc=False),
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum"), _WORDS_ONLY),
    **dict.fromkeys(("mpt", "jais", "trillion"), _WORDS_ONLY),
    "olmo": _WORDS_ONLY._replace(normalizes_nfc=True),
    **dict.fromkeys(("refact", "starcoder", "smollm", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS),
}


def read_gguf_tokenizer(path: Path) -> Backend:
    """Return the tokenizer in a GGUF file. Raise CheckpointError for an unknown kind, and for a key
    that is missing or damaged.
    """
    metadata = dict(read_gguf(path).metadata)
    meta = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = meta.get("model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma_4}
    build = builders.get(str(kind))
    if build is None:
        raise _unsupported(path, "model", kind, ", ".join(builders))
    _metadata_list(path, meta, "tokens", of_text=True)
    tokens = tokens_of(metadata)
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens has {len(tokens)} tokens, {len(set(tokens))} different "
            "ones; each token must be there once. Download it again"
        )
    types = _token_types(path, meta, tokens)
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    for key in _SWITCHES:
        if not isinstance(meta.get(key, True), bool):
            raise _unsupported(path, key, meta[key], "true, false")
    if build is _gemma_4:
        # As in llama.cpp, whatever the file says
        metadata["tokenizer.ggml.add_bos_token"] = True
    try:
        backend, adds_bos = build(path, meta, vocab, tokens)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path}: no tokenizer: {str(error)[:200]}. Download it again"
        ) from error
    backend.add_tokens([
        AddedToken(tokens[i], special=token_type == _CONTROL, normalized=False)
        for i, token_type in enumerate(types)
        if token_type in (_CONTROL, _USER_DEFINED)
    ])  # fmt: skip
    bos = _added_token(metadata, "bos", tokens, default=adds_bos)
    eos = _added_token(metadata, "eos", tokens, default=False)
    if bos or eos:
        template = (
            [f"{token}:0" for token, _ in bos] + ["$A:0"] + [f"{token}:0" for token, _ in eos]
        )
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[*bos, *eos]
        )
    return backend


def _token_types(path: Path, meta: Mapping[str, Any], tokens: list[str]) -> list[int]:
    """Return the type of each token, after llama.cpp's corrections."""
    numbers = _metadata_list(path, meta, "token_type", len(tokens))
    if numbers.dtype.kind not in "iu":
        raise CheckpointError(
            f"{path}: tokenizer.ggml.token_type has numbers of type {numbers.dtype}, not integers. "
            "Download the file again"
        )
    types = [int(number) for number in numbers]
    ends = end_tokens(tokens)
    for i, token in enumerate(tokens):
        if types[i] == _NORMAL and token in ends:
            log.warning("%s: the token %r ends answers, so it is a control token", path, token)
            types[i] = _CONTROL
    for token_id in gguf_fim_ids(path).values():
        if types[token_id] in (_NORMAL, _UNUSED):
            types[token_id] = _CONTROL
    return types


def gguf_fim_ids(path: Path) -> dict[str, int]:
    """Return the ids of the fill-in-the-middle tokens that a GGUF file names, by their role, which
    is a key of `_FIM_KEYS`. An id that no token has is ignored, as in llama.cpp.
    """
    metadata = read_gguf(path).metadata
    num_tokens = len(tokens_of(metadata))
    ids: dict[str, int] = {}
    for role, names in _FIM_KEYS.items():
        for name in names:
            token_id = metadata.get(f"tokenizer.ggml.{name}")
            if isinstance(token_id, int) and 0 <= token_id < num_tokens:
                ids.setdefault(role, token_id)
    return ids


def _added_token(
    metadata: Mapping[str, Any], name: str, tokens: list[str], *, default: bool
) -> list[tuple[str, int]]:
    """Return the token that is added to every text, and its id; [] if there is none.

    name: "bos" or "eos". default: whether the token is added if the file does not say.
    """
    token_id = special_id(metadata, name, len(tokens))
    if token_id is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
        return []
    return [(tokens[token_id], token_id)]


def _byte_level(
    path: Path, meta: Mapping[str, Any], vocab: dict[str, int], tokens: list[str]
) -> tuple[Backend, bool]:
    pre = meta.get("pre")
    if pre not in _PRE_TOKENIZERS:
        raise _unsupported(path, "pre", pre, ", ".join(_PRE_TOKENIZERS))
    pre_tokenizer = _PRE_TOKENIZERS[pre]
    merges = _merges(path, meta)
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=pre_tokenizer.keeps_whole_words)
    )
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in pre_tokenizer.patterns
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    if pre_tokenizer.normalizes_nfc:
        backend.normalizer = normalizers.NFC()
    return backend, pre_tokenizer.adds_bos


def _sentencepiece(
    path: Path, meta: Mapping[str, Any], vocab: dict[str, int], tokens: list[str]
) -> tuple[Backend, bool]:
    """Build a SentencePiece tokenizer, with merges in the order of scores.

    SentencePiece merges the adjacent pair whose union has the highest score.
    """
    scores = _metadata_list(path, meta, "scores", len(tokens))
    if any(math.isnan(score) for score in scores):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.scores has a value that is not a number. Download it again"
        )
    longest = max(vocab, key=len, default="")
    if len(longest) > _MAX_LETTERS:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.tokens has {longest[:40]!r}... of {len(longest)} letters; "
            f"supported: up to {_MAX_LETTERS}. Download it again"
        )
    merges = [
        (token[:i], token[i:])
        for token in sorted(vocab, key=lambda token: -scores[vocab[token]])
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    ]
    return _with_spaces_as_marks(meta, vocab, tokens, merges, default_prefix=True), True


def _gemma_4(
    path: Path, meta: Mapping[str, Any], vocab: dict[str, int], tokens: list[str]
) -> tuple[Backend, bool]:
    """Build Gemma 4's tokenizer, which merges as its list says."""
    merges = _merges(path, meta)
    backend = _with_spaces_as_marks(meta, vocab, tokens, merges, default_prefix=False)
    made = {first + second for first, second in merges}
    # llama.cpp does not merge newlines: a run of them that is a token is that token.
    runs = [token for token in vocab if set(token) == {"\n"} and len(token) > 1]
    backend.add_tokens([AddedToken(run, normalized=False) for run in runs if run not in made])
    return backend, True


def _with_spaces_as_marks(
    meta: Mapping[str, Any],
    vocab: dict[str, int],
    tokens: list[str],
    merges: list[tuple[str, str]],
    *,
    default_prefix: bool,
) -> Backend:
    """Build BPE on whole texts, in which spaces are written "▁". Unknown letters become bytes.

    default_prefix: whether a text gets a space in front, if the file does not say.
    """
    number = meta.get("unknown_token_id", 0)
    unknown = tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = meta.get("add_space_prefix", default_prefix)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(path: Path, meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Read the list of merges: two tokens each, with a space between them.

    The first token may begin with a space, which is not the one between them.
    """
    merges = []
    for merge in _metadata_list(path, meta, "merges", of_text=True):
        first, _, second = merge[1:].partition(" ")
        merges.append((merge[:1] + first, second))
    return merges


def _metadata_list(
    path: Path,
    meta: Mapping[str, Any],
    key: str,
    length: int | None = None,
    *,
    of_text: bool = False,
) -> Any:
    """Return a list of numbers in the metadata, or of strings.

    Raise CheckpointError if it is missing, empty, or has other values or another length, because
    the tokenizer would then differ from the model's.
    """
    entries = meta.get(key)
    name = f"{path}: tokenizer.ggml.{key}"
    if entries is None:
        raise CheckpointError(f"{name} is missing. Download the file again")
    # Lists in a file have strings. Arrays with numbers are NumPy's.
    if isinstance(entries, _SCALARS) or isinstance(entries, list) != of_text:
        kind = "strings" if of_text else "numbers"
        raise CheckpointError(
            f"{name} is {repr(entries)[:80]}, not a list of {kind}. Download the file again"
        )
    if len(entries) == 0:
        raise CheckpointError(f"{name} is empty. Download the file again")
    if length is not None and len(entries) != length:
        raise CheckpointError(
            f"{name} has {len(entries)} entries for {length} tokens. Download the file again"
        )
    return entries


def _unsupported(path: Path, key: str, value: Any, known: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: tokenizer.ggml.{key} is {repr(value)[:80]}; supported: {known}. Serve token ids "
        "only, with `model: {skip_tokenizer_init: true}` in --config"
    )
