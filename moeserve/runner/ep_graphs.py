"""Graphs of a rank whose rows travel to experts on other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from moeserve.engine.plan import StepPlan
from moeserve.moe.ubatch import UBatch
from moeserve.runner.graphs import Descriptor, Forward, GraphManager, Mode
from moeserve.runner.recorder import Recorder

if TYPE_CHECKING:
    from moeserve.runner.triton_inputs import FixedInputs


class EPGraphGroup(Protocol):
    """The facts about the group and its placement that `Peers` provides."""

    @property
    def place(self) -> tuple[int, int]:
        """A key that changes with every join and every change of the placement."""
        ...

    @property
    def moving(self) -> bool:
        """Whether experts are being moved."""
        ...

    @property
    def recordable(self) -> bool:
        """Whether the transport in use, and the kernels behind it, can be recorded."""
        ...


class EPGraphs(GraphManager):
    """Records and replays steps where experts are sharded over ranks.

    Some ranks may replay a step and others run it as it is, but all must make room for the same number of tokens, since
    the layout of exchanged rows depends on it: the number of the rank with most, rounded up to a recorded size.
    Recordings refer to the group's buffers and the physical experts' addresses, and are dropped when those change.

    sizes: of PIECEWISE and FULL, the latter's among the former's.
    """

    def __init__(
        self,
        forward: Forward,
        fixed: FixedInputs,
        recorder: Recorder,
        ubatch: UBatch,
        sizes: Mapping[Mode, Sequence[int]],
        group: EPGraphGroup,
    ) -> None:
        super().__init__(forward, fixed, recorder, ubatch, sizes)
        self._group = group
        self._common = max(sizes.values(), key=len)
        self._place = (-1, -1)
        self._recordable = False

    def shape(self, plan: StepPlan) -> Descriptor | None:
        """Returns the shape that a step is to be replayed in, or None if the step runs as it is."""
        group, agreed = self._group, plan.agreed
        if self._place != group.place:
            self.drop()
            self._place, self._recordable = group.place, group.recordable
            return None  # once, for warmth: recording a step does not run it
        if agreed is None or agreed.ubatches > 1 or not self._recordable or group.moving:
            return None
        shape = self.dispatch(agreed.most_tokens[0], plan.uniform_len)
        return shape if shape and shape.num_tokens == self.round_up(agreed.most_tokens[0]) else None

    def round_up(self, tokens: int) -> int:
        """Returns the number of tokens that all ranks make room for: 7 -> 8; beyond the largest size, `tokens`."""
        return next((size for size in self._common if size >= tokens), tokens)
