"""The special tokens with which a model fills in the middle of a text (FIM), and their order.

The model reads the text before a gap and the text after it, each behind its own token, and writes
the gap after a third token. The tokens are known by their texts, or by ids in a GGUF file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend


class _Spelling(NamedTuple):
    """The texts of three tokens that belong together."""

    prefix: str
    suffix: str
    middle: str  # "": the gap follows the prefix directly
    suffix_first: bool = False


_SPELLINGS = (
    _Spelling("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, Granite 4, CodeGemma
    _Spelling("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite 3, Mellum
    _Spelling("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Spelling("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    _Spelling("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    _Spelling("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed
    _Spelling("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Spelling("<PRE>", "<SUF>", "<MID>"),
    _Spelling("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1
    _Spelling("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)
_SUFFIX_FIRST_TYPES = ("mellum",)  # `model_type` of models with StarCoder's tokens in another order
_PAD_TEXTS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>")
_REPO_TEXTS = ("<|repo_name|>", "<|fim_repo|>", "<repo_name>", "<reponame>", "<|reponame|>")
_FILE_TEXTS = ("<|file_sep|>", "<file_sep>", "<filename>", "<|filename|>", "<|file_separator|>")
# Special tokens that end a text, which may be others than those that end a turn of a chat
_END_TEXTS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "▁<EOT>",
    "<EOT>",
    "<eos>",
    "</s>",
)


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The ids of a model's tokens."""

    prefix: int  # before the text before the gap
    suffix: int  # before the text after the gap
    middle: int | None  # before the answer; None: the answer follows the prefix directly
    suffix_first: bool = False  # the text after the gap comes first
    repo: int | None = None  # before the name of a repository
    file: int | None = None  # before the name of a file
    end_ids: tuple[int, ...] = ()  # tokens that end an answer

    def arrange(self, before: list[int], after: list[int]) -> list[int]:
        """Return the ids of a text with a gap.

        before, after: the ids of the text before the gap and after it.
        """
        prefix = [self.prefix, *before]
        suffix = [self.suffix, *after]
        prompt = suffix + prefix if self.suffix_first else prefix + suffix
        return prompt if self.middle is None else [*prompt, self.middle]


def find_fim_tokens(
    backend: Backend, named: Mapping[str, int] | None = None, *, model_type: Any = None
) -> FimTokens | None:
    """Return the tokens with which a model fills in the middle; None if it has none.

    Only special and other added tokens count: the same text in the ordinary vocabulary was not
    trained to have this meaning.

    Args:
        backend: The tokenizer.
        named: Ids in a GGUF file by role: "pre", "suf", "mid", "pad", "rep", "sep".
        model_type: `model_type` in config.json.
    """
    named = named or {}
    added = backend.get_added_tokens_decoder()
    ids = {token.content: token_id for token_id, token in added.items()}
    spelling = _spelling(ids, named)
    if spelling is None and not named.keys() >= {"pre", "suf", "mid"}:
        return None
    texts = spelling or _Spelling("", "", "")
    prefix = named.get("pre", ids.get(texts.prefix))
    suffix = named.get("suf", ids.get(texts.suffix))
    assert prefix is not None
    assert suffix is not None
    middle = named.get("mid", ids.get(texts.middle))
    pad = named.get("pad", _first(ids, _PAD_TEXTS))
    repo = named.get("rep", _first(ids, _REPO_TEXTS))
    file = named.get("sep", _first(ids, _FILE_TEXTS))
    special = {token.content for token in added.values() if token.special}
    ends = [ids[text] for text in _END_TEXTS if text in special]
    markers = [prefix, suffix, middle, pad, repo, file]
    return FimTokens(
        prefix,
        suffix,
        middle,
        suffix_first=texts.suffix_first or model_type in _SUFFIX_FIRST_TYPES,
        repo=repo,
        file=file,
        end_ids=tuple(dict.fromkeys([*(one for one in markers if one is not None), *ends])),
    )


def _spelling(ids: Mapping[str, int], named: Mapping[str, int]) -> _Spelling | None:
    """Return the first spelling whose tokens all exist and are those that the file names."""
    for spelling in _SPELLINGS:
        texts = {"pre": spelling.prefix, "suf": spelling.suffix, "mid": spelling.middle}
        if all(
            text in ids and named.get(role, ids[text]) == ids[text]
            for role, text in texts.items()
            if text
        ):
            return spelling
    return None


def _first(ids: Mapping[str, int], texts: Iterable[str]) -> int | None:
    return next((ids[text] for text in texts if text in ids), None)
