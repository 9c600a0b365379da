"""The seam of tasks: what a step makes of its rows' hidden states.

A request names its task (`Submit.task`). The scheduler knows of a row only whether it yields
tokens; batching, chunks, prefix cache, preemption and replay are alike for all tasks.
`SampleTask` (runner/sampling/task.py) is the task that exists.
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
    """A step whose forward pass was launched. T tokens, padding included."""

    plan: StepPlan
    rows: HostRows
    inputs: StepInputs
    hidden_TD: Tensor  # behind the model's last norm
    aux_TN: Tensor | None  # hidden states of `spec.aux_hidden_layers`, side by side


class TaskOutputs(ABC):
    """What a task launched for one step."""

    @property
    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What the host needs, on the device."""

    @abstractmethod
    def add_to(self, result: StepResult, fetched: Arrays) -> StepResult:
        """Return the step's result with this task's part. fetched: `tensors` on the host.

        Called in the order of steps.
        """

    def awaited(self) -> AbstractContextManager[None]:
        """Return a context for the wait for the device; it learns of an error there."""
        return nullcontext()


class RowTask(ABC):
    """One kind of output that requests ask for. All methods but `TaskOutputs.add_to` are called in
    the thread that launches steps."""

    @abstractmethod
    def add(self, request: NewRequest) -> str | None:
        """Take the request of a slot; return why it must fail, or None."""

    @abstractmethod
    def refuse(self, slot: int) -> None:
        """Clear what `add` stored for a request that will fail."""

    def begin(self, plan: StepPlan, rows: HostRows, drafts: Tensor | None) -> None:  # noqa: B027
        """Start host work that runs beside the forward pass of a step. drafts: int32, of its rows.

        Called again for a step that is launched again.
        """

    @abstractmethod
    def rows(self, plan: StepPlan) -> I64:
        """Return the rows of a plan whose hidden states the task reads."""

    @abstractmethod
    def run(self, step: ComputedStep) -> TaskOutputs:
        """Launch what makes outputs of a step's hidden states; `rows` is not empty."""
