"""Converts tiktoken files (Kimi, Hunyuan) and Mistral's tekken.json to `tokenizers` backends.

The ids are those of tiktoken. tiktoken merges the adjacent pair whose union has the lowest rank.
Within a token, merges happen as if the token stood alone, so at most one of its splits ever occurs.
Therefore a merge list with all splits of each token, in the order of ranks, merges the same pairs
in the same order.
"""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from moeserve.errors import CheckpointError
from moeserve.loader.documents import read_json

MAX_VOCABULARY_BYTES = 64 * 2**20
CASED_WORDS_WITHOUT_HAN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
)
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST_PATTERNS = (r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")


class _Family(NamedTuple):
    """A model family with a tiktoken file.

    Pattern and special tokens are listed here, because checkpoints have them in Python code, which
    is never run.
    """

    file_name: str
    pattern: str
    # Special tokens after the vocabulary; tokenizer_config.json may replace them by id.
    fillers: tuple[str, ...]
    normalizes_nfc: bool = False
    # Ranks are line numbers, not counting repeated tokens; the ranks in the file are not used.
    ranks_by_line: bool = False


_FAMILIES = {  # by tokenizer_class
    "TikTokenTokenizer": _Family(  # Kimi
        "tiktoken.model",
        "|".join(
            (
                r"[\p{Han}]+",
                *(word + CONTRACTIONS + "?" for word in CASED_WORDS_WITHOUT_HAN),
                r"\p{N}{1,3}",
                *REST_PATTERNS,
            )
        ),
        ("<|reserved_token_{id}|>",) * 256,
    ),
    "HYTokenizer": _Family(  # Hunyuan
        "hy.tiktoken",
        "|".join((CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", *REST_PATTERNS)),
        (
            *("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>"),
            *(f"<|extra_{i}|>" for i in range(205)),
        ),
        normalizes_nfc=True,
        ranks_by_line=True,
    ),
}


def read_byte_bpe(model_dir: Path, config: dict[str, Any]) -> Backend | None:
    """Return the tokenizer of a directory without tokenizer.json; None without a known vocabulary.

    config: tokenizer_config.json. Raise CheckpointError for a damaged file.
    """
    if (model_dir / "tekken.json").is_file():
        return _read_tekken(model_dir)
    family = _FAMILIES.get(str(config.get("tokenizer_class")))
    if family is None or not (model_dir / family.file_name).is_file():
        return None
    path = model_dir / family.file_name
    ranks = _decode_ranks(path, _tiktoken_lines(path, family), allows_repeats=family.ranks_by_line)
    num_words = len(ranks)
    special = {
        num_words + i: AddedToken(text.format(id=num_words + i), special=True)
        for i, text in enumerate(family.fillers)
    }
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict | None):
        raise CheckpointError(
            f"{model_dir / 'tokenizer_config.json'}: added_tokens_decoder is not a JSON object"
        )
    for key, token in (added or {}).items():
        content = token.get("content") if isinstance(token, dict) else None
        if not key.isascii() or not key.isdigit() or not isinstance(content, str) or not content:
            what = f"added_tokens_decoder[{key[:32]!r}] is not a token id with content"
            raise CheckpointError(
                f"{model_dir / 'tokenizer_config.json'}: {what}; download it again"
            )
        special[int(key)] = AddedToken(content, special=token.get("special") is not False)
    backend = _build(path, ranks, first_id=0, special=special, pattern=family.pattern)
    if family.normalizes_nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _tiktoken_lines(path: Path, family: _Family) -> list[bytes]:
    """Return the tokens of a tiktoken file in the order of ranks, in base64."""
    if (size := path.stat().st_size) > MAX_VOCABULARY_BYTES:
        raise CheckpointError(
            f"{path}: {size:,} bytes; a vocabulary has at most {MAX_VOCABULARY_BYTES:,}"
        )
    with CheckpointError.instead_of(
        ValueError, f"{path}: not lines of a token and its rank", ". Download it again"
    ):
        numbered = [
            (int(rank), token) for token, rank in map(bytes.split, path.read_bytes().splitlines())
        ]
        if not family.ranks_by_line:
            numbered.sort()
            if any(rank != i for i, (rank, _) in enumerate(numbered)):
                raise ValueError("the ranks are not 0, 1, 2, ...")
    return [token for _, token in numbered]


def _read_tekken(model_dir: Path) -> Backend:
    """Return the tokenizer of tekken.json.

    Special tokens have the first ids; unused ones are named `<SPECIAL_i>`.
    """
    path = model_dir / "tekken.json"
    spec = read_json(model_dir, path.name)
    try:
        config = spec["config"]
        listed = spec["special_tokens"]
        num_special = int(config.get("default_num_special_tokens") or len(listed))
        vocab = spec["vocab"]
        if size := config.get("default_vocab_size"):
            vocab = vocab[: size - num_special]
        special = {i: AddedToken(f"<SPECIAL_{i}>", special=True) for i in range(num_special)}
        special |= {token["rank"]: AddedToken(token["token_str"], special=True) for token in listed}
        texts = [token["token_bytes"] for token in vocab]
        pattern = config["pattern"]
        if len(special) != num_special:
            raise ValueError(f"{len(special)} special tokens for {num_special} ids")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: no tekken vocabulary with special tokens ({type(error).__name__}: "
            f"{str(error)[:100]}). Download it again, or put the model's tokenizer.json beside it"
        ) from error
    ranks = _decode_ranks(path, texts)
    backend = _build(path, ranks, first_id=num_special, special=special, pattern=pattern)
    if (bos := backend.token_to_id("<s>")) is not None:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos)]
        )
    return backend


def _decode_ranks(
    path: Path, encoded: Sequence[bytes | str], *, allows_repeats: bool = False
) -> dict[bytes, int]:
    """Return token -> rank. encoded: tokens in base64, in the order of ranks.

    allows_repeats: ignore repeated tokens. Otherwise they are an error.
    """
    ranks: dict[bytes, int] = {}
    for number, text in enumerate(encoded):
        try:
            token = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError, TypeError):
            token = b""
        if not token or (token in ranks and not allows_repeats):
            what = "a repetition" if token else "not base64"
            raise CheckpointError(
                f"{path}: token {number} is {what}: {str(text)[:40]!r}. Download it again"
            )
        ranks.setdefault(token, len(ranks))
    if missing := 256 - sum(len(token) == 1 for token in ranks):
        raise CheckpointError(
            f"{path}: {missing} of the 256 bytes have no token. Download it again"
        )
    return ranks


def _build(
    path: Path,
    ranks: dict[bytes, int],
    *,
    first_id: int,
    special: dict[int, AddedToken],
    pattern: str,
) -> Backend:
    """Return a tokenizer in which a token has the id `first_id` + its rank.

    Args:
        path: The file, for error messages.
        ranks: Token -> rank.
        first_id: The id of the token with rank 0.
        special: Id -> special token.
        pattern: The regex that splits a text into words.
    """
    names = {token: "".join(map(ALPHABET_OF_BYTES.__getitem__, token)) for token in ranks}
    merges = []
    for token in ranks:
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += [
            (names[left], names[right])
            for left, right in splits
            if left in ranks and right in ranks
        ]
    vocab = {name: first_id + ranks[token] for token, name in names.items()}
    word_ids = set(vocab.values())
    vocab |= {token.content: token_id for token_id, token in special.items()}
    if len(vocab) != len(names) + len(special) or not word_ids.isdisjoint(special):
        raise CheckpointError(
            f"{path}: special tokens and vocabulary share ids or texts. Download it again"
        )
    try:
        backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a vocabulary: {str(error)[:200]}") from error
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([special[token_id] for token_id in sorted(special)])
    return backend


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's character -> byte: printable Latin-1 unchanged, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
ALPHABET_OF_BYTES = {byte: char for char, byte in BYTE_ALPHABET.items()}
