"""The base of the adapters: a buffer per epoch, and how errors are reported.

No adapter is `exact`: the kernels add the results of a token up by rank, or with fused multiplies,
in bfloat16. DeepEP's "experts" are physical experts here. A rank that dies cannot take part in
tearing a buffer down, so the survivors keep theirs until the process ends; a rank that waits for
the dead one gets PeerLost after deep_ep's own limit (100 s; v2: the members' deadline).

T tokens of D elements, W >= D elements that travel, b = W / 128 blocks.
"""

import logging
import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from moeserve.comm.gloo import Mesh
from moeserve.comm.members import Members
from moeserve.comm.store import dist
from moeserve.errors import ConfigError, PeerLost
from moeserve.moe.all2all.base import All2All, All2AllCaps, Layout
from moeserve.moe.all2all.registry import BackendFacts
from moeserve.moe.all2all.wire_format import BLOCK, FP8
from moeserve.moe.routing import Routing
from moeserve.moe.streams import CommStream, comm_stream

log = logging.getLogger(__name__)
SentRows = Tensor | tuple[Tensor, Tensor]  # bfloat16 [T, W]; or fp8 with fp32 scales [T, W / 128]

SILENCE = ("timeout", "CPU wait")  # in deep_ep's errors: a peer did not answer in time
FAREWELL_S = 2.0  # how long a rank that leaves waits for the others to leave too
RANKS_OF_NODE = 8  # that NVLink connects; beyond, ranks come in whole nodes


class BufferMesh(Mesh):
    """A mesh of one channel over which deep_ep's buffers exchange their addresses."""

    _nccl: Any | None = None

    def process_group(self, nccl: bool) -> Any:
        """Connect, and returns a `ProcessGroup` without process-wide state, with NCCL for this
        rank's GPU if asked. Raises PeerLost naming the ranks that did not come, ConfigError when
        terms differ."""
        self.connect()
        store = self.store
        gloo = self.group
        kinds = dist.ProcessGroup.BackendType
        group = dist.ProcessGroup(store, gloo.rank(), gloo.size())
        group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        group._set_default_backend(kinds.GLOO)
        if nccl:
            device = torch.device("cuda", torch.cuda.current_device())
            prefix = dist.PrefixStore("nccl", store)
            self._nccl = dist.ProcessGroupNCCL(
                prefix, gloo.rank(), gloo.size(), dist.ProcessGroupNCCL.Options()
            )
            group.bound_device_id = device
            group._register_backend(torch.device("cuda"), kinds.NCCL, self._nccl)
            self._nccl.eager_connect_single_device(device)
        return group

    def farewell(self) -> bool:
        """Return whether all other ranks leave, too, so that all can free their buffers."""
        mine = torch.ones(1, dtype=torch.uint8)
        others = [rank for rank in range(self.members.size) if rank != self.members.rank]
        try:
            answers = {rank: torch.zeros(1, dtype=torch.uint8) for rank in others}
            self.channel(0).post(answers, dict.fromkeys(others, mine)).wait(FAREWELL_S)
        except PeerLost:
            return False
        return True

    def close(self) -> None:
        """Drop the connections."""
        nccl = self._nccl
        self._nccl = None
        if nccl is not None:
            nccl.abort()
        super().close()


class DeepEP(All2All):
    """An adapter for one of deep_ep's buffers, which `join` makes. lib: the package."""

    name: ClassVar[str]
    needs: ClassVar[str]  # class of the package
    max_top_k: ClassVar[int]
    whole_nodes: ClassVar[bool]  # whether every 8 ranks must share a machine
    takes_sms: ClassVar[bool]  # whether the number of multiprocessors can be limited
    nccl: ClassVar[bool]  # whether the buffer works on an NCCL communicator

    def __init__(self, lib: Any, facts: BackendFacts) -> None:
        self.lib = lib
        self.facts = facts
        self.fp8 = facts.wire.name == FP8
        self.caps = self.caps_of(facts)
        width = self.caps.pad_hidden(facts.hidden_size)
        self.width = facts.hidden_size if width is None else width
        self.max_tokens = self.caps.max_tokens or facts.max_tokens
        self.num_experts = 0  # physical experts of all ranks
        self.num_local = 0  # of this rank
        self.deadline_s = 0.0  # of the members
        self.comm = CommStream()  # deep_ep has streams of its own; this one times them
        self._ids_dtype = getattr(lib, "topk_idx_t", torch.int64)
        self._mesh: BufferMesh | None = None
        self._buffer: Any | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def caps_of(self, facts: BackendFacts) -> All2AllCaps:
        """Return what the kernels can do for this model."""

    @abstractmethod
    def open(self, group: Any) -> Any:
        """Return a buffer over a process group."""

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        """See `All2All`. Raises ConfigError for a group that there are no kernels for."""
        self._check(members)
        self.num_local = experts_per_rank
        self.num_experts = members.size * experts_per_rank
        facts = self.facts
        self.deadline_s = members.deadline_s
        self.comm = comm_stream(facts.device)
        terms = (
            f"{facts.wire.name} rows of {facts.hidden_size}, top {facts.top_k}, "
            f"{self.max_tokens} tokens"
        )
        mesh = BufferMesh(
            members, 1, self.name, f"{terms}, {experts_per_rank} experts, {ubatches} micro-batches"
        )
        try:
            buffer = self.open(mesh.process_group(self.nccl and facts.device == "cuda"))
        except BaseException as error:
            mesh.close()
            if not isinstance(error, RuntimeError | AssertionError):
                raise
            if isinstance(error, AssertionError) or "ssert" in str(error):
                raise ConfigError(
                    f"{self.name} cannot make its buffer: {error}; choose another all2all"
                ) from error
            raise mesh.lost(f"a rank left while buffers were made: {error}") from None
        with self._lock:
            self._mesh = mesh
            self._buffer = buffer

    def leave(self) -> None:
        with self._lock:
            mesh = self._mesh
            buffer = self._buffer
            self._mesh = self._buffer = None
        if mesh is None or buffer is None:
            return
        if mesh.farewell():
            buffer.destroy()
        else:
            log.warning(
                "%s: other ranks are gone; the memory of its buffer is lost until this "
                "process ends",
                self.name,
            )
        mesh.close()

    @property
    def buffer(self) -> Any:
        """The buffer of the group that was joined. Raises PeerLost when there is none."""
        buffer = self._buffer
        if buffer is None:
            raise PeerLost("this rank is in no group")
        return buffer

    @contextmanager
    def calling(self, buffer: Any) -> Iterator[None]:
        """Wrap every call of `buffer`: raises PeerLost for an epoch that is over and for peers
        that are silent.
        """
        mesh = self._mesh
        if mesh is None or buffer is not self._buffer:
            raise PeerLost("this rank left the group")
        try:
            yield
        except RuntimeError as error:
            if any(word in str(error) for word in SILENCE):
                raise mesh.lost(f"a rank was silent: {error}") from None
            raise

    def ids_of(self, routing: Routing) -> Tensor:
        """Return the ids in the package's own dtype."""
        return routing.ids_TK.to(self._ids_dtype).contiguous()

    def _check(self, members: Members) -> None:
        if not self.caps.world_sizes(members.size):
            raise ConfigError(
                f"{self.name} does not serve {members.size} ranks; choose another all2all or size"
            )
        hosts = members.host_of
        nodes = [
            hosts[start : start + RANKS_OF_NODE] for start in range(0, members.size, RANKS_OF_NODE)
        ]
        if (
            self.whole_nodes
            and members.size > RANKS_OF_NODE
            and any(len(set(node)) > 1 for node in nodes)
        ):
            raise ConfigError(
                f"{self.name} wants {RANKS_OF_NODE} ranks, one after the other, on every "
                f"node: {hosts}"
            )


def caps_with(name: str, layout: Layout, **more: Any) -> All2AllCaps:
    """Return the capabilities that all adapters share, and `more`."""
    return All2AllCaps(
        name=name,
        layouts=frozenset({layout}),
        wires=frozenset({"bfloat16"}),
        devices=frozenset({"cuda"}),
        exact=False,
        **more,
    )


def widen(x_TD: Tensor, width: int) -> Tensor:
    """Return x contiguous with zeros behind every row, [T, W]; any number of leading dimensions."""
    missing = width - x_TD.shape[-1]
    return torch.nn.functional.pad(x_TD, (0, missing)) if missing else x_TD.contiguous()


def cut(rows: SentRows, width: int) -> tuple[Tensor, Tensor | None]:
    """Return rows of the model's width, and their scales if they have some, as views."""
    data, scales = (rows, None) if isinstance(rows, Tensor) else rows
    return data[..., :width], None if scales is None else scales[..., : -(-width // BLOCK)]
