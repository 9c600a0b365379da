"""The interface of tasks, which compute the outputs of requests from hidden states.

A request has one task (`Submit.task`). To the scheduler, all tasks are alike: the scheduler only
knows whether a row yields tokens. So far there is one task, `SampleTask` (runner/sampling/task.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from moeserve.engine.plan import NewRequest, StepPlan, StepResult
from moeserve.ops.inputs import StepInputs
from moeserve.runner.tables import I64, HostRows

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose forward pass was launched. T: tokens, padding included."""

    plan: StepPlan
    rows: HostRows
    inputs: StepInputs
    hidden_TD: Tensor  # after the model's last norm
    aux_TA: Tensor | None  # hidden states of `spec.aux_hidden_layers`, concatenated


class TaskOutputs(ABC):
    """The outputs of a task in one step."""

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The outputs on the device that the host needs."""

    @abstractmethod
    def add_to(self, result: StepResult, fetched: Arrays) -> StepResult:
        """Return the step's result with the outputs of this task. Called in the order of steps.

        fetched: `tensors` on the host.
        """

    def watch_wait(self) -> AbstractContextManager[None]:
        """Return a context that is active while the runner waits for the device.

        The context sees the errors of the wait.
        """
        return nullcontext()


class RowTask(ABC):
    """One kind of output of requests.

    The thread that launches steps calls all methods.
    """

    @abstractmethod
    def add(self, request: NewRequest) -> str | None:
        """Add the request of a slot. Return an error message if it must fail, otherwise None."""

    @abstractmethod
    def refuse(self, slot: int) -> None:
        """Clear what `add` stored for a request that will fail."""

    def begin(self, plan: StepPlan, rows: HostRows, drafts: Tensor | None) -> None:  # noqa: B027
        """Start host work that runs in parallel to the forward pass of a step.

        If a step is launched again, `begin` is called again.

        drafts: int32, row after row.
        """

    @abstractmethod
    def rows(self, plan: StepPlan) -> I64:
        """Return the rows of a plan whose hidden states the task reads."""

    @abstractmethod
    def run(self, step: ComputedStep) -> TaskOutputs:
        """Launch the computation of outputs from hidden states. `rows` is not empty."""
