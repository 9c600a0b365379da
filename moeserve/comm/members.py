"""The membership of one epoch: the ranks of the group, and how to connect to them."""

from dataclasses import dataclass

from moeserve.messages import Join


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The members of one epoch, as one rank sees them.

    An epoch is the time from one change of the group to the next. Rank r is process r % tp_size of
    engine r // tp_size.
    """

    epoch: int
    rank: int
    tp_size: int
    host_of: tuple[str, ...]  # the machine of each rank; ranks with equal names share memory
    # The private folder (mode 0700) of this epoch, for Unix sockets and files. All ranks of a
    # machine have the same one.
    directory: str
    # Where rank 0 opens the store in which ranks exchange addresses: host:port, or the path of a
    # Unix socket on a single machine.
    store: str
    token: str  # a secret that the members share
    deadline_s: float = 60.0  # a member that does not answer for so long counts as missing
    vote: str = ""  # host:port at which rank 0 listens for the step vote; "" on a single machine
    terms: str = ""  # settings that must be the same on all ranks of the group

    @classmethod
    def of(cls, join: Join, tp_rank: int) -> "Members":
        """Return the membership in a Join, for one rank of its engine."""
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
    def num_engines(self) -> int:
        """The number of engines."""
        return self.size // self.tp_size

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
