"""The base of the DeepEP adapters: one buffer per group of ranks, and the mapping of errors.

No adapter is `exact`, because the kernels add up a token's results in bfloat16, by rank or with
fused multiplies. DeepEP's "experts" are physical experts here.

Freeing a buffer needs all of its ranks. If a rank dies, the survivors therefore keep the memory of
their buffers until their processes end. A rank that waits for the dead one gets PeerLost after
deep_ep's own timeout (`ll`: 100 s; `v2`: the members' deadline).

T: tokens. D: model width. W: width of a sent row, padded; W >= D.
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
# Either bfloat16 [T, W], or (fp8 [T, W], fp32 scales [T, W / 128]).
SentRows = Tensor | tuple[Tensor, Tensor]

TIMEOUT_WORDS = ("timeout", "CPU wait")  # a message of deep_ep with one of these is a timeout
FAREWELL_S = 2.0  # how long a rank that leaves waits for the others to leave too
RANKS_PER_NODE = 8  # connected by NVLink; larger groups must consist of whole nodes


class BufferMesh(Mesh):
    """A mesh with one channel, over which deep_ep's buffers exchange their addresses."""

    _nccl: Any | None = None

    def process_group(self, nccl: bool) -> Any:
        """Connect, and return a `ProcessGroup` that is not registered with torch.distributed.

        nccl: also open an NCCL communicator for this rank's GPU. Raises PeerLost with the ranks
        that did not join, and ConfigError if terms differ.
        """
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
        """Return whether all other ranks are leaving too, so that the buffers can be freed."""
        mine = torch.ones(1, dtype=torch.uint8)
        others = [rank for rank in range(self.members.size) if rank != self.members.rank]
        try:
            answers = {rank: torch.zeros(1, dtype=torch.uint8) for rank in others}
            self.channel(0).post(answers, dict.fromkeys(others, mine)).wait(FAREWELL_S)
        except PeerLost:
            return False
        return True

    def close(self) -> None:
        nccl = self._nccl
        self._nccl = None
        if nccl is not None:
            nccl.abort()
        super().close()


class DeepEP(All2All):
    """An adapter for one of deep_ep's buffer classes. `join` makes the buffer."""

    name: ClassVar[str]
    needs: ClassVar[str]  # the buffer class's name in deep_ep
    max_top_k: ClassVar[int]
    whole_nodes: ClassVar[bool]  # every 8 consecutive ranks must be on one machine
    takes_sms: ClassVar[bool]  # the number of multiprocessors can be limited
    nccl: ClassVar[bool]  # the buffer needs an NCCL communicator

    def __init__(self, lib: Any, facts: BackendFacts) -> None:
        self.lib = lib  # the imported package
        self.facts = facts
        self.fp8 = facts.wire.name == FP8
        self.caps = self.caps_of(facts)
        width = self.caps.pad_hidden(facts.hidden_size)
        self.width = facts.hidden_size if width is None else width
        self.max_tokens = self.caps.max_tokens or facts.max_tokens
        self.num_experts = 0  # physical experts of all ranks
        self.num_local = 0  # physical experts of this rank
        self.deadline_s = 0.0  # the members' deadline
        self.comm = CommStream()  # only times transfers: deep_ep runs them on its own streams
        self._ids_dtype = getattr(lib, "topk_idx_t", torch.int64)
        self._mesh: BufferMesh | None = None
        self._buffer: Any | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def caps_of(self, facts: BackendFacts) -> All2AllCaps:
        """Return the kernels' capabilities for this model."""

    @abstractmethod
    def open(self, group: Any) -> Any:
        """Return a buffer over a process group."""

    def join(self, members: Members, experts_per_rank: int, ubatches: int) -> None:
        """See `All2All`. Raises ConfigError if the kernels do not support the group."""
        self._check(members)
        self.num_local = experts_per_rank
        self.num_experts = members.size * experts_per_rank
        facts = self.facts
        self.deadline_s = members.deadline_s
        self.comm = comm_stream(facts.device)
        terms = (
            f"{facts.wire.name} rows of {facts.hidden_size}, top {facts.top_k}, "
            f"{self.max_tokens} tokens, {experts_per_rank} experts, {ubatches} micro-batches"
        )
        mesh = BufferMesh(members, 1, self.name, terms)
        try:
            buffer = self.open(mesh.process_group(nccl=self.nccl and facts.device == "cuda"))
        except BaseException as error:
            mesh.close()
            if not isinstance(error, RuntimeError | AssertionError):
                raise
            # deep_ep raises a RuntimeError if a rank left. A failed assertion of its C++ code is
            # also a RuntimeError, whose message says so.
            if isinstance(error, AssertionError) or "ssert" in str(error):
                raise ConfigError(
                    f"{self.name} cannot make its buffer: {error}; choose another all2all"
                ) from error
            raise mesh.lost_error(f"a rank left while buffers were made: {error}") from None
        with self._lock:
            self._mesh = mesh
            self._buffer = buffer

    def leave(self) -> None:
        with self._lock:
            mesh = self._mesh
            buffer = self._buffer
            self._mesh = None
            self._buffer = None
        if mesh is None or buffer is None:
            return
        if mesh.farewell():
            buffer.destroy()
        else:
            log.warning(
                "%s: other ranks are gone, so the memory of its buffer stays allocated until this "
                "process ends",
                self.name,
            )
        mesh.close()

    @property
    def buffer(self) -> Any:
        """The buffer of the current group. Raises PeerLost if there is none."""
        buffer = self._buffer
        if buffer is None:
            raise PeerLost("this rank has not joined a group, or has left it")
        return buffer

    @contextmanager
    def calling(self, buffer: Any) -> Iterator[None]:
        """Wrap a call of `buffer`. Raises PeerLost if this rank has left the buffer's group, and
        if a peer does not answer in time.
        """
        mesh = self._mesh
        if mesh is None or buffer is not self._buffer:
            raise PeerLost("this rank left the group")
        try:
            yield
        except RuntimeError as error:
            if any(word in str(error) for word in TIMEOUT_WORDS):
                raise mesh.lost_error(f"a rank was silent: {error}") from None
            raise

    def ids_of(self, routing: Routing) -> Tensor:
        """Return the ids in the package's own dtype."""
        return routing.ids_TK.to(self._ids_dtype).contiguous()

    def _check(self, members: Members) -> None:
        if not self.caps.supports_world_size(members.size):
            raise ConfigError(
                f"{self.name} does not support {members.size} ranks; choose another all2all or size"
            )
        hosts = members.host_of
        nodes = [
            hosts[start : start + RANKS_PER_NODE]
            for start in range(0, members.size, RANKS_PER_NODE)
        ]
        if (
            self.whole_nodes
            and members.size > RANKS_PER_NODE
            and any(len(set(node)) > 1 for node in nodes)
        ):
            raise ConfigError(
                f"{self.name} needs {RANKS_PER_NODE} consecutive ranks on every node; the ranks "
                f"are on {hosts}"
            )


def caps_with(name: str, layout: Layout, **more: Any) -> All2AllCaps:
    """Return the capabilities that all adapters share, with the fields in `more`."""
    return All2AllCaps(
        name=name,
        layouts=frozenset({layout}),
        row_dtypes=frozenset({"bfloat16"}),
        devices=frozenset({"cuda"}),
        exact=False,
        **more,
    )


def pad_width(x_TD: Tensor, width: int) -> Tensor:
    """Return x padded with zeros to `width` and contiguous, [..., D] -> [..., W]."""
    missing = width - x_TD.shape[-1]
    return torch.nn.functional.pad(x_TD, (0, missing)) if missing else x_TD.contiguous()


def trim_padding(rows: SentRows, width: int) -> tuple[Tensor, Tensor | None]:
    """Return the rows without padding, and their scales if there are any. Both are views."""
    if isinstance(rows, Tensor):
        return rows[..., :width], None
    data, scales = rows
    return data[..., :width], scales[..., : -(-width // BLOCK)]
