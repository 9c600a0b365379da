"""Sampling parameters: the user's (`SamplingParams`) and the engine's (`TokenSampling`); and what
constrains answers.

The engine sees only integers: the front end turns bad words into token ids and finds stop strings
itself.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from moeserve.errors import InvalidRequest, invalid_request

MAX_LOGPROBS = 20
MAX_N = 128
MAX_INT = 2**31 - 1
RANDOM_SEED = -1  # means "draw a seed", as in vLLM, llama.cpp and Ollama
GREEDY_BELOW = 1e-5  # a temperature below this means argmax
MAX_CHOICES = 5_000
MAX_STOP_CHARS = 4_096  # of all stop strings: each token is compared with them
TOKEN_ID = (
    "token-id"  # the format of such integers in /openapi.json, where the vocabulary bounds them
)

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT, extra_json_schema={"format": TOKEN_ID})]
NumSequences = Annotated[int, Meta(ge=1, le=MAX_N)]
Temperature = Annotated[float, Meta(ge=0, le=2)]  # of a request, as OpenAI's
AnyTemperature = Annotated[float, Meta(ge=0, le=1000)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFraction = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=2)]  # of a request
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
    """A logits processor by name, and the arguments that its factory gets; see
    docs/logits-processors.md.
    """

    name: NonEmpty
    args: dict[str, Any] = {}


LogitsProcessors = Annotated[Sequence[NonEmpty | LogitsProcessorSpec], Meta(max_length=8)]


class LogitParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameters that users and the engine give the same names and meaning."""

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
    """What an answer must match: one of the first six, with vLLM's names. JSON may be given as a
    value or as text.

    json: a schema. grammar: Lark, or GBNF if it has `::=`. structural_tag: {"structures":
    [{"begin", "schema", "end"}], "triggers": [...]}. disable_any_whitespace, whitespace_pattern:
    which whitespace JSON may have.
    """

    json: dict[str, Any] | str | None = None
    regex: NonEmpty | None = None
    choice: Choices | None = None
    grammar: NonEmpty | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The constraints that are not None or false, by name."""
        names = self.__struct_fields__[:6]
        return {
            name: value for name in names if (value := getattr(self, name)) not in (None, False)
        }


class SamplingParams(LogitParams, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of one request, with vLLM's names and defaults.

    temperature in [0, 1000] (below 1e-5: greedy), top_p in (0, 1], top_k >= 1 (0 or -1: off), min_p
    in [0, 1], presence/frequency_penalty in [-2, 2], repetition_penalty in (0, 1000], n in 1..128.
    `seed` None or -1: one is drawn. `logprobs`/`prompt_logprobs`: how many alternatives besides the
    token itself, 0..20. `max_tokens` None: up to the end of the context. `stop` strings are cut
    from the text unless `include_stop_str_in_output`. `structured_outputs`: what the text must
    match. `speculate`: whether drafts may be verified for this request, where the engine has some;
    they change no token. `receipt`: whether the answer comes with one (docs/receipts.md).
    `logits_processors`: functions that change the logits first, by name.
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
        """Whether the most likely token is always chosen."""
        return self.temperature < GREEDY_BELOW

    def check(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field that is out of its range."""
        try:
            msgspec.convert(_plain(self), SamplingParams)
        except msgspec.ValidationError as error:
            raise invalid_request(error) from error
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            what = (
                "structured_outputs must be StructuredOutputsParams, not "
                f"{type(self.structured_outputs).__name__}"
            )
            raise InvalidRequest(what, param="structured_outputs")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            what = f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})"
            raise InvalidRequest(what, param="min_tokens")
        if (num_chars := sum(map(len, self.stop_strings))) > MAX_STOP_CHARS:
            what = (
                f"stop has {num_chars:,} characters in all; at most {MAX_STOP_CHARS:,} are allowed"
            )
            raise InvalidRequest(what, param="stop")
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
    """What the text of an answer must match, for the engine. `moeserve.text.grammar_source` says
    what each kind is.

    text: JSON for json_schema (the schema), choice (a list of strings) and structural_tag, "" for
    json_object, else the expression or grammar itself. any_whitespace: whether JSON may have
    whitespace between its tokens, or only what matches the regex whitespace_pattern, if there is
    one.
    """

    kind: Literal[
        "json_object", "json_schema", "regex", "choice", "lark", "gbnf", "structural_tag", "answer"
    ]
    text: str = ""
    any_whitespace: bool = True
    whitespace_pattern: str = ""


class TokenSampling(LogitParams, frozen=True, kw_only=True, omit_defaults=True):
    """`SamplingParams` of one sequence, resolved by the front end to integers and floats.

    stop_ids: the model's end tokens unless ignore_eos, and the user's. bad_seqs: token sequences
    that must not be completed. grammar: what the answer must match. processors: (name, arguments as
    JSON) of logits processors.
    """

    seed: int
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    bad_seqs: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarSpec | None = None
    processors: tuple[tuple[str, str], ...] = ()


def _plain(value: Any) -> Any:
    """Return the value with Python's own floats: NumPy's are subclasses, which msgspec refuses.
    Structs are dicts.
    """
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return float(value) if isinstance(value, float) else value
