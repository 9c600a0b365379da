"""The base of the `torch` backends, whose ranks are connected by a `Mesh` (Gloo or NCCL)."""

from abc import abstractmethod
from dataclasses import replace
from typing import Generic, TypeVar

from torch import Tensor

from moeserve.comm.gloo import Mesh
from moeserve.comm.members import Members
from moeserve.errors import PeerLost
from moeserve.moe.all2all.base import All2All, All2AllCaps, Layout
from moeserve.moe.all2all.registry import BackendFacts
from moeserve.moe.all2all.wire_format import RAW
from moeserve.moe.routing import Routing

M = TypeVar("M", bound=Mesh)


class MeshAll2All(All2All, Generic[M]):
    """A backend that sends messages over a mesh of connections, one channel per micro-batch.

    Rows are dispatched in the wire format; results are returned in the model's dtype.
    """

    def __init__(self, facts: BackendFacts, device: str) -> None:
        wire = facts.wire
        width = facts.hidden_size
        dtype = facts.dtype
        self.caps = All2AllCaps(
            name="torch",
            layouts=frozenset({Layout.GROUPED}),
            row_dtypes=frozenset({wire.name} if wire.name in RAW else RAW),
            max_tokens=facts.max_tokens,
            copies=5,  # received, sorted, decoded, computed and returned rows
            devices=frozenset({device}),
            encrypts=device == "cpu",
        )
        self._wire = wire
        self._width = width
        self._dtype = dtype
        self._top_k = facts.top_k
        self._max_tokens = facts.max_tokens  # limit of one dispatch; `join` may lower it
        self._facts = facts
        self._mesh: M | None = None
        self._num_local = 0

    @abstractmethod
    def new_mesh(self, members: Members, ubatches: int, terms: str) -> M:
        """Return a mesh that is not connected yet.

        terms: a description of the messages, which must be the same on all ranks.
        """

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        self._num_local = experts_per_rank
        self._max_tokens = self._facts.round_tokens(members.size)
        self.caps = replace(self.caps, max_tokens=self._max_tokens)
        terms = (
            f"{self._wire.name} rows of {self._width}, {self._dtype}, top "
            f"{self._top_k}, {self._max_tokens} tokens"
        )
        self._mesh = self.new_mesh(
            members, ubatches, f"{terms}, {experts_per_rank} experts, {ubatches} micro-batches"
        )
        self._mesh.connect()

    def leave(self) -> None:
        if self._mesh is not None:
            self._mesh.leave()

    @property
    def mesh(self) -> M:
        """The connections to the joined group. Raises PeerLost before `join`."""
        if self._mesh is None:
            raise PeerLost("this rank has not joined a group yet")
        return self._mesh

    def _check_size(self, x_TD: Tensor, routing: Routing) -> None:
        tokens, top_k = routing.ids_TK.shape
        limit = self._max_tokens
        assert len(x_TD) == tokens <= limit, (
            f"{len(x_TD)} rows with {tokens} rows of ids, at most {limit}"
        )
        assert top_k <= self._top_k, f"{top_k} experts per token of at most {self._top_k}"
