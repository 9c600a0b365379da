"""The tokenizer: encodes text to token ids, and decodes token ids in streams.

A thin layer over Hugging Face `tokenizers` (tokenizer.json; `byte_bpe` reads other files).
Thread-safe; for long texts, encode and decode release the GIL.

- `Tokenizer` encodes and decodes whole texts.
- `ControlTokens` encodes control tokens typed by a user as plain text.
- `Pieces` is the text of each token id, and `Detokenizer` decodes with it token by token.
"""

import codecs
import json
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from moeserve.errors import CheckpointError, InvalidRequest
from moeserve.loader.documents import read_optional_json
from moeserve.loader.files import is_gguf
from moeserve.text.byte_bpe import BYTE_ALPHABET, read_byte_bpe
from moeserve.text.fim_tokens import find_fim_tokens
from moeserve.text.gguf_tokenizer import gguf_fim_ids, read_gguf_tokenizer

log = logging.getLogger(__name__)

MAX_TOKENIZER_BYTES = 200 * 2**20
_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_TEKKEN_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
_OTHER_VOCABULARIES = (  # files that are not read, for an error message
    "tokenizer.model",
    "tiktoken.model",
    "hy.tiktoken",
    "qwen.tiktoken",
    "vocab.txt",
    "vocab.json",
)
# Unicode noncharacters, which are never part of a text; MARK is removed from users' texts.
MARK = "\ufdd0"  # breaks control tokens in users' texts
CONTROL_BEGIN = "\ufdd1"  # before the name of a control token
CONTROL_END = "\ufdd2"  # after it
# Characters or tokens. Texts of this length or more are encoded and decoded without the GIL.
SHORT_LENGTH = 1000
_MAX_CHARACTER_TOKENS = 4  # a character has at most four bytes, each of which may be a token
_TAG_PATTERN = re.compile(r"<[^\s<>]+>|\[[A-Z_/]+\]|｜\w+｜")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A model's tokenizer."""

    def __init__(self, backend: Backend, special_tokens: dict[str, str]) -> None:
        """special_tokens: the texts of bos_token and so on, for chat templates."""
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = special_tokens
        self.control = ControlTokens(backend)
        self.fim = find_fim_tokens(backend)  # None: the model does not fill in the middle
        special = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._all_pieces = Pieces(backend)
        self._pieces_without_special = Pieces(backend, hidden=special)
        self.marked_pieces = Pieces(backend, marked=special)

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Load the tokenizer of a model directory or a GGUF file.

        In a directory it is tokenizer.json, or else tekken.json or a known tiktoken file. Python
        code of the checkpoint is never run. Raise CheckpointError for a missing, huge or damaged
        file.
        """
        config = read_optional_json(model_dir, "special_tokens_map.json") | read_optional_json(
            model_dir, "tokenizer_config.json"
        )
        path = model_dir / "tokenizer.json"
        if isinstance(config.get("auto_map"), dict):
            log.info("%s: auto_map is ignored; Python code of a checkpoint is never run", model_dir)
        backend: Backend | None
        if is_gguf(model_dir):
            backend = read_gguf_tokenizer(model_dir)
        elif path.is_file():
            backend = _read_backend(path)
        else:
            backend = read_byte_bpe(model_dir, config)
        if backend is None:
            raise CheckpointError(f"{path}: no such file. {_remedy(model_dir, config)}")
        if (model_dir / "tekken.json").is_file():
            config = _TEKKEN_TOKENS | config
        tokens = {name: config.get(name) for name in _SPECIAL_TOKEN_NAMES}
        texts = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in tokens.items()
        }
        loaded = cls(backend, {name: text for name, text in texts.items() if isinstance(text, str)})
        if is_gguf(model_dir):
            loaded.fim = find_fim_tokens(backend, gguf_fim_ids(model_dir))
        else:
            model_type = read_optional_json(model_dir, "config.json").get("model_type")
            loaded.fim = find_fim_tokens(backend, model_type=model_type)
        return loaded

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text. special: add the tokens around every text, such as BOS."""
        try:
            return encode_ids(self.backend, text, special=special)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(
                "the text contains an unpaired surrogate, which is not Unicode"
            ) from error

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text in which control tokens are plain text, without tokens around
        it.
        """
        shielded = self.control.shield(text)
        return self.encode_prompt(shielded)

    @cached_property
    def leading_ids(self) -> list[int]:
        """The tokens before every text, such as BOS."""
        text = self.encode("a", special=False)
        with_special = self.encode("a")
        starts = range(len(with_special) - len(text) + 1)
        start = next((i for i in starts if with_special[i : i + len(text)] == text), 0)
        return with_special[:start]

    def encode_prompt(self, rendered: str) -> list[int]:
        """Return the ids of a rendered chat. Control tokens typed by a user become plain text (see
        ControlTokens).
        """
        if MARK in rendered:
            return self.control.encode(rendered)
        return self.encode(rendered, special=False)

    def warm_up(self) -> None:
        """Compute lazy tables, which takes up to a second and holds the GIL for much of it.

        Servers call it at start, so that no request has to wait.
        """
        _ = self.longest_token
        with suppress(InvalidRequest):  # without a twin, only the requests that need it fail
            _ = self.control.twin

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        if len(token_ids) < SHORT_LENGTH:
            text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self.backend.decode_batch(
                [token_ids], skip_special_tokens=skip_special_tokens
            )
        return text

    def pieces(self, *, skip_special_tokens: bool) -> "Pieces":
        """Return the table of each token's text."""
        return self._pieces_without_special if skip_special_tokens else self._all_pieces

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be incomplete characters; b"" for an unused id."""
        piece = self._all_pieces[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def token_text(self, token_id: int) -> str:
        """Return the text of a token alone, with incomplete characters as U+FFFD."""
        piece = self._all_pieces[token_id]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    @cached_property
    def longest_token(self) -> int:
        """The length of the longest token: N characters have at least N / longest_token tokens."""
        return max(len(token) for token in self.backend.get_vocab())


def _read_backend(path: Path) -> Backend:
    if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
        raise CheckpointError(
            f"{path}: {size:,} bytes; a tokenizer has at most {MAX_TOKENIZER_BYTES:,}"
        )
    try:
        return Backend.from_buffer(path.read_bytes())
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path}: not a tokenizer: {str(error)[:200]}. Download it again"
        ) from error


def _remedy(model_dir: Path, config: dict[str, Any]) -> str:
    """Return the remedy for a directory without a supported tokenizer, for an error message."""
    unread_files = [name for name in _OTHER_VOCABULARIES if (model_dir / name).is_file()]
    files = f" ({', '.join(unread_files)} cannot be read)" if unread_files else ""
    class_name = config.get("tokenizer_class")
    has_code = isinstance(config.get("auto_map"), dict)
    custom = ""
    if class_name and has_code:
        custom = (
            f" of {str(class_name)[:64]}, whose Python code is in the checkpoint and is never run"
        )
    return (
        f"moeserve needs the fast tokenizer{custom}{files}; save one with "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...) elsewhere, or serve token ids "
        "only, with `model: {skip_tokenizer_init: true}` in --config"
    )


class ControlTokens:
    """The control tokens of a tokenizer: special tokens, and added ones like `<think>` or `[INST]`.

    A control token from the chat template is a token; one that a user typed (`<|im_end|>`) is text:

    1. `shield` inserts a mark into each control token in users' texts, so that it no longer
       matches.
    2. The template renders.
    3. `encode` replaces the remaining control tokens, which are the template's, by private names.
    4. It removes the marks, and encodes with a twin tokenizer that has only the private names. So
       typed control tokens become ordinary text, and everything else gets its usual ids.
    """

    def __init__(self, backend: Backend) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._private_names = {
            token.content: f"{CONTROL_BEGIN}{token_id}{CONTROL_END}"
            for token_id, token in added.items()
            if token.special or _TAG_PATTERN.fullmatch(token.content)
        }
        special = [token.content for token in added.values() if token.special]
        self._any_pattern = _alternatives(list(self._private_names))
        self._special_pattern = _alternatives(special)

    def shield(self, text: str, *, only_special: bool = False) -> str:
        """Return a text with marks in its control tokens.

        only_special: leave tags (`<think>`) as they are.
        """
        pattern = self._special_pattern if only_special else self._any_pattern
        return pattern.sub(lambda match: match[0][:1] + MARK + match[0][1:], unshield(text))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered prompt with marks. The first call may take a second."""
        named = self._any_pattern.sub(lambda match: self._private_names[match[0]], text)
        return encode_ids(self.twin, unshield(named), special=False)

    @cached_property
    def twin(self) -> Backend:
        """The tokenizer with private names. Raise InvalidRequest if it cannot be created."""
        spec: dict[str, Any] = json.loads(self._backend.to_str())
        names = self._private_names
        for token in spec["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = spec["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(token, token): i for token, i in vocab.items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        spec["post_processor"] = None
        twin = Backend.from_str(json.dumps(spec))
        for content, name in names.items():
            if twin.encode(name, add_special_tokens=False).ids != [
                self._backend.token_to_id(content)
            ]:
                raise InvalidRequest(
                    "this model's tokenizer cannot encode control tokens as plain text"
                )
        return twin


def encode_ids(backend: Backend, text: str, *, special: bool) -> list[int]:
    """Return the ids of a text. Long texts use the batched call, which releases the GIL."""
    if len(text) < SHORT_LENGTH:
        ids: list[int] = backend.encode(text, add_special_tokens=special).ids
    else:
        ids = backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
    return ids


def unshield(text: str) -> str:
    """Return a text without marks, for display."""
    return text.replace(MARK, "")


def _alternatives(tokens: list[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class Pieces(dict[int, "str | bytes"]):
    """A table of token id -> text, or bytes if the token is not valid UTF-8 by itself.

    Entries are computed on first use, so streams need no decoder call per token. Unused ids have
    the text "".

    Supports the decoders of byte-level BPE (GPT-2, Llama 3, Qwen, OLMoE) and of SentencePiece with
    byte fallback (Llama 2, Mixtral). With other decoders the text of a token may depend on its
    neighbors; the constructor raises CheckpointError for them.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        hidden: frozenset[int] = frozenset(),
        marked: frozenset[int] = frozenset(),
    ) -> None:
        """Create an empty table.

        Args:
            backend: The tokenizer.
            hidden: Ids whose text is "".
            marked: Ids whose text is put between CONTROL_BEGIN and CONTROL_END, for parsers.
        """
        super().__init__()
        self._marked = marked
        self._backend = backend
        self._hidden = hidden
        self._replacements: dict[str, str] = {}
        self.strips_start = False  # the decoder drops one space at the start of a text
        decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
        self._byte_level = [step.get("type") for step in steps] == ["ByteLevel"]
        for step in [] if self._byte_level else steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    self._replacements[old] = new
                case {"type": "Metaspace", "replacement": str(mark)}:
                    self._replacements[mark] = " "
                    self.strips_start |= step.get("prepend_scheme", "always") != "never"
                case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                    self.strips_start |= start == 1
                case {"type": "ByteFallback" | "Fuse"}:
                    pass
                case _:
                    raise CheckpointError(
                        f"tokenizer.json: the decoder {step.get('type')} is neither byte-level BPE "
                        "nor SentencePiece; serve token ids only, with "
                        "`model: {skip_tokenizer_init: true}` in --config"
                    )

    def __missing__(self, token_id: int) -> str | bytes:
        raw = b"" if token_id in self._hidden else self._bytes(token_id)
        if token_id in self._marked:
            raw = CONTROL_BEGIN.encode() + raw + CONTROL_END.encode()
        try:
            piece: str | bytes = raw.decode()
        except UnicodeDecodeError:
            piece = raw
        self[token_id] = piece
        return piece

    def _bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._byte_level:
            try:
                return bytes([BYTE_ALPHABET[char] for char in token])
            except KeyError:
                return token.encode()
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        for old, new in self._replacements.items():
            token = token.replace(old, new)
        return token.encode()


class Detokenizer:
    """Decodes an answer token by token. The joined results are the text of all tokens.

    A character that spans several tokens is held back until it is complete. Invalid bytes become
    U+FFFD at once. Decoding a token takes 0.15 us.
    """

    __slots__ = ("_decoder", "_has_pending", "_pieces", "_strips_space")

    def __init__(self, pieces: Pieces, prompt_ids: Sequence[int]) -> None:
        """prompt_ids: the tokens that the answer continues."""
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._has_pending = False  # the decoder holds an incomplete character
        self._strips_space = False  # a space at the start of the answer is dropped
        # The prompt may end within a character, so its last tokens go through the decoder.
        for token_id in prompt_ids[-_MAX_CHARACTER_TOKENS:]:
            self.push(token_id)
        # The answer begins the text if the prompt has none.
        self._strips_space = pieces.strips_start and not any(
            pieces[token_id] for token_id in prompt_ids
        )

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, maybe empty."""
        piece = self._pieces[token_id]
        if self._has_pending or self._strips_space or piece.__class__ is bytes:
            return self._push_slowly(piece)
        return piece  # type: ignore[return-value]  # bytes were handled above

    def flush(self) -> str:
        """Return the text that is still held back."""
        self._has_pending = False
        return self._decoder.decode(b"", final=True)

    def _push_slowly(self, piece: str | bytes) -> str:
        if not piece:
            return ""
        text = self._decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        self._has_pending = bool(self._decoder.getstate()[0])
        if self._strips_space and text:
            self._strips_space = False
            text = text.removeprefix(" ")
        return text
