"""POST /v1/admin/trace: one step of every rank, in the trace event format of ui.perfetto.dev.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the
format.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from moeserve.cluster.view import FleetView
from moeserve.frontend.engine_monitor import Trace
from moeserve.messages import Traced
from moeserve.server.admin import check_admin
from moeserve.server.call import HttpCall


class TraceQuery(msgspec.Struct):
    """The URL's parameters of a trace."""

    timeout_s: Annotated[float, Meta(ge=0.1, le=60, description="seconds to wait for a step")] = (
        10.0
    )


class TraceItem(msgspec.Struct, kw_only=True):
    """A span of `dur` microseconds, or metadata (a name or a sort index) of a pid or tid."""

    name: str
    ph: str  # "X": a span; "M": metadata
    pid: int
    tid: int
    ts: float = 0.0
    dur: float | UnsetType = UNSET
    cat: str | UnsetType = UNSET
    args: dict[str, int | str] = {}


class TraceNotes(msgspec.Struct, kw_only=True):
    """The steps and ranks of a trace."""

    steps: dict[str, int]  # by engine, counted within its epoch
    missing: list[str]  # ranks that did not answer, as "engine.tp_rank"


class TraceFile(msgspec.Struct, kw_only=True, rename="camel"):
    """A file for ui.perfetto.dev."""

    trace_events: list[TraceItem]
    display_time_unit: str = "ms"
    other_data: TraceNotes


async def take_trace(call: HttpCall) -> web.StreamResponse:
    """Trace the next step on all ranks, for ui.perfetto.dev.

    Takes no body. Waits up to `timeout_s` seconds for a step.
    """
    check_admin(call)
    front, ready = call.context.serving()
    timeout_s = call.query(TraceQuery).timeout_s
    view = front.monitor.view(front.state, ready)
    return call.answer(trace_file(await front.monitor.tracing.take(view, timeout_s), view))


def trace_file(trace: Trace, view: FleetView) -> TraceFile:
    """Convert a trace: a process per rank, a thread per track. The first span begins at 0."""
    hosts = {engine.rank: engine.host for engine in view.engines}
    zeros_ns = _zeros_ns(trace.ranks, hosts)
    starts_ns = [
        event.start_ns - zeros_ns[hosts[rank.dp_rank]]
        for rank in trace.ranks
        for event in rank.events
    ]
    first_ns = min(starts_ns, default=0)
    items: list[TraceItem] = []
    for rank in trace.ranks:
        number = rank.dp_rank * view.tp + rank.tp_rank
        items += _rank_items(rank, number, zeros_ns[hosts[rank.dp_rank]] + first_ns)
    notes = TraceNotes(
        steps={str(rank.dp_rank): rank.step for rank in trace.ranks},
        missing=[f"{dp_rank}.{tp_rank}" for dp_rank, tp_rank in trace.missing],
    )
    return TraceFile(trace_events=items, other_data=notes)


def _zeros_ns(ranks: Iterable[Traced], hosts: Mapping[int, str]) -> dict[str, int]:
    """Return the time of the same moment on the clock of each machine.

    Clocks have different origins, but all engines begin the step at about the same time.
    """
    zeros_ns: dict[str, int] = {}
    for rank in ranks:
        begun_ns = [
            event.start_ns
            for event in rank.events
            if (event.track, event.name) == ("engine", "run")
        ]
        if begun_ns:
            zeros_ns.setdefault(hosts[rank.dp_rank], begun_ns[0])
    return {host: zeros_ns.get(host, 0) for host in hosts.values()}


def _rank_items(rank: Traced, number: int, start_ns: int) -> Iterator[TraceItem]:
    pid = number + 1  # 0 is no process
    title = f"rank {number} (engine {rank.dp_rank}, tp {rank.tp_rank})"
    yield TraceItem(name="process_name", ph="M", pid=pid, tid=0, args={"name": title})
    yield TraceItem(name="process_sort_index", ph="M", pid=pid, tid=0, args={"sort_index": number})
    # The engine's own track, then each micro-batch with its transfers below it.
    tracks = sorted(
        {event.track for event in rank.events}, key=lambda track: (track.partition(" ")[2], track)
    )
    tids = {track: tid for tid, track in enumerate(tracks, 1)}
    for track, tid in tids.items():
        yield TraceItem(name="thread_name", ph="M", pid=pid, tid=tid, args={"name": track})
        yield TraceItem(
            name="thread_sort_index", ph="M", pid=pid, tid=tid, args={"sort_index": tid}
        )
    for event in rank.events:
        yield TraceItem(
            name=event.name,
            ph="X",
            pid=pid,
            tid=tids[event.track],
            ts=(event.start_ns - start_ns) / 1000,
            dur=(event.end_ns - event.start_ns) / 1000,
            cat=event.track.split()[0],
            args={"layer": event.layer} if event.layer >= 0 else {},
        )
