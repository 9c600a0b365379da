"""Graphs of a rank whose rows travel to experts on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from moeserve.engine.plan import StepPlan
from moeserve.moe.ubatch import UBatch
from moeserve.runner.graphs import Descriptor, GraphManager, Mode, eager_shape
from moeserve.runner.recorder import Recorder

if TYPE_CHECKING:
    from moeserve.runner.triton_inputs import FixedInputs


class EPGraphGroup(Protocol):
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


class EPGraphs(GraphManager):
    """Some ranks of a group may replay a step and others run it as it is, but all must make room for the same number of
    tokens, since what travels is laid out by it: that of the rank with most, `round_up` to a recorded size. Recordings
    know addresses of the group's buffers and of the experts' slots, and are dropped with those.

    sizes: of PIECEWISE and FULL, the latter's among the former's.
    """

    def __init__(
        self,
        fixed: FixedInputs,
        recorder: Recorder,
        ubatch: UBatch,
        sizes: Mapping[Mode, Sequence[int]],
        group: EPGraphGroup,
    ) -> None:
        super().__init__(fixed, recorder, ubatch, sizes)
        self._group = group
        self._common = max(sizes.values(), key=len)
        self._place = (-1, -1)
        self._serves = False

    def shape(self, plan: StepPlan) -> Descriptor:
        group, agreed = self._group, plan.agreed
        if self._place != group.place:
            self.drop()
            self._place, self._serves = group.place, group.recordable
            return eager_shape(plan)  # once, for warmth: what is recorded is not run by itself
        if agreed is None or agreed.ubatches > 1 or not self._serves or group.moving:
            return eager_shape(plan)
        shape = self.dispatch(len(plan.slots_R), agreed.most_tokens[0], plan.uniform_len)
        fits = shape.mode is not Mode.NONE and shape.num_tokens == self.round_up(agreed.most_tokens[0])
        return shape if fits else eager_shape(plan)

    def round_up(self, tokens: int) -> int:
        """The same for all that ranks may do in a step: 7 -> 8; beyond the largest size as it is."""
        return next((size for size in self._common if size >= tokens), tokens)
