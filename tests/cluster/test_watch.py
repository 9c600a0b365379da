"""Reports of several engines are kept apart, whether or not the engines form a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moeserve.errors import Conflict
from tests.cluster.test_fleet import answers, fleet, some  # noqa: F401  (a fixture)

Open = Callable[..., Any]


@pytest.mark.parametrize("ep", ["on", "off"])
async def test_engines_do_not_overwrite_each_other(fleet: Open, ep: str) -> None:  # noqa: F811
    async with fleet(2, ep=ep) as front:
        assert await (await some(front, 8, 50)) == answers(8, 50)
        engines = front.stats.engines
        assert sorted(engines) == [0, 1]
        assert all(engine.steps >= 50 for engine in engines.values())
        assert [engine.last.dp_rank for _, engine in sorted(engines.items())] == [0, 1]
        assert [engine.host for engine in front.fleet.view.engines] == ["node-0", "node-0"]


@pytest.mark.parametrize("ep", ["on", "off"])
async def test_all_engines_are_traced(fleet: Open, ep: str) -> None:  # noqa: F811
    async with fleet(2, ep=ep) as front:
        view = front.monitor.view(front.state, front.ready)
        with pytest.raises(Conflict, match=r"no step ran within 0\.1 s"):
            await front.monitor.tracing.take(view, 0.1)
        streams = await some(front, 8, 800)
        for _ in range(3):
            trace = await front.monitor.tracing.take(view, 20.0)
            assert [rank.dp_rank for rank in trace.ranks] == [0, 1]
            assert not trace.missing
            assert all(
                {"plan", "run", "update"} <= {span.name for span in rank.events}
                for rank in trace.ranks
            )
            assert ep == "off" or trace.ranks[0].step == trace.ranks[1].step
        assert await streams == answers(8, 800)
