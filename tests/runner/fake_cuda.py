"""CUDA's streams, events and graphs on a CPU: everything runs at once, but races raise Hazard.

Two accesses to the same memory must be ordered by events. Freed memory goes to the next tensor on
its stream, as in torch's allocator, so freeing memory that another stream may still use fails as
well. Each thread has its own current stream, as in torch.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

ASKS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
)


class Hazard(AssertionError):
    """An access that another stream's access may overtake."""


class Unjoined(Hazard, RuntimeError):
    """CUDA's error at the end of a capture, whatever else went wrong in it."""


class Stream:
    """A stream.

    `done` has, for each stream, how many of its accesses precede the next one here. The next one
    begins at `now_ms` or later, and takes `pace_ms`.
    """

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.done: dict[Stream, int] = {self: 0}
        self.now_ms = 0.0
        self.pace_ms = 1.0

    def wait_event(self, event: Event) -> None:
        _merge(self.done, event.done)
        self.now_ms = max(self.now_ms, event.at_ms)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.done = dict(other.done)
        event.at_ms = other.now_ms
        self.wait_event(event)


class Event:
    cuda: FakeCuda

    def __init__(self, **options: bool) -> None:
        self.done: dict[Stream, int] = {}
        self.at_ms = 0.0

    def record(self) -> None:
        here = self.cuda.current_stream()
        self.done = dict(here.done)
        self.at_ms = here.now_ms

    def synchronize(self) -> None:
        if self.cuda.tape is not None:
            raise Hazard("waits for an event while a graph is captured")
        assert self.done, "waited for an event that was never recorded"
        _merge(self.cuda.host, self.done)

    def query(self) -> bool:
        """Return whether the host has waited for it, or for a later event."""
        if self.cuda.tape is not None:
            raise Hazard("asks for an event while a graph is captured")
        return all(self.cuda.host.get(stream, 0) >= count for stream, count in self.done.items())

    def elapsed_time(self, end: Event) -> float:
        assert self.query(), "nobody has waited for it"
        assert end.query(), "nobody has waited for the end"
        return end.at_ms - self.at_ms


class Pool:
    """Memory that graphs share. As in torch, it ends with its last graph."""

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.is_used = False


class Graph:
    """Recorded calls of torch, to be repeated with results in the same memory.

    Until a replay that memory has no valid contents.
    """

    cuda: FakeCuda

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        assert pool.graphs or not pool.is_used, "records into a pool whose last graph is gone"
        pool.graphs.add(self)
        pool.is_used = True
        assert self.cuda.tape is None, "captures two graphs at once"
        here = self.cuda.current_stream()
        assert here is not self.cuda.default, "captures on the default stream"
        here.done[here] += 1
        self.cuda.tape = []
        self.cuda.capturing = self
        self.cuda.begun = (here, here.done[here])
        self.cuda.captured = {}

    def capture_end(self) -> None:
        assert self.cuda.tape is not None
        self.tape = self.cuda.tape
        self.cuda.tape = None
        self.cuda.capturing = None
        done = self.cuda.current_stream().done
        if any(done.get(stream, 0) < when for stream, when in self.cuda.captured.items()):
            raise Unjoined("a capture ends before it has waited for all of its streams")
        for _, _, _, places in self.tape:
            for place in places:
                place.fill_(
                    torch.nan
                    if place.is_floating_point()
                    else 255
                    if place.itemsize == 1
                    else -(1 << 30)
                )

    def replay(self) -> None:
        for func, args, kwargs, places in self.tape:
            results = tree_leaves(func(*args, **kwargs))
            for place, result in zip(places, results, strict=bool(places)):
                place.copy_(result)


def _merge(done: dict[Stream, int], more: dict[Stream, int]) -> None:
    for stream, count in more.items():
        done[stream] = max(done.get(stream, 0), count)


class _Thread(threading.local):
    """A thread's streams, the current one last, and whether its accesses are watched."""

    def __init__(self, default: Stream) -> None:
        self.stack = [default]
        self.is_watched = False


class _Watch(TorchDispatchMode):
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.cuda.call(func, args, kwargs or {})


class FakeCuda:
    """Stands in for `torch.cuda`.

    In threads that are `watching`, every access to a tensor's memory is checked.
    """

    device = "cpu"

    def __init__(self) -> None:
        self.default = Stream()
        self._thread = _Thread(self.default)
        # What the host has waited for: it precedes all later launches.
        self.host: dict[Stream, int] = {}
        self.tape: list[tuple[Any, Any, Any, Sequence[Tensor]]] | None = None
        self.capturing: Graph | None = None
        self.begun = self.default, 0  # stream and position at which the capture began
        self.captured: dict[Stream, int] = {}  # each stream's last access in the capture
        # Keeps memory alive, so that no address is reused unnoticed.
        self.kept: dict[int, torch.UntypedStorage] = {}
        self.made: dict[int, Stream] = {}  # stream on which memory was allocated
        self.written: dict[int, tuple[Stream, int]] = {}
        self.read: dict[int, dict[Stream, int]] = {}
        self.peak_bytes: int | None = None  # None until the peak is measured
        self.Stream = Stream
        self.Event = type("Event", (Event,), {"cuda": self})
        self.CUDAGraph = type("CUDAGraph", (Graph,), {"cuda": self})

    def graph_pool_handle(self) -> Pool:
        return Pool()

    def empty_cache(self) -> None: ...

    def memory_allocated(self, device: Any = None) -> int:
        return sum(storage.nbytes() for storage in self.kept.values())

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.peak_bytes = self.memory_allocated()

    def max_memory_allocated(self, device: Any = None) -> int:
        return self.peak_bytes

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def is_current_stream_capturing(self) -> bool:
        return self.tape is not None

    def current_stream(self) -> Stream:
        return self._thread.stack[-1]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread's accesses; nesting makes no difference."""
        if self._thread.is_watched:
            yield
            return
        self._thread.is_watched = True
        try:
            with _Watch(self):
                yield
        finally:
            self._thread.is_watched = False

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._thread.stack.append(stream)
        try:
            yield
        finally:
            self._thread.stack.pop()

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Stand in for Tensor.record_stream: the allocator no longer reuses the memory."""
        self.made.pop(tensor.untyped_storage().data_ptr(), None)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run and check a call of torch in a watched thread."""
        if self.tape is not None and func is torch.ops.aten._local_scalar_dense.default:
            raise Hazard("asks the device while a graph is captured")
        _merge(self.current_stream().done, self.host)
        if self.tape is None:  # a graph keeps its memory
            self._free(self.current_stream())
        result = func(*args, **kwargs)
        named = zip(func._schema.arguments, args, strict=False)
        named_too = [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        changed: set[int] = set()
        used: set[int] = set()
        for argument, value in [*named, *named_too]:
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    into = (
                        changed
                        if argument.alias_info is not None and argument.alias_info.is_write
                        else used
                    )
                    into.add(self._memory(tensor))
        places = [
            t
            for t in tree_leaves(result)
            if isinstance(t, Tensor) and self._memory(t) not in changed | used
        ]
        if self.peak_bytes is not None:
            self.peak_bytes = max(self.peak_bytes, self.memory_allocated())
        if places or changed:  # otherwise the call only makes a view
            self._follow(used, changed, {self._memory(place) for place in places}, str(func))
        if self.tape is not None:
            self.tape.append((func, args, kwargs, places))
        return result

    def collective(self, run: Callable[[], None], mine: Tensor, out: Tensor, name: str) -> None:
        """Run a library's collective on the current stream, now or at each replay."""

        def follow() -> None:
            self._follow({self._memory(mine)}, {self._memory(out)}, set(), name)

        def again() -> None:
            follow()
            with _disable_current_modes():  # Gloo's waiting cannot be watched
                run()

        if self.tape is None:
            again()
            return
        follow()
        self.tape.append((again, (), {}, ()))

    def _memory(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.kept[storage.data_ptr()] = storage
        return storage.data_ptr()

    def _free(self, here: Stream) -> None:
        """Free memory for the next tensors of this stream."""
        for memory in [memory for memory, stream in self.made.items() if stream is here]:
            if torch._C._storage_Use_Count(self.kept[memory]._cdata) > 1:  # type: ignore[attr-defined]
                continue
            uses = dict([self.written[memory]]) if memory in self.written else {}
            for stream, when in [*uses.items(), *self.read.get(memory, {}).items()]:
                if here.done.get(stream, 0) < when:
                    raise Hazard("memory was freed that another stream may still use")
            for known in (self.made, self.kept, self.written, self.read):
                known.pop(memory, None)

    def _capture(self, here: Stream, name: str) -> None:
        if self.tape is not None:
            stream, when = self.begun
            if here.done.get(stream, 0) < when:
                raise Hazard(f"{name} runs on a stream that is not part of the capture")
            self.captured[here] = here.done[here]

    def _follow(self, used: set[int], changed: set[int], new: set[int], name: str) -> None:
        here = self.current_stream()
        here.done[here] += 1
        here.now_ms += here.pace_ms
        self._capture(here, name)
        for memory in used | changed:
            stream, when = self.written.get(memory, (here, 0))
            if here.done.get(stream, 0) < when:
                raise Hazard(f"{name} does not wait for what another stream writes")
        for memory in changed:
            if any(
                here.done.get(stream, 0) < when
                for stream, when in self.read.get(memory, {}).items()
            ):
                raise Hazard(f"{name} overwrites what another stream may still read")
        for memory in new:
            self.made[memory] = here
        for memory in new | changed:
            self.read[memory] = {}
            self.written[memory] = here, here.done[here]
            if "empty" in name:
                del self.written[memory]
        for memory in used:
            self.read.setdefault(memory, {})[here] = here.done[here]


class Devices:
    """Stands in for `torch.cuda` of ranks that are threads: each uses its own device."""

    def __init__(self, number: int) -> None:
        self.each = [FakeCuda() for _ in range(number)]
        self._thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.here(), name)

    def here(self) -> FakeCuda:
        """The device of this thread."""
        return self._thread.device  # type: ignore[no-any-return]

    @property
    def is_capturing(self) -> bool:
        device = getattr(self._thread, "device", None)
        return device is not None and device.tape is not None

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        self._thread.device = self.each[index]
        with self.here().watching():
            yield


def refuse_to_wait(patch: pytest.MonkeyPatch, devices: Devices) -> None:
    """Make reading a tensor's values fail while a graph is captured."""

    def refusing(name: str, asked: Callable[..., Any]) -> Callable[..., Any]:
        def ask(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if devices.is_capturing:
                raise Hazard(f"asks the device while a graph is captured, by {name}")
            return asked(tensor, *args, **kwargs)

        return ask

    for name in ASKS:
        patch.setattr(Tensor, name, refusing(name, getattr(Tensor, name)))


class FakeTorch:
    """Stands in for the module `torch` of code under test, with another `cuda`."""

    def __init__(self, cuda: FakeCuda | Devices) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.empty(*args, **options)
