"""CUDA's streams, events and graphs on a CPU: everything is computed at once, but what no event puts in order fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Hazard(AssertionError):
    """An access that another stream's may overtake."""


class Stream:
    """done: how many accesses of each stream lie behind what comes here next."""

    def __init__(self, device: Any = None) -> None:
        self.done: dict[Stream, int] = {self: 0}

    def wait_event(self, event: Event) -> None:
        for stream, count in event.done.items():
            self.done[stream] = max(self.done.get(stream, 0), count)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.done = dict(other.done)
        self.wait_event(event)


class Event:
    cuda: FakeCuda

    def __init__(self, **options: bool) -> None:
        self.done: dict[Stream, int] = {}

    def record(self) -> None:
        self.done = dict(self.cuda.current_stream().done)

    def synchronize(self) -> None:
        assert self.done, "waited for an event that was never recorded"

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class Graph:
    """What torch was asked to do, to be done again with results in the same places. Until then they are not there."""

    cuda: FakeCuda

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert self.cuda.tape is None, "captures two graphs at once"
        assert self.cuda.current_stream() is not self.cuda.default, "captures on the default stream"
        self.cuda.tape = []

    def capture_end(self) -> None:
        assert self.cuda.tape is not None
        self.tape, self.cuda.tape = self.cuda.tape, None
        for _, _, _, places in self.tape:
            for place in places:
                place.fill_(torch.nan if place.is_floating_point() else -(1 << 30))

    def replay(self) -> None:
        for func, args, kwargs, places in self.tape:
            results = tree_leaves(func(*args, **kwargs))
            for place, result in zip(places, results, strict=bool(places)):
                place.copy_(result)


class FakeCuda(TorchDispatchMode):
    """What `torch.cuda` offers; while entered, it watches every access to a tensor's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.default = Stream()
        self.stack = [self.default]
        self.tape: list[tuple[Any, Any, Any, Sequence[Tensor]]] | None = None
        self.kept: dict[int, torch.UntypedStorage] = {}  # so that no address is used again
        self.written: dict[int, tuple[Stream, int]] = {}
        self.read: dict[int, dict[Stream, int]] = {}
        self.Stream = Stream
        self.Event = type("Event", (Event,), {"cuda": self})
        self.CUDAGraph = type("CUDAGraph", (Graph,), {"cuda": self})

    def graph_pool_handle(self) -> None: ...

    def empty_cache(self) -> None: ...

    def reset_peak_memory_stats(self, device: Any) -> None: ...

    def memory_allocated(self, device: Any) -> int:
        """All that was ever there: nothing is freed here."""
        return sum(storage.nbytes() for storage in self.kept.values())

    max_memory_allocated = memory_allocated

    def current_stream(self) -> Stream:
        return self.stack[-1]

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.tape is not None and func is torch.ops.aten._local_scalar_dense.default:
            raise Hazard("asks the device while a graph is captured")
        result = func(*args, **kwargs)
        named = zip(func._schema.arguments, args, strict=False)
        named_too = [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        changed: set[int] = set()
        used: set[int] = set()
        for argument, value in [*named, *named_too]:
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    into = changed if argument.alias_info is not None and argument.alias_info.is_write else used
                    into.add(self._memory(tensor))
        places = [t for t in tree_leaves(result) if isinstance(t, Tensor) and self._memory(t) not in changed | used]
        if places or changed:  # others only look at the same memory in another way
            self._follow(used, changed, {self._memory(place) for place in places}, str(func))
        if self.tape is not None:
            self.tape.append((func, args, kwargs, places))
        return result

    def _memory(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.kept[storage.data_ptr()] = storage
        return storage.data_ptr()

    def _follow(self, used: set[int], changed: set[int], new: set[int], name: str) -> None:
        here = self.current_stream()
        here.done[here] += 1
        for memory in used | changed:
            stream, when = self.written.get(memory, (here, 0))
            if here.done.get(stream, 0) < when:
                raise Hazard(f"{name} does not wait for what another stream writes")
        for memory in changed:
            if any(here.done.get(stream, 0) < when for stream, when in self.read.get(memory, {}).items()):
                raise Hazard(f"{name} overwrites what another stream may still read")
        for memory in new | changed:
            self.read[memory] = {}
            self.written[memory] = here, here.done[here]
            if "empty" in name:
                del self.written[memory]
        for memory in used:
            self.read.setdefault(memory, {})[here] = here.done[here]


class FakeTorch:
    """The module `torch` for code under test, with `cuda` instead of its own."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.empty(*args, **options)
