"""Graphs of a rank whose rows travel to experts on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from moeserve.engine.plan import StepPlan
from moeserve.moe.lane import Lane
from moeserve.runner.graphs import Descriptor, GraphManager, Mode, eager_shape
from moeserve.runner.recorder import Recorder

if TYPE_CHECKING:
    from moeserve.runner.triton_inputs import FixedInputs


class Group(Protocol):
    """What `Peers` tells of the group and of where experts are."""

    @property
    def place(self) -> tuple[int, int]:
        """Other than before after every join and every change of the placement."""
        ...

    @property
    def moving(self) -> bool: ...

    @property
    def recordable(self) -> bool:
        """Whether the transport that serves now, and the kernels behind it, can be recorded."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """That travel at once; with more, a layer takes several rounds."""
        ...


class DealtGraphs(GraphManager):
    """Ranks need not run the same shapes, but each must have room for what the others send, and make as many rounds as
    they do: so a step's size is that of the rank with most tokens. Recordings know addresses of the group's buffers and
    of the experts' slots, and are dropped with those.
    """

    def __init__(
        self, fixed: FixedInputs, recorder: Recorder, lane: Lane, sizes: Mapping[Mode, Sequence[int]], group: Group
    ) -> None:
        super().__init__(fixed, recorder, lane, sizes)
        self._group = group
        self._place = (-1, -1)
        self._serves = False

    def shape(self, plan: StepPlan) -> Descriptor:
        group, agreed = self._group, plan.agreed
        if self._place != group.place:
            self.drop()
            self._place, self._serves = group.place, group.recordable
            return eager_shape(plan)  # once, for warmth: what is recorded is not run by itself
        if agreed is None or agreed.lanes > 1 or not self._serves or group.moving:
            return eager_shape(plan)
        shape = self.dispatch(len(plan.slots_R), max(plan.num_tokens, agreed.most_tokens[0]), plan.uniform_len)
        limit = group.max_tokens
        fits = shape.mode is not Mode.NONE and (limit is None or shape.num_tokens <= limit)
        return shape if fits else eager_shape(plan)
