"""The membership of one epoch, as one rank sees it: how every transport finds the others."""

from dataclasses import dataclass

from moeserve.messages import Join


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The members of one epoch. Rank r is process r % tp_size of engine r // tp_size.

    host_of[r]: the machine of rank r; equal names share memory. directory: private folder (mode
    0700) of this epoch for Unix sockets and the like, the same for all ranks of a machine. store:
    host:port at which rank 0 opens this epoch's store, or the path of a Unix socket for ranks of
    one machine. vote: host:port at which rank 0 listens for the step vote, where there are several
    machines. token: a secret that the members share. deadline_s: how long to wait for a member
    before it counts as missing. terms: what must be the same on all ranks whose rows go by a mesh.
    """

    epoch: int
    rank: int
    tp_size: int
    host_of: tuple[str, ...]
    directory: str
    store: str
    token: str
    deadline_s: float = 60.0
    vote: str = ""
    terms: str = ""

    @classmethod
    def of(cls, join: Join, tp_rank: int) -> "Members":
        """Return the membership that a Join describes, for one rank of its engine."""
        return cls(
            epoch=join.epoch,
            rank=join.dp_rank * join.tp_size + tp_rank,
            tp_size=join.tp_size,
            host_of=tuple(host for host in join.hosts for _ in range(join.tp_size)),
            directory=join.directory,
            store=join.store,
            token=join.token,
            vote=join.vote,
        )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.host_of)

    @property
    def tp_rank(self) -> int:
        """This rank's number within its engine."""
        return self.rank % self.tp_size

    @property
    def dp_rank(self) -> int:
        """The number of this rank's engine."""
        return self.rank // self.tp_size

    @property
    def one_host(self) -> bool:
        """Whether all ranks share one machine."""
        return len(set(self.host_of)) == 1

    @property
    def tp_ranks(self) -> range:
        """The ranks of this rank's engine."""
        return range(self.dp_rank * self.tp_size, (self.dp_rank + 1) * self.tp_size)
