"""How requests gain tokens: one after another, or a block at a time (docs/diffusion.md).

A model that decodes blocks computes whole blocks of tokens, whose borders are absolute. The last
block of a row that samples begins with known tokens, if any, and goes on with masks, which the
runner replaces by tokens, step by step. The scheduler learns the tokens of a block when it has no
more masks. Until then it plans the block again. The next plan computes the block once more, with
its final tokens, together with the next block of masks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moeserve.errors import InvalidRequest
from moeserve.sampling import GREEDY_BELOW, TokenSampling

_SHORT_BLOCKS = 2  # the last block with its final tokens, and the next one


@dataclass(frozen=True, slots=True)
class Decoding:
    """The rule by which requests gain tokens.

    block: tokens per block; 0: tokens one after another. The limits of the scheduler are multiples
    of it, and so are the start and the length of every row.
    """

    block: int = 0

    @property
    def short(self) -> int:
        """The tokens of the longest row of a request that decodes, without drafts."""
        return self.block * _SHORT_BLOCKS or 1

    def goal(self, known: Any) -> Any:
        """Return how many positions are computed to sample after `known` tokens.

        known: a number or an array.
        """
        return (known // self.block + 1) * self.block if self.block else known

    def check(self, sampling: TokenSampling, grammar_param: str = "structured_outputs") -> None:
        """Raise InvalidRequest if a request has parameters without a meaning for blocks.

        grammar_param: the request field that errors about a grammar name.
        """
        if not self.block:
            return
        for name, remedy in _unsupported(sampling, grammar_param):
            raise InvalidRequest(
                f"{name} is not supported by this model, which decodes blocks of tokens: {remedy}",
                param=name,
                code="unsupported_parameter",
            )

    def check_resumption(self, num_tokens: int, num_prompt: int) -> None:
        """Raise InvalidRequest if a request with tokens of its answer ends inside a block."""
        if self.block and num_tokens > num_prompt and num_tokens % self.block:
            raise InvalidRequest(
                f"an answer of this model resumes at a multiple of {self.block} tokens, "
                f"not at {num_tokens}"
            )


SINGLE_TOKENS = Decoding()


def _unsupported(sampling: TokenSampling, grammar_param: str) -> Iterator[tuple[str, str]]:
    """Yield the parameters that have no meaning for blocks, and what to do instead."""
    if sampling.temperature >= GREEDY_BELOW:
        yield "temperature", "its tokens are always the most likely ones, so set it to 0"
    is_set = {
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "min_tokens": sampling.min_tokens > 0,
        "logprobs": sampling.logprobs is not None,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "logit_bias": bool(sampling.logit_bias),
        "allowed_token_ids": sampling.allowed_ids is not None,
        "bad_words": bool(sampling.bad_seqs),
        grammar_param: sampling.grammar is not None,
        "logits_processors": bool(sampling.processors),
        "receipt": sampling.receipt,
    }
    for name in (name for name, given in is_set.items() if given):
        yield name, "omit it"
