"""`deep_ep.utils.comm`: communicators are kept, with the group that they are for, until all of them
are dropped.
"""

from typing import Any

_storage: dict[
    int, Any
] = {}  # the real one has a process per rank, and the group itself as the key


def keep(group: Any) -> None:
    _storage[id(group)] = group


def destroy_all_managed_nccl_comm():
    _storage.clear()
