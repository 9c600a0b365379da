"""`deep_ep.utils.comm`: communicators are kept with their group until all of them are dropped."""

from typing import Any

# The real package has a process per rank, and the group itself as the key.
_storage: dict[int, Any] = {}


def keep(group: Any) -> None:
    _storage[id(group)] = group


def destroy_all_managed_nccl_comm():
    _storage.clear()
