"""Sampling parameters of users (`SamplingParams`) and of the engine (`TokenSampling`).

The engine works on token ids only: the front end converts bad words to token ids, and searches the
text for stop strings itself.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from moeserve.errors import InvalidRequest, invalid_request

MAX_LOGPROBS = 20
MAX_N = 128
MAX_INT = 2**31 - 1
RANDOM_SEED = -1  # draw a seed, as in vLLM, llama.cpp and Ollama
GREEDY_BELOW = 1e-5  # temperatures below this mean argmax
MAX_CHOICES = 5_000
MAX_STOP_CHARS = 4_096  # in all stop strings together, because every token is compared with them
# The format of token ids in schemas. /openapi.json replaces it by the bounds of the vocabulary.
TOKEN_ID = "token-id"

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT, extra_json_schema={"format": TOKEN_ID})]
NumSequences = Annotated[int, Meta(ge=1, le=MAX_N)]
Temperature = Annotated[float, Meta(ge=0, le=2)]  # in HTTP requests, as in OpenAI's API
AnyTemperature = Annotated[float, Meta(ge=0, le=1000)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFraction = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=2)]  # in HTTP requests
AnyRepetitionPenalty = Annotated[float, Meta(gt=0, le=1000)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopStrings = Annotated[Sequence[StopString], Meta(max_length=64)]
MinTokens = Annotated[int, Meta(ge=0, le=MAX_INT)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogitBias = Annotated[
    dict[TokenId, Bias], Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}})
]
AllowedTokens = Annotated[Sequence[TokenId], Meta(min_length=1)]
NonEmpty = Annotated[str, Meta(min_length=1)]
Choices = Annotated[Sequence[str], Meta(min_length=1, max_length=MAX_CHOICES)]
BadWords = Annotated[Sequence[NonEmpty], Meta(max_length=128)]


class LogitsProcessorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a logits processor, and the arguments for its factory.

    See docs/logits-processors.md.
    """

    name: NonEmpty
    args: dict[str, Any] = {}


LogitsProcessors = Annotated[Sequence[NonEmpty | LogitsProcessorSpec], Meta(max_length=8)]


class LogitParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters that `SamplingParams` and `TokenSampling` have in common."""

    temperature: AnyTemperature = 1.0
    top_p: PositiveFraction = 1.0
    top_k: TopK = 0
    min_p: Fraction = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: AnyRepetitionPenalty = 1.0
    min_tokens: MinTokens = 0
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    logit_bias: LogitBias | None = None
    speculate: bool = True
    receipt: bool = False


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A constraint on an answer, with vLLM's names. One of the first six fields must be given."""

    json: dict[str, Any] | str | None = None  # a JSON schema, as a value or as text
    regex: NonEmpty | None = None
    choice: Choices | None = None
    grammar: NonEmpty | None = None  # in Lark syntax, or in GBNF if it contains `::=`
    json_object: bool | None = None
    # {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, as a value or as text
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None  # no whitespace between JSON tokens
    whitespace_pattern: str | None = None  # a regex for the whitespace between JSON tokens

    @property
    def given(self) -> dict[str, Any]:
        """The constraints that are set, by name."""
        names = self.__struct_fields__[:6]  # the others are options
        return {
            name: value for name in names if (value := getattr(self, name)) not in (None, False)
        }


class SamplingParams(LogitParams, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of one request, with vLLM's names and defaults.

    temperature: in [0, 1000]; below 1e-5: greedy.
    top_p: in (0, 1].
    top_k: at least 1; 0 or -1: off.
    min_p: in [0, 1].
    presence_penalty, frequency_penalty: in [-2, 2].
    repetition_penalty: in (0, 1000].
    n: number of sequences, 1 to 128.
    seed: None or -1: draw one.
    max_tokens: None: up to the end of the context.
    logprobs, prompt_logprobs: alternatives in addition to the token itself, 0 to 20.
    stop: strings that end the answer. They are cut from the text unless
        `include_stop_str_in_output` is set.
    structured_outputs: a constraint on the text.
    logits_processors: functions that change the logits before sampling, by name.
    speculate: allow speculative decoding, if the engine has it. It changes no token.
    receipt: add a receipt to the answer (docs/receipts.md).
    """

    n: NumSequences = 1
    seed: Seed | None = None
    stop: StopString | StopStrings = ()
    stop_token_ids: Sequence[TokenId] = ()
    ignore_eos: bool = False
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = 16
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logits_processors: LogitsProcessors = ()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether sampling always chooses the most likely token."""
        return self.temperature < GREEDY_BELOW

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest with the name of the first field that is out of range."""
        try:
            msgspec.convert(_plain(self), SamplingParams)
        except msgspec.ValidationError as error:
            raise invalid_request(error) from error
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequest(
                "structured_outputs must be StructuredOutputsParams, not "
                f"{type(self.structured_outputs).__name__}",
                param="structured_outputs",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if (num_chars := sum(map(len, self.stop_strings))) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop has {num_chars:,} characters in all; at most {MAX_STOP_CHARS:,} are allowed",
                param="stop",
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            ids = getattr(self, name) or ()
            if len(ids) > vocab_size:
                raise InvalidRequest(
                    f"{name} has {len(ids)} entries; the vocabulary has {vocab_size}", param=name
                )
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                raise InvalidRequest(
                    f"{name}: expected a token id in 0..{vocab_size - 1}", param=name
                )


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constraint on the text of an answer, for the engine.

    `moeserve.text.grammar_source` describes the kinds.
    """

    kind: Literal[
        "json_object", "json_schema", "regex", "choice", "lark", "gbnf", "structural_tag", "answer"
    ]
    # JSON for json_schema (the schema), choice (a list of strings) and structural_tag; "" for
    # json_object; otherwise the regular expression or grammar itself
    text: str = ""
    any_whitespace: bool = True  # allow any whitespace between JSON tokens
    whitespace_pattern: str = ""  # otherwise the regex for it; "": no whitespace


class TokenSampling(LogitParams, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of one sequence, resolved by the front end to token ids."""

    seed: int
    max_tokens: int
    stop_ids: tuple[int, ...] = ()  # the model's end tokens (unless ignore_eos) and the user's
    allowed_ids: tuple[int, ...] | None = None
    bad_seqs: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    grammar: GrammarSpec | None = None
    processors: tuple[tuple[str, str], ...] = ()  # name and args (as JSON) of logits processors


def _plain(value: Any) -> Any:
    """Return the value with structs as dicts, and floats as Python's own.

    msgspec rejects NumPy's floats, which are subclasses.
    """
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return float(value) if isinstance(value, float) else value
