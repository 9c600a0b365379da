"""The seam for device graphs: how a step of a given shape is run. So far there is one way, eagerly.

A graph replays a recorded forward pass of a fixed shape. FULL fixes the number of requests and their equal length;
PIECEWISE fixes the number of tokens and leaves attention eager; NONE runs the model's code.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moeserve.layers.inputs import StepInputs


class Mode(enum.Enum):
    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The shape that a step runs in. num_reqs and uniform_len are None where the mode leaves them free."""

    mode: Mode
    num_tokens: int
    num_reqs: int | None
    uniform_len: int | None


class Graphs(Protocol):
    def dispatch(self, num_reqs: int, num_tokens: int, uniform_len: int | None) -> Descriptor:
        """The shape for a step. uniform_len: the tokens of every request, None if they differ."""
        ...

    def run(self, descriptor: Descriptor, forward: Callable[[StepInputs], Tensor], step: StepInputs) -> Tensor:
        """Hidden states of the step, computed in the dispatched shape."""
        ...


class EagerGraphs:
    """Runs every step as it is."""

    def dispatch(self, num_reqs: int, num_tokens: int, uniform_len: int | None) -> Descriptor:
        return Descriptor(Mode.NONE, num_tokens, num_reqs, uniform_len)

    def run(self, descriptor: Descriptor, forward: Callable[[StepInputs], Tensor], step: StepInputs) -> Tensor:
        assert descriptor.mode is Mode.NONE, descriptor
        return forward(step)
