"""The request of POST /infill, llama.cpp's format for editors, and its sampling parameters."""

from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from moeserve.errors import InvalidRequest
from moeserve.sampling import MAX_INT, NumSequences, SamplingParams
from moeserve.server.chat_request import TokenLimit
from moeserve.server.errors import shorten
from moeserve.server.requests import MAX_UNKNOWN, NoEffect, Refusals, Sampling, unknown_fields
from moeserve.text.fill_in_middle import ContextChunk
from moeserve.text.line_limits import LineLimits

MAX_CHUNKS = 4096
MAX_SAMPLERS = 64
DEFAULT_FILE_NAME = "tmp"  # as in llama.cpp
# llama.cpp's sampler `infill` keeps the tokens that are likely enough, mostly one or two. Tokens
# with less than this part of the highest probability are dropped in its place.
INFILL_MIN_P = 1 / 3
# Sampler -> the values of the parameters that it applies with which it changes nothing
_NEUTRAL: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "penalties": {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    },
}
# Samplers whose parameters are refused unless they are off
_OFF_SAMPLERS = ("dry", "xtc", "typ_p", "typical_p", "top_n_sigma", "adaptive_p", "mirostat")
_NO_SAMPLER = "this sampler is not supported"
_LOGPROBS = "/infill has no probabilities; use /v1/completions with suffix and logprobs"
_GRAMMAR = "use structured_outputs, as in /v1/completions"
FieldPath = Annotated[str, Meta(max_length=256)]


class Chunk(Struct, kw_only=True):
    """A piece of another file."""

    text: str
    filename: str | None = None


class InfillRequest(Sampling, kw_only=True):
    """A text with a gap between `input_prefix` + `prompt` and `input_suffix`."""

    refused: ClassVar[Refusals] = {
        "n_probs": (_LOGPROBS, (0,)),
        "logprobs": (_LOGPROBS, (0,)),
        "prompt_logprobs": (_LOGPROBS, ()),
        "post_sampling_probs": (_LOGPROBS, (False,)),
        "grammar": (_GRAMMAR, ("",)),
        "json_schema": (_GRAMMAR, ({},)),
        "lora": ("adapters are not supported", ([],)),
        "dry_multiplier": (_NO_SAMPLER, (0, 0.0)),
        "xtc_probability": (_NO_SAMPLER, (0, 0.0)),
        "typical_p": (_NO_SAMPLER, (1, 1.0)),
        "top_n_sigma": (_NO_SAMPLER, (-1, -1.0)),
        "dynatemp_range": (_NO_SAMPLER, (0, 0.0)),
        "adaptive_target": (_NO_SAMPLER, (-1, -1.0)),
        "mirostat": (_NO_SAMPLER, (0,)),
    }
    no_effect: ClassVar[NoEffect] = Sampling.no_effect | {
        "cache_prompt": (True,),
        "id_slot": (-1,),
        "t_max_prompt_ms": (-1,),
        "return_tokens_as_token_ids": (False,),
        "stream_options": (),
    }

    input_prefix: str
    input_suffix: str
    # Pieces of other files, which the model reads first
    input_extra: Annotated[list[Chunk], Meta(max_length=MAX_CHUNKS)] | None = None
    prompt: str | None = None  # more text of the prefix: the line of the cursor up to it
    # At most so many tokens; 0: only read the prompt into the prefix cache; -1: no limit
    n_predict: TokenLimit | None = None
    max_tokens: TokenLimit | None = None  # another name of n_predict
    n_cmpl: NumSequences | None = None  # another name of n
    # The answer ends before a later line with fewer spaces and tabs at its start
    n_indent: Annotated[int, Meta(ge=0, le=MAX_INT)] | None = None
    # The answer ends after the first line break that comes so long after its first token
    t_max_predict_ms: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    t_max_prompt_ms: Annotated[int, Meta(ge=-1, le=MAX_INT)] | None = None
    # Parameters of other samplers have no effect.
    samplers: Annotated[list[str], Meta(max_length=MAX_SAMPLERS)] | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None
    return_tokens: bool | None = None  # give the ids of the answer in `tokens`
    # The fields of the answer, for example "content" or "timings/prompt_n"
    response_fields: Annotated[list[FieldPath], Meta(max_length=256)] | None = None

    @staticmethod
    def unknown_inside(raw: dict[str, Any]) -> list[str]:
        unknown: list[str] = []
        for i, chunk in enumerate(raw.get("input_extra") or ()):
            if len(unknown) < MAX_UNKNOWN:
                unknown += unknown_fields(chunk, Chunk.__struct_fields__, f"input_extra[{i}].")
        return unknown

    def ignored(self) -> list[str]:
        names = super().ignored()
        for sampler, values in _NEUTRAL.items():
            if self.samplers is not None and sampler not in self.samplers:
                names += [name for name in values if getattr(self, name) is not None]
        return names

    @property
    def token_limit(self) -> int:
        """The largest number of tokens of an answer; -1: no limit."""
        if self.n_predict is not None:
            return self.n_predict
        return -1 if self.max_tokens is None else self.max_tokens

    @property
    def prefix(self) -> str:
        """The text before the gap."""
        return self.input_prefix + (self.prompt or "")

    def chunks(self) -> list[ContextChunk]:
        """Return the pieces of other files that have text."""
        return [
            ContextChunk(chunk.filename or DEFAULT_FILE_NAME, chunk.text)
            for chunk in self.input_extra or ()
            if chunk.text
        ]

    def line_limits(self) -> LineLimits | None:
        """Return the limits at which an answer ends at a line; None without any."""
        max_ms = max(self.t_max_predict_ms or 0, 0)
        if not (self.n_indent or max_ms):
            return None
        return LineLimits(min_indent=self.n_indent or 0, max_s=max_ms / 1000)

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Return the sampling parameters. Without n_predict tokens, one is computed and dropped.

        defaults: the model's. Raises InvalidRequest.
        """
        given = self.given()
        if self.n_cmpl is not None:
            given.setdefault("n", self.n_cmpl)
        limit = self.token_limit
        given["max_tokens"] = None if limit < 0 else min(max(limit, 1), MAX_INT)
        merged = {"min_p": 0.0} | defaults | given
        if self.samplers is not None:
            merged |= self._neutral_values()
            if "infill" in self.samplers:
                merged["min_p"] = max(merged["min_p"], INFILL_MIN_P)
        return SamplingParams(**merged)

    def _neutral_values(self) -> dict[str, Any]:
        """Return the values that switch off the parameters of samplers that are not listed."""
        assert self.samplers is not None
        known = [*_NEUTRAL, "infill", *_OFF_SAMPLERS]
        for i, name in enumerate(self.samplers):
            if name not in known:
                raise InvalidRequest(
                    f"samplers[{i}]: there is no sampler {shorten(name)!r}; known are "
                    f"{', '.join(known)}",
                    param=f"samplers[{i}]",
                )
        neutral: dict[str, Any] = {}
        for name, values in _NEUTRAL.items():
            if name not in self.samplers:
                neutral |= values
        return neutral
